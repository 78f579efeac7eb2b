"""The command line: what it prints, what it refuses and how, and that it stays light."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from stand_ins import RECIPE, python

import fastcaps
from fastcaps_lab import cli
from fastcaps_lab.cli import train
from fastcaps_lab.cli.app import app


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_a_plain_import_is_light_and_finds_every_part() -> None:
    heavy = "{'lightning', 'matplotlib', 'rich', 'sklearn', 'tensorboard', 'torchmetrics'}"
    parts = "fastcaps_lab.data.load, fastcaps_lab.training.train, fastcaps_lab.viz, fastcaps.nn, fastcaps.losses"
    code = f"import sys, fastcaps, fastcaps_lab.cli, fastcaps_lab.data; print({heavy} & set(sys.modules))\n"
    lists = ["recipes"], ["reproduce"], ["train", "--list"]  # without Lightning
    code += f"for words in {lists}: fastcaps_lab.cli.main(words)\n"
    code += f"print(({heavy} - {{'rich'}}) & set(sys.modules), ({parts}) and '')"
    done = python(code, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and not done.stderr, done.stderr  # on a terminal without our signs, too
    assert done.stdout.startswith("set()\n") and done.stdout.endswith("\nset() \n") and "sabour-mnist" in done.stdout


def test_wrong_command_lines_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ("train --epochs many", "Invalid value for '--epochs': 'many' is not a valid int"),
        ("train --epochs", "Option '--epochs' requires an argument. (fastcaps train --help)"),
        ("trian", "fastcaps trian: No such command 'trian'."),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(command.split())
        assert caught.value.code == 2 and message in capsys.readouterr().err


def test_every_list_fits_80_columns_and_breaks_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("train --list", "recipes", "reproduce", "train --help"):
        out = call(capsys, *command.split())[1]
        assert max(map(len, out.splitlines())) <= 80, command
    assert "tsai-iar-resnet-c100" in call(capsys, "train", "--list")[1].replace(",", " ").split()


def test_help_shows_the_settings_defaults() -> None:
    from fastcaps_lab import demo
    from fastcaps_lab.training.config import defaults
    from fastcaps_lab.training.fields import flat

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown, values = {each.name: each.show_default for each in commands["train"].params}, flat(defaults())
    for option, path in train.PATHS.items():
        if values.get(path) not in (None, ""):
            assert shown[option] == str(values[path]), option
    assert {each.name: each.show_default for each in commands["demo"].params}["epochs"] == str(demo.EPOCHS)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_tab_completion_by_a_script_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of commands, their options, and values that the package knows; after an option that takes a file, of files."""
    script = call(capsys, "--show-completion", "bash")[1]
    for line, wanted in {
        "": "bench explain train recipes reproduce demo --show-completion --version --help",
        "re": "recipes reproduce",
        "train --fl": "--flip",
        "train --he": "--help",
        "train --precision bf16-": "bf16-mixed bf16-true",
        "train --loss ": "cross-entropy bce margin spread feedback",
        "train --network digi": "digits",
        "explain sabour-mn": "sabour-mnist",
        "reproduce --col": "--collect",
        "explain digits --device ": "cpu cuda",
        "train --out ": "",
    }.items():
        words = " ".join(f"'{word}'" for word in ("fastcaps", *line.split(" ")))
        asked = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _fastcaps; echo ${{COMPREPLY[@]}}"
        environment = {"PATH": str(tmp_path)}  # no Python to be found
        done = subprocess.run(
            [shutil.which("bash") or "", "-uc", script + asked], env=environment, capture_output=True, text=True
        )
        assert (done.stdout.split(), done.stderr) == (wanted.split(), ""), line


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_and_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a user's recipe: only a run with the same settings goes on, not the recipe itself."""
    mine, out = tmp_path / "mine.yaml", tmp_path / "run"
    mine.write_text(RECIPE)
    command = ["train", "--recipe", str(mine), "--out", str(out)]
    changes = ["--set", "optimizer.lr=0.004", "--set", "loss={name: margin, upper: 0.8}", "--seed", "5"]
    status, printed, err = call(capsys, *command, *changes)
    assert (status, err) == (0, "")
    accuracy = 100 * json.loads((out / "result.json").read_text())["test_accuracy"]
    assert "epoch 1/1: training loss" in printed and f"test accuracy {accuracy:.2f} % after 1 epoch of" in printed
    kept = json.loads((out / "config.json").read_text())
    assert (kept["seed"], kept["optimizer"]["lr"], kept["recipe"]) == (5, 0.004, str(mine))
    assert kept["loss"] == {"name": "margin", "upper": 0.8, "lower": 0.1, "down_weight": 0.5, "reconstruction": 0.0}
    status, printed, _ = call(capsys, "train", "--resume", str(out), "--set", "loss.upper=0.8", "--lr", "0.004")
    assert status == 0 and f"test accuracy {accuracy:.2f} % after 1 epoch of" in printed
    assert json.loads((out / "config.json").read_text()) == kept
    for given, named in (
        (["--seed", "6"], "holds a run with other settings: seed is 5 there and 6 here; give"),
        (["--iterations", "1"], "network.options.iterations is 2 there and 1 here"),
        (["--set", "data.flip=true"], "data.flip is None there and True here"),
        (["--set", "loss.upper=0.7"], "loss.upper is 0.8 there and 0.7 here"),
        (["--recipe", str(mine)], "loss.name is margin there and cross-entropy here and "),
        (["--set", "optimizer.lr"], "--set optimizer.lr: got no value, want FIELD=VALUE"),
    ):
        status, _, err = call(capsys, "train", "--resume", "--out", str(out), *given)
        assert status == 1 + named.startswith("--set") and named in err
    status, printed, err = call(capsys, *command, "--overwrite", "--json")
    assert status == 0 and json.loads((out / "config.json").read_text())["loss"]["name"] == "cross-entropy"
    assert json.loads(printed) == {"out": str(out), **json.loads((out / "result.json").read_text())}


