"""The reference of the Gaussian pass against plain loops, and its formulas against autograd."""

from __future__ import annotations

import pytest
import torch
from gaussian_cases import BY_NAME, GaussianCase
from gaussian_cases import REFERENCE_CASES as GAUSSIAN
from oracle_routings import explain, positions
from pass_cases import LAYOUTS, autograd_gradients, gradients_like, ids
from torch import Tensor

from fastcaps import reference
from fastcaps.votes import SET_WINDOW
from fastcaps.reference import gaussian
from fastcaps.reference.gaussian import NEEDS, gaussian_pass, gaussian_pass_backward

GRADCHECKED = ("primes", "padded", "no-affine", "no-query", "groups-1", "large-eps", "dilated-padded-strided", "ones")
ALL = (1 << len(NEEDS)) - 1


def small(case: GaussianCase) -> bool:
    return case.batch > 0 and case.children * case.parents * case.pose[1] < 2000


def flat(nested: list) -> list[float]:
    return [number for row in nested for number in row]


def gradients(tensors: list[Tensor | None], settings: tuple, grads: list[Tensor | None]) -> list[Tensor | None]:
    return autograd_gradients(gaussian_pass, tensors, settings, grads)


def backward(
    tensors: list[Tensor | None], settings: tuple, grads: list[Tensor | None], needs: int = ALL
) -> tuple[Tensor, ...]:
    outputs = gaussian_pass(*tensors, *settings)
    return gaussian_pass_backward(*grads, *tensors, *outputs[:3], *settings, needs)


