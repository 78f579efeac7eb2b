"""EM routing (Hinton et al. 2018): Gaussian parents whose activations say how well they explain the children."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Draw
from bench.layouts import Layout, seen_gates, seen_poses, to_public
from bench.routings.base import Implementation, Routing
from bench.routings.gaussian import moments, operations
from fastcaps import functional
from fastcaps.votes import from_op, to_op
from fastcaps.reference import routings
from fastcaps.reference.routings import default_inverse_temperature

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["EMRouting"]

EPS = 1e-8


@dataclass(frozen=True)
class EMRouting(Routing):
    """All turns of EM routing.

    Attributes
    ----------
    iterations
        Turns.
    coordinates
        Whether the place of each child on a square grid is added to its votes, as the class layer does: a bias that is
        not learned.
    """

    iterations: int = 3
    coordinates: bool = False

    results: ClassVar[tuple[str, ...]] = ("poses", "activations")
    fixed: ClassVar[tuple[str, ...]] = ("bias",)
    subject: ClassVar[str] = "gaussian"
    stored: ClassVar[dict[str, tuple[float, float]]] = {
        "reference": (4.7, 18.5),
        "batched-matmul": (4.6, 11.0),
        "reference-compiled": (2.9, 12.5),
        "batched-matmul-compiled": (1.2, 9.1),
    }

    def arguments(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw poses from N(0, 1), weights that keep that scale, activations between 0 and 1, betas near 1."""
        made = {
            "children": draw.children(workload.rows, workload.columns_in),
            "activations": draw.children().sigmoid(),
            "weight": draw.weight(workload.columns_in**-0.5),
            "beta_u": 1 + 0.1 * draw.normal(workload.parents),
            "beta_a": 1 + 0.1 * draw.normal(workload.parents),
        }
        if self.coordinates:
            side = round((workload.children // workload.matrices) ** 0.5)
            places = (torch.arange(side) + 0.5) / side
            bias = torch.zeros(side, side, workload.matrices, 1, workload.rows, workload.columns_out)
            bias[..., 0, -2] = places.view(side, 1, 1, 1)
            bias[..., 0, -1] = places.view(side, 1, 1)
            made["bias"] = bias.flatten(0, 2)
        return made

    def grads(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw a cotangent of the poses, and one of the activations."""
        return {"poses": draw.parents(workload.rows, workload.columns_out), "activations": draw.parents()}

    @property
    def passes(self) -> int:
        """A pass a turn."""
        return self.iterations

    def operations(self, workload: Workload) -> int:
        """Count as :func:`bench.routings.gaussian.operations` does."""
        return operations(workload.pose, workload.columns_in, self.iterations)

    def ours(self, workload: Workload) -> Implementation:
        """Return the package's own routing."""

        def run(
            children: Tensor,
            activations: Tensor,
            weight: Tensor,
            beta_u: Tensor,
            beta_a: Tensor,
            bias: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            return functional.em_routing(
                children,
                activations,
                weight,
                beta_u,
                beta_a,
                iterations=self.iterations,
                bias=bias,
                eps=EPS,
                window=workload.window,
            )[:2]

        return run

    def reference(self, workload: Workload) -> Implementation:
        """Return the reference's routing."""
        window = workload.window

        def run(
            children: Tensor,
            activations: Tensor,
            weight: Tensor,
            beta_u: Tensor,
            beta_a: Tensor,
            bias: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            poses, chosen, _ = routings.em_routing(
                to_op(children, window),
                to_op(activations, window),
                weight,
                beta_u,
                beta_a,
                bias,
                iterations=self.iterations,
                eps=EPS,
                window=workload.spec,
            )
            return from_op(poses, window), from_op(chosen, window)

        return run

    def batched_matmul(self, workload: Workload, layout: Layout) -> Implementation:
        """Return the turns over stored votes."""
        pose = workload.pose

        def run(
            children: Tensor,
            activations: Tensor,
            weight: Tensor,
            beta_u: Tensor,
            beta_a: Tensor,
            bias: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            votes = layout.votes(seen_poses(children, workload), weight, bias)
            gates = layout.place(seen_gates(activations, workload), "ip")
            use, wanted = layout.place(beta_u, "m"), layout.place(beta_a, "m")
            gated = (gates / workload.parents).expand(layout.agree_shape(votes))
            for turn in range(self.iterations):
                counts, means, squares, variances = moments(votes, layout, gated, EPS)
                variances = variances + EPS
                log_sigma = 0.5 * variances.log().sum(layout.pose, keepdim=True)
                score = default_inverse_temperature(turn) * (wanted - (pose * use + log_sigma) * counts)
                if turn + 1 < self.iterations:
                    logits = F.logsigmoid(score) - log_sigma - layout.agree(squares, 0.5 / variances)
                    gated = gates * torch.softmax(logits, layout.parent)
            batch = children.shape[0]
            found = layout.back(means, "pmce"), layout.back(score.sigmoid(), "pm")
            return to_public(found[0], workload, batch), to_public(found[1], workload, batch)

        return run

    def layout(self, workload: Workload) -> str:
        """Positions and children stand apart where there is a grid; on a set, children come first, which spares a
        copy."""
        return "picme" if workload.positions > 1 else "imecp"
