"""The attention pass in Triton against the float64 reference: forward, every gradient, and what it compiles to.

The tolerance is that of ``attention_cases.assert_honest``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import BY_NAME, CASES, GRADIENTS, LAYOUTS, Case, check_op, ids, random_cases, results
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_cases import (
    DEVICE,
    DTYPES,
    TINY,
    WIDE,
    compiled_here,
    facts,
    grads_of,
    hold_bound,
    hold_compiled,
    implemented,
    interpret,
    launches,
    once_each,
    options,
    plain,
    schedule,
    sizes_allocated,
    static,
)

from fastcaps import ops, reference
from fastcaps.votes import SET_WINDOW
from fastcaps.triton_kernels import attention

__all__ = ["plain"]
SLOW = {"many-children", "conv-4x4", "conv-8x8", "conv-4x4-m32"}  # for the interpreter; smaller ones stand for them

triton_pass, triton_backward = implemented(ops.ATTENTION)


def check(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Hold the kernels to the honest tolerance on a case."""
    check_op(case.tensors(dtype, seed), case.settings(), grads_of(case, dtype, seed + 1), triton_pass, device=DEVICE)


def _small(case: Case) -> Case:
    """Return a case of the same kind that the interpreter is done with in a second."""
    if DEVICE == "cuda" or case.name not in SLOW:
        return case
    grid = tuple(min(size, case.window[k] + 1) for k, size in enumerate(case.grid))
    return replace(case, batch=1, grid=grid, types=min(case.types, 3 if case.grid != (1, 1) else 21), groups="I")


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_forward_and_every_gradient(case: Case) -> None:
    options.update({"limits": WIDE} if DEVICE == "cpu" else {})
    check(_small(case))


HALF = ("primes", "padded-no-query", "pose-6x6", "no-norm")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check(BY_NAME[name], dtype)


@pytest.mark.parametrize("name", ["padded", "pose-1x64", "pose-8x8", "pose-1x8-1x16"])
def test_votes_by_matrix_products(name: str) -> None:
    """As with TF32; the interpreter multiplies in float32, a GPU is held to TF32's own rounding."""
    options.update(allow_tf32=True)
    case = replace(BY_NAME[name], batch=1)
    check_op(
        case.tensors(torch.float32), case.settings(), grads_of(case), triton_pass,
        device=DEVICE, tf32=DEVICE == "cuda",
    )  # fmt: skip


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("name", ["groups-3-of-6", "no-query", "no-norm", "whole-grid"])
def test_two_sweeps(name: str, ordered: bool) -> None:
    """Parents that do not fit into a program: log-sum-exp over tiles of them first, weights second."""
    options.update(limits=TINY, deterministic=ordered)
    case = replace(BY_NAME[name], batch=1, parents=11, gate=True)
    if case.grid != (1, 1):
        case = replace(case, types=1, grid=(1, 3), window=(2, 2, 1, 1, 1, 0, 1, 1), groups="I")
    assert schedule.schedule(facts(2, case.children, 11, case.pose, limits=schedule.Limits(**TINY))).tiles > 1
    check(case)


@pytest.mark.parametrize("name", ["primes", "padded", "dilated-padded-strided", "conv-groups-12", "groups-1"])
def test_deterministic_mode(name: str) -> None:
    options.update(deterministic=True)
    check(BY_NAME[name])


