"""What EM routing and Heinsen's share over stored votes: the weighted moments of a turn."""

from __future__ import annotations

from torch import Tensor

from bench.layouts import Layout

__all__ = ["moments", "operations"]


def operations(pose: int, columns_in: int, iterations: int) -> int:
    """Count operations for a vote of ``pose`` numbers: ``2 C D E`` for itself, once; ``6 C E`` a turn for the moments
    (weighted sum 2, difference from the mean 1, weighted sum of squares 3), ``2 C E`` more in every turn but the first
    for the distance, whose squares the turn before has."""
    return pose * (2 * columns_in + 6 * iterations + 2 * (iterations - 1))


def moments(votes: Tensor, layout: Layout, gated: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts, means, squared differences ``(V_im - means_m)^2``, and variances without a floor.

    ``gated`` are the coefficients times the children's gates; ``eps`` is added to the counts under the moments. The
    next turn's distances need the same squares, so they are made once.
    """
    counts = gated.sum(layout.child, keepdim=True)
    inverse = 1 / (counts + eps)
    means = layout.weigh(gated, votes) * inverse
    squares = (votes - means).square()
    return counts, means, squares, layout.weigh(gated, squares) * inverse
