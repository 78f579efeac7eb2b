"""The reference against the paper's procedure as plain loops, and its formulas against autograd."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BY_NAME, CASES, SMALL, TENSORS, Case, ids
from oracle import attention_pass as loops
from oracle import procedure_1

from fastcaps import Window, functional, reference


def as_lists(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else tensor.tolist()


def from_entries(entries: dict[tuple[int, ...], float], like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the entries; positions without one hold 0."""
    result = torch.zeros_like(like)
    for index, value in entries.items():
        result[index] = value
    return result


def test_procedure_1_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    poses, last, matrices = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 3), (4, 5), (7, 4, 5, 3))
    )
    expected = torch.tensor(procedure_1(poses.tolist(), last.tolist(), matrices.tolist()), dtype=torch.float64)
    weight = matrices.transpose(-1, -2)  # p W instead of W p
    found = functional.inverted_attention_routing(
        poses[None, :, None], weight, last[None, :, None], scale=1.0
    )  # the paper writes no scale
    torch.testing.assert_close(found[0, :, 0], expected, rtol=1e-12, atol=1e-13)


def test_procedure_1_from_zero_parents_is_the_uniform_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    poses, matrices = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((7, 3), (7, 4, 5, 3)))
    zeros = torch.zeros(4, 5, dtype=torch.float64)
    expected = torch.tensor(procedure_1(poses.tolist(), zeros.tolist(), matrices.tolist()), dtype=torch.float64)
    found = functional.inverted_attention_routing(poses[None, :, None], matrices.transpose(-1, -2))
    torch.testing.assert_close(found[0, :, 0], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", [case for case in SMALL if case.batch], ids=ids)
def test_loops(case: Case) -> None:
    tensors, settings = case.tensors(), case.settings()
    parents, sums, coefficients = loops(*(as_lists(tensor) for tensor in tensors), *settings)
    found, found_sums = reference.attention_pass(*tensors, *settings)
    assert len(parents) == found.numel()
    torch.testing.assert_close(found, from_entries(parents, found), rtol=1e-11, atol=1e-12)
    if case.normalize:
        torch.testing.assert_close(found_sums, from_entries(sums, found_sums), rtol=1e-11, atol=1e-12)
    else:
        assert found_sums.shape == (0,)
    children, weight, query, bias = tensors[:4]
    shares = reference.coefficients(children, weight, query, bias, settings[0], settings[3])
    torch.testing.assert_close(shares, from_entries(coefficients, shares), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_backward_formulas_against_autograd(case: Case) -> None:
    tensors, settings, grads = case.tensors(), case.settings(), case.grads()
    leaves = [None if tensor is None else tensor.requires_grad_() for tensor in tensors]
    parents, sums = reference.attention_pass(*leaves, *settings)
    pairs = [(parents, grads[0])] + ([(sums, grads[1])] if case.normalize else [])
    present = [k for k, leaf in enumerate(leaves) if leaf is not None]
    expected = torch.autograd.grad(
        [output for output, _ in pairs], [leaves[k] for k in present], [grad for _, grad in pairs]
    )
    found = reference.attention_pass_backward(*grads, *leaves[:6], sums, *settings, 127)
    for k, gradient in zip(present, expected, strict=True):
        torch.testing.assert_close(found[k], gradient, rtol=1e-9, atol=1e-10, msg=TENSORS[k])
        assert found[k].is_contiguous() and found[k].storage_offset() == 0
    assert all(found[k].shape == (0,) for k in range(5) if k not in present)


@pytest.mark.parametrize("needs", [1, 2, 4, 8, 16, 32, 64, 0, 5, 2 + 16 + 64])
def test_only_the_gradients_asked_for(needs: int) -> None:
    case = BY_NAME["padded"]
    tensors, settings, grads = case.tensors(), case.settings(), case.grads()
    _, sums = reference.attention_pass(*tensors, *settings)
    everything = reference.attention_pass_backward(*grads, *tensors[:6], sums, *settings, 127)
    found = reference.attention_pass_backward(*grads, *tensors[:6], sums, *settings, needs)
    for k, gradient in enumerate(found):
        expected = everything[k] if needs >> k & 1 else torch.empty(0, dtype=torch.float64)
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", ["padded", "no-norm", "groups-1", "no-query", "dilated-padded-strided"])
def test_gradcheck(name: str) -> None:
    case = BY_NAME[name]
    settings = case.settings()
    tensors = [None if tensor is None else tensor.requires_grad_() for tensor in case.tensors()]
    outputs = slice(None) if case.normalize else slice(1)

    def run(*given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return reference.attention_pass(*given, *settings)[outputs]

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["padded", "no-norm"])
def test_backward_formulas_gradcheck(name: str) -> None:
    case = BY_NAME[name]
    settings = case.settings()
    tensors = case.tensors()
    sums = reference.attention_pass(*tensors, *settings)[1]
    inputs = [*case.grads(), *tensors[:6], sums]
    inputs = [None if tensor is None else tensor.requires_grad_() for tensor in inputs]

    def run(*given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple(g for g in reference.attention_pass_backward(*given, *settings, 127) if g.numel())

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("window", [(3, 3, 1, 1, 0, 0, 1, 1), (2, 3, 2, 1, 1, 2, 3, 2), (1, 2, 3, 4, 0, 0, 1, 1)])
def test_windows_adjoint(window: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    grid = torch.randn((2, 7, 8, 3, 2), generator=generator, dtype=torch.float64)
    seen = reference.windows(grid, window)
    other = torch.randn(seen.shape, generator=generator, dtype=torch.float64)
    back = reference.windows_adjoint(other, grid.shape, window)
    torch.testing.assert_close((seen * other).sum(), (grid * back).sum())


def test_half_precision_rounds_once() -> None:
    case = BY_NAME["primes"]
    for dtype in (torch.bfloat16, torch.float16):
        tensors = case.tensors(dtype)
        parents, sums = reference.attention_pass(*tensors, *case.settings())
        wide, wide_sums = reference.attention_pass(*(t.float() for t in tensors), *case.settings())
        assert parents.dtype == dtype and sums.dtype == torch.float32
        assert torch.equal(parents, wide.to(dtype)) and torch.equal(sums, wide_sums)


def test_absent_children_contribute_nothing_even_with_infinite_weights() -> None:
    case = BY_NAME["padded-all-absent"]
    tensors = case.tensors()
    tensors[1] = torch.full_like(tensors[1], torch.inf)
    tensors[3] = torch.full_like(tensors[3], torch.nan)
    _, sums = reference.attention_pass(*tensors, *case.settings())
    outside = torch.ones(sums.shape[1:3], dtype=torch.bool)
    outside[2, 2] = False
    assert (sums[:, outside] == 0).all()


def test_coefficients_are_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["conv-groups-12"]
    children, weight, query, bias = case.tensors()[:4]
    whole = reference.coefficients(children, weight, query, bias, 0.5, case.window)
    monkeypatch.setattr(reference.attention, "_SLICE", 1)  # one child at a time
    sliced = reference.coefficients(children, weight, query, bias, 0.5, case.window)
    torch.testing.assert_close(sliced, whole, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole[..., 0]))


def test_coefficients_have_no_gradient_and_public_shape() -> None:
    children = torch.randn(2, 3, 5, 4, 2, 2, requires_grad=True)
    weight, parents = torch.randn(27, 4, 2, 3), torch.randn(2, 4, 3, 2, 2, 3)
    window = Window(3)
    routed, shares = functional.inverted_attention_routing(
        children, weight, parents, window=window, return_coefficients=True
    )
    assert routed.requires_grad and not shares.requires_grad
    assert routed.shape == (2, 4, 3, 2, 2, 3) and shares.shape == (2, 3, 2, 27, 4)
    _, shares = functional.inverted_attention_routing(children[:, :, 0, 0], weight[:3], return_coefficients=True)
    assert shares.shape == (2, 3, 4) and (shares == 0.25).all()


@pytest.mark.parametrize("name", ["padded", "primes", "no-norm", "no-query"])
def test_frozen_coefficients_are_constants(name: str) -> None:
    """The formulas against autograd through a detached softmax, which leaves the gate its gradient."""
    case = BY_NAME[name]
    tensors, grads = [None if t is None else t.requires_grad_() for t in case.tensors()], case.grads()
    parents, sums = reference.attention_pass(*tensors, *case.settings(), True)
    for one, other in zip((parents, sums), reference.attention_pass(*tensors, *case.settings()), strict=True):
        assert torch.equal(one, other)
    present = [tensor for tensor in tensors if tensor is not None]
    outputs, given = ((parents, sums), grads) if case.normalize else ((parents,), grads[:1])
    wanted = iter(torch.autograd.grad(outputs, present, given, materialize_grads=True))
    found = reference.attention_pass_backward(*grads, *tensors[:6], sums, *case.settings(), 127 | reference.FROZEN)
    for argument, tensor, gradient in zip(TENSORS, tensors, found, strict=True):
        if tensor is not None:
            torch.testing.assert_close(gradient, next(wanted), rtol=1e-10, atol=1e-11, msg=argument)
    assert case.query is False or (found[2] == 0).all()
