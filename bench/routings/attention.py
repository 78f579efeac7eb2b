"""The attention pass (Tsai et al. 2020): one pass with parents, or a uniform one without, LayerNorm included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Draw
from bench.layouts import Layout, seen_poses, to_public
from bench.routings.base import Implementation, Routing
from fastcaps import functional, reference
from fastcaps.votes import from_op, to_op

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["EPS", "AttentionPass"]

EPS = 1e-5
"""Of LayerNorm, in every workload."""


@dataclass(frozen=True)
class AttentionPass(Routing):
    """One pass in which parents compete.

    Attributes
    ----------
    uniform
        True for a pass without parents: r = 1 / M.
    normalize
        Whether LayerNorm over the C * E numbers of a parent, with affine, ends the pass.
    """

    uniform: bool = False
    normalize: bool = True

    stored: ClassVar[dict[str, tuple[float, float]]] = {
        "reference": (2.2, 3.5),
        "batched-matmul": (2.2, 4.3),
        "reference-compiled": (2.2, 3.5),
        "batched-matmul-compiled": (2.2, 4.3),
    }

    def arguments(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Draw children and parents from N(0, 1), as LayerNorm leaves them; weights N(0, M / (D I)), as the authors
        initialise; an affine near (1, 0)."""
        pose = workload.rows, workload.columns_out
        made = {
            "children": draw.children(workload.rows, workload.columns_in),
            "weight": draw.weight((workload.parents / (workload.columns_in * workload.children)) ** 0.5),
        }
        if not self.uniform:
            made["parents"] = draw.parents(*pose)
        if self.normalize:
            made["norm_weight"] = 1 + 0.1 * draw.normal(pose[0] * pose[1])
            made["norm_bias"] = 0.1 * draw.normal(pose[0] * pose[1])
        return made

    @property
    def passes(self) -> int:
        """One pass."""
        return 1

    def operations(self, workload: Workload) -> int:
        """Count ``2 (C D E + 2 C E)``: the vote itself, its agreement with the parent, and its share of the sum.

        A uniform pass: ``2 C D E``, since it is linear: one convolution, whose inner dimension the sum over children is
        part of. Softmax and LayerNorm are not counted. Three times the forward pass, which a training step counts, is
        exact with parents: the backward takes 2 C E each for <dS, V> and dQ, 4 C E for dV, 2 C D E each for dP and dW.
        """
        return 2 * workload.pose * (workload.columns_in if self.uniform else workload.columns_in + 2)

    def ours(self, workload: Workload) -> Implementation:
        """Return the package's own pass."""

        def run(
            children: Tensor,
            weight: Tensor,
            parents: Tensor | None = None,
            norm_weight: Tensor | None = None,
            norm_bias: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            routed = functional.inverted_attention_routing(
                children,
                weight,
                parents,
                norm_weight=norm_weight,
                norm_bias=norm_bias,
                eps=EPS,
                window=workload.window,
                normalize=self.normalize,
            )
            assert isinstance(routed, Tensor)
            return (routed,)

        return run

    def reference(self, workload: Workload) -> Implementation:
        """Return the reference's pass."""
        window, spec = workload.window, workload.spec
        scale = workload.pose**-0.5

        def run(
            children: Tensor,
            weight: Tensor,
            parents: Tensor | None = None,
            norm_weight: Tensor | None = None,
            norm_bias: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            query = None if parents is None else to_op(parents, window)
            affine = (norm_weight, norm_bias, scale, EPS, self.normalize, spec)
            result, _ = reference.attention_pass(to_op(children, window), weight, query, None, None, *affine)
            return (from_op(result, window),)

        return run

    def batched_matmul(self, workload: Workload, layout: Layout) -> Implementation:
        """Return the pass over stored votes; a uniform one as one matmul with the inner dimension I * D."""
        scale = workload.pose**-0.5
        pose = [workload.pose]

        def run(
            children: Tensor,
            weight: Tensor,
            parents: Tensor | None = None,
            norm_weight: Tensor | None = None,
            norm_bias: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            seen = seen_poses(children, workload)
            if parents is None:
                sums = _uniform(seen, weight)
            else:
                asked = to_op(parents, workload.window).flatten(0, 2)  # [P, M, C, E]
                query = layout.place(asked * scale, "pmce").contiguous()
                votes = layout.votes(seen, weight)
                shares = torch.softmax(layout.agree(votes, query), layout.parent)
                sums = layout.back(layout.weigh(shares, votes), "pmce")
            if self.normalize:
                sums = F.layer_norm(sums.flatten(2), pose, norm_weight, norm_bias, EPS).view(sums.shape)
            return (to_public(sums, workload, children.shape[0]),)

        return run

    def layout(self, workload: Workload) -> str:
        """With positions last nothing is copied, and everything after the votes vectorises; with children behind
        parents, votes are copied once and two more batched matmuls do the rest. The first is faster for matrix poses on
        a grid, the second for sets and for vector poses."""
        return "imecp" if workload.rows > 1 and workload.positions > 1 else "pmice"


def _uniform(seen: Tensor, weight: Tensor) -> Tensor:
    """Return ``1/M sum_i P_i W_im`` as one matmul with the inner dimension I * D, ``[P, M, C, E]``."""
    count, many, inner, columns = weight.shape
    rows = seen.shape[2]
    left = seen.permute(1, 2, 0, 3).reshape(-1, count * inner)  # [P * C, I * D]
    right = weight.transpose(1, 2).reshape(count * inner, many * columns)
    return (left @ right).view(-1, rows, many, columns).transpose(1, 2) / many
