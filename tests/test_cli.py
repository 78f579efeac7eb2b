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


def test_import_and_help_are_light() -> None:
    heavy = "{'lightning', 'matplotlib', 'rich', 'sklearn', 'tensorboard', 'torchmetrics'}"
    done = python("-c", f"import sys, fastcaps, fastcaps.cli, fastcaps.data; print({heavy} & set(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_parts_are_there_after_a_plain_import() -> None:
    parts = "fastcaps.data.load, fastcaps.training.train, fastcaps.viz, fastcaps.nn, fastcaps.losses"
    done = python("-c", f"import fastcaps; print(len(({parts})))")
    assert (done.returncode, done.stdout.strip()) == (0, "5"), done.stderr


def test_as_a_module() -> None:
    done = python("-m", "fastcaps", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"fastcaps {fastcaps.__version__}")


def test_a_terminal_without_our_signs_gets_all_others() -> None:
    done = python("-m", "fastcaps", "train", "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "cifar10" in done.stdout and not done.stderr


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys)
    assert status == 2
    assert "demo" in out and "train" in out and "info" in out


def test_wrong_options_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--epochs", "many"])
    assert caught.value.code == 2
    assert "Invalid value for '--epochs': 'many' is not a valid int" in capsys.readouterr().err


# --- info ------------------------------------------------------------------------------------------------------------


def test_info_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "info")
    assert status == 0
    for entry in fastcaps.backends.listing():
        assert str(entry) in out
    assert f"fastcaps {fastcaps.__version__}" in out
    if fastcaps.backends.native_serves():
        assert re.search(r"^  cuda +(toolkit: [\d.]+; architectures: |none: )", out, re.MULTILINE)


def test_info_as_json_explains_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    with fastcaps.backend("reference"):
        status, out, _ = call(capsys, "info", "--json", "--dtype", "float64")
    told = json.loads(out)
    assert status == 0
    assert set(told["backends"]) == set(fastcaps.backends.NAMES)
    assert told["explain"].startswith("reference: forced")
    assert "not cuda" in told["explain"]


def test_info_refuses_what_is_no_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "info", "--dtype", "float31")
    assert status == 1 and "--dtype float31: not a dtype of torch" in err


def test_info_says_when_there_is_no_such_call(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "info", "--dtype", "int32")
    assert status == 0 and "no such call: children must have one of the dtypes float32" in out


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "train", "--list")
    assert status == 0
    assert "tsai-iar-simple-c10" in out and "cifar100" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing --network and --data"),
        (["--network", "digits"], "missing --data, or --recipe (fastcaps train --list"),
        (["--network", "lstm", "--data", "digits"], "network.name: got 'lstm', want a network of"),
        (
            ["--network", "mnits", "--data", "digits"],
            "network.name: got 'mnits' (did you mean mnist?), want a network of",
        ),
        (["--network", "digits", "--data", "mnist"], "MNIST needs a data directory"),
        (["--network", "digits", "--data", "emnist"], "the data set 'emnist' is not in this fastcaps; there are mnist"),
        (["--network", "digits", "--data", "mnist", "--data-dir", "absent-folder"], "absent-folder: no such folder"),
        (["--network", "mnist", "--data", "digits", "--routing", "random"], "network mnist cannot be built for digits"),
        (["--network", "digits", "--data", "digits", "--lr", "-1"], "lr: got -1.0"),
        (["--network", "digits", "--data", "mnist", "--set", "data.dir=[1]"], "data.dir: got [1], want text"),
        (["--network", "digits", "--data", "digits", "--set", "epochs=["], "--set epochs=[: line 1: expected the node"),
        (["--network", "digits", "--data", "digits", "--set", "name=mine"], "name: no such field, want one of network"),
        (["--network", "digits", "--data", "digits", "--set", "lr=1"], "lr: no such field (did you mean optimizer.lr?"),
        (["--network", "digits", "--data", "digits", "--accelerator", "tpu"], "accelerator 'tpu', devices '1'"),
        (["--network", "digits", "--data", "digits", "--resume"], "holds no run to resume"),
        (["--network", "digits", "--data", "digits", "--resume", "--overwrite"], "give one of them"),
        (["--resume", "absent-folder"], "absent-folder holds no run to resume"),
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
    status, _, _ = call(capsys, *train_digits(out, "--overwrite"))
    assert status == 0 and json.loads((out / "config.json").read_text())["network"]["options"] == {}


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
    assert (paper.epochs, paper.batch_size, paper.optimizer.name, paper.schedule.name) == (
        350,
        128,
        "sgd",
        "milestones",
    )
    assert (paper.optimizer.lr, paper.optimizer.weight_decay, paper.optimizer.momentum) == (0.05, 5e-4, 0.9)
    assert paper.schedule.at == (0.5,) and str(paper.folder) == "runs/tsai-iar-resnet-c10"
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
    [
        ("train", "lightning", "train"),
        ("demo", "lightning", "train"),
        ("demo", "matplotlib", "demo"),
        ("bench", "cpuinfo", "bench"),
    ],
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


