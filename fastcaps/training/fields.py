"""Settings as data: mappings read into pydantic's dataclasses and back, with errors of one line.

A setting that is wrong raises :class:`SettingError`: its path, what came, and what is wanted (``epochs: got 0, want
greater than or equal to 1``).
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, to_jsonable_python

from fastcaps.checks import did_you_mean

Kind = TypeVar("Kind")
STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
"""How pydantic reads all settings."""
MOST_COUNT = 2**31 - 1
"""The most epochs, images a step, runs or steps between checkpoints: more is a slip, which torch would not take."""


class SettingError(ValueError):
    """A setting is wrong; the message is one line that begins with its path."""


class RunError(RuntimeError):
    """The folder of a run cannot be used: it holds another run, is locked by one, or its checkpoint cannot be read."""


def _fraction(value: Any) -> Any:
    """Return the number that ``150/350`` stands for; pydantic reads all others."""
    try:
        if isinstance(value, str) and "/" in value:
            above, below = value.split("/")
            return float(above) / float(below)
        if not isinstance(value, bool):
            return float(value) if isinstance(value, int) else value
    except (OverflowError, ValueError, ZeroDivisionError):
        pass
    raise PydanticCustomError("number", "want a number")


Number = Annotated[float, BeforeValidator(_fraction), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Strict(), Field(ge=1, le=MOST_COUNT)]
Index = Annotated[int, Strict(), Field(ge=0)]
Flag = Annotated[bool, Strict()]
SHORT = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
"""Of declarations that have a name: it alone will do."""
CHOICE = Field(discriminator="name")
"""Of several kinds of declaration, the name decides."""


def read(kind: type[Kind], value: Any) -> Kind:
    """Return a mapping as a dataclass; SettingError tells of the first field that is wrong."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise SettingError(_one_line(kind, error)) from error


def wrong(path: str, got: Any, want: str) -> SettingError:
    """An error that says of a setting what came, cut if it is long, and what is wanted."""
    shown = repr(got)
    return SettingError(f"{path}: got {shown if len(shown) <= 80 else shown[:77] + '...'}, want {want}")


def _one_line(kind: Any, error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    path, above, here = "", [], _dataclasses(kind)
    for part in found["loc"]:
        named = [each for each in here if part in _names(each)]
        if named:  # not a field, but which kind of declaration it is
            here = named
            continue
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        path += f".{part}"
        above, here = here, [one for each in here for one in _dataclasses(typing.get_type_hints(each).get(part))]
    path = path.removeprefix(".")
    if found["type"] == "unexpected_keyword_argument":
        known = [each.name for one in above for each in fields(one)]
        hint = did_you_mean(found["loc"][-1], [each for one in above for each in paths_of(one)])
        return f"{path}: no such field{hint}, want {'one of ' + ', '.join(known) if known else 'no field at all'}"
    if found["type"] == "union_tag_invalid":
        names = ", ".join(name for each in here for name in _names(each))
        return str(wrong(f"{path}.name", found["ctx"]["tag"], f"one of {names}"))
    if found["type"] in ("missing", "union_tag_not_found"):
        last = ".name" if found["type"] == "union_tag_not_found" else ""
        return f"{path}{last}: got nothing, want a value, as it has no default"
    if found["type"] == "value_error":  # what the dataclass itself checks begins with the field's name
        return f"{path}.{found['ctx']['error']}".removeprefix(".")
    return str(
        wrong(path or "settings", found["input"], found["msg"].removeprefix("Input should be ").removeprefix("want "))
    )


def _dataclasses(hint: Any) -> list[Any]:
    """Return the dataclasses in an annotation."""
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        return [hint]
    return [found for each in get_args(hint) for found in _dataclasses(each)]


def _names(kind: Any) -> tuple[str, ...]:
    """Return the names that stand for a kind of declaration."""
    return get_args(typing.get_type_hints(kind).get("name"))


def paths_of(kind: Any) -> list[str]:
    """Return the paths of a dataclass's fields and of the fields one level below: ``optimizer``, ``optimizer.lr``."""
    hints = typing.get_type_hints(kind)
    below = [(name, inner.name) for name in hints for one in _dataclasses(hints[name]) for inner in fields(one)]
    return list(dict.fromkeys([*(each.name for each in fields(kind)), *(".".join(path) for path in below)]))


def as_data(value: Any) -> Any:
    """Return a value as mappings, lists and plain values, which :func:`read` turns back into it."""
    return to_jsonable_python(value, fallback=lambda other: other)


def changed(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of settings, as :func:`as_data` makes them, with other values by paths: ``{"optimizer.lr": 0.01}``.

    Where a ``name`` changes, the other fields beside it begin from the new one's defaults. SettingError if a path leads
    through something that has no fields; whether its last field exists, :func:`read` checks.
    """
    made = copy.deepcopy(dict(settings))
    # a name first: it clears what belonged to the old one
    for path in sorted(changes, key=lambda path: (not path.endswith(".name"), path.count("."))):
        *above, last = path.split(".")
        place: Any = made
        for depth, name in enumerate(above):
            place = place.setdefault(name, {})
            if isinstance(place, str):  # a short form
                raise SettingError(f"{path}: {'.'.join(above[: depth + 1])} is {place!r} here; set its name")
            if not isinstance(place, dict):
                raise SettingError(f"{path}: no such field, {'.'.join(above[: depth + 1])} has none")
        if above and last == "name" and place.get("name") != changes[path]:
            place.clear()
        if isinstance(place.get(last), dict) and place[last].get("name") == changes[path]:
            continue  # a short form of what is there already
        place[last] = copy.deepcopy(changes[path])
    return made


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping, from paths to values."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = f"{path}.{name}".removeprefix(".")
        found |= flat(value, inner) if isinstance(value, Mapping) and value else {inner: value}
    return found
