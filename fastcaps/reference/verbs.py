"""Votes a block of children at a time, and what routings ask of them: scores and sums, in plain differentiable PyTorch.

This is the reference of the four verbs. A block's votes are made, used and dropped; on the way back they are made
again. So the largest things in memory are one block, and one number for each child and parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastcaps.checks import accumulation_dtype, widen
from fastcaps.made import BLOCK, MadeVotes
from fastcaps.reference.derivatives import differentiate
from fastcaps.votes import VoteInputs, window_views, windows, without_autocast
from fastcaps.watchers import is_transformed

Range = tuple[int, int]


@dataclass(frozen=True)
class VoteBlocks:
    """The votes of a call, which ``make`` makes a block of children at a time.

    "places" means B, on grids B, Ho, Wo; all results are in the accumulation dtype.

    Attributes
    ----------
    make
        ``make(first, last, absent)`` returns the votes of children first to last - 1,
        ``[*places, last - first, M, C, E]``; those of absent children may be anything.
    blocks
        The ranges of children.
    shape
        Of the coefficients, ``[*places, I, M]``.
    like
        A tensor of the votes' device, and of the dtype to which parents are rounded.
    absent
        Which children have no votes, ``[*places or 1, I]``; None: there are none.
    gate
        The gates of the children, ``[*places or 1, I]``, 0 where a child is absent; None where all are 1.
    """

    make: Callable[[int, int, Tensor | None], Tensor]
    blocks: Sequence[Range]
    shape: tuple[int, ...]
    like: Tensor
    absent: Tensor | None = None
    gate: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which parents are rounded."""
        return self.like.dtype

    def present(self, coefficients: Tensor) -> Tensor:
        """Return coefficients with those of absent children 0, in place where nothing is mapped."""
        if self.absent is None:
            return coefficients
        fill = coefficients.masked_fill if is_transformed() else coefficients.masked_fill_
        return fill(self.absent[..., None], 0.0)

    def zeros(self) -> Tensor:
        """Return zeros in the coefficients' shape."""
        return self.like.new_zeros(self.shape, dtype=accumulation_dtype(self.dtype))

    def uniform(self) -> Tensor:
        """Return coefficients that go to all parents alike: 1 / M, and 0 of an absent child."""
        return self.present(self.zeros().fill_(1.0 / self.shape[-1]))

    def scores(self, targets: Tensor, precisions: Tensor | None = None, squared: bool = False) -> Tensor:
        """Return ``<Y_m, V_im>``, or if ``squared`` ``sum_ce p_m (V_im - Y_m)^2``, as ``[*places, I, M]``.

        Y, the targets, and p are ``[*places, M, C, E]``. Absent children have 0.
        """

        def block(made: Tensor, _: Range) -> Tensor:
            if not squared:
                return torch.einsum("...mce,...imce->...im", targets, made)
            squares = made.square()
            return (squares if precisions is None else squares * precisions.unsqueeze(-4)).sum((-2, -1))

        return torch.cat(self.each(block, targets if squared else None, targets, precisions), -2)

    def sums(self, coefficients: Tensor, means: Tensor | None = None, power: int = 1) -> Tensor:
        """Return ``sum_i r_im (V_im - mean_m)^power`` ``[*places, M, C, E]``, for r ``[*places, I, M]``."""

        def block(made: Tensor, own: Range) -> Tensor:
            powers = made if power == 1 else made.square()
            return torch.einsum("...im,...imce->...mce", coefficients[..., own[0] : own[1], :], powers)

        first, *others = self.each(block, means, coefficients)
        for other in others:
            first = first + other
        return first

    def made(self, first: int, last: int, means: Tensor | None = None) -> Tensor:
        """Return the votes of a block, less the means; 0 of absent children."""
        absent = None if self.absent is None else self.absent[..., first:last]
        made = self.make(first, last, absent)
        if means is not None:
            made = made - means.unsqueeze(-4)
        # not a product: a bias or a weight of infinity would become NaN
        return made if absent is None else made.masked_fill(absent[..., None, None, None], 0.0)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> VoteBlocks:
        """Return blocks whose votes are ``function`` of these votes."""
        return replace(self, make=lambda first, last, _: function(self.made(first, last)))

    def gated(self, coefficients: Tensor) -> Tensor:
        """Return coefficients ``[*places, I, M]`` times the gates."""
        return coefficients if self.gate is None else coefficients * self.gate[..., None]

    def without_broken(self, numbers: Callable[[], Tensor] | None = None, squared: bool = False) -> VoteBlocks:
        """Return the votes without *broken* children: those behind a gate of 0 whose votes are not finite.

        A gate of 0 is a child that is not there, whatever its pose is. As long as its votes are finite it still gets
        the derivative that the formulas give it; a broken one gets, and gives, no gradient at all. ``numbers`` returns
        what else has to be finite, ``[*places, I, M]``. With ``squared`` the squared distances between votes have to
        be finite too.
        """
        if self.gate is None:
            return self
        with torch.no_grad():

            def finite(made: Tensor, _: Range) -> Tensor:
                return ((2 * made).square() if squared else made).isfinite().all(-1).all(-1)

            whole = torch.cat(self.each(finite), -2)
            if numbers is not None:
                whole = whole & numbers().isfinite()
            broken = (self.gate == 0) & ~whole.all(-1)
        absent = broken if self.absent is None else broken | self.absent
        return replace(self, absent=absent, gate=self.gate.expand(broken.shape).masked_fill(broken, 0.0))

    def each(
        self, function: Callable[[Tensor, Range], Tensor], means: Tensor | None = None, *used: Tensor | None
    ) -> list[Tensor]:
        """Return ``function(votes - means, range)`` of every block; the votes are made again on the way back.

        Autograd then raises if one of the tensors that the function ``used``, or means, changed in place.
        """

        def run(first: int, last: int, *_: Tensor | None) -> Tensor:
            made = self.made(first, last, means)
            with without_autocast(made.device.type):
                return function(made, (first, last))

        # one block may as well stay; neither torch.func nor a trace knows checkpoints
        if len(self.blocks) == 1 or not torch.is_grad_enabled() or is_transformed() or torch.compiler.is_compiling():
            return [run(*block) for block in self.blocks]
        again: Any = checkpoint
        used = (means, *used)
        return [again(run, *block, *used, use_reentrant=False, preserve_rng_state=False) for block in self.blocks]


