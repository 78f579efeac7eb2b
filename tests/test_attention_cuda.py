"""The CUDA kernels of the attention pass against the reference: forward and every gradient.

Everywhere their very sources run on the CPU (``cuda_on_cpu``), one block at a time, every access to memory watched: a
race within a block or between two, a step outside of shared memory or of a tensor, a misaligned vector or lanes that
do not meet are errors. Where there is a GPU the compiled kernels run as well. The tolerance is that of
``attention_cases.assert_honest``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases import (
    BY_NAME,
    CASES,
    GPU_DTYPES,
    GRADIENTS,
    JUDGE,
    LAYOUTS,
    Case,
    differentiable,
    ids,
    on_device,
    random_cases,
    results,
    transposed,
)
from cuda_on_cpu import build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_cases import Bar

from fastcaps import backends, reference
from fastcaps.dispatch import ALLOW_TF32, DETERMINISTIC

GPU = {entry.name: entry for entry in backends.listing()}["cuda"]
ON_DEVICE = torch.cuda.is_available() and GPU.available
OPTIONS = {"fast": 0, "ordered": DETERMINISTIC, "tf32": ALLOW_TF32, "tf32-ordered": ALLOW_TF32 | DETERMINISTIC}
Layout = Callable[[torch.Tensor], torch.Tensor]

CUT = (  # how the kernels cut a call: what the common cases are too small for
    Case("papers-c10-conv", batch=1, grid=(5, 5), types=6, parents=32, pose=(4, 4, 4), window=(3, 3, 2, 2, 0, 0, 1, 1)),
    Case("papers-c10-fc", batch=2, types=70, parents=10, pose=(4, 4, 4)),
    Case("papers-c100-fc", batch=1, types=9, parents=100, pose=(6, 6, 6)),
    Case("papers-dmm-conv", batch=1, grid=(3, 4), types=3, parents=16, pose=(8, 8, 8), window=(3, 3, 1, 1, 0, 0, 1, 1)),
    Case("papers-dmm-vector", batch=1, types=8, parents=16, pose=(1, 64, 64), window=(1, 1, 1, 1, 0, 0, 1, 1)),
    Case("papers-dr", batch=2, types=9, parents=100, pose=(1, 8, 16)),
    Case("two-sweeps", batch=1, types=2, parents=1100, pose=(4, 4, 4), gate=True),
    Case("two-sweeps-vector", batch=1, types=2, parents=2100, pose=(1, 16, 16), groups=1, bias="1M"),
    Case(
        "two-sweeps-free", batch=1, grid=(2, 1), types=1, parents=700, pose=(2, 3, 5), window=(2, 1, 1, 1, 0, 0, 1, 1)
    ),
    Case("one-position", batch=1, types=400, parents=3, pose=(4, 4, 4), groups=1, gate=True, bias="I1"),
    Case("largest-pose", batch=1, types=3, parents=3, pose=(16, 9, 32)),
    Case("long-vector", batch=1, types=3, parents=2, pose=(1, 260, 130)),
    Case("tall-pose", batch=2, types=3, parents=5, pose=(37, 3, 2), bias="IM"),
)


@dataclass(frozen=True)
class Target:
    """The ops under test, and where their tensors lie."""

    device: str

    def op(self, name: str) -> Any:
        if self.device == "cpu":
            build.library(build.ATTENTION)
            return getattr(torch.ops.fastcaps_cuda_on_cpu, name).default
        return getattr(torch.ops.fastcaps_cuda, name).default

    def guarded(self) -> Any:
        return build.guarded(build.ATTENTION) if self.device == "cpu" else nullcontext()

    def arguments(self, given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [on_device(tensor, self.device) for tensor in given]

    def check(
        self, case: Case, dtype: torch.dtype, option: str = "fast", seed: int = 0, layout: Layout | None = None
    ) -> None:
        """Run a case, every tensor fenced in, and hold the results to the honest tolerance."""

        def arranged(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
            return [tensor if tensor is None or layout is None else layout(tensor) for tensor in tensors]

        def make() -> Any:
            return arranged(case.tensors(dtype, seed)), arranged(case.grads(dtype, seed + 1))

        found, _, _ = self.results(make, case, option)
        bar(case, dtype, seed, option.startswith("tf32") and dtype == torch.float32).hold(found)

    def check_tensors(self, make: Callable[[], Any], case: Case) -> None:
        """Do the same with what ``make`` returns: tensors, and gradients of the outputs."""
        found, tensors, grads = self.results(make, case)
        JUDGE.bar(tensors, case.settings(), grads).hold(found)

    def results(self, make: Callable[[], Any], case: Case, option: str = "fast") -> Any:
        run = differentiable(self.op("attention_pass"), self.op("attention_pass_backward"), OPTIONS[option])
        with self.guarded():
            tensors, grads = make()
            found = results(run, self.arguments(tensors), case.settings(), self.arguments(grads))
            return {name: value.cpu() for name, value in found.items()}, tensors, grads


@functools.cache
def bar(case: Case, dtype: torch.dtype, seed: int, tf32: bool) -> Bar:
    """Return what a case may err, which takes far longer to find than the kernels' results."""
    return JUDGE.bar(case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1), tf32)


