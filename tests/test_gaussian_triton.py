"""The Gaussian pass in Triton against the float64 reference: forward, every gradient, and what it compiles to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gaussian_cases import BY_NAME, JUDGE, GaussianCase, check_op, random_gaussian_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import LAYOUTS
from triton_cases import (
    DEVICE,
    DTYPES,
    TINY,
    WIDE,
    compiled_here,
    facts,
    hold_bound,
    hold_compiled,
    hold_only_what_is_asked,
    hold_same_bits,
    implemented,
    launches,
    options,
    plain,
    schedule,
    sizes_allocated,
    there,
)

from fastcaps import ops, reference
from fastcaps.votes import SET_WINDOW
from fastcaps.triton_kernels import gaussian

__all__ = ["plain"]
triton_pass, triton_backward = implemented(ops.GAUSSIAN)

OVERLAPPING = (2, 2, 1, 1, 1, 0, 1, 1)  # children that several windows see, and places that hold none
SETS = ("ones", "one-child", "one-parent", "empty-batch", "primes", "many-parents", "groups-1", "pose-1x64-1x2")
FORMS = (
    "no-query",
    "no-betas",
    "no-log-weight",
    "log-weight-alone",
    "k-means",
    "betas-without-bias",
    "no-eps",
    "silent",
)
GRIDS = ("conv-groups-2", "padded-no-query", "padded-all-absent", "dilated-padded-strided", "gaps", "silent-grid")


def check(case: GaussianCase, dtype: torch.dtype = torch.float32, seed: int = 0, tf32: bool = False) -> None:
    """Hold the kernels to the honest tolerance on a case."""
    arguments = case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1)
    check_op(*arguments, triton_pass, device=DEVICE, tf32=tf32)


def _small(case: GaussianCase) -> GaussianCase:
    """Return a case of the same kind that the interpreter is soon done with."""
    if case.grid == (1, 1):
        return replace(case, batch=1)
    return replace(case, batch=1, grid=(1, 2), types=1, window=OVERLAPPING, groups="I")


@pytest.mark.parametrize("name", [*SETS, *FORMS, *GRIDS])
def test_forward_and_every_gradient(name: str) -> None:
    options.update({"limits": WIDE} if DEVICE == "cpu" else {})
    check(BY_NAME[name])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["primes", "padded"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    check(_small(BY_NAME[name]), dtype)


@pytest.mark.parametrize("name", ["padded", "pose-1x64-1x2"])
def test_votes_by_matrix_products(name: str) -> None:
    """As with TF32; the interpreter multiplies in float32, a GPU is held to TF32's own rounding."""
    options.update(allow_tf32=True)
    check(replace(_small(BY_NAME[name]), types=2), tf32=DEVICE == "cuda")


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize("name", ["groups-3-of-6", "no-query", "k-means", "log-weight-alone", "whole-grid"])
def test_two_sweeps_and_ranges_of_children(name: str, ordered: bool) -> None:
    """Parents that do not fit into a program: their softmax first; children meet in the finishing kernel."""
    options.update(limits=TINY, deterministic=ordered)
    check(replace(_small(BY_NAME[name]), types=2, groups="I", parents=7, gate=True, silent=True))


@pytest.mark.parametrize("batch", [1, 16])
def test_many_children_of_the_same_matrices(batch: int) -> None:
    """Programs of their own gather dW: by outer products for few positions, else by matrix products."""
    case = GaussianCase("shared", types=65, groups=1, parents=3, pose=(1, 2, 2), batch=batch, bias="1M", gate=True)
    tile = schedule.matrix_schedule(facts(batch, 65, 3, case.pose, crowd=gaussian.ROUTING.crowd)).tile
    assert (tile.positions * tile.rows >= 16) == (batch == 16)
    options.update({"limits": WIDE} if DEVICE == "cpu" else {})
    check(case)


@pytest.mark.parametrize("name", ["padded", "no-query-grid"])
def test_deterministic_mode(name: str) -> None:
    case = replace(_small(BY_NAME[name]), gate=True, silent=True)
    options.update(deterministic=True)
    check(case)
    hold_same_bits(JUDGE, triton_pass, case)


