"""Votes that are never all there: made by a matmul in blocks of children that fit the cache, used there and let go of.

So a skilled PyTorch user routes where stored votes are what takes the time: every turn makes them again, and what it
sums over children adds up. Autograd goes through it; a block is a checkpoint, so that the way back makes its votes
again and none are kept, unless keeping them is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.folded import Folded
from bench.stored import Layout, Stored, divisor, scores, summed

__all__ = ["Blocked", "votes_in"]

Step = Callable[..., tuple[Tensor, ...]]


def _attend(layout: Layout, votes: Tensor, query: Tensor) -> tuple[Tensor, ...]:
    return (layout.weigh(torch.softmax(layout.agree(votes, query), layout.parent), votes),)


def _moments(
    layout: Layout, votes: Tensor, gates: Tensor, worth: Sequence[Tensor], known: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return sums of shares, of distances from the means of the iteration before, and of their squares, which the
    shares need anyway; and of scores."""
    apart = votes - known[1] if known else votes
    squares = apart.square()
    if known:
        gated = gates * torch.softmax(known[0] - layout.agree(squares, known[2]), layout.parent)
    else:
        gated = (gates / votes.shape[layout.parent]).expand(layout.agree_shape(votes))
    found = gated.sum(layout.child, keepdim=True), layout.weigh(gated, apart), layout.weigh(gated, squares)
    return (*found, scores(layout, gates, gated, *worth)) if worth else found


def _block(layout: Layout, step: Step, again: bool, made: Sequence[Tensor | None], given: Sequence[Any]) -> Any:
    """Make a block's votes and run ``step`` over them; with ``again`` the backward makes them again."""

    def run(*tensors: Any) -> tuple[Tensor, ...]:
        return step(layout, layout.votes(*tensors[:3]), *tensors[3:])

    if not again:
        return run(*made, *given)
    return checkpoint(run, *made, *given, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


class Blocked(Stored):
    """What :class:`bench.stored.Stored` returns, of votes in blocks."""

    def __init__(self, layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        groups, many, _, columns = weight.shape
        self._count, places, rows = poses.shape[:3]
        most = max(1, layout.block // (places * many * rows * columns * weight.element_size()))
        # blocks of one size: whole groups of children, or so many of the children
        self._step = groups * divisor(self._count // groups, most // groups)
        if groups == self._count:
            self._step = divisor(groups, most)
        self.layout, self._given = layout, (poses, weight)
        if layout.compiled:  # positions lie together in memory, for vectors
            poses = poses.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        self._made = self._cut(poses, 0), self._cut(weight, 0), self._cut(bias, 0)

    def _cut(self, tensor: Tensor | None, child: int) -> Sequence[Tensor | None]:
        """Return a tensor in blocks of children; whole for every block where they share it."""
        if tensor is None or tensor.shape[child] < self._count:
            return [tensor] * (self._count // self._step)
        return tensor.split(self._step, child)

    def _sums(self, step: Step, each: Sequence[Tensor], *known: Any) -> list[Tensor]:
        """Add up what ``step`` returns of every block; ``each`` has a value of every child, or one for all."""
        layout, total = self.layout, []
        again, run = torch.is_grad_enabled() and not layout.kept, layout.step(_block)
        for block in zip(*self._made, *(self._cut(tensor, layout.child) for tensor in each), strict=True):
            gates, worth = block[3:4], block[4:]
            given = (*gates, worth, *known) if gates else known
            found = run(layout, step, again, block[:3], given)
            total = [before + one for before, one in zip(total, found, strict=True)] if total else [*found]
        return total

    def mean(self) -> Tensor:
        return self.layout.place(summed(*self._given), "pmce") / self._count

    def attend(self, query: Tensor) -> Tensor:
        return self._sums(_attend, [], query)[0]

    def moments(
        self, gates: Tensor, eps: float, log_weight: Tensor | None = None, worth: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        known = () if log_weight is None else (log_weight, self._means, 0.5 / self._variances)
        counts, first, second, *score = self._sums(_moments, [gates, *worth], known)
        before = self._means if known else torch.zeros_like(first)
        means = (first + counts * before) / (counts + eps)
        off = means - before
        variances = ((second - off * (2 * first - counts * off)) / (counts + eps)).clamp(min=0) + eps
        self._means, self._variances = means, variances
        return counts, means, variances, *score


def votes_in(layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> Stored:
    """Return the votes of ``poses`` ``[I, P, C, D]``, stored, in blocks or folded away, as the layout says."""
    kind = Folded if layout.folded else Blocked if layout.block else Stored
    return kind(layout, poses, weight, bias)
