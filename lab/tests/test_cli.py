"""The command line: what it prints, what it refuses and how, and that it stays light."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stand_ins import RECIPE, python

from fastcaps_lab import cli, training
from fastcaps_lab.training import recipe, recipes, tables


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_lists_need_no_lightning() -> None:
    heavy = "{'lightning', 'matplotlib', 'sklearn', 'tensorboard', 'torchmetrics'}"
    code = f"import sys, fastcaps, fastcaps_lab.cli, fastcaps_lab.data; heavy = {heavy}\n"
    code += "for words in ['recipes'], ['reproduce'], ['train', '--list']: fastcaps_lab.cli.main(words)\n"
    code += "print(heavy & set(sys.modules))"
    done = python(code, COLUMNS="80")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.endswith("\nset()\n") and max(map(len, done.stdout.splitlines())) <= 80
    listed = [line.split()[0] for line in done.stdout.splitlines() if line[0] != " "]
    assert [*recipes.names(), *tables.names()] == listed[:-3]


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(call(capsys, "train", "--list", "--json")[1])
    assert "digits" in listed["networks"] and "cifar100" in listed["data"]
    shown = json.loads(call(capsys, "recipes", "sabour-mnist", "--json")[1])
    assert shown["name"] == "sabour-mnist" and shown["config"]["network"]["name"] == "sabour-mnist"
    assert json.loads(call(capsys, "reproduce", "--json")[1])["sabour-table-1"].startswith("Sabour et al. 2017")
    assert recipes.read_yaml(call(capsys, "recipes", "sabour-mnist")[1]) == recipes.fields_of("sabour-mnist")


def test_wrong_command_lines_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ("train --epochs many", "Invalid value for '--epochs'"),
        ("trian", "No such command 'trian'."),
        ("train --network digits", "fastcaps: missing --data, or --recipe"),
        ("train --network digits --data digits --set lr", "--set lr: got no value, want FIELD=VALUE"),
        (
            "train --network digits --data digits --epochs 0",
            "fastcaps: epochs: Input should be greater than 0, got '0'",
        ),
        ("train --resume --out here", "fastcaps: --resume needs the folder of a run"),
        ("recipes sabour-mnits", "recipe: got 'sabour-mnits' (did you mean sabour-mnist?), want"),
        ("explain digit", "no network is called 'digit' (did you mean digits?)"),
    ):
        status, _, error = call(capsys, *command.split())
        assert status == 2 and message in error, (command, error)


def test_train_and_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With a user's recipe: only a run with the same settings goes on, not the recipe itself."""
    mine, out = tmp_path / "mine.yaml", tmp_path / "run"
    mine.write_text(RECIPE)
    command = ["train", "--recipe", str(mine), "--out", str(out)]
    changes = ["--set", "optimizer.lr=0.004", "--set", "loss={name: margin, upper: 0.8}", "--seed", "5"]
    status, printed, err = call(capsys, *command, *changes)
    assert (status, err) == (0, "")
    accuracy = 100 * json.loads((out / "result.json").read_text())["test_accuracy"]
    assert "epoch 1/1: training loss" in printed and f"test accuracy {accuracy:.2f} % after 1 epochs" in printed
    kept = json.loads((out / "config.json").read_text())
    assert (kept["seed"], kept["optimizer"]["lr"], kept["recipe"]) == (5, 0.004, str(mine))
    assert kept["loss"] == {"name": "margin", "upper": 0.8, "lower": 0.1, "down_weight": 0.5, "reconstruction": 0.0}
    status, printed, _ = call(capsys, "train", "--resume", str(out), "--set", "loss.upper=0.8", "--lr", "0.004")
    assert status == 0 and f"test accuracy {accuracy:.2f} % after 1 epochs" in printed
    assert json.loads((out / "config.json").read_text()) == kept
    for given, named in (
        (["--seed", "6"], "holds a run with other settings: seed is 5 there and 6 here; give"),
        (["--set", "loss.upper=0.7"], "loss.upper is 0.8 there and 0.7 here"),
        (["--recipe", str(mine)], "loss.name is margin there and cross-entropy here"),
    ):
        status, _, err = call(capsys, "train", "--resume", str(out), *given)
        assert status == 1 and named in err
    status, printed, err = call(capsys, *command, "--overwrite", "--json")
    assert status == 0 and json.loads((out / "config.json").read_text())["loss"]["name"] == "cross-entropy"
    assert json.loads(printed) == [{"out": str(out), **json.loads((out / "result.json").read_text())}]


def test_recipes_set_the_defaults_and_options_replace_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def stop(config: Any, **_: Any) -> None:
        seen.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(training, "train", stop, raising=False)
    monkeypatch.chdir(tmp_path)
    for command in (
        "--recipe tsai-iar-resnet-c10 --lr 0.05 --set schedule.at=[0.5]",
        "--network digits --data digits --data-dir here --loss margin",
    ):
        assert cli.main(["train", *command.split()]) == 2
    paper, quick = seen
    assert paper == recipe("tsai-iar-resnet-c10", {"optimizer.lr": 0.05, "schedule.at": (0.5,)}).config
    data = {"name": "digits", "dir": str(tmp_path / "here")}  # found again from any folder
    assert quick == training.TrainConfig.of(network="digits", data=data, loss="margin")


def test_explain_tells_of_every_call_of_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("explain", "digits", "--batch", "3", "--set", "iterations=3", "--backend", "reference", "--json")
    status, out, _ = call(capsys, *arguments)
    printed = json.loads(out)
    assert status == 0 and [one["backend"] for one in printed["calls"]] == ["reference"] * 5
    assert all(one["call"].startswith("batch 3, ") for one in printed["calls"])
    status, out, _ = call(capsys, "explain", "heinsen-sst2")  # a network of texts
    assert status == 0 and "2 routing calls" in out and "[1] " in out and "  not " in out
    status, out, _ = call(capsys, "explain", "digits", "--backend", "cuda")  # on the CPU
    assert status == 1 and "nothing: backend 'cuda' is forced and cannot take this call" in out
