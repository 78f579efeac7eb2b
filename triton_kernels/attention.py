"""Attention routing in Triton, host side: the ops' arguments and results, see :mod:`fastcaps.ops`.

Its algebra: ``attention_kernels.py``; what all routings share, workspace included: ``launches.py``. Backward keeps one
parents tensor more a turn (dL/dS).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from fastcaps.rules import DETACH, Rule

from .attention_kernels import ATTENTION, Attention, _norm_backward_kernel
from .call import Call, Routing, current, processors
from .launches import Gradients, answer, forward
from .schedule import LIMITS, Limits

ROUTING = Routing("attention", ATTENTION, sums=("pose",), gradients=("pose",))
refusal, schedule_call = ROUTING.refusal, ROUTING.schedule_call


def turn_of(
    query: Tensor | None,
    affine: Sequence[Tensor | None],
    scale: float,
    eps: float,
    rule: int,
    detach: bool = False,
    unit_keys: bool = False,
) -> Attention:
    """Return what a turn of attention or pooling starts from, and its numbers, as the kernels take them."""
    tensors = (None if tensor is None else tensor.contiguous() for tensor in (query, *affine))
    return Attention(*tensors, scale, eps, *(tl.constexpr(number) for number in (int(rule), detach, unit_keys)))  # type: ignore[arg-type, call-arg]


def start_of(tensor: Tensor | None, k: int, turns: int) -> Tensor | None:
    """Return what turn k starts from, of a tensor of all turns, or of all but the first."""
    if tensor is None or k + len(tensor) < turns:
        return None
    return tensor[k - turns]


def one_turn(turns: int) -> None:
    """Raise ValueError unless a call is of one turn."""
    if turns != 1:
        raise ValueError(f"the Triton kernels route one turn at a time, got {turns}")


def attention_routing(
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: int,
    window: Sequence[int],
    query: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    rule: int,
    iterations: int,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, Tensor]:
    """Route one turn: ``S_m = sum_i g_i softmax_m(scale <Q_m, V_im>) V_im``; parents are LayerNorm(S), S or squash(S).

    The same input gives the same bits whatever the options. ``limits``: what a program may hold; tests make it small.
    Returns parents, and S ``[1, B, Ho, Wo, M, C, E]`` in float32.
    """
    one_turn(iterations)
    call = Call(ROUTING, children, weight, bias, gate, parents, window, options, limits)
    result, sums = children.new_empty(call.shape), call.empty(1, *call.shape)
    if call.poses:
        with current(call.device):
            turn = turn_of(query, (norm_weight, norm_bias), scale, eps, rule)
            forward(call, turn, (result, sums), query is not None)
    return result, sums


def _slope(
    call: Call, grad: Tensor, sums: Tensor, norm_weight: Tensor | None, eps: float, affine: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dS of all turns in float32, and the gradients of the affine ``[2, C * E]`` if they are asked for."""
    slope, poses = torch.empty_like(grad, dtype=torch.float32), len(grad) * call.poses
    tile, blocks = call.pose_tile(poses)
    programs = max(1, call.facts.limits.resident * processors(call.device) // tile["num_warps"])
    per_split = -(-blocks // min(blocks, programs))
    programs = -(-blocks // per_split)
    parts = call.empty(programs, 2, call.pose[0] * call.pose[2]) if affine else None
    call.launch(
        _norm_backward_kernel,
        programs,
        grad_parents=grad,
        sums=sums.contiguous(),
        norm_weight=None if norm_weight is None else norm_weight.contiguous(),
        slope=slope,
        affine=parts,
        poses=poses,
        per_split=per_split,
        eps=eps,
        **tile,
    )
    return slope, None if parts is None else parts.sum(0)


def attention_routing_backward(
    grad: Tensor,
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: int,
    window: Sequence[int],
    query: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor | None,
    scale: float,
    eps: float,
    needs: int,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight, dbias, dgate, dquery, dnorm_weight, dnorm_bias of T turns, summed over them.

    ``grad`` ``[T, ...]`` is that of LayerNorm(S) where ``sums`` are given, else of S. With option 1 everything is added
    up in one order: dP, dgate and dQ by a launch for each place in the window, which no two windows share, dW and dbias
    by programs that own them. Otherwise atomic additions do it.
    """
    detach, turns = bool(needs & DETACH), len(grad)
    call = Call(ROUTING, children, weight, bias, gate, parents, window, options, limits)
    first = start_of(query, 0, turns)
    affine_shape = None if sums is None else (call.pose[0] * call.pose[2],)
    shapes = [None if tensor is None else tensor.shape for tensor in (children, weight, bias, gate, first)]
    shapes += [affine_shape] * 2  # type: ignore[list-item]
    wanted = [bool(needs >> k & 1) and shape is not None for k, shape in enumerate(shapes)]
    dtypes = [call.dtype] * 7
    if call.poses == 0:
        return answer(call, wanted, shapes, [None] * 7, dtypes)
    made = Gradients(call, wanted[:4], [wanted[4] and not detach], turns=turns)
    slope, affine = grad.contiguous(), None
    with current(call.device):
        if sums is not None:
            slope, affine = _slope(call, slope, sums, norm_weight, eps, wanted[5] or wanted[6])
        for k in range(turns):
            asked = start_of(query, k, turns)
            made.add(turn_of(asked, (None, None), scale, eps, Rule.PLAIN, detach), (slope[k],), asked is not None)
    found = [*made.all(), *([None] * 2 if affine is None else affine.unbind(0))]
    return answer(call, wanted, shapes, found, dtypes)
