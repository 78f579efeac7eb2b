"""The experiments of the papers, one YAML file per paper: network, data, loss, optimiser, schedule, iterations.

A recipe has the fields of :class:`fastcaps_lab.training.TrainConfig`, its ``source`` in the paper, and ``reading``, our
choices where the paper is silent. The papers' results are in the tables (:mod:`fastcaps_lab.training.tables`). Your own
recipe is a file with one recipe's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.settings import Settings, changed, read


def read_yaml(text: str, where: str = "") -> Any:
    """Return the content of YAML; ValueError in one line, which begins with ``where``, if it is invalid."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(where + " ".join(str(error).split())) from error


class Entries:
    """The papers' entries in a folder's files, by name; messages use ``kind`` and ``listing``, a command.

    An entry with a ``base``, another entry's name, inherits the fields that it does not set. A path names a field of a
    field (``optimizer.lr``). If a ``name`` changes, the fields beside it start from their defaults. ``also`` is added
    to the base's ``reading``.
    """

    def __init__(self, folder: Path, kind: str, listing: str) -> None:
        self.folder, self.kind, self.listing = folder, kind, listing

    def names(self) -> list[str]:
        """Return the names of the papers' entries."""
        return sorted(self.all)

    @cached_property
    def all(self) -> dict[str, dict[str, Any]]:
        """The papers' entries, each with the fields in its file."""
        files = sorted(self.folder.glob("*.yaml"))
        return {name: given for path in files for name, given in read_yaml(path.read_text(encoding="utf-8")).items()}

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of an entry or of the user's file, with those of its base; ValueError in one line."""
        path = Path(name).expanduser()
        is_file = path.suffix in (".yaml", ".yml")
        if is_file and not path.is_file():
            raise ValueError(f"{self.kind}: got {name!r}, want an existing file")
        if not is_file and name not in self.all:
            hint = did_you_mean(name, self.all)
            raise ValueError(f"{self.kind}: got {name!r}{hint}, want one of fastcaps {self.listing}, or a .yaml file")
        given = read_yaml(path.read_text(encoding="utf-8"), f"{path.name}: ") if is_file else self.all[name]
        if not isinstance(given, Mapping):
            raise ValueError(f"{name}: got {str(given)[:80]!r}, want a mapping of fields")
        given = {str(key): value for key, value in given.items()}
        base, also = given.pop("base", None), given.pop("also", "")
        if base is None:
            return given
        # a user's entry does not inherit what the paper says
        inherited = {key: value for key, value in self.fields(base).items() if not is_file or key not in ABOUT}
        made = changed(inherited, given)
        return {**made, "reading": f"{made.get('reading', '')} {also}".strip()}


ABOUT = ("source", "reading")
ENTRIES = Entries(Path(__file__).parent, "recipe", "recipes")
names, fields_of = ENTRIES.names, ENTRIES.fields


class Recipe(Settings):
    """An experiment of a paper."""

    name: str
    config: TrainConfig
    source: str = ""  # paper, section, table
    reading: str = ""  # our choices where the paper is silent


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return a recipe, one of :func:`names` or a file, with ``changes``, other values for fields by their paths.

    Raises
    ------
    ValueError
        With one line: the file, the field, what came and what is wanted.
    """
    given = changed(fields_of(name), changes or {})
    about = {key: given.pop(key) for key in ABOUT if key in given}
    config = read(TrainConfig, {**given, "recipe": name}, f"{Path(name).name}: ")
    return read(Recipe, {"name": Path(name).stem, "config": config, **about}, f"{Path(name).name}: ")
