"""Settings as data: mappings read into pydantic's dataclasses and back.

A wrong setting raises :class:`SettingError` with one line: its path, what came, and what is wanted (``epochs: got 0,
want greater than or equal to 1``).
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, fields, is_dataclass
from functools import reduce
from operator import truediv
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python
from typing_extensions import dataclass_transform

from fastcaps_lab.checks import did_you_mean

Kind = TypeVar("Kind")
STRICT = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
MOST_COUNT = 2**31 - 1
"""The maximum of epochs, images per step, runs and steps between checkpoints."""


class SettingError(ValueError):
    """A setting is wrong; the message is one line that begins with its path."""


class RunError(RuntimeError):
    """The folder of a run cannot be used: it holds another run, is locked by one, or its files cannot be read."""


def _fraction(value: Any) -> Any:
    """Return the value of a text such as ``1e-3`` or ``150/350``, anything else as it is, for pydantic to check."""
    if isinstance(value, str):
        with suppress(ValueError, ZeroDivisionError):
            return reduce(truediv, map(float, value.split("/", 1)))
    return value


Number = Annotated[float, Strict(), BeforeValidator(_fraction), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Strict(), Field(ge=1, le=MOST_COUNT)]
Index = Annotated[int, Strict(), Field(ge=0)]
Flag = Annotated[bool, Strict()]
SHORT = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
"""For declarations that may be given by their name alone."""
CHOICE = Field(discriminator="name")
"""For several kinds of declaration, chosen by name."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, config=STRICT)
class Settings:
    """The base of declarations, which are frozen dataclasses; an unknown field raises an error with the known ones."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, config=STRICT)(cls)

    @model_validator(mode="before")
    @classmethod
    def _only_fields(cls, given: Any) -> Any:
        known = [each.name for each in fields(cls)]
        for name in given if isinstance(given, Mapping) else ():
            if name not in known:
                hints = typing.get_type_hints(cls)
                kinds = [(outer, kind) for outer in known for kind in get_args(hints[outer]) or (hints[outer],)]
                below = [f"{outer}.{each.name}" for outer, kind in kinds if is_dataclass(kind) for each in fields(kind)]
                hint = did_you_mean(name, dict.fromkeys([*known, *below]))
                raise ValueError(f"{name}: no such field{hint}, want one of {', '.join(known)}")
        return given


def read(kind: type[Kind], value: Any) -> Kind:
    """Return a mapping as a dataclass; SettingError for the first wrong field."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise _first_error(value, error) from error


def wrong(path: str, got: Any, want: str) -> SettingError:
    """Return an error with a setting's path, what came, cut if it is long, and what is wanted."""
    shown = f"{got.bit_length()} bits" if isinstance(got, int) and got.bit_length() > 999 else repr(got)
    return SettingError(f"{path}: got {shown if len(shown) <= 80 else shown[:77] + '...'}, want {want}")


def _first_error(value: Any, error: ValidationError) -> SettingError:
    found, path, here = error.errors(include_url=False)[0], "", value
    for part in found["loc"]:
        if part == (here.get("name") if isinstance(here, Mapping) else here):
            continue  # not a field, but the kind of declaration
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
        with suppress(LookupError, TypeError):
            here = here[part]
    path, kind = path.removeprefix("."), found["type"]
    if kind == "union_tag_invalid":
        return wrong(f"{path}.name", found["ctx"]["tag"], f"one of {found['ctx']['expected_tags']}")
    if kind in ("missing", "union_tag_not_found"):
        name = path if kind == "missing" else f"{path}.name"
        return SettingError(f"{name}: got nothing, want a value, as it has no default")
    if kind == "value_error":  # a dataclass's own checks begin with the field's name
        return SettingError(f"{path}.{found['ctx']['error']}".removeprefix("."))
    return wrong(path or "settings", found["input"], found["msg"].removeprefix("Input should be "))


def as_data(value: Any) -> Any:
    """Return a value as mappings, lists and plain values, from which :func:`read` restores it."""
    return to_jsonable_python(value, fallback=lambda other: other)


def changed(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of settings with other values for fields, by their paths: ``{"optimizer.lr": 0.01}``.

    A mapping changes the fields inside a field. If a ``name`` changes, the fields beside it start from the new one's
    defaults. :func:`read` checks whether the fields exist.
    """
    made: Any = copy.deepcopy(dict(settings))
    # names first, since they reset the fields beside them
    for path in sorted(changes, key=lambda path: (not path.endswith(".name"), path.count("."))):
        change = copy.deepcopy(changes[path])
        for name in reversed(path.split(".")):
            change = {name: change}
        made = _merged(made, change)
    return dict(made)


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and "name" in old and isinstance(new, str):  # short forms
        new = {"name": new}
    if isinstance(old, str) and isinstance(new, Mapping):
        old = {"name": old}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    if "name" in new and new["name"] != old.get("name"):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping, from paths to values."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = f"{path}.{name}".removeprefix(".")
        found |= flat(value, inner) if isinstance(value, Mapping) and value else {inner: value}
    return found
