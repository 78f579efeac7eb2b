"""The border: routings as ops of PyTorch, each with its backward.

``attention_routing``, ``pooling_routing`` and ``gaussian_routing`` make T >= 1 iterations; a pass is a routing of one
iteration. Their leading arguments are the votes (:class:`fastcaps.votes.VoteInputs`), in op layout; what each takes
besides, and what one iteration computes, is said by the function of the same name in :mod:`fastcaps.reference`.
Whoever calls them comes through :class:`~fastcaps.ops.routing.Routing`; the raw ops are
``torch.ops.fastcaps.attention_routing`` and so on.

Workspace
---------
With "parents" short for the B * L * M * C * E numbers of one parents tensor, results hold the parents and the history:
one parents an iteration for attention, the same and a number for each parent for pooling, two of each for Gaussians.
Coefficients, if asked for, are B * L * I * M numbers (twice that while they are made); some 4 MB of votes are used
to make them. Besides, the CPU kernels use

``attention_routing``: partial sums where positions are too few to keep the threads busy, all together a 64th of what
the votes would take (but 1 to 32 MiB), and 0.5 to 1.5 MiB for each thread (the parents and votes of one block, or the
children of a row where they stay for all iterations; with very many parents, the parents of 16 positions a few times).
``pooling_routing`` and ``gaussian_routing``: the same; what a range of children leaves is one parents and two numbers
for each parent, or two parents and as many numbers.

``attention_routing_backward``: two parents an iteration (the query and dL/dS, turned to lanes), one parents more for
each range of children and one ``dweight`` and ``dbias`` for each group of samples that the call is cut into (kept small
by ``csrc/cpu``), and about 1 MiB for each thread. Pooling has two parents and two numbers for each parent, Gaussians
five and three.

A backward of several iterations also makes the query of every iteration again (for Gaussians the variances) and keeps
the gradients of every iteration's parents until the end: two parents an iteration, three for Gaussians and, while those
are put together, two more.

The CUDA kernels use: one parents for each range of children, where positions are too few to fill the device (each range
has at least 8 children); where the parents do not fit into one block, 2 * B * L * I numbers for each block of them, or
fewer times that within 64 MiB; the weights once more where they are rounded to TF32. Backwards: one parents (pooling
and Gaussians: and a number or two for each parent), one for each range of children if there are several, the same for
blocks of parents with 3 numbers for 2; eight of ``dbias`` where all children share it; in the deterministic mode about
64 MiB of parts of ``dweight`` and ``dbias``, or four of them if they are larger, and as much of ``dchildren``
where the parents do not fit into one block. A routing of one launch: its results alone.

Nothing grows with children times parents, but in the reference: some numbers for each pair, and a block of votes.
"""

from __future__ import annotations

from fastcaps.ops.attention import Attention, attention_routing
from fastcaps.ops.gaussian import Gaussian, gaussian_routing
from fastcaps.ops.pooling import Pooling, pooling_routing
from fastcaps.ops.routing import Routing

__all__ = [
    "ROUTINGS",
    "Attention",
    "Gaussian",
    "Pooling",
    "Routing",
    "attention_routing",
    "gaussian_routing",
    "pooling_routing",
]

ROUTINGS: tuple[Routing, ...] = (attention_routing, pooling_routing, gaussian_routing)
