"""The memory contract, measured: a pass never stores votes, forward or backward.

Each measurement is a fresh process that resets its own peak: at batch 32 the votes of the CIFAR-10 network's first
routed layer would be 925 MB; forward and backward may grow the process by 64 MB beyond inputs, outputs, parameters and
gradients.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from suite import native_only, python

pytestmark = [
    pytest.mark.unpoisoned,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset on this system"),
]

STEP = """
import torch
from fastcaps import Window, functional
from fastcaps.measure import peak_growth

{step}

def grown(*sizes):
    inputs, run = step(*sizes)
    kept = []
    def forward_and_backward():
        found = run()
        kept.extend(found)
        kept.extend(torch.autograd.grad(found, inputs, [torch.ones_like(one) for one in found]))
    return (peak_growth(forward_and_backward) - sum(one.numel() * one.element_size() for one in kept)) / 2**20

grown(*{few})  # libraries, thread pools, code that is read on first use
print(grown(*{sizes}))
"""
ATTENTION = """
def step(batch, types, many, size, rows, columns, groups, kernel, stride, routed):
    children = torch.randn(batch, types, size, size, rows, columns, requires_grad=True)
    weight = torch.randn(groups, many, columns, columns, requires_grad=True)
    window = Window(kernel, stride)
    parents = torch.randn(batch, many, *window.output_size(size, size), rows, columns, requires_grad=True)
    inputs = (children, weight, parents) if routed else (children, weight)
    return inputs, lambda: [functional.inverted_attention_routing(*inputs, window=window)]
"""
HEINSEN = """
def step(many, parents):
    children, scores = torch.randn(1, many, 1, 16, requires_grad=True), torch.randn(1, many, requires_grad=True)
    weight = torch.randn(1, parents, 16, 16).mul_(0.25).requires_grad_()
    betas = torch.randn(1, parents), torch.randn(1, parents)
    run = lambda: functional.heinsen_routing(children, scores, weight, None, *betas, iterations=2)[:3]
    return (children, weight, scores), run
"""
CONV1 = (32, 32, 32, 16, 4, 4, 288, 3, 2)
SHARED = (1, 100_000, 64, 1, 1, 16, 1, 1, 1)
"""Batch, children's types, parents, height and width, rows and columns of a pose, groups, kernel, stride."""


def growth(step: str, sizes: tuple[object, ...], few: tuple[object, ...], **variables: str) -> float:
    """Return by how many MB a fresh process grows in a forward and backward beyond what it keeps."""
    done = python("-W", "ignore", "-c", STEP.format(step=step, sizes=sizes, few=few), **variables)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def growth_of_attention(sizes: tuple[int, ...], routed: bool, **variables: str) -> float:
    return growth(ATTENTION, (*sizes, routed), (1, *sizes[1:], routed), **variables)


@native_only
@pytest.mark.parametrize(("sizes", "votes"), [(CONV1, 925), (SHARED, 410)], ids=["conv1", "many"])
def test_a_routed_step_stays_within_64_mb(sizes: tuple[int, ...], votes: int) -> None:
    found = growth_of_attention(sizes, routed=True)
    assert found <= 64, f"grew by {found:.0f} MB where votes would be {votes} MB"


def test_a_uniform_step_stays_within_64_mb() -> None:
    found = growth_of_attention(CONV1, routed=False)
    assert found <= 64, f"grew by {found:.0f} MB"


def test_the_measurement_sees_votes_and_the_reference_stores_none() -> None:
    """The reference as one block stores votes, which must show: else these tests could not fail."""
    stored = ATTENTION + "\nfrom fastcaps.reference import verbs\nverbs.BLOCK = 1 << 40\n"
    four, one = (4, *CONV1[1:], True), (1, *CONV1[1:], True)
    # many small blocks leave holes in the heap, so that each comes from the system
    variables = {"FASTCAPS_BACKEND": "reference", "MALLOC_MMAP_THRESHOLD_": "65536"}
    assert growth(stored, four, one, **variables) > 2 * 115  # the votes of batch 4, and their gradient
    assert growth(ATTENTION, four, one, **variables) < 115 / 2  # blocks, and numbers for pairs


@native_only
@pytest.mark.parametrize(("children", "parents"), [(200_000, 32), (1000, 10_000)], ids=["children", "parents"])
def test_a_step_does_not_grow_with_the_votes(children: int, parents: int) -> None:
    """Votes would be 390 and 610 MB; a step may keep some copies of children and parents."""
    found, inputs = growth(HEINSEN, (children, parents), (100, 3)), 4 * 16 * (children + 16 * parents) / 2**20
    assert found <= 3 * inputs + 64, f"grew by {found:.0f} MB"