def test_recipes_set_the_defaults_and_options_replace_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fastcaps_lab import training

    seen: list[Any] = []

    def stop(config: Any, **_: Any) -> None:
        seen.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(training, "train", stop)
    monkeypatch.chdir(tmp_path)
    for command in (
        "--recipe tsai-iar-resnet-c10 --lr 0.05 --set schedule.at=[1/2]",
        "--network digits --data digits --data-dir here --set loss=margin --no-flip",
    ):
        assert cli.main(["train", *command.split()]) == 2
    paper, quick = seen
    changes = {"optimizer.lr": 0.05, "schedule.at": (0.5,)}
    assert paper == training.recipe("tsai-iar-resnet-c10", changes).config
    data = {"name": "digits", "dir": str(tmp_path / "here"), "flip": False}  # found again from any folder
    assert quick == training.TrainConfig.of(network="digits", data=data, loss="margin")
    assert (str(paper.folder), str(quick.folder)) == ("runs/tsai-iar-resnet-c10", "runs/digits-digits")


def test_ctrl_c_exits_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What train and reproduce say besides is in test_training_abuse and test_training_tables."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fastcaps, "explain", stop)
    assert call(capsys, "explain", "digits") == (130, "", "fastcaps explain: stopped\n")


# --- what every command keeps to --------------------------------------------------------------------------------------


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(call(capsys, "train", "--list", "--json")[1])
    assert "digits" in listed["networks"] and "cifar100" in listed["data"]
    shown = json.loads(call(capsys, "recipes", "sabour-mnist", "--json")[1])
    assert shown["name"] == "sabour-mnist" and shown["settings"]["network"]["name"] == "sabour-mnist"
    assert json.loads(call(capsys, "reproduce", "--json")[1])["sabour-table-1"].startswith("Sabour et al. 2017")


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_tells_of_every_call_of_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("explain", "digits", "--batch", "3", "--set", "iterations=3", "--backend", "reference", "--json")
    status, out, _ = call(capsys, *arguments)
    printed = json.loads(out)
    assert status == 0 and printed["batch"] == 3
    assert [one["backend"] for one in printed["calls"]] == ["reference"] * 5
    assert all(one["call"].startswith("batch 3, ") for one in printed["calls"])
    status, out, _ = call(capsys, "explain", "heinsen-sst2")  # a network of texts
    assert status == 0 and "2 routing calls" in out and "[1] " in out and "  not " in out
    status, out, _ = call(capsys, "explain", "digits", "--backend", "cuda")  # on the CPU
    assert status == 1 and "nothing: backend 'cuda' is forced and cannot take this call" in out


# --- bench -----------------------------------------------------------------------------------------------------------


def test_bench_runs_pytest_in_the_checkout_and_shortens_its_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What its process says is written here; a real one is among the errors above."""
    monkeypatch.chdir(tmp_path)
    said, started = (1, ""), []

    def run(command: list[str], **options: Any) -> Any:
        started.append((command[1:], options["cwd"]))
        return subprocess.CompletedProcess(command, said[0], "", said[1])

    monkeypatch.setattr(subprocess, "run", run)
    assert call(capsys, "bench", "sabour-mnist", "--results", "rows", "--full") == (1, "", "")
    options = ["--workload=sabour-mnist", "--results", str(tmp_path / "rows"), "--full"]  # of another folder
    root = Path(fastcaps.__file__).parents[1]
    assert started == [(["-m", "pytest", "bench", "-q", *options], root)]
    said = 4, "ERROR: usage: pytest [options]\npytest: error: unrecognized arguments: --ful\n  inifile: a.toml\n"
    status, _, err = call(capsys, "bench", "--ful")
    assert (status, err) == (
        2,
        "fastcaps bench: No such option: --ful (did you mean --full?) (fastcaps bench --help)\n",
    )
    said = 0, ""
    assert call(capsys, "bench", "--list", "--json")[0] == 0
    assert started[2][0] == ["-m", "bench.alternatives", "--json"]


def test_without_a_checkout_bench_says_where_it_lies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fastcaps, "__file__", str(tmp_path / "fastcaps" / "__init__.py"))
    status, out, err = call(capsys, "bench")
    assert (status, out) == (1, "") and "only in a source checkout" in err and err.count("\n") == 1
