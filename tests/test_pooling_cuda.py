"""The CUDA kernels of the pooling pass against the reference: forward and every gradient.

How they are run and judged: ``cuda_target``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import build
from cuda_target import Layout, Target, every_target, mixed_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import GPU_DTYPES, LAYOUTS, ids
from pooling_cases import BY_NAME, CASES, IDENTITY, JUDGE, LARGE, PoolingCase, random_pooling_cases

from fastcaps import reference
from fastcaps.reference import pooling

CUT = (  # how the kernels cut a call: what the common cases are too small for
    PoolingCase("one-parent-16", batch=40, types=9, parents=1, pose=(1, 16, 16), identity=True),
    PoolingCase("ranges-of-children", batch=1, types=300, parents=1, pose=(4, 4, 4), identity=True, gate=True),
    PoolingCase("one-parent-weights", batch=3, types=30, parents=1, pose=(1, 16, 16), gate=True, bias="1M"),
    PoolingCase("many-parents-4x4", batch=2, types=5, parents=300, pose=(4, 4, 4), gate=True),
    PoolingCase("many-parents-vector", batch=5, types=3, parents=300, pose=(1, 8, 16), normalize=False),
    PoolingCase("many-parents-free", batch=2, types=3, parents=600, pose=(3, 2, 5), bias="IM", gate=True),
    PoolingCase("one-position", batch=1, types=400, parents=3, pose=(4, 4, 4), groups=1, gate=True, bias="I1"),
    PoolingCase("long-vector", batch=1, types=3, parents=2, pose=(1, 260, 130)),
    PoolingCase("one-parent-shared", batch=1, types=64, parents=1, pose=(1, 8, 16), groups=1),
)
SMALL = tuple(case for case in CASES if case.name not in (*LARGE, "conv-4x4-m32", "conv-4x4-m32-bare"))
OWN = (*IDENTITY[::3], *CUT[:2])
STRIDED = ("padded", "identity-padded", "identity-pool-4x4")
SILENT = ("silent", "silent-grid", "identity-silent")


on_every_target = every_target(JUDGE)
autoused_order = pytest.fixture(autouse=True)(mixed_order)


@on_every_target
@pytest.mark.parametrize("case", SMALL + CUT, ids=ids)
def test_forward_and_every_gradient(case: PoolingCase, target: Target) -> None:
    target.check(case, torch.float32)


@on_every_target
@pytest.mark.parametrize("case", SMALL[::5] + CUT, ids=ids)
def test_in_a_fixed_order(case: PoolingCase, target: Target) -> None:
    target.check(case, torch.float32, "ordered")


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", (*SMALL[::7], *OWN), ids=ids)
def test_half_precision(case: PoolingCase, dtype: torch.dtype, target: Target) -> None:
    target.check(case, dtype)


@on_every_target
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=random_pooling_cases(),
    dtype=st.sampled_from(GPU_DTYPES[:2]),  # what exceeds float16 is none of its numbers
    option=st.sampled_from(["fast", "ordered"]),
    layout=st.sampled_from((None, *LAYOUTS)),
    order=st.sampled_from(list(build.ORDERS)),
    seed=st.integers(0, 9),
)
def test_random_shapes(
    target: Target, case: PoolingCase, dtype: torch.dtype, option: str, layout: Layout | None, order: str, seed: int
) -> None:
    build.set_order(build.ATTENTION, order)
    target.check(case, dtype, option, seed, layout)


@on_every_target
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: Layout, target: Target) -> None:
    target.check(BY_NAME[name], torch.float32, layout=layout)


@on_every_target
@pytest.mark.parametrize("argument", range(len(pooling.NEEDS)), ids=pooling.NEEDS)
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
def test_ordered_results_have_the_same_bits(case: PoolingCase, target: Target) -> None:
    target.check_bits(case, "ordered")


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[:2], ids=str)
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("name", SILENT)
def test_a_gate_of_0_leaves_no_trace(name: str, trash: float, dtype: torch.dtype, target: Target) -> None:
    """Neither in the results nor in a gradient, whatever the child behind it is."""
    case = BY_NAME[name]
    tensors, grads = case.tensors(dtype), target.arguments(case.grads(dtype))
    gate = pooling.NEEDS.index("gate")
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
    for argument, one, other in zip(pooling.NEEDS, found[1], gradients[1], strict=True):
        assert one.isfinite().all(), argument
        if argument == "gate":
            assert (one[tensors[gate] == 0] == 0).all() or trash == 3e38
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=argument)


@on_every_target
@pytest.mark.parametrize("name", ["primes", "silent-grid", "identity-padded"])
def test_frozen_coefficients_are_constants(name: str, target: Target) -> None:
    case = BY_NAME[name]
    tensors, grads, needs = case.tensors(torch.float32), case.grads(torch.float32), 31 | reference.FROZEN
    _, found = target.differentiated(target.arguments(tensors), target.arguments(grads), case, needs)
    outputs = pooling.pooling_pass(*tensors, *case.settings())
    wanted = pooling.pooling_pass_backward(*grads, *tensors, *outputs, *case.settings(), needs)
    for argument, one, other in zip(pooling.NEEDS, found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5, msg=argument)


@on_every_target
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_keys_are_directions_however_long(size: float, target: Target) -> None:
    case = replace(BY_NAME["identity-pool-4x4"], bias=None)
    tensors = case.tensors(torch.float32)
    logsumexp = [
        target.forward(*target.arguments([tensors[0] * by, *tensors[1:]]), *case.settings(), 0)[1] for by in (1, size)
    ]
    torch.testing.assert_close(*logsumexp, rtol=1e-5, atol=1e-5)


@on_every_target
def test_what_the_kernels_do_not_take_is_an_error(target: Target) -> None:
    case = BY_NAME["primes"]
    with pytest.raises(RuntimeError, match=r"float64|Double"):
        target.forward(*target.arguments(case.tensors(torch.float64)), *case.settings(), 0)
    large = replace(case, types=1, parents=1, pose=(27, 2, 19), bias=None)
    with pytest.raises(RuntimeError, match="512"):
        target.forward(*target.arguments(large.tensors(torch.float32)), *large.settings(), 0)
