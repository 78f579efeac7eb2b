"""What the passes of the oracle share: how children are seen, how votes are made, and how gradients go back.

Layout and meaning of the arguments: :mod:`fastcaps.reference`.

A gate of exactly 0 is a child that is not there: it adds nothing to any sum, whatever its numbers are. As long as its
votes stay finite it still gets the derivative that the formulas give it (its gate may want to open again); a child
that is NaN or infinite behind a gate of 0 gets, and gives, no gradient at all. Such a child is called *broken* here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.geometry import window_extent

__all__ = [
    "FROZEN",
    "Sight",
    "accumulation_dtype",
    "collect",
    "gate_backward",
    "inverse_or_zero",
    "make_votes",
    "matmul_votes",
    "presence",
    "see",
    "seen_gate",
    "votes",
    "votes_backward",
    "windows",
    "windows_adjoint",
    "without",
]


FROZEN = 1 << 30
"""A bit of ``needs`` beside those of the gradients: coefficients are constants, no gradient flows through them."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over ``dtype`` are kept: float32 for the half-precision types, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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


def presence(children: Tensor, window: Sequence[int]) -> Tensor | None:
    """Return which children exist, ``[1, Ho, Wo, I]`` of 0 and 1, or None where no window reaches into the padding."""
    if not (window[4] or window[5]):
        return None
    return windows(children.new_ones((1, *children.shape[1:4])), window)


def matmul_votes(seen: Tensor, weight: Tensor, bias: Tensor | None, present: Tensor | None) -> Tensor:
    """Return ``P W + bias`` for children ``seen`` ``[B, Ho, Wo, I, C, D]``, zero where a child is absent."""
    groups, parents, _, columns = weight.shape
    batch, ho, wo, count, rows = seen.shape[:5]
    grouped = seen.reshape(batch, ho, wo, count // groups, groups, rows, seen.shape[5])
    result = torch.einsum("bhwjgcd,gmde->bhwjgmce", grouped, weight)
    result = result.reshape(batch, ho, wo, count, parents, rows, columns)
    if bias is not None:
        result = result + bias
    if present is not None:
        # not a product: a bias or a weight of infinity must not turn an absent child into NaN
        result = result.masked_fill(present[..., None, None, None] == 0, 0.0)
    return result


def votes(children: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int]) -> Tensor:
    """Return all votes ``V[b, l, i, m] = P[b, l, i] W[i mod G, m] + bias[i, m]`` as ``[B, Ho, Wo, I, M, C, E]``.

    Votes are in the accumulation dtype; those of absent (padded) children are zero.
    """
    dtype = accumulation_dtype(children.dtype)
    children, weight = children.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return matmul_votes(windows(children, window), weight, bias, presence(children, window))


def seen_gate(gate: Tensor | None, present: Tensor | None, window: Sequence[int]) -> Tensor | None:
    """Return what multiplies each child's share, ``[B | 1, Ho, Wo, I]``; None where that is 1 everywhere."""
    return present if gate is None else windows(gate, window)  # padded gates are already 0


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
    present = presence(children, window)
    return Sight(windows(children, window), seen_gate(gate, present, window), present)


def make_votes(sight: Sight, weight: Tensor | None, bias: Tensor | None, parents: int) -> Tensor:
    """Return the votes ``[B, Ho, Wo, I, M, C, E]``: ``P W + bias``, or ``P + bias`` for each of ``parents``.

    Votes of absent and of broken children are 0 whatever their bias is.
    """
    if weight is not None:
        result = matmul_votes(sight.children, weight, bias, sight.present)
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
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    children: Tensor,
    needs: int,
    wide: Collection[int] = (),
) -> tuple[Tensor, ...]:
    """Return the gradients in the dtypes of their inputs; what ``needs`` or the call does not have is empty.

    ``wide`` are the positions of those that are in the accumulation dtype even where they are empty.
    """
    accumulated = accumulation_dtype(children.dtype)
    return tuple(
        children.new_empty(0, dtype=accumulated if k in wide else children.dtype)
        if gradient is None or given is None or not needs >> k & 1
        else gradient.to(given.dtype).contiguous()
        for k, (gradient, given) in enumerate(zip(gradients, inputs, strict=True))
    )
