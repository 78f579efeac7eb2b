"""Settings as pydantic models: their base, how they are read, and how paths change their fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

Kind = TypeVar("Kind")
Options = Annotated[dict[str, Any], Field(default_factory=dict)]
Share = Annotated[float, Field(ge=0, le=1)]
SHORT = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
"""For settings that may be given by their name alone."""
CHOICE = Field(discriminator="name")
"""For several kinds of settings, chosen by name."""


class RunError(RuntimeError):
    """The folder of a run cannot be used: it holds another run, is locked by one, or its files cannot be read."""


class Settings(BaseModel):
    """The base of settings, which do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)


def read(kind: type[Kind], value: Any, where: str = "") -> Kind:
    """Return a value as settings; ValueError, in one line, with ``where`` and the path of each wrong field."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        lines = []
        for each in error.errors(include_url=False):
            path = ".".join(map(str, each["loc"]))
            # our own checks name what came
            got = "" if each["type"] == "value_error" else f", got {str(each['input'])[:80]!r}"
            lines.append(f"{path}: {each['msg']}{got}".removeprefix(": "))
        raise ValueError(where + "; ".join(lines)) from error


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
