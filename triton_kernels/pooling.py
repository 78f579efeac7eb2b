"""Pooling routing in Triton, host side: the ops' arguments and results, see :mod:`fastcaps.ops`.

Its algebra: ``pooling_kernels.py``; what all routings share, workspace included: ``launches.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastcaps.rules import DETACH, Rule

from .attention import one_turn, start_of, turn_of
from .call import Call, Routing, current
from .launches import Gradients, answer, forward
from .pooling_kernels import POOLING
from .schedule import LIMITS, Crowd, Limits

ROUTING = Routing(
    "pooling",
    POOLING,
    sums=("pose", "each", "each"),
    gradients=("pose",),
    competing=False,
    crowd=Crowd(products=2, pose=4),
)
refusal, schedule_call = ROUTING.refusal, ROUTING.schedule_call


def pooling_routing(
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: int,
    window: Sequence[int],
    query: Tensor | None,
    scale: float,
    normalize: bool,
    rule: int,
    iterations: int,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Route one turn: ``S_m = sum_i r_im V_im`` with a softmax over the children; parents are S or squash(S).

    The same input gives the same bits whatever the options. ``limits``: what a program may hold; tests make it small.
    Returns parents, S ``[1, B, Ho, Wo, M, C, E]``, and the log-sum-exp ``[1, B, Ho, Wo, M]`` in float32.
    """
    one_turn(iterations)
    call = Call(ROUTING, children, weight, bias, gate, parents, window, options, limits)
    result, sums = children.new_empty(call.shape), children.new_empty((1, *call.shape))
    logsumexp = call.empty(1, *call.shape[:4])
    if call.poses:
        with current(call.device):
            turn = turn_of(query, (None, None), scale, 0.0, rule, unit_keys=normalize)
            forward(call, turn, (result, sums, logsumexp), query is not None)
    return result, sums, logsumexp


def pooling_routing_backward(
    grad: Tensor,
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: int,
    window: Sequence[int],
    query: Tensor | None,
    sums: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    needs: int,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight, dbias, dgate, dquery of T turns, summed over them; ``grad`` is that of S.

    Whether a child behind a gate of 0 is broken (NaN or infinite) every tile of parents decides for itself. Option 1:
    as for :func:`fastcaps.triton_kernels.attention.attention_routing_backward`.
    """
    detach, turns = bool(needs & DETACH), len(grad)
    call = Call(ROUTING, children, weight, bias, gate, parents, window, options, limits)
    inputs = (children, weight, bias, gate, start_of(query, 0, turns))
    wanted = [bool(needs >> k & 1) and tensor is not None for k, tensor in enumerate(inputs)]
    shapes = [None if tensor is None else tensor.shape for tensor in inputs]
    dtypes = [call.dtype] * 5
    if call.poses == 0:
        return answer(call, wanted, shapes, [None] * 5, dtypes)
    found_for = [*wanted[:3], wanted[3] and not detach]  # a gate acts through coefficients alone
    made = Gradients(call, found_for, [wanted[4] and not detach], each_tile=True, turns=turns)
    given = [tensor.contiguous() for tensor in (grad, sums, logsumexp)]
    with current(call.device):
        for k in range(turns):
            asked = start_of(query, k, turns)
            turn = turn_of(asked, (None, None), scale, 0.0, Rule.UNIT, detach, normalize)
            made.add(turn, tuple(tensor[k] for tensor in given), asked is not None)
    return answer(call, wanted, shapes, made.all(), dtypes)
