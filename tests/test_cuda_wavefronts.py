"""Wavefronts of shared memory, counted as the CUDA sources run on the CPU.

A warp's access takes one wavefront where its lanes' words lie on different banks, more where they meet.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import Case
from cuda_on_cpu import build
from cuda_target import Target, library
from registry import ATTENTION

from fastcaps.rules import Rule

READS, WRITES, COPIES = "012"


@dataclass(frozen=True)
class Count:
    """Accesses of warps, the wavefronts that they took, and the least that could have been."""

    accesses: int = 0
    wavefronts: int = 0
    least: int = 0

    def __add__(self, other: Count) -> Count:
        pairs = ((self.accesses, other.accesses), (self.wavefronts, other.wavefronts), (self.least, other.least))
        return Count(*map(sum, pairs))


def counted(target: str, kernel: str, body: Callable[[], object]) -> dict[str, Count]:
    """Add up by kind what kernels with that in their names do in the body."""
    machine: ctypes.CDLL = build.library(target)
    machine.cuda_on_cpu_wavefronts.restype = ctypes.c_char_p
    build.set_order(target, "forward")
    machine.cuda_on_cpu_count(True)
    body()
    machine.cuda_on_cpu_count(False)
    build.set_order(target, "mixed")
    found = {kind: Count() for kind in (READS, WRITES, COPIES)}
    for line in machine.cuda_on_cpu_wavefronts().decode().splitlines():
        name, kind, *numbers, _ = line.split(";")
        if kernel in name:
            found[kind] += Count(*map(int, numbers))
    return found


@pytest.mark.parametrize(
    ("width", "stride", "wavefronts"),
    [(1, 1, 1), (1, 2, 2), (1, 32, 32), (1, 33, 1), (2, 2, 2), (2, 16, 16), (4, 4, 4), (4, 16, 16), (4, 20, 4)],
)
def test_lanes_meet_at_banks(width: int, stride: int, wavefronts: int) -> None:
    """A lane's numbers lie so many apart from the next lane's; 8 bytes a lane go in two parts, 16 in four."""

    def body() -> None:
        out = torch.zeros(32)
        given = torch.randn(32)
        torch.ops.fastcaps_cuda_on_cpu_samples.run(f"banks{width}", given, out, 1, 32, 32 * 33 * 4, stride)
        assert torch.equal(out, given)

    build.library(build.SAMPLES)
    found = counted(build.SAMPLES, "banks_kernel", body)
    assert found[READS] == found[WRITES] == Count(1, wavefronts, width)


# How many times the least wavefronts may be, of the backward kernels' writes and of their copies.
MOST = {
    ((4, 4, 4), "fast", 5): (2.25, 2.0),
    ((4, 4, 4), "fast", 32): (1.0, 1.9),
    ((4, 4, 4), "tf32", 5): (1.15, 1.35),
    ((4, 4, 4), "tf32", 32): (1.15, 1.35),
    ((6, 6, 6), "fast", 5): (1.0, 1.75),
    ((8, 8, 8), "fast", 5): (1.06, 1.0),
    ((1, 8, 16), "fast", 5): (1.0, 1.0),
    ((1, 16, 16), "fast", 5): (1.0, 1.0),
    ((1, 64, 64), "fast", 5): (2.2, 1.0),
    ((1, 64, 64), "tf32", 5): (2.8, 1.0),
}


@pytest.mark.parametrize(("pose", "option", "parents"), MOST, ids=str)
def test_the_kernels_of_attention(pose: tuple[int, int, int], option: str, parents: int) -> None:
    """Forward, nothing is read twice: that is the loop. Backward, what warps found for each other is, in part."""
    target, case = Target("cpu"), Case("counted", Rule.LAYER_NORM, batch=8, types=2, parents=parents, pose=pose)
    library()
    call, back = ATTENTION.call(case), ATTENTION.backward_call(case)
    forward = counted(build.KERNELS, "forward_kernel", lambda: target.forward(call, option))
    backward = counted(build.KERNELS, "backward_kernel", lambda: target.backward(back, option))
    assert forward[READS].accesses and forward[READS].wavefronts <= 1.01 * forward[READS].least
    assert backward[READS].accesses and backward[READS].wavefronts <= 1.15 * backward[READS].least
    writes, copies = MOST[pose, option, parents]
    assert backward[WRITES].wavefronts <= writes * backward[WRITES].least
    assert backward[COPIES].wavefronts <= copies * backward[COPIES].least


@pytest.mark.parametrize("pose", [(4, 4, 4), (6, 6, 6), (1, 8, 16), (1, 64, 64)], ids=str)
def test_half_precision(pose: tuple[int, int, int]) -> None:
    """What widens it, forward, and what then reads it: (all but) no two lanes meet."""
    case = Case("counted", Rule.LAYER_NORM, batch=8, types=2, parents=5, pose=pose, dtype=torch.bfloat16)
    library()
    call = ATTENTION.call(case)
    found = counted(build.KERNELS, "forward_kernel", lambda: Target("cpu").forward(call))
    for kind in (READS, WRITES):
        assert found[kind].accesses and found[kind].wavefronts <= 1.04 * found[kind].least, kind
