"""The machine that runs the CUDA sources on the CPU, by planted faults; what it computes, the kernels' tests show.

A fault must be found whatever the order in which blocks and threads come; the same kernel without it passes in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_on_cpu import build
from torch import Tensor

THREADS, BLOCKS = 128, 3
FAULTS = {
    "none": "",
    "no barrier": "no barrier in between",
    "no barrier again": "no barrier in between",
    "no barrier in a warp": "no barrier in between",
    "barrier of its own part only": "no barrier in between",
    "read behind": "reads byte 1024 of shared memory, of which it has 1024",
    "read before": "reads byte -4 of shared memory, of which it has 1024",
    "write behind": "writes byte 1024 of shared memory, of which it has 1024",
    "read far away": "of shared memory, of which it has 1024",
    "not written": "",
    "shared never written": "",
    "some leave": "shuffle_xor",
    "others leave": "shuffle_xor",
    "different barriers": "wait at barrier.*wait at barrier_part 2",
    "different exchanges": "any_lane.*shuffle_xor|shuffle_xor.*any_lane",
    "part of a warp": "barrier_part|a part of warp",
    "copy too early": "without having waited yet",
    "copy without barrier": "no barrier in between|without having waited yet",
    "copy over reads": "no barrier in between|without having waited yet",
    "copy misaligned": "copies 8 bytes to an address that is not a multiple of them",
    "misaligned": "accesses 4 bytes at an address that is not a multiple of them",
    "vector misaligned": "reads 16 bytes at an address that is not a multiple of them",
    "register index": r"takes element [4-7] of 'float \[4\]'",
    "blocks collide": "another block",
    "blocks add plainly": "another block",
    "nowhere": "memory that is not there",
    "endless": "its stack is used up",
}
"""What is said of each, in the order of ``Fault`` in cuda_on_cpu/samples.cu."""


@pytest.fixture(params=["forward", "backward", "shuffled"], autouse=True)
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    build.set_order(build.SAMPLES, request.param)
    yield request.param
    build.set_order(build.SAMPLES, "mixed")


def run(
    given: Tensor, fault: int = 0, blocks: int = BLOCKS, threads: int = THREADS, shared: int = 8 * THREADS
) -> Tensor:
    """Launch the kernel with a fault; what it does not write stays NaN."""
    build.library(build.SAMPLES)
    out = torch.full(given.shape, torch.nan)
    torch.ops.fastcaps_cuda_on_cpu_samples.run(given, out, blocks, threads, shared, fault)
    return out


def faulty(name: str, threads: int = THREADS) -> Tensor:
    given = torch.randn(BLOCKS * threads)
    found = run(given, fault=[*FAULTS].index(name), threads=threads, shared=8 * threads)
    blocks = given.view(BLOCKS, threads)
    torch.testing.assert_close(found.view(BLOCKS, threads), blocks + blocks.flip(-1))
    return found


@pytest.mark.parametrize("threads", [128, 192, 1024])
def test_without_faults(threads: int) -> None:
    faulty("none", threads)


@pytest.mark.parametrize("name", [name for name, words in FAULTS.items() if words])
def test_faults_are_errors(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"faults_kernel.*block \(\d+, 0\).*(?:{FAULTS[name]})"):
        faulty(name)
    faulty("none")  # nothing of it stays


@pytest.mark.parametrize("name", ["not written", "shared never written"])
def test_what_was_not_written_shows(name: str) -> None:
    with pytest.raises(AssertionError, match=r"(?i)nan|mismatched"):
        faulty(name)


@pytest.mark.parametrize(
    ("what", "wrong"), [("threads", 100), ("threads", 1056), ("shared", 227 * 1024 + 1), ("blocks", 2**31)]
)
def test_wrong_launches_are_errors(what: str, wrong: int) -> None:
    with pytest.raises(RuntimeError, match=f"launch of samples::faults_kernel: .*{wrong}"):
        run(torch.zeros(BLOCKS * THREADS), **{what: wrong})