@pytest.mark.parametrize("case", [case for case in GAUSSIAN if small(case)], ids=ids)
def test_loops(case: GaussianCase) -> None:
    tensors, settings = case.tensors(), case.settings()
    children, weight, mean, variance, log_weight, bias, gate, use, ignore = (
        None if t is None else t.tolist() for t in tensors
    )
    eps, window = settings
    outputs = gaussian_pass(*tensors, *settings)
    shares = gaussian.coefficients(*tensors[:6], window)
    assert outputs[1].shape == case.shape
    expected = [torch.zeros_like(t) for t in (*outputs, shares)]
    for (b, y, x), seen in positions(children, weight, bias, gate, window):
        here = [None if t is None else [flat(m) for m in t[b][y][x]] for t in (mean, variance)]
        alpha = None if log_weight is None else log_weight[b][y][x]
        result = explain(seen, case.parents, *here, alpha, use, ignore, eps)
        for k in range(4 if use is not None else 3):
            numbers = torch.tensor(result[k], dtype=torch.float64)
            target = expected[k][b, y, x]
            target.copy_(numbers.reshape(target.shape) if seen else numbers.new_zeros(()).expand(target.shape))
        for child, share in zip(seen, result.shares, strict=True):
            expected[4][b, y, x, child.index] = torch.tensor(share, dtype=torch.float64)
    for found, wanted in zip((*outputs, shares), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    assert (outputs[3].dim() == 1) == (use is None)


@pytest.mark.parametrize("case", GAUSSIAN, ids=ids)
def test_backward_formulas_against_autograd(case: GaussianCase) -> None:
    tensors, settings = case.tensors(), case.settings()
    grads = gradients_like(gaussian_pass(*tensors, *settings))
    expected = gradients(tensors, settings, grads)
    for name, gradient, wanted in zip(NEEDS, backward(tensors, settings, grads), expected, strict=True):
        if wanted is None:
            assert gradient.shape == (0,), name
        else:
            assert gradient.is_contiguous(), name
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("only", range(4))
def test_one_output_has_a_gradient(only: int) -> None:
    case = BY_NAME["padded"]
    tensors, settings = case.tensors(), case.settings()
    grads = gradients_like(gaussian_pass(*tensors, *settings))
    grads = [grad if k == only else None for k, grad in enumerate(grads)]
    expected = gradients(tensors, settings, grads)
    for name, found, wanted in zip(NEEDS, backward(tensors, settings, grads), expected, strict=True):
        if found.shape == (0,):
            assert name.startswith("beta") and only != 3 and (wanted == 0).all()
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("needs", [*(1 << k for k in range(9)), 0, 5, 2 + 16 + 256])
def test_only_the_gradients_asked_for(needs: int) -> None:
    case = BY_NAME["padded"]
    tensors, settings = case.tensors(), case.settings()
    grads = gradients_like(gaussian_pass(*tensors, *settings))
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
        return tuple(output for output in gaussian_pass(*given, *settings) if output.requires_grad)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("name", GRADCHECKED)
def test_backward_formulas_gradcheck(name: str) -> None:
    case = BY_NAME[name]
    tensors, settings = case.tensors(), case.settings()
    outputs = gaussian_pass(*tensors, *settings)
    inputs = [*gradients_like(outputs), *tensors, *outputs[:3]]
    inputs = [None if t is None else t.clone().requires_grad_() for t in inputs]

    def run(*given: Tensor | None) -> tuple[Tensor, ...]:
        found = gaussian_pass_backward(*given, *settings, ALL)
        return tuple(gradient for gradient in found if gradient.numel() and gradient.requires_grad)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: object) -> None:
    case = BY_NAME["padded"]
    tensors, settings = case.tensors(), case.settings()
    moved = [None if t is None else layout(t) for t in tensors]
    outputs = gaussian_pass(*tensors, *settings)
    for found, wanted in zip(gaussian_pass(*moved, *settings), outputs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grads = gradients_like(outputs)
    for found, wanted in zip(
        backward(moved, settings, [layout(grad) for grad in grads]), backward(tensors, settings, grads), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_without_parents_every_child_is_spread_evenly() -> None:
    case = BY_NAME["no-query"]
    tensors, settings = case.tensors(), case.settings()
    counts, means, variances, _ = gaussian_pass(*tensors, 0.0, settings[1])
    gate = tensors[6][:, 0, 0]
    torch.testing.assert_close(counts[:, 0, 0], gate.sum(1, keepdim=True).expand(-1, case.parents) / case.parents)
    votes = torch.einsum("bicd,imde->bimce", tensors[0][:, 0, 0], tensors[1]) + tensors[5]
    weights = (gate / gate.sum(1, keepdim=True))[..., None, None, None]
    mean = (weights * votes).sum(1)
    torch.testing.assert_close(means[:, 0, 0], mean)
    torch.testing.assert_close(variances[:, 0, 0], (weights * (votes - mean.unsqueeze(1)) ** 2).sum(1))


def test_a_variance_of_one_half_is_k_means() -> None:
    tensors, settings = BY_NAME["no-affine"].tensors(), BY_NAME["no-affine"].settings()
    assert tensors[3] is None and tensors[2] is not None
    k_means = gaussian_pass(*tensors, *settings)
    tensors[3] = torch.full_like(tensors[2], 0.5)
    for found, wanted in zip(gaussian_pass(*tensors, *settings), k_means, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_moments_may_be_summed_about_any_shift(eps: float) -> None:
    """The formulas by which one sweep finds both moments (docs/algebra.md)."""
    tensors = BY_NAME["primes"].tensors()
    counts, means, variances, _ = gaussian_pass(*tensors, eps, list(SET_WINDOW))
    children, weight, *_, bias, gate = tensors[:7]
    shares = gaussian.coefficients(*tensors[:6], list(SET_WINDOW)) * gate[..., None]
    shift = tensors[2] + 3
    offsets = reference.votes(children, weight, bias, list(SET_WINDOW)) - shift.unsqueeze(3)
    first = torch.einsum("bhwim,bhwimce->bhwmce", shares, offsets)
    second = torch.einsum("bhwim,bhwimce->bhwmce", shares, offsets.square())
    count = counts[..., None, None]
    delta = (first - eps * shift) / (count + eps)
    torch.testing.assert_close(shift + delta, means)
    torch.testing.assert_close((second - 2 * delta * first + delta.square() * count) / (count + eps), variances)


@pytest.mark.parametrize("first_turn", [True, False])
def test_a_common_offset_of_10000_costs_float32_nothing(first_turn: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    children = torch.randn((2, 1, 1, 200, 4, 4), generator=generator) + 1e4
    weight = torch.eye(4).expand(1, 3, 4, 4)
    offset = torch.randn((2, 1, 1, 3, 4, 4), generator=generator)
    state = (None, None) if first_turn else (1e4 + offset, torch.ones(2, 1, 1, 3, 4, 4))
    gate = torch.rand((2, 1, 1, 200), generator=generator)
    tensors = [children, weight, *state, None, None, gate, None, None]
    single = gaussian_pass(*tensors, 0.0, list(SET_WINDOW))
    double = gaussian_pass(*(None if t is None else t.double() for t in tensors), 0.0, list(SET_WINDOW))
    assert (double[2].mean() - 1).abs() < 0.5
    torch.testing.assert_close(single[2].double(), double[2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(single[1].double(), double[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["primes", "padded", "no-query"])
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_gate_of_0_leaves_no_trace(name: str, trash: float) -> None:
    case = BY_NAME[name]
    tensors, settings = case.tensors(), case.settings()
    tensors[6][..., 1] = 0
    clean = [None if t is None else t.clone() for t in tensors]
    tensors[0][..., 1, :, :] = trash
    if name == "primes":  # a set, where a bias belongs to one child
        tensors[5][1] = trash
    outputs = gaussian_pass(*clean, *settings)
    for found, wanted in zip(gaussian_pass(*tensors, *settings), outputs, strict=True):
        assert torch.equal(found, wanted)
    grads = gradients_like(outputs)
    wanted = backward(clean, settings, grads)
    for run in (backward, gradients):
        found = run(tensors, settings, grads)
        for k, expected in enumerate(wanted):
            if found[k] is not None and NEEDS[k] != "gate":
                torch.testing.assert_close(found[k], expected, rtol=1e-11, atol=1e-12)
        assert found[6].isfinite().all() and (found[0][..., 1, :, :] == 0).all()
        torch.testing.assert_close(found[6][..., 0], wanted[6][..., 0], rtol=1e-11, atol=1e-12)
        if trash != 1e300 or name != "no-query":  # of a finite vote whose distances overflow, too
            assert (found[6][..., 1] == 0).all()


def test_nothing_overflows_in_place_of_a_child_that_is_not_there() -> None:
    """Far from the means, and by variances as small as these, a vote of zero would be infinitely unlikely."""
    children = torch.full((1, 1, 1, 3, 1, 2), 1e150, dtype=torch.float64)
    children[0, 0, 0, 1] = torch.nan
    weight = torch.eye(2, dtype=torch.float64).expand(1, 2, 2, 2)
    mean = torch.full((1, 1, 1, 2, 1, 2), 1e150, dtype=torch.float64)
    gate = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 3)
    tensors = [children, weight, mean, torch.full_like(mean, 1e-12), None, None, gate, None, None]
    settings = 0.0, list(SET_WINDOW)
    outputs = gaussian_pass(*tensors, *settings)
    torch.testing.assert_close(outputs[0], torch.ones_like(outputs[0]))
    torch.testing.assert_close(outputs[1], mean)
    for run in (backward, gradients):
        found = run(tensors, settings, gradients_like(outputs))
        assert all(gradient.isfinite().all() for gradient in found if gradient is not None)


def test_a_gate_of_0_may_open_again() -> None:
    case = BY_NAME["primes"]
    tensors, settings = case.tensors(), case.settings()
    tensors[6][..., 1] = 0
    grads = gradients_like(gaussian_pass(*tensors, *settings))
    expected = gradients(tensors, settings, grads)[6]
    assert (expected[..., 1] != 0).all()
    torch.testing.assert_close(backward(tensors, settings, grads)[6], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_nobody_there(eps: float) -> None:
    case = BY_NAME["primes"]
    tensors = case.tensors()
    tensors[6][0] = 0
    tensors[0][0, :, :, 0] = torch.nan
    settings = eps, list(SET_WINDOW)
    outputs = gaussian_pass(*tensors, *settings)
    for output in outputs:
        assert (output[0] == 0).all() and output[1:].isfinite().all()
    for run in (backward, gradients):
        for gradient in run(tensors, settings, gradients_like(outputs)):
            assert gradient.isfinite().all()


def test_nan_and_infinity_come_out_where_they_went_in() -> None:
    case = BY_NAME["primes"]
    for number in (torch.nan, torch.inf):
        tensors = case.tensors()
        tensors[0][1, 0, 0, 2] = number
        counts, means, variances, evidence = gaussian_pass(*tensors, *case.settings())
        for output in (counts, means, variances, evidence):
            assert output[1].isnan().all() and output[[0, 2]].isfinite().all()


def test_a_log_weight_of_minus_infinity_is_a_parent_that_is_not_there() -> None:
    case = BY_NAME["primes"]
    tensors, settings = case.tensors(), case.settings()
    tensors[4][..., 3] = -torch.inf
    outputs = gaussian_pass(*tensors, *settings)
    assert (outputs[0][..., 3] == 0).all() and (outputs[1][..., 3, :, :] == 0).all()
    grads = gradients_like(outputs)
    for run in (backward, gradients):
        assert all(gradient.isfinite().all() for gradient in run(tensors, settings, grads))


def test_half_precision_keeps_the_state_in_float32() -> None:
    case = BY_NAME["primes"]
    for dtype in (torch.bfloat16, torch.float16):
        tensors, settings = case.tensors(dtype), case.settings()
        outputs = gaussian_pass(*tensors, *settings)
        wide = gaussian_pass(*(t.float() for t in tensors), *settings)
        assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(outputs, wide, strict=True))
        found = backward(tensors, settings, gradients_like(outputs))
        assert [g.dtype for g in found] == [dtype] * 2 + [torch.float32] * 3 + [dtype] * 2 + [torch.float32] * 2
