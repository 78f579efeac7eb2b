"""The experiments of the papers as YAML files, one each, whole: network, data, loss, optimiser, schedule, turns.

A recipe is the fields of :class:`fastcaps.training.TrainConfig`, and

- ``source``: the paper, its section and its table or figure; a recipe of your own needs none;
- ``reported``: what the paper says came of it;
- ``reading``: what the paper does not say, and we chose.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastcaps.checks import did_you_mean
from fastcaps.training.config import TrainConfig
from fastcaps.training.fields import SettingError, as_data, changed, read, wrong

FOLDER = Path(__file__).parent
MOST_VALUES, MOST_DEPTH = 100_000, 50
"""What a YAML file may hold, and how deep: aliases of aliases make billions of a few lines."""


@dataclass(frozen=True)
class Source:
    """Where an experiment stands.

    Attributes
    ----------
    paper, section, table : str
        ``table`` may be a figure, or empty.
    """

    paper: str
    section: str
    table: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.paper, f"section {self.section}" if self.section else "", self.table)))


@dataclass(frozen=True)
class Recipe:
    """An experiment of a paper.

    Attributes
    ----------
    name : str
    source : Source, optional
    config : TrainConfig
    reported, reading : str
        What the paper says came of it, and what is our reading.
    """

    name: str
    source: Source | None
    config: TrainConfig
    reported: str = ""
    reading: str = ""


class _Loader(yaml.SafeLoader):
    """YAML in which a field stands once, and where it is written."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="<< merges another mapping, want its fields written out", problem_mark=key.start_mark
                )
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key} stands twice, want it once", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def names(folder: Path = FOLDER) -> list[str]:
    """The recipes that there are (or the tables: the names of another folder's files)."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find(name: str, folder: Path = FOLDER, kind: str = "recipe", listing: str = "recipes") -> Path:
    """The file of a recipe (or a table): one of :func:`names`, or a path that ends in ``.yaml``.

    Raises
    ------
    ValueError
        If there is none.
    """
    own = name.endswith((".yaml", ".yml"))
    path = Path(name).expanduser() if own else folder / f"{name}.yaml"
    if path.is_file():
        return path
    if own:
        raise SettingError(f"{kind}: got {name!r}, and there is no such file")
    hint = did_you_mean(name, names(folder))
    raise SettingError(f"{kind}: got {name!r}{hint}, want one of those that fastcaps {listing} lists, or a .yaml file")


def read_yaml(text: str) -> Any:
    """Read YAML; what is no YAML, or is nested or repeated beyond reason, raises ValueError in one line."""
    try:
        made = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise SettingError(f"{where}{' '.join(str(error.problem).split())}") from error
    except RecursionError as error:
        raise SettingError(f"brackets are nested too deeply, want {MOST_DEPTH} levels or fewer") from error
    except (
        Exception
    ) as error:  # PyYAML raises whatever its constructors meet, of a 13th month or a tag that does not fit
        raise SettingError(" ".join(str(error).split())) from error
    _require_plain(made)
    return made


def _require_plain(made: Any) -> None:
    """Raise if aliases (``*name``) make a ring, or more values than anyone writes."""
    level, seen = [made], 0
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for value in level:
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            inner += parts if isinstance(value, (dict, list, tuple, set)) else ()
            if seen + len(inner) > MOST_VALUES:
                raise SettingError(f"aliases repeat too much, want {MOST_VALUES:,} values or fewer in all")
        seen += len(inner)
        level = inner
        if not level:
            return
    raise SettingError(f"aliases lead back to themselves or too deep, want {MOST_DEPTH} levels or fewer")


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Parameters
    ----------
    name : str
        One of :func:`names`, or the path of a file.
    changes : mapping, optional
        Other values for fields, by their paths: ``{"optimizer.lr": 0.01}``.

    Raises
    ------
    ValueError
        One line: the file, the field, what came and what is wanted.
    """
    path = find(name)
    try:
        given = read_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise wrong("recipe", given, "a mapping of fields")
        source = read(Source, given.pop("source"), "source") if "source" in given else None
        told = {key: read(str, given.pop(key, ""), key) for key in ("reported", "reading")}
        config = read(TrainConfig, {**given, "recipe": path.stem if path.parent == FOLDER else str(path)})
    except (SettingError, UnicodeDecodeError) as error:
        raise SettingError(f"{path.name}: {error}") from error
    if changes:
        config = read(TrainConfig, changed(as_data(config), changes))
    return Recipe(path.stem, source, config, **told)
