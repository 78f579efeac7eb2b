"""The pooling pass in Triton against the float64 reference: forward, every gradient, and what it compiles to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import LAYOUTS
from pooling_cases import BY_NAME, JUDGE, PoolingCase, check_op, random_pooling_cases
from triton_cases import (
    DEVICE,
    DTYPES,
    TINY,
    WIDE,
    compiled_here,
    grads_of,
    hold_bound,
    hold_compiled,
    hold_only_what_is_asked,
    hold_same_bits,
    implemented,
    launches,
    options,
    plain,
    sizes_allocated,
    there,
)

from fastcaps import ops, reference
from fastcaps.votes import SET_WINDOW
from fastcaps.triton_kernels import pooling

__all__ = ["plain"]
triton_pass, triton_backward = implemented(ops.POOLING)

OVERLAPPING = (2, 2, 1, 1, 1, 0, 1, 1)  # children that several windows see, and places that hold none
SETS = (
    "ones",
    "one-child",
    "one-parent",
    "empty-batch",
    "primes",
    "parents-33",
    "many-parents",
    "pose-6x6",
    "groups-1",
)
FORMS = ("no-query", "no-norm", "bias-11", "negative-scale", "sharp", "sharp-bare", "silent")
GRIDS = ("conv-groups-2", "padded-all-absent", "dilated-padded-strided", "gaps", "silent-grid")
IDENTITY = (
    "one-parent",
    "parents",
    "bias",
    "bias-1M",
    "conv",
    "padded",
    "no-query",
    "no-norm",
    "silent",
    "many-parents",
)


def check(case: PoolingCase, dtype: torch.dtype = torch.float32, seed: int = 0, tf32: bool = False) -> None:
    """Hold the kernels to the honest tolerance on a case."""
    arguments = case.tensors(dtype, seed), case.settings(), grads_of(case, dtype, seed + 1)
    check_op(*arguments, triton_pass, device=DEVICE, tf32=tf32)


def _small(case: PoolingCase) -> PoolingCase:
    """Return a case of the same kind that the interpreter is soon done with."""
    if case.grid == (1, 1):
        return replace(case, batch=1)
    return replace(case, batch=1, grid=(1, 2), types=1, window=OVERLAPPING, groups="I")


@pytest.mark.parametrize("name", [*SETS, *FORMS, *GRIDS, *(f"identity-{name}" for name in IDENTITY)])
def test_forward_and_every_gradient(name: str) -> None:
    options.update({"limits": WIDE} if DEVICE == "cpu" else {})
    check(BY_NAME[name])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["primes", "identity-padded"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check(replace(BY_NAME[name], batch=1), dtype)


@pytest.mark.parametrize("name", ["padded", "pose-1x64-1x2"])
def test_votes_by_matrix_products(name: str) -> None:
    """As with TF32; the interpreter multiplies in float32, a GPU is held to TF32's own rounding."""
    options.update(allow_tf32=True)
    check(replace(BY_NAME[name], batch=1, types=2, groups="I"), tf32=DEVICE == "cuda")


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("name", ["groups-3-of-6", "identity-bias", "whole-grid"])
def test_tiles_of_parents_and_ranges_of_children(name: str, ordered: bool) -> None:
    """Parents that do not fit into a program need not know of each other; children meet in the finishing kernel."""
    options.update(limits=TINY, deterministic=ordered)
    check(replace(_small(BY_NAME[name]), parents=7, gate=True, silent=True))


def test_a_range_in_which_nobody_is_there() -> None:
    """A range for every child, and two are silent: sums are nothing, tops are -infinity, and neither makes NaN."""
    options.update(limits={"resident": 64})
    case = replace(BY_NAME["silent"], types=9, parents=2, batch=1)
    tensors = case.tensors(torch.float32)
    tensors[4][..., :2] = 0.0
    check_op(tensors, case.settings(), grads_of(case), triton_pass, device=DEVICE)


@pytest.mark.parametrize("name", ["padded", "identity-conv"])
def test_deterministic_mode(name: str) -> None:
    case = replace(_small(BY_NAME[name]), gate=True, silent=True)
    options.update(deterministic=True)
    check(case)
    hold_same_bits(JUDGE, triton_pass, case)


