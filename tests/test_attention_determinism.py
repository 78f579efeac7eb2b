"""Same input, same bits: twice, on one thread and on several, in this process and in a fresh one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_cases import BY_NAME, CASES, Case, ids, native_only

from fastcaps import ops

LARGE = (
    Case("conv", batch=8, grid=(9, 9), types=8, parents=32, pose=(4, 4, 4), window=(3, 3, 2, 2, 0, 0, 1, 1), gate=True),
    Case("set", batch=16, types=200, parents=10, pose=(4, 4, 4), bias="IM"),
    Case("shared", batch=2, types=2000, parents=20, pose=(1, 16, 16), groups=1, bias="1M", gate=True),
    Case("few-positions", batch=1, types=1000, parents=64, pose=(4, 4, 4)),
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(case: Case, dtype: torch.dtype) -> list[bytes]:
    tensors, settings = case.tensors(dtype), case.settings()
    parents, sums = ops.attention_pass(*tensors, *settings)
    gradients = ops.attention_pass_backward(*case.grads(dtype), *tensors[:6], sums, *settings, 127)
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (parents, sums, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE + CASES[::4], ids=ids)
def test_same_bits_twice(case: Case, dtype: torch.dtype) -> None:
    assert bits(case, dtype) == bits(case, dtype)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", LARGE + CASES[::4], ids=ids)
def test_same_bits_for_any_number_of_threads(case: Case, dtype: torch.dtype) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(bits(case, dtype))
    assert found[0] == found[1] == found[2]


@native_only
def test_a_sample_does_not_depend_on_its_batch() -> None:
    """Parents of one sample are those of the sample alone, whatever else lies in the batch."""
    case = BY_NAME["large-batch"]
    tensors, settings = case.tensors(torch.float32), case.settings()
    whole, _ = ops.attention_pass(*tensors, *settings)
    for b in (0, 5, 36):
        alone = [t[b : b + 1] if k in (0, 2) else t for k, t in enumerate(tensors)]
        torch.testing.assert_close(ops.attention_pass(*alone, *settings)[0], whole[b : b + 1])
