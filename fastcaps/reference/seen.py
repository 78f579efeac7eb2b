"""What the routings of the oracle share: how children are seen, how votes are made, and how gradients go back.

A gate of exactly 0 is a child that is not there: it adds nothing to any sum, whatever its numbers are. As long as its
votes stay finite it still gets the derivative that the formulas give it (its gate may want to open again); a child
that is NaN or infinite behind a gate of 0 gets, and gives, no gradient at all. Such a child is called *broken* here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.votes import Votes, window_extent

__all__ = [
    "POSE",
    "Seen",
    "collect",
    "gate_backward",
    "inverse_or_zero",
    "log_or_zero",
    "make_votes",
    "see",
    "votes_backward",
    "widen",
    "windows",
    "windows_adjoint",
    "without_broken",
]


POSE = (-2, -1)
"""The dimensions of a pose."""


def widen(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in the dtype in which sums over ``dtype`` are kept."""
    wide = accumulation_dtype(dtype)
    return [None if tensor is None else tensor.to(wide) for tensor in tensors]


def windows(grid: Tensor, window: Sequence[int]) -> Tensor:
    """Return what every output position sees of ``grid`` ``[B, H, W, N, ...]``, as ``[B, Ho, Wo, I, ...]``.

    Child ``i = (ky * kw + kx) * N + n``. Padded positions hold zeros.
    """
    kh, kw, sh, sw, ph, pw, dh, dw = window
    if ph or pw:
        grid = F.pad(grid, [0, 0] * (grid.dim() - 3) + [pw, pw, ph, ph])
    rows, columns = window_extent(window)
    seen = grid.unfold(1, rows, sh)[..., ::dh].unfold(2, columns, sw)[..., ::dw]  # [B, Ho, Wo, N, ..., kh, kw]
    seen = seen.movedim((-2, -1), (3, 4))
    return seen.reshape(seen.shape[:3] + (kh * kw * grid.shape[3],) + grid.shape[4:])


