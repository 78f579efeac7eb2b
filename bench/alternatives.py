"""What a PyTorch user would run instead, and this package itself, under one signature.

- ``batched-matmul`` stores the votes, made by one product, in the layout that the iterations like best
  (``bench/votes.py``); it has a place in the tables for its memory.
- ``einsum-compiled`` leaves votes and sums to ``torch.einsum``, as published code does, under ``torch.compile``.
- ``blocked-matmul`` makes them by a product for each block of children, whenever needed (``bench/votes.py``).
- ``folded-matmul`` makes none: where children share matrices, sums over children come first (``bench/folded.py``).

``-compiled`` is ``torch.compile`` with static shapes and without graph breaks: of the function that every block runs,
else of the whole. Each takes a routing's arguments by name, in public layout, and returns a tuple of its results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fastcaps
from bench.votes import Layout
from bench.workload import Implementation, Inputs, Workload
from bench.workloads import WORKLOADS

OURS, STORED, BLOCKED, FOLDED, EINSUM = (
    "fastcaps", "batched-matmul", "blocked-matmul", "folded-matmul", "einsum-compiled",
)  # fmt: skip
TRITON = f"{OURS}-triton"  # this package by its Triton kernels, whatever else it has
_SUFFIX = "-compiled"
ALTERNATIVES = (*(name + end for name in (STORED, BLOCKED, FOLDED) for end in ("", _SUFFIX)), EINSUM)

_LAYOUTS: dict[str, dict[str, Any]] = {
    STORED: {},
    BLOCKED: {"block": 2**22},
    FOLDED: {"axes": "pmice", "folded": True, "block": 2**24},
    EINSUM.removesuffix(_SUFFIX): {"axes": "pimce"},
}
"""How each makes its votes, as :class:`bench.votes.Layout` says it."""

_LARGE = 2**30  # bytes of votes above which they are not stored in a processor's memory
_SMALL = 2**23  # bytes of votes that fit the cache as they are
_WHOLE = 2**25  # bytes of shares up to which a folded call is compiled as one


def is_compiled(name: str) -> bool:
    """Return whether an implementation uses torch.compile."""
    return name.endswith(_SUFFIX)


def suited(names: Sequence[str], work: Workload, batch: int, on_cpu: bool = True) -> list[str]:
    """Return those of ``names`` that can be the fastest of a workload at a batch.

    Where many children share their matrices, folding wins by far over making votes, unless the squares of a Gaussian's
    poses are many more than the numbers of a vote. Elsewhere, on a CPU, votes in blocks win over stored ones of some
    megabytes.
    """
    if not work.routing.makes_votes:
        return [one for one in names if one.startswith(STORED)]
    wide = work.routing.subject == "gaussian" and work.columns_in > 4 * work.pose
    folded = work.children >= 32 * work.matrices and not wide
    found = {FOLDED, FOLDED + _SUFFIX} if folded else {BLOCKED, BLOCKED + _SUFFIX}
    if (not on_cpu or work.votes_bytes(batch) < _LARGE) and not (folded and work.routing.subject == "attention"):
        found |= {STORED + _SUFFIX, EINSUM}
    if not on_cpu:  # a GPU would wait for the launches of blocks; stored votes have a column for their memory
        found = found - {BLOCKED, BLOCKED + _SUFFIX} | {STORED}
    elif work.votes_bytes(batch) < _SMALL:
        found = found - {BLOCKED} | {STORED}
    return [one for one in names if one in found]


def reference(workload: Workload) -> Implementation:
    """Return this package's own eager code, by which the gate judges; it is no alternative."""
    return fastcaps.backend("reference")(workload.routing.ours(workload))  # type: ignore[operator, no-any-return]


def axes_of(work: Workload) -> str:
    """Return the order of the votes' dimensions that was measured to serve stored votes best (:mod:`bench.votes`).

    If all children share their matrices they come last, so that votes are one matmul and every sum runs over
    neighbours. With positions last nothing is copied, and everything after the votes vectorises: matrix poses on a
    grid. Else votes are copied once, with children after parents, so that agreement and sum are a batched matmul each.
    """
    if work.matrices == 1:
        return "mecpi"
    return "imecp" if work.rows > 1 and work.positions > 1 else "pmice"


def build(name: str, work: Workload, batch: int | None = None, safe: bool = False) -> Implementation:
    """Return the implementation ``name`` of a workload; compiled ones compile at their first call.

    ``safe`` leaves out the vectorised loop tails of torch.compile's C++ code (torch 2.13), which write past their
    buffers on some of these shapes: gradients are wrong, or the process dies. Elsewhere they gain up to a tenth.
    """
    if name == OURS:
        return work.routing.ours(work)
    if name == TRITON:
        return fastcaps.backend("triton")(work.routing.ours(work))  # type: ignore[operator, no-any-return]
    batch, kind = batch or work.batch, name.removesuffix(_SUFFIX)
    layout: dict[str, Any] = {"axes": axes_of(work), **_LAYOUTS[kind]}
    options = {"cpp.enable_loop_tail_vec": False} if safe else {}
    if is_compiled(name):
        if kind == BLOCKED:  # elementwise products, which are fused; positions last, where there are some
            layout["axes"] = "imecp" if batch * max(1, work.positions) > 8 else "imcep"
        elif kind == FOLDED:
            layout["block"] = 2**22 if 4 * work.votes(batch) > _WHOLE else 0
        layout["compiled"] = options if layout.get("block") else None
    run = work.routing.routed(work, Layout(**layout))
    if is_compiled(name) and not layout.get("block"):
        return torch.compile(run, dynamic=False, fullgraph=True, options=options)
    return run


def runner(run: Implementation, inputs: Inputs, training: bool) -> Callable[[], dict[str, Tensor]]:
    """Return what is timed: one forward call without gradients, or one training step, which is also the backward from
    random gradients of its results to every argument that is learned. It returns the results by name and, of a training
    step, ``d`` + the name of each argument."""
    arguments, names = inputs.arguments, tuple(inputs.grads)
    if not training:
        return torch.no_grad()(lambda: dict(zip(names, run(**arguments), strict=True)))
    learned, cotangents = inputs.learned, tuple(inputs.grads.values())
    leaves = tuple(tensor.requires_grad_() for tensor in learned.values())

    def step() -> dict[str, Tensor]:
        results = run(**arguments)
        gradients = torch.autograd.grad(results, leaves, cotangents)
        found = {name: result.detach() for name, result in zip(names, results, strict=True)}
        return found | {f"d{name}": gradient for name, gradient in zip(learned, gradients, strict=True)}

    return step


def main() -> None:
    """Print the workloads and the alternatives, with --json as a document."""
    known = {name: f"{one.source}; batch {', '.join(map(str, one.batches))}" for name, one in WORKLOADS.items()}
    if "--json" in sys.argv:
        print(json.dumps({"workloads": known, "alternatives": ALTERNATIVES}, indent=2))
    else:
        print(*(f"{name:<22}  {what}" for name, what in known.items()), sep="\n")
        print("alternatives:", ", ".join(ALTERNATIVES))


if __name__ == "__main__":  # lists workloads and alternatives
    main()
