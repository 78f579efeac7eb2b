"""The papers' recipes and tables: each is whole, and one of digits is trained, stopped, resumed and collected."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from stand_ins import RECIPE, network_of

from fastcaps_lab import cli, models
from fastcaps_lab.training import recipe, recipes, tables
from fastcaps_lab.training.callbacks import Report
from fastcaps_lab.training.loss import Spread

pytestmark = pytest.mark.usefixtures("one_thread")
BUILT: dict[tuple[Any, ...], int] = {}


def parameters(config: Any) -> int:
    """Return the number of parameters of a run's network, which is built once for all recipes and rows that have it."""
    key = (repr(config.network), config.data.name, config.data.crop)
    if key not in BUILT:
        with torch.device("meta"):
            BUILT[key] = sum(p.numel() for p in network_of(config).parameters())
    return BUILT[key]


def test_every_recipe_is_whole() -> None:
    for name in recipes.names():
        read = recipe(name)
        assert {"network", "data", "loss", "optimizer", "schedule", "epochs", "batch_size"} <= {
            *recipes.fields_of(name)
        }
        assert re.search(r" (2017|2018|2019|2020), section \d|A.ii", read.source), name
        assert read.config.recipe == name and str(read.config.folder) == f"runs/{name}"
        assert parameters(read.config) > 10_000
        if getattr(models.config(read.config.network.name), "iterations", None) is not None:
            assert "iterations" in read.config.network.options, name  # the recipe says how many


def test_every_table_is_whole() -> None:
    """Its rows are recipes that build, in full and short."""
    for name in tables.names():
        table = tables.table(name)
        full, short = table.lines(Path("runs")), table.lines(Path("runs"), short=True)
        assert table.short and [line.label for line in full] == [line.label for line in short]
        for a, b in zip(full, short, strict=True):
            assert a.config.folder == b.config.folder and a.config.folder.parent == Path("runs")
            assert parameters(a.config) > 10_000 and parameters(b.config) > 10_000
            assert b.config.epochs < a.config.epochs or name == "heinsen-sst"
            assert a.paper is not None or a.row.note or "without values" in table.reading, (name, a.label)


# --- a table of digits -----------------------------------------------------------------------------------------------

TABLE = """
title: Digits
source: Somebody 2020, section 1, Table 1
claim: More iterations help.
measure: error
rows:
  - {{label: one iteration, recipe: {recipe}, name: one, set: {{network.options.iterations: 1}}, paper: 60}}
  - {{label: two iterations, recipe: {recipe}, name: two, set: {{runs: 2}}, paper: 40, spread: 1.5}}
short: {{epochs: 1, data.limit: 128}}
"""


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """The file of a small table."""
    recipe, table = tmp_path / "mine.yaml", tmp_path / "digits.yaml"
    recipe.write_text(f"{RECIPE.replace('epochs: 1', 'epochs: 2').replace('128', '256')}checkpoint_every: 5\n")
    table.write_text(TABLE.format(recipe=recipe))
    return table


