"""Votes as a skilled PyTorch user stores them: made once by a batched matmul, in the order that the turns like best.

A layout is a word of five letters: ``i`` children, ``m`` parents, ``c`` and ``e`` the rows and columns of a pose, ``p``
positions (batch and grid). Coefficients, queries and sums keep all five dimensions, of size 1 where they have none, so
that every step of a routing is written once for all layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastcaps.votes import from_op, to_op

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["Layout", "seen_gates", "seen_poses", "to_public"]


def _seen(tensor: Tensor, workload: Workload) -> Tensor:
    """Return a strided view of what lies under each window, ``[ky, kx, N, B, Ho, Wo, ...]``."""
    grid = to_op(tensor, workload.window)
    size, stride = workload.kernel_size, workload.stride
    unfolded = grid.unfold(1, size, stride).unfold(2, size, stride)  # [B, Ho, Wo, N, ..., ky, kx]
    return unfolded.movedim((-2, -1, 3), (0, 1, 2))


def seen_poses(children: Tensor, workload: Workload) -> Tensor:
    """Return the children's poses as each position sees them, ``[I, P, C, D]``."""
    seen = _seen(children, workload)
    return seen.reshape(workload.children, -1, *children.shape[-2:])


def seen_gates(gates: Tensor, workload: Workload) -> Tensor:
    """Return one number of each child as each position sees it, ``[I, P]``."""
    return _seen(gates, workload).reshape(workload.children, -1)


def to_public(tensor: Tensor, workload: Workload, batch: int) -> Tensor:
    """Return what belongs to parents, ``[P, M, ...]``, in public layout."""
    places = workload.output_grid or (1, 1)
    return from_op(tensor.reshape(batch, *places, *tensor.shape[1:]), workload.window)


class Layout:
    """An order of the votes' dimensions, and a routing's steps in it.

    Parameters
    ----------
    axes : str
        A permutation of ``imcep``. With ``pmice`` and ``pmcei`` (and ``mp`` for ``pm``) agreement and weighted sum are
        batched matmuls, else elementwise products that are summed.
    """

    def __init__(self, axes: str) -> None:
        self.axes = axes
        self.child, self.parent = axes.index("i"), axes.index("m")
        self.pose = (axes.index("c"), axes.index("e"))
        self._matmul = axes[2:] if axes[:2] in ("pm", "mp") else ""

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

    def votes(self, seen: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the votes of ``seen`` ``[I, P, C, D]`` by one batched matmul over the groups of ``weight``.

        The factor that the layout names first stands left, so that as little as can be is copied afterwards: nothing
        where every child has its own matrices and ``i`` comes first, or where all share them.
        """
        groups, many, inner, columns = weight.shape
        count, places, rows = seen.shape[:3]
        sizes = {"g": groups, "i": count // groups, "m": many, "e": columns, "c": rows, "p": places}
        split = seen.unflatten(0, (count // groups, groups))  # named "igpcd": child i * G + g
        left = [axis for axis in self.axes if axis in "icp"]
        right = [axis for axis in self.axes if axis in "me"]
        seen_first = next(axis for axis in self.axes if axis != "i" or groups == 1) in "icp"
        if seen_first:
            poses = split.permute(*["igpcd".index(axis) for axis in ("g", *left, "d")]).reshape(groups, -1, inner)
            matrices = weight.permute(*["gmde".index(axis) for axis in ("g", "d", *right)]).reshape(groups, inner, -1)
            made, order = torch.bmm(poses, matrices), [*left, *right]
        else:
            poses = split.permute(*["igpcd".index(axis) for axis in ("g", "d", *left)]).reshape(groups, inner, -1)
            matrices = weight.permute(*["gmde".index(axis) for axis in ("g", *right, "d")]).reshape(groups, -1, inner)
            made, order = torch.bmm(matrices, poses), [*right, *left]
        order = ["g", *order]
        made = made.view([sizes[axis] for axis in order])
        wanted = [axis for letter in self.axes for axis in (("i", "g") if letter == "i" else (letter,))]
        full = [count if axis == "i" else sizes[axis] for axis in self.axes]
        made = made.permute([order.index(axis) for axis in wanted]).reshape(full)
        return made if bias is None else made + self.place(bias, "imce")

    def agree(self, votes: Tensor, query: Tensor) -> Tensor:
        """Return ``<query_m, votes_im>`` over the numbers of a pose."""
        if self._matmul == "ice":
            return (votes.flatten(3) @ query.flatten(3).transpose(2, 3)).unsqueeze(4)
        if self._matmul == "cei":
            return (query.flatten(2, 3).transpose(2, 3) @ votes.flatten(2, 3)).unsqueeze(2)
        return (votes * query).sum(self.pose, keepdim=True)

    def agree_shape(self, votes: Tensor) -> list[int]:
        """Return the shape of the votes' agreement with a query: one number for each."""
        return [1 if axis in self.pose else size for axis, size in enumerate(votes.shape)]

    def weigh(self, shares: Tensor, votes: Tensor) -> Tensor:
        """Return ``sum_i shares_im votes_im``."""
        if self._matmul == "ice":
            return (shares.flatten(3).transpose(2, 3) @ votes.flatten(3)).unflatten(3, votes.shape[3:])
        if self._matmul == "cei":
            summed = votes.flatten(2, 3) @ shares.flatten(2, 3).transpose(2, 3)
            return summed.unflatten(2, votes.shape[2:4])
        return (votes * shares).sum(self.child, keepdim=True)
