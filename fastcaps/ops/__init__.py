"""The border: routings as ops of PyTorch, each with its backward.

``attention_routing``, ``pooling_routing`` and ``gaussian_routing`` run T >= 1 iterations; a pass is a routing of one
iteration. Their first arguments are the votes (:class:`fastcaps.votes.VoteInputs`), in op layout; the function of the
same name in :mod:`fastcaps.reference` documents the others. Callers use :class:`~fastcaps.ops.routing.Routing`; the raw
ops are ``torch.ops.fastcaps.attention_routing`` and so on.

Workspace
---------
"1 P" means a tensor of the parents' size, B * L * M * C * E values, "1 M" a value for each parent. The results hold the
parents and, for each iteration, 1 P for attention, 1 P and 1 M for pooling, 2 P and 2 M for Gaussians. Coefficients, if
asked for, take B * L * I * M values (twice that during their computation), and about 4 MB of votes. Nothing else grows
with children times parents, except in the reference: some values for each pair, and a block of votes.

CPU, forward: if there are too few positions to keep the threads busy, 1 P (pooling: and 2 M; Gaussians: 2 P and 2 M)
for each range of children, a 64th of the votes' size in all, within 1 and 32 MiB. 0.5 to 1.5 MiB for each thread; with
very many parents, several times the parents of 16 positions.

CPU, backward: for each iteration 2 P for attention, 2 P and 2 M for pooling, 5 P and 3 M for Gaussians; of several
iterations 2 P more, 3 P for Gaussians, and 2 P while these are stacked; 1 P for each range of children; one ``dweight``
and ``dbias`` for each group of samples into which the call is split; about 1 MiB for each thread.

CPU, by PyTorch's products (attention without matrices): some blocks of 2^20 values, forward and backward, and 2 P.

GPU, by PyTorch's products (attention of shared matrices): at most 256 MB for each of the values of children and parents
and of a pose for each group and parent, in blocks of samples and children; of one sample if that is more. A backward
also has the gradients of children and weight in float32, and 2 P.

CUDA, forward: 1 P for each range of at least 8 children, if there are too few positions to fill the device; if the
parents do not fit into one block, 2 * B * L * I values for each block of them, in parts of at most 64 MiB; a copy of
weights that are rounded to TF32; for several iterations 1 P for dynamic routing and pooling, 1 M for Gaussians.
Backward: 1 P, with 1 or 2 M for pooling and Gaussians, also for each of the ranges of children, which attention and
pooling keep for all their iterations, with 1 P more for each but the first, and Gaussians for one, with 3 P and 2 M
more; in half precision the gradients in float32; for blocks of parents as in the forward, with 3
values instead of 2; up to 32 ``dbias`` of a shared bias; in the deterministic mode about 64 MiB of parts of ``dweight``
and ``dbias``, or four of each if larger, and as much of ``dchildren`` if the parents do not fit into one block. A
routing in one launch uses no workspace; the gradient of a prior about 64 MiB of parts.
"""

from __future__ import annotations

from fastcaps.ops.attention import Attention, attention_routing
from fastcaps.ops.gaussian import Gaussian, gaussian_routing
from fastcaps.ops.pooling import Pooling, pooling_routing
from fastcaps.ops.routing import Routing

__all__ = [
    "ROUTINGS", "Attention", "Gaussian", "Pooling", "Routing", "attention_routing", "gaussian_routing",
    "pooling_routing",
]  # fmt: skip

ROUTINGS: tuple[Routing, ...] = (attention_routing, pooling_routing, gaussian_routing)
