"""The papers' recipes and tables: each is whole, and one of digits is trained, stopped, resumed and collected."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from stand_ins import RECIPE, network_of

from fastcaps_lab import cli, models
from fastcaps_lab.training import SettingError, recipe, recipes, tables
from fastcaps_lab.training.fields import as_data, flat
from fastcaps_lab.training.files import read_yaml
from fastcaps_lab.training.folder import write_settings
from fastcaps_lab.training.loss import Spread

COUNTED: dict[tuple[Any, ...], int] = {}


def parameters(config: Any) -> int:
    """The number of parameters of a run's network, which is built once for all recipes and rows that have it."""
    key = (repr(config.network), config.data.name, config.data.crop)
    if key not in COUNTED:
        with torch.device("meta"):
            COUNTED[key] = sum(p.numel() for p in network_of(config).parameters())
    return COUNTED[key]


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_is_whole(name: str) -> None:
    read = recipe(name)
    given = recipes.fields_of(name)
    wanted = {"source", "network", "data", "loss", "metric", "optimizer", "schedule", "epochs", "batch_size"}
    assert wanted <= set(given)
    assert read.source is not None and re.search(r" (2017|2018|2019|2020)$", read.source.paper) and read.source.section
    assert read.config.recipe == name and str(read.config.folder) == f"runs/{name}"
    assert parameters(read.config) > 10_000
    config = models.config(read.config.network.name)
    if getattr(config, "iterations", None) is not None:  # where a network makes iterations, the recipe says how many
        assert "iterations" in read.config.network.options


@pytest.mark.parametrize("name", tables.names())
def test_every_table_is_whole(name: str) -> None:
    """Its rows are recipes that build, in full and short."""
    table = tables.table(name)
    assert re.search(r" (2017|2018|2019|2020)$", table.source.paper) and table.source.section
    full, short = table.lines(Path("runs")), table.lines(Path("runs"), short=True)
    assert table.runs_folder(Path("here") / f"{name}-short", name) == Path("here") / f"{table.beside or name}-short"
    assert table.short and [line.name for line in full] == [line.name for line in short]
    for line in (*full, *short):
        assert line.config.folder == Path("runs") / line.name and parameters(line.config) > 10_000
    if table.beside:  # the runs that it shares are the same there
        for mine, is_short in ((full, False), (short, True)):
            there = tables.table(table.beside).lines(Path("runs"), short=is_short)
            assert all(line.config in [other.config for other in there] for line in mine)
    for a, b in zip(full, short, strict=True):
        assert b.config.epochs < a.config.epochs or name == "heinsen-sst" or table.measure in ("memory", "time")
        assert flat(as_data(b.config)) | {"out": ""} != flat(as_data(a.config)) | {"out": ""}


# --- a table of digits -----------------------------------------------------------------------------------------------

TABLE = """
title: Digits
source: {{paper: Somebody 2020, section: "1", table: Table 1}}
claim: More iterations help.
measure: error
rows:
  - {{label: one iteration, recipe: {recipe}, name: one, set: {{network.options.iterations: 1}}, paper: 60}}
  - {{label: two iterations, recipe: {recipe}, name: two, set: {{runs: 2}}, paper: 40, spread: 1.5}}
short: {{epochs: 1, data.limit: 128}}
"""


pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_a_table_is_trained_and_collected(
    digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = digits.parent / "runs" / "digits.yaml"
    status, shown, _ = reproduce(capsys, digits, "--short", "--out", out, "--row", "two iterations")
    assert status == 0 and "1 of 1: two iterations" in shown and "not run" in shown
    record = json.loads((out / "table.json").read_text())
    one, two = record["rows"]
    results = [json.loads((out / "two" / f"seed-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    wrong = [100 * (1 - result["test_accuracy"]) for result in results]
    assert one["mean"] is None and one["spread"] is None and one["values"] == [] and two["results"] == results
    assert two["values"] == wrong and two["mean"] == pytest.approx(sum(wrong) / 2)
    assert two["spread"] == pytest.approx(abs(wrong[0] - wrong[1]) / 2**0.5)
    assert two["difference"] == pytest.approx(sum(wrong) / 2 - 40) and record["short"]
    assert two["settings"]["epochs"] == 1 and "out" not in two["settings"]
    shown = f"{sum(wrong) / 2:.2f} ± {two['spread']:.2g}"
    parameters = f"{results[0]['parameters']:,}"
    row = f"| two iterations | {shown} | 40.00 ± 1.5 | {two['difference']:+.2f} | 1 × 128 | {parameters} |"
    text = (out / "table.md").read_text()
    assert row in text and "| one iteration | not run | 60.00 |  | 1 × 128 |  |" in text
    assert "Shortened: epochs 1 (in full 2), data.limit 128 (in full 256)." in text
    assert (out / "picture.png").read_bytes().startswith(b"\x89PNG")

    import reproduction_page  # the page takes what runs have shown

    monkeypatch.chdir(digits.parent)
    monkeypatch.setattr(reproduction_page, "names", lambda: ["digits.yaml"])
    found = reproduction_page.collect(digits.parent / "runs", digits.parent / "pictures")
    marks = "".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in ("results", "settings"))
    page = reproduction_page.page(f"Said.\n{marks}", found)
    assert f"|  | two iterations | {shown} | 40.00 ± 1.5 | 1 × 128 | {results[0]['parameters']:,} |\n" in page
    assert "| `digits.yaml`: test error in % | one iteration | not run | 60.00 | 1 × 128 |  |\n" in page
    assert (
        "- **`digits.yaml`** (Somebody 2020, section 1, Table 1). The claim: More iterations help. Shortened: epochs 1"
        in page
    )
    same = found["digits.yaml"] | {"rows": found["digits.yaml"]["rows"][1:]}  # a figure of the same runs
    both = reproduction_page.page(page, found | {"a figure": same})
    assert "Shortened in every table, unless its line differs: epochs 1 (in full 2), data.limit 128" in both
    assert "More iterations help. The runs of `digits.yaml`.\n" in both and "`a figure`: " not in both
    assert "\n\nMade by fastcaps" in page and (digits.parent / "pictures" / "digits.yaml.png").exists()

    (out / "two" / "seed-1" / "result.json").unlink()  # as if its seeds were run one by one, and this one still runs
    (out / "two" / "result.json").unlink()
    status, shown, _ = reproduce(capsys, digits, "--short", "--out", out, "--collect")
    assert status == 0 and "epoch 1/1" not in shown
    (_, two) = json.loads((out / "table.json").read_text())["rows"]
    assert two["results"] == results[:1] and two["shown"]["ours"] == f"{wrong[0]:.2f} (1 of 2 seeds)"


def test_a_table_that_was_stopped_goes_on_in_the_middle(
    digits: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastcaps_lab.training.callbacks import Report

    def stop(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            raise KeyboardInterrupt

    out = digits.parent / "out"
    command = [digits, "--row", "one", "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(Report, "on_train_batch_end", stop)
        status, _, error = reproduce(capsys, *command)
    assert (status, error) == (
        130,
        f"fastcaps reproduce: stopped; to continue: fastcaps reproduce {digits} --row one --out {out}\n",
    )
    assert not (out / "one" / "result.json").exists()
    status, shown, _ = reproduce(capsys, *command)
    assert status == 0 and "resumed after step 5" in shown and "epoch 1/2" not in shown and "epoch 2/2" in shown
    before = (out / "one" / "result.json").stat().st_mtime_ns
    status, shown, _ = reproduce(capsys, *command)  # what is finished is not touched
    assert status == 0 and "epoch 2/2" not in shown and (out / "one" / "result.json").stat().st_mtime_ns == before
    for more in (["--short"], ["--set", "optimizer.lr=0.5"]):
        status, _, error = reproduce(capsys, *command, *more)
        assert status == 1 and error.count("\n") == 1
        assert f"{out / 'one'} holds a run with other settings: " in error
        assert ("data.limit is 256 there and 128 here and 1 more" in error) == (more == ["--short"])


@pytest.mark.slow
def test_memory_is_measured_where_votes_are_kept_and_where_not(
    digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = digits.with_name("mine.yaml"), digits.parent / "out"
    rows = ", ".join(
        f"{{label: {name}, recipe: {recipe}, name: {name}, eager: {eager}}}"
        for name, eager in (("plain", "true"), ("ours", "false"))
    )
    digits.write_text(
        TABLE.format(recipe=recipe).split("measure")[0] + f"measure: memory\nrows: [{rows}]\n"
        "set: {batch_size: 6, network.options.iterations: 4, network.options.routing: sequential}\n"
    )
    status, shown, _ = reproduce(capsys, digits, "--out", out)
    assert status == 0 and "2 of 2: ours" in shown
    plain, ours = json.loads((out / "table.json").read_text())["rows"]
    assert plain["mean"] == plain["results"][0]["memory"] > 2 * ours["mean"] > 0
    assert "| batch of 6 |" in (out / "table.md").read_text()


LAUGHS = "a0: &a0 {x: 1}, " + ", ".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]" for n in range(1, 20))
"""Aliases of aliases: some 9¹⁹ values."""

WRONG = {
    "train --recipe mine.yaml": [
        ("lr: 1e-3", "lr: fast", "optimizer.lr: got 'fast', want a valid number"),
        ("lr: 1e-3", "weight_decy: 1", "optimizer.weight_decy: no such field (did you mean weight_decay?), want one"),
        ("name: adam, ", "", "optimizer.name: got nothing, want a value"),
        ("lr: 1e-3", "lr: .nan", "optimizer.lr: got nan, want a finite number"),
        ("epochs: 2", "epochs: 0", "epochs: got 0, want greater than or equal to 1"),
        ("epochs: 2", "epochs: {first: 1}", "epochs: got {'first': 1}, want a valid integer"),
        ("iterations: 2", "iterations: 20000", "network.options.iterations: got 20000, want 10000 or fewer"),
        ("epochs: 2", "epoch: 1", "epoch: no such field (did you mean epochs?), want one of network, data"),
        ("0.75]", "1.5]", "schedule.at[1]: got 1.5, want less than or equal to 1"),
        ("[1/2, 0.75]", "[1/0]", "schedule.at[0]: got '1/0', want a valid number"),
        ("[1/2, 0.75]", "[1/2/4]", "schedule.at[0]: got '1/2/4', want a valid number"),
        ("name: digits, opt", "name: lstm, opt", "network.name: got 'lstm', want a network of fastcaps train --list"),
        ("limit: 256", "limit: 256, pad: 2, resize: 9", "data.resize: got 9 and pad 2, want one of them"),
        ("name: cross-entropy", "name: feedback, base: feedback", "loss.base.name: got 'feedback', want one of"),
        ('section: "1"', "", "source.section: got nothing, want a value, as it has no default"),
        ("network:", "network: [", "line "),
        ("options: {iterations: 2}", "options: {classes: 2}", "network.options.classes: got 2, want none"),
        ("epochs: 2", "seed: 4294967296", "seed: got 4294967296 with 1 runs, want seeds of 4294967295 or less"),
        ("epochs: 2", f"epochs: {3000 * '['}{3000 * ']'}", "brackets are nested too deeply"),
        ("epochs: 2", "epochs: 2\nepochs: 3", "line 9: epochs appears twice, want it once"),
        ("epochs: 2", f"epochs: 0x{5000 * 'f'}", "epochs: got '0xffff"),
        ("lr: 1e-3", f"lr: {5000 * '9'}", "optimizer.lr: got '9999"),
        (
            "iterations: 2",
            f"iterations: [1, -0x{17 * 'f'}]",
            "network.options.iterations[1]: got '-0xfff",
        ),
        ("epochs: 2", "epochs: 2020-13-01", "epochs: got '2020-13-01', want a valid timestamp"),
        ("epochs: 2", "epochs: 2\nout: &out [*out]", "out[0]: got a value that contains itself, want a finite one"),
        ("options: {iterations: 2}", f"options: {{{LAUGHS}}}", "got more than 100,000 values, want fewer"),
    ],
    "reproduce --collect digits.yaml": [
        ("measure: error", "measure: speed", "measure: got 'speed', want 'error', 'accuracy', 'memory'"),
        ("paper: 60", "paper: [60, 50]", "rows[0].paper: got 2 numbers, want 1 or none"),
        ("paper: 60", "papers: 60", "rows[0].papers: no such field (did you mean paper?)"),
        ("rows:", "draw: lines\nrows:", "over: got None with draw 'lines', want it for lines"),
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
        assert shown.startswith(f"fastcaps {command.split()[0]}: {path}: {message}") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "content"),
    [*(("result", text) for text in ("", '{"test_accuracy": null}', 2000 * "[")),
     *(("config", text) for text in ("null", '{"network": 1}', 2000 * "["))],
)  # fmt: skip
def test_results_that_cannot_be_read_are_told(
    digits: Path, capsys: pytest.CaptureFixture[str], file: str, content: str
) -> None:
    config = tables.table(str(digits)).lines(digits.parent / "out")[0].config
    config.folder.mkdir(parents=True)
    write_settings(config)
    (config.folder / f"{file}.json").write_text(content)
    status, _, error = reproduce(capsys, digits, "--collect", "--out", digits.parent / "out")
    assert status == 1 and f"one/{file}.json cannot be read" in error and error.count("\n") == 1


def test_yaml_merges_mappings_and_large_files_are_read_quickly() -> None:
    """As in YAML 1.1 and PyYAML: a mapping's own fields replace those that it merges, which are no repetition."""
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {y: 4, <<: [*b, {x: 0, z: 5}]}\nd: [*b, *b]"
    assert read_yaml(text) == yaml.safe_load(text)
    assert read_yaml(text)["c"] == {"x": 1, "y": 4, "z": 5}
    seconds = []
    for count in (2_000, 16_000):
        text, began = "\n".join(f"k{n}: {n}" for n in range(count)), time.process_time()
        assert len(read_yaml(text)) == count
        seconds.append(time.process_time() - began)
    assert seconds[1] < 16 * seconds[0]  # not 64, as if all were compared with all


def test_tables_and_rows_by_name(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = digits.parent / "out"
    status, _, error = reproduce(capsys, digits, "--row", "three", "--out", out)
    assert status == 2 and "--row: got 'three', want one of one iteration; two iterations" in error and not out.exists()
    digits.write_text(digits.read_text().replace("name: two", "name: .."))
    status, _, error = reproduce(capsys, digits, "--out", out)
    assert status == 2 and "row 'two iterations': name: got '..', want letters" in error
    status, _, error = reproduce(capsys, "sabour-table")
    assert status == 2 and "got 'sabour-table' (did you mean sabour-table-1?)" in error
    status, shown, _ = reproduce(capsys)
    assert status == 0 and [line.split()[0] for line in shown.splitlines() if line[0] != " "] == tables.names()


def test_a_base_gives_what_a_recipe_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{base: li-capnet-ce-sgd, optimizer: {lr: 0.5}, loss.name: spread, data.options.seed: 3}")
    mine, paper = recipe(str(path)), recipe("li-capnet-ce-sgd")
    assert mine.source is None and not mine.reported and not mine.reading and mine.config.recipe == str(path)
    assert mine.config.optimizer == replace(paper.config.optimizer, lr=0.5) and mine.config.loss == Spread()
    assert mine.config.data == replace(paper.config.data, options={"seed": 3})
    path.write_text(recipes.as_yaml("li-capnet-ce-sgd"))
    assert replace(recipe(str(path)).config, recipe="") == replace(paper.config, recipe="")
    for text, message in (
        ("{base: sabour-mnist, on: 3}", "True: no such field"),
        ("also: more", "also: got 'more', want a base"),
        ("base: tsai", "base: got 'tsai', want a recipe"),
    ):
        path.write_text(text)
        with pytest.raises(SettingError, match=re.escape(f"mine.yaml: {message}")):
            recipe(str(path))
    with pytest.raises(SettingError, match=r"nowhere\.yaml', want an existing file"):
        recipe(str(tmp_path / "nowhere.yaml"))


def test_recipes_are_listed_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    lines = re.sub(r"\s*\n +", " ", capsys.readouterr().out).splitlines()  # long ones go on below, indented
    listed = dict(line.rstrip().split(maxsplit=1) for line in lines)
    assert listed == {name: str(recipe(name).source) for name in recipes.names()}
    assert cli.main(["recipes", "sabour-mnist"]) == 0
    assert read_yaml(capsys.readouterr().out) == recipes.fields_of("sabour-mnist")
    assert cli.main(["recipes", "sabour-mnits"]) == 2
    assert "recipe: got 'sabour-mnits' (did you mean sabour-mnist?), want" in capsys.readouterr().err
