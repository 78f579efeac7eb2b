"""Checks of single arguments, whose messages name the argument, what came and what is wanted."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Call = TypeVar("Call", bound=Callable[..., Any])
_MOST_PAIR = 1 << 31  # so that products of two values of a window and a size fit into int64
_MOST_COUNT = 2**63 - 2  # int64's maximum minus 1, as some callers add 1


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over ``dtype``: float32 for the half-precision types, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def widen(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in the dtype of sums over ``dtype``."""
    wide = accumulation_dtype(dtype)
    return [None if tensor is None else tensor.to(wide) for tensor in tensors]


def is_tracing() -> bool:
    """Return whether a program is being traced: sizes may then be symbols, which comparisons would fix."""
    return torch.compiler.is_compiling()


def refuse_second_derivatives(name: str) -> None:
    """Raise within a backward if it must have a graph (``create_graph=True``) itself."""
    if torch.is_grad_enabled() and not is_tracing():
        raise RuntimeError(f"{name} has no second derivatives: set create_graph=False")


def shape_text(tensor: Tensor) -> str:
    """Return a shape as text for messages."""
    return f"{list(tensor.shape)}"


def refuse_nested(name: str, value: Tensor) -> None:
    """Raise for a nested tensor, which has no shape and may have any layout."""
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one: pad it (a gate of 0 leaves a child out)")


def check_tensor(name: str, value: Any, children: Tensor, cast: bool, also: Sequence[torch.dtype] = ()) -> None:
    """Raise unless an argument is a dense tensor with the children's device and dtype.

    Other dtypes pass if autocast casts them, or are in ``also``.
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


def check_shape(name: str, value: Tensor, wanted: Sequence[int | Sequence[int]], symbols: str) -> None:
    """Raise unless each dimension of a tensor has the wanted size, or one of them; messages show ``symbols``."""
    every = [(one,) if isinstance(one, (int, torch.SymInt)) else one for one in wanted]
    fits = value.dim() == len(every)
    if fits and not is_tracing():
        fits = all(n in some for n, some in zip(value.shape, every, strict=True))
    if not fits:
        sizes = ", ".join(" or ".join(str(size) for size in dict.fromkeys(some)) for some in every)
        raise ValueError(f"{name} must have shape [{symbols}] = [{sizes}], got {shape_text(value)}")


def check_table(
    name: str, value: Any, children: Tensor, wanted: Sequence[Sequence[int]], symbols: str, cast: bool
) -> None:
    """Raise unless a table of parameters has one of the ``wanted`` sizes in each dimension.

    Tables are used in sums of float32 or better, so float32 is allowed beside half-precision children.
    """
    check_tensor(name, value, children, cast, also=(accumulation_dtype(children.dtype),))
    check_shape(name, value, wanted, symbols)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar one of ``names``, if any is near."""
    word, spelled = str(name).lower(), {each.lower(): each for each in names}
    ends_in_it = [each for each in spelled if word in each.split("_")[1:]]  # dim: in_dim
    near = difflib.get_close_matches(word, spelled, n=1) or ends_in_it[:1]
    return f" (did you mean {spelled[near[0]]}?)" if near else ""


def suggest(module: str) -> None:
    """Let an error about an unknown attribute of a module end with the nearest of its public names."""
    found: Any = sys.modules[module]

    def unknown(name: str) -> Any:
        hint = did_you_mean(name, found.__all__)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    found.__getattr__ = unknown
    found.__dir__ = lambda: sorted(found.__all__)


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str], note: str = "") -> None:
    """Raise for the first name that is not known; ``note`` ends the message."""
    for name in given:
        if name not in known:
            hint, every = did_you_mean(name, known), ", ".join(known)
            raise TypeError(f"{what} has no argument {name}{hint}; there are: {every}{note}")


