"""Attention of children that share matrices as the library's products: no vote is made.

With ``U_gm = s Q_m W_gm^T``, of the shape of a child's pose, and T the sums of the poses of a group, an iteration is

    r_im = softmax over m of <U_gm, P_i>      T_gm = sum_{i of g} g_i r_im P_i      S_m = sum_g T_gm W_gm

and its backward, with ``Y_gm = dS_m W_gm^T``, ``h_im = <Y_gm, P_i>`` and ``dl_im = r_im (h_im - sum_m r_im h_im)``,

    dP_i = g_i sum_m (r_im Y_gm + dl_im U_gm)      dU_gm = sum_{i of g} g_i dl_im P_i
    dg_i = <P_i, sum_m r_im Y_gm>                  dQ_m = s sum_g dU_gm W_gm      dW_gm = T_gm^T dS_m + s dU_gm^T Q_m

Blocks of samples, and of the children of each group, limit what is stored of children times parents to 256 MB (in
float32), or to one child of each group of a sample. For short poses and not too many parents a CUDA kernel does what is
between the products with matrices (``csrc/cuda/folded.cu``), and stores nothing of it. All is computed in the
accumulation dtype. A child with a gate of 0 has a coefficient of exactly 0, and no NaN.
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
from fastcaps.ops.define import declare
from fastcaps.ops.signature import gradient_strides
from fastcaps.votes import SET_WINDOW, VoteInputs, pose_of, positions_of, seen_of

_BLOCK = 1 << 26  # values: each block is some launches
_SHARING = 8  # children of a matrix from which products are less work than votes
_POSE, _PARENTS = 16, 512  # values and parents that a kernel between the products takes at most
# What an iteration takes, in multiply-adds of our kernels (predicted, nobody has measured it): launches; for a pair of
# child and parent logits and coefficients, written once and read once, where there is no kernel between the products,
# else 2 for each value of a pose; for each value of U and of T, both products. Votes take so much longer where a block
# does not hold all parents, and they are made twice.
_LAUNCHES, _PAIR, _VALUE, _TWICE, _PARENTS_OF_A_BLOCK = 1 << 29, 128, 160, 8, 128
_CUBLAS = (":4096:8", ":16:8")  # the workspaces with which its products have the same bits in every run

_kernel = declare(
    "cuda",
    "folded",
    (
        "Tensor children, Tensor? gate, Tensor pulled, Tensor? targets",
        "(Tensor sums, Tensor dpulled, Tensor dchildren, Tensor dgate)",
    ),
)


def serves(votes: VoteInputs) -> bool:
    """Return whether products run a call of attention on a GPU, or its backward, instead of a backend."""
    if not votes.children.is_cuda or votes.weight is None or backends.tf32x3_wanted():
        return False
    if torch.are_deterministic_algorithms_enabled() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS:
        return False  # torch would raise
    rows, depth, columns = pose_of(votes)
    vote = rows * depth * columns * (_TWICE if votes.parents > _PARENTS_OF_A_BLOCK else 1)
    pair = (2 if _is_small(votes) else 1 + _PAIR / (rows * depth)) + _VALUE * votes.weight.shape[0] / seen_of(votes)
    pairs = prod(positions_of(votes)) * seen_of(votes) * votes.parents
    return pairs * vote > pairs * pair * rows * depth + _LAUNCHES and takes(votes)


def takes(votes: VoteInputs) -> bool:
    """Return whether products can run a call, and no backend must: enough children share each matrix, there is no bias,
    and every child is seen from one position (in a set, under a 1 x 1 window, or under one over the whole grid)."""
    children, weight, window = votes.children, votes.weight, tuple(votes.window)
    if weight is None or votes.bias is not None or backends.forced() or weight.shape[0] * _SHARING > seen_of(votes):
        return False
    return window == SET_WINDOW or (window[:2] == tuple(children.shape[1:3]) and window[4:] == SET_WINDOW[4:])


def _is_small(votes: VoteInputs) -> bool:
    """Return whether the kernel between the products has room for a call's poses and parents."""
    rows, depth, _ = pose_of(votes)
    return rows * depth <= _POSE and votes.parents <= _PARENTS


def fuses(votes: VoteInputs) -> bool:
    """Return whether a kernel of the CUDA library does what is between the products with matrices."""
    return votes.children.is_cuda and _is_small(votes) and backends.choose("attention", votes)[0] == "cuda"


