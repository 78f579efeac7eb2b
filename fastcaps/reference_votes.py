"""What the passes of the oracle share: how children are seen, how votes are made, and how gradients go back.

Layout and meaning of the arguments: :mod:`fastcaps.reference`.

A gate of exactly 0 is a child that is not there: it adds nothing to any sum, whatever its numbers are. As long as its
votes stay finite it still gets the derivative that the formulas give it (its gate may want to open again); a child
that is NaN or infinite behind a gate of 0 gets, and gives, no gradient at all. Such a child is called *broken* here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastcaps.reference import _matmul_votes, _presence, _seen_gate, windows, windows_adjoint

__all__ = ["Sight", "collect", "gate_backward", "inverse_or_zero", "make_votes", "see", "votes_backward", "without"]


@dataclass(frozen=True)
class Sight:
    """The children as output positions see them."""

    children: Tensor  # [B, Ho, Wo, I, C, D]
    gate: Tensor | None  # [B | 1, Ho, Wo, I]: gates, 0 where a child is absent; None where 1 everywhere
    present: Tensor | None  # [1, Ho, Wo, I] of 0 and 1; None where no window reaches into the padding
    broken: Tensor | None = None  # [B, Ho, Wo, I]: which silent children were taken out; None before they are known

    @property
    def silent(self) -> Tensor | None:
        """Whether a child adds nothing, ``[B | 1, Ho, Wo, I]``."""
        return None if self.gate is None else self.gate == 0


def see(children: Tensor, gate: Tensor | None, window: Sequence[int]) -> Sight:
    """Return what every output position sees of ``children`` ``[B, H, W, N, C, D]`` and ``gate`` ``[B, H, W, N]``."""
    present = _presence(children, window)
    return Sight(windows(children, window), _seen_gate(gate, present, window), present)


def make_votes(sight: Sight, weight: Tensor | None, bias: Tensor | None, parents: int) -> Tensor:
    """Return the votes ``[B, Ho, Wo, I, M, C, E]``: ``P W + bias``, or ``P + bias`` for each of ``parents``.

    Votes of absent and of broken children are 0 whatever their bias is.
    """
    if weight is not None:
        result = _matmul_votes(sight.children, weight, bias, sight.present)
    else:
        result = sight.children.unsqueeze(4).expand(*sight.children.shape[:4], parents, *sight.children.shape[4:])
        if bias is not None:
            result = result + bias
            if sight.present is not None:
                result = result.masked_fill(sight.present[..., None, None, None] == 0, 0.0)
    return result if sight.broken is None else result.masked_fill(sight.broken[..., None, None, None], 0.0)


def without(sight: Sight, finite: Tensor) -> Sight:
    """Return ``sight`` with zeros for silent children that are not ``finite`` ``[B, Ho, Wo, I]``, cut off from every
    gradient."""
    assert sight.gate is not None and sight.silent is not None
    broken = sight.silent & ~finite
    gate = sight.gate.expand(broken.shape).masked_fill(broken, 0.0)
    return replace(sight, children=sight.children.masked_fill(broken[..., None, None], 0.0), gate=gate, broken=broken)


def inverse_or_zero(numbers: Tensor) -> Tensor:
    """Return 1 / x, and 0 with gradient 0 where x is 0: a parent that no child chose has no mean."""
    nothing = numbers == 0
    return numbers.masked_fill(nothing, 1.0).reciprocal().masked_fill(nothing, 0.0)


def votes_backward(
    grad_votes: Tensor,
    sight: Sight,
    weight: Tensor | None,
    bias: Tensor | None,
    children_shape: Sequence[int],
    window: Sequence[int],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dL/dchildren, dL/dweight and dL/dbias from dL/dvotes; None for what is absent.

    Votes of absent children must have a gradient of 0, as they have by their gates.
    """
    grad_bias = None if bias is None else grad_votes.sum((0, 1, 2)).sum_to_size(bias.shape)
    if weight is None:
        return windows_adjoint(grad_votes.sum(4), children_shape, window), None, grad_bias
    groups = weight.shape[0]
    seen = sight.children
    split = (*seen.shape[:3], seen.shape[3] // groups, groups)
    grouped, grouped_votes = seen.reshape(*split, *seen.shape[4:]), grad_votes.reshape(*split, *grad_votes.shape[4:])
    grad_seen = torch.einsum("bhwjgmce,gmde->bhwjgcd", grouped_votes, weight).reshape(seen.shape)
    grad_weight = torch.einsum("bhwjgcd,bhwjgmce->gmde", grouped, grouped_votes)
    return windows_adjoint(grad_seen, children_shape, window), grad_weight, grad_bias


def gate_backward(grad_gate: Tensor, sight: Sight, children_shape: Sequence[int], window: Sequence[int]) -> Tensor:
    """Return dL/dgate ``[B, H, W, N]`` from that of every child as it is seen, ``[B, Ho, Wo, I]``."""
    if sight.broken is not None:
        grad_gate = grad_gate.masked_fill(sight.broken, 0.0)
    return windows_adjoint(grad_gate, children_shape[:4], window)


def collect(
    gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None], children: Tensor, needs: int
) -> tuple[Tensor, ...]:
    """Return the gradients in the dtypes of their inputs; what ``needs`` or the call does not have is empty."""
    return tuple(
        children.new_empty(0)
        if gradient is None or given is None or not needs >> k & 1
        else gradient.to(given.dtype).contiguous()
        for k, (gradient, given) in enumerate(zip(gradients, inputs, strict=True))
    )
