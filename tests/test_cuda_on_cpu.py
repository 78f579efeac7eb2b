"""The machine that runs the CUDA sources on the CPU: its primitives against plain models, and planted faults.

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
    "misaligned": "float4.*not a multiple of 16",
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
    name: str, given: Tensor, *shape: int, blocks: int = 1, threads: int = 32, shared: int = 0, option: int = 0
) -> Tensor:
    """Launch a sample; what it does not write stays NaN."""
    build.library(build.SAMPLES)
    out = torch.full(shape, torch.nan)
    torch.ops.fastcaps_cuda_on_cpu_samples.run(name, given.contiguous(), out, blocks, threads, shared, option)
    return out


# ---- primitives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [0, 1, 2, 4, 8, 16, 21])
def test_exchanges_between_lanes(option: int) -> None:
    given = torch.rand(BLOCKS, THREADS // 32, 32) * 2
    given[0, 0], given[0, 1], given[0, 1, 5] = 1.5, 0.5, 1.5
    found = run("exchange", given, *given.shape, 2, blocks=BLOCKS, threads=THREADS, option=option)
    assert torch.equal(found[..., 0], given[..., torch.arange(32) ^ option])
    assert torch.equal(found[..., 1] > 0, (given > 1).any(-1, keepdim=True).expand(given.shape))


def _tf32(values: Tensor) -> Tensor:
    return ((values.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@pytest.mark.parametrize("depth", [4, 8])
def test_tensor_cores(depth: int) -> None:
    """Every lane's fragments: no two numbers of A and B are the same, so none can stand in another's place."""
    first, second = torch.randn(16, depth), torch.randn(depth, 8)
    found = run(f"mma{depth}", torch.cat([first.reshape(-1), second.reshape(-1)]), 16, 8)
    exact = 1 + _tf32(first).double() @ _tf32(second).double()
    torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=2e-7)
    assert (found.double() - 1 - first.double() @ second.double()).abs().max() > 1e-5, "not rounded to tf32"


@pytest.mark.parametrize(("name", "dtype"), [("mma-bf16", torch.bfloat16), ("mma-f16", torch.float16)])
def test_tensor_cores_of_half_precision(name: str, dtype: torch.dtype) -> None:
    first, second = torch.randn(16, 16).to(dtype).float(), torch.randn(16, 8).to(dtype).float()
    found = run(name, torch.cat([first.reshape(-1), second.reshape(-1)]), 16, 8)
    torch.testing.assert_close(found.double(), 1 + first.double() @ second.double(), rtol=2e-7, atol=2e-7)


NUMBERS = torch.cat(
    [
        torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0, 1e-8, -126.0, -127.5]),
        torch.tensor([1e-40, 6e-8, 3e-5, 3.3895314e38, 1 + 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 128.0, 127.99]),
        torch.linspace(-30, 30, 1001),
    ]
)


@pytest.mark.parametrize(
    ("option", "model", "tolerance"),
    [
        (0, lambda x: torch.where(x.exp2() < 2.0**-126, 0.0, x.exp2()), 2.5e-7),
        (1, lambda x: 1 / x, 0.0),
        (2, lambda x: (1 / x.double().sqrt().float().double()).float(), 0.0),
        (3, lambda x: x.bfloat16().float(), 0.0),
        (4, lambda x: x.half().float(), 0.0),
        (5, lambda x: torch.where(x.isfinite(), _tf32(x), x), 0.0),
    ],
    ids=["exp2", "reciprocal", "reciprocal_sqrt", "bfloat16", "float16", "tf32"],
)
def test_numbers(option: int, model: object, tolerance: float) -> None:
    blocks = -(-NUMBERS.numel() // 64)
    found = run("numbers", NUMBERS, NUMBERS.numel(), blocks=blocks, threads=64, option=option)
    torch.testing.assert_close(found, model(NUMBERS), rtol=tolerance, atol=0, equal_nan=True)


def test_atomics() -> None:
    given = torch.randint(-8, 8, (BLOCKS * THREADS,)).float()
    out = torch.zeros(8)
    build.library(build.SAMPLES)
    torch.ops.fastcaps_cuda_on_cpu_samples.run("atomics", given, out, BLOCKS, THREADS, 0, 0)
    assert torch.equal(out[:4], given.view(-1, 4).sum(0))
    assert torch.equal(out[4:], given.sum() * torch.arange(1, 5))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_asynchronous_copies(width: int) -> None:
    given = torch.randn(192 * 4)
    found = run(f"copy{width}", given, given.numel(), threads=64, shared=given.numel() * 4)
    units = given.view(-1, width // 4).clone()
    units[::3] = 0
    assert torch.equal(found, units.view(-1))


def test_parts_of_a_block_do_not_wait_for_each_other() -> None:
    given = torch.randn(2, 96)
    found = run("parts", given, 2, 96, threads=192, shared=192 * 4)
    assert torch.equal(found, given.flip(-1))


# ---- faults ----------------------------------------------------------------------------------------------------------


def faulty(name: str, threads: int = THREADS) -> Tensor:
    given = torch.randn(BLOCKS * threads)
    where = {"blocks": BLOCKS, "threads": threads, "shared": 2 * 4 * threads}
    found = run("faults", given, given.numel(), **where, option=[*FAULTS].index(name))
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
    with pytest.raises(RuntimeError, match=f"launch of samples::exchange_kernel: .*{wrong}"):
        run("exchange", torch.zeros(32), 32, 4, **{what: wrong})
