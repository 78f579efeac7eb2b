"""Attention of children that share matrices as the library's products: no vote is made.

With ``U_gm = s Q_m W_gm^T``, of the shape of a child's pose, and T the sums of the poses of a group, an iteration is

    r_im = softmax over m of <U_gm, P_i>      T_gm = sum_{i of g} g_i r_im P_i      S_m = sum_g T_gm W_gm

and its backward, with ``Y_gm = dS_m W_gm^T``, ``h_im = <Y_gm, P_i>`` and ``dl_im = r_im (h_im - sum_m r_im h_im)``,

    dP_i = g_i sum_m (r_im Y_gm + dl_im U_gm)      dU_gm = sum_{i of g} g_i dl_im P_i
    dg_i = <P_i, sum_m r_im Y_gm>                  dQ_m = s sum_g dU_gm W_gm      dW_gm = T_gm^T dS_m + s dU_gm^T Q_m

Blocks of samples, and of the children of each group, limit what is stored of children times parents to 256 MB (in
float32), or to one child of each group of a sample. All is computed in the accumulation dtype. A child with a gate of 0
has a coefficient of exactly 0, and no NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.signature import gradient_strides
from fastcaps.votes import SET_WINDOW, VoteInputs, pose_of, positions_of, seen_of

_BLOCK = 1 << 26  # values: each block is some launches
_SHARING = 8  # children of a matrix from which products are less work than votes
# of an iteration, in multiply-adds of our kernels: what products take for a child and a parent, their launches, and how
# much longer votes take for so many parents that those of a position are in several blocks, and votes are made twice
_PAIR, _LAUNCHES, _BLOCKS, _MOST_IN_ONE = 128, 1 << 29, 8, 32
_CUBLAS = (":4096:8", ":16:8")  # the workspaces with which its products have the same bits in every run


def serves(votes: VoteInputs) -> bool:
    """Return whether products run a call of attention on a GPU, or its backward, instead of a backend.

    What they take is predicted from bytes (logits and coefficients are written once and read once) and from the times
    of the kernels; nobody has measured it.
    """
    if not votes.children.is_cuda or votes.weight is None or backends.forced() or backends.tf32x3_wanted():
        return False
    if torch.are_deterministic_algorithms_enabled() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS:
        return False  # torch would raise
    rows, depth, columns = pose_of(votes)
    vote = rows * depth * columns * (_BLOCKS if votes.parents > _MOST_IN_ONE else 1)
    pairs = prod(positions_of(votes)) * seen_of(votes) * votes.parents
    return pairs * vote > pairs * (_PAIR + rows * depth) + _LAUNCHES and takes(votes)


def takes(votes: VoteInputs) -> bool:
    """Return whether products can run a call: enough children share each matrix, there is no bias, and every child is
    seen from one position (in a set, under a 1 x 1 window, or under one window over the whole grid)."""
    children, weight, window = votes.children, votes.weight, tuple(votes.window)
    if weight is None or votes.bias is not None or weight.shape[0] * _SHARING > seen_of(votes):
        return False
    if window != SET_WINDOW and (window[:2] != tuple(children.shape[1:3]) or window[4:] != SET_WINDOW[4:]):
        return False
    try:
        _by_sample(votes)
    except RuntimeError:  # strides that no view can have
        return False
    return True


def _by_sample(votes: VoteInputs) -> Tensor:
    """Return a view of the children ``[b, I, C, D]``; a sample is what one position sees."""
    children = votes.children
    return children.view(prod(positions_of(votes)), seen_of(votes), *children.shape[-2:])


class _Block(NamedTuple):
    """Some children of each group of some samples, in the accumulation dtype."""

    children: slice  # of each group
    poses: Tensor  # [b G, i, C D]
    gate: Tensor | None  # [b G, i, 1]
    closed: Tensor | None  # where the gate is 0

    def opened(self, values: Tensor) -> Tensor:
        """Return values of children, in place, with 0 for a gate of 0."""
        return values if self.closed is None else values.masked_fill_(self.closed, 0.0)

    def gated(self, values: Tensor) -> Tensor:
        """Return values of children times their gates; 0 for a gate of 0."""
        return values if self.gate is None else self.opened(values * self.gate)

    def dgate(self, shares: Tensor) -> Tensor:
        """Return the gates' gradients ``[b G, i]`` from ``sum_m r_im Y_gm``; 0 for a gate of 0 and broken votes."""
        mean = (self.poses * shares).sum(2)
        assert self.closed is not None
        return mean.masked_fill_(self.closed.squeeze(2) & ~mean.isfinite(), 0.0)


