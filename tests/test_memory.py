"""The memory contract, measured: a pass never stores votes, forward or backward.

At batch 8 the votes of the CIFAR-10 network's first routed layer would be 231 MB; forward and backward may grow the
process by 64 MB beyond inputs, outputs, parameters and gradients. The free memory of the process is returned to the
system before each measurement, and its peak reset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import native_only, python
from torch import Tensor

from bench.timing import peak_growth
from fastcaps import Window, functional

pytestmark = [
    pytest.mark.unpoisoned,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset on this system"),
]

Step = tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]
CONV1 = (32, 32, 16, 4, 4, 288, 3, 2)
SHARED = (100_000, 64, 1, 1, 16, 1, 1, 1)
"""Children's types, parents, height and width, rows and columns of a pose, groups, kernel, stride."""


def attention(
    batch: int, types: int, many: int, size: int, rows: int, columns: int, groups: int, kernel: int, stride: int
) -> Step:
    """Return leaves and a call of one iteration that has parents."""
    window = Window(kernel, stride)
    children = torch.randn(batch, types, size, size, rows, columns, requires_grad=True)
    weight = torch.randn(groups, many, columns, columns, requires_grad=True)
    parents = torch.randn(batch, many, *window.output_size(size, size), rows, columns, requires_grad=True)
    inputs = (children, weight, parents)
    return inputs, lambda: [functional.inverted_attention_routing(*inputs, window=window)]


def uniform(*sizes: int) -> Step:
    """The same without parents."""
    (children, weight, _), _ = attention(*sizes)
    window = Window(*sizes[-2:])
    return (children, weight), lambda: [functional.inverted_attention_routing(children, weight, window=window)]


def prior(batch: int, types: int, many: int, columns: int) -> Step:
    """Dynamic routing without matrices."""
    children = torch.randn(batch, types, 1, columns, requires_grad=True)
    start = torch.randn(types, many, requires_grad=True)
    return (children, start), lambda: [functional.dynamic_routing(children, None, parents=many, prior=start)]


def published(batch: int, types: int, many: int, columns: int) -> Step:
    """The same with matrices as published layers store them."""
    children = torch.randn(batch, types, 1, columns, requires_grad=True)
    weight = torch.randn(many, types, columns, columns, requires_grad=True)
    return (children, weight), lambda: [functional.dynamic_routing(children, weight.permute(1, 0, 3, 2))]


def heinsen(many: int, parents: int) -> Step:
    children, scores = torch.randn(1, many, 1, 16, requires_grad=True), torch.randn(1, many, requires_grad=True)
    weight = torch.randn(1, parents, 16, 16).mul_(0.25).requires_grad_()
    betas = torch.randn(1, parents), torch.randn(1, parents)
    inputs = (children, scores, weight)
    return inputs, lambda: functional.heinsen_routing(*inputs, None, *betas, iterations=2)[:3]


def growth(step: Callable[..., Step], few: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Return by how many MB the process grows in a forward and backward beyond what it keeps."""

    def grown(*sizes: int) -> float:
        inputs, run = step(*sizes)
        kept: list[Any] = []

        def forward_and_backward() -> None:
            found = run()
            kept.extend(found)
            kept.extend(torch.autograd.grad(found, inputs, [torch.ones_like(one) for one in found]))

        return (peak_growth(forward_and_backward)[0] - sum(one.numel() * one.element_size() for one in kept)) / 2**20

    grown(*few)  # libraries, thread pools, code that is read on first use
    return grown(*sizes)


@native_only
@pytest.mark.parametrize(
    ("step", "batch", "sizes", "votes"),
    [
        (attention, 8, CONV1, 231),
        (attention, 1, SHARED, 410),
        (uniform, 32, CONV1, 925),
        (prior, 16, (20_000, 32, 16), 655),
        (published, 16, (4000, 32, 16), 131),  # and a copy of the matrices as much
    ],
    ids=["conv1", "many", "uniform", "prior", "published"],
)
def test_a_step_stays_within_64_mb(step: Callable[..., Step], batch: int, sizes: tuple[int, ...], votes: int) -> None:
    found = growth(step, (1, *sizes), (batch, *sizes))
    assert found <= 64, f"grew by {found:.0f} MB where votes would be {votes} MB"


def test_the_measurement_sees_votes_and_the_reference_stores_none() -> None:
    """The reference as one block stores votes, which must show: else these tests could not fail.

    In a separate process, as its many small blocks fit into holes that other tests leave in the heap, or do not. Each
    is taken from the system: mallopt's -3 is the size from which blocks are.
    """
    done = python("""if True:
        import ctypes
        from test_memory import CONV1, attention, growth
        from fastcaps import backend
        from fastcaps.reference import verbs

        getattr(ctypes.CDLL(None), "mallopt", print)(-3, 1 << 16)
        four, one = (4, *CONV1), (1, *CONV1)
        with backend("reference"):
            blocks = growth(attention, one, four)
            verbs.BLOCK = 1 << 40
            print(blocks, growth(attention, one, four))
    """)
    assert done.returncode == 0, done.stderr
    blocks, stored = map(float, done.stdout.split()[-2:])
    assert blocks < 115 / 2  # blocks, and numbers for pairs
    assert stored > 2 * 115  # the votes of batch 4, and their gradient


@native_only
@pytest.mark.parametrize(("children", "parents"), [(200_000, 32), (1000, 10_000)], ids=["children", "parents"])
def test_a_step_does_not_grow_with_the_votes(children: int, parents: int) -> None:
    """Votes would be 390 and 610 MB; a step may keep some copies of children and parents."""
    found, inputs = growth(heinsen, (100, 3), (children, parents)), 4 * 16 * (children + 16 * parents) / 2**20
    assert found <= 3 * inputs + 64, f"grew by {found:.0f} MB"
