"""The CUDA kernels of the Gaussian pass against the reference: forward and every gradient.

How they are run and judged: ``cuda_target``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_on_cpu import build
from cuda_target import Layout, Target, every_target, mixed_order
from gaussian_cases import BY_NAME, CASES, JUDGE, LARGE, GaussianCase, random_gaussian_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import GPU_DTYPES, LAYOUTS, ids

from fastcaps.geometry import SET_WINDOW
from fastcaps.reference import gaussian

CUT = (  # how the kernels cut a call: what the common cases are too small for
    GaussianCase(
        "papers-conv",
        batch=1,
        grid=(5, 5),
        types=6,
        parents=32,
        pose=(4, 4, 4),
        window=(3, 3, 2, 2, 0, 0, 1, 1),
        gate=True,
    ),
    GaussianCase("papers-fc", batch=2, types=70, parents=10, pose=(4, 4, 4), gate=True, bias="I1"),
    GaussianCase("papers-vector", batch=2, types=9, parents=100, pose=(1, 8, 16)),
    GaussianCase("two-sweeps", batch=1, types=2, parents=1100, pose=(4, 4, 4), gate=True, bias="1M"),
    GaussianCase("two-sweeps-vector", batch=1, types=2, parents=600, pose=(1, 16, 16), groups=1, bias="IM"),
    GaussianCase("ranges-of-children", batch=1, types=400, parents=3, pose=(4, 4, 4), groups=1, gate=True, bias="1M"),
    GaussianCase(
        "first-turn-in-ranges",
        batch=1,
        types=400,
        parents=3,
        pose=(1, 16, 16),
        query=False,
        gate=True,
        silent=True,
        bias="IM",
    ),
    GaussianCase("long-vector", batch=1, types=3, parents=2, pose=(1, 260, 130)),
)
SMALL = tuple(case for case in CASES if case.name not in LARGE)
OWN = CUT[1:3]
LONELY = (  # parents that one child makes, or two: variances are nothing beside the means
    GaussianCase("one-child", types=1, parents=3, pose=(4, 4, 4), affine=False, bias="IM", gate=True),
    GaussianCase("one-child-vector", batch=5, types=1, parents=3, pose=(1, 16, 16), query=False),
    GaussianCase("one-child-free", types=1, parents=5, pose=(5, 3, 7), gate=True),
    GaussianCase("one-child-each", types=8, parents=10, pose=(4, 4, 4)),
    GaussianCase(
        "one-child-each-grid", grid=(3, 3), types=2, parents=6, pose=(4, 4, 4), window=(2, 2, 1, 1, 1, 1, 1, 1)
    ),
    GaussianCase("one-child-two-sweeps", batch=1, types=2, parents=1100, pose=(4, 4, 4)),
    GaussianCase("one-child-in-ranges", batch=1, types=200, parents=3, pose=(4, 4, 4), groups=1),
)
STRIDED = ("padded", "pose-1x8-1x16")
SILENT = ("silent", "silent-grid")


on_every_target = every_target(JUDGE)
autoused_order = pytest.fixture(autouse=True)(mixed_order)


@on_every_target
@pytest.mark.parametrize("case", SMALL + CUT, ids=ids)
def test_forward_and_every_gradient(case: GaussianCase, target: Target) -> None:
    target.check(case, torch.float32)


@on_every_target
@pytest.mark.parametrize("case", SMALL[::5] + CUT, ids=ids)
def test_in_a_fixed_order(case: GaussianCase, target: Target) -> None:
    target.check(case, torch.float32, "ordered")


@on_every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
@pytest.mark.parametrize("case", LONELY, ids=ids)
def test_a_parent_of_one_child(case: GaussianCase, option: str, target: Target) -> None:
    """Its gradient by the variance is large, and the mean's rounding must cancel in it (as it does in autograd)."""

    def make() -> Any:
        tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
        if tensors[2] is not None:  # every parent stands where a vote is, and knows no other
            votes = torch.einsum(
                "bhwncd,nmde->bhwnmce", tensors[0], tensors[1][: case.types].expand(case.types, *[-1] * 3)
            )
            which = torch.arange(case.parents) % case.types
            mean = votes[:, :1, :1, which, torch.arange(case.parents)]
            tensors[2] = mean.expand(case.shape).contiguous()
            tensors[3] = None if tensors[3] is None else 1e-3 * tensors[3]
        grads[2] = 1e4 * grads[2]
        return tensors, grads

    target.check_tensors(make, case, option)


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", (*SMALL[::7], *OWN), ids=ids)
def test_half_precision(case: GaussianCase, dtype: torch.dtype, target: Target) -> None:
    target.check(case, dtype)


@on_every_target
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=random_gaussian_cases(),
    dtype=st.sampled_from(GPU_DTYPES[:2]),  # what exceeds float16 is none of its numbers
    option=st.sampled_from(["fast", "ordered"]),
    layout=st.sampled_from((None, *LAYOUTS)),
    order=st.sampled_from(list(build.ORDERS)),
    seed=st.integers(0, 9),
)
def test_random_shapes(
    target: Target, case: GaussianCase, dtype: torch.dtype, option: str, layout: Layout | None, order: str, seed: int
) -> None:
    build.set_order(build.ATTENTION, order)
    target.check(case, dtype, option, seed, layout)


