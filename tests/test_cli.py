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


def test_help_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys)
    assert status == 2
    assert "demo" in out and "train" in out and "info" in out


def test_wrong_options_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--epochs", "many"])
    assert caught.value.code == 2
    assert "argument --epochs: invalid int value: 'many'" in capsys.readouterr().err


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
        (["--network", "lstm", "--data", "digits"], "network.name: got 'lstm', want one of"),
        (["--network", "mnits", "--data", "digits"], "network.name: got 'mnits' (did you mean mnist?), want one of"),
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

    status, printed, _ = call(capsys, "train", "--resume", "--out", str(out))
    assert status == 0 and f"test accuracy {accuracy:.2f} % after 1 epoch of" in printed
    assert json.loads((out / "config.json").read_text())["network"]["options"] == {"iterations": 3}

    status, _, err = call(capsys, "train", "--resume", "--out", str(out), "--seed", "6")
    assert status == 1 and "--seed 6 does not agree with the run" in err and "began with 5" in err
    status, _, err = call(capsys, "train", "--resume", "--out", str(out), "--iterations", "1")
    assert status == 1 and "--iterations 1 does not agree" in err
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
    assert status == 130 and f"stopped; fastcaps train --resume --out {tmp_path / 'run'} goes on" in err


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [("train", "lightning", "train"), ("demo", "lightning", "train"), ("demo", "matplotlib", "demo")],
)
def test_missing_extras_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("training", "callbacks", "demo", "viz"):
        for loaded in [each for each in sys.modules if f"{each}.".startswith(f"fastcaps.{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.delattr(fastcaps, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # an import of it raises now
    status, _, err = call(capsys, command)
    assert status == 1
    assert f"{module} is not installed; install it with: pip install 'fastcaps[{extra}]'" in err