def test_every_command_has_help_and_the_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("info", "bench", "compare", "explain", "train", "recipes", "reproduce", "demo"):
        status, out, err = call(capsys, name, "--help")
        assert (status, err) == (0, "") and f"fastcaps {name}" in out and "--json" in out


def test_a_command_that_is_not_there_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["trian"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("fastcaps trian: No such command 'trian'.")


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


def test_train_as_json_prints_the_result_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    status, out, err = call(capsys, *train_digits(tmp_path / "run", "--json"))
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert status == 0 and json.loads(out) == {"out": str(tmp_path / "run"), **kept}
    assert "epoch 1/1: training loss" in err


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    listed = json.loads(call(capsys, "train", "--list", "--json")[1])
    assert "digits" in listed["networks"] and "cifar100" in listed["data"]
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


def test_bench_says_that_it_measured_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = call(capsys, "bench", "--seconds", "-1", "--results", str(tmp_path))
    assert (status, out, err) == (1, "", "fastcaps bench: --seconds -1: no row was begun\n")


def test_bench_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(call(capsys, "bench", "--list", "--json")[1])
    assert "sabour-mnist" in listed["workloads"] and "folded-matmul" in listed["alternatives"]
    for arguments, message in (
        (["sabour-mnits"], "unknown workload 'sabour-mnits'"),
        (["--against", "jax"], "--against: got jax, want some of batched-matmul"),
        (["--device", "tpu"], "--device: got tpu, want cpu or cuda"),
        (["--precision", "fp8"], "--precision: got fp8, want some of fp32"),
        (["--html", "nowhere/page.html"], "--html: there is no folder nowhere"),
    ):
        status, out, err = call(capsys, "bench", *arguments)
        assert (status, out) == (1, "") and message in err and err.count("\n") == 1


@pytest.mark.slow  # it starts a process for each contender
def test_bench_measures_and_writes_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, few = tmp_path / "page.html", ("--batch", "1", "--against", "einsum", "--threads", "1", "--no-goals")
    status, out, err = call(
        capsys, "bench", "tiny-attention", *few, "--results", str(tmp_path), "--html", str(page), "--json"
    )
    rows = json.loads(out)
    assert (status, err) == (0, "")
    assert [(row["workload"], row["batch"], row["mode"]) for row in rows] == [
        ("tiny-attention", 1, "forward"),
        ("tiny-attention", 1, "training step"),
    ]
    assert all(row["fastcaps"]["median"] > 0 and set(row["alternatives"]) == {"einsum"} for row in rows)
    assert "<svg" in page.read_text() and len(list(tmp_path.glob("*.json"))) == 1


def test_bench_fails_where_a_result_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bench.session import Session

    def refused(self: Session, case: Any) -> None:
        self.rows.append(self.row(case) | {"refused": "parents are off by 1", "lost": []})

    monkeypatch.setattr(Session, "run", refused)
    status, _, err = call(capsys, "bench", "tiny-attention", "--results", str(tmp_path))
    assert status == 1 and "tiny-attention batch 1 forward: refused, parents are off by 1" in err


def test_compare_refuses_what_is_fast_and_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import compare

    wrong: list[str] = []

    class Pretender:
        """A side that answers at once; the newer one is four times as fast."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def call(self, _: float, method: str, *given: Any) -> Any:
            if method == "check":
                return {"complaint": "".join(wrong)}
            return {"seconds": 1.0, "some": {}} if method == "prepare" else [self.seconds] * given[0]

    rows = compare.rows_of(["tiny-attention"])
    monkeypatch.setattr(compare, "tree_of", lambda given: Path(given))
    monkeypatch.setattr(
        compare,
        "compare",
        lambda trees, rows, *more: (compare.measure([Pretender(4.0), Pretender(1.0)], *row, 0.1, 2) for row in rows),
    )
    status, out, _ = call(capsys, "compare", "main", "--workload", "tiny-attention", "--json")
    told = json.loads(out)
    assert status == 0 and told["passed"] and [row["ratio"] for row in told["rows"]] == [0.25] * len(rows)
    wrong.append("parents err by 1")
    status, out, _ = call(capsys, "compare", "main", "--workload", "tiny-attention")
    assert status == 1 and "refused: parents err by 1" in out and "0.250" not in out
    status, _, err = call(capsys, "compare", "main", "--workload", "no-such-row")
    assert status == 1 and "--workload: no row's name holds no-such-row" in err