def windows_adjoint(seen: Tensor, grid_shape: Sequence[int], window: Sequence[int]) -> Tensor:
    """Return the adjoint of :func:`windows`: ``[B, Ho, Wo, I, ...]`` summed back to the grid it was cut from."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    batch, height, width, types = grid_shape[:4]
    ho, wo = seen.shape[1:3]
    parts = seen.reshape(seen.shape[:3] + (kh, kw, types) + seen.shape[4:])
    padded = seen.new_zeros((batch, height + 2 * ph, width + 2 * pw, types, *seen.shape[4:]))
    for ky in range(kh):
        for kx in range(kw):
            rows = slice(ky * dh, ky * dh + sh * (ho - 1) + 1, sh)
            columns = slice(kx * dw, kx * dw + sw * (wo - 1) + 1, sw)
            padded[:, rows, columns] += parts[:, :, :, ky, kx]
    if not (ph or pw):
        return padded
    return padded[:, ph : ph + height, pw : pw + width].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Seen:
    """A call as output positions see it, in the accumulation dtype.

    Attributes
    ----------
    votes
        What the votes are made of.
    children
        ``[B, Ho, Wo, I, C, D]``.
    gate
        ``[B | 1, Ho, Wo, I]``, 0 where a child is absent; None where it is 1 everywhere.
    present
        Which children exist, ``[1, Ho, Wo, I]`` of 0 and 1; None where no window reaches into the padding.
    broken
        Which silent children were taken out, ``[B, Ho, Wo, I]``; None before they are known.
    """

    votes: Votes
    children: Tensor
    gate: Tensor | None
    present: Tensor | None
    broken: Tensor | None = None

    @property
    def silent(self) -> Tensor | None:
        """Whether a child adds nothing, ``[B | 1, Ho, Wo, I]``."""
        return None if self.gate is None else self.gate == 0

    def gated(self, shares: Tensor) -> Tensor:
        """Return shares ``[B, Ho, Wo, I, M]`` times the gates."""
        return shares if self.gate is None else shares * self.gate[..., None]


def see(votes: Votes) -> Seen:
    """Return a call as output positions see it."""
    children, weight, bias, gate = widen(votes.children.dtype, *votes[:4])
    assert children is not None
    window, present = votes.window, None
    if window[4] or window[5]:
        present = windows(children.new_ones((1, *children.shape[1:4])), window)
    seen_gate = present if gate is None else windows(gate, window)  # padded gates are already 0
    wide = votes._replace(children=children, weight=weight, bias=bias, gate=gate)
    return Seen(wide, windows(children, window), seen_gate, present)


def make_votes(seen: Seen) -> Tensor:
    """Return all votes ``[B, Ho, Wo, I, M, C, E]``: ``P W + bias``, or ``P + bias`` for each parent.

    Votes of absent and of broken children are 0 whatever their bias is.
    """
    children, (_, weight, bias, _, parents, _) = seen.children, seen.votes
    if weight is None:
        result = children.unsqueeze(4).expand(*children.shape[:4], parents, *children.shape[4:])
    else:
        groups, _, _, columns = weight.shape
        batch, ho, wo, count, rows, depth = children.shape
        grouped = children.reshape(batch, ho, wo, count // groups, groups, rows, depth)
        result = torch.einsum("bhwjgcd,gmde->bhwjgmce", grouped, weight)
        result = result.reshape(batch, ho, wo, count, parents, rows, columns)
    if bias is not None:
        result = result + bias
    if seen.present is not None:
        # not a product: a bias or a weight of infinity must not turn an absent child into NaN
        result = result.masked_fill(seen.present[..., None, None, None] == 0, 0.0)
    return result if seen.broken is None else result.masked_fill(seen.broken[..., None, None, None], 0.0)


def without(seen: Seen, finite: Tensor) -> Seen:
    """Return ``seen`` with zeros for silent children that are not ``finite`` ``[B, Ho, Wo, I]``, cut off from every
    gradient."""
    assert seen.gate is not None and seen.silent is not None
    broken = seen.silent & ~finite
    gate = seen.gate.expand(broken.shape).masked_fill(broken, 0.0)
    return replace(seen, children=seen.children.masked_fill(broken[..., None, None], 0.0), gate=gate, broken=broken)


def without_broken(seen: Seen, look: Callable[[Seen], tuple[Tensor, Tensor]]) -> Seen:
    """Return ``seen`` without the broken children: behind a gate of 0, and with a vote or a logit that is not finite.

    ``look`` returns votes ``[B, Ho, Wo, I, M, C, E]`` and what becomes of them ``[B, Ho, Wo, I, M]``.
    """
    if seen.silent is None:
        return seen
    with torch.no_grad():
        all_votes, numbers = look(seen)
        finite = all_votes.isfinite().all(-1).all(-1) & numbers.isfinite()
    return without(seen, finite.all(-1))


def inverse_or_zero(numbers: Tensor) -> Tensor:
    """Return 1 / x, and 0 with gradient 0 where x is 0: a parent that no child chose has no mean."""
    nothing = numbers == 0
    return numbers.masked_fill(nothing, 1.0).reciprocal().masked_fill(nothing, 0.0)


def log_or_zero(numbers: Tensor) -> Tensor:
    """Return ln x, and 0 with gradient 0 where x is 0: a parent that no child chose has no spread either."""
    return numbers.masked_fill(numbers == 0, 1.0).log()


def votes_backward(grad_votes: Tensor, seen: Seen) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dL/dchildren, dL/dweight and dL/dbias from dL/dvotes; None for what is absent."""
    grid, weight, bias, _, _, window = seen.votes
    if seen.present is not None:
        grad_votes = grad_votes.masked_fill(seen.present[..., None, None, None] == 0, 0.0)
    grad_bias = None if bias is None else grad_votes.sum((0, 1, 2)).sum_to_size(bias.shape)
    if weight is None:
        return windows_adjoint(grad_votes.sum(4), grid.shape, window), None, grad_bias
    groups, children = weight.shape[0], seen.children
    split = (*children.shape[:3], children.shape[3] // groups, groups)
    grouped = children.reshape(*split, *children.shape[4:])
    grouped_votes = grad_votes.reshape(*split, *grad_votes.shape[4:])
    grad_children = torch.einsum("bhwjgmce,gmde->bhwjgcd", grouped_votes, weight).reshape(children.shape)
    grad_weight = torch.einsum("bhwjgcd,bhwjgmce->gmde", grouped, grouped_votes)
    return windows_adjoint(grad_children, grid.shape, window), grad_weight, grad_bias


def gate_backward(grad_gate: Tensor, seen: Seen) -> Tensor:
    """Return dL/dgate ``[B, H, W, N]`` from that of every child as it is seen, ``[B, Ho, Wo, I]``."""
    if seen.broken is not None:
        grad_gate = grad_gate.masked_fill(seen.broken, 0.0)
    return windows_adjoint(grad_gate, seen.votes.children.shape[:4], seen.votes.window)


def collect(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None], needs: int) -> tuple[Tensor, ...]:
    """Return the gradients in the dtypes of their inputs; what ``needs`` or the call does not have is empty."""
    children = inputs[0]
    assert children is not None
    return tuple(
        children.new_empty(0)
        if gradient is None or given is None or not needs >> k & 1
        else gradient.to(given.dtype).contiguous()
        for k, (gradient, given) in enumerate(zip(gradients, inputs, strict=True))
    )