def blocks_of(votes: VoteInputs | VoteBlocks) -> VoteBlocks:
    """Return the votes of a call in blocks: all in one if that is small, else each of one position under the window."""
    if isinstance(votes, VoteBlocks):
        return votes
    if isinstance(votes, MadeVotes):
        (gate,) = widen(votes.children.dtype, votes.gate)
        maker = votes.maker
        return VoteBlocks(lambda i, j, _: maker(i, j), maker.blocks, votes.shares, votes.children, None, gate)
    children, weight, bias, gate = widen(votes.children.dtype, *votes[:4])
    assert children is not None
    many, count, types = votes.parents, votes.seen, children.shape[-3]
    rows, depth, columns = votes.pose
    shape = votes.shares
    step = max(1, BLOCK // (max(prod(shape[:-2]) * rows, depth) * many * columns))  # by their votes, or their matrices
    blocks = [(0, count)]
    if step < count:
        starts = [(place, first) for place in range(0, count, types) for first in range(0, types, step)]
        blocks = [(place + first, place + min(first + step, types)) for place, first in starts]

    def make(first: int, last: int, absent: Tensor | None) -> Tensor:
        if votes.is_set:
            some = children[:, first:last]
        elif last - first == count:
            some = windows(children, votes.window)
        else:
            (row, column), start = divmod(first // types, votes.window[1]), first % types
            some = window_views(children, votes.window)[:, :, :, row, column, start : start + last - first]
        if absent is not None:  # NaN in a child would be NaN in the gradient of its matrix
            some = some.masked_fill(absent[..., None, None], 0.0)
        return make_votes(some, weight, bias, many, first, count)

    presence = present(votes)
    absent = None if presence is None else presence == 0
    if gate is not None and not votes.is_set:
        gate = windows(gate, votes.window)
    return VoteBlocks(make, blocks, shape, votes.children, absent, presence if gate is None else gate)


def make_votes(
    children: Tensor, weight: Tensor | None, bias: Tensor | None, parents: int, first: int = 0, count: int = 0
) -> Tensor:
    """Return the votes ``[*places, i, M, C, E]`` of children ``[*places, i, C, D]``: ``P W`` or P, and the bias.

    They are the children from ``first`` on, of ``count`` (0: they are all).
    """
    size = children.shape[-3]
    if weight is None:
        made = children.unsqueeze(-3).expand(*children.shape[:-2], parents, *children.shape[-2:])
    else:
        if count and size < count:
            weight = weight[torch.arange(first, first + size, device=weight.device) % weight.shape[0]]
        groups = children.unflatten(-3, (-1, weight.shape[0]))
        made = torch.einsum("...jgcd,gmde->...jgmce", groups, weight).flatten(-5, -4)
    return made if bias is None else made + (bias if bias.shape[0] == 1 else bias[first : first + size])


def present(votes: VoteInputs) -> Tensor | None:
    """Return which children exist, ``[1, Ho, Wo, I]`` of 0 and 1; None where no window reaches into the padding."""
    if not (votes.window[4] or votes.window[5]):
        return None
    shape = (1, *votes.children.shape[1:4])
    return windows(votes.children.new_ones(shape, dtype=accumulation_dtype(votes.children.dtype)), votes.window)


# ---- the ops' kernels ------------------------------------------------------------------------------------------------


def vote_scores(votes: VoteInputs, targets: Tensor, precisions: Tensor | None, squared: bool) -> Tensor:
    """Return ``<Y_m, V_im>``, or if ``squared`` ``sum_ce p_m (V_im - Y_m)^2``, of each child and parent."""
    return blocks_of(votes).scores(targets, precisions, squared)


def vote_sums(votes: VoteInputs, coefficients: Tensor, means: Tensor | None, power: int) -> Tensor:
    """Return ``sum_i r_im (V_im - mean_m)^power`` of each parent."""
    return blocks_of(votes).sums(coefficients, means, power)


def vote_pull(
    votes: VoteInputs,
    coefficients: Tensor,
    targets: Tensor,
    precisions: Tensor | None,
    squared: bool,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of ``sum_im r_im score_im`` in children, weight and bias."""

    def run(*parts: Any) -> tuple[Tensor]:
        own = VoteInputs._make((*parts, None, votes.parents, votes.window))
        return (vote_scores(own, targets, precisions, squared),)

    return differentiate(run, votes[:3], (coefficients,), needs)
