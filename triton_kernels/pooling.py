"""The pooling pass in Triton, host side.

``S_m = sum_i r_im V_im`` with a softmax over the children: arguments, layouts and results are those of the ops
(:mod:`fastcaps.reference.pooling`). Its functions: ``pooling_kernels.py``; what all passes share, workspace included:
``skeleton.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import call, pooling_kernels, skeleton
from .call import FROZEN_NEEDS, Call, Pass, current, watched
from .plan import LIMITS, Crowd, Limits, Plan

__all__ = ["PASS", "plan_call", "pooling_pass", "pooling_pass_backward", "refusal", "watched"]

PASS = Pass("pooling", pooling_kernels, gradients=("pose",), competing=False, crowd=Crowd(products=2, pose=4))
_NORMALIZE, _FROZEN = pooling_kernels.NORMALIZE.value, pooling_kernels.FROZEN.value


def refusal(device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int) -> str | None:
    """Return why the kernels cannot take a call with poses (C, D, E) and M parents, or None if they can."""
    return call.refusal(PASS, device, dtype, pose, parents)


def plan_call(
    children: Tensor,
    weight: Tensor | None,
    window: Sequence[int],
    *,
    parents: int = 1,
    backward: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> Plan:
    """Return how a call with these arguments would be cut up; ``parents`` is M where no weights tell it.

    Nothing runs, and meta tensors will do.
    """
    here = Call(PASS, children, weight, None, None, window, parents=parents, allow_tf32=allow_tf32, limits=limits)
    return here.plan(backward)


def _parents(query: Tensor | None, bias: Tensor | None) -> int:
    """Return M where there are no weights."""
    if query is not None:
        return query.shape[3]
    return 1 if bias is None else bias.shape[1]


def pooling_pass(
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    *,
    deterministic: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> tuple[Tensor, Tensor]:
    """Pool once; see :func:`fastcaps.reference.pooling.pooling_pass`. The same input gives the same bits either way.

    Parameters
    ----------
    deterministic
        Makes no difference here: forward adds nothing up in an order that could change.
    allow_tf32
        Whether products of float32 numbers may be rounded to TF32 on tensor cores.
    limits
        What a program may hold; tests make it small.
    """
    here = Call(
        *(PASS, children, weight, bias, gate, window, (query,)), mode=_NORMALIZE * normalize,
        scale=scale, parents=_parents(query, bias), allow_tf32=allow_tf32, limits=limits,
    )  # fmt: skip
    parents, logsumexp = children.new_empty(here.shape), here.empty(*here.shape[:4])
    if here.poses:
        with current(here.device):
            skeleton.forward(here, (parents, logsumexp), ("pose", "each", "each"), query is not None)
    return parents, logsumexp


def pooling_pass_backward(
    grad_parents: Tensor | None,
    grad_logsumexp: Tensor | None,
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
    *,
    deterministic: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return the five gradients; see :func:`fastcaps.reference.pooling.pooling_pass_backward`.

    Whether a child behind a gate of 0 is broken (no number) every tile of parents decides for itself.

    Parameters
    ----------
    needs
        Bit k asks for gradient k; bit 30 takes the coefficients for constants.
    deterministic
        Add everything up in one order: dP, dgate and dQ by a launch for each place in the window, which no two windows
        share, and each tile of parents, dW and dbias by programs that own them. Otherwise atomic additions do it.
    allow_tf32, limits
        As for :func:`pooling_pass`.
    """
    frozen = bool(needs & FROZEN_NEEDS)
    here = Call(
        *(PASS, children, weight, bias, gate, window, (query,)), mode=_NORMALIZE * normalize + _FROZEN * frozen,
        scale=scale, parents=_parents(query, bias), allow_tf32=allow_tf32, limits=limits,
    )  # fmt: skip
    inputs = (children, weight, query, bias, gate)
    wanted = [bool(needs >> k & 1) and tensor is not None for k, tensor in enumerate(inputs)]
    shapes = [None if tensor is None else tensor.shape for tensor in inputs]
    if here.poses == 0:
        return skeleton.answer(here, wanted, shapes, [None] * 5)
    slope = torch.zeros_like(parents) if grad_parents is None else grad_parents
    given = (slope, parents, logsumexp, grad_logsumexp)
    asked = skeleton.Wanted(
        children=wanted[0],
        weight=wanted[1],
        bias=bias if wanted[3] else None,
        gate=wanted[4] and not frozen,
        own=[wanted[2] and not frozen],
        each_tile=True,
    )
    with current(here.device):
        found = skeleton.gradients(
            here, tuple(None if t is None else t.contiguous() for t in given), asked, deterministic, query is not None
        )
    found["query"] = found["own"][0]
    return skeleton.answer(
        here, wanted, shapes, [found.get(name) for name in ("children", "weight", "query", "bias", "gate")]
    )