def _by_sample(votes: VoteInputs) -> Tensor:
    """Return the children ``[b, I, C, D]``, a copy where no view has such strides; a sample is what a position sees."""
    children = votes.children
    return children.reshape(prod(positions_of(votes)), seen_of(votes), *children.shape[-2:])


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

    def __init__(self, votes: VoteInputs, query: Tensor | None, scale: float, tensors: int, fuses: bool) -> None:
        assert votes.weight is not None
        self.wide, (self.groups, self.parents, *_) = accumulation_dtype(votes.children.dtype), votes.weight.shape
        self.matrices = votes.weight.to(self.wide).transpose(0, 1).flatten(1, 2)  # [M, G * D, E]
        children, gate = _by_sample(votes), votes.gate
        self.children = self.grouped(children)
        self.gate = None if gate is None else self.grouped(gate.reshape(children.shape[:2]))
        self.pose, self.asked = self.children.shape[3:], None if query is None else self.by_sample(query) * scale
        self.m = "" if query is None else "m"  # without queries all parents have the same coefficients
        self.fuses = fuses and query is not None
        batch, groups, count = self.children.shape[:3]
        # values of a child of each group, in the tensors that a block has of it
        each = tensors * groups * (self.parents if self.m else 1)
        self.most = max(1, min(count, _BLOCK // each))
        size = max(1, _BLOCK // (each * max(1 if self.fuses else self.most, self.pose.numel())))
        self.samples = [slice(b, min(b + size, batch)) for b in range(0, batch, size)]

    def grouped(self, values: Tensor) -> Tensor:
        """Return a view of values of children ``[b, I, ...]`` as ``[b, G, I / G, ...]``."""
        return values.unflatten(1, (-1, self.groups)).transpose(1, 2)

    def by_sample(self, poses: Tensor) -> Tensor:
        """Return poses of parents ``[*places, M, C, E]`` as ``[b, M, C, E]``."""
        return poses.flatten(0, -4).to(self.wide)

    # ---- products with matrices: of poses [M, b, C, G, D], without M for equal coefficients --------------------------

    def pulled(self, values: Tensor) -> Tensor:
        """Return ``x_m W_gm^T`` of x ``[b, M, C, E]``, or their mean over m."""
        found = torch.einsum(f"bmce,mke->{self.m}bck", values, self.matrices).unflatten(-1, (self.groups, -1))
        return found if self.m else found / self.parents

    def pushed(self, sums: Tensor) -> Tensor:
        """Return ``sum_g T_gm W_gm`` ``[b, M, C, E]``."""
        return torch.einsum(f"{self.m}bck,mke->bmce", sums.flatten(-2), self.matrices)

    def outer(self, sums: Tensor, values: Tensor) -> Tensor:
        """Return ``sum_b T_gm^T x_m`` ``[M, G * D, E]``."""
        return torch.einsum(f"{self.m}bck,bmce->mke", sums.flatten(-2), values)

    def by_group(self, poses: Tensor) -> Tensor:
        """Return such poses as ``[b G, M or 1, C D]``."""
        each = poses if self.m else poses.unsqueeze(0)
        return each.permute(1, 3, 0, 2, 4).flatten(3).flatten(0, 1)

    def by_matrix(self, poses: Tensor) -> Tensor:
        """Return the inverse, a view."""
        found = poses.unflatten(2, self.pose).unflatten(0, (-1, self.groups)).permute(2, 0, 3, 1, 4)
        return found if self.m else found.squeeze(0)

    # ---- what is between them ----------------------------------------------------------------------------------------

    def kernel(self, samples: slice, pulled: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run the CUDA library's kernel: return T and, for targets, dU, dP and dg."""
        gate = None if self.gate is None else self.gate[samples]
        targets = None if targets is None else targets.contiguous()
        every = _kernel(self.children[samples], gate, pulled.contiguous(), targets)
        # T and dU have a part for each range of children
        found = [x[0] if len(x) == 1 else x.sum(0) for x in every[: 1 if targets is None else 2]]
        return (*found, *every[2:])

    def blocks(self, samples: slice) -> Iterator[_Block]:
        """Yield the children of some samples in blocks."""
        count, wide = self.children.shape[2], self.wide
        for i in range(0, count, self.most):
            where = samples, slice(None), slice(i, min(i + self.most, count))
            poses, gate, closed = self.children[where].to(wide).flatten(0, 1).flatten(2), None, None
            if self.gate is not None:
                gate = self.gate[where].to(wide).flatten(0, 1).unsqueeze(2)
                closed = gate == 0
                poses = poses.masked_fill(closed & ~poses.isfinite().all(2, keepdim=True), 0.0)
            yield _Block(where[2], poses, gate, closed)

    def zeros(self, samples: slice) -> Tensor:
        """Return sums over no poses ``[b G, M or 1, C D]``."""
        count = len(self.children[samples]) * self.groups
        return self.matrices.new_zeros(count, self.parents if self.m else 1, self.pose.numel())

    def add(self, sums: Tensor, coefficients: Tensor | None, poses: Tensor) -> None:
        """Add sums of poses ``[b G, i, C D]``, for coefficients ``[b G, i, M]`` or 1 / M, to ``sums``."""
        if coefficients is None:
            sums += poses.sum(1, keepdim=True) / self.parents
        else:
            sums.baddbmm_(coefficients.mT, poses)

    def forward(self, samples: slice, pulled: Tensor | None) -> Tensor:
        """Return T of some samples."""
        if pulled is not None and self.fuses:
            return self.kernel(samples, pulled)[0]
        found, asked = self.zeros(samples), None if pulled is None else self.by_group(pulled)
        for block in self.blocks(samples):
            gated = block.gated(block.poses)
            r = None if asked is None else torch.bmm(block.opened(block.poses), asked.mT).softmax(2)
            self.add(found, r, gated)
        return self.by_matrix(found)

    def backward(
        self, samples: slice, pulled: Tensor | None, targets: Tensor, flows: bool, needs_gate: bool
    ) -> tuple[Tensor, ...]:
        """Return T, dU, dP ``[b, G, n, C D]`` and dg ``[b, G, n]`` of some samples; ``flows``: through coefficients."""
        if pulled is not None and self.fuses:
            return self.kernel(samples, pulled, targets)
        targets, pulled = self.by_group(targets), None if pulled is None else self.by_group(pulled)
        found, dpulled, dposes, dgate = self.zeros(samples), self.zeros(samples), [], []
        for block in self.blocks(samples):
            gated, r = block.gated(block.poses), None
            if pulled is None:
                shares = targets.expand(block.poses.shape)
            else:
                r = torch.bmm(block.poses, pulled.mT).softmax(2)
                shares = torch.bmm(r, targets)
            if needs_gate:
                dgate.append(block.dgate(shares))
            if pulled is not None and flows:
                gains = torch.bmm(block.poses, targets.mT)
                dlogits = block.opened(torch.ops.aten._softmax_backward_data(gains, r, 2, gains.dtype))
                shares.baddbmm_(dlogits, pulled)
                self.add(dpulled, dlogits, gated)
            self.add(found, None if r is None else block.opened(r), gated)
            dposes.append(block.gated(shares))
        found, dpulled = self.by_matrix(found), self.by_matrix(dpulled)
        return found, dpulled, torch.cat(dposes, 1), torch.cat(dgate, 1) if needs_gate else found.new_empty(0)


def sums(votes: VoteInputs, query: Tensor | None, scale: float) -> Tensor:
    """Return ``S_m = sum_i g_i r_im V_im`` ``[*places, M, C, E]`` for ``r = softmax_m(scale <Q_m, V_im>)``.

    ``query`` is ``[*places, M, C, E]``, or None for ``r = 1 / M``. S has the accumulation dtype.
    """
    call = _Call(votes, query, scale, 2, fuses(votes))
    total = call.matrices.new_empty(votes.poses)
    for samples in call.samples:
        pulled = None if call.asked is None else call.pulled(call.asked[samples])
        total.flatten(0, -4)[samples] = call.pushed(call.forward(samples, pulled))
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
    call, pose = _Call(votes, query, scale, 3, not detach and fuses(votes)), votes.children.shape[-2:]
    shape = (prod(positions_of(votes)), seen_of(votes), *pose)
    heads, flows = call.by_sample(grad), query is not None and not detach
    like: dict[str, Any] = {"children": votes.children, "weight": call.matrices, "gate": votes.gate, "query": query}
    made = {name: heads.new_zeros(like[name].shape) for name in needs if dchildren is None or name != "children"}
    if dchildren is not None and "children" in needs:
        made["children"] = dchildren
    into = {n: call.grouped(made[n].view(shape[:k])) for n, k in (("children", 4), ("gate", 2)) if n in made}
    for samples in call.samples:
        head, asked = heads[samples], None if call.asked is None else call.asked[samples]
        pulled = None if asked is None else call.pulled(asked)
        found, dpulled, dposes, dgate = call.backward(samples, pulled, call.pulled(head), flows, "gate" in made)
        if "children" in made:
            into["children"][samples] += dposes.view(into["children"][samples].shape)
        if "gate" in made:
            into["gate"][samples] = dgate.view(into["gate"][samples].shape)
        if "weight" in made:
            made["weight"] += call.outer(found, head)
            if flows and asked is not None:
                made["weight"] += call.outer(dpulled, asked)
        if "query" in made:
            made["query"].flatten(0, -4)[samples] = call.pushed(dpulled) * scale
    if "weight" in made:
        weight: Any = votes.weight
        dense = made["weight"].unflatten(1, (call.groups, -1)).transpose(0, 1)
        made["weight"] = dense.new_empty_strided(weight.shape, gradient_strides(weight)).copy_(dense)
    return made
