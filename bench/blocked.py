"""Votes that are never all there: made by a matmul in blocks of children that fit the cache, used there and let go of.

So a skilled PyTorch user routes where stored votes are what takes the time: every turn makes them again, and what it
sums over children adds up. Autograd goes through it; a block is a checkpoint, so that the way back makes its votes
again and none are kept, unless keeping them is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.stored import Layout, Stored, scores, summed

__all__ = ["Blocked", "votes_in"]

Step = Callable[..., tuple[Tensor, ...]]


class Blocked(Stored):
    """What :class:`bench.stored.Stored` is asked, of votes in blocks."""

    def __init__(self, layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        groups, many, _, columns = weight.shape
        self._count, places, rows = poses.shape[:3]
        step = max(1, layout.block // (places * many * rows * columns * weight.element_size()))
        self._step = step if groups == self._count else max(1, step // groups) * groups  # whole groups of children
        self.layout, self._given, self._many = layout, (poses, weight), many
        self._made = self._cut(poses, 0), self._cut(weight, 0), self._cut(bias, 0)

    def _cut(self, tensor: Tensor | None, child: int) -> Sequence[Tensor | None]:
        """Return a tensor in blocks of children; whole for every block where they share it."""
        if tensor is None or tensor.shape[child] < self._count:
            return [tensor] * -(-self._count // self._step)
        return tensor.split(self._step, child)

    def _sums(self, step: Step, each: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
        """Add up ``step(votes, *each, *known)`` over blocks; ``each`` has a number, or one for all, of every child."""

        def run(poses: Tensor, weight: Tensor, bias: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
            return step(self.layout.votes(poses, weight, bias), *given)

        total: list[Tensor] = []
        for block in zip(*self._made, *(self._cut(tensor, self.layout.child) for tensor in each), strict=True):
            if torch.is_grad_enabled() and not self.layout.kept:
                options = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
                found = checkpoint(run, *block, *known, **options)
            else:
                found = run(*block, *known)
            total = [before.add_(one) for before, one in zip(total, found, strict=True)] if total else [*found]
        return total

    def mean(self) -> Tensor:
        return self.layout.place(summed(*self._given), "pmce") / self._count

    def attend(self, query: Tensor) -> Tensor:
        layout = self.layout

        def step(votes: Tensor, query: Tensor) -> tuple[Tensor, ...]:
            return (layout.weigh(torch.softmax(layout.agree(votes, query), layout.parent), votes),)

        return self._sums(step, [], [query])[0]

    def moments(
        self, gates: Tensor, eps: float, log_weight: Tensor | None = None, worth: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Sum up distances from the means of the turn before, and their squares, which the shares need anyway."""
        layout, betas = self.layout, len(worth)
        known = () if log_weight is None else (log_weight, self._means, 0.5 / self._variances)

        def step(votes: Tensor, gates: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            worth, known = given[:betas], given[betas:]
            apart = votes - known[1] if known else votes
            squares = apart.square()
            if known:
                gated = gates * torch.softmax(known[0] - layout.agree(squares, known[2]), layout.parent)
            else:
                gated = (gates / self._many).expand(layout.agree_shape(votes))
            found = gated.sum(layout.child, keepdim=True), layout.weigh(gated, apart), layout.weigh(gated, squares)
            return (*found, scores(layout, gates, gated, *worth)) if worth else found

        counts, first, second, *score = self._sums(step, [gates, *worth], known)
        before = self._means if known else torch.zeros_like(first)
        means = (first + counts * before) / (counts + eps)
        off = means - before
        variances = ((second - off * (2 * first - counts * off)) / (counts + eps)).clamp(min=0) + eps
        self._means, self._variances = means, variances
        return counts, means, variances, *score


def votes_in(layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> Stored:
    """Return the votes of ``poses`` ``[I, P, C, D]``, stored or in blocks, as the layout says."""
    return (Blocked if layout.block else Stored)(layout, poses, weight, bias)
