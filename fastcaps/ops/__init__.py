"""The ops of the package: schemas, fake kernels, autograd, autocast.

Each schema is defined once, here; native libraries only implement it. Where none serves the CPU the reference does, op
by op; on a GPU :mod:`fastcaps.dispatch` chooses for each call. Layout and meaning of every argument:
:mod:`fastcaps.reference`. A file a pass, one for each whole routing, and ``registration`` and ``routing`` for what they
have in common.

Workspace
---------
Beside their outputs the CPU kernels use, with "parents" short for the B * L * M * C * E numbers of one parents tensor:

``attention_pass``: partial sums where positions are too few to keep the threads busy, all together a 64th of what the
votes would take (but 1 to 32 MiB), and about 0.5 MiB for each thread (the parents and votes of one block; with very
many parents, the parents of 16 positions a few times).

``attention_pass_backward``: two parents (query and dL/dS turned to lanes), one parents more for each range of children
and one ``dweight`` and ``dbias`` for each group of samples that the call is cut into (``csrc/cpu/cut.cpp`` keeps their
sum small), and about 1 MiB for each thread.

``pooling_pass`` and ``gaussian_pass``: as the attention pass, where what a range of children leaves is one parents and
two numbers for each parent, or two parents and as many.

``pooling_pass_backward`` and ``gaussian_pass_backward``: as the attention pass's, with two parents and two numbers for
each parent at the start, or five and three; a range leaves one parents, or two and a number.

``attention_turns_backward``, ``pooling_turns_backward`` and ``gaussian_turns_backward``: what the pass's backward has
at the start, of every turn. Where a loop over turns serves them: what the pass's backward uses and the gradients of one
turn beside their sums.

Whole routings: what their pass uses. Their results include the history, one parents a turn (two for Gaussians). A
backward makes the query of every turn again (for Gaussians the variances) and keeps the gradients of every turn's
parents until the end: two parents a turn, three for Gaussians and, while those are put together, two more. (Where no
kernel takes many turns at once the gradients of Gaussians are not put together.)

The CUDA kernels use

``attention_pass``: one parents for each range of children, where positions are too few to fill the device (each range
has at least 8 children); 2 * B * L * I numbers where the parents do not fit into one block and, for 64 x 64 weights,
from 33 positions on; the weights once more where they are rounded to TF32.

``attention_pass_backward``: one parents (dL/dS), one parents for each range of children if there are several,
3 * B * L * I numbers as above; in the deterministic mode about 64 MiB of parts of ``dweight`` and ``dbias``, or four of
them if they are larger.

``pooling_pass`` and ``gaussian_pass``: for each range of children one parents and a number for each parent, or two
parents (three in a first turn) and a number, two with betas. Their backwards: one parents and a number for each
parent, or two and a number; for each range what is wanted of the parents' gradients; the rest as the attention pass's.
A routing of one launch: its results alone.

Nothing grows with children times parents. The reference, being the oracle, stores the votes of the whole call.
"""

from __future__ import annotations

from fastcaps.ops.attention import ATTENTION, attention_pass, attention_pass_backward, attention_turns_backward
from fastcaps.ops.attention_routing import ATTENTION_ROUTING, attention_routing
from fastcaps.ops.gaussian import GAUSSIAN, gaussian_pass, gaussian_pass_backward, gaussian_turns_backward
from fastcaps.ops.gaussian_routing import GAUSSIAN_ROUTING, gaussian_routing
from fastcaps.ops.pooling import POOLING, pooling_pass, pooling_pass_backward, pooling_turns_backward
from fastcaps.ops.pooling_routing import POOLING_ROUTING, pooling_routing
from fastcaps.ops.registration import Pass, autocast_dtype, has_kernel
from fastcaps.ops.routing import Routing

__all__ = [
    "ATTENTION",
    "ATTENTION_ROUTING",
    "GAUSSIAN",
    "GAUSSIAN_ROUTING",
    "PASSES",
    "POOLING",
    "POOLING_ROUTING",
    "ROUTINGS",
    "Pass",
    "Routing",
    "attention_pass",
    "attention_pass_backward",
    "attention_routing",
    "attention_turns_backward",
    "autocast_dtype",
    "gaussian_pass",
    "gaussian_pass_backward",
    "gaussian_routing",
    "gaussian_turns_backward",
    "has_kernel",
    "pooling_pass",
    "pooling_pass_backward",
    "pooling_routing",
    "pooling_turns_backward",
    "serve_the_rest",
]

PASSES = (ATTENTION, POOLING, GAUSSIAN)
ROUTINGS = (ATTENTION_ROUTING, POOLING_ROUTING, GAUSSIAN_ROUTING)


def serve_the_rest(key: str) -> None:
    """Register kernels under a dispatch key for what has none yet: the reference for passes, loops for their turns."""
    for one in PASSES:
        if not has_kernel(one.name, key):
            one.serve_by_reference(key)
        one.serve_by_loop(key)
    for routing in ROUTINGS:
        routing.serve_by_passes(key)
