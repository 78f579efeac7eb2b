"""The attention pass, as whatever kernel serves the CPU here, against the reference: forward and every gradient.

The tolerance is that of ``attention_cases.assert_honest`` everywhere: a kernel errs at most twice what the eager
reference of the same dtype errs against float64, plus what rounding alone explains.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    BY_NAME,
    CASES,
    DTYPES,
    GRADIENTS,
    LAYOUTS,
    Case,
    assert_honest,
    check_op,
    ids,
    native_only,
    random_cases,
    results,
    transposed,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcaps import Window, backend, explain, functional, ops, reference
from fastcaps.votes import from_op, to_op

Tensors = list[torch.Tensor | None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_forward_and_every_gradient(case: Case, dtype: torch.dtype) -> None:
    check_op(case.tensors(dtype), case.settings(), case.grads(dtype))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=random_cases(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_random_shapes(case: Case, dtype: torch.dtype, seed: int) -> None:
    check_op(case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1))


STRIDED = ("conv-4x4", "padded", "pose-1x8-1x16", "dilated-padded-strided", "no-norm", "groups-1")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: object) -> None:
    case = BY_NAME[name]
    tensors = [None if tensor is None else layout(tensor) for tensor in case.tensors(torch.float32)]
    grads = [None if tensor is None else layout(tensor) for tensor in case.grads(torch.float32)]
    check_op(tensors, case.settings(), grads)


@pytest.mark.parametrize("argument", range(7), ids=reference.NEEDS)
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


@pytest.mark.parametrize("name", ["padded", "primes", "no-norm"])
def test_only_the_gradients_asked_for(name: str) -> None:
    case = BY_NAME[name]
    tensors, grads = case.tensors(), case.grads()
    _, sums = ops.attention_pass(*tensors, *case.settings())
    everything = ops.attention_pass_backward(*grads, *tensors[:6], sums, *case.settings(), 127)
    present = [k for k, tensor in enumerate(tensors) if tensor is not None]
    for needs in [1 << k for k in present] + [0, 3, 6, 7]:
        found = ops.attention_pass_backward(*grads, *tensors[:6], sums, *case.settings(), needs)
        for k, gradient in enumerate(found):
            if needs >> k & 1 and k in present:
                torch.testing.assert_close(gradient, everything[k], rtol=1e-12, atol=1e-13, msg=GRADIENTS[k])
            else:
                assert gradient.shape == (0,)


@pytest.mark.parametrize("which", [0, 1], ids=["parents", "sums"])
def test_a_gradient_of_one_output_alone(which: int) -> None:
    case = BY_NAME["padded"]
    tensors, grads = case.tensors(torch.float32), case.grads(torch.float32)
    grads[1 - which] = None
    zeros = list(grads)
    zeros[1 - which] = torch.zeros_like(grads[which])
    found = results(ops.attention_pass, tensors, case.settings(), grads)
    assert_honest(found, tensors, case.settings(), zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["primes", "padded", "no-norm", "conv-4x4-m32", "no-query"])
def test_frozen_coefficients_are_constants(name: str, dtype: torch.dtype) -> None:
    """No gradient reaches the query; the gate has its own. The bar is that of the same call by the reference."""
    case = BY_NAME[name]
    tensors, grads, frozen = case.tensors(dtype), case.grads(dtype), (*case.settings(), True)
    assert_honest(results(ops.attention_pass, tensors, frozen, grads), tensors, frozen, grads)
    _, sums = ops.attention_pass(*tensors, *frozen)
    raw = ops.attention_pass_backward(*grads, *tensors[:6], sums, *case.settings(), 127 | reference.FROZEN)
    assert tensors[2] is None or (raw[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype) -> None:
    case = BY_NAME["conv-4x4"]
    tensors = [None if tensor is None else transposed(tensor) for tensor in case.tensors(dtype)]
    parents, sums = ops.attention_pass(*tensors, *case.settings())
    assert parents.is_contiguous() and parents.dtype == dtype
    assert sums.is_contiguous() and sums.dtype == reference.accumulation_dtype(dtype)
    gradients = ops.attention_pass_backward(*case.grads(dtype), *tensors[:6], sums, *case.settings(), 127)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert gradient.is_contiguous() and gradient.dtype == dtype
        assert gradient.shape == (tensor.shape if tensor is not None else (0,))


# ---- the functional API ----------------------------------------------------------------------------------------------


def _public(case: Case, tensors: Tensors) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """Return the arguments of inverted_attention_routing that mean a case."""
    window = None
    if case.grid != (1, 1) or case.window != BY_NAME["ones"].window:
        kh, kw, sh, sw, ph, pw, dh, dw = case.window
        window = Window((kh, kw), (sh, sw), (ph, pw), (dh, dw))
    children, weight, query, bias, gate, norm_weight, norm_bias = tensors
    scale, eps, normalize, _ = case.settings()
    positional = (from_op(children, window), weight) + (() if query is None else (from_op(query, window),))
    named = {
        "bias": bias,
        "gate": None if gate is None else from_op(gate, window),
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "eps": eps,
        "scale": scale,
        "window": window,
        "normalize": normalize,
    }
    return positional, named


def _functional(case: Case) -> object:
    """Return inverted_attention_routing as a function of op-layout tensors, with the op's two outputs."""

    def run(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        positional, named = _public(case, list(arguments[:7]))
        result = functional.inverted_attention_routing(*positional, **named)
        inside = to_op(result, named["window"])
        assert inside.is_contiguous()  # B, Ho, Wo, M, C, E behind the public view
        return inside, inside.new_empty(0)

    return run


def _check_functional(case: Case, dtype: torch.dtype) -> None:
    tensors, grads = case.tensors(dtype), [case.grads(dtype)[0], None]
    found = results(_functional(case), tensors, case.settings(), grads)
    found.pop("sums", None)
    exact_run = results(reference.attention_pass, tensors, case.settings(), grads)
    wanted = set(exact_run) - {"sums"}
    assert set(found) == wanted
    found.update({"sums": exact_run["sums"]} if "sums" in exact_run else {})
    assert_honest(found, tensors, case.settings(), grads)


@pytest.mark.parametrize("case", [c for c in CASES if c.query and c.pose[0] * c.pose[2] > 1][::3], ids=ids)
def test_functional(case: Case) -> None:
    _check_functional(case, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.pose[0] * c.pose[2] > 1], ids=ids)
