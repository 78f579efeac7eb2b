"""Checks of single arguments: their messages name the argument, what came and what is wanted."""

from __future__ import annotations

import difflib
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "accumulation_dtype",
    "check_choice",
    "check_count",
    "check_eps",
    "check_finite",
    "check_shape",
    "check_table",
    "check_tensor",
    "did_you_mean",
    "is_tracing",
    "refuse_nested",
    "shape_text",
]


_MOST_COUNT = 2**63 - 2  # what int64 holds, less 1: some callers add 1


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over ``dtype`` are kept: float32 for the half-precision types, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def is_tracing() -> bool:
    """Return whether a program is being traced: sizes may then be symbols, and comparing them would fix them."""
    return torch.compiler.is_compiling()


def shape_text(tensor: Tensor) -> str:
    """A shape as error messages print it."""
    return f"{list(tensor.shape)}"


def refuse_nested(name: str, value: Tensor) -> None:
    """Raise for a nested tensor, which has no shape: its layout may be that of any other."""
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one: pad it (a gate of 0 leaves a child out)")


def check_tensor(name: str, value: Any, children: Tensor, cast: bool, also: Sequence[torch.dtype] = ()) -> None:
    """Raise if an argument is not a dense tensor of the children's device and, unless autocast casts it, dtype.

    ``also``: dtypes that are as good as the children's.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    refuse_nested(name, value)
    if value.device != children.device:
        raise ValueError(f"{name} must be on the device of children, {children.device}, got {value.device}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.dtype not in (children.dtype, *also) and not (
        cast and value.is_floating_point() and torch.float64 not in (value.dtype, children.dtype)
    ):
        raise TypeError(f"{name} and children must have the same dtype, got {value.dtype} and {children.dtype}")


def check_shape(name: str, value: Tensor, wanted: Sequence[int], symbols: str) -> None:
    """Raise if a tensor has another shape than the one wanted, whose letters are ``symbols``."""
    if value.dim() != len(wanted) or (not is_tracing() and tuple(value.shape) != tuple(wanted)):
        raise ValueError(f"{name} must have shape [{symbols}] = {list(wanted)}, got {shape_text(value)}")


def check_table(
    name: str, value: Any, children: Tensor, wanted: Sequence[Sequence[int]], symbols: str, cast: bool
) -> None:
    """Raise unless a table of parameters has for each dimension one of the sizes ``wanted`` lists.

    Such tables enter sums of float32 or better, so float32 is as good as a half type of the children's.
    """
    check_tensor(name, value, children, cast, also=(accumulation_dtype(children.dtype),))
    fits = value.dim() == len(wanted)
    if fits and not is_tracing():
        fits = all(n in some for n, some in zip(value.shape, wanted, strict=True))
    if not fits:
        sizes = ", ".join(" or ".join(str(size) for size in dict.fromkeys(some)) for some in wanted)
        raise ValueError(f"{name} must have shape [{symbols}] = [{sizes}], got {shape_text(value)}")


def check_eps(eps: Any) -> float:
    """Return ``eps``; raise unless it is a finite number of at least 0."""
    return check_finite("eps", eps, 0.0)


def did_you_mean(name: object, names: Iterable[str], most: int = 1) -> str:
    """The end of a message about a name that is none of ``names``: the nearest, if any are near.

    Of a path, ``optimizer.lr``, the last part is compared, where no other ends in it.
    """
    ends: dict[str, list[str]] = {}
    for each in names:
        ends.setdefault(each.rpartition(".")[2].lower(), []).append(each)
    shortest = {end: min(paths, key=len) for end, paths in ends.items()}
    spelled = {end: path for end, path in shortest.items() if len(ends[end]) == 1 or "." not in path}
    near = [spelled[each] for each in difflib.get_close_matches(str(name).lower(), spelled, n=most)]
    return f" (did you mean {' or '.join(filter(None, (', '.join(near[:-1]), near[-1])))}?)" if near else ""


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` as an int; raise unless it is an integer (numpy's too) of at least ``least``."""
    if type(value) is not int:
        if isinstance(value, torch.SymInt):
            return value  # type: ignore[return-value]
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int >= {least}, got {value!r}")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value}")
    if value > _MOST_COUNT:
        raise ValueError(f"{name} must be an int <= 2**63 - 2, got {value}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_finite(name: str, value: Any, least: float = -math.inf) -> float:
    """Return ``value`` as a float; raise unless it is a finite number of at least ``least``."""
    if type(value) is not float:
        if isinstance(value, torch.SymFloat):
            return value  # type: ignore[return-value]
        if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number, got {value!r}")
        value = float(value)
    if not max(least, -sys.float_info.max) <= value <= sys.float_info.max:  # which a compiler can trace
        wanted = "a finite number" + (f" >= {least:g}" if least > -math.inf else "")
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value
