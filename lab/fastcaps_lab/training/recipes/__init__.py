"""The experiments of the papers, one YAML file per paper: network, data, loss, optimiser, schedule, iterations.

A recipe has the fields of :class:`fastcaps_lab.training.TrainConfig` and those of :class:`Recipe`; ``base`` and
``also`` name the papers' recipe that it extends (:class:`fastcaps_lab.training.files.Shelf`). Your own recipe is a file
with one recipe's fields, and needs no source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.fields import SettingError, Settings, read
from fastcaps_lab.training.files import TOLD, Shelf

SHELF = Shelf(Path(__file__).parent, "recipe", "recipes")


class Source(Settings):
    """The source of an experiment."""

    paper: str
    section: str
    table: str = ""  # or a figure, or empty

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.paper, f"section {self.section}" if self.section else "", self.table)))


class Recipe(Settings):
    """An experiment of a paper."""

    name: str
    source: Source | None
    config: TrainConfig
    reported: str = ""  # the paper's result
    reading: str = ""  # our choices where the paper is silent


names = SHELF.names
fields_of = SHELF.fields


def as_yaml(name: str) -> str:
    """Return a complete recipe as the text of a YAML file."""
    return str(yaml.safe_dump(fields_of(name), sort_keys=False, default_flow_style=None, allow_unicode=True, width=110))


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return a recipe, one of :func:`names` or a file, with ``changes``, other values for fields by their paths.

    Raises
    ------
    ValueError
        With one line: the file, the field, what came and what is wanted.
    """
    given, path, shipped = fields_of(name), Path(name).expanduser(), name in SHELF.entries
    about = {key: given.pop(key) for key in TOLD if key in given}
    try:
        config = read(TrainConfig, {**given, "recipe": name if shipped else str(path)})
        found = read(Recipe, {"name": path.name if shipped else path.stem, "source": None, "config": config, **about})
    except SettingError as error:
        raise SettingError(f"{path.name}: {error}") from error
    return replace(found, config=config.changed(changes)) if changes else found
