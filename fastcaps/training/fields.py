"""Settings as data: mappings read into dataclasses and back, with errors that name the field.

A setting that is wrong raises ValueError with one line: its path, what came, and what is wanted
(``optimizer.lr: got 'fast', want a number``). :class:`Choice` is the base of declarations that go by a name: losses,
optimisers, schedules.
"""

from __future__ import annotations

import copy
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from fastcaps.checks import did_you_mean

Kind = TypeVar("Kind")


class SettingError(ValueError):
    """A setting is wrong; the message is one line that begins with its path."""


class Choice:
    """The base of declarations of which one is picked by name.

    A direct subclass is a kind of declaration (``class Loss(Choice)``); those below it have names
    (``class Margin(Loss, name="margin")``) and are found in its ``kinds``.
    """

    kinds: ClassVar[dict[str, type[Any]]]
    name: ClassVar[str]

    def __init_subclass__(cls, name: str | None = None) -> None:
        if name is None:
            cls.kinds = {}
        else:
            cls.name = name
            cls.kinds[name] = cls


def wrong(path: str, got: Any, want: str) -> SettingError:
    """An error that says of a setting what came, cut if it is long, and what is wanted."""
    shown = "nothing" if got is MISSING else repr(got)
    return SettingError(f"{path}: got {shown if len(shown) <= 80 else shown[:77] + '...'}, want {want}")


def require_number(owner: Any, names: str, least: float = 0.0, *, above: bool = False, most: float = math.inf) -> None:
    """Raise ValueError unless the named attributes (words in ``names``) are finite numbers in the range, or None."""
    for name in names.split():
        value = getattr(owner, name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is None:
                continue
            if not math.isfinite(each) or each < least or (above and each == least) or each > most:
                low = f"above {least:g}" if above else f"{least:g} or more"
                end = f" {low}" if most == math.inf else f" from {least:g} to {most:g}"
                raise ValueError(f"{name}: got {each}, want a {'finite ' if most == math.inf else ''}number{end}")


def require_count(owner: Any, names: str, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless the named attributes (words in ``names``) are from ``least`` to ``most``, or None."""
    for name in names.split():
        value = getattr(owner, name)
        if value is not None and (value < least or (most is not None and value > most)):
            raise ValueError(f"{name}: got {value}, want {least} {'or more' if most is None else f'to {most}'}")


def read(kind: type[Kind], value: Any, path: str = "") -> Kind:
    """Read a mapping into a dataclass, or any value into what an annotation says.

    A :class:`Choice` is a mapping with a ``name``, or its name alone. Numbers may be written as ``1e-5`` or
    ``150/350``.

    Raises
    ------
    SettingError
        Naming the field by its path, what came and what is wanted.
    """
    return _read(kind, value, path)


def _read(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        (kind,) = (each for each in arguments if each is not types.NoneType)
        return _read(kind, value, path)
    if origin is Literal:
        if value not in arguments:
            raise wrong(path, value, "one of " + ", ".join(map(str, arguments)))
        return value
    if origin is tuple:
        return _read_list(arguments, value, path)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise wrong(path, value, "a mapping of names to values")
        return dict(value)
    if is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Choice)):
        return _read_fields(kind, value, path)
    return _read_scalar(kind, value, path)


def _read_list(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    any_length = kinds[-1] is Ellipsis
    fits = isinstance(value, Sequence) and not isinstance(value, str)
    if not fits or not (any_length or len(value) == len(kinds)):
        raise wrong(path, value, "a list" if any_length else f"a list of {len(kinds)}")
    each = kinds[:1] * len(value) if any_length else kinds
    return tuple(_read(kind, part, f"{path}[{k}]") for k, (kind, part) in enumerate(zip(each, value, strict=True)))


def _read_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise wrong(path, value, "true or false")
        return value
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(path, value, "a whole number")
        return value
    if kind is float:
        return _number(value, path)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise wrong(path, value, "text")
    return str(value)


def _number(value: Any, path: str) -> float:
    try:
        if isinstance(value, str):  # YAML takes 1e-5 for text
            numerator, _, denominator = value.partition("/")
            return float(numerator) / float(denominator) if denominator else float(numerator)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError, ZeroDivisionError):
        pass
    raise wrong(path, value, "a number")


def _read_fields(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, kind):
        return value
    named = issubclass(kind, Choice) or any(each.name == "name" for each in fields(kind))
    if isinstance(value, str) and named:
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise wrong(path or "settings", value, "a name, or a mapping of fields" if named else "a mapping of fields")
    given = dict(value)
    if issubclass(kind, Choice):
        name = given.pop("name", MISSING)
        if not isinstance(name, str) or name not in kind.kinds:
            raise wrong(_join(path, "name"), name, "one of " + ", ".join(kind.kinds))
        kind = kind.kinds[name]
    known = {each.name: each for each in fields(kind)}
    for name in given:
        if name not in known:
            want = f"one of {', '.join(known)}" if known else "no field at all"
            hint = did_you_mean(name, paths_of(kind))
            raise SettingError(f"{_join(path, str(name))}: no such field{hint}, want {want}")
    hints = typing.get_type_hints(kind)
    for name, each in known.items():
        if name not in given and each.default is MISSING and each.default_factory is MISSING:
            raise wrong(_join(path, name), MISSING, "a value, as it has no default")
    made = {name: _read(hints[name], part, _join(path, name)) for name, part in given.items()}
    try:
        return kind(**made)
    except ValueError as error:  # what the dataclass itself checks begins with the field's name
        raise SettingError(_join(path, str(error))) from error


def paths_of(kind: Any) -> list[str]:
    """The paths of a dataclass's fields, and of the fields one level below: ``optimizer``, ``optimizer.lr``."""
    hints, found = typing.get_type_hints(kind), dict[str, None]()
    for each in fields(kind):
        hint: Any = hints[each.name]
        choice = isinstance(hint, type) and issubclass(hint, Choice)
        held = hint.kinds.values() if choice else [hint] if is_dataclass(hint) else []
        found |= dict.fromkeys([each.name, *(f"{each.name}.{inner.name}" for one in held for inner in fields(one))])
    return list(found)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def as_data(value: Any) -> Any:
    """A value as mappings, lists and plain values, which :func:`read` turns back into it."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {"name": value.name} if isinstance(value, Choice) else {}
        return own | {each.name: as_data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: as_data(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_data(part) for part in value]
    return value


def changed(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings with other values.

    Parameters
    ----------
    settings : mapping
        As :func:`as_data` makes them.
    changes : mapping
        Paths to values: ``{"optimizer.lr": 0.01}``. Where a ``name`` changes, the other fields beside it begin from
        the new one's defaults.

    Raises
    ------
    SettingError
        If a path leads through something that has no fields. Whether its last field exists, :func:`read` checks.
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
    """Nested settings as one mapping, from paths to values."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _join(path, name)
        found |= flat(value, inner) if isinstance(value, Mapping) and value else {inner: value}
    return found
