"""Heinsen's routing (2019): Gaussian parents whose scores are what using the children is worth, less ignoring them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Draw
from bench.layouts import Layout, seen_gates, seen_poses, to_public
from bench.routings.base import Implementation, Routing
from bench.routings.gaussian import moments, operations
from fastcaps import functional
from fastcaps.votes import from_op, to_op
from fastcaps.reference import gaussian, routings

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["HeinsenRouting"]

EPS = 1e-5
POSE = (-2, -1)


@dataclass(frozen=True)
class HeinsenRouting(Routing):
    """All turns of Heinsen's routing with Gaussian parents.

    Attributes
    ----------
    iterations
        Turns.
    layers
        Of a text, if not 0: every token has so many children, and sentences are of different lengths. The children
        behind a sentence's end have a score of -∞: they are not there.
    """

    iterations: int = 3
    layers: int = 0

    results: ClassVar[tuple[str, ...]] = ("scores", "means", "variances")
    subject: ClassVar[str] = "gaussian"
    stored: ClassVar[dict[str, tuple[float, float]]] = {
        "reference": (4.7, 18.6),
        "batched-matmul": (4.6, 15.6),
        "reference-compiled": (3.4, 14.8),
        "batched-matmul-compiled": (1.5, 12.9),
    }

    def arguments(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw poses and scores from N(0, 1), weights that keep that scale, and betas that keep the sum over all
        children near 1."""
        betas = (workload.matrices if workload.matrices > 1 else 1, workload.parents)
        scores = draw.children()
        if self.layers:
            tokens = workload.types // self.layers
            lengths = draw.whole_numbers(tokens // 2, tokens, draw.batch, 1)
            scores = scores.masked_fill(torch.arange(workload.types) // self.layers >= lengths, -torch.inf)
        return {
            "children": draw.children(workload.rows, workload.columns_in),
            "scores": scores,
            "weight": draw.weight(workload.columns_in**-0.5),
            "bias": 0.1 * draw.normal(*betas, workload.rows, workload.columns_out),
            "beta_use": draw.normal(*betas) * (2 / workload.children),
            "beta_ignore": draw.normal(*betas) * (2 / workload.children),
        }

    def grads(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw cotangents of scores, means and variances."""
        pose = workload.rows, workload.columns_out
        return {"scores": draw.parents(), "means": draw.parents(*pose), "variances": draw.parents(*pose)}

    @property
    def passes(self) -> int:
        """A pass a turn."""
        return self.iterations

    def operations(self, workload: Workload) -> int:
        """Count as :func:`bench.routings.gaussian.operations` does; evidence sums are not counted."""
        return operations(workload.pose, workload.columns_in, self.iterations)

    def ours(self, workload: Workload) -> Implementation:
        """Return the package's own routing."""

        def run(
            children: Tensor, scores: Tensor, weight: Tensor, bias: Tensor, beta_use: Tensor, beta_ignore: Tensor
        ) -> tuple[Tensor, ...]:
            return functional.heinsen_routing(
                children, scores, weight, bias, beta_use, beta_ignore, iterations=self.iterations, eps=EPS
            )[:3]

        return run

    def reference(self, workload: Workload) -> Implementation:
        """Return the reference's routing."""

        def run(
            children: Tensor, scores: Tensor, weight: Tensor, bias: Tensor, beta_use: Tensor, beta_ignore: Tensor
        ) -> tuple[Tensor, ...]:
            found = routings.heinsen_routing(
                to_op(children, None),
                to_op(scores, None),
                weight,
                bias,
                beta_use,
                beta_ignore,
                iterations=self.iterations,
                eps=EPS,
            )
            return tuple(from_op(tensor, None) for tensor in found[:3])

        return run

    def exact(self, workload: Workload) -> Implementation:
        """Return the loop of reference passes, every child counting as often as it is copied.

        All sums over children are linear in the gates, so that a gate k times as large is k children.
        """
        if workload.copies == 1:
            return self.reference(workload)

        def run(
            children: Tensor, scores: Tensor, weight: Tensor, bias: Tensor, beta_use: Tensor, beta_ignore: Tensor
        ) -> tuple[Tensor, ...]:
            poses, gate = to_op(children, None), to_op(scores, None).sigmoid() * workload.copies
            fixed: tuple[Any, ...] = (bias, gate, beta_use, beta_ignore, EPS, workload.spec)
            mean = variance = log_weight = score = None
            for _ in range(self.iterations):
                _, mean, variance, score = gaussian.gaussian_pass(poses, weight, mean, variance, log_weight, *fixed)
                variance = variance + EPS
                log_weight = F.logsigmoid(score) - 0.5 * variance.log().sum(POSE)
            assert score is not None and mean is not None and variance is not None
            return tuple(from_op(tensor, None) for tensor in (score, mean, variance))

        return run

    def batched_matmul(self, workload: Workload, layout: Layout) -> Implementation:
        """Return the turns over stored votes."""

        def run(
            children: Tensor, scores: Tensor, weight: Tensor, bias: Tensor, beta_use: Tensor, beta_ignore: Tensor
        ) -> tuple[Tensor, ...]:
            votes = layout.votes(seen_poses(children, workload), weight, bias)
            gates = layout.place(seen_gates(scores, workload).sigmoid(), "ip")
            use, ignore = layout.place(beta_use, "im"), layout.place(beta_ignore, "im")
            gated = (gates / workload.parents).expand(layout.agree_shape(votes))
            for turn in range(self.iterations):
                _, means, squares, variances = moments(votes, layout, gated, EPS)
                variances = variances + EPS
                score = (use * gated - ignore * (gates - gated)).sum(layout.child, keepdim=True)
                if turn + 1 < self.iterations:
                    log_weight = F.logsigmoid(score) - 0.5 * variances.log().sum(layout.pose, keepdim=True)
                    logits = log_weight - layout.agree(squares, 0.5 / variances)
                    gated = gates * torch.softmax(logits, layout.parent)
            found = layout.back(score, "pm"), layout.back(means, "pmce"), layout.back(variances, "pmce")
            return tuple(to_public(tensor, workload, children.shape[0]) for tensor in found)

        return run

    def layout(self, workload: Workload) -> str:
        """Children stand last where all share their matrices, so that votes are one matmul and every sum runs over
        neighbours; else they come first."""
        return "mecpi" if workload.matrices == 1 else "imcep"
