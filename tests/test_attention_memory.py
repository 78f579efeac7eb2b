"""The memory contract, measured: a pass never stores votes, forward or backward.

Each measurement is a fresh process that resets its own peak: at batch 32 the votes of the CIFAR-10 network's first
routed layer would be 925 MB; forward and backward may grow the process by 64 MB beyond inputs, outputs, parameters and
gradients.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from suite import native_only

pytestmark = [
    pytest.mark.unpoisoned,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset on this system"),
]

MEASURE = """
import torch
from fastcaps import Window, functional

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

def run(batch, many):
    children = torch.randn(batch, {types}, {size}, {size}, {rows}, {columns}, requires_grad=True)
    weight = torch.randn({groups}, many, {columns}, {columns}, requires_grad=True)
    window = Window({kernel}, {stride})
    out = window.output_size({size}, {size})
    parents = torch.randn(batch, many, *out, {rows}, {columns}, requires_grad=True)
    inputs = (children, weight, parents) if {routed} else (children, weight)
    grad = torch.randn_like(parents)
    torch.ones(1).add_(1)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status("VmRSS")
    routed = functional.inverted_attention_routing(*inputs, window=window)
    gradients = torch.autograd.grad(routed, inputs, grad)
    kept = sum(t.numel() * t.element_size() for t in (routed, *gradients)) / 2**20
    return status("VmHWM") - before - kept

run(1, {many})  # libraries, thread pools, code that is read on first use
print(run({batch}, {many}))
"""

NAMES = ("types", "many", "size", "rows", "columns", "groups", "kernel", "stride", "batch")
CONV1 = dict(zip(NAMES, (32, 32, 16, 4, 4, 288, 3, 2, 32), strict=True))
SET = dict(zip(NAMES, (800, 10, 1, 4, 4, 800, 1, 1, 128), strict=True))
SHARED = dict(zip(NAMES, (100_000, 64, 1, 1, 16, 1, 1, 1, 1), strict=True))


def growth(**settings: object) -> float:
    """Return by how many MB a fresh process grows in a forward and backward beyond what it keeps."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE.format(**settings)], capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@native_only
@pytest.mark.parametrize(
    ("settings", "votes"), [(CONV1, 925), (SET, 66), (SHARED, 410)], ids=["conv1", "set", "many-children"]
)
def test_a_routed_step_stays_within_64_mb(settings: dict[str, int], votes: int) -> None:
    found = growth(routed=True, **settings)
    assert found <= min(64, votes), f"grew by {found:.0f} MB where votes would be {votes} MB"


@pytest.mark.parametrize("settings", [CONV1, SHARED], ids=["conv1", "many-children"])
def test_a_uniform_step_stays_within_64_mb(settings: dict[str, int]) -> None:
    found = growth(routed=False, **settings)
    assert found <= 64, f"grew by {found:.0f} MB"


def test_the_measurement_sees_votes() -> None:
    """The reference, which stores votes, must show: else the tests above could not fail."""
    import os

    before = os.environ.get("FASTCAPS_BACKEND")
    os.environ["FASTCAPS_BACKEND"] = "reference"
    try:
        found = growth(routed=True, **{**CONV1, "batch": 4})
    finally:
        if before is None:
            del os.environ["FASTCAPS_BACKEND"]
        else:
            os.environ["FASTCAPS_BACKEND"] = before
    assert found > 115  # the votes of batch 4, once
