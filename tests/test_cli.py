"""The command line: what it prints, what it refuses and how, and that it stays light."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastcaps
from fastcaps import cli


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def train_digits(out: Path, *more: str) -> list[str]:
    """Arguments of a run of seconds."""
    few = ["--epochs", "1", "--limit", "128", "--accelerator", "cpu"]
    return ["train", "--network", "digits", "--data", "digits", "--out", str(out), *few, *more]


def test_a_plain_import_is_light_and_finds_every_part() -> None:
    heavy = "{'lightning', 'matplotlib', 'rich', 'sklearn', 'tensorboard', 'torchmetrics'}"
    parts = "fastcaps.data.load, fastcaps.training.train, fastcaps.viz, fastcaps.nn, fastcaps.losses"
    code = f"import sys, fastcaps, fastcaps.cli, fastcaps.data; print({heavy} & set(sys.modules), len(({parts})))"
    done = python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "set() 5"), done.stderr


def test_as_a_module_on_a_terminal_without_our_signs() -> None:
    done = python("-m", "fastcaps", "train", "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "cifar10" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--epochs", "many"], "Invalid value for '--epochs': 'many' is not a valid int"),
        (["trian"], "fastcaps trian: No such command 'trian'."),
    ],
)
def test_wrong_command_lines_exit_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys)
    assert status == 2 and all(name in out for name in cli.commands())
    for name in cli.commands():
        status, out, err = call(capsys, name, "--help")
        assert (status, err) == (0, "") and f"fastcaps {name}" in out


# --- info ------------------------------------------------------------------------------------------------------------


def test_info_names_every_backend_and_explains_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "info")
    assert status == 0 and all(str(entry) in out for entry in fastcaps.backends.listing())
    if fastcaps.backends.native_serves():
        assert re.search(r"^  cuda +(toolkit: [\d.]+; architectures: |none: )", out, re.MULTILINE)
    with fastcaps.backend("reference"):
        status, out, _ = call(capsys, "info", "--json", "--dtype", "float64")
    told = json.loads(out)
    assert status == 0 and set(told["backends"]) == set(fastcaps.backends.NAMES)
    assert told["explain"].startswith("reference: forced") and "not cuda" in told["explain"]
    status, out, _ = call(capsys, "info", "--dtype", "int32")
    assert status == 0 and "no such call: children must have one of the dtypes float32" in out
    status, _, err = call(capsys, "info", "--dtype", "float31")
    assert status == 1 and "--dtype float31: not a dtype of torch" in err


# --- train -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing --network and --data"),
        (["--network", "digits"], "missing --data, or --recipe (fastcaps train --list"),
        (["--network", "lstm", "--data", "digits"], "network.name: got 'lstm', want a network of"),
        (["--network", "digits", "--data", "mnist"], "MNIST needs a data directory"),
        (["--network", "digits", "--data", "emnist"], "the data set 'emnist' is not in this fastcaps; there are mnist"),
        (["--network", "digits", "--data", "mnist", "--data-dir", "absent-folder"], "absent-folder: no such folder"),
        (["--network", "mnist", "--data", "digits", "--routing", "random"], "network mnist cannot be built for digits"),
        (["--network", "digits", "--data", "digits", "--set", "epochs=["], "--set epochs=[: line 1: expected the node"),
        (["--network", "digits", "--data", "digits", "--set", "lr=1"], "lr: no such field (did you mean optimizer.lr?"),
        (["--network", "digits", "--data", "digits", "--accelerator", "tpu"], "accelerator 'tpu', devices '1'"),
        (["--network", "digits", "--data", "digits", "--resume"], "holds no run to resume"),
        (["--network", "digits", "--data", "digits", "--resume", "--overwrite"], "give one of them"),
        (["--resume", "here", "--out", "there"], "both name the run's folder: give one of them"),
        (["digits", "--data", "digits"], "digits: a folder stands after --resume alone"),
    ],
)
def test_train_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, "train", *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("fastcaps train: ") and message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


def test_demo_says_that_its_folder_cannot_be_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")
    (tmp_path / "file").write_text("")
    status, _, err = call(capsys, "demo", "--out", str(tmp_path / "file"), "--skip-speed")
    assert status == 1 and "file" in err and err.count("\n") == 1


def test_train_and_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    out = tmp_path / "run"
    status, printed, err = call(capsys, *train_digits(out, "--iterations", "3", "--seed", "5"))
    assert (status, err) == (0, "")
    accuracy = 100 * json.loads((out / "result.json").read_text())["test_accuracy"]
    assert "epoch 1/1: training loss" in printed
    assert f"test accuracy {accuracy:.2f} % after 1 epoch of" in printed
    kept = json.loads((out / "config.json").read_text())
    assert kept["network"]["options"] == {"iterations": 3} and kept["seed"] == 5 and kept["epochs"] == 1

    status, printed, _ = call(capsys, "train", "--resume", str(out))
    assert status == 0 and f"test accuracy {accuracy:.2f} % after 1 epoch of" in printed
    assert json.loads((out / "config.json").read_text())["network"]["options"] == {"iterations": 3}

    status, _, err = call(capsys, "train", "--resume", "--out", str(out), "--seed", "6")
    assert status == 1 and "--seed 6 does not agree with the run" in err and "began with 5" in err
    status, _, err = call(capsys, "train", "--resume", "--out", str(out), "--iterations", "1")
    assert status == 1 and "--iterations 1 does not agree" in err
    for given, named in (("data.flip=true", "--flip does"), ("optimizer.eps=0.5", "--set optimizer.eps=0.5 does")):
        status, _, err = call(capsys, "train", "--resume", "--out", str(out), "--set", given)
        assert status == 1 and f"{named} not agree" in err
    status, _, err = call(capsys, *train_digits(out))
    assert status == 1 and "holds a run already" in err
    status, printed, err = call(capsys, *train_digits(out, "--overwrite", "--json"))
    assert status == 0 and json.loads((out / "config.json").read_text())["network"]["options"] == {}
    assert json.loads(printed) == {"out": str(out), **json.loads((out / "result.json").read_text())}
    assert "epoch 1/1: training loss" in err


def test_recipes_set_the_defaults_and_options_replace_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from fastcaps import training

    seen: list[Any] = []

    def stop(config: Any, **_: Any) -> None:
        seen.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(training, "train", stop)
    monkeypatch.chdir(tmp_path)
    cli.main(
        ["train", "--recipe", "tsai-iar-resnet-c10", "--lr", "0.05", "--set", "schedule.at=[1/2]", "--data-dir", "x"]
    )
    cli.main(["train", "--network", "digits", "--data", "digits", "--data-dir", "here", "--set", "loss=margin"])
    paper, quick = seen
    assert (paper.epochs, paper.optimizer.name, paper.schedule.name) == (350, "sgd", "milestones")
    assert (paper.optimizer.lr, paper.schedule.at) == (0.05, (0.5,))
    assert str(paper.folder) == "runs/tsai-iar-resnet-c10"
    assert (quick.epochs, quick.optimizer.name, quick.loss.name) == (2, "adam", "margin")
    assert str(quick.folder) == "runs/digits-digits"
    assert quick.data.dir == str(tmp_path / "here")  # found again from any folder


def test_ctrl_c_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    from fastcaps import training

    def interrupted(*_: Any, **__: Any) -> None:
        raise SystemExit(1)  # what Lightning makes of Ctrl-C

    monkeypatch.setattr(training, "train", interrupted)
    status, _, err = call(capsys, *train_digits(tmp_path / "run"))
    assert status == 130 and f"stopped; fastcaps train --resume {tmp_path / 'run'} goes on" in err


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("train", "lightning", "train"), ("demo", "matplotlib", "demo"), ("bench", "pytest_benchmark", "bench")],
)
def test_missing_extras_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in (module, "bench")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("training", "callbacks", "demo", "viz"):
        for loaded in [each for each in sys.modules if f"{each}.".startswith(f"fastcaps.{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.delattr(fastcaps, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # an import of it raises now
    status, _, err = call(capsys, command)
    assert status == 1
    assert f"{module} is not installed; install it with: pip install 'fastcaps[{extra}]'" in err


# --- what every command keeps to --------------------------------------------------------------------------------------


def test_without_typer_one_line_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    status, out, err = call(capsys, "info")
    wanted = "fastcaps info: typer is not installed; install it with: pip install 'fastcaps[cli]'\n"
    assert (status, out, err) == (1, "", wanted)


def test_ctrl_c_anywhere_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fastcaps, "explain", interrupted)
    status, _, err = call(capsys, "info")
    assert (status, err) == (130, "fastcaps info: stopped\n")


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    listed = json.loads(call(capsys, "train", "--list", "--json")[1])
    assert "digits" in listed["networks"] and "cifar100" in listed["data"]
    assert "tsai-iar-simple-c10" in call(capsys, "train", "--list")[1]
    shown = json.loads(call(capsys, "recipes", "sabour-mnist", "--json")[1])
    assert shown["name"] == "sabour-mnist" and shown["settings"]["network"]["name"] == "sabour-mnist"
    assert json.loads(call(capsys, "reproduce", "--json")[1])["sabour-table-1"].startswith("Sabour et al. 2017")


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_tells_of_every_call_of_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    arguments = ("explain", "digits", "--batch", "3", "--set", "iterations=3", "--backend", "reference", "--json")
    status, out, _ = call(capsys, *arguments)
    told = json.loads(out)
    assert status == 0 and told["batch"] == 3
    assert [one["backend"] for one in told["calls"]] == ["reference"] * 5
    assert all(one["call"].startswith("batch 3, ") for one in told["calls"])
    status, out, _ = call(capsys, "explain", "heinsen-sst2")  # a network of texts
    assert status == 0 and "2 routing calls" in out and "[1] " in out and "  not " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nets"], "no network is called 'nets'"),
        (["digits", "--dtype", "float31"], "--dtype float31: not a dtype of torch"),
        (["digits", "--backend", "gpu"], "'gpu'"),
        (["digits", "--set", "turns=3"], "turns"),
        (["digits", "--device", "abacus"], "--device: got abacus, but torch finds no such device here"),
        (["digits", "--dtype", "int8"], "only accepts floating point"),
    ],
)
def test_explain_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, out, err = call(capsys, "explain", *arguments)
    assert (status, out) == (1, "") and message in err and err.count("\n") == 1


# --- bench and compare -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["bench"], ["compare", "main"]])
def test_without_a_checkout_bench_says_where_it_lies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.setattr(fastcaps, "__file__", str(tmp_path / "fastcaps" / "__init__.py"))
    status, out, err = call(capsys, *command)
    assert (status, out) == (1, "") and "lies in the source checkout" in err and err.count("\n") == 1


def test_bench_lists_and_refuses(capfd: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(call(capfd, "bench", "--list", "--json")[1])
    assert "sabour-mnist" in listed["workloads"] and "folded-matmul" in listed["alternatives"]
    for arguments, message in (
        (["--against", "jax"], "--against: got jax, want some of batched-matmul"),
        (["--html", "nowhere/page.html"], "--html: there is no folder "),
    ):
        status, out, err = call(capfd, "bench", *arguments)
        assert (status, out) == (1, "") and message in err and err.count("\n") == 1


@pytest.mark.slow  # it starts a process for each contender
def test_bench_measures_and_writes_the_page(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # a worker of pytest-xdist marks its children as workers too, and pytest-benchmark then measures nothing
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    page, few = tmp_path / "page.html", ("--batch", "1", "--against", "batched-matmul", "--threads", "1", "--no-goals")
    status, out, err = call(
        capfd, "bench", "tiny-attention", *few, "--results", str(tmp_path), "--html", str(page), "--json"
    )
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [(row["workload"], row["batch"], row["mode"]) for row in rows] == [
        ("tiny-attention", 1, "forward"),
        ("tiny-attention", 1, "training step"),
    ]
    assert all(row["fastcaps"]["median"] > 0 and set(row["alternatives"]) == {"batched-matmul"} for row in rows)
    assert "<svg" in page.read_text() and len(list(tmp_path.glob("*.json"))) == 1
    status, out, _ = call(capfd, "bench", "--seconds", "-1", "--results", str(tmp_path))
    assert status == 1 and "--seconds -1: no row was begun" in out
