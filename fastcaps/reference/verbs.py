"""The reference of the four verbs: scores and sums of votes, a block of children at a time, in differentiable PyTorch.

A block's votes are computed, used and freed, and computed again in the backward. So the largest tensors are the votes
of one block, and one value for each child and parent.
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
    """The votes of a call, which ``make`` computes a block of children at a time.

    "places" means B, for grids B, Ho, Wo; all results have the accumulation dtype.

    Attributes
    ----------
    make
        ``make(first, last, absent)`` returns the votes of children first to last - 1,
        ``[*places, last - first, M, C, E]``; those of absent children are arbitrary.
    blocks
        The ranges of children.
    shape
        Of the coefficients, ``[*places, I, M]``.
    like
        A tensor with the votes' device, and the dtype to which parents are rounded.
    absent
        Which children have no votes, ``[*places or 1, I]``, or None.
    gate
        The children's gates, ``[*places or 1, I]``, 0 for absent children; None if all are 1.
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
        """Return coefficients with 0 for absent children, in place unless under torch.func."""
        if self.absent is None:
            return coefficients
        fill = coefficients.masked_fill if is_transformed() else coefficients.masked_fill_
        return fill(self.absent[..., None], 0.0)

    def zeros(self) -> Tensor:
        """Return zeros in the coefficients' shape."""
        return self.like.new_zeros(self.shape, dtype=accumulation_dtype(self.dtype))

    def uniform(self) -> Tensor:
        """Return coefficients 1 / M, and 0 for absent children."""
        return self.present(self.zeros().fill_(1.0 / self.shape[-1]))

    def scores(self, targets: Tensor, precisions: Tensor | None = None, squared: bool = False) -> Tensor:
        """Return ``<Y_m, V_im>``, or if ``squared`` ``sum_ce p_m (V_im - Y_m)^2``, as ``[*places, I, M]``.

        Y, the targets, and p are ``[*places, M, C, E]``. Scores of absent children are 0.
        """

        def block(made: Tensor, _: Range) -> Tensor:
            if not squared:
                return torch.einsum("...mce,...imce->...im", targets, made)
            squares = made.square()
            return (squares if precisions is None else squares * precisions.unsqueeze(-4)).sum((-2, -1))

        return torch.cat(self.each(block, targets if squared else None, targets, precisions), -2)

    def sums(self, coefficients: Tensor, means: Tensor | None = None, power: int = 1) -> Tensor:
        """Return ``sum_i r_im (V_im - mean_m)^power`` ``[*places, M, C, E]``, for r ``[*places, I, M]``."""

        def block(made: Tensor, span: Range) -> Tensor:
            powers = made if power == 1 else made.square()
            return torch.einsum("...im,...imce->...mce", coefficients[..., span[0] : span[1], :], powers)

        first, *others = self.each(block, means, coefficients)
        for other in others:
            first = first + other
        return first

    def made(self, first: int, last: int, means: Tensor | None = None) -> Tensor:
        """Return the votes of a block minus the means; 0 for absent children."""
        absent = None if self.absent is None else self.absent[..., first:last]
        made = self.make(first, last, absent)
        if means is not None:
            made = made - means.unsqueeze(-4)
        # not by a product, which would turn infinity in a bias or weight into NaN
        return made if absent is None else made.masked_fill(absent[..., None, None, None], 0.0)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> VoteBlocks:
        """Return blocks whose votes are ``function`` of these votes."""
        return replace(self, make=lambda first, last, _: function(self.made(first, last)))

    def gated(self, coefficients: Tensor) -> Tensor:
        """Return coefficients ``[*places, I, M]`` times the gates."""
        return coefficients if self.gate is None else coefficients * self.gate[..., None]

    def without_broken(self, numbers: Callable[[], Tensor] | None = None, squared: bool = False) -> VoteBlocks:
        """Return the votes without *broken* children, which have a gate of 0 and votes that are not finite.

        A gate of 0 means that a child does not exist, whatever its pose. If its votes are finite it still gets its
        ordinary gradient; a broken child gets no gradient, and has no effect on others'. ``numbers`` returns other
        values that must be finite, ``[*places, I, M]``. With ``squared`` squared distances between votes must be, too.
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
        """Return ``function(votes - means, range)`` of every block; the backward computes the votes again.

        Autograd raises if means or a tensor in ``used``, those that the function reads, changed in place before.
        """

        def run(first: int, last: int, *_: Tensor | None) -> Tensor:
            made = self.made(first, last, means)
            with without_autocast(made.device.type):
                return function(made, (first, last))

        # no checkpoints for a single block, nor under torch.func or a trace, which do not support them
        if len(self.blocks) == 1 or not torch.is_grad_enabled() or is_transformed() or torch.compiler.is_compiling():
            return [run(*block) for block in self.blocks]
        again: Any = checkpoint
        used = (means, *used)
        return [again(run, *block, *used, use_reentrant=False, preserve_rng_state=False) for block in self.blocks]


def blocks_of(votes: VoteInputs | VoteBlocks) -> VoteBlocks:
    """Return the votes of a call in blocks: one if it is small, else separate ones for each position of the window."""
    if isinstance(votes, VoteBlocks):
        return votes
    if isinstance(votes, MadeVotes):
        (gate,) = widen(votes.children.dtype, votes.gate)
        maker = votes.maker
        return VoteBlocks(
            lambda i, j, _: maker(i, j), maker.blocks, votes.coefficients_shape, votes.children, None, gate
        )
    children, weight, bias, gate = widen(votes.children.dtype, *votes[:4])
    assert children is not None
    parents, count, types = votes.parents, votes.seen, children.shape[-3]
    rows, depth, columns = votes.pose
    shape = votes.coefficients_shape
    step = max(1, BLOCK // (max(prod(shape[:-2]) * rows, depth) * parents * columns))  # by size of votes or matrices
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
        if absent is not None:  # NaN in a child would give NaN in the gradient of its matrix
            some = some.masked_fill(absent[..., None, None], 0.0)
        return make_votes(some, weight, bias, parents, first, count)

    presence = present(votes)
    absent = None if presence is None else presence == 0
    if gate is not None and not votes.is_set:
        gate = windows(gate, votes.window)
    return VoteBlocks(make, blocks, shape, votes.children, absent, presence if gate is None else gate)


def make_votes(
    children: Tensor, weight: Tensor | None, bias: Tensor | None, parents: int, first: int = 0, count: int = 0
) -> Tensor:
    """Return the votes ``[*places, i, M, C, E]`` of children ``[*places, i, C, D]``: ``P W`` or P, and the bias.

    The children start at ``first`` among ``count`` (0: they are all).
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
    """Return which children exist, ``[1, Ho, Wo, I]`` of 0 and 1; None without padding."""
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
    votes: VoteInputs, coefficients: Tensor, targets: Tensor, precisions: Tensor | None, squared: bool, needs: int
) -> tuple[Tensor, ...]:
    """Return the gradients of ``sum_im r_im score_im`` in children, weight and bias."""

    def run(*parts: Any) -> tuple[Tensor]:
        inputs = VoteInputs._make((*parts, None, votes.parents, votes.window))
        return (vote_scores(inputs, targets, precisions, squared),)

    return differentiate(run, votes[:3], (coefficients,), needs)
