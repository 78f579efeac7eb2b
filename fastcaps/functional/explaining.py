"""What a routing call, or all calls of a module, would run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import ops
from fastcaps.explanation import Explanation, Explanations, explain_call
from fastcaps.functional import uniform
from fastcaps.functional.arguments import check_attention, result_dtype
from fastcaps.geometry import SET_WINDOW, Window, to_op

__all__ = ["explain", "watch", "watch_routing", "watching"]

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
    is then explained for a batch of 1 (on a grid, the smallest), with parents. Of a routing of several turns its passes
    with parents are explained.

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


def _smallest_inputs(layer: Any) -> Sequence[Tensor]:
    """Return the arguments of the smallest call that a routing layer takes."""
    if not hasattr(layer, "smallest_inputs"):
        raise TypeError(f"explain: a {type(layer).__name__} must be given with its inputs: explain(module, inputs)")
    inputs: Sequence[Tensor] = layer.smallest_inputs()
    return inputs


def watch(
    children: Tensor, weight: Tensor, parents: Tensor | None, window: Window | None, return_coefficients: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Note what an attention pass would do; return zeros of the shapes that it would return."""
    assert _watching is not None
    _watching.append(_explain_call(children, weight, parents, window))
    routed, shares = _zeros(children, weight, window, weight.shape[1])
    return (routed, shares) if return_coefficients else routed


def watch_routing(
    stem: str, children: Tensor, weight: Tensor | None, window: Window | None, parents: int
) -> tuple[Tensor, Tensor]:
    """Note what the passes of a whole routing would do; return zeros in the place of the poses and the coefficients.

    ``stem``: the kind of pass, "attention", "pooling" or "gaussian".
    """
    assert _watching is not None
    grid, spec = to_op(children, window), SET_WINDOW if window is None else window.spec
    _watching.append(explain_call(grid, weight, spec, result_dtype(children), True, False, stem, parents))
    return _zeros(children, weight, window, parents)


def _zeros(children: Tensor, weight: Tensor | None, window: Window | None, parents: int) -> tuple[Tensor, Tensor]:
    """Return zeros in the place of parents and coefficients, in public layout."""
    spatial = () if window is None else window.output_size(children.shape[2], children.shape[3])
    batch, count = children.shape[0], children.shape[1] * (1 if window is None else window.positions)
    columns = children.shape[-1] if weight is None else weight.shape[3]
    routed = children.new_zeros((batch, parents, *spatial, children.shape[-2], columns), dtype=result_dtype(children))
    return routed, children.new_zeros((batch, *spatial, count, parents))
