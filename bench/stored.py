"""Votes as a skilled PyTorch user stores them: made once, in the order of dimensions that the turns like best.

A layout is a word of five letters: ``i`` children, ``m`` parents, ``c`` and ``e`` the rows and columns of a pose, ``p``
positions (batch and grid). Coefficients, queries and sums keep all five dimensions, of size 1 where they have none, so
that every step of a routing is written once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout", "Stored", "as_parents", "divisor", "seen", "squash", "summed", "unpadded"]


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


class Layout:
    """An order of the votes' dimensions, and a routing's steps in it.

    Parameters
    ----------
    axes : str
        A permutation of ``imcep``. With ``pmice`` agreement and weighted sum are batched matmuls, else elementwise
        products that are summed.
    einsum : bool
        Leave every product to ``torch.einsum``.
    block : int
        Bytes of votes (of shares, where votes are folded) that are made at a time; 0: all of them, and they are stored.
    kept : bool
        Of blocks: let the backward find what the forward made.
    folded : bool
        Make no votes (``bench/folded.py``).
    compiled : dict
        Options of ``torch.compile``, which then compiles the function that every block runs; None: it is eager.
    """

    def __init__(
        self,
        axes: str,
        einsum: bool = False,
        block: int = 0,
        kept: bool = False,
        folded: bool = False,
        compiled: dict[str, Any] | None = None,
    ) -> None:
        self.axes, self.einsum, self.block, self.kept, self.folded = axes, einsum, block, kept, folded
        self._options = compiled
        self._steps: dict[Any, Any] = {}
        self.child, self.parent = axes.index("i"), axes.index("m")
        self.pose = (axes.index("c"), axes.index("e"))

    @property
    def compiled(self) -> bool:
        """Whether the function of a block is compiled."""
        return self._options is not None

    def step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a block as it is to be called: compiled, if that was asked for."""
        if self._options is None:
            return run
        if run not in self._steps:
            self._steps[run] = torch.compile(run, dynamic=False, fullgraph=True, options=self._options)
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
        if self.compiled and inner <= 8:  # sums that short are unrolled, and fused with what follows
            own = weight.repeat(count // groups, 1, 1, 1)
            terms = [self.place(poses[..., d], "ipc") * self.place(own[:, :, d], "ime") for d in range(inner)]
            return sum(terms[1:], terms[0]) + (0 if bias is None else self.place(bias, "imce"))
        sizes = {"g": groups, "i": count // groups, "m": many, "e": columns, "c": rows, "p": places}
        split = poses.unflatten(0, (count // groups, groups))  # named "igpcd": child i * G + g
        wanted = [axis for letter in self.axes for axis in (("i", "g") if letter == "i" else (letter,))]
        full = [count if axis == "i" else sizes[axis] for axis in self.axes]
        if self.einsum:
            made = torch.einsum(f"igpcd,gmde->{''.join(wanted)}", split, weight).reshape(full)
            return made if bias is None else made + self.place(bias, "imce")
        left = [axis for axis in self.axes if axis in "icp"]
        right = [axis for axis in self.axes if axis in "me"]
        poses_first = next(axis for axis in self.axes if axis != "i" or groups == 1) in "icp"
        factor = split.permute(*["igpcd".index(axis) for axis in ("g", *left, "d")]).reshape(groups, -1, inner)
        matrices = weight.permute(*["gmde".index(axis) for axis in ("g", "d", *right)]).reshape(groups, inner, -1)
        if poses_first:
            made, order = factor @ matrices, ["g", *left, *right]
        else:
            made, order = matrices.mT @ factor.mT, ["g", *right, *left]
        made = made.view([sizes[axis] for axis in order])
        made = made.permute([order.index(axis) for axis in wanted]).reshape(full)
        return made if bias is None else made + self.place(bias, "imce")

    def _einsum(self, first: Tensor, second: Tensor, summed: str) -> Tensor:
        """Return the product of two tensors of this layout, summed over the dimensions ``summed``."""
        out = "".join(axis for axis in self.axes if axis not in summed)
        return self.place(torch.einsum(f"{self.axes},{self.axes}->{out}", first, second), out)

    def agree(self, votes: Tensor, query: Tensor) -> Tensor:
        """Return ``<query_m, votes_im>`` over the numbers of a pose."""
        if self.einsum:
            return self._einsum(votes, query, "ce")
        if self.axes == "pmice":
            return (votes.flatten(3) @ query.flatten(3).transpose(2, 3)).unsqueeze(4)
        return (votes * query).sum(self.pose, keepdim=True)

    def agree_shape(self, votes: Tensor) -> list[int]:
        """Return the shape of the votes' agreement with a query: one number for each."""
        return [1 if axis in self.pose else size for axis, size in enumerate(votes.shape)]

    def weigh(self, shares: Tensor, votes: Tensor) -> Tensor:
        """Return ``sum_i shares_im votes_im``."""
        if self.einsum:
            return self._einsum(shares, votes, "i")
        if self.axes == "pmice":
            return (shares.flatten(3).transpose(2, 3) @ votes.flatten(3)).unflatten(3, votes.shape[3:])
        return (votes * shares).sum(self.child, keepdim=True)


class Stored:
    """The votes of one call, made and kept, and what a turn asks of them. All tensors have the layout's dimensions."""

    def __init__(self, layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self.layout, self._votes = layout, layout.votes(poses, weight, bias)

    def mean(self) -> Tensor:
        """Return the mean over children."""
        return self._votes.mean(self.layout.child, keepdim=True)

    def attend(self, query: Tensor) -> Tensor:
        """Return the votes' sums, each child's shares by its agreement with every parent's query."""
        shares = torch.softmax(self.layout.agree(self._votes, query), self.layout.parent)
        return self.layout.weigh(shares, self._votes)

    def moments(
        self, gates: Tensor, eps: float, log_weight: Tensor | None = None, worth: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Return counts, means and variances of Gaussian parents and, with ``worth``, their scores.

        Each child is shared out by ``log_weight`` and its distance from what the turn before found, evenly where there
        was none. ``eps`` is added to the counts under the moments, and to the variances. The next turn's distances need
        the same squares, so they are made once. Scores are what ``worth``, the betas of using and of ignoring a child,
        makes of the shares.
        """
        layout, votes = self.layout, self._votes
        if log_weight is None:
            gated = (gates / votes.shape[layout.parent]).expand(layout.agree_shape(votes))
        else:
            gated = gates * torch.softmax(
                log_weight - layout.agree(self._squares, 0.5 / self._variances), layout.parent
            )
        counts = gated.sum(layout.child, keepdim=True)
        inverse = 1 / (counts + eps)
        means = layout.weigh(gated, votes) * inverse
        self._squares = (votes - means).square()
        self._variances = layout.weigh(gated, self._squares) * inverse + eps
        found = counts, means, self._variances
        return (*found, scores(layout, gates, gated, *worth)) if worth else found


def scores(layout: Layout, gates: Tensor, gated: Tensor, use: Tensor, ignore: Tensor) -> Tensor:
    """Return what using the children is worth to each parent, less what ignoring them is."""
    return (use * gated - ignore * (gates - gated)).sum(layout.child, keepdim=True)
