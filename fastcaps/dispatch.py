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

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends, libraries, ops
from fastcaps.geometry import geometry_of
from fastcaps.reference import pooling

__all__ = [
    "ALLOW_TF32",
    "DETERMINISTIC",
    "attention_pass",
    "attention_pass_backward",
    "attention_routing",
    "attention_turns_backward",
    "gaussian_pass",
    "gaussian_pass_backward",
    "gaussian_routing",
    "gaussian_turns_backward",
    "options",
    "pooling_pass",
    "pooling_pass_backward",
    "pooling_routing",
    "pooling_turns_backward",
]

DETERMINISTIC = 1
"""Bit of ``options``: the same input must give the same bits."""
ALLOW_TF32 = 2
"""Bit of ``options``: float32 matrix products may round their factors to TF32."""


def options() -> int:
    """Return the settings of the process that the GPU kernels heed, as bits."""
    bits = DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else 0
    return bits | ALLOW_TF32 if backends.tf32_allowed() else bits


def _choose(stem: str, children: Tensor, weight: Tensor | None, parents: int) -> str | None:
    """Return the backend of a call; None where the arguments are not even of the right rank."""
    if children.dim() != 6 or (weight is not None and weight.dim() != 4) or parents < 1:
        return None
    rows, depth = children.shape[4:]
    columns, parents = (depth, parents) if weight is None else (weight.shape[3], weight.shape[1])
    return backends.choose(children.device, children.dtype, (rows, depth, columns), parents, stem)


def _parents(weight: Tensor | None, others: Sequence[Any]) -> int:
    """Return M of a pass; 0 where query or bias, which tell it where there is no weight, are of the wrong rank."""
    if weight is not None:
        return 1
    query, bias = others[:2]  # of the pooling pass, whose votes may be the children's own poses
    if (query is not None and query.dim() != 6) or (bias is not None and bias.dim() != 4):
        return 0
    return pooling.parents_of(None, query, bias)


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
        children, weight = arguments[:2]
        chosen = _choose(stem, children, weight, _parents(weight, arguments[2:]))
        if chosen == "cuda":  # checks its arguments itself; that coefficients are constants is the backward's matter
            return getattr(torch.ops.fastcaps_cuda, one.name).default(*arguments[:taken], options())
        one.check(*arguments)
        if chosen == "triton":
            return _by_triton(stem, one.name, arguments[:taken])
        return one.by_reference(*arguments)

    def backward(*arguments: Any) -> Any:
        children, weight = arguments[first : first + 2]
        chosen = _choose(stem, children, weight, _parents(weight, arguments[first + 2 :]))
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
attention_turns_backward, pooling_turns_backward, gaussian_turns_backward = (one.loop_over_turns for one in ops.PASSES)


def _machine(device: torch.device) -> tuple[int, int]:
    """Return a GPU's multiprocessors, and the largest shared memory of a block in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _fuses(
    routing: ops.Routing, children: Tensor, weight: Tensor | None, parents: int, window: Sequence[int], turns: int
) -> bool:
    """Return whether the CUDA library has a kernel that runs all turns of a call."""
    if not hasattr(torch.ops.fastcaps_cuda, routing.name):
        return False
    geometry = geometry_of(children, weight, window, parents)
    numbers = (ctypes.c_int64 * len(geometry))(*geometry)
    order = [one.stem for one in ops.PASSES].index(routing.stem)
    facts = (order, int(weight is None), turns, options(), int(children.dtype != torch.float32))
    machine = _machine(children.device)
    return libraries.library("cuda").ask("fastcaps_cuda_routing_refusal", numbers, *facts, *machine) == ""


def _routing_kernel(routing: ops.Routing) -> Callable[..., Any]:
    """Return what runs a whole routing on a GPU: a kernel for all turns where there is one, else the loop of passes."""
    schema = getattr(torch.ops.fastcaps, routing.name).default._schema
    names = [argument.name for argument in schema.arguments]

    def run(*arguments: Any) -> Any:
        given = dict(zip(names, arguments, strict=True))
        children, weight, parents = given["children"], given["weight"], given.get("parents", 1)
        turns = given["iterations"] if "iterations" in given else len(given["schedule"])
        if _choose(routing.stem, children, weight, parents) == "cuda":
            routing.check(*arguments)
            if _fuses(routing, children, weight, parents, given["window"], turns):
                results = getattr(torch.ops.fastcaps_cuda, routing.name).default(*arguments, options())
                if routing is ops.POOLING_ROUTING:  # its history is what a loop of passes would keep
                    results = (results[0], results[1].to(children.dtype), results[2])
                return results
        return routing.by_passes(*arguments)

    return run


attention_routing, pooling_routing, gaussian_routing = (_routing_kernel(routing) for routing in ops.ROUTINGS)

ops.ATTENTION.implement("CUDA", attention_pass, attention_pass_backward)
ops.POOLING.implement("CUDA", pooling_pass, pooling_pass_backward)
ops.GAUSSIAN.implement("CUDA", gaussian_pass, gaussian_pass_backward)
for _one in ops.PASSES:
    _one.serve_by_loop("CUDA")
ops.ATTENTION_ROUTING.implement("CUDA", attention_routing)
ops.POOLING_ROUTING.implement("CUDA", pooling_routing)
ops.GAUSSIAN_ROUTING.implement("CUDA", gaussian_routing)
