"""No votes at all: where children share their matrices, or have none, sums over children come before the matrices.

An agreement ``<v_im, q_m>`` is ``<p_i, q_m W^T>``, and ``sum_i r_im v_im`` is ``(sum_i r_im p_i) W``: two products with
the poses themselves. A Gaussian's squared distances are products too, with the squares of the poses about their
group's mean; they cancel where parents are narrow, and the gate decides whether the result is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.votes import Blocks, Layout, divisor, moments_about, summed


def mix(features: Tensor, query: Tensor, gates: Tensor | None) -> Tensor:
    """Return ``features^T r`` ``[n, K, M]``, where ``r`` is the softmax over parents of ``features query``."""
    shares = torch.softmax(features @ query, -1)
    return features.mT @ (shares if gates is None else shares * gates)


class Folded:
    """What :class:`bench.votes.Blocks` returns, without a vote; in the layout ``pmice``. A bias belongs to a group."""

    def __init__(self, layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        groups, many = weight.shape[:2]
        self.layout, self._given, self._sizes = layout, (poses, weight), (poses.shape[0], groups, many)
        self._bias, self._weight = bias, weight
        self._poses = poses.unflatten(0, (-1, groups)).permute(2, 1, 0, 3, 4)  # [P, G, N, C, D]
        self._pairs: tuple[Tensor, ...] = ()

    def _mix(self, features: Tensor, query: Tensor, gates: Tensor | None = None) -> Tensor:
        """Run :func:`mix` for positions and groups ``[P, G, ...]``; on a CPU in blocks of shares that fit the cache."""
        layout, many = self.layout, query.shape[-1]
        flat = [None if one is None else one.flatten(0, 1) for one in (features, query, gates)]
        step = layout.step(mix)
        if not layout.block or features.is_cuda:
            return step(*flat).unflatten(0, features.shape[:2])
        places, count = flat[0].shape[:2]
        room = layout.block // (many * features.element_size())
        size = divisor(places, room // count)
        few = divisor(count, room // size)
        cut = ([None] * places if each is None else each.split(size) for each in flat)
        parts = []
        for poses, asked, gate in zip(*cut, strict=False):
            total: Any = 0
            for k in range(0, count, few):
                total = total + step(poses[:, k : k + few], asked, None if gate is None else gate[:, k : k + few])
            parts.append(total)
        return torch.cat(parts).unflatten(0, features.shape[:2])

    def mean(self) -> Tensor:
        return self.layout.place(summed(*self._given), "pmce") / self._sizes[0]

    def attend(self, query: Tensor) -> Tensor:
        asked, weight = query[:, :, 0], self._weight
        features = self._poses.flatten(3)
        found = self._mix(features, torch.einsum("pmce,gmde->pgcdm", asked, weight).flatten(2, 3))
        split = found.unflatten(2, self._poses.shape[3:])
        return self.layout.place(torch.einsum("pgcdm,gmde->pmce", split, weight), "pmce")

    def _expand(self, gates: Tensor) -> None:
        """Make what all iterations share: poses about their mean and their squares, and what a matrix makes of them."""
        inner = self._poses.shape[4]
        row, column = torch.triu_indices(inner, inner, device=self._poses.device).unbind()
        middle = self._poses.mean(2, keepdim=True)
        off = self._poses - middle
        squares = (off[..., row] * off[..., column]).flatten(3)
        self._features = torch.cat([squares, off.flatten(3), torch.ones_like(squares[..., :1])], 3).contiguous()
        twice = torch.where(row == column, 1.0, 2.0).to(off.dtype)
        pairs = self._weight[:, :, row] * self._weight[:, :, column] * twice[:, None]  # [G, M, S, E]
        shift = torch.einsum("pgcd,gmde->gpmce", middle[:, :, 0], self._weight)
        self._pairs = pairs, shift if self._bias is None else shift + self._bias[:, None]
        gates = gates[:, 0, :, 0, 0].unflatten(1, (-1, self._sizes[1]))
        self._gates = gates.transpose(1, 2).unsqueeze(3)  # [P, G, N, 1]

    def moments(
        self, gates: Tensor, eps: float, log_weight: Tensor | None = None, worth: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        many = self._sizes[2]
        if log_weight is None:
            self._expand(gates)
            total = (self._features * self._gates / many).sum(2).unsqueeze(3).expand(-1, -1, -1, many)
        else:
            pairs, shift = self._pairs
            half, off = 0.5 / self._variances[:, :, 0], shift - self._means[:, :, 0]
            square = torch.einsum("pmce,gmse->pgcsm", half, pairs).flatten(2, 3)
            first = 2 * torch.einsum("gpmce,gmde->pgcdm", half * off, self._weight).flatten(2, 3)
            constant = (half * off.square()).sum((3, 4)) - log_weight[:, :, 0, 0, 0]
            query = torch.cat([square, first, constant.transpose(0, 1).unsqueeze(2)], 2).neg()
            total = self._mix(self._features, query, self._gates)
        # the features' sums [P, G, K, M]
        (pairs, shift), (rows, inner) = self._pairs, self._poses.shape[3:]
        layout, size, sums = self.layout, pairs.shape[2], total.transpose(0, 1)
        counts, by_pose = sums[:, :, -1], sums[:, :, rows * size : -1].unflatten(2, (rows, inner))  # counts: [G, P, M]
        first = torch.einsum("gpcdm,gmde->gpmce", by_pose, self._weight)
        second = torch.einsum("gpcsm,gmse->pmce", sums[:, :, : rows * size].unflatten(2, (rows, size)), pairs)
        moments = moments_about(shift, counts[..., None, None], first, second, eps)
        self._means, self._variances = (layout.place(one, "pmce") for one in moments)
        found = layout.place(counts.sum(0), "pm"), self._means, self._variances
        if not worth:
            return found
        # betas belong to groups, or to all children: they only multiply sums over children
        use, ignore = (one[:, :, :, 0, 0].expand(-1, -1, len(counts)) for one in worth)  # [1, M, G]
        there = self._gates.sum((2, 3))[:, None]  # [P, 1, G]
        gated = counts.permute(1, 2, 0)
        score = (use * gated - ignore * (there - gated)).sum(2)
        return (*found, layout.place(score, "pm"))


def votes_in(layout: Layout, poses: Tensor, weight: Tensor, bias: Tensor | None = None) -> Blocks | Folded:
    """Return the votes of ``poses`` ``[I, P, C, D]``, stored, in blocks or folded away, as the layout says."""
    return (Folded if layout.folded else Blocks)(layout, poses, weight, bias)
