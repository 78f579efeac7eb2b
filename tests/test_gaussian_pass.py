"""The Gaussian pass, as whatever kernel serves the CPU here, against the reference: forward and every gradient.

The tolerance is that of ``pass_cases.Bar`` everywhere: a kernel errs at most twice what the eager reference of the same
dtype errs against float64, plus what rounding alone explains.
"""

from __future__ import annotations

import pytest
import torch
from gaussian_cases import (
    BY_NAME,
    CASES,
    GRADIENTS,
    JUDGE,
    GaussianCase,
    assert_honest,
    check_op,
    random_gaussian_cases,
    results,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import DTYPES, LAYOUTS, bar_of, ids, transposed
from torch import Tensor

from fastcaps import ops, reference
from fastcaps.votes import SET_WINDOW
from fastcaps.reference import gaussian

OP = ops.gaussian_pass
ALL = (1 << 9) - 1
STRIDED = ("conv-4x4", "padded", "pose-1x8-1x16", "dilated-padded-strided", "silent", "k-means")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_forward_and_every_gradient(case: GaussianCase, dtype: torch.dtype) -> None:
    bar_of(JUDGE, case, dtype).hold(results(OP, case.tensors(dtype), case.settings(), case.grads(dtype)))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=random_gaussian_cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_random_shapes(case: GaussianCase, dtype: torch.dtype, seed: int) -> None:
    check_op(case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: object) -> None:
    case = BY_NAME[name]
    tensors, grads = (
        [None if tensor is None else layout(tensor) for tensor in given]
        for given in (case.tensors(torch.float32), case.grads(torch.float32))
    )
    bar_of(JUDGE, case, torch.float32).hold(results(OP, tensors, case.settings(), grads))


@pytest.mark.parametrize("argument", range(9), ids=gaussian.NEEDS)
@pytest.mark.parametrize("name", ["padded", "primes"])
def test_expanded_inputs(name: str, argument: int) -> None:
    """One argument with stride 0, in its first dimension and then in all but the last."""
    case = BY_NAME[name]
    for kept in (1, -1):
        tensors = case.tensors(torch.float32)
        whole = tensors[argument]
        start = whole[:1] if kept == 1 else whole[(slice(0, 1),) * (whole.dim() - 1)]
        tensors[argument] = start.expand(whole.shape)
        check_op(tensors, case.settings(), case.grads(torch.float32))


@pytest.mark.parametrize("name", STRIDED)
def test_expanded_gradients(name: str) -> None:
    """The gradient of a sum is one number with stride 0."""
    case = BY_NAME[name]
    grads = [None if g is None else torch.full((), 0.7).expand(g.shape) for g in case.grads(torch.float32)]
    check_op(case.tensors(torch.float32), case.settings(), grads)


def backward(tensors: list, settings: tuple, grads: list, needs: int = ALL) -> tuple[Tensor, ...]:
    outputs = ops.gaussian_pass(*tensors, *settings)
    return ops.gaussian_pass_backward(*grads, *tensors, *outputs[:3], *settings, needs)


@pytest.mark.parametrize("name", ["padded", "primes", "silent-grid", "k-means"])
def test_only_the_gradients_asked_for(name: str) -> None:
    case = BY_NAME[name]
    tensors, grads = case.tensors(), case.grads()
    everything = backward(tensors, case.settings(), grads)
    present = [k for k, tensor in enumerate(tensors) if tensor is not None]
    for needs in [1 << k for k in present] + [0, 3, 6, 2 + 16 + 256]:
        for k, gradient in enumerate(backward(tensors, case.settings(), grads, needs)):
            if needs >> k & 1 and k in present:
                torch.testing.assert_close(gradient, everything[k], rtol=1e-12, atol=1e-13, msg=GRADIENTS[k])
            else:
                assert gradient.shape == (0,)


@pytest.mark.parametrize("which", range(4), ids=["counts", "means", "variances", "evidence"])
@pytest.mark.parametrize("name", ["padded", "primes"])
def test_a_gradient_of_one_output_alone(name: str, which: int) -> None:
    case = BY_NAME[name]
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    zeros = [grad if k == which else torch.zeros_like(grad) for k, grad in enumerate(grads)]
    alone = [grad if k == which else None for k, grad in enumerate(grads)]
    found = results(ops.gaussian_pass, tensors, case.settings(), alone)
    assert_honest(found, tensors, case.settings(), zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype) -> None:
    case = BY_NAME["padded"]
    tensors = [None if tensor is None else transposed(tensor) for tensor in case.tensors(dtype)]
    outputs = ops.gaussian_pass(*tensors, *case.settings())
    for output in outputs:
        assert output.is_contiguous() and output.dtype == reference.accumulation_dtype(dtype)
    assert [tuple(o.shape) for o in outputs] == [case.shape[:4], case.shape, case.shape, case.shape[:4]]
    gradients = ops.gaussian_pass_backward(*case.grads(dtype), *tensors, *outputs[:3], *case.settings(), ALL)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert gradient.is_contiguous() and gradient.dtype == tensor.dtype and gradient.shape == tensor.shape
    tensors[7:] = None, None
    assert ops.gaussian_pass(*tensors, *case.settings())[3].shape == (0,)


# ---- what the pass means ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, 200, 5000])
@pytest.mark.parametrize("turn", ["first", "later", "far"])
def test_a_common_offset_of_10000_costs_float32_nothing(turn: str, count: int) -> None:
    """Votes spread by 1 about 10,000: about the parents' means, about none, and about means that are far away."""
    generator = torch.Generator().manual_seed(0)
    children = torch.randn((2, 1, 1, count, 4, 4), generator=generator) + 1e4
    weight = torch.eye(4).expand(1, 3, 4, 4)
    offset = torch.randn((2, 1, 1, 3, 4, 4), generator=generator)
    state: tuple[Tensor | None, Tensor | None] = (None, None)
    if turn == "later":
        state = (1e4 + offset, torch.ones(2, 1, 1, 3, 4, 4))
    elif turn == "far":
        state = (1e4 + 300 * offset, torch.full((2, 1, 1, 3, 4, 4), 1e6))
    gate = torch.rand((2, 1, 1, count), generator=generator)
    tensors = [children, weight, *state, None, None, gate, None, None]
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    single = ops.gaussian_pass(*tensors, 0.0, list(SET_WINDOW))
    double = gaussian.gaussian_pass(*wide, 0.0, list(SET_WINDOW))
    assert (double[2].mean() - 1).abs() < 0.5
    torch.testing.assert_close(single[2].double(), double[2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(single[1].double(), double[1], rtol=5e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_variances_of_a_trillionth(dtype: torch.dtype) -> None:
    """Shares are then 0 or 1; nothing overflows on the way there or back, and a parent without children stays 0."""
    case = BY_NAME["primes"]
    tensors, grads = case.tensors(dtype), case.grads(dtype)
    tensors[3] = torch.full_like(tensors[3], 1e-12)
    outputs = ops.gaussian_pass(*tensors, *case.settings())
    wide = gaussian.gaussian_pass(*(tensor.double() for tensor in tensors), *case.settings())
    for one, other in zip(outputs, wide, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    assert all(gradient.isfinite().all() for gradient in backward(tensors, case.settings(), grads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silent", "silent-grid", "no-query", "padded"])
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf])
def test_a_gate_of_0_leaves_no_trace(name: str, trash: float, dtype: torch.dtype) -> None:
    """Neither in the results nor in a gradient."""
    case = BY_NAME[name]
    tensors, grads = case.tensors(dtype), case.grads(dtype)
    tensors[6][..., 1] = 0
    silent = tensors[6] == 0
    clean = list(tensors)
    tensors[0] = tensors[0].masked_fill(silent[..., None, None], trash)
    clean[0] = clean[0].masked_fill(silent[..., None, None], 0.0)
    found, wanted = (ops.gaussian_pass(*given, *case.settings()) for given in (tensors, clean))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    gradients, others = (backward(given, case.settings(), grads) for given in (tensors, clean))
    for argument, one, other in zip(gaussian.NEEDS, gradients, others, strict=True):
        assert one.isfinite().all(), argument
        if argument not in ("children", "gate"):
            assert torch.equal(one, other), argument
    assert (gradients[0][silent] == 0).all() and torch.equal(gradients[0][~silent], others[0][~silent])
    assert torch.equal(gradients[6][~silent], others[6][~silent]) and (gradients[6][silent] == 0).all()


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_nobody_there(eps: float) -> None:
    case = BY_NAME["silent"]
    for trash in (0.0, torch.nan):
        tensors = case.tensors(torch.float32)
        tensors[6][0] = 0
        tensors[0][0] = trash
        outputs = ops.gaussian_pass(*tensors, eps, list(SET_WINDOW))
        for output in outputs:
            assert (output[0] == 0).all() and output[1].isfinite().all()
        for gradient in backward(tensors, (eps, list(SET_WINDOW)), case.grads(torch.float32)):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["primes", "padded"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_come_out_where_they_went_in(name: str, value: float) -> None:
    case = BY_NAME[name]
    tensors = case.tensors(torch.float32)
    clean = ops.gaussian_pass(*tensors, *case.settings())
    tensors[0][1, 0, 0, 0] = value
    for one, other in zip(ops.gaussian_pass(*tensors, *case.settings()), clean, strict=True):
        assert torch.equal(one[0], other[0]) and not one[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_log_weight_of_minus_infinity_is_a_parent_that_is_not_there(dtype: torch.dtype) -> None:
    case = BY_NAME["primes"]
    tensors, grads = case.tensors(dtype), case.grads(dtype)
    tensors[4][..., 3] = -torch.inf
    outputs = ops.gaussian_pass(*tensors, *case.settings())
    assert (outputs[0][..., 3] == 0).all() and (outputs[1][..., 3, :, :] == 0).all()
    assert all(output.isfinite().all() for output in outputs)
    assert all(gradient.isfinite().all() for gradient in backward(tensors, case.settings(), grads))
    check_op(tensors, case.settings(), grads)


# ---- wrong calls -----------------------------------------------------------------------------------------------------


WRONG = [
    ("children", 0, lambda t: t[0], r"children must be \[B, H, W, N, C, D\]"),
    ("weight", 1, lambda t: t[0], r"weight must be \[G, M, D, E\]"),
    ("columns", 1, lambda t: t[..., :-1, :], "weight has shape"),
    ("groups", 1, lambda t: t[:4], "weight has 4 groups, which do not divide 27 children"),
    ("mean", 2, lambda t: t[:1], "mean has shape"),
    ("mean-missing", 2, lambda t: None, "a variance wants a mean"),
    ("variance", 3, lambda t: t[:, :, :, :1], "variance has shape"),
    ("log_weight", 4, lambda t: t[..., :1], "log_weight has shape"),
    ("bias", 5, lambda t: t[..., :1], "bias has shape"),
    ("gate", 6, lambda t: t[:1], "gate has shape"),
    ("beta", 7, lambda t: None, "beta_use and beta_ignore come together or not at all"),
    ("beta-rank", 7, lambda t: t[0], r"beta_use must be \[I or 1, M or 1\]"),
    ("beta-shape", 8, lambda t: t[:2], "beta_ignore has shape"),
    ("dtype", 4, lambda t: t.double(), "log_weight has another dtype than the call"),
]


@pytest.mark.parametrize(("position", "spoil", "says"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_calls(position: int, spoil: object, says: str) -> None:
    case = BY_NAME["padded"]
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    outputs = ops.gaussian_pass(*tensors, *case.settings())
    tensors[position] = spoil(tensors[position])
    with pytest.raises(RuntimeError, match=says):
        ops.gaussian_pass(*tensors, *case.settings())
    with pytest.raises(RuntimeError, match=says):
        ops.gaussian_pass_backward(*grads, *tensors, *outputs[:3], *case.settings(), ALL)


def test_wrong_windows_and_gradients() -> None:
    case = BY_NAME["padded"]
    tensors, given = case.tensors(torch.float32), case.settings()
    for window, says in (
        ([1] * 7, "window must be"),
        ([0] * 8, "window is not valid"),
        ([9, 9, 1, 1, 0, 0, 1, 1], "larger"),
    ):
        with pytest.raises(RuntimeError, match=says):
            ops.gaussian_pass(*tensors, given[0], window)
    names = ("grad_counts", "grad_means", "grad_variances", "grad_evidence", *[""] * 9, "counts", "means", "variances")
    right = [*case.grads(torch.float32), *tensors, *ops.gaussian_pass(*tensors, *given)[:3]]
    for k, name in enumerate(names):
        if name:
            wrong = list(right)
            wrong[k] = wrong[k][:1]
            with pytest.raises(RuntimeError, match=f"{name} has shape"):
                ops.gaussian_pass_backward(*wrong, *given, ALL)
