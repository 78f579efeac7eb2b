"""The reference of the pooling pass against plain loops, and its formulas against autograd."""

from __future__ import annotations

import pytest
import torch
from oracle_routings import pool, positions
from pass_cases import LAYOUTS, autograd_gradients, gradients_like, ids
from pooling_cases import BY_NAME, PoolingCase
from pooling_cases import REFERENCE_CASES as POOLING
from torch import Tensor

from fastcaps import reference
from fastcaps.reference import pooling
from fastcaps.reference.pooling import NEEDS, pooling_pass, pooling_pass_backward

GRADCHECKED = ("primes", "padded", "no-norm", "groups-1", "no-query", "identity-padded", "identity-one-parent")


def small(case: PoolingCase) -> bool:
    return case.batch > 0 and case.children * case.parents * case.pose[1] < 2000


def gradients(tensors: list[Tensor | None], settings: tuple, grads: list[Tensor | None]) -> list[Tensor | None]:
    return autograd_gradients(pooling_pass, tensors, settings, grads)


def backward(
    tensors: list[Tensor | None], settings: tuple, grads: list[Tensor | None], needs: int = 31
) -> tuple[Tensor, ...]:
    return pooling_pass_backward(*grads, *tensors, *pooling_pass(*tensors, *settings), *settings, needs)


