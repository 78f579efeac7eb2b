"""What every routing function asks of its arguments, and how it turns them to what the ops take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import backends, ops, reference
from fastcaps.geometry import Window, output_size, window_extent

__all__ = [
    "Sizes",
    "autocast",
    "autocasts",
    "check_attention",
    "check_bias",
    "check_children",
    "check_choice",
    "check_count",
    "check_eps",
    "check_finite",
    "check_gate",
    "check_routing",
    "check_shape",
    "check_table",
    "check_tensor",
    "check_weight",
    "chosen_backend",
    "refusal",
    "result_dtype",
    "seen_children",
    "set_or_grid",
    "wide",
]


class Sizes(NamedTuple):
    """The numbers of a call: batch B, output grid (Ho, Wo) or (), children I of a position, parents M, poses C, E."""

    batch: int
    grid: tuple[int, ...]
    children: int
    many: int
    rows: int
    columns: int


def shape_text(tensor: Tensor) -> str:
    """A shape as error messages print it."""
    return f"{list(tensor.shape)}"


def autocasts(children: Any) -> bool:
    """Return whether autocast, which takes any mixture of dtypes, is on for the device of children."""
    return isinstance(children, Tensor) and ops.autocast_dtype(children.device.type) is not None


def check_tensor(name: str, value: Any, children: Tensor, cast: bool, also: Sequence[torch.dtype] = ()) -> None:
    """Raise if an argument is not a dense tensor of the children's device and, unless autocast casts it, dtype.

    ``also``: dtypes that are as good as the children's.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.device != children.device:
        raise ValueError(f"{name} must be on the device of children, {children.device}, got {value.device}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.dtype not in (children.dtype, *also) and not (
        cast and value.is_floating_point() and torch.float64 not in (value.dtype, children.dtype)
    ):
        raise TypeError(f"{name} must have the dtype of children, {children.dtype}, got {value.dtype}")


def check_shape(name: str, value: Tensor, wanted: tuple[Any, ...], symbols: str) -> None:
    """Raise if a tensor has another shape than the one wanted, whose letters are ``symbols``."""
    if value.shape != wanted:
        raise ValueError(f"{name} must have shape [{symbols}] = {list(wanted)}, got {shape_text(value)}")


def check_children(children: Any, window: Window | None, cast: bool) -> None:
    """Raise unless children is a dense, floating-point, non-empty (but for the batch) set or grid of poses."""
    if not isinstance(children, Tensor):
        raise TypeError(f"children must be a torch.Tensor, got {type(children).__name__}")
    if window is not None and not isinstance(window, Window):
        raise TypeError(f"window must be a fastcaps.Window or None, got {type(window).__name__}")
    symbols = "B, I, C, D" if window is None else "B, N, H, W, C, D"
    if children.dim() != (4 if window is None else 6):
        kind = "a set (window=None)" if window is None else "a grid (window given)"
        raise ValueError(f"children of {kind} must have shape [{symbols}], got {shape_text(children)}")
    if children.layout != torch.strided:
        raise TypeError(f"children must be a dense tensor, got layout {children.layout}")
    if not children.is_floating_point():
        raise TypeError(f"children must have a floating-point dtype, got {children.dtype}")
    dtypes = backends.default_dtypes(children.device.type)
    if children.dtype not in dtypes and not cast and backends.forced() is None:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"children on {children.device} must have one of the dtypes {allowed}; got {children.dtype}")
    for size, symbol in zip(children.shape[1:], symbols.split(", ")[1:], strict=True):
        if size < 1:
            raise ValueError(f"children [{symbols}] must have {symbol} >= 1, got {shape_text(children)}")


def seen_children(children: Tensor, window: Window | None) -> tuple[tuple[int, ...], int]:
    """Return the output grid (Ho, Wo), () of a set, and I; raise if the window does not fit into the grid."""
    if window is None:
        return (), children.shape[1]
    height, width = children.shape[2], children.shape[3]
    grid = output_size(window.spec, height, width)
    if grid[0] < 1 or grid[1] < 1:
        extent, (ph, pw) = window_extent(window.spec), window.spec[4:6]
        raise ValueError(
            f"window must fit into the grid: it spans {extent[0]} x {extent[1]} positions with its dilation, "
            f"children have H x W = {height} x {width}, with padding {height + 2 * ph} x {width + 2 * pw}"
        )
    return grid, children.shape[1] * window.positions


def check_weight(children: Tensor, weight: Tensor, window: Window | None) -> tuple[tuple[int, ...], int]:
    """Check ``weight`` and ``window`` against the children; return the output grid (Ho, Wo) and I."""
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape [G, M, D, E], got {shape_text(weight)}")
    for size, symbol in zip(weight.shape, "GMDE", strict=True):
        if size < 1:
            raise ValueError(f"weight [G, M, D, E] must have {symbol} >= 1, got {shape_text(weight)}")
    if weight.shape[2] != children.shape[-1]:
        raise ValueError(
            f"weight [G, M, D, E] must have D = {children.shape[-1]}, the columns of a child's pose; "
            f"got {shape_text(weight)}"
        )
    grid, count = seen_children(children, window)
    if count % weight.shape[0] != 0:
        raise ValueError(
            f"weight [G, M, D, E] must have a G that divides the {count} children that one position sees; "
            f"got {shape_text(weight)}"
        )
    return grid, count


