"""Where the CUDA kernels are tested, and how: for every pass alike.

Everywhere their very sources run on the CPU (``cuda_on_cpu``), one block at a time, every access to memory watched: a
race within a block or between two, a step outside of shared memory or of a tensor, a misaligned vector or lanes that
do not meet are errors. Where there is a GPU the compiled kernels run as well. The tolerance is that of
``pass_cases.Bar``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cuda_on_cpu import build
from pass_cases import Bar, Judge, Run, differentiable, on_device, transposed

from fastcaps import backends
from fastcaps.dispatch import ALLOW_TF32, DETERMINISTIC

GPU = {entry.name: entry for entry in backends.listing()}["cuda"]
ON_DEVICE = torch.cuda.is_available() and GPU.available
OPTIONS = {"fast": 0, "ordered": DETERMINISTIC, "tf32": ALLOW_TF32, "tf32-ordered": ALLOW_TF32 | DETERMINISTIC}
Layout = Callable[[torch.Tensor], torch.Tensor]
Given = list[torch.Tensor | None]


@functools.cache
def bar(judge: Judge, case: Any, dtype: torch.dtype, seed: int, tf32: bool) -> Bar:
    """Return what a case may err, which takes far longer to find than the kernels' results."""
    return judge.bar(case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1), tf32)


@dataclass(frozen=True)
class Target:
    """The two ops of a pass under test, and where their tensors lie."""

    device: str
    judge: Judge

    def op(self, name: str) -> Any:
        """Return an op of the kernels by its name."""
        if self.device == "cpu":
            build.library(build.ATTENTION)
            return getattr(torch.ops.fastcaps_cuda_on_cpu, name).default
        return getattr(torch.ops.fastcaps_cuda, name).default

    @property
    def forward(self) -> Any:
        return self.op(self.judge.one.name)

    @property
    def backward(self) -> Any:
        return self.op(f"{self.judge.one.name}_backward")

    def run(self, option: str = "fast") -> Run:
        """Return the two as one differentiable function."""
        return differentiable(self.judge.one, self.forward, self.backward, OPTIONS[option])

    def guarded(self) -> Any:
        return build.guarded(build.ATTENTION) if self.device == "cpu" else nullcontext()

    def arguments(self, given: Given) -> Given:
        return [on_device(tensor, self.device) for tensor in given]

    def check(
        self, case: Any, dtype: torch.dtype, option: str = "fast", seed: int = 0, layout: Layout | None = None
    ) -> None:
        """Run a case, every tensor fenced in, and hold the results to the honest tolerance."""

        def arranged(tensors: Given) -> Given:
            return [tensor if tensor is None or layout is None else layout(tensor) for tensor in tensors]

        def make() -> Any:
            return arranged(case.tensors(dtype, seed)), arranged(case.grads(dtype, seed + 1))

        found, _, _ = self.results(make, case, option)
        bar(self.judge, case, dtype, seed, option.startswith("tf32") and dtype == torch.float32).hold(found)

    def check_tensors(self, make: Callable[[], Any], case: Any, option: str = "fast") -> None:
        """Do the same with what ``make`` returns: tensors, and gradients of the outputs."""
        found, tensors, grads = self.results(make, case, option)
        self.judge.bar(tensors, case.settings(), grads).hold(found)

    def results(self, make: Callable[[], Any], case: Any, option: str = "fast") -> Any:
        with self.guarded():
            tensors, grads = make()
            found = self.judge.results(
                self.run(option), self.arguments(tensors), case.settings(), self.arguments(grads)
            )
            return {name: value.cpu() for name, value in found.items()}, tensors, grads

    def check_expanded(self, case: Any, argument: int) -> None:
        """Give one argument stride 0, in its first dimension and then in all but the last."""
        for kept in (1, -1):

            def make(kept: int = kept) -> Any:
                tensors = case.tensors(torch.float32)
                whole = tensors[argument]
                start = whole[:1] if kept == 1 else whole[(slice(0, 1),) * (whole.dim() - 1)]
                tensors[argument] = start.clone().expand(whole.shape)
                return tensors, case.grads(torch.float32)

            if case.tensors(torch.float32)[argument] is not None:
                self.check_tensors(make, case)

    def check_expanded_gradients(self, case: Any) -> None:
        """The gradient of a sum is one number with stride 0."""

        def make() -> Any:
            grads = [None if g is None else torch.full((), 0.7).expand(g.shape) for g in case.grads(torch.float32)]
            return case.tensors(torch.float32), grads

        self.check_tensors(make, case)

    def differentiated(self, tensors: Given, grads: Given, case: Any, needs: int, options: int = 0) -> Any:
        """Return outputs and raw gradients of a call with tensors that lie on the device."""
        outputs = self.forward(*tensors, *case.settings(), options)
        kept = self.judge.one.kept((*tensors, *case.settings()), outputs)
        return outputs, self.backward(*grads, *kept, *case.settings(), needs, options)

    def check_only_those_asked_for(self, case: Any, option: str) -> None:
        tensors, grads = (self.arguments(given(torch.float32)) for given in (case.tensors, case.grads))
        count = len(tensors)
        _, everything = self.differentiated(tensors, grads, case, (1 << count) - 1, OPTIONS[option])
        present = [k for k, tensor in enumerate(tensors) if tensor is not None]
        for needs in [1 << k for k in present] + [0, 3, 6, 7]:
            _, found = self.differentiated(tensors, grads, case, needs, OPTIONS[option])
            for k, gradient in enumerate(found):
                if needs >> k & 1 and k in present:
                    assert torch.allclose(gradient, everything[k], rtol=1e-5, atol=1e-5), self.judge.gradients[k]
                else:
                    assert gradient.shape == (0,)

    def check_dtypes(self, case: Any, dtype: torch.dtype) -> None:
        """Results are contiguous, those that are kept in float32 too, and gradients like their inputs."""
        tensors = self.arguments([None if t is None else transposed(t) for t in case.tensors(dtype)])
        grads = self.arguments(case.grads(dtype))
        outputs, gradients = self.differentiated(tensors, grads, case, (1 << len(tensors)) - 1)
        for name, output in zip(self.judge.outputs, outputs, strict=True):
            assert output.is_contiguous(), name
            assert output.dtype == (torch.float32 if self.judge.is_wide(name) else dtype), name
        for gradient, tensor in zip(gradients, tensors, strict=True):
            assert gradient.is_contiguous() and (tensor is None or gradient.dtype == tensor.dtype)
            assert gradient.shape == (tensor.shape if tensor is not None else (0,))

    def check_bits(self, case: Any, option: str) -> None:
        """Whatever the order in which blocks and threads come: on a device that is chance, here it is chosen."""
        tensors, grads = (self.arguments(given(torch.float32)) for given in (case.tensors, case.grads))
        first = None
        for order in ("forward", "backward", "shuffled"):
            build.set_order(build.ATTENTION, order)
            found = self.judge.results(self.run(option), tensors, case.settings(), grads)
            first = first or found
            for name, value in found.items():
                assert torch.equal(value, first[name]), name


def every_target(judge: Judge) -> pytest.MarkDecorator:
    """Return the mark that gives a test every :class:`Target` there is."""
    targets = [Target("cpu", judge)] + ([Target("cuda", judge)] if ON_DEVICE else [])
    return pytest.mark.parametrize("target", targets, ids=lambda target: f"on-{target.device}")


def mixed_order() -> Any:
    """Blocks and threads forward, backward and shuffled by turns, beginning alike in every test: a fixture's body."""
    build.set_order(build.ATTENTION, "mixed")
    yield
    build.set_order(build.ATTENTION, "mixed")