@pytest.mark.parametrize("case", [case for case in POOLING if small(case)], ids=ids)
def test_loops(case: PoolingCase) -> None:
    tensors, settings = case.tensors(), case.settings()
    children, weight, query, bias, gate = (None if t is None else t.tolist() for t in tensors)
    scale, normalize, window = settings
    found, logsumexp = pooling_pass(*tensors, *settings)
    shares = pooling.coefficients(*tensors, *settings)
    assert found.shape == case.shape
    expected, expected_lse, expected_shares = (torch.zeros_like(t) for t in (found, logsumexp, shares))
    seen_positions = 0
    for (b, y, x), seen in positions(children, weight, bias, gate, window, case.parents):
        for m in range(case.parents):
            flat = None if query is None else [number for row in query[b][y][x][m] for number in row]
            sums, lse, share = pool(seen, m, flat, scale, normalize)
            expected[b, y, x, m] = (
                torch.tensor(sums, dtype=torch.float64).expand(expected[0, 0, 0, 0].numel()).view(expected.shape[-2:])
            )
            expected_lse[b, y, x, m] = lse
            for child, number in zip(seen, share, strict=True):
                expected_shares[b, y, x, child.index, m] = number
        seen_positions += 1
    assert seen_positions == found.shape[:3].numel()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(logsumexp, expected_lse, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(shares, expected_shares, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", POOLING, ids=ids)
def test_backward_formulas_against_autograd(case: PoolingCase) -> None:
    tensors, settings = case.tensors(), case.settings()
    grads = gradients_like(pooling_pass(*tensors, *settings))
    expected = gradients(tensors, settings, grads)
    found = backward(tensors, settings, grads)
    for name, gradient, wanted in zip(NEEDS, found, expected, strict=True):
        if wanted is None:
            assert gradient.shape == (0,), name
        else:
            assert gradient.is_contiguous(), name
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("only", [0, 1])
def test_one_output_has_a_gradient(only: int) -> None:
    case = BY_NAME["padded"]
    tensors, settings = case.tensors(), case.settings()
    grads = gradients_like(pooling_pass(*tensors, *settings))
    grads[1 - only] = None
    for found, wanted in zip(backward(tensors, settings, grads), gradients(tensors, settings, grads), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("needs", [1, 2, 4, 8, 16, 0, 5, 2 + 16])
def test_only_the_gradients_asked_for(needs: int) -> None:
    case = BY_NAME["padded"]
    tensors, settings = case.tensors(), case.settings()
    grads = gradients_like(pooling_pass(*tensors, *settings))
    everything = backward(tensors, settings, grads)
    for k, gradient in enumerate(backward(tensors, settings, grads, needs)):
        wanted = everything[k] if needs >> k & 1 else torch.empty(0, dtype=torch.float64)
        assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name: str) -> None:
    case = BY_NAME[name]
    settings = case.settings()
    tensors = [None if t is None else t.requires_grad_() for t in case.tensors()]

    def run(*given: Tensor | None) -> tuple[Tensor, ...]:
        return pooling_pass(*given, *settings)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("name", GRADCHECKED)
def test_backward_formulas_gradcheck(name: str) -> None:
    case = BY_NAME[name]
    tensors, settings = case.tensors(), case.settings()
    outputs = pooling_pass(*tensors, *settings)
    inputs = [*gradients_like(outputs), *tensors, *outputs]
    inputs = [None if t is None else t.clone().requires_grad_() for t in inputs]

    def run(*given: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(g for g in pooling_pass_backward(*given, *settings, 31) if g.numel())

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: object) -> None:
    case = BY_NAME["padded"]
    tensors, settings = case.tensors(), case.settings()
    moved = [None if t is None else layout(t) for t in tensors]
    outputs = pooling_pass(*tensors, *settings)
    for found, wanted in zip(pooling_pass(*moved, *settings), outputs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    grads = gradients_like(outputs)
    for found, wanted in zip(
        backward(moved, settings, [layout(grad) for grad in grads]), backward(tensors, settings, grads), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_without_a_query_it_is_the_mean() -> None:
    children = torch.randn(2, 3, 4, 5, 2, 3, dtype=torch.float64)
    window = [3, 4, 1, 1, 0, 0, 1, 1]
    mean, logsumexp = pooling_pass(children, None, None, None, None, 1.0, False, window)
    torch.testing.assert_close(mean[:, 0, 0, 0], children.mean((1, 2, 3)))
    torch.testing.assert_close(logsumexp, torch.full_like(logsumexp, 60.0).log())


def test_scale_0_is_the_mean_and_a_large_scale_a_maximum() -> None:
    children, query = torch.randn(2, 1, 1, 7, 2, 3), torch.randn(2, 1, 1, 1, 2, 3)
    mean, _ = pooling_pass(children, None, query, None, None, 0.0, True, [1, 1, 1, 1, 0, 0, 1, 1])
    torch.testing.assert_close(mean[:, 0, 0, 0], children[:, 0, 0].mean(1))
    most, _ = pooling_pass(children, None, query, None, None, 1e4, False, [1, 1, 1, 1, 0, 0, 1, 1])
    nearest = (children[:, 0, 0] * query[:, 0, 0]).sum((-2, -1)).argmax(1)
    torch.testing.assert_close(most[:, 0, 0, 0], children[:, 0, 0][torch.arange(2), nearest])


def test_zero_votes_have_keys_and_gradients_of_zero() -> None:
    case = BY_NAME["identity-parents"]
    tensors, settings = case.tensors(), case.settings()
    assert settings[1]
    tensors[0][:, :, :, 1:3] = 0
    grads = gradients_like(pooling_pass(*tensors, *settings))
    found, expected = backward(tensors, settings, grads), gradients(tensors, settings, grads)
    for gradient, wanted in zip(found, expected, strict=True):
        if wanted is not None:
            assert wanted.isfinite().all()
            torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", ["primes", "padded", "identity-conv", "identity-one-parent"])
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_gate_of_0_leaves_no_trace(name: str, trash: float) -> None:
    case = BY_NAME[name]
    tensors, settings = case.tensors(), case.settings()
    tensors[4][..., 1] = 0
    clean = [None if t is None else t.clone() for t in tensors]
    clean[0][..., 1, :, :] = 0  # finite: any number will do
    tensors[0][..., 1, :, :] = trash
    if name == "primes":  # a set, where a bias belongs to one child
        tensors[3][1] = trash
    outputs = pooling_pass(*clean, *settings)
    for found, wanted in zip(pooling_pass(*tensors, *settings), outputs, strict=True):
        assert torch.equal(found, wanted)
    grads = gradients_like(outputs)
    wanted = backward(clean, settings, grads)
    for run in (backward, gradients):
        for k, (found, expected) in enumerate(zip(run(tensors, settings, grads), wanted, strict=True)):
            if found is not None and NEEDS[k] != "gate":
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for run in (backward, gradients):
        found = run(tensors, settings, grads)
        assert found[4].isfinite().all() and (found[0][..., 1, :, :] == 0).all()
        torch.testing.assert_close(found[4][..., 0], wanted[4][..., 0], rtol=1e-12, atol=1e-12)
        if trash != 1e300:
            assert (found[4][..., 1] == 0).all()


def test_nothing_overflows_in_place_of_a_child_that_is_not_there() -> None:
    """Among scores of -2000 a score of zero would win by more than a float holds."""
    children = torch.full((1, 1, 1, 3, 1, 2), -1000.0, dtype=torch.float64)
    children[0, 0, 0, 1] = torch.nan
    gate = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 3)
    tensors = [children, None, torch.ones(1, 1, 1, 1, 1, 2, dtype=torch.float64), None, gate]
    settings = 1.0, False, [1, 1, 1, 1, 0, 0, 1, 1]
    outputs = pooling_pass(*tensors, *settings)
    torch.testing.assert_close(outputs[0], torch.full_like(outputs[0], -1000.0))
    for run in (backward, gradients):
        found = run(tensors, settings, gradients_like(outputs))
        assert all(gradient.isfinite().all() for gradient in found if gradient is not None and gradient.numel())


def test_a_gate_of_0_may_open_again() -> None:
    case = BY_NAME["primes"]
    tensors, settings = case.tensors(), case.settings()
    tensors[4][..., 1] = 0
    grads = gradients_like(pooling_pass(*tensors, *settings))
    expected = gradients(tensors, settings, grads)[4]
    assert (expected[..., 1] != 0).all()
    torch.testing.assert_close(backward(tensors, settings, grads)[4], expected, rtol=1e-9, atol=1e-10)


def test_nobody_there() -> None:
    case = BY_NAME["primes"]
    tensors, settings = case.tensors(), case.settings()
    tensors[4][0] = 0
    tensors[0][0, :, :, 0] = torch.nan
    parents, logsumexp = pooling_pass(*tensors, *settings)
    assert (parents[0] == 0).all() and (logsumexp[0] == -torch.inf).all() and logsumexp[1:].isfinite().all()
    grads = gradients_like((parents, logsumexp))
    expected = gradients(tensors, settings, grads)
    for gradient, wanted in zip(backward(tensors, settings, grads), expected, strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10)
    assert all((expected[k][0] == 0).all() for k in (0, 2, 4))  # nothing to learn from an empty place


def test_nan_and_infinity_come_out_where_they_went_in() -> None:
    case = BY_NAME["primes"]
    tensors, settings = case.tensors(), case.settings()
    for number in (torch.nan, torch.inf):
        spoilt = [t.clone() for t in tensors]
        spoilt[0][1, 0, 0, 2] = number
        parents, _ = pooling_pass(*spoilt, *settings)
        assert parents[1].isnan().all() and parents[[0, 2]].isfinite().all()


def test_large_logits_stay_finite() -> None:
    children, query = torch.randn(1, 1, 1, 7, 1, 4), torch.randn(1, 1, 1, 3, 1, 4)
    parents, logsumexp = pooling_pass(children, None, query, None, None, 1e6, False, [1, 1, 1, 1, 0, 0, 1, 1])
    assert parents.isfinite().all() and logsumexp.isfinite().all()


def test_half_precision_rounds_once() -> None:
    case = BY_NAME["primes"]
    for dtype in (torch.bfloat16, torch.float16):
        tensors = case.tensors(dtype)
        parents, logsumexp = pooling_pass(*tensors, *case.settings())
        wide, wide_lse = pooling_pass(*(t.float() for t in tensors), *case.settings())
        assert parents.dtype == dtype and logsumexp.dtype == torch.float32
        assert torch.equal(parents, wide.to(dtype)) and torch.equal(logsumexp, wide_lse)
        found = backward(tensors, case.settings(), gradients_like((parents, logsumexp)))
        assert all(gradient.dtype == dtype for gradient in found)


@pytest.mark.parametrize("name", ["padded", "primes", "silent-grid", "identity-bias"])
def test_frozen_coefficients_are_constants(name: str) -> None:
    """The formulas against autograd through detached shares."""
    case = BY_NAME[name]
    tensors, settings = case.tensors(), case.settings()
    outputs = pooling_pass(*tensors, *settings, True)
    for one, other in zip(outputs, pooling_pass(*tensors, *settings), strict=True):
        assert torch.equal(one, other)
    grads = case.grads()
    wanted = autograd_gradients(pooling_pass, tensors, (*settings, True), [grads[0], None])
    found = pooling_pass_backward(*grads, *tensors, *outputs, *settings, 31 | reference.FROZEN)
    for argument, gradient, other in zip(NEEDS, found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-11, msg=argument)
    assert all((found[k] == 0).all() for k in (2, 4) if tensors[k] is not None)
