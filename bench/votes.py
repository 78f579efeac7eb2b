"""Votes as a skilled PyTorch user makes them: stored all at once, or in blocks of children that fit the cache.

A layout is a word of five letters: ``i`` children, ``m`` parents, ``c`` and ``e`` the rows and columns of a pose, ``p``
positions (batch and grid). Coefficients, queries and sums keep all five dimensions, of size 1 where they have none, so
that every step of a routing is written once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Step = Callable[..., tuple[Tensor, ...]]


def squash(vectors: Tensor, pose: tuple[int, int]) -> Tensor:
    """Return ``v |v| / (1 + |v|²)``, the length taken over the dimensions ``pose``."""
    squares = vectors.square().sum(pose, keepdim=True)
    return vectors * (squares.sqrt() / (1 + squares))


def unpadded(tensor: Tensor, work: Any) -> Tensor:
    """Return a public tensor ``[B, N, H, W, ...]`` or ``[B, N, ...]`` as a grid ``[B, H, W, N, ...]``."""
    return tensor[:, None, None] if work.grid is None else tensor.movedim(1, 3)


def seen(tensor: Tensor, work: Any) -> Tensor:
    """Return what each position sees of the children's poses or gates, ``[I, P, ...]``; ``work`` has the sizes."""
    size, stride = work.kernel_size, work.stride
    unfolded = unpadded(tensor, work).unfold(1, size, stride).unfold(2, size, stride)  # [B, Ho, Wo, N, ..., ky, kx]
    under = unfolded.movedim((-2, -1, 3), (0, 1, 2))  # [ky, kx, N, B, Ho, Wo, ...]
    return under.flatten(0, 2).flatten(1, 3)


def as_parents(tensor: Tensor, work: Any, batch: int) -> Tensor:
    """Return what belongs to parents, ``[P, M, ...]``, in public layout."""
    split = tensor.reshape(batch, *work.output_grid, *tensor.shape[1:])
    return split if work.grid is None else split.movedim(3, 1)


