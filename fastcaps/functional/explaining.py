"""What a routing call, or all calls of a module, would run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcaps import ops
from fastcaps.explanation import Explanation, Explanations, explain_call
from fastcaps.functional import uniform
from fastcaps.functional.arguments import check_attention
from fastcaps.geometry import SET_WINDOW, Window, to_op, window_extent

__all__ = ["explain", "watch", "watching"]

_watching: list[Explanation] | None = None  # while a module is explained: what its calls would do


def watching() -> bool:
    """Return whether calls are to be explained rather than run."""
    return _watching is not None


def explain(
    children: Tensor | torch.nn.Module,
    weight: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    scale: float | None = None,
    window: Window | None = None,
    normalize: bool = True,
    return_coefficients: bool = False,
) -> Explanation | Explanations:
    """Say which backend, kernel and tile would run a routing call, and why not the others.

    Called with the arguments of :func:`~fastcaps.functional.inverted_attention_routing`, or with a module and its
    inputs: ``explain(layer, children, parents)``, ``explain(network, images)``. A routing layer may be given alone; it
    is then explained for a batch of 1 (on a grid, the smallest), with parents.

    No routing is computed; the other parts of a module (convolutions, say) do run. Raises what the call itself would
    raise for wrong arguments, but not :class:`~fastcaps.BackendError`: that a forced backend cannot take the call is
    part of the answer.

    Returns
    -------
    Explanation or Explanations
        The latter, a tuple, for a module that makes any other number of calls than one. Both print as text.
    """
    if isinstance(children, torch.nn.Module):
        given = [argument for argument in (weight, parents) if argument is not None]
        return _explain_module(children, *(given or _smallest_inputs(children)))
    if weight is None:
        raise TypeError("weight must be a torch.Tensor, got NoneType")
    check_attention(children, weight, parents, bias, gate, norm_weight, norm_bias, eps, window, normalize)
    return _explain_call(children, weight, parents, window)


def _explain_call(children: Tensor, weight: Tensor, parents: Tensor | None, window: Window | None) -> Explanation:
    """Explain a call whose arguments are right."""
    grid, spec = to_op(children, window), SET_WINDOW if window is None else window.spec
    dtype = ops.autocast_dtype(children.device.type) or children.dtype
    library_first = not uniform.kernel_beats_library(grid, weight, spec)
    return explain_call(grid, weight, spec, dtype, parents is not None, library_first)


def _explain_module(module: torch.nn.Module, *inputs: Tensor) -> Explanation | Explanations:
    """Run a module with its routing calls replaced by their explanations."""
    global _watching
    before, _watching = _watching, []
    try:
        with torch.no_grad():
            module(*inputs)
        found = _watching
    finally:
        _watching = before
    return found[0] if len(found) == 1 else Explanations(found)


def _smallest_inputs(layer: Any) -> list[Tensor]:
    """Return children and parents of the smallest call that a routing layer takes."""
    if not hasattr(layer, "in_capsules") or not hasattr(layer, "window"):
        raise TypeError(f"explain: a {type(layer).__name__} must be given with its inputs: explain(module, inputs)")
    window = layer.window
    extent, padding = ((), ()) if window is None else (window_extent(window.spec), window.spec[4:6])
    grid = [max(1, size - 2 * pad) for size, pad in zip(extent, padding, strict=True)]
    parents_grid = [] if window is None else window.output_size(*grid)
    weight: Tensor = layer.weight
    return [
        weight.new_zeros((1, layer.in_capsules, *grid, layer.in_dim)),
        weight.new_zeros((1, layer.out_capsules, *parents_grid, layer.out_dim)),
    ]


def watch(
    children: Tensor, weight: Tensor, parents: Tensor | None, window: Window | None, return_coefficients: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Note what a call would do; return zeros of the shapes that it would return."""
    assert _watching is not None
    _watching.append(_explain_call(children, weight, parents, window))
    many = weight.shape[1]
    spatial = () if window is None else window.output_size(children.shape[2], children.shape[3])
    batch, count = children.shape[0], children.shape[1] * (1 if window is None else window.positions)
    dtype = ops.autocast_dtype(children.device.type) or children.dtype
    routed = children.new_zeros((batch, many, *spatial, children.shape[-2], weight.shape[3]), dtype=dtype)
    return (routed, children.new_zeros((batch, *spatial, count, many))) if return_coefficients else routed
