"""The CUDA kernels of the attention pass against the reference: forward and every gradient.

How they are run and judged: ``cuda_target``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import BY_NAME, CASES, GPU_DTYPES, JUDGE, LAYOUTS, Case, ids, random_cases
from cuda_on_cpu import build
from cuda_target import GPU, ON_DEVICE, OPTIONS, Layout, Target, every_target, mixed_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcaps import reference

POSES = ((4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 64, 64), (2, 3, 5))
CUT = (  # how the kernels cut a call: what the common cases are too small for
    Case("papers-c10-conv", batch=1, grid=(5, 5), types=6, parents=32, pose=(4, 4, 4), window=(3, 3, 2, 2, 0, 0, 1, 1)),
    Case("papers-c10-fc", batch=2, types=70, parents=10, pose=(4, 4, 4)),
    Case("papers-c100-fc", batch=1, types=9, parents=100, pose=(6, 6, 6)),
    Case("papers-dmm-conv", batch=1, grid=(3, 4), types=3, parents=16, pose=(8, 8, 8), window=(3, 3, 1, 1, 0, 0, 1, 1)),
    Case("papers-dmm-vector", batch=1, types=8, parents=16, pose=(1, 64, 64), window=(1, 1, 1, 1, 0, 0, 1, 1)),
    Case("papers-dr", batch=2, types=9, parents=100, pose=(1, 8, 16)),
    Case("two-sweeps", batch=1, types=2, parents=1100, pose=(4, 4, 4), gate=True),
    Case("two-sweeps-vector", batch=1, types=2, parents=2100, pose=(1, 16, 16), groups=1, bias="1M"),
    Case(
        "two-sweeps-free", batch=1, grid=(2, 1), types=1, parents=700, pose=(2, 3, 5), window=(2, 1, 1, 1, 0, 0, 1, 1)
    ),
    Case("one-position", batch=1, types=400, parents=3, pose=(4, 4, 4), groups=1, gate=True, bias="I1"),
    Case("largest-pose", batch=1, types=3, parents=3, pose=(16, 9, 32)),
    Case("long-vector", batch=1, types=3, parents=2, pose=(1, 260, 130)),
    Case("tall-pose", batch=2, types=3, parents=5, pose=(37, 3, 2), bias="IM"),
    # lanes that stand for no position have sums of 0, and 0 / sqrt(0) is no number
    *(Case(f"no-eps-{p[0]}x{p[1]}", batch=3, types=7, parents=5, pose=p, eps=0.0, bias="1M") for p in POSES),
    # one parent, matrices shared
    *(Case(f"one-parent-{p[0]}x{p[1]}", batch=1, types=64, parents=1, pose=p, groups=1) for p in POSES),
)


on_every_target = every_target(JUDGE)


def test_the_device_runs_these_too() -> None:
    if not ON_DEVICE:
        pytest.skip(f"the CUDA kernels run on the CPU only: {GPU.detail if not GPU.available else 'no GPU'}")


autoused_order = pytest.fixture(autouse=True)(mixed_order)


@on_every_target
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES + CUT, ids=ids)
def test_forward_and_every_gradient(case: Case, option: str, target: Target) -> None:
    target.check(case, torch.float32, option)


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", CASES + CUT[:2], ids=ids)
def test_half_precision(case: Case, dtype: torch.dtype, target: Target) -> None:
    target.check(case, dtype)


@on_every_target
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=random_cases(),
    dtype=st.sampled_from(GPU_DTYPES),
    option=st.sampled_from(list(OPTIONS)),
    layout=st.sampled_from((None, *LAYOUTS)),
    order=st.sampled_from(list(build.ORDERS)),
    seed=st.integers(0, 9),
)
def test_random_shapes(
    target: Target, case: Case, dtype: torch.dtype, option: str, layout: Layout | None, order: str, seed: int
) -> None:
    build.set_order(build.ATTENTION, order)
    target.check(case, dtype, option, seed, layout)


STRIDED = ("conv-4x4", "padded", "pose-1x8-1x16", "pose-6x6", "dilated-padded-strided", "no-norm", "groups-1")


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[:2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: Layout, dtype: torch.dtype, target: Target) -> None:
    target.check(BY_NAME[name], dtype, layout=layout)


@on_every_target
@pytest.mark.parametrize("argument", range(7), ids=reference.NEEDS)
@pytest.mark.parametrize("name", ["padded", "primes"])
def test_expanded_inputs(name: str, argument: int, target: Target) -> None:
    target.check_expanded(BY_NAME[name], argument)


@on_every_target
@pytest.mark.parametrize("name", STRIDED)
def test_expanded_gradients(name: str, target: Target) -> None:
    target.check_expanded_gradients(BY_NAME[name])


@on_every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
@pytest.mark.parametrize("name", ["padded", "primes", "no-norm", "pose-4x4"])
def test_only_the_gradients_asked_for(name: str, option: str, target: Target) -> None:
    target.check_only_those_asked_for(BY_NAME[name], option)


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
def test_outputs_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype, target: Target) -> None:
    target.check_dtypes(BY_NAME["conv-4x4"], dtype)


@on_every_target
@pytest.mark.parametrize("option", ["ordered", "tf32-ordered"])
@pytest.mark.parametrize("case", (*CASES[::3], *CUT), ids=ids)
def test_ordered_results_have_the_same_bits(case: Case, option: str, target: Target) -> None:
    target.check_bits(case, option)


@on_every_target
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("argument", range(5), ids=reference.NEEDS[:5])
@pytest.mark.parametrize("name", ["padded", "primes", "conv-4x4-m32", "pose-8x8"])
def test_what_is_not_finite_comes_out(name: str, argument: int, value: float, target: Target) -> None:
    """A NaN or an infinity in one sample: the other samples are as they were, its own outputs are not all finite."""
    case = replace(BY_NAME[name], batch=3, bias="IM", gate=True)
    tensors = case.tensors(torch.float32)
    forward = target.forward
    clean, _ = forward(*target.arguments(tensors), *case.settings(), 0)
    shared = argument in (1, 3)  # weight and bias concern all samples
    tensors[argument] = tensors[argument].clone()
    tensors[argument].view(-1)[tensors[argument].numel() // (2 if shared else 6)] = value
    expected, _ = reference.attention_pass(*tensors, *case.settings())
    found = forward(*target.arguments(tensors), *case.settings(), 0)[0].cpu()
    assert torch.equal(found.isfinite().flatten(1).all(1), expected.isfinite().flatten(1).all(1))
    if not shared:
        assert torch.equal(found[1:], clean.cpu()[1:])


@on_every_target
def test_what_the_kernels_do_not_take_is_an_error(target: Target) -> None:
    case = BY_NAME["primes"]
    forward = target.forward
    with pytest.raises(RuntimeError, match=r"float64|Double"):
        forward(*target.arguments(case.tensors(torch.float64)), *case.settings(), 0)
    tensors = target.arguments(case.tensors(torch.float32))
    with pytest.raises(RuntimeError, match="weight has shape"):
        forward(tensors[0], tensors[1][:, :, :-1], *tensors[2:], *case.settings(), 0)
    large = replace(case, types=1, parents=1, pose=(27, 2, 19), bias=None)
    with pytest.raises(RuntimeError, match="512"):
        forward(*target.arguments(large.tensors(torch.float32)), *large.settings(), 0)
