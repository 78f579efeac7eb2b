"""The correctness gate: a time counts only while the result keeps the rule of :mod:`bench.judge`.

Two samples of a batch, the first and the last, are held to float64: the cotangents of all others are 0, so that the
parameters' gradients are theirs alone. Of children that are copies of a few, float64 gets one copy, each child of which
counts as often. The eager reference's own error is then that of one copy times the root of their number, as the
rounding of that many times the summands grows. (Where all of them could be run, 64 copies made most of its errors 3 to
47 times as large.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from bench.alternatives import axes_of, reference, runner
from bench.judge import Bar, Verdict
from bench.votes import Layout
from bench.workload import Implementation, Inputs, Workload, is_batched

SAME = 1e-4
"""Alternatives are asked only whether they compute the same thing: within this share of a result's largest number. The
library's LayerNorm and convolution sum with more rounding than the contract lets a kernel have, and to leave them out
for that would flatter the package. A wrong result still shows: a lost term moves far more."""

_OF_CHILDREN = ("children", "scores")  # arguments that copies of a child have in common


def checked(batch: int) -> list[int]:
    """Return the samples of a batch that are held to float64."""
    return sorted({0, batch - 1})


def without_others(inputs: Inputs) -> Inputs:
    """Return inputs with cotangents of 0 for the samples that are not checked."""
    samples = checked(inputs.children.shape[0])
    grads = {name: torch.zeros_like(grad) for name, grad in inputs.grads.items()}
    for name, grad in inputs.grads.items():
        grads[name][samples] = grad[samples]
    return replace(inputs, grads=grads)


class Gate(Bar):
    """What the results of one workload may err, of the checked samples of ``inputs``."""

    most_draws = 3  # each takes as long as a reference in float64

    def __init__(self, workload: Workload, inputs: Inputs, tf32: bool = False) -> None:
        self.workload, routing = workload, workload.routing
        inputs = inputs.samples(checked(inputs.children.shape[0]))
        ways = [reference(workload)]
        if workload.copies > 1:
            one, given = workload.types // workload.copies, inputs.arguments
            inputs = replace(inputs, arguments={n: t[:, :one] if n in _OF_CHILDREN else t for n, t in given.items()})
            ways = [routing.routed(workload, Layout(axes_of(workload)), workload.copies)]
        if getattr(routing, "uniform", False):  # by design the library's convolution, with longer sums
            ways.append(partial(convolution, workload))
        self._inputs = inputs.each(lambda _, tensor: tensor.contiguous())  # no layout is slow for the reference
        runs = [partial(self._step, way) for way in ways]
        super().__init__(runs[0], [*self._inputs.arguments.values(), *self._inputs.grads.values()], runs, tf32)

    def measure(self, eager: Sequence[Any]) -> Any:
        exact, errors, dtypes = super().measure(eager)
        return exact, {name: error * self.workload.copies**0.5 for name, error in errors.items()}, dtypes

    def compared(self, name: str, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples that are checked. The gradient of a child that counts k times is that of each copy."""
        exact, copies = self.exact[name], self.workload.copies
        if is_batched(name) and found.shape[0] > 2:
            found = found[checked(found.shape[0])]
        if copies > 1 and name.startswith("d") and name[1:] in _OF_CHILDREN:
            return found.double() * copies, exact.repeat(1, copies, *[1] * (exact.dim() - 2))
        return found, exact

    def judge(self, found: dict[str, Tensor], share: float = 0.0) -> Verdict:
        """Hold what :func:`bench.alternatives.runner` returns, of a forward pass or a training step, to the rule."""
        if odd := [f"{name} has numbers that are not finite" for name in found if not found[name].isfinite().all()]:
            return Verdict({}, {}, odd)
        forward = found.keys() == {*self.workload.routing.results}
        return self._judge(found, share) if forward else super().judge(found, share)

    def _step(self, run: Implementation, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run a training step on the tensors of the inputs, in any dtype."""
        left = iter(tensors)
        inputs = self._inputs.each(lambda *_: next(left).detach())
        # a mode of the judge wants to see every product: under forward-mode derivatives an op is its formulas
        seen = self.tf32 and torch._C._len_torch_dispatch_stack()
        with forward_ad.dual_level() if seen else nullcontext():
            return runner(run, inputs, training=True)()


def convolution(work: Workload, children: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Run a uniform pass as a user would write it with ``F.conv2d``: rows in the batch, N * D channels in."""
    batch, types, height, width, rows, inner = children.shape
    size, (many, columns) = work.kernel_size, weight.shape[1::2]
    images = children.permute(0, 4, 2, 3, 1, 5).reshape(batch * rows, height, width, types * inner)
    kernel = weight.view(size, size, types, many, inner, columns).permute(3, 5, 2, 4, 0, 1)
    kernel = kernel.reshape(many * columns, types * inner, size, size)
    result = F.conv2d(images.permute(0, 3, 1, 2), kernel, stride=work.stride) / many  # channels last, as ours lie
    return (result.view(batch, rows, many, columns, *result.shape[2:]).permute(0, 2, 4, 5, 1, 3),)
