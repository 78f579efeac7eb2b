"""The pooling pass, as whatever kernel serves the CPU here, against the reference: forward and every gradient.

The tolerance is that of ``pass_cases.Bar`` everywhere: a kernel errs at most twice what the eager reference of the same
dtype errs against float64, plus what rounding alone explains.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import DTYPES, LAYOUTS, bar_of, ids, transposed
from pooling_cases import (
    BY_NAME,
    CASES,
    GRADIENTS,
    JUDGE,
    PoolingCase,
    assert_honest,
    check_op,
    random_pooling_cases,
    results,
)
from torch import Tensor

from fastcaps import ops, reference
from fastcaps.reference import pooling

OP = ops.pooling_pass
ALL = 31
STRIDED = ("conv-4x4", "padded", "pose-1x8-1x16-bare", "dilated-padded-strided", "silent", "identity-padded")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_forward_and_every_gradient(case: PoolingCase, dtype: torch.dtype) -> None:
    bar_of(JUDGE, case, dtype).hold(results(OP, case.tensors(dtype), case.settings(), case.grads(dtype)))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=random_pooling_cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_random_shapes(case: PoolingCase, dtype: torch.dtype, seed: int) -> None:
    check_op(case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: object) -> None:
    case = BY_NAME[name]
    tensors = [None if tensor is None else layout(tensor) for tensor in case.tensors(torch.float32)]
    grads = [layout(grad) for grad in case.grads(torch.float32)]
    bar_of(JUDGE, case, torch.float32).hold(results(OP, tensors, case.settings(), grads))


@pytest.mark.parametrize("argument", range(5), ids=pooling.NEEDS)
@pytest.mark.parametrize("name", ["padded", "primes-bare", "identity-pool-4x4"])
def test_expanded_inputs(name: str, argument: int) -> None:
    """One argument with stride 0, in its first dimension and then in all but the last."""
    case = BY_NAME[name]
    for kept in (1, -1):
        tensors = case.tensors(torch.float32)
        whole = tensors[argument]
        if whole is not None:
            start = whole[:1] if kept == 1 else whole[(slice(0, 1),) * (whole.dim() - 1)]
            tensors[argument] = start.expand(whole.shape)
            check_op(tensors, case.settings(), case.grads(torch.float32))


@pytest.mark.parametrize("name", STRIDED)
def test_expanded_gradients(name: str) -> None:
    """The gradient of a sum is one number with stride 0."""
    case = BY_NAME[name]
    grads = [torch.full((), 0.7).expand(grad.shape) for grad in case.grads(torch.float32)]
    check_op(case.tensors(torch.float32), case.settings(), grads)


def backward(tensors: list, settings: tuple, grads: list, needs: int = ALL) -> tuple[Tensor, ...]:
    outputs = ops.pooling_pass(*tensors, *settings)
    return ops.pooling_pass_backward(*grads, *tensors, *outputs, *settings, needs)


@pytest.mark.parametrize("name", ["padded", "primes", "silent-grid", "identity-bias"])
def test_only_the_gradients_asked_for(name: str) -> None:
    case = BY_NAME[name]
    tensors, grads = case.tensors(), case.grads()
    everything = backward(tensors, case.settings(), grads)
    present = [k for k, tensor in enumerate(tensors) if tensor is not None]
    for needs in [1 << k for k in present] + [0, 3, 6, 7]:
        for k, gradient in enumerate(backward(tensors, case.settings(), grads, needs)):
            if needs >> k & 1 and k in present:
                torch.testing.assert_close(gradient, everything[k], rtol=1e-12, atol=1e-13, msg=GRADIENTS[k])
            else:
                assert gradient.shape == (0,)


@pytest.mark.parametrize("which", [0, 1], ids=["parents", "logsumexp"])
@pytest.mark.parametrize("name", ["padded", "identity-conv"])
def test_a_gradient_of_one_output_alone(name: str, which: int) -> None:
    case = BY_NAME[name]
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    zeros = list(grads)
    zeros[1 - which], grads[1 - which] = torch.zeros_like(grads[1 - which]), None
    found = results(ops.pooling_pass, tensors, case.settings(), grads)
    assert_honest(found, tensors, case.settings(), zeros)


@pytest.mark.parametrize("name", ["primes", "padded", "silent-grid", "identity-padded"])
def test_frozen_coefficients_are_constants(name: str) -> None:
    case = BY_NAME[name]
    tensors, grads = case.tensors(), case.grads()
    settings = (*case.settings(), True)
    outputs = ops.pooling_pass(*tensors, *settings)
    for one, other in zip(outputs, ops.pooling_pass(*tensors, *case.settings()), strict=True):
        assert torch.equal(one, other)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    found = torch.autograd.grad(
        ops.pooling_pass(*leaves, *settings)[0], [t for t in leaves if t is not None], grads[0], allow_unused=True
    )
    wanted = torch.autograd.grad(
        pooling.pooling_pass(*leaves, *settings)[0], [t for t in leaves if t is not None], grads[0], allow_unused=True
    )
    names = [name for name, t in zip(pooling.NEEDS, leaves, strict=True) if t is not None]
    for argument, one, other in zip(names, found, wanted, strict=True):
        assert (one is None) == (argument in ("query", "gate"))
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    check_op(case.tensors(torch.float32), settings, [case.grads(torch.float32)[0], None])
    raw = ops.pooling_pass_backward(*grads, *tensors, *outputs, *case.settings(), ALL | reference.FROZEN)
    for argument, gradient in zip(pooling.NEEDS, raw, strict=True):
        if argument in ("query", "gate"):
            assert (gradient == 0).all()
        elif argument in names:
            torch.testing.assert_close(gradient, wanted[names.index(argument)], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype) -> None:
    case = BY_NAME["padded"]
    tensors = [None if tensor is None else transposed(tensor) for tensor in case.tensors(dtype)]
    parents, logsumexp = ops.pooling_pass(*tensors, *case.settings())
    assert parents.is_contiguous() and parents.dtype == dtype and parents.shape == case.shape
    assert logsumexp.is_contiguous() and logsumexp.dtype == reference.accumulation_dtype(dtype)
    gradients = ops.pooling_pass_backward(*case.grads(dtype), *tensors, parents, logsumexp, *case.settings(), ALL)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert gradient.is_contiguous() and gradient.dtype == dtype
        assert gradient.shape == (tensor.shape if tensor is not None else (0,))


# ---- what the pass means ---------------------------------------------------------------------------------------------


def test_without_a_query_it_is_the_average() -> None:
    case = replace(BY_NAME["identity-no-query"], grid=(6, 6), types=4, window=(2, 2, 2, 2, 0, 0, 1, 1), pose=(1, 3, 3))
    children = case.tensors(torch.float32)[0]
    parents, logsumexp = ops.pooling_pass(children, None, None, None, None, *case.settings())
    wanted = children.reshape(2, 3, 2, 3, 2, 4, 1, 3).mean((2, 4, 5))
    torch.testing.assert_close(parents[:, :, :, 0], wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logsumexp, torch.full_like(logsumexp, 16.0).log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silent", "silent-grid", "identity-silent", "padded"])
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf])
def test_a_gate_of_0_leaves_no_trace(name: str, trash: float, dtype: torch.dtype) -> None:
    """Neither in the results nor in a gradient."""
    case = BY_NAME[name]
    tensors, grads = case.tensors(dtype), case.grads(dtype)
    tensors[4][..., 1] = 0
    clean = [None if t is None else t.clone() for t in tensors]
    silent = tensors[4] == 0
    tensors[0] = tensors[0].masked_fill(silent[..., None, None], trash)
    clean[0] = clean[0].masked_fill(silent[..., None, None], 0.0)
    found, wanted = (ops.pooling_pass(*given, *case.settings()) for given in (tensors, clean))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    gradients, others = (backward(given, case.settings(), grads) for given in (tensors, clean))
    for argument, one, other in zip(pooling.NEEDS, gradients, others, strict=True):
        if argument != "gate":
            assert one.isfinite().all(), argument
        if argument in ("query", "weight"):
            assert torch.equal(one, other), argument
    assert (gradients[0][silent] == 0).all()
    assert torch.equal(gradients[0][~silent], others[0][~silent])
    assert torch.equal(gradients[4][~silent], others[4][~silent]) and (gradients[4][silent] == 0).all()


@pytest.mark.parametrize("name", ["silent", "identity-silent"])
def test_nobody_there(name: str) -> None:
    case = BY_NAME[name]
    for trash in (0.0, torch.nan):
        tensors = case.tensors(torch.float32)
        tensors[4][0] = 0
        tensors[0][0] = trash
        parents, logsumexp = ops.pooling_pass(*tensors, *case.settings())
        assert (parents[0] == 0).all() and (logsumexp[0] == -torch.inf).all()
        assert parents[1].isfinite().all() and logsumexp[1].isfinite().all()
        for gradient in backward(tensors, case.settings(), case.grads(torch.float32)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["primes", "padded", "identity-conv"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_come_out_where_they_went_in(name: str, value: float) -> None:
    case = BY_NAME[name]
    tensors = case.tensors(torch.float32)
    clean = ops.pooling_pass(*tensors, *case.settings())
    tensors[0][1, 0, 0, 0] = value
    for one, other in zip(ops.pooling_pass(*tensors, *case.settings()), clean, strict=True):
        assert torch.equal(one[0], other[0]) and not one[1].isfinite().all()


def test_large_logits_do_not_overflow() -> None:
    for name in ("primes", "pose-4x4-bare", "identity-parents"):
        case = replace(BY_NAME[name], scale=1e4)
        tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
        found = ops.pooling_pass(*tensors, *case.settings())
        wide = pooling.pooling_pass(*(None if t is None else t.double() for t in tensors), *case.settings())
        torch.testing.assert_close(found[0].double(), wide[0], rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(found[1].double(), wide[1], rtol=1e-5, atol=1e-2)
        assert all(gradient.isfinite().all() for gradient in backward(tensors, case.settings(), grads))


def test_children_of_length_0_have_no_direction() -> None:
    """Normalised keys of a zero vote are 0, and the gradient through the length there is 0."""
    case = BY_NAME["identity-parents"]
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    tensors[0][:, :, :, 1] = 0
    check_op(tensors, case.settings(), grads)


# ---- wrong calls -----------------------------------------------------------------------------------------------------


WRONG = [
    ("children", 0, lambda t: t[0], r"children must be \[B, H, W, N, C, D\]"),
    ("weight", 1, lambda t: t[0], r"weight must be \[G, M, D, E\]"),
    ("columns", 1, lambda t: t[..., :-1, :], "weight has shape"),
    ("groups", 1, lambda t: t[:4], "weight has 4 groups, which do not divide 27 children"),
    ("query", 2, lambda t: t[:1], "query has shape"),
    ("query-parents", 2, lambda t: t[:, :, :, :1], "query has shape"),
    ("bias", 3, lambda t: t[..., :1], "bias has shape"),
    ("bias-rank", 3, lambda t: t[0], r"bias must be \[I or 1, M or 1, C, E\]"),
    ("gate", 4, lambda t: t[:1], "gate has shape"),
    ("dtype", 1, lambda t: t.double(), "weight has another dtype than the call"),
]


@pytest.mark.parametrize(("position", "spoil", "says"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(position: int, spoil: object, says: str) -> None:
    case = BY_NAME["padded"]
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    outputs = ops.pooling_pass(*tensors, *case.settings())
    tensors[position] = spoil(tensors[position])
    with pytest.raises(RuntimeError, match=says):
        ops.pooling_pass(*tensors, *case.settings())
    with pytest.raises(RuntimeError, match=says):
        ops.pooling_pass_backward(*grads, *tensors, *outputs, *case.settings(), ALL)


def test_wrong_windows_and_gradients() -> None:
    case = BY_NAME["padded"]
    tensors, given = case.tensors(torch.float32), case.settings()
    for window, says in (
        ([1] * 7, "window must be"),
        ([0] * 8, "window is not valid"),
        ([9, 9, 1, 1, 0, 0, 1, 1], "larger"),
    ):
        with pytest.raises(RuntimeError, match=says):
            ops.pooling_pass(*tensors, *given[:2], window)
    right = [*case.grads(torch.float32), *tensors, *ops.pooling_pass(*tensors, *given)]
    for k, name in ((0, "grad_parents"), (1, "grad_logsumexp"), (7, "parents"), (8, "logsumexp")):
        wrong = list(right)
        wrong[k] = wrong[k][:1]
        with pytest.raises(RuntimeError, match=f"{name} has shape"):
            ops.pooling_pass_backward(*wrong, *given, ALL)
