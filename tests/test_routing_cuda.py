"""Whole routings in one launch of the CUDA kernels, against loops of the reference's passes.

How they are run: ``cuda_target``. A result errs at most four times what the same loop in eager torch of the same dtype
errs, plus rounding; both against float64. That is wider than a single pass's bar by the factor that turns add.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import attention_cases
import gaussian_cases
import pooling_cases
import pytest
import torch
from attention_cases import Case
from cuda_on_cpu import build
from cuda_target import OPTIONS, Target, every_target, mixed_order
from gaussian_cases import GaussianCase
from pass_cases import ids
from pooling_cases import PoolingCase

from fastcaps import ops

PADDED = (3, 3, 1, 1, 1, 1, 1, 1)
ATTENTION = (
    Case("vector-64", batch=3, types=4, parents=3, pose=(1, 64, 64)),
    Case("matrix", batch=3, types=7, parents=5, pose=(4, 4, 4), gate=True, bias="IM"),
    Case("several-warps", batch=2, types=9, parents=40, pose=(4, 4, 4)),
    Case("free", batch=2, grid=(4, 4), types=3, parents=6, pose=(2, 3, 5), window=PADDED, gate=True),
    Case("vector", batch=2, types=9, parents=40, pose=(1, 8, 16)),
    Case("no-eps", batch=3, types=7, parents=5, pose=(4, 4, 4), bias="1M", eps=0.0),
    Case("one-parent", batch=1, types=9, parents=1, pose=(4, 4, 4), groups=1),
)
POOLING = (
    PoolingCase("matrix", batch=3, types=7, parents=5, pose=(4, 4, 4), gate=True, bias="IM"),
    PoolingCase("identity", batch=40, types=9, parents=1, pose=(4, 4, 4), identity=True),
    PoolingCase("identity-parents", batch=3, types=9, parents=3, pose=(2, 3, 3), identity=True, gate=True),
    PoolingCase("several-blocks", batch=2, types=3, parents=300, pose=(1, 8, 16)),
    PoolingCase(
        "silent", batch=2, grid=(4, 4), types=3, parents=6, pose=(2, 3, 5), window=PADDED, gate=True, silent=True
    ),
)
GAUSSIAN = (
    GaussianCase("matrix", batch=3, types=7, parents=5, pose=(4, 4, 4), gate=True, bias="IM"),
    GaussianCase("warps", batch=2, types=19, parents=40, pose=(4, 4, 4), gate=True, silent=True, bias="1M"),
    GaussianCase("free", batch=2, grid=(4, 4), types=3, parents=6, pose=(2, 3, 5), window=PADDED, gate=True, bias="1M"),
    GaussianCase("vector", batch=2, types=9, parents=40, pose=(1, 8, 16), bias="11"),
)
TURNS = 3
autoused_order = pytest.fixture(autouse=True)(mixed_order)
DTYPES = (torch.float32, torch.bfloat16)


def hold(target: Target, name: str, tensors: Sequence[torch.Tensor | None], settings: tuple[Any, ...]) -> None:
    """Run a routing in one launch, every tensor fenced in, and hold its results to the tolerance."""
    by_reference = getattr(ops, name.upper()).by_reference
    with target.guarded():
        given = [None if tensor is None else tensor.clone() for tensor in tensors]
        found = [one.cpu() for one in target.op(name)(*target.arguments(given), *settings, 0)]
    exact = by_reference(*(None if tensor is None else tensor.double() for tensor in tensors), *settings)
    eager = by_reference(*tensors, *settings)
    for one, wanted, other in zip(found, exact, eager, strict=True):
        assert one.shape == wanted.shape and one.is_contiguous()
        error, allowed = ((x.double() - wanted).abs().max().item() for x in (one, other))
        assert error <= 4 * allowed + 4e-6 * wanted.abs().max().item()


@every_target(attention_cases.JUDGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("asks", [False, True], ids=["uniform-first", "query"])
@pytest.mark.parametrize(("rule", "normalize"), [(0, True), (0, False), (1, False)], ids=["norm", "sums", "dynamic"])
@pytest.mark.parametrize("case", ATTENTION, ids=ids)
def test_attention(case: Case, rule: int, normalize: bool, asks: bool, dtype: torch.dtype, target: Target) -> None:
    tensors = case.tensors(dtype)
    if not asks:
        tensors[2] = None
    if not normalize:
        tensors[5:] = None, None
    hold(target, "attention_routing", tensors, (0.3, case.eps, normalize, rule, TURNS, False, list(case.window)))


@every_target(pooling_cases.JUDGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "normalize"), [(0, True), (1, False)], ids=["vector-normed", "dynamic"])
@pytest.mark.parametrize("case", POOLING, ids=ids)
def test_pooling(case: PoolingCase, rule: int, normalize: bool, dtype: torch.dtype, target: Target) -> None:
    children, weight, _, bias, gate = case.tensors(dtype)
    settings = (0.7, normalize, case.parents, rule, TURNS, False, list(case.window))
    hold(target, "pooling_routing", [children, weight, bias, gate], settings)


@every_target(gaussian_cases.JUDGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", [0, 1, 2], ids=["em", "heinsen", "k-means"])
@pytest.mark.parametrize("case", GAUSSIAN, ids=ids)
def test_gaussian(case: GaussianCase, model: int, dtype: torch.dtype, target: Target) -> None:
    children, weight, _, _, _, bias, gate, use, ignore = case.tensors(dtype)
    betas = [0.1 * use, 0.1 * ignore]
    if model == 0:
        generator = torch.Generator().manual_seed(3)
        betas = [torch.randn(case.parents, generator=generator) for _ in range(2)]
    gate = None if gate is None else gate.clamp(0, 1)
    hold(
        target,
        "gaussian_routing",
        [children, weight, bias, gate, *betas],
        ([0.1, 0.2, 0.3], model, 1e-3, list(case.window)),
    )


@every_target(attention_cases.JUDGE)
def test_what_one_launch_does_not_take_is_an_error(target: Target) -> None:
    case = Case("many", batch=1, types=2, parents=1100, pose=(4, 4, 4))
    tensors, window = target.arguments(case.tensors(torch.float32)), list(case.window)
    with pytest.raises(RuntimeError, match="1100 parents"):
        target.op("attention_routing")(*tensors, 1.0, 1e-5, True, 0, 2, False, window, 0)
    with pytest.raises(RuntimeError, match="turns, got 17"):
        target.op("attention_routing")(*tensors, 1.0, 1e-5, True, 0, 17, False, window, 0)
    with pytest.raises(RuntimeError, match="no rule 2"):
        target.op("attention_routing")(*tensors, 1.0, 1e-5, True, 2, 2, False, window, 0)


MACHINE = (4, 227 << 10)  # what the kernels run on here: multiprocessors, and a block's largest shared memory


def refusal(case: Case, order: int, options: int = 0, half: bool = False, machine: tuple[int, int] = MACHINE) -> str:
    """Return why the loop of passes serves better, as the library tells ``fastcaps.dispatch``."""
    ask = build.library(build.ATTENTION).fastcaps_cuda_routing_refusal
    ask.restype = ctypes.c_char_p
    positions = case.shape[1:3]
    rows, depth, columns = case.pose
    numbers = [case.batch, *case.grid, case.types, rows, depth, *positions, case.parents, columns]
    numbers += [case.tensors()[1].shape[0], *case.window]
    facts = (order, 0, TURNS, options, int(half), *machine)
    return ask((ctypes.c_int64 * len(numbers))(*numbers), *(ctypes.c_int64(fact) for fact in facts)).decode()


def test_which_routings_take_one_launch() -> None:
    one = Case("one", batch=64, types=70, parents=10, pose=(4, 4, 4))
    assert all(refusal(one, order) == "" for order in (0, 1, 2))
    many = Case("many", batch=64, types=7, parents=1100, pose=(4, 4, 4))
    assert "1100 parents" in refusal(many, 0) and "1100 parents" in refusal(many, 2) and refusal(many, 1) == ""
    few = Case("few", batch=1, types=20_000, parents=3, pose=(4, 4, 4), groups=1)
    assert all("20000 children" in refusal(few, order) for order in (0, 1, 2))
    assert "shared memory" in refusal(Case("wide", types=2, pose=(8, 64, 64)), 0, machine=(4, 1 << 10))


@every_target(attention_cases.JUDGE)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parents", [10, 11, 16, 17, 64])
@pytest.mark.parametrize("pose", [(1, 64, 64), (4, 4, 4)], ids=str)
def test_what_is_promised_runs(
    pose: tuple[int, int, int], parents: int, dtype: torch.dtype, option: str, target: Target
) -> None:
    """The kernel that rounds to tf32 takes fewer parents of 1x64 poses a block: with it the answer is another."""
    case = Case("promised", batch=2, types=3, parents=parents, pose=pose)
    answer = refusal(case, 0, OPTIONS[option], dtype != torch.float32)
    tensors = target.arguments(case.tensors(dtype))
    run = target.op("attention_routing")
    settings = (0.3, 1e-5, True, 0, 2, False, list(case.window), OPTIONS[option])
    if "parents take" in answer:
        with pytest.raises(RuntimeError, match="parents take several blocks"):
            run(*tensors, *settings)
    else:
        run(*tensors, *settings)
