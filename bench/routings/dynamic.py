"""Dynamic routing (Sabour et al. 2017): parents compete, and agreement with their squashed sums adds up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from bench.inputs import Draw
from bench.layouts import Layout, seen_poses, to_public
from bench.routings.base import Implementation, Routing
from fastcaps import functional
from fastcaps.votes import from_op, to_op
from fastcaps.reference import routings

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["DynamicRouting"]


def _squash(vectors: Tensor, pose: tuple[int, int]) -> Tensor:
    squares = vectors.square().sum(pose, keepdim=True)
    return vectors * (squares.sqrt() / (1 + squares))


@dataclass(frozen=True)
class DynamicRouting(Routing):
    """All turns of dynamic routing.

    Attributes
    ----------
    iterations
        Turns.
    """

    iterations: int = 3

    stored: ClassVar[dict[str, tuple[float, float]]] = {
        "reference": (2.4, 8.5),
        "batched-matmul": (2.2, 4.7),
        "reference-compiled": (1.4, 2.6),
        "batched-matmul-compiled": (1.2, 2.5),
    }

    def arguments(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw children that are shorter than 1, as squashing leaves them, and weights that make votes of some length,
        so that children come to differ in whom they agree with."""
        children = draw.children(workload.rows, workload.columns_in)
        return {"children": _squash(children, (-2, -1)), "weight": draw.weight(1.0)}

    @property
    def passes(self) -> int:
        """A pass a turn."""
        return self.iterations

    def operations(self, workload: Workload) -> int:
        """Count ``2 C D E`` for the vote, once; ``C E`` for the first turn's sum of votes, and ``4 C E`` for agreement
        and weighted sum in every other turn."""
        return workload.pose * (2 * workload.columns_in + 1 + 4 * (self.iterations - 1))

    def ours(self, workload: Workload) -> Implementation:
        """Return the package's own routing."""

        def run(children: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            routed = functional.dynamic_routing(children, weight, iterations=self.iterations, window=workload.window)
            assert isinstance(routed, Tensor)
            return (routed,)

        return run

    def reference(self, workload: Workload) -> Implementation:
        """Return the reference's routing."""
        window = workload.window

        def run(children: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            settings = {"iterations": self.iterations, "window": workload.spec}
            parents, _ = routings.dynamic_routing(to_op(children, window), weight, **settings)  # type: ignore[arg-type]
            return (from_op(parents, window),)

        return run

    def batched_matmul(self, workload: Workload, layout: Layout) -> Implementation:
        """Return the turns over stored votes."""

        def run(children: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            votes = layout.votes(seen_poses(children, workload), weight)
            parents = _squash(
                votes.mean(layout.child, keepdim=True) * (workload.children / workload.parents), layout.pose
            )
            query = parents
            for turn in range(1, self.iterations):
                shares = torch.softmax(layout.agree(votes, query), layout.parent)
                parents = _squash(layout.weigh(shares, votes), layout.pose)
                if turn + 1 < self.iterations:
                    query = query + parents
            return (to_public(layout.back(parents, "pmce"), workload, children.shape[0]),)

        return run

    def layout(self, workload: Workload) -> str:
        """Votes are copied once, so that agreement and weighted sum are a batched matmul each."""
        return "pmice"
