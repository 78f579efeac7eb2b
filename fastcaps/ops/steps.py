"""What the routings' ops share: squashing and unit vectors between turns, with the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.vectors import length
from fastcaps.votes import Votes

__all__ = ["POSE", "Steps", "check_like"]

POSE = (-2, -1)


class Steps:
    """What a turn adds to the query, ``squash(S)`` or ``S / |S|``, and the way back; of all turns at once.

    Both are ``v = f(n) s`` with ``n = |s|`` and ``u = s / n``, so that ``ds = f dv + f' n u <u, dv>``: for
    ``f = n / (1 + n^2)`` that is ``f (dv + (2 / (1 + n^2) - 1) u <u, dv>)``, for ``f = 1 / n`` it is
    ``f (dv - u <u, dv>)``. At the zero vector all of it is 0.

    Parameters
    ----------
    sums
        S, ``[turns, ..., C, E]``.
    squashes
        Which of the two.
    """

    def __init__(self, sums: Tensor, squashes: bool) -> None:
        size = length(sums, POSE, keepdim=True)
        zero = size == 0
        self.direction = sums / size.masked_fill(zero, 1.0)
        # 1 / f: where that is infinite, nothing is left
        self.divisor = size + size.reciprocal() if squashes else size.masked_fill(zero, torch.inf)
        self.bend = 2 / (1 + size.square()) - 1 if squashes else -torch.ones_like(size)
        self.vectors = sums / self.divisor

    def backward(self, grad: Tensor, turn: int) -> Tensor:
        """Return dL/ds of a turn from dL/dv."""
        direction = self.direction[turn]
        along = (direction * grad).sum(POSE, keepdim=True)
        return (grad + self.bend[turn] * along * direction) / self.divisor[turn]


def check_like(votes: Votes, given: Any, shapes: Mapping[str, Sequence[int]], wide: bool = False) -> None:
    """Raise unless those arguments that are given have their shapes, and the call's device and dtype.

    ``wide``: the dtype in which sums over the children are kept.
    """
    children = votes.children
    dtype = accumulation_dtype(children.dtype) if wide else children.dtype
    for name, shape in shapes.items():
        tensor = getattr(given, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype or tensor.device != children.device:
            raise TypeError(f"{name} must be {dtype} on {children.device}, got {tensor.dtype} on {tensor.device}")
