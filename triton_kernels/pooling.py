"""Pooling routing in Triton, host side: the ops' arguments and results, see :mod:`fastcaps.ops`.

Its algebra: ``pooling_kernels.py``; what all routings share, workspace included: ``launches.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastcaps.rules import DETACH, Rule
from fastcaps.votes import VoteInputs

from .attention import iteration_of, one_iteration, start_of
from .call import Call, Routing, current
from .launches import Answer, Gradients, forward, shapes_of
from .pooling_kernels import POOLING
from .schedule import LIMITS, Limits, Traits

ROUTING = Routing(
    "pooling",
    POOLING,
    sums=("pose", "each", "each"),
    gradients=("pose",),
    traits=Traits(products=2, pose=4, competing=False),
)
refusal = ROUTING.refusal


def pooling_routing(
    votes: VoteInputs, own: Any, options: int, limits: Limits = LIMITS
) -> tuple[Tensor, Tensor, Tensor]:
    """Route one iteration: ``S_m = sum_i r_im V_im`` with a softmax over the children; parents are S or squash(S).

    The same input gives the same bits whatever the options. ``limits``: what a program may hold; tests make it small.
    Returns parents, S ``[1, B, Ho, Wo, M, C, E]``, and the log-sum-exp ``[1, B, Ho, Wo, M]`` in float32.
    """
    one_iteration(own.iterations)
    call = Call(ROUTING, votes, options, limits)
    result, sums = (votes.children.new_empty((*lead, *call.shape)) for lead in ((), (1,)))
    logsumexp = call.empty(1, *call.shape[:-2])
    if call.poses:
        with current(call.device):
            iteration = iteration_of(own.query, (None, None), own.scale, 0.0, own.rule, unit_keys=own.normalize)
            forward(call, iteration, (result, sums, logsumexp), own.query is not None)
    return result, sums, logsumexp


def pooling_routing_backward(
    heads: Sequence[Tensor], votes: VoteInputs, own: Any, needs: int, options: int, limits: Limits = LIMITS
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight, dbias, dgate, dquery of T iterations, summed over them; the head is that of S.

    Every tile of parents decides for itself whether a child behind a gate of 0 is broken (NaN or infinite). Option 1:
    as for :func:`fastcaps.triton_kernels.attention.attention_routing_backward`.
    """
    (grad,), (query, sums, logsumexp, scale, normalize) = heads, own
    detach, iterations = bool(needs & DETACH), len(grad)
    call = Call(ROUTING, votes, options, limits)
    answer = Answer(call, shapes_of(*votes[:4], start_of(query, 0, iterations)), needs)
    if call.poses == 0:
        return answer.of([None] * 5)
    wanted = answer.wanted
    found_for = [*wanted[:3], wanted[3] and not detach]  # a gate acts through coefficients alone
    made = Gradients(call, found_for, [wanted[4] and not detach], each_tile=True, iterations=iterations)
    given = [tensor.contiguous() for tensor in (grad, sums, logsumexp)]
    with current(call.device):
        for k in range(iterations):
            asked = start_of(query, k, iterations)
            iteration = iteration_of(asked, (None, None), scale, 0.0, Rule.UNIT, detach, normalize)
            made.add(iteration, tuple(tensor[k] for tensor in given), asked is not None)
    return answer.of(made.all())