@pytest.mark.parametrize("name", ["pointwise", "groups-3-of-6"])
def test_deterministic_mode_gives_the_same_bits(name: str) -> None:
    options.update(deterministic=True)
    case = replace(BY_NAME[name], batch=1)
    tensors = [None if t is None else t.to(DEVICE) for t in case.tensors(torch.float32)]
    grads = [None if t is None else t.to(DEVICE) for t in grads_of(case)]
    first = results(triton_pass, tensors, case.settings(), grads)
    again = results(triton_pass, tensors, case.settings(), grads)
    options.clear()
    fast = results(triton_pass, tensors, case.settings(), grads)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        torch.testing.assert_close(value, fast[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("resident", [1, 64])
def test_children_split_over_programs(resident: int) -> None:
    """One range of children or many: the parts are added up by the finishing kernel."""
    case = replace(BY_NAME["many-children"], types=23, groups=1, parents=3, bias="I1")
    limits = schedule.Limits(resident=resident)
    splits = schedule.schedule(facts(1, 23, 3, case.pose, processors=2, limits=limits)).splits
    assert (splits == 23) == (resident == 64)
    options.update(limits={"resident": resident})
    check(case)


@settings(
    max_examples=8 if DEVICE == "cpu" else 12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    case=random_cases(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
    ordered=st.booleans(),
    products=st.booleans(),
)
def test_random_shapes(case: Case, dtype: torch.dtype, seed: int, ordered: bool, products: bool) -> None:
    options.clear()
    options.update(deterministic=ordered, allow_tf32=products and DEVICE == "cpu")
    case = replace(case, batch=min(case.batch, 1), types=1 if case.grid != (1, 1) else case.types)
    case = replace(case, groups=case.groups if case.children % int(case.groups) == 0 else "I")
    check(case, dtype, seed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", ["padded-no-gate", "groups-1"])
def test_any_strides(name: str, layout: Any) -> None:
    case = BY_NAME[name]
    tensors = [None if t is None else layout(t) for t in case.tensors(torch.float32)]
    grads = [None if t is None else layout(t) for t in grads_of(case)]
    check_op(tensors, case.settings(), grads, triton_pass, device=DEVICE)


@pytest.mark.skipif(DEVICE == "cuda", reason="memory that is mapped and never touched is the CPU's")
@pytest.mark.parametrize("bits", [0, 1, 2])
def test_offsets_beyond_int32(bits: int) -> None:
    """Rows and columns of poses and of matrices lie 2**30 numbers apart."""
    near, far = interpret("triton_far.attention", bits)
    for one, other in zip(near, far, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="memory that is mapped and never touched is the CPU's")
def test_poses_beyond_int32() -> None:
    found, expected = interpret("triton_far.finish")
    assert found == expected


@pytest.mark.parametrize("name", ["bias-11", "padded", "primes-plain"])
def test_no_eps(name: str) -> None:
    """Poses that fill a block's last tile are 0 to LayerNorm: without eps they must not make NaN of anything."""
    check(replace(BY_NAME[name], eps=0.0, batch=3))


@pytest.mark.parametrize("argument", range(7), ids=reference.NEEDS)
def test_expanded_inputs(argument: int) -> None:
    """One argument with stride 0, in its first dimension or in all but the last, and gradients that are one number."""
    case = replace(BY_NAME["primes"], batch=2, types=3, parents=2)
    tensors = case.tensors(torch.float32)
    whole = tensors[argument]
    start = whole[:1] if argument % 2 else whole[(slice(0, 1),) * (whole.dim() - 1)]
    tensors[argument] = start.expand(whole.shape)
    grads = [None if g is None else torch.full((), 0.7).expand(g.shape) for g in grads_of(case)]
    check_op(tensors, case.settings(), grads, triton_pass, device=DEVICE)


@pytest.mark.parametrize("name", ["padded", "no-query", "groups-3-of-6"])
def test_frozen_coefficients(name: str) -> None:
    """The gradient takes them for constants; in two sweeps, too."""
    case = replace(BY_NAME[name], batch=1, parents=5, gate=True)
    tensors, grads = case.tensors(torch.float32), grads_of(case)
    _, sums = reference.attention_pass(*tensors, *case.settings())
    saved = (*grads, *tensors[:6], sums)
    expected = reference.attention_pass_backward(*saved, *case.settings(), 127 | reference.FROZEN)
    for limits in (WIDE, TINY):
        options.update(limits=limits)
        there = [None if t is None else t.to(DEVICE) for t in saved]
        found = triton_backward(*there, *case.settings(), 127 | reference.FROZEN)
        for name, one, other in zip(GRADIENTS, found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
def test_only_the_gradients_asked_for(ordered: bool) -> None:
    options.update(deterministic=ordered)
    case = replace(BY_NAME["padded"], batch=1, grid=(1, 2), types=1, parents=2)
    tensors = [None if t is None else t.to(DEVICE) for t in case.tensors(torch.float32)]
    grads = [None if t is None else t.to(DEVICE) for t in grads_of(case)]
    _, sums = triton_pass(*tensors, *case.settings())
    everything = triton_backward(*grads, *tensors[:6], sums, *case.settings(), 127)
    for needs in [1 << k for k in range(7)] + [0, 3]:
        found = triton_backward(*grads, *tensors[:6], sums, *case.settings(), needs)
        for k, gradient in enumerate(found):
            if needs >> k & 1:
                torch.testing.assert_close(gradient, everything[k], rtol=1e-5, atol=1e-6, msg=GRADIENTS[k])
            else:
                assert gradient.shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_where_it_is(bad: float) -> None:
    """A bad child spoils its own position, a bad bias of a padded child nothing."""
    case = replace(BY_NAME["padded-no-gate"], batch=1, grid=(2, 3), groups="N")
    tensors = case.tensors(torch.float32)
    tensors[0][0, 0, 0, 0, 0, 0] = bad
    expected, _ = reference.attention_pass(*tensors, *case.settings())
    found, _ = triton_pass(*(None if t is None else t.to(DEVICE) for t in tensors), *case.settings())
    assert torch.equal(found.cpu().isfinite(), expected.isfinite()) and not expected.isfinite().all()
    case = BY_NAME["padded-all-absent"]
    tensors = case.tensors(torch.float32)
    tensors[3].fill_(bad)
    expected, _ = reference.attention_pass(*tensors, *case.settings())
    found, _ = triton_pass(*(None if t is None else t.to(DEVICE) for t in tensors), *case.settings())
    assert torch.equal(found.cpu().isfinite(), expected.isfinite())


# ---- schedules, refusals, what would be compiled ---------------------------------------------------------------------


def test_refusals_say_why() -> None:
    gpu = torch.device("cuda")
    assert attention.refusal(gpu, torch.float32, (4, 4, 4), 32) == ""
    assert attention.refusal(gpu, torch.float16, (1, 700, 8192), 30_000) == ""
    assert "on cpu" in attention.refusal(torch.device("cpu"), torch.float32, (4, 4, 4), 32)
    assert "float64" in attention.refusal(gpu, torch.float64, (4, 4, 4), 32)
    assert "8192 numbers" in attention.refusal(gpu, torch.float32, (128, 4, 128), 32)


@pytest.mark.parametrize("products", [None, False, True])
@pytest.mark.parametrize("pose", [(1, 1, 1), (4, 4, 4), (6, 6, 6), (5, 3, 7), (1, 64, 64), (64, 64, 64), (1, 3, 8192)])
def test_schedules_cover_everything_and_fit(pose: tuple[int, int, int], products: bool | None) -> None:
    for positions, children, parents in ((1, 1, 1), (6272, 288, 32), (128, 800, 10), (3, 7, 30_000), (2, 10**6, 64)):
        for backward in (False, True):
            told = facts(positions, children, parents, pose, products=products)
            made = schedule.schedule(told, backward=backward)
            assert made.positions * made.blocks >= positions and made.parents * made.tiles >= parents
            assert children <= made.per_split * made.splits < children + made.per_split
            assert made.rows >= pose[0] and made.columns >= pose[2]
            assert made.numbers <= 32 * made.warps * (16 if backward else 32) and made.warps <= 16
            if made.depth:
                assert made.positions * made.rows >= 16 and made.parents * made.columns >= 16
            assert f"{made.positions} positions" in str(made)
        made = schedule.matrix_schedule(facts(positions, children, parents, pose))
        assert made.position_splits * made.per_split >= made.tile.blocks
        assert made.splits * made.group_children >= children
    meta = torch.empty(128, 16, 16, 32, 8, 8, device="meta")
    weight = torch.empty(288, 32, 8, 8, device="meta")
    told = str(attention.schedule_call(meta, weight, 32, (3, 3, 2, 2, 0, 0, 1, 1), options=2 * (products is True)))
    assert ("matrix products" in told) == (products is True)


POSES = {
    "4x4": (32, 4, 4, 4),
    "6x6": (20, 6, 6, 6),
    "8x8": (16, 8, 8, 8),
    "1x8-1x16": (10, 1, 8, 16),
    "1x64": (10, 1, 64, 64),
}


def _step(
    shapes: Sequence[Sequence[int]],
    window: Sequence[int],
    dtype: torch.dtype,
    full: bool = False,
    options: int = 0,
    **chosen: Any,
) -> Callable[[], None]:
    """Return a training step; children, weight and query are ``shapes``, of no memory."""

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tensors = [meta(*shape) for shape in shapes]
    rows, columns = shapes[2][-2:]
    bias = meta(window[0] * window[1] * shapes[0][3], shapes[1][1], rows, columns) if full else None
    gate = meta(*shapes[0][:4]) if full else None
    children, weight, query = tensors
    votes, norm = (children, weight, bias, gate, weight.shape[1], window), meta(rows * columns)
    needs = 127 if full else 0b1110011

    def step() -> None:
        parents, sums = attention.attention_routing(*votes, query, norm, norm, 0.5, 1e-5, 0, 1, options, **chosen)
        given = (*votes, query[None], norm, sums, 0.5, 1e-5, needs, options)
        attention.attention_routing_backward(parents[None], *given, **chosen)

    return step


def test_workspace_never_grows_with_children_times_parents() -> None:
    """Every allocation of a call is seen, on the meta device: a vocabulary of 30,000, and a million children."""

    for batch, children, many in ((2, 1024, 30_000), (1, 10**6, 64), (128, 800, 10)):
        parents, weight = batch * many * 16, many * 256
        for ordered in (False, True):
            shapes = ((batch, 1, 1, children, 1, 16), (1, many, 16, 16), (batch, 1, 1, many, 1, 16))
            sizes = sizes_allocated(_step(shapes, SET_WINDOW, torch.float32, options=int(ordered)))
            tiles = 132 * 16 * 32 * 32  # numbers that a device's resident warps hold
            assert max(sizes) <= max(batch * children * 16, parents, 2 * weight, tiles, 1 << 24)
            assert max(sizes) < batch * children * many or batch == 128


@compiled_here
@pytest.mark.parametrize(
    ("pose", "target"), [*((pose, "sm_90") for pose in POSES), ("4x4", "sm_80"), ("4x4", "gfx942"), ("1x64", "gfx942")]
)
def test_compiles_without_a_gpu(pose: str, target: str) -> None:
    """Every kernel of a training step, for GPUs that are not there; few registers may spill, in large poses only."""
    modes = (0,) if target != "sm_90" else (0, 1, 2)
    many, rows, inner, columns = POSES[pose]
    shapes = ((128, 1, 1, 200, rows, inner), (200, many, inner, columns), (128, 1, 1, many, rows, columns))
    for mode in modes:
        wanted = {"_attention_forward_kernel", "_attention_backward_kernel"}
        wanted |= {"_attention_matrix_backward_kernel"} if mode == 1 else set()
        found = launches(_step(shapes, SET_WINDOW, torch.float32, options=mode))
        hold_compiled(found, target, 24 if pose in ("6x6", "1x64") else 4, wanted)


@compiled_here
@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
def test_everything_at_once_compiles_without_a_gpu(ordered: bool) -> None:
    """Bias, gate, padding, half precision and two sweeps, in odd sizes."""
    shapes = ((2, 5, 5, 3, 5, 3), (27, 70, 3, 7), (2, 5, 5, 70, 5, 7))
    limits = schedule.Limits(forward=4, backward=4)
    step = _step(shapes, (3, 3, 1, 1, 1, 1, 1, 1), torch.bfloat16, full=True, options=int(ordered), limits=limits)
    found = launches(step)
    assert "_attention_normalizer_kernel" in {launch.name for launch in found}
    for launch in once_each(found):
        assert static.compiled_for("sm_90", launch).n_regs > 0
    hold_bound(found)