TARGETS = [Target("cpu")] + ([Target("cuda")] if ON_DEVICE else [])
every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"on-{target.device}")


def test_the_device_runs_these_too() -> None:
    if not ON_DEVICE:
        pytest.skip(f"the CUDA kernels run on the CPU only: {GPU.detail if not GPU.available else 'no GPU'}")


@pytest.fixture(autouse=True)
def mixed_order() -> Iterator[None]:
    """Blocks and threads forward, backward and shuffled by turns, beginning alike in every test."""
    build.set_order(build.ATTENTION, "mixed")
    yield
    build.set_order(build.ATTENTION, "mixed")


@every_target
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES + CUT, ids=ids)
def test_forward_and_every_gradient(case: Case, option: str, target: Target) -> None:
    target.check(case, torch.float32, option)


@every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
@pytest.mark.parametrize("case", CASES + CUT[:2], ids=ids)
def test_half_precision(case: Case, dtype: torch.dtype, target: Target) -> None:
    target.check(case, dtype)


@every_target
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    case=random_cases(),
    dtype=st.sampled_from(GPU_DTYPES),
    option=st.sampled_from(list(OPTIONS)),
    layout=st.sampled_from((None, *LAYOUTS)),
    order=st.sampled_from(list(build.ORDERS)),
    seed=st.integers(0, 9),
)
def test_random_shapes(
    target: Target, case: Case, dtype: torch.dtype, option: str, layout: Layout | None, order: str, seed: int
) -> None:
    build.set_order(build.ATTENTION, order)
    target.check(case, dtype, option, seed, layout)


STRIDED = ("conv-4x4", "padded", "pose-1x8-1x16", "pose-6x6", "dilated-padded-strided", "no-norm", "groups-1")


@every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[:2], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name: str, layout: Layout, dtype: torch.dtype, target: Target) -> None:
    target.check(BY_NAME[name], dtype, layout=layout)


@every_target
@pytest.mark.parametrize("argument", range(7), ids=reference.NEEDS)
@pytest.mark.parametrize("name", ["padded", "primes"])
def test_expanded_inputs(name: str, argument: int, target: Target) -> None:
    """One argument with stride 0, in its first dimension and then in all but the last."""
    case = BY_NAME[name]
    for kept in (1, -1):

        def make(kept: int = kept) -> Any:
            tensors = case.tensors(torch.float32)
            whole = tensors[argument]
            start = whole[:1] if kept == 1 else whole[(slice(0, 1),) * (whole.dim() - 1)]
            tensors[argument] = start.clone().expand(whole.shape)
            return tensors, case.grads(torch.float32)

        target.check_tensors(make, case)


@every_target
@pytest.mark.parametrize("name", STRIDED)
def test_expanded_gradients(name: str, target: Target) -> None:
    """The gradient of a sum is one number with stride 0."""
    case = BY_NAME[name]

    def make() -> Any:
        grads = [None if g is None else torch.full((), 0.7).expand(g.shape) for g in case.grads(torch.float32)]
        return case.tensors(torch.float32), grads

    target.check_tensors(make, case)


