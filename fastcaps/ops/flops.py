"""The numbers of operations of calls, for torch's FLOP counter; tensors are given by their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastcaps.ops.signature import Signature
from fastcaps.votes import output_size


def forward_flops(routing: Signature, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Return the multiplications and additions of a call.

    An iteration computes the votes, one sum over them for the agreement, and ``moments`` sums for the results. A first
    iteration without a state is a single product if there is one moment, as it is linear in the children.
    """
    own = routing.given(shapes)[1]
    votes, one = _votes_and_sum(shapes)
    first = votes + (0 if routing.moments == 1 else routing.moments * one)
    each = votes + (1 + routing.moments) * one
    count = routing.iterations(own)
    return count * each if getattr(own, routing.state[0]) is not None else first + (count - 1) * each


def backward_flops(routing: Signature, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Return those of a backward: votes, agreement, gain, and the two terms of dV, but not dQ."""
    votes, one = _votes_and_sum(shapes[len(routing.heads) :])
    count, needs = next(head for head in shapes[: len(routing.heads)] if head is not None)[0], shapes[-1]
    return count * (votes * (1 + (needs & 1) + (needs >> 1 & 1)) + 4 * one)


def _votes_and_sum(shapes: Sequence[Any]) -> tuple[int, int]:
    """Return the operations of computing all votes, and of one sum over them."""
    (batch, *grid, types, rows, depth), weight, _, _, parents, window = shapes[:6]
    ho, wo = output_size(window, *(grid or (1, 1)))
    pairs = batch * ho * wo * window[0] * window[1] * types * parents
    columns = depth if weight is None else weight[3]
    return 0 if weight is None else 2 * pairs * rows * depth * columns, 2 * pairs * rows * columns