def test_uniform_pass(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without parents the library's convolution or matmul runs; in bfloat16 it rounds in between, as eager does."""
    if dtype == torch.bfloat16:
        for module in (reference, reference.attention, reference.sight):
            monkeypatch.setattr(module, "accumulation_dtype", lambda dtype: dtype)
    _check_functional(replace(case, query=False), dtype)


@native_only
@pytest.mark.parametrize("case", [c for c in CASES if c.pose[0] * c.pose[2] > 1][::4], ids=ids)
def test_uniform_pass_by_the_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional.uniform, "kernel_beats_library", lambda *_: True)
    monkeypatch.setattr(functional.uniform, "uniform_pass", None)
    for dtype in DTYPES:
        _check_functional(replace(case, query=False), dtype)


@native_only
def test_when_the_kernel_runs_a_uniform_pass() -> None:
    children = torch.zeros(()).expand(64, 16, 8, 8, 1, 64)
    own = torch.zeros(()).expand(144, 16, 64, 64)
    assert explain(children, own, window=Window(3)).backend == "cpu", "weights too large to copy"
    assert explain(children, own[:, :8], window=Window(3)).backend == "torch"
    assert explain(children, torch.zeros(()).expand(16, 200, 64, 64), window=Window(3)).backend == "torch", (
        "shared weights"
    )
    with backend("reference"):
        assert explain(children, own, window=Window(3)).backend == "reference"


def test_uniform_pass_never_stores_votes() -> None:
    """A set whose votes would be 4 TB, on the meta device's arithmetic: all intermediate sizes are seen."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return result

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", requires_grad=True)

    for children, weight, window in (
        (meta(64, 100_000, 4, 4), meta(1, 10_000, 4, 4), None),
        (meta(64, 100_000, 4, 4), meta(100, 10_000, 4, 4), None),
        (meta(64, 32, 64, 64, 4, 4), meta(288, 32, 4, 4), Window(3, padding=1)),
        (meta(64, 32, 64, 64, 4, 4), meta(32, 32, 4, 4), Window(3, padding=1)),
    ):
        largest = 0
        with Watch():
            functional.inverted_attention_routing(children, weight, window=window).sum().backward()
        many = weight.shape[1]
        outputs = children.shape[0] * many * 16 * (64 * 64 if window else 1)
        assert largest <= 1.2 * max(children.numel(), weight.numel(), outputs)


def test_one_number_poses_are_not_normalized() -> None:
    case = BY_NAME["vector-1x1"]
    tensors = case.tensors()
    positional, named = _public(case, tensors)
    expected = functional.inverted_attention_routing(*positional, **named)
    named.update(normalize=True, norm_weight=torch.ones(1).double())
    assert torch.equal(functional.inverted_attention_routing(*positional, **named), expected)


def test_default_scale() -> None:
    case = BY_NAME["primes"]
    positional, named = _public(case, case.tensors())
    expected = functional.inverted_attention_routing(*positional, **named)
    named["scale"] = None
    torch.testing.assert_close(functional.inverted_attention_routing(*positional, **named), expected)


def test_two_iterations_chain_without_copies() -> None:
    """What one grid layer returns, the next takes: the op layout of the result is contiguous memory."""
    children = torch.randn(2, 3, 6, 6, 2, 2)
    first = functional.inverted_attention_routing(children, torch.randn(27, 5, 2, 2), window=Window(3))
    second = functional.inverted_attention_routing(children, torch.randn(27, 5, 2, 2), first, window=Window(3))
    for routed in (first, second):
        assert to_op(routed, Window(3)).is_contiguous()
        assert to_op(routed, Window(3)).data_ptr() == routed.data_ptr()


def test_forced_reference_is_the_reference() -> None:
    case = BY_NAME["conv-shared"]
    tensors = case.tensors(torch.float32)
    positional, named = _public(case, tensors)
    with backend("reference"):
        found = functional.inverted_attention_routing(*positional, **named)
    expected, _ = reference.attention_pass(*tensors, *case.settings())
    assert torch.equal(to_op(found, named["window"]), expected)
