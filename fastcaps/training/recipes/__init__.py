"""The experiments of the papers, a YAML file a paper: network, data, loss, optimiser, schedule, iterations.

A recipe is the fields of :class:`fastcaps.training.TrainConfig`, and

- ``source``: the paper, its section and its table or figure; a recipe of your own needs none;
- ``reported``: the result that the paper reports;
- ``reading``: what the paper does not say, and we chose;
- ``base``: another recipe of the papers, whose fields it has where it names none of its own. A field of a field may be
  named by its path (``optimizer.lr``). Where a ``name`` changes, the fields beside it begin from their defaults.
  ``also`` is added to the base's ``reading``.

A recipe of your own is a file with one recipe's fields.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fastcaps.checks import did_you_mean
from fastcaps.training.config import TrainConfig
from fastcaps.training.fields import SettingError, as_data, changed, flat, read, wrong

FOLDER = Path(__file__).parent
_TOLD = ("source", "reported", "reading")  # what a paper says, and what we say of it
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


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """Return the papers' recipes by name, each with the fields that its file gives it."""
    files = sorted(FOLDER.glob("*.yaml"))
    return {name: given for path in files for name, given in read_yaml(path.read_text(encoding="utf-8")).items()}


def names() -> list[str]:
    """Return the names of the papers' recipes."""
    return sorted(_shipped())


def own_file(name: str, kind: str, known: Iterable[str], listing: str) -> Path | None:
    """Return the path of a user's own recipe (or table), or None for a ``name`` that is ``known``.

    Raises
    ------
    ValueError
        If there is neither.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise SettingError(f"{kind}: got {name!r}, and there is no such file")
    if name in known:
        return None
    hint = did_you_mean(name, sorted(known))
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


def _based(given: Mapping[str, Any], shipped: bool) -> dict[str, Any]:
    """Return the fields of a recipe and of its bases; a recipe of one's own does not take over what a paper says."""
    given = dict(given)
    base, also = given.pop("base", None), read(str, given.pop("also", ""), "also")
    if base is None:
        if also:
            raise wrong("also", also, "a base beside it")
        return given
    if not isinstance(base, str) or base not in _shipped():
        hint = did_you_mean(base, names()) if isinstance(base, str) else ""
        raise wrong("base", base, f"a recipe that fastcaps recipes lists{hint}")
    for key in given:
        if not isinstance(key, str):  # YAML reads on, no, null and 1 as other things than text
            raise SettingError(f"{key!r}: no such field")
    made = fields_of(base)
    if not shipped:
        made = {key: value for key, value in made.items() if key not in _TOLD}
    made = changed(made, flat(given))
    if also:
        made["reading"] = f"{made.get('reading', '')} {also}".strip()
    return made


def fields_of(name: str) -> dict[str, Any]:
    """Return the fields of a recipe, those of its base among them: one of :func:`names`, or the path of a file.

    Raises
    ------
    ValueError
        One line: the file, the field, what came and what is wanted.
    """
    path = own_file(name, "recipe", _shipped(), "recipes")
    if path is None:
        return _based(_shipped()[name], shipped=True)
    try:
        given = read_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise wrong("recipe", given, "a mapping of fields")
        return _based(given, shipped=False)
    except (SettingError, UnicodeDecodeError) as error:
        raise SettingError(f"{path.name}: {error}") from error


def as_yaml(name: str) -> str:
    """Return a recipe whole, as a file of one's own could have it."""
    return str(yaml.safe_dump(fields_of(name), sort_keys=False, default_flow_style=None, allow_unicode=True, width=110))


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
    given, shipped = fields_of(name), name in _shipped()
    try:
        source = read(Source, given.pop("source"), "source") if "source" in given else None
        told = {key: read(str, given.pop(key, ""), key) for key in _TOLD[1:]}
        config = read(TrainConfig, {**given, "recipe": name if shipped else str(Path(name).expanduser())})
    except SettingError as error:
        raise SettingError(f"{Path(name).name}: {error}") from error
    if changes:
        config = read(TrainConfig, changed(as_data(config), changes))
    return Recipe(name if shipped else Path(name).stem, source, config, **told)
