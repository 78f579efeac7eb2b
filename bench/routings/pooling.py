"""Routing pooling (Zhao & Huang 2019): children compete for every parent, and votes are the poses themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Draw
from bench.layouts import Layout, seen_poses, to_public
from bench.routings.base import Implementation, Routing
from fastcaps import functional
from fastcaps.votes import from_op, to_op
from fastcaps.reference import routings

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["RoutingPool"]


@dataclass(frozen=True)
class RoutingPool(Routing):
    """All turns, and the sum that follows them.

    Attributes
    ----------
    iterations
        Turns that find the coefficients.
    sharpness
        λ.
    """

    iterations: int = 3
    sharpness: float = 0.5

    subject: ClassVar[str] = "pooling"
    stored: ClassVar[dict[str, tuple[float, float]]] = {
        "reference": (2.9, 18.9),
        "batched-matmul": (1.8, 8.7),
        "reference-compiled": (2.9, 18.9),
        "batched-matmul-compiled": (1.8, 8.7),
    }

    def arguments(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw poses that are nowhere negative, as a ReLU leaves them."""
        return {"children": draw.children(workload.rows, workload.columns_in).relu()}

    @property
    def passes(self) -> int:
        """A pass a turn, and the sum that follows."""
        return self.iterations + 1

    def operations(self, workload: Workload) -> int:
        """Count ``3 C E`` for a key of length 1, ``C E`` for the first turn's average, and ``4 C E`` for agreement and
        weighted sum in each further turn and in the sum that follows."""
        return workload.pose * (4 + 4 * self.iterations)

    def ours(self, workload: Workload) -> Implementation:
        """Return the package's own routing."""

        def run(children: Tensor) -> tuple[Tensor, ...]:
            pooled = functional.routing_pool(children, iterations=self.iterations, sharpness=self.sharpness)
            return (pooled if isinstance(pooled, Tensor) else pooled[0],)

        return run

    def reference(self, workload: Workload) -> Implementation:
        """Return the reference's routing."""

        def run(children: Tensor) -> tuple[Tensor, ...]:
            settings = {"iterations": self.iterations, "sharpness": self.sharpness}
            pooled, _ = routings.routing_pool(to_op(children, None), **settings)  # type: ignore[arg-type]
            return (from_op(pooled, None),)

        return run

    def batched_matmul(self, workload: Workload, layout: Layout) -> Implementation:
        """Return the turns over the poses, with the keys stored."""

        def run(children: Tensor) -> tuple[Tensor, ...]:
            seen = seen_poses(children, workload)
            votes = layout.place(seen, "ipce").contiguous()
            keys = layout.place(F.normalize(seen.flatten(2), dim=2).view(seen.shape), "ipce").contiguous()
            sums = votes.mean(layout.child, keepdim=True)
            query = torch.zeros_like(sums)
            for _ in range(self.iterations):
                query = query + sums / sums.square().sum(layout.pose, keepdim=True).sqrt()
                shares = torch.softmax(layout.agree(keys, query * self.sharpness), layout.child)
                sums = layout.weigh(shares, votes)
            return (to_public(layout.back(sums, "pmce"), workload, children.shape[0]),)

        return run

    def layout(self, workload: Workload) -> str:
        """Agreement and weighted sum are a batched matmul each, with nothing copied between them."""
        return "pmice"