@every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
@pytest.mark.parametrize("name", ["padded", "primes", "no-norm", "pose-4x4"])
def test_only_the_gradients_asked_for(name: str, option: str, target: Target) -> None:
    case = BY_NAME[name]
    tensors, grads = target.arguments(case.tensors(torch.float32)), target.arguments(case.grads(torch.float32))
    backward = target.op("attention_pass_backward")
    _, sums = target.op("attention_pass")(*tensors, *case.settings(), OPTIONS[option])
    everything = backward(*grads, *tensors[:6], sums, *case.settings(), 127, OPTIONS[option])
    present = [k for k, tensor in enumerate(tensors) if tensor is not None]
    for needs in [1 << k for k in present] + [0, 3, 6, 7]:
        found = backward(*grads, *tensors[:6], sums, *case.settings(), needs, OPTIONS[option])
        for k, gradient in enumerate(found):
            if needs >> k & 1 and k in present:
                torch.testing.assert_close(gradient, everything[k], rtol=1e-5, atol=1e-5, msg=GRADIENTS[k])
            else:
                assert gradient.shape == (0,)


@every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
def test_outputs_are_contiguous_and_of_the_right_dtype(dtype: torch.dtype, target: Target) -> None:
    case = BY_NAME["conv-4x4"]
    tensors = target.arguments([None if tensor is None else transposed(tensor) for tensor in case.tensors(dtype)])
    parents, sums = target.op("attention_pass")(*tensors, *case.settings(), 0)
    assert parents.is_contiguous() and parents.dtype == dtype
    assert sums.is_contiguous() and sums.dtype == torch.float32
    backward = target.op("attention_pass_backward")
    grads = target.arguments(case.grads(dtype))
    for gradient, tensor in zip(backward(*grads, *tensors[:6], sums, *case.settings(), 127, 0), tensors, strict=True):
        assert gradient.is_contiguous() and gradient.dtype == dtype
        assert gradient.shape == (tensor.shape if tensor is not None else (0,))


@every_target
@pytest.mark.parametrize("option", ["ordered", "tf32-ordered"])
@pytest.mark.parametrize("case", (*CASES[::3], *CUT), ids=ids)
def test_ordered_results_have_the_same_bits(case: Case, option: str, target: Target) -> None:
    """Whatever the order in which blocks and threads come: on a device that is chance, here it is chosen."""
    run = differentiable(target.op("attention_pass"), target.op("attention_pass_backward"), OPTIONS[option])
    tensors, grads = target.arguments(case.tensors(torch.float32)), target.arguments(case.grads(torch.float32))
    first = None
    for order in ("forward", "backward", "shuffled"):
        build.set_order(build.ATTENTION, order)
        found = results(run, tensors, case.settings(), grads)
        first = first or found
        for name, value in found.items():
            assert torch.equal(value, first[name]), name


@every_target
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("argument", range(5), ids=reference.NEEDS[:5])
@pytest.mark.parametrize("name", ["padded", "primes", "conv-4x4-m32", "pose-8x8"])
def test_what_is_not_finite_comes_out(name: str, argument: int, value: float, target: Target) -> None:
    """A NaN or an infinity in one sample: the other samples are as they were, its own outputs are not all finite."""
    case = replace(BY_NAME[name], batch=3, bias="IM", gate=True)
    tensors = case.tensors(torch.float32)
    forward = target.op("attention_pass")
    clean, _ = forward(*target.arguments(tensors), *case.settings(), 0)
    shared = argument in (1, 3)  # weight and bias concern all samples
    tensors[argument] = tensors[argument].clone()
    tensors[argument].view(-1)[tensors[argument].numel() // (2 if shared else 6)] = value
    expected, _ = reference.attention_pass(*tensors, *case.settings())
    found = forward(*target.arguments(tensors), *case.settings(), 0)[0].cpu()
    assert torch.equal(found.isfinite().flatten(1).all(1), expected.isfinite().flatten(1).all(1))
    if not shared:
        assert torch.equal(found[1:], clean.cpu()[1:])


@every_target
def test_what_the_kernels_do_not_take_is_an_error(target: Target) -> None:
    case = BY_NAME["primes"]
    forward = target.op("attention_pass")
    with pytest.raises(RuntimeError, match=r"float64|Double"):
        forward(*target.arguments(case.tensors(torch.float64)), *case.settings(), 0)
    tensors = target.arguments(case.tensors(torch.float32))
    with pytest.raises(RuntimeError, match="weight has shape"):
        forward(tensors[0], tensors[1][:, :, :-1], *tensors[2:], *case.settings(), 0)
    large = replace(case, types=1, parents=1, pose=(27, 2, 19), bias=None)
    with pytest.raises(RuntimeError, match="512"):
        forward(*target.arguments(large.tensors(torch.float32)), *large.settings(), 0)
