"""The recipes: each is whole, and its network is built of it; errors name the field."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stand_ins import network_of

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


# --- recipes of users, and changes ------------------------------------------------------------------------------------


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