@settings(
    max_examples=5 if DEVICE == "cpu" else 12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    case=random_gaussian_cases(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
    ordered=st.booleans(),
    products=st.booleans(),
)
def test_random_shapes(case: GaussianCase, dtype: torch.dtype, seed: int, ordered: bool, products: bool) -> None:
    options.clear()
    options.update(deterministic=ordered, allow_tf32=products and DEVICE == "cpu")
    case = replace(case, batch=min(case.batch, 1), types=1 if case.grid != (1, 1) else case.types)
    check(replace(case, groups=case.groups if case.children % int(case.groups) == 0 else "I"), dtype, seed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_any_strides(layout: Any) -> None:
    case = _small(BY_NAME["padded"])
    tensors = [None if t is None else layout(t) for t in case.tensors(torch.float32)]
    grads = [None if t is None else layout(t) for t in case.grads(torch.float32)]
    check_op(tensors, case.settings(), grads, triton_pass, device=DEVICE)


@pytest.mark.parametrize("use", ["IM", "I1", "1M", "11"])
def test_every_form_of_betas(use: str) -> None:
    """Those of use and of ignorance need not have the same form."""
    case = GaussianCase("betas", types=4, parents=3, batch=1, bias="IM", gate=True, absent=("bias",))
    tensors = case.tensors(torch.float32)
    tensors[7] = tensors[7][: None if use[0] == "I" else 1, : None if use[1] == "M" else 1].clone()
    for ordered in (False, True):
        options.update(deterministic=ordered)
        check_op(tensors, case.settings(), case.grads(torch.float32), triton_pass, device=DEVICE)
        tensors[7:] = tensors[:6:-1]


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
def test_only_the_gradients_asked_for(ordered: bool) -> None:
    options.update(deterministic=ordered)
    hold_only_what_is_asked(JUDGE, triton_pass, triton_backward, replace(_small(BY_NAME["padded"]), parents=2))


@pytest.mark.parametrize("which", range(4), ids=["counts", "means", "variances", "evidence"])
def test_a_gradient_of_one_output_alone(which: int) -> None:
    case = replace(BY_NAME["silent"], types=4, batch=1)
    grads = [grad if k == which else None for k, grad in enumerate(case.grads(torch.float32))]
    check_op(case.tensors(torch.float32), case.settings(), grads, triton_pass, device=DEVICE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("first_turn", [False, True])
def test_a_gate_of_0_leaves_no_trace(first_turn: bool, bad: float) -> None:
    """Not of a broken child either; behind an open gate it spoils its own position."""
    case = GaussianCase("broken", grid=(2, 2), types=2, pose=(2, 2, 2), parents=2, bias="11", gate=True)
    case = replace(case, window=(2, 1, 1, 1, 1, 0, 1, 1), query=not first_turn)
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    tensors[0][0, 0, 0, 0, 0, 1] = tensors[0][1, 1, 1, 1] = bad
    tensors[6][0, 0, 0, 0] = tensors[6][1, 1, 1, 1] = 0.0
    expected = JUDGE.results(reference.gaussian.gaussian_pass, tensors, case.settings(), grads)
    for limits, ordered in ((WIDE, False), (TINY, True)):
        options.update(deterministic=ordered, limits=limits)
        found = JUDGE.results(triton_pass, there(tensors), case.settings(), there(grads))
        for name, value in expected.items():
            torch.testing.assert_close(found[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)
    tensors[6][1, 1, 1, 1] = 1.0
    _, expected_means, *_ = reference.gaussian.gaussian_pass(*tensors, *case.settings())
    _, means, *_ = triton_pass(*there(tensors), *case.settings())
    assert torch.equal(means.cpu().isfinite(), expected_means.isfinite()) and not expected_means.isfinite().all()


@pytest.mark.parametrize("turn", ["first", "near", "far"])
@pytest.mark.parametrize("resident", [1, 64])
def test_variances_do_not_feel_an_offset(turn: str, resident: int) -> None:
    """Votes at 1e4 with a spread of 1: about their mean, or none, or one that is 50 spreads away."""
    options.update(limits={"resident": resident})
    generator = torch.Generator().manual_seed(0)
    children = torch.randn(1, 1, 1, 41, 1, 2, generator=generator) + 1e4
    weight = torch.eye(2).expand(1, 2, 2, 2)
    mean = variance = None
    if turn != "first":
        mean = torch.full((1, 1, 1, 2, 1, 2), 1e4 + (50.0 if turn == "far" else 0.3))
        variance = torch.full_like(mean, 1e4)
    gate = torch.ones(1, 1, 1, 41)
    gate[..., 0] = 0.0  # the first range may be empty
    tensors = [children, weight, mean, variance, None, None, gate, None, None]
    exact = reference.gaussian.gaussian_pass(*(t if t is None else t.double() for t in tensors), 0.0, SET_WINDOW)
    found = triton_pass(*there(tensors), 0.0, SET_WINDOW)
    torch.testing.assert_close(found[2].cpu().double(), exact[2], rtol=1e-4 if turn == "far" else 5e-6, atol=0.0)
    torch.testing.assert_close(found[1].cpu().double(), exact[1], rtol=1e-6, atol=0.0)


def test_parents_of_no_width_and_no_weight() -> None:
    """Variances of 1e-12 and log-weights of -infinity make no NaN."""
    case = replace(BY_NAME["silent"], types=3, batch=1)
    tensors = case.tensors(torch.float32)
    tensors[3].fill_(1e-12)
    tensors[4][..., 0] = -torch.inf
    expected = reference.gaussian.gaussian_pass(*(t if t is None else t.double() for t in tensors), *case.settings())
    found = triton_pass(*there(tensors), *case.settings())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-4)


def _routed(run: Any, tensors: Sequence[torch.Tensor], rule: int, eps: float) -> tuple[torch.Tensor, ...]:
    """Return the gradients of children, weights and gates after two turns of EM (4) or of Heinsen's routing (5)."""
    children, weight, gate, *betas = (tensor.clone().requires_grad_() for tensor in tensors)
    state: tuple[Any, ...] = (None, None, None)
    for _ in range(2):
        own = betas if rule == 5 else (None, None)
        counts, mean, variance, score = run(children, weight, *state, None, gate, *own, eps, SET_WINDOW)
        variance = variance + eps
        log_sigma = 0.5 * variance.log().sum((-2, -1))
        if rule == 4:
            score = 0.01 * (betas[1] - (16 * betas[0] + log_sigma) * counts)
        state = (mean, variance, torch.nn.functional.logsigmoid(score) - log_sigma)
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.dtype) for one in (mean, score)]
    return torch.autograd.grad((mean, score), (children, weight, gate), grads)


@pytest.mark.parametrize("ordered", [False, True], ids=["atomic", "ordered"])
@pytest.mark.parametrize(("rule", "eps"), [(4, 1e-8), (5, 1e-5)], ids=["em", "heinsen"])
@pytest.mark.parametrize(("types", "many"), [(1, 3), (8, 10)])
def test_one_child_makes_a_parent(types: int, many: int, rule: int, eps: float, ordered: bool) -> None:
    """What a mean loses to rounding is large beside its variance, and must cancel as it does for autograd."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 1, 1, types, 4, 4, generator=generator),
        torch.randn(types, many, 4, 4, generator=generator),
    ]
    tensors += [torch.rand(2, 1, 1, types, generator=generator), *torch.randn(2, 1, many, generator=generator).unbind()]
    tensors[1] *= 0.5
    if rule == 4:
        tensors[3:] = [beta[0] for beta in tensors[3:]]
    options.update(deterministic=ordered, limits={"resident": 64} if ordered else WIDE)
    oracle = reference.gaussian.gaussian_pass
    exact = _routed(oracle, [tensor.double() for tensor in tensors], rule, eps)
    eager, found = _routed(oracle, tensors, rule, eps), _routed(triton_pass, there(tensors), rule, eps)
    for name, one, other, right in zip(("dchildren", "dweight", "dgate"), found, eager, exact, strict=True):
        error, allowed = (one.cpu() - right).abs().max(), 2 * (other - right).abs().max()
        assert error <= allowed + 2e-6 * right.abs().max(), f"{name}: {error:.3g}, allowed {allowed:.3g}"


# ---- refusals, schedules, what would be compiled ---------------------------------------------------------------------


def test_refusals_and_schedules() -> None:
    gpu = torch.device("cuda")
    assert gaussian.refusal(gpu, torch.float32, (4, 4, 4), 512) == ""
    assert "on cpu" in gaussian.refusal(torch.device("cpu"), torch.float32, (4, 4, 4), 32)
    assert "float64" in gaussian.refusal(gpu, torch.float64, (4, 4, 4), 32)
    assert "4096 numbers" in gaussian.refusal(gpu, torch.float32, (128, 4, 64), 32)
    children, weight = (torch.empty(shape, device="meta") for shape in ((8, 1, 1, 200, 1, 8), (200, 512, 8, 16)))
    assert "two sweeps" in str(gaussian.schedule_call(children, weight, 512, SET_WINDOW, backward=True))


def _step(
    children: tuple[int, ...], weight: tuple[int, ...], betas: tuple[int, int] | None = None, options: int = 0
) -> Callable[[], None]:
    """Return a training step on a set with gates, on tensors of no memory."""

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    each = (children[0], 1, 1, weight[1])
    pose = (*each, children[4], weight[3])
    beta = None if betas is None else meta(*betas)
    votes = (meta(*children), meta(*weight), None, meta(*children[:4]), weight[1], SET_WINDOW)
    state = (meta(*pose), meta(*pose), meta(*each))

    def step() -> None:
        results = gaussian.gaussian_routing(*votes, *state, beta, beta, [1.0], 5, 1e-5, options)
        counts, means, variances, scores = results[3:]
        grads, states = (counts, means, variances, None if beta is None else scores), (one[None] for one in state)
        given = (*states, beta, beta, counts, means, variances, 1e-5, 511, options)
        gaussian.gaussian_routing_backward(*grads, *votes, *given)

    return step


def test_workspace_never_grows_with_children_times_parents() -> None:
    for batch, children, many in ((2, 1024, 30_000), (1, 10**6, 64)):
        for ordered in (False, True):
            step = _step((batch, 1, 1, children, 1, 16), (1, many, 16, 16), (1, many), options=int(ordered))
            tiles = 132 * 16 * 32 * 32  # numbers that a device's resident warps hold
            assert max(sizes_allocated(step)) <= max(batch * children * 16, batch * many * 16, many * 512, tiles)


SHAPES: dict[str, Any] = {
    "hinton": ((128, 1, 1, 200, 4, 4), (200, 32, 4, 4)),
    "heinsen-norb": ((20, 1, 1, 640, 4, 4), (1, 64, 4, 4), (640, 64)),
    "heinsen-sst": ((20, 1, 1, 640, 1, 64), (1, 64, 64, 2), (1, 64)),
    "li-capnet": ((128, 1, 1, 200, 1, 8), (200, 512, 8, 16)),
}


@compiled_here
@pytest.mark.parametrize(
    ("shape", "target", "mode"),
    [
        ("hinton", "sm_90", 0),
        ("heinsen-norb", "sm_90", 1),
        ("heinsen-sst", "sm_90", 2),
        ("li-capnet", "sm_90", 0),
        ("hinton", "sm_80", 0),
        ("hinton", "sm_100", 0),
    ],
)
def test_compiles_without_a_gpu(shape: str, target: str, mode: int) -> None:
    """Every kernel of a training step, for GPUs that are not there; none may spill."""
    wanted = {"_gaussian_forward_kernel", "_gaussian_backward_kernel"}
    wanted |= {"_gaussian_matrix_backward_kernel"} if mode == 1 else set()
    hold_compiled(launches(_step(*SHAPES[shape], options=mode)), target, 0, wanted)


@compiled_here
def test_the_launcher_takes_what_is_launched() -> None:
    hold_bound(launches(_step(*SHAPES["heinsen-sst"])))
