"""What runs the ops on a GPU: chosen for each call, when it runs.

The kernels of the passes (of ``fastcaps::attention_pass``, for one) under the dispatch key CUDA are Python functions
made here. They ask :func:`fastcaps.backends.choose` (the CUDA library, then Triton, then the reference, unless one is
forced) and hand the arguments on, with what the user has set for the whole process: deterministic algorithms, and
whether float32 products may round to TF32. Whoever comes through torch reaches them: eager calls, autograd, a compiled
or exported program, the capture of a CUDA graph. They allocate nothing and wait for nothing.

A backward is chosen anew when it runs, by the same rules. All backends save the same tensors (a pass's arguments and
its results, in the accumulation dtype), so one may differentiate what another computed: a backend forced around a
forward alone does not bind the backward, and one forced around the backward is obeyed or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends, libraries, ops
from fastcaps.reference import pooling

__all__ = [
    "ALLOW_TF32",
    "DETERMINISTIC",
    "attention_pass",
    "attention_pass_backward",
    "gaussian_pass",
    "gaussian_pass_backward",
    "options",
    "pooling_pass",
    "pooling_pass_backward",
]

DETERMINISTIC = 1
"""Bit of ``options``: the same input must give the same bits."""
ALLOW_TF32 = 2
"""Bit of ``options``: float32 matrix products may round their factors to TF32."""


def options() -> int:
    """Return the settings of the process that the GPU kernels heed, as bits."""
    bits = DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else 0
    return bits | ALLOW_TF32 if backends.tf32_allowed() else bits


def _choose(stem: str, children: Tensor, weight: Tensor | None, others: Sequence[Any]) -> str | None:
    """Return the backend of a call; None where the arguments are not even of the right rank."""
    if children.dim() != 6 or (weight is not None and weight.dim() != 4):
        return None
    rows, depth = children.shape[4:]
    if weight is not None:
        return backends.choose(children.device, children.dtype, (rows, depth, weight.shape[3]), weight.shape[1], stem)
    query, bias = others[:2]  # of the pooling pass, whose votes may be the children's own poses
    if (query is not None and query.dim() != 6) or (bias is not None and bias.dim() != 4):
        return None
    parents = pooling.parents_of(None, query, bias)
    return backends.choose(children.device, children.dtype, (rows, depth, depth), parents, stem)


def _by_triton(stem: str, function: str, arguments: Sequence[Any]) -> Any:
    bits = options()
    run = getattr(libraries.triton_kernels(stem)[0], function)
    return run(*arguments, deterministic=bool(bits & DETERMINISTIC), allow_tf32=bool(bits & ALLOW_TF32))


def _kernels(one: ops.Pass) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what runs a pass and its backward on a GPU by the backend that is forced or comes first."""
    stem, backward_name = one.stem, one.name + "_backward"
    schema = getattr(torch.ops.fastcaps, backward_name).default._schema
    first = [argument.name for argument in schema.arguments].index("children")
    taken = one.arguments - one.freezes

    def forward(*arguments: Any) -> Any:
        chosen = _choose(stem, arguments[0], arguments[1], arguments[2:])
        if chosen == "cuda":  # checks its arguments itself; that coefficients are constants is the backward's matter
            return getattr(torch.ops.fastcaps_cuda, one.name).default(*arguments[:taken], options())
        one.check(*arguments)
        if chosen == "triton":
            return _by_triton(stem, one.name, arguments[:taken])
        return one.by_reference(*arguments)

    def backward(*arguments: Any) -> Any:
        chosen = _choose(stem, arguments[first], arguments[first + 1], arguments[first + 2 :])
        if chosen == "cuda":
            return getattr(torch.ops.fastcaps_cuda, backward_name).default(*arguments, options())
        one.check_backward(*arguments)
        if chosen == "triton":
            return _by_triton(stem, backward_name, arguments)
        return one.backward_by_reference(*arguments)

    return forward, backward


attention_pass, attention_pass_backward = _kernels(ops.ATTENTION)
pooling_pass, pooling_pass_backward = _kernels(ops.POOLING)
gaussian_pass, gaussian_pass_backward = _kernels(ops.GAUSSIAN)

ops.ATTENTION.implement("CUDA", attention_pass, attention_pass_backward)
ops.POOLING.implement("CUDA", pooling_pass, pooling_pass_backward)
ops.GAUSSIAN.implement("CUDA", gaussian_pass, gaussian_pass_backward)