@settings(
    max_examples=5 if DEVICE == "cpu" else 12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    case=random_pooling_cases(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
    ordered=st.booleans(),
    products=st.booleans(),
)
def test_random_shapes(case: PoolingCase, dtype: torch.dtype, seed: int, ordered: bool, products: bool) -> None:
    options.clear()
    options.update(deterministic=ordered, allow_tf32=products and DEVICE == "cpu")
    case = replace(case, batch=min(case.batch, 1), types=1 if case.grid != (1, 1) else case.types)
    check(replace(case, groups=case.groups if case.children % int(case.groups) == 0 else "I"), dtype, seed)


@pytest.mark.parametrize(
    ("name", "layout"),
    list(zip(("groups-1", "identity-padded") * 2, LAYOUTS, strict=True)),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_any_strides(name: str, layout: Any) -> None:
    case = replace(_small(BY_NAME[name]), gate=True)
    tensors = [None if t is None else layout(t) for t in case.tensors(torch.float32)]
    grads = [None if t is None else layout(t) for t in grads_of(case)]
    check_op(tensors, case.settings(), grads, triton_pass, device=DEVICE)


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
def test_only_the_gradients_asked_for(ordered: bool) -> None:
    options.update(deterministic=ordered)
    case = replace(_small(BY_NAME["padded"]), parents=2)
    hold_only_what_is_asked(JUDGE, triton_pass, triton_backward, case)


@pytest.mark.parametrize("name", ["padded", "identity-bias"])
def test_frozen_coefficients(name: str) -> None:
    """The gradient takes shares, gate and all, for constants."""
    case = replace(_small(BY_NAME[name]), gate=True)
    arguments = case.tensors(torch.float32), (*case.settings(), True), grads_of(case)
    check_op(*arguments, triton_pass, device=DEVICE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("identity", [False, True])
def test_a_gate_of_0_leaves_no_trace(identity: bool, bad: float) -> None:
    """Not of a broken child either; behind an open gate it spoils its own position."""
    case = PoolingCase("broken", grid=(2, 2), types=2, pose=(2, 2, 2), parents=2, bias="11", gate=True)
    case = replace(case, window=(2, 1, 1, 1, 1, 0, 1, 1), identity=identity)
    tensors, grads = case.tensors(torch.float32), grads_of(case)
    tensors[0][0, 0, 0, 0, 0, 1] = tensors[0][1, 1, 1, 1] = bad
    for closed in (True, False):
        if closed:
            tensors[4][0, 0, 0, 0] = tensors[4][1, 1, 1, 1] = 0.0
        else:
            tensors[4][1, 1, 1, 1] = 1.0
        expected = JUDGE.results(reference.pooling.pooling_pass, tensors, case.settings(), grads)
        for ordered in (False, True):
            options.update(deterministic=ordered)
            found = JUDGE.results(triton_pass, there(tensors), case.settings(), there(grads))
            for name, value in expected.items():
                assert torch.equal(found[name].cpu().isfinite(), value.isfinite()) or not closed, name
                if closed or name == "parents":
                    torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def test_keys_of_any_length() -> None:
    """Votes whose squares would vanish or overflow still have a direction; the zero vote has none."""
    case = PoolingCase("lengths", types=4, parents=2, pose=(2, 2, 2), identity=True, batch=1)
    tensors = case.tensors(torch.float32)
    poses = tensors[0]
    tensors[0] = poses * torch.tensor([1e-30, 1e-25, 1e-20, 0.0])[:, None, None]
    check_op(tensors, case.settings(), grads_of(case), triton_pass, device=DEVICE)
    for size in (1e-38, 1e30):
        tensors[0] = poses * size
        found = triton_pass(*there(tensors), *case.settings())
        for one, other in zip(found, reference.pooling.pooling_pass(*tensors, *case.settings()), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=0.0)


# ---- refusals, schedules, what would be compiled ---------------------------------------------------------------------


def test_refusals_and_schedules() -> None:
    gpu = torch.device("cuda")
    assert pooling.refusal(gpu, torch.float32, (4, 4, 4), 512) == ""
    assert "on cpu" in pooling.refusal(torch.device("cpu"), torch.float32, (4, 4, 4), 32)
    assert "float64" in pooling.refusal(gpu, torch.float64, (4, 4, 4), 32)
    assert "8192 numbers" in pooling.refusal(gpu, torch.float32, (128, 4, 128), 32)
    children = torch.empty(128, 1, 1, 256, 1, 16, device="meta")
    told = str(pooling.schedule_call(children, None, 512, SET_WINDOW))
    assert "two sweeps" not in told and "column by column" in told


def _step(
    children: tuple[int, ...], weight: tuple[int, ...] | None, parents: int, gate: bool = False, options: int = 0
) -> Callable[[], None]:
    """Return a training step on a set, on tensors of no memory."""

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    columns = children[-1] if weight is None else weight[-1]
    query = meta(children[0], 1, 1, parents, children[4], columns)
    gates = meta(*children[:4]) if gate else None
    votes = (meta(*children), None if weight is None else meta(*weight), None, gates, parents, SET_WINDOW)

    def step() -> None:
        result, sums, logsumexp = pooling.pooling_routing(*votes, query, 1.0, True, 3, 1, options)
        given = (query[None], sums, logsumexp, 1.0, True, 31, options)
        pooling.pooling_routing_backward(result[None], *votes, *given)

    return step


def test_workspace_never_grows_with_children_times_parents() -> None:
    for batch, children, many in ((2, 1024, 30_000), (1, 10**6, 64)):
        for ordered in (False, True):
            step = _step((batch, 1, 1, children, 1, 16), (1, many, 16, 16), many, options=int(ordered))
            tiles = 132 * 16 * 32 * 32  # numbers that a device's resident warps hold
            assert max(sizes_allocated(step)) <= max(batch * children * 16, batch * many * 16, many * 512, tiles)


SHAPES: dict[str, Any] = {
    "zhao": ((128, 1, 1, 256, 1, 16), None, 1),
    "identity-512": ((128, 1, 1, 256, 1, 16), None, 512, True),
    "4x4": ((128, 1, 1, 200, 4, 4), (200, 32, 4, 4), 32, True),
    "1x8-1x16": ((128, 1, 1, 200, 1, 8), (200, 10, 8, 16), 10),
}


@compiled_here
@pytest.mark.parametrize(
    ("shape", "target", "mode"),
    [
        ("zhao", "sm_90", 0),
        ("identity-512", "sm_90", 0),
        ("4x4", "sm_90", 2),
        ("1x8-1x16", "sm_90", 1),
        ("4x4", "sm_80", 0),
        ("4x4", "sm_100", 0),
    ],
)
def test_compiles_without_a_gpu(shape: str, target: str, mode: int) -> None:
    """Every kernel of a training step, for GPUs that are not there; none may spill."""
    wanted = {"_pooling_forward_kernel", "_pooling_backward_kernel"}
    wanted |= {"_pooling_matrix_backward_kernel"} if mode == 1 else set()
    hold_compiled(launches(_step(*SHAPES[shape], options=mode)), target, 0, wanted)


@compiled_here
def test_the_launcher_takes_what_is_launched() -> None:
    hold_bound(launches(_step(*SHAPES["zhao"])))