@on_every_target
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: Layout, target: Target) -> None:
    target.check(BY_NAME[name], torch.float32, layout=layout)


@on_every_target
@pytest.mark.parametrize("argument", range(len(gaussian.NEEDS)), ids=gaussian.NEEDS)
def test_expanded_inputs(argument: int, target: Target) -> None:
    target.check_expanded(BY_NAME["primes"], argument)


@on_every_target
@pytest.mark.parametrize("name", STRIDED)
def test_expanded_gradients(name: str, target: Target) -> None:
    target.check_expanded_gradients(BY_NAME[name])


@on_every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
@pytest.mark.parametrize("name", ["padded", "silent-grid"])
def test_only_the_gradients_asked_for(name: str, option: str, target: Target) -> None:
    target.check_only_those_asked_for(BY_NAME[name], option)


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
def test_outputs_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype, target: Target) -> None:
    target.check_dtypes(BY_NAME["conv-4x4"], dtype)


@on_every_target
@pytest.mark.parametrize("case", (*SMALL[::9], *CUT), ids=ids)
def test_ordered_results_have_the_same_bits(case: GaussianCase, target: Target) -> None:
    target.check_bits(case, "ordered")


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[:2], ids=str)
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("name", SILENT)
def test_a_gate_of_0_leaves_no_trace(name: str, trash: float, dtype: torch.dtype, target: Target) -> None:
    """Neither in the results nor in a gradient, whatever the child behind it is."""
    case = BY_NAME[name]
    tensors, grads = case.tensors(dtype), target.arguments(case.grads(dtype))
    gate = gaussian.NEEDS.index("gate")
    silent = (tensors[gate] == 0)[..., None, None]
    all_needs = (1 << len(tensors)) - 1
    found, gradients = (
        target.differentiated(
            target.arguments([tensors[0].masked_fill(silent, number), *tensors[1:]]), grads, case, all_needs
        )
        for number in (trash, 0.0)
    )
    for one, other in zip(found[0], gradients[0], strict=True):
        assert torch.equal(one, other)
    for argument, one, other in zip(gaussian.NEEDS, found[1], gradients[1], strict=True):
        assert one.isfinite().all(), argument
        if argument == "gate":
            assert (one[tensors[gate] == 0] == 0).all() or trash == 3e38
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=argument)


@on_every_target
@pytest.mark.parametrize("query", [False, True], ids=["first-turn", "later-turn"])
@pytest.mark.parametrize("types", [40, 500])
def test_a_common_offset_costs_float32_nothing(types: int, query: bool, target: Target) -> None:
    """Votes about 10,000 with a spread of 1: variances are right to a thousandth."""
    case = GaussianCase("offset", batch=1, types=types, parents=3, pose=(1, 4, 4), query=query, gate=True)
    tensors = case.tensors(torch.float32)
    weight = torch.eye(4).repeat(types, 3, 1, 1)
    tensors[0] += 1e4
    tensors[1] = weight
    if query:
        tensors[2] += 1e4
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    exact = gaussian.gaussian_pass(*wide, *case.settings())[2]
    found = target.forward(*target.arguments(tensors), *case.settings(), 0)[2].cpu()
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)


@on_every_target
@pytest.mark.parametrize("query", [False, True], ids=["first-turn", "later-turn"])
def test_a_million_children(query: bool, target: Target) -> None:
    """Counts stay exact where one after another is added to a sum a million times its size."""
    types = 1 << 14
    case = GaussianCase("million", batch=1, types=types, parents=2, pose=(1, 1, 1), groups=1, query=query)
    tensors = case.tensors(torch.float32)
    found = target.forward(*target.arguments(tensors), 0.0, list(SET_WINDOW), 0)
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    exact = gaussian.gaussian_pass(*wide, 0.0, list(SET_WINDOW))
    for one, other in zip(found[:3], exact[:3], strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=3e-6, atol=1e-6)


@on_every_target
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("argument", [0, 1, 2, 4, 5, 6], ids=[gaussian.NEEDS[k] for k in (0, 1, 2, 4, 5, 6)])
def test_what_is_not_finite_comes_out(argument: int, value: float, target: Target) -> None:
    """A NaN or an infinity in one sample: the other samples are as they were, its own outputs are not all finite."""
    case = replace(BY_NAME["primes"], batch=3, bias="IM", gate=True)
    tensors = case.tensors(torch.float32)
    clean = target.forward(*target.arguments(tensors), *case.settings(), 0)
    shared = argument in (1, 5)  # weight and bias concern all samples
    tensors[argument] = tensors[argument].clone()
    tensors[argument].view(-1)[tensors[argument].numel() // (2 if shared else 6)] = value
    expected = gaussian.gaussian_pass(*tensors, *case.settings())
    found = target.forward(*target.arguments(tensors), *case.settings(), 0)
    for name, one, other, before in zip(JUDGE.outputs, found, expected, clean, strict=True):
        assert torch.equal(one.cpu().isfinite().flatten(1).all(1), other.isfinite().flatten(1).all(1)), name
        if not shared:
            assert torch.equal(one[1:], before[1:])
