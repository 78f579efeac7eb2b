"""What a PyTorch user would run instead: five alternatives, and this package itself, under one signature.

``einsum`` makes votes and sums by ``torch.einsum``; ``batched-matmul`` makes the votes by one product, in the layout
that the steps that follow like best (``bench/stored.py``); ``blocked-matmul`` makes them by a product for each block of
children, whenever they are asked for (``bench/blocked.py``). ``-compiled`` is ``torch.compile`` of each, with static
shapes and without graph breaks. Every one takes a routing's arguments by name, in public layout, and returns a tuple of
its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastcaps
from bench.stored import Layout
from bench.workload import Implementation, Inputs, Workload

__all__ = ["ALTERNATIVES", "BLOCKED", "OURS", "build", "eager", "is_compiled", "reference", "runner", "swept"]

OURS, BLOCKED = "fastcaps", "blocked-matmul"
ALTERNATIVES = ("einsum", "batched-matmul", BLOCKED, "einsum-compiled", "batched-matmul-compiled")
_SUFFIX = "-compiled"


def is_compiled(name: str) -> bool:
    """Tell whether an implementation goes through torch.compile."""
    return name.endswith(_SUFFIX)


def reference(workload: Workload) -> Implementation:
    """Return this package's own eager code, by which the gate judges; it is no alternative."""
    return fastcaps.backend("reference")(workload.routing.ours(workload))  # type: ignore[operator, no-any-return]


def eager(name: str, workload: Workload, blocks: dict[str, Any] | None = None) -> Implementation:
    """Return the implementation ``name`` of a workload, without the compilation that its name may ask for.

    ``blocks`` is what :func:`swept` found of the blocked one. Raises ValueError for a name that is unknown.
    """
    if name not in (OURS, *ALTERNATIVES):
        raise ValueError(f"unknown implementation {name!r}; there are: {', '.join((OURS, *ALTERNATIVES))}")
    if name == OURS:
        return workload.routing.ours(workload)
    if name == BLOCKED:
        wanted = blocks or {"axes": workload.routing.layout(workload), "block": 2**20}
        return partial(workload.routing.turns, workload, Layout(**wanted), 1)
    einsum = name.removesuffix(_SUFFIX) == "einsum"
    layout = Layout("pimce", einsum=True) if einsum else Layout(workload.routing.layout(workload))
    return partial(workload.routing.turns, workload, layout, 1)


def build(name: str, workload: Workload, safe: bool = False) -> Implementation:
    """Return the implementation ``name`` of a workload; compiled ones compile at their first call.

    ``safe`` leaves out the vectorised loop tails of torch.compile's C++ code (torch 2.13), which write past their
    buffers on some of these shapes: gradients are wrong, or the process dies. Elsewhere they gain up to a tenth.
    """
    run, options = eager(name, workload), {"cpp.enable_loop_tail_vec": False} if safe else None
    return torch.compile(run, dynamic=False, fullgraph=True, options=options) if is_compiled(name) else run


def swept(
    workload: Workload, inputs: Inputs, training: bool, seconds: Callable[[Callable[[], Any]], float]
) -> dict[str, Any]:
    """Return the blocks that serve a call best, by the ``seconds`` that it takes: order of dimensions, then bytes, then
    whether a training step's way back finds votes kept."""
    best: dict[str, Any] = {"axes": workload.routing.layout(workload), "block": 2**20}
    least = math.inf
    for change in ({}, {"axes": "imecp"}, {"block": 2**18}, {"block": 2**22}, *[{"kept": True}] * training):
        one = best | change
        if change and one == best:
            continue
        try:
            took = seconds(runner(eager(BLOCKED, workload, one), inputs, training))
        except RuntimeError:  # votes that are kept may not fit
            continue
        if took < least:
            best, least = one, took
    return best


def runner(run: Implementation, inputs: Inputs, training: bool) -> Callable[[], dict[str, Tensor]]:
    """Return what is timed: one forward call without gradients, or one training step.

    A training step is the forward call and the backward from random gradients of its results to every argument that is
    learned, each into a tensor of its own. What it returns holds the results by name and, of a training step, ``d`` +
    the name of each argument.
    """
    arguments, names = inputs.arguments, tuple(inputs.grads)
    if not training:
        return torch.no_grad()(lambda: dict(zip(names, run(**arguments), strict=True)))
    learned, cotangents = inputs.require_grad().learned, tuple(inputs.grads.values())
    leaves = tuple(learned.values())

    def step() -> dict[str, Tensor]:
        results = run(**arguments)
        gradients = torch.autograd.grad(results, leaves, cotangents)
        found = {name: result.detach() for name, result in zip(names, results, strict=True)}
        return found | {f"d{name}": gradient for name, gradient in zip(learned, gradients, strict=True)}

    return step