class _Call:
    """A call's tensors by sample and group, in the accumulation dtype but for children and gate."""

    def __init__(self, votes: VoteInputs, query: Tensor | None, scale: float) -> None:
        assert votes.weight is not None
        self.weight, self.parents = votes.weight.to(accumulation_dtype(votes.weight.dtype)), votes.parents
        children, gate = _by_sample(votes), votes.gate
        self.children = self.grouped(children)
        self.gate = None if gate is None else self.grouped(gate.reshape(children.shape[:2]))
        self.pose, self.asked = self.children.shape[3:], None if query is None else self.by_sample(query) * scale
        self.m = "" if query is None else "m"  # without queries all parents have the same coefficients

    def grouped(self, values: Tensor) -> Tensor:
        """Return a view of values of children ``[b, I, ...]`` as ``[b, G, I / G, ...]``."""
        return values.unflatten(1, (-1, self.weight.shape[0])).transpose(1, 2)

    def by_sample(self, poses: Tensor) -> Tensor:
        """Return poses of parents ``[*places, M, C, E]`` as ``[b, M, C, E]``."""
        return poses.flatten(0, -4).to(self.weight.dtype)

    def samples(self, tensors: int) -> Iterator[tuple[slice, Iterator[_Block]]]:
        """Yield samples with their blocks, so large that ``tensors`` of coefficients fit the limit."""
        batch, groups, count = self.children.shape[:3]
        each = tensors * groups * self.parents
        most = max(1, min(count, _BLOCK // each))
        size = max(1, _BLOCK // (each * max(most, self.pose.numel())))
        for b in range(0, batch, size):
            here = slice(b, min(b + size, batch))
            yield here, (self._block(here, slice(i, min(i + most, count))) for i in range(0, count, most))

    def _block(self, samples: slice, children: slice) -> _Block:
        wide, gate, closed = self.weight.dtype, None, None
        poses = self.children[samples, :, children].to(wide).flatten(0, 1).flatten(2)
        if self.gate is not None:
            gate = self.gate[samples, :, children].to(wide).flatten(0, 1).unsqueeze(2)
            closed = gate == 0
            poses = poses.masked_fill(closed & ~poses.isfinite().all(2, keepdim=True), 0.0)
        return _Block(children, poses, gate, closed)

    def zeros(self, samples: slice) -> Tensor:
        """Return sums over no poses ``[b G, M or 1, C D]``."""
        count = len(self.children[samples]) * self.weight.shape[0]
        return self.weight.new_zeros(count, self.parents if self.m else 1, self.pose.numel())

    def pulled(self, values: Tensor) -> Tensor:
        """Return ``x_m W_gm^T`` of x ``[b, M, C, E]``, or their mean over m, as ``[b G, M or 1, C D]``."""
        found = torch.einsum(f"bmce,gmde->bg{self.m}cd", values, self.weight)
        found = found.reshape(found.shape[0] * found.shape[1], -1, self.pose.numel())
        return found if self.m else found / self.parents

    def pushed(self, sums: Tensor) -> Tensor:
        """Return ``sum_g T_gm W_gm`` ``[b, M, C, E]``."""
        return torch.einsum(f"bg{self.m}cd,gmde->bmce", self._split(sums), self.weight)

    def outer(self, sums: Tensor, values: Tensor) -> Tensor:
        """Return ``sum_b T_gm^T x_m`` ``[G, M, D, E]``."""
        return torch.einsum(f"bg{self.m}cd,bmce->gmde", self._split(sums), values)

    def _split(self, sums: Tensor) -> Tensor:
        split = sums.unflatten(2, self.pose).unflatten(0, (-1, self.weight.shape[0]))
        return split if self.m else split.squeeze(2)

    def add(self, sums: Tensor, coefficients: Tensor | None, poses: Tensor) -> None:
        """Add sums of poses ``[b G, i, C D]``, for coefficients ``[b G, i, M]`` or 1 / M, to ``sums``."""
        if coefficients is None:
            sums += poses.sum(1, keepdim=True) / self.parents
        else:
            sums.baddbmm_(coefficients.mT, poses)


def sums(votes: VoteInputs, query: Tensor | None, scale: float) -> Tensor:
    """Return ``S_m = sum_i g_i r_im V_im`` ``[*places, M, C, E]`` for ``r = softmax_m(scale <Q_m, V_im>)``.

    ``query`` is ``[*places, M, C, E]``, or None for ``r = 1 / M``. S has the accumulation dtype.
    """
    call = _Call(votes, query, scale)
    total = call.weight.new_empty(votes.poses)
    for samples, blocks in call.samples(2):
        targets, found = None if call.asked is None else call.pulled(call.asked[samples]), call.zeros(samples)
        for block in blocks:
            poses = block.gated(block.poses)
            r = None if targets is None else torch.bmm(block.opened(block.poses), targets.mT).softmax(2)
            call.add(found, r, poses)
        total.flatten(0, -4)[samples] = call.pushed(found)
    return total


def gradients(
    votes: VoteInputs,
    query: Tensor | None,
    scale: float,
    grad: Tensor,
    needs: Set[str],
    detach: bool = False,
    dchildren: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of :func:`sums` that ``needs`` names, of children, weight, gate and query.

    ``grad`` is that of its result, in the accumulation dtype. With ``detach`` coefficients are constants. The gradient
    of the children is added to ``dchildren``, if given.
    """
    call, shape = _Call(votes, query, scale), _by_sample(votes).shape
    heads, flows = call.by_sample(grad), query is not None and not detach
    like: dict[str, Any] = {"children": votes.children, "weight": votes.weight, "gate": votes.gate, "query": query}
    made = {name: heads.new_zeros(like[name].shape) for name in needs if dchildren is None or name != "children"}
    if dchildren is not None and "children" in needs:
        made["children"] = dchildren
    into = {n: call.grouped(made[n].view(shape[:k])) for n, k in (("children", 4), ("gate", 2)) if n in made}
    for samples, blocks in call.samples(3):
        head, asked = heads[samples], None if call.asked is None else call.asked[samples]
        targets, pulled = call.pulled(head), None if asked is None else call.pulled(asked)
        found, dpulled = call.zeros(samples), call.zeros(samples)
        for block in blocks:
            poses, r = block.gated(block.poses), None
            if pulled is None:
                shares = targets.expand(poses.shape)
            else:
                r = torch.bmm(block.poses, pulled.mT).softmax(2)
                shares = torch.bmm(r, targets)
            if "gate" in made:
                into["gate"][samples, :, block.children] = block.dgate(shares).unflatten(0, (len(head), -1))
            if flows:
                assert pulled is not None
                gains = torch.bmm(block.poses, targets.mT)
                dlogits = block.opened(torch.ops.aten._softmax_backward_data(gains, r, 2, gains.dtype))
                shares.baddbmm_(dlogits, pulled)
                call.add(dpulled, dlogits, poses)
            if "weight" in made:
                call.add(found, None if r is None else block.opened(r), poses)
            if "children" in made:
                out = into["children"][samples, :, block.children]
                out += block.gated(shares).view(out.shape)
        if "weight" in made:
            made["weight"] += call.outer(found, head)
            if flows and asked is not None:
                made["weight"] += call.outer(dpulled, asked)
        if "query" in made:
            made["query"].flatten(0, -4)[samples] = call.pushed(dpulled) * scale
    if "weight" in made:
        weight = like["weight"]
        made["weight"] = call.weight.new_empty_strided(weight.shape, gradient_strides(weight)).copy_(made["weight"])
    return made
