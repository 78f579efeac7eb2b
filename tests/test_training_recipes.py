"""The recipes: each is whole, and its network is built of it; errors name the field."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stand_ins import RECIPE, network_of

from fastcaps import cli, models
from fastcaps.training import SettingError, recipe, recipes
from fastcaps.training.files import read_yaml
from fastcaps.training.loss import Spread

EVERY = recipes.names()


@pytest.mark.parametrize("name", EVERY)
def test_every_recipe_is_whole(name: str) -> None:
    read = recipe(name)
    given = recipes.fields_of(name)
    wanted = {"source", "network", "data", "loss", "metric", "optimizer", "schedule", "epochs", "batch_size"}
    assert wanted <= set(given)
    assert read.source is not None and re.search(r" (2017|2018|2019|2020)$", read.source.paper) and read.source.section
    assert read.config.recipe == name and str(read.config.folder) == f"runs/{name}"
    with torch.device("meta"):
        network = network_of(read.config)
    assert sum(p.numel() for p in network.parameters()) > 10_000
    assert all(p.is_meta for p in network.parameters())
    config = models.config(read.config.network.name)
    if getattr(config, "iterations", None) is not None:  # where a network makes iterations, the recipe says how many
        assert "iterations" in read.config.network.options


# --- what is wrong with a recipe -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: 1e-3", "lr: fast", "optimizer.lr: got 'fast', want a valid number"),
        ("lr: 1e-3", "weight_decy: 1", "optimizer.weight_decy: no such field (did you mean weight_decay?), want one"),
        ("name: adam, ", "", "optimizer.name: got nothing, want a value"),
        ("lr: 1e-3", "lr: .nan", "optimizer.lr: got nan, want a finite number"),
        ("epochs: 1", "epochs: 0", "epochs: got 0, want greater than or equal to 1"),
        ("epochs: 1", "epochs: {first: 1}", "epochs: got {'first': 1}, want a valid integer"),
        ("iterations: 2", "iterations: 20000", "network.options.iterations: got 20000, want 10000 or fewer"),
        ("epochs: 1", "epoch: 1", "epoch: no such field (did you mean epochs?), want one of network, data"),
        ("0.75]", "1.5]", "schedule.at[1]: got 1.5, want less than or equal to 1"),
        ("[1/2, 0.75]", "[1/0]", "schedule.at[0]: got '1/0', want a valid number"),
        ("[1/2, 0.75]", "[1/2/4]", "schedule.at[0]: got '1/2/4', want a valid number"),
        ("name: digits, opt", "name: lstm, opt", "network.name: got 'lstm', want a network of fastcaps train --list"),
        ("limit: 128", "limit: 128, pad: 2, resize: 9", "data.resize: got 9 and pad 2, want one of them"),
        ("name: cross-entropy", "name: feedback, base: feedback", "loss.base.name: got 'feedback', want one of"),
        ('section: "1"', "", "source.section: got nothing, want a value, as it has no default"),
        ("network:", "network: [", "line "),
        ("options: {iterations: 2}", "options: {classes: 2}", "network.options.classes: got 2, want none"),
        ("epochs: 1", "seed: 4294967296", "seed: got 4294967296 with 1 runs, want seeds of 4294967295 or less"),
        ("epochs: 1", f"epochs: {3000 * '['}{3000 * ']'}", "brackets are nested too deeply"),
    ],
)
def test_a_wrong_recipe_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    assert RECIPE.count(old) == 1
    path.write_text(RECIPE.replace(old, new))
    pytest.importorskip("lightning")
    assert cli.main(["train", "--recipe", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fastcaps train: mine.yaml: " + message) and told.count("\n") == 1


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


def test_any_field_is_overridden_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    plain = recipe(str(path)).config
    assert plain.optimizer.lr == 1e-3 and plain.schedule.at == (0.5, 0.75) and plain.recipe == str(path)
    changes = {"optimizer.lr": "3/4", "optimizer.name": "sgd", "network.options.routing": "sequential"}
    config = recipe(str(path), {**changes, "loss": "spread"}).config
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.momentum) == ("sgd", 0.75, 0.9)
    assert config.network.options == {"iterations": 2, "routing": "sequential"} and config.loss.name == "spread"
    assert recipe(str(path), {"optimizer.name": "adam"}).config == plain  # the same name clears nothing
    with pytest.raises(SettingError, match=r"optimizer.momentum: no such field, want one of lr, betas"):
        recipe(str(path), {"optimizer.momentum": 0.9})


# --- the command line ------------------------------------------------------------------------------------------------


def test_recipes_are_listed_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    lines = re.sub(r"\s*\n +", " ", capsys.readouterr().out).splitlines()  # long ones go on below, indented
    listed = dict(line.rstrip().split(maxsplit=1) for line in lines)
    assert listed == {name: str(recipe(name).source) for name in EVERY}
    assert cli.main(["recipes", "sabour-mnist"]) == 0
    assert read_yaml(capsys.readouterr().out) == recipes.fields_of("sabour-mnist")
    assert cli.main(["recipes", "sabour-mnits"]) == 2
    assert "recipe: got 'sabour-mnits' (did you mean sabour-mnist?), want" in capsys.readouterr().err