def summed(poses: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of all votes ``[P, M, C, E]`` of ``poses`` ``[I, P, C, D]`` by one matmul: it is linear."""
    groups, many, inner, columns = weight.shape
    alike = poses.unflatten(0, (-1, groups)).sum(0) if groups < poses.shape[0] else poses
    left = alike.permute(1, 2, 0, 3).reshape(-1, groups * inner)  # [P * C, G * D]
    right = weight.transpose(1, 2).reshape(groups * inner, many * columns)
    return (left @ right).view(*poses.shape[1:3], many, columns).transpose(1, 2)


def divisor(count: int, most: int) -> int:
    """Return the largest divisor of ``count`` that is ``most`` or less: all blocks have one shape."""
    return next(size for size in range(max(1, min(count, most)), 0, -1) if count % size == 0)


def moments_about(shift: Tensor, counts: Tensor, first: Tensor, second: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return means and variances from the sums of shares, and of what is off a ``shift`` and its squares, weighted with
    them. Groups of children, each with its own shift, come first; ``second`` is of all groups."""
    total = counts.sum(0) + eps
    means = (first + counts * shift).sum(0) / total
    off = shift - means
    about = second + (2 * off * first + counts * off.square()).sum(0)
    return means, about.clamp(min=0) / total + eps


@dataclass
class Layout:
    """An order of the votes' dimensions, and a routing's steps in it."""

    axes: str  # a permutation of imcep
    block: int = 0  # bytes of votes (of shares, where votes are folded) that are made at a time; 0: all, and stored
    folded: bool = False  # make no votes (bench/folded.py)
    compiled: dict[str, Any] | None = None  # options of torch.compile for the function that every block runs
    _steps: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.child, self.parent = self.axes.index("i"), self.axes.index("m")
        self.pose = (self.axes.index("c"), self.axes.index("e"))
        self.einsum = self.axes in ("pmice", "pimce")  # whose sums over products are batched matmuls

    def step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a block as it is to be called: compiled, if that was asked for."""
        if self.compiled is None:
            return run
        if run not in self._steps:
            self._steps[run] = torch.compile(run, dynamic=False, fullgraph=True, options=self.compiled)
        return self._steps[run]

    def place(self, tensor: Tensor, axes: str) -> Tensor:
        """Return a view of ``tensor``, whose dimensions are called ``axes``, in this layout."""
        placed = tensor.permute([axes.index(axis) for axis in self.axes if axis in axes])
        for k, axis in enumerate(self.axes):
            if axis not in axes:
                placed = placed.unsqueeze(k)
        return placed

    def back(self, tensor: Tensor, axes: str) -> Tensor:
        """Return a tensor of this layout with the dimensions ``axes``; those left out must be of size 1."""
        rest = [axis for axis in self.axes if axis not in axes]
        moved = tensor.permute([self.axes.index(axis) for axis in (*axes, *rest)])
        return moved.reshape(moved.shape[: len(axes)])

    def votes(self, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the votes of ``poses`` ``[I, P, C, D]`` by one product over the groups of ``weight`` ``[G, M, D, E]``.

        A batched matmul has the factor left that the layout names first, so that as little as can be is copied
        afterwards: nothing where every child has its own matrices and ``i`` comes first, or where all share them.
        """
        groups, many, inner, columns = weight.shape
        count, places, rows = poses.shape[:3]
        if self.compiled is not None and inner <= 8:  # sums that short are unrolled, and fused with what follows
            own = weight.repeat(count // groups, 1, 1, 1)
            terms = [self.place(poses[..., d], "ipc") * self.place(own[:, :, d], "ime") for d in range(inner)]
            made = sum(terms[1:], terms[0])
        else:
            split = poses.unflatten(0, (count // groups, groups))  # named "igpcd": child i * G + g
            factors = {"igpcd": split, "gmde": weight}
            if next(axis for axis in self.axes if axis != "i" or groups == 1) in "me":
                factors = dict(reversed(factors.items()))
            sizes = {"i": count, "m": many, "e": columns, "c": rows, "p": places}
            product = f"{','.join(factors)}->{self.axes.replace('i', 'ig')}"
            made = torch.einsum(product, *factors.values()).reshape([sizes[axis] for axis in self.axes])
        return made if bias is None else made + self.place(bias, "imce")

    def _einsum(self, first: Tensor, second: Tensor, summed: str) -> Tensor:
        """Return the product of two tensors of this layout, summed over the dimensions ``summed``."""
        out = "".join(axis for axis in self.axes if axis not in summed)
        return self.place(torch.einsum(f"{self.axes},{self.axes}->{out}", first, second), out)

    def agree(self, votes: Tensor, query: Tensor) -> Tensor:
        """Return ``<query_m, votes_im>`` over the numbers of a pose."""
        return self._einsum(votes, query, "ce") if self.einsum else (votes * query).sum(self.pose, keepdim=True)

    def weigh(self, shares: Tensor, votes: Tensor) -> Tensor:
        """Return ``sum_i shares_im votes_im``."""
        return self._einsum(shares, votes, "i") if self.einsum else (votes * shares).sum(self.child, keepdim=True)


def _attend(layout: Layout, votes: Tensor, query: Tensor) -> tuple[Tensor, ...]:
    return (layout.weigh(torch.softmax(layout.agree(votes, query), layout.parent), votes),)


def _moments(
    layout: Layout, votes: Tensor, gates: Tensor, worth: Sequence[Tensor], known: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return sums of shares, of distances from the means of the iteration before, and of their squares, which the
    shares need anyway; and of scores: what using the children is worth, less what ignoring them is."""
    apart = votes - known[1] if known else votes
    squares = apart.square()
    if known:
        gated = gates * torch.softmax(known[0] - layout.agree(squares, known[2]), layout.parent)
    else:
        one_a_vote = [1 if axis in layout.pose else size for axis, size in enumerate(votes.shape)]
        gated = (gates / votes.shape[layout.parent]).expand(one_a_vote)
    found = gated.sum(layout.child, keepdim=True), layout.weigh(gated, apart), layout.weigh(gated, squares)
    if not worth:
        return found
    use, ignore = worth
    return (*found, (use * gated - ignore * (gates - gated)).sum(layout.child, keepdim=True))


def _block(layout: Layout, step: Step, again: bool, made: Sequence[Tensor | None], given: Sequence[Any]) -> Any:
    """Run ``step`` over a block's votes, stored or made here; with ``again`` the backward makes them again."""

    def run(*tensors: Any) -> tuple[Tensor, ...]:
        votes = tensors[0] if len(made) == 1 else layout.votes(*tensors[: len(made)])
        return step(layout, votes, *tensors[len(made) :])

    if not again:
        return run(*made, *given)
    return checkpoint(run, *made, *given, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


class Blocks:
    """The votes of one call, and what an iteration needs of them. All tensors have the layout's dimensions.

    Blocks are made whenever they are needed, each a checkpoint: the backward makes its votes again, and none are kept.
    Votes that are stored are one block, made once.
    """

    def __init__(self, layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        groups, many, _, columns = weight.shape
        self._count, places, rows = poses.shape[:3]
        self.layout, self._given = layout, (poses, weight)
        if not layout.block:
            self._step, self._made = self._count, [[layout.votes(poses, weight, bias)]]
            return
        most = max(1, layout.block // (places * many * rows * columns * weight.element_size()))
        # blocks of one size: whole groups of children, or so many of the children
        self._step = groups * divisor(self._count // groups, most // groups)
        if groups == self._count:
            self._step = divisor(groups, most)
        if layout.compiled is not None:  # positions lie together in memory, for vectors
            poses = poses.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        self._made = [*zip(*(self._cut(tensor, 0) for tensor in (poses, weight, bias)), strict=True)]

    def _cut(self, tensor: Tensor | None, child: int) -> Sequence[Tensor | None]:
        """Return a tensor in blocks of children; whole for every block where they share it."""
        if tensor is None or tensor.shape[child] < self._count:
            return [tensor] * (self._count // self._step)
        return tensor.split(self._step, child)

    def _sums(self, step: Step, each: Sequence[Tensor], *known: Any) -> list[Tensor]:
        """Add up what ``step`` returns of every block; ``each`` has a value of every child, or one for all."""
        layout, total = self.layout, []
        again = bool(layout.block) and torch.is_grad_enabled()
        run, cut = layout.step(_block), [self._cut(tensor, layout.child) for tensor in each]
        for k, made in enumerate(self._made):
            gates, *worth = [part[k] for part in cut] or [None]
            found = run(layout, step, again, made, known if gates is None else (gates, worth, *known))
            total = [before + one for before, one in zip(total, found, strict=True)] if total else [*found]
        return total

    def mean(self) -> Tensor:
        """Return the mean over children."""
        if not self.layout.block:
            return self._made[0][0].mean(self.layout.child, keepdim=True)
        return self.layout.place(summed(*self._given), "pmce") / self._count

    def attend(self, query: Tensor) -> Tensor:
        """Return the votes' sums, each child's shares by its agreement with every parent's query."""
        return self._sums(_attend, [], query)[0]

    def moments(
        self, gates: Tensor, eps: float, log_weight: Tensor | None = None, worth: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Return counts, means and variances of Gaussian parents and, with ``worth``, the betas of using and ignoring a
        child, their scores.

        Each child is shared out by ``log_weight`` and its distance from what the iteration before found, evenly where
        there was none. ``eps`` is added to the counts under the moments, and to the variances.
        """
        known = () if log_weight is None else (log_weight, self._means, 0.5 / self._variances)
        counts, first, second, *score = self._sums(_moments, [gates, *worth], known)
        before = self._means if known else torch.zeros_like(first)
        self._means, self._variances = moments_about(before[None], counts[None], first[None], second, eps)
        return counts, self._means, self._variances, *score