def reproduce(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = cli.main(["reproduce", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_a_table_is_trained_and_collected(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = digits.parent / "out"
    status, shown, _ = reproduce(capsys, digits, "--short", "--out", out, "--row", "two iterations")
    assert status == 0 and "1 of 1: two iterations" in shown and "not run" in shown
    one, two = json.loads((out / "table.json").read_text())["rows"]
    results = [json.loads((out / "two" / f"seed-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    wrong = [100 * (1 - result["test_accuracy"]) for result in results]
    assert one["mean"] is None and one["values"] == [] and two["results"] == results and two["values"] == wrong
    assert two["mean"] == pytest.approx(sum(wrong) / 2) and two["settings"]["epochs"] == 1
    assert two["spread"] == pytest.approx(abs(wrong[0] - wrong[1]) / 2**0.5)
    ours, more = f"{two['mean']:.2f} ± {two['spread']:.2g}", f"{two['mean'] - 40:+.2f}"
    text = (out / "table.md").read_text()
    assert f"| two iterations | {ours} | 40.00 ± 1.5 | {more} | 1 × 128 | {results[0]['parameters']:,} |" in text
    assert "| one iteration | not run | 60.00 |  | 1 × 128 |  |" in text
    assert "Shortened: epochs 1, data.limit 128." in text
    (out / "two" / "seed-1" / "result.json").unlink()  # as if its seeds were run one by one, and this one still runs
    status, shown, _ = reproduce(capsys, digits, "--short", "--out", out, "--collect")
    assert status == 0 and "epoch 1/1" not in shown
    assert f"| {wrong[0]:.2f} (1 of 2 seeds) |" in (out / "table.md").read_text()


def test_a_table_that_was_stopped_goes_on_in_the_middle(
    digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise KeyboardInterrupt

    out = digits.parent / "out"
    command = [digits, "--row", "one iteration", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(Report, "on_train_batch_end", stop, raising=False)
        status, _, error = reproduce(capsys, *command)
    again = f"fastcaps reproduce {digits} --row 'one iteration' --out {out}"
    assert (status, error) == (130, f"fastcaps: stopped; to continue: {again}\n")
    status, shown, _ = reproduce(capsys, *command)
    assert status == 0 and "resumed after step 5" in shown and "epoch 1/2" not in shown and "epoch 2/2" in shown
    before = (out / "one" / "result.json").stat().st_mtime_ns
    status, shown, _ = reproduce(capsys, *command)  # what is finished is not touched
    assert status == 0 and "epoch 2/2" not in shown and (out / "one" / "result.json").stat().st_mtime_ns == before
    status, _, error = reproduce(capsys, *command, "--short")
    assert status == 1 and error.count("\n") == 1
    assert "one holds a run with other settings: data.limit is 256 there and 128 here, epochs is 2 " in error


WRONG = {
    "train --recipe mine.yaml": [
        (
            "lr: 1e-3",
            "lr: fast",
            "optimizer.lr: Input should be a valid number, unable to parse string as a number, got",
        ),
        (
            "lr: 1e-3",
            "weight_decy: 1",
            "optimizer: Value error, Adam.__init__() got an unexpected keyword argument 'wei",
        ),
        ("lr: 1e-3", "lr: .nan", "optimizer.lr: Input should be "),
        ("epochs: 2", "epochs: 0", "epochs: Input should be greater than 0, got '0'"),
        ("epochs: 2", "epoch: 1", "epoch: Extra inputs are not permitted, got '1'"),
        ("0.75]", "1.5]", "schedule.milestones.at.1: Input should be less than or equal to 1, got '1.5'"),
        ("name: digits, opt", "name: lstm, opt", "network: Value error, no network is called 'lstm'"),
        (
            "limit: 256",
            "limit: 256, pad: 2, resize: 9",
            "data: Value error, resize is 9 and pad is 2, want one of them",
        ),
        (
            "name: cross-entropy",
            "name: feedback, base: feedback",
            "loss.feedback.base: Input tag 'feedback' found using",
        ),
        ("network:", "network: [", "while parsing a flow "),
    ],
    "reproduce --collect digits.yaml": [
        ("measure: error", "measure: speed", "measure: Input should be 'error' or 'accuracy', got 'speed'"),
        (
            "paper: 60",
            "paper: [60, 50]",
            "digits.yaml: Value error, row 'one iteration' has 2 values of the paper, want 1",
        ),
        ("paper: 60", "papers: 60", "rows.0.papers: Extra inputs are not permitted, got '60'"),
        ("name: two", "name: ..", "row 'two iterations': name: got '..', want letters"),
    ],
}


@pytest.mark.parametrize("command", WRONG)
def test_what_is_wrong_in_a_file_is_told_in_one_line(
    digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(digits.parent)
    path = Path(command.split()[-1])
    text = path.read_text()
    for old, new, message in WRONG[command]:
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        assert cli.main(command.split()) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("fastcaps: ") and message in shown and shown.count("\n") == 1, shown


def test_a_base_gives_what_a_recipe_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{base: li-capnet-ce-sgd, optimizer: {lr: 0.5}, loss.name: spread, data.options.seed: 3}")
    mine, paper = recipe(str(path)), recipe("li-capnet-ce-sgd")
    assert not mine.source and not mine.reading and mine.config.recipe == str(path)
    changes = {"optimizer.lr": 0.5, "loss": Spread().model_dump(), "data.options": {"seed": 3}, "recipe": str(path)}
    assert mine.config == paper.config.changed(changes)
    path.write_text(yaml.safe_dump(recipes.fields_of("li-capnet-ce-sgd")))
    assert recipe(str(path)).config == paper.config.changed({"recipe": str(path)})
    for text, message in (
        ("{base: sabour-mnist, on: 3}", "mine.yaml: True: Extra inputs are not permitted"),
        ("base: tsai", "recipe: got 'tsai', want one of fastcaps recipes"),
        ("junk", "got 'junk', want a mapping of fields"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            recipe(str(path))
    with pytest.raises(ValueError, match=r"nowhere\.yaml', want an existing file"):
        recipe(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ValueError, match=r"got 'sabour-table' \(did you mean sabour-table-1\?\)"):
        tables.table("sabour-table")
