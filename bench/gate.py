"""The correctness gate: a speed figure stands only while its result agrees with the float64 reference.

The rule is the contract's: the largest error of a result may be at most twice that of the eager reference of the same
dtype, plus what rounding explains. Rounding is one unit in the last place of the largest number in the result and,
where that is not enough, the condition of the problem: how far the float64 result moves when every input moves by one
unit in the last place. Where matrix products may round their operands (tf32), that unit is the rounded operands'.

A uniform pass over a grid is the library's convolution by design, not a kernel; its eager yardstick is the worse of the
reference and of a plain ``F.conv2d``, which sums in fewer and longer runs than the reference's einsum.

Where the reference would take minutes, less is computed, and it still is exact: of some large batches a few samples,
the cotangents of all others being 0, so that the parameters' gradients are theirs alone; of children that are copies of
a few one copy, each child of which counts as often. The eager reference's own error is then that of one copy times the
root of their number, as the rounding of so many times the summands grows. (Where all of them could be run, 64 copies
made most of its errors 3 to 47 times as large.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.alternatives import reference, runner
from bench.inputs import Inputs, is_batched
from bench.routings import AttentionPass
from bench.stored import Layout
from bench.workload import Implementation, Workload

__all__ = ["SAME", "Gate", "Verdict"]

_CHUNK_BYTES = 256 * 2**20
"""Votes that the float64 reference may store at once (four times as many on a GPU), by running a batch in parts."""

SAME = 1e-4
"""Alternatives are asked only whether they compute the same thing: within this share of a result's largest number. The
library's LayerNorm and convolution sum with more rounding than the contract lets a kernel have, and to leave them out
for that would flatter the package. A wrong result still shows: a lost term moves far more."""

_OF_CHILDREN = ("children", "scores")
"""Arguments that children which are copies of each other have in common. (Results of these names are the parents'.)"""


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one result."""

    passed: bool  # whether every tensor keeps the rule
    errors: dict[str, float]  # the largest of each tensor
    allowed: dict[str, float]
    complaint: str = ""  # the first thing that is wrong, in words


def _of_children(name: str) -> bool:
    """Tell whether a result is the gradient of what each child has."""
    return name.startswith("d") and name[1:] in _OF_CHILDREN


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


class Gate:
    """The float64 result of one workload at one batch, and how far the eager reference of the inputs' dtype is from it.

    ``inputs`` are what the implementations under test are given; ``epsilon`` is one unit in the last place, by default
    that of the inputs' dtype. ``shared`` is a file that keeps the float64 result and the eager error, for processes
    that judge the same inputs.
    """

    def __init__(
        self, workload: Workload, inputs: Inputs, epsilon: float | None = None, shared: Path | None = None
    ) -> None:
        self.workload = workload
        self.dtype = inputs.children.dtype
        self.epsilon = torch.finfo(self.dtype).eps if epsilon is None else epsilon
        self._batch = inputs.children.shape[0]
        self._samples = workload.samples_checked(self._batch)
        self._inputs = self._problem(inputs)
        self._condition: dict[str, float] | None = None
        self.exact: dict[str, Tensor]
        self.eager_error: dict[str, float]
        if shared is not None and shared.is_file():
            self.exact, self.eager_error = torch.load(shared)
            return
        self.exact = self._reference(self._inputs.to(torch.float64))
        self.eager_error = self._eager_error()
        if shared is not None:
            torch.save((self.exact, self.eager_error), shared.with_suffix(".part"))
            shared.with_suffix(".part").rename(shared)

    def _eager_error(self) -> dict[str, float]:
        """Return how far eager code of the inputs' dtype is from the float64 result."""
        routing, errors = self.workload.routing, dict.fromkeys(self.exact, 0.0)
        yardsticks = [self._judge_by()]
        if isinstance(routing, AttentionPass) and routing.uniform and self.workload.grid and not routing.normalize:
            yardsticks.append(convolution(self.workload))
        for run in yardsticks:
            for name, tensor in self._in_parts(run, self._inputs.to(self.dtype)).items():
                error = _largest(tensor.double() - self.exact[name]) * self.workload.copies**0.5
                errors[name] = max(errors[name], error)
        return errors

    def _judge_by(self) -> Implementation:
        """Return the package's reference; for children that are copies, turns in which each counts so often."""
        work = self.workload
        if work.copies == 1:
            return reference(work)
        return partial(work.routing.turns, work, Layout(work.routing.layout(work)), work.copies)

    def _problem(self, inputs: Inputs) -> Inputs:
        """Return what the reference is given: all of it, some samples, or one of the copies of the children."""
        if self._samples is not None:
            inputs = inputs.samples(self._samples)
        if self.workload.copies == 1:
            return inputs
        one = self.workload.types // self.workload.copies
        cut = {name: tensor[:, :one] if name in _OF_CHILDREN else tensor for name, tensor in inputs.arguments.items()}
        return replace(inputs, arguments=cut)

    def _off_by(self, name: str, tensor: Tensor) -> float:
        """Return the largest error of a result, or of the part of it that is checked.

        The gradient of a child that counts k times is that of each copy times k.
        """
        if self._samples is not None and is_batched(name):
            tensor = tensor[self._samples]
        exact, copies = self.exact[name], self.workload.copies
        if copies > 1 and _of_children(name):
            return max(_largest(part.double() * copies - exact) for part in tensor.chunk(copies, 1))
        return _largest(tensor.double() - exact)

    def _shape(self, name: str) -> list[int]:
        """Return the shape that a result must have."""
        shape = [*self.exact[name].shape]
        if self._samples is not None and is_batched(name):
            shape[0] = self._batch
        if _of_children(name):
            shape[1] *= self.workload.copies
        return shape

    def _reference(self, inputs: Inputs) -> dict[str, Tensor]:
        return self._in_parts(self._judge_by(), inputs)

    def _in_parts(self, run: Implementation, inputs: Inputs) -> dict[str, Tensor]:
        """Run a training step in parts of the batch, and put the parts together."""
        workload, batch = self.workload, inputs.children.shape[0]
        per_sample = workload.votes_bytes(1, inputs.children.element_size()) // workload.copies
        step = max(1, _CHUNK_BYTES * (4 if inputs.children.is_cuda else 1) // per_sample)
        parts = [
            runner(run, inputs.to(inputs.children.dtype).samples(slice(first, first + step)), training=True)()
            for first in range(0, batch, step)
        ]
        return {
            name: torch.cat([part[name] for part in parts])
            if is_batched(name)
            else torch.stack([part[name] for part in parts]).sum(0)
            for name in parts[0]
        }

    def condition(self) -> dict[str, float]:
        """Return how far the float64 result moves when every input moves by one unit in the last place."""
        if self._condition is None:
            generator = torch.Generator().manual_seed(1)

            def moved(tensor: Tensor) -> Tensor:
                signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device).double() * 2 - 1
                return tensor.double() * (1 + self.epsilon * signs)

            other = self._reference(self._inputs.apply(moved))
            self._condition = {name: _largest(other[name] - value) for name, value in self.exact.items()}
        return self._condition

    def judge(self, found: dict[str, Tensor], share: float = 0.0) -> Verdict:
        """Hold a result, of a forward pass or of a training step, to the rule.

        ``found`` is what :func:`bench.alternatives.runner` returns. A ``share`` of each result's largest number is also
        allowed; 0 is the contract, which this package is held to.
        """
        errors: dict[str, float] = {}
        allowed: dict[str, float] = {}
        complaint = ""
        forward = {name for name in self.exact if name in self.workload.routing.results}
        if found.keys() not in (forward, self.exact.keys()):
            return Verdict(False, errors, allowed, f"results are {sorted(found)}, wanted {sorted(self.exact)}")
        for name, tensor in found.items():
            wanted = self._shape(name)
            if [*tensor.shape] != wanted:
                return Verdict(False, errors, allowed, f"{name} has shape {[*tensor.shape]}, wanted {wanted}")
            if not torch.isfinite(tensor).all():
                return Verdict(False, errors, allowed, f"{name} has numbers that are not finite")
            errors[name] = self._off_by(name, tensor)
            allowed[name] = 2 * self.eager_error[name] + (self.epsilon + share) * _largest(self.exact[name])
            if errors[name] > allowed[name]:
                allowed[name] += self.condition()[name]
            if errors[name] > allowed[name] and not complaint:
                complaint = f"{name} errs by {errors[name]:.3g}, allowed {allowed[name]:.3g}"
        return Verdict(not complaint, errors, allowed, complaint)


def convolution(workload: Workload) -> Implementation:
    """Return a uniform pass as a user would write it with ``F.conv2d``: rows in the batch, N * D channels in."""

    def run(children: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        batch, types, height, width, rows, inner = children.shape
        _, many, _, columns = weight.shape
        size = workload.kernel_size
        images = children.permute(0, 4, 2, 3, 1, 5).reshape(batch * rows, height, width, types * inner)
        kernel = weight.view(size, size, types, many, inner, columns).permute(3, 5, 2, 4, 0, 1)
        kernel = kernel.reshape(many * columns, types * inner, size, size)
        result = F.conv2d(images.permute(0, 3, 1, 2), kernel, stride=workload.stride) / many
        return (result.view(batch, rows, many, columns, *result.shape[2:]).permute(0, 2, 4, 5, 1, 3),)

    return run