def known_arguments(call: Call, note: str = "") -> Call:
    """Return a function with a better message for unknown keyword arguments: the nearest name, all of them, a note."""
    known = [name for name in inspect.signature(call).parameters if name != "self"]
    what, names = call.__qualname__.removesuffix(".__init__"), frozenset(known)

    @functools.wraps(call)
    def checked(*arguments: Any, **options: Any) -> Any:
        if not names.issuperset(options):
            refuse_unknown(what, options, known, note=note)
        return call(*arguments, **options)

    return checked  # type: ignore[return-value]


def _integer(value: Any) -> Any:
    """Return an integer, NumPy's too, as an int, and a symbolic one as it is; None for anything else."""
    if type(value) is int or isinstance(value, torch.SymInt):  # Dynamo calls a free size an int; index() would fix it
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def one_line(value: Any) -> str:
    """Return a value as text of one line for messages."""
    return " ".join(repr(value).split())


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return ``value`` as an int; raise unless it is an integer >= ``least``."""
    count = _integer(value)
    if count is None:
        got = type(value).__name__ if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} must be an int >= {least}, got {got}")
    if not isinstance(count, torch.SymInt):
        if count < least:
            raise ValueError(f"{name} must be an int >= {least}, got {count}")
        if count > _MOST_COUNT:
            raise ValueError(f"{name} must be an int <= 2**63 - 2, got {count}")
    return count


def check_pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """Return ``value`` as (rows, columns); raise unless it is one or two integers >= ``least``."""
    wanted = f"an int or a pair of ints from {least} to 2**31"
    pair = [_integer(each) for each in (value if isinstance(value, (tuple, list)) else (value, value))]
    if len(pair) != 2 or any(number is None for number in pair):
        raise TypeError(f"{name} must be {wanted}, got {one_line(value)}")
    if not all(isinstance(number, torch.SymInt) or least <= number <= _MOST_PAIR for number in pair):
        raise ValueError(f"{name} must be {wanted}, got {one_line(value)}")
    return pair[0], pair[1]


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` as a bool; raise unless it equals True or False, as 0, 1 and NumPy's bools do."""
    if getattr(value, "ndim", 0) or value not in (True, False):  # an array has no single truth
        raise TypeError(f"{name} must be True or False, got {one_line(value)}")
    return bool(value)


def check_dtype(dtype: Any) -> None:
    """Raise unless the dtype of parameters is None or a floating-point one."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point type such as torch.float32, got {one_line(dtype)}")


def check_choice(name: str, value: Any, choices: Sequence[str | None], note: str = "") -> None:
    """Raise unless ``value`` is one of ``choices``; ``note`` ends the message."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {one_line(value)}{note}")


def check_finite(name: str, value: Any, least: float = -math.inf) -> float:
    """Return ``value`` as a float; raise unless it is finite and >= ``least``."""
    if type(value) is not float:
        if isinstance(value, torch.SymFloat):
            return value  # type: ignore[return-value]
        if isinstance(value, (bool, str, Tensor)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number, got {one_line(value)}")
        value = float(value)
    if not max(least, -sys.float_info.max) <= value <= sys.float_info.max:  # a compiler can trace this
        wanted = "a finite number" + (f" >= {least:g}" if least > -math.inf else "")
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value


def require_tensor(value: object, name: str) -> None:
    """Raise TypeError naming ``name`` unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    refuse_nested(name, value)


def check_parameters_dtype(name: str, value: Tensor, weight: Any) -> None:
    """Raise unless a tensor has the dtype of a layer's parameters, or autocast converts it.

    A ``weight`` that is no tensor is not looked at: a quantized or a replaced layer may have none.
    """
    casts = value.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(value.device.type)
    if isinstance(weight, Tensor) and value.dtype != weight.dtype and not casts:
        raise TypeError(f"{name} must be {weight.dtype}, the dtype of the layer's parameters, got {value.dtype}")


def check_map(name: str, value: Any, channels: int | None) -> None:
    """Raise unless ``value`` is ``[B, channels, H, W]``."""
    require_tensor(value, name)
    if value.dim() != 4 or channels not in (None, value.shape[1]):
        wanted = "channels" if channels is None else channels
        raise ValueError(f"{name} must be [B, {wanted}, H, W], got {shape_text(value)}")
