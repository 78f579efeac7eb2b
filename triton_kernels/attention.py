"""Attention routing in Triton, host side: the ops' arguments and results, see :mod:`fastcaps.ops`.

Its algebra: ``attention_kernels.py``; what all routings share, workspace included: ``launches.py``. Backward keeps one
further parents tensor for each iteration (dL/dS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastcaps.rules import DETACH, Rule
from fastcaps.votes import VoteInputs

from .attention_kernels import ATTENTION, Attention, _norm_backward_kernel
from .call import Call, Routing, current, processors
from .launches import Answer, Gradients, forward, shapes_of
from .schedule import LIMITS, Limits

ROUTING = Routing("attention", ATTENTION, sums=("pose",), gradients=("pose",))
refusal = ROUTING.refusal


def iteration_of(
    query: Tensor | None,
    affine: Sequence[Tensor | None],
    scale: float,
    eps: float,
    rule: int,
    detach: bool = False,
    unit_keys: bool = False,
) -> Attention:
    """Return the tensors and numbers of an iteration of attention or pooling, as the kernels take them."""
    tensors = (None if tensor is None else tensor.contiguous() for tensor in (query, *affine))
    return Attention(*tensors, scale, eps, *(tl.constexpr(number) for number in (int(rule), detach, unit_keys)))  # type: ignore[arg-type, call-arg]


def start_of(tensor: Tensor | None, k: int, iterations: int) -> Tensor | None:
    """Return iteration k's entry of a tensor for all iterations, or for all but the first; None if it has none."""
    if tensor is None or k + len(tensor) < iterations:
        return None
    return tensor[k - iterations]


def one_iteration(iterations: int) -> None:
    """Raise ValueError unless a call is of one iteration."""
    if iterations != 1:
        raise ValueError(f"the Triton kernels route one iteration at a time, got {iterations}")


def attention_routing(votes: VoteInputs, own: Any, options: int, limits: Limits = LIMITS) -> tuple[Tensor, Tensor]:
    """Route one iteration: ``S_m = sum_i g_i softmax_m(scale <Q_m, V_im>) V_im``.

    Parents are LayerNorm(S), S or squash(S).

    The same input gives the same bits whatever the options. ``limits``: what a program may hold; tests make it small.
    Returns parents, and S ``[1, B, Ho, Wo, M, C, E]`` in float32.
    """
    one_iteration(own.iterations)
    call = Call(ROUTING, votes, options, limits)
    result, sums = votes.children.new_empty(call.shape), call.empty(1, *call.shape)
    if call.poses:
        with current(call.device):
            iteration = iteration_of(own.query, (own.norm_weight, own.norm_bias), own.scale, own.eps, own.rule)
            forward(call, iteration, (result, sums), own.query is not None)
    return result, sums


def _slope(
    call: Call, grad: Tensor, sums: Tensor, norm_weight: Tensor | None, eps: float, affine: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dS of all iterations in float32, and the affine's gradients ``[2, C * E]`` if ``affine``."""
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
    heads: Sequence[Tensor], votes: VoteInputs, own: Any, needs: int, options: int, limits: Limits = LIMITS
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight, dbias, dgate, dquery, dnorm_weight, dnorm_bias of T iterations, summed over them.

    The head ``[T, ...]`` is that of LayerNorm(S) if ``sums`` are given, else of S. With option 1 all sums have a fixed
    order: dP, dgate and dQ have a launch for each place in the window, which no two windows share, and each program
    makes its own part of dW and dbias. Otherwise programs add atomically.
    """
    (grad,), (query, norm_weight, sums, scale, eps) = heads, own
    detach, iterations = bool(needs & DETACH), len(grad)
    call = Call(ROUTING, votes, options, limits)
    affine_shape = None if sums is None else (call.pose[0] * call.pose[2],)
    answer = Answer(call, [*shapes_of(*votes[:4], start_of(query, 0, iterations)), affine_shape, affine_shape], needs)
    if call.poses == 0:
        return answer.of([None] * 7)
    wanted = answer.wanted
    made = Gradients(call, wanted[:4], [wanted[4] and not detach], iterations=iterations)
    slope, affine = grad.contiguous(), None
    with current(call.device):
        if sums is not None:
            slope, affine = _slope(call, slope, sums, norm_weight, eps, wanted[5] or wanted[6])
        for k in range(iterations):
            asked = start_of(query, k, iterations)
            made.add(iteration_of(asked, (None, None), scale, eps, Rule.PLAIN, detach), (slope[k],), asked is not None)
    return answer.of([*made.all(), *([None] * 2 if affine is None else affine.unbind(0))])