def check_bias(bias: Any, children: Tensor, sizes: Sizes, cast: bool) -> None:
    """Raise unless ``bias`` is None or ``[I or 1, M or 1, C, E]``."""
    if bias is None:
        return
    check_tensor("bias", bias, children, cast)
    if (
        bias.dim() != 4
        or bias.shape[0] not in (1, sizes.children)
        or bias.shape[1] not in (1, sizes.many)
        or bias.shape[2:] != (sizes.rows, sizes.columns)
    ):
        wanted = f"[{sizes.children} or 1, {sizes.many} or 1, {sizes.rows}, {sizes.columns}]"
        raise ValueError(f"bias must have shape [I or 1, M or 1, C, E] = {wanted}, got {shape_text(bias)}")


def check_gate(name: str, gate: Any, children: Tensor, cast: bool) -> None:
    """Raise unless a number for every child, ``[B, I]`` or ``[B, N, H, W]``, is what it should be, or None."""
    if gate is not None:
        check_tensor(name, gate, children, cast)
        check_shape(name, gate, tuple(children.shape[:-2]), "B, I" if children.dim() == 4 else "B, N, H, W")


def check_table(
    name: str, value: Any, children: Tensor, wanted: Sequence[Sequence[int]], symbols: str, cast: bool
) -> None:
    """Raise unless a table of parameters has for each dimension one of the sizes ``wanted`` lists.

    Such tables enter sums of float32 or better, so float32 is as good as a half type of the children's.
    """
    check_tensor(name, value, children, cast, also=(reference.accumulation_dtype(children.dtype),))
    if value.dim() != len(wanted) or any(n not in some for n, some in zip(value.shape, wanted, strict=True)):
        sizes = ", ".join(" or ".join(str(size) for size in dict.fromkeys(some)) for some in wanted)
        raise ValueError(f"{name} must have shape [{symbols}] = [{sizes}], got {shape_text(value)}")


def check_eps(eps: float) -> None:
    """Raise unless ``eps`` is a number of at least 0."""
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0, got {eps}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_finite(name: str, value: Any, least: float = -math.inf) -> None:
    """Raise unless ``value`` is a finite number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < least:
        wanted = "a finite number" + (f" >= {least:g}" if least > -math.inf else "")
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_routing(
    children: Any, weight: Any, bias: Any, gate: Any, window: Any, gate_name: str = "gate"
) -> tuple[Sizes, bool]:
    """Check what all routings have; return the numbers of the call, and whether autocast casts tensors."""
    cast = autocasts(children)
    check_children(children, window, cast)
    check_tensor("weight", weight, children, cast)
    grid, count = check_weight(children, weight, window)
    sizes = Sizes(children.shape[0], grid, count, weight.shape[1], children.shape[-2], weight.shape[3])
    check_bias(bias, children, sizes, cast)
    check_gate(gate_name, gate, children, cast)
    return sizes, cast


def check_attention(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    window: Window | None,
    normalize: bool,
) -> None:
    """Raise TypeError or ValueError for whatever is wrong with the arguments of a routing call."""
    cast = autocasts(children)
    check_children(children, window, cast)
    check_tensor("weight", weight, children, cast)
    grid, count = check_weight(children, weight, window)
    batch, rows = children.shape[0], children.shape[-2]
    _, many, _, columns = weight.shape
    if parents is not None:
        check_tensor("parents", parents, children, cast)
        check_shape(
            "parents", parents, (batch, many, *grid, rows, columns), "B, M, Ho, Wo, C, E" if grid else "B, M, C, E"
        )
    check_bias(bias, children, Sizes(batch, grid, count, many, rows, columns), cast)
    check_gate("gate", gate, children, cast)
    for name, affine in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if affine is not None:
            if not normalize:
                raise ValueError(f"{name} must be None with normalize=False, got a tensor")
            check_tensor(name, affine, children, cast)
            check_shape(name, affine, (rows * columns,), "C * E")
    check_eps(eps)


def refusal(
    name: str, children: Tensor, weight: Tensor | None, stem: str = "attention", parents: int = 1
) -> str | None:
    """Return why a backend cannot take a call on children and weight, public or of the op, or None if it can.

    ``stem`` names the pass, ``parents`` counts them where there is no weight. While ``torch.compile`` traces, sizes may
    be symbols: then limits of poses are left to the op, which sees numbers.
    """
    dtype = ops.autocast_dtype(children.device.type) or children.dtype
    if torch.compiler.is_compiling():
        return backends.refusal(name, children.device, dtype, stem=stem)
    rows, depth = children.shape[-2:]
    columns, many = (depth, parents) if weight is None else (weight.shape[3], weight.shape[1])
    return backends.refusal(name, children.device, dtype, (rows, depth, columns), many, stem)


def chosen_backend(children: Tensor, weight: Tensor | None, stem: str = "attention", parents: int = 1) -> str | None:
    """Return the backend that is forced, if one is; raise BackendError if it cannot take the call."""
    chosen = backends.forced()
    if chosen is not None:
        reason = refusal(chosen, children, weight, stem, parents)
        if reason is not None:
            raise backends.BackendError(f"backend {chosen!r} is forced and cannot take this call: {reason}")
    return chosen


def autocast(device_type: str, *tensors: Tensor | None) -> Any:
    """Return the tensors in the dtype that autocast wants, where it is on; float64 stays."""
    dtype = ops.autocast_dtype(device_type)
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def result_dtype(children: Tensor) -> torch.dtype:
    """Return the dtype of a routing's results: the children's, or autocast's where that is on."""
    if children.dtype == torch.float64:
        return children.dtype
    return ops.autocast_dtype(children.device.type) or children.dtype


def wide(children: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype in which sums are taken: float32, or float64 where the children have it."""
    return tensor.to(reference.accumulation_dtype(children.dtype))


def set_or_grid(coefficients: Tensor, window: Window | None) -> Tensor:
    """Return coefficients ``[B, Ho, Wo, I, M]`` as users see them: of a set ``[B, I, M]``."""
    return coefficients if window is not None else coefficients.squeeze((1, 2))
