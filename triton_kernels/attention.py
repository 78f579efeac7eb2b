"""The attention pass in Triton, host side.

``S_m = sum_i g_i softmax_m(scale <Q_m, V_im>) V_im``, ``parents = LayerNorm(S)``: arguments, layouts and results are
those of the ops (:mod:`fastcaps.reference`). Its functions: ``attention_kernels.py``; what all passes share, workspace
included: ``skeleton.py``. Backward keeps one parents tensor more (dL/dS).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import attention_kernels, call, skeleton
from .attention_kernels import _attention_norm_backward_kernel
from .call import FROZEN_NEEDS, Call, Pass, current, launch, processors, watched
from .plan import LIMITS, Limits, Plan, plan

__all__ = ["PASS", "attention_pass", "attention_pass_backward", "plan", "plan_call", "refusal", "watched"]

PASS = Pass("attention", attention_kernels, gradients=("pose",), silent=False)
_NORMALIZE, _FROZEN = attention_kernels.NORMALIZE.value, attention_kernels.FROZEN.value


def refusal(device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int) -> str | None:
    """Return why the kernels cannot take a call with poses (C, D, E) and M parents, or None if they can."""
    return call.refusal(PASS, device, dtype, pose, parents)


def plan_call(
    children: Tensor,
    weight: Tensor,
    window: Sequence[int],
    *,
    backward: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> Plan:
    """Return how a call with these arguments would be cut up; nothing runs, and meta tensors will do."""
    return Call(PASS, children, weight, None, None, window, allow_tf32=allow_tf32, limits=limits).plan(backward)


def attention_pass(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    *,
    deterministic: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> tuple[Tensor, Tensor]:
    """Route once; see :func:`fastcaps.reference.attention_pass`. The same input gives the same bits in either mode.

    Parameters
    ----------
    deterministic
        Makes no difference here: forward adds nothing up in an order that could change.
    allow_tf32
        Whether products of float32 numbers may be rounded to TF32 on tensor cores.
    limits
        What a program may hold; tests make it small.
    """
    affine = (norm_weight, norm_bias) if normalize else (None, None)
    here = Call(
        *(PASS, children, weight, bias, gate, window, (query, *affine)),
        mode=_NORMALIZE * normalize, scale=scale, eps=eps, allow_tf32=allow_tf32, limits=limits,
    )  # fmt: skip
    parents = children.new_empty(here.shape)
    sums = here.empty(*here.shape) if normalize else here.empty(0)
    if parents.numel():
        with current(here.device):
            skeleton.forward(here, (parents, sums), ("pose",), query is not None)
    return parents, sums


def _slope(
    here: Call,
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    normalize: bool,
    affine: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dS in float32, and the gradients of the affine ``[2, C * E]`` if they are asked for."""
    if not normalize:
        if grad_parents is None:
            return here.zeros(*here.shape), None
        return grad_parents.to(torch.float32).contiguous(), None
    slope = here.empty(*here.shape)
    tile, blocks = here.pose_tile()
    per_split = -(-blocks // min(blocks, max(1, here.limits.resident * processors(here.device) // tile["num_warps"])))
    programs = -(-blocks // per_split)
    parts = here.empty(programs, 2, here.pose[0] * here.pose[2]) if affine else None
    launch(
        _attention_norm_backward_kernel,
        programs,
        grad_parents=None if grad_parents is None else grad_parents.contiguous(),
        grad_sums=None if grad_sums is None else grad_sums.contiguous(),
        saved_sums=sums.contiguous(),
        norm_weight=None if norm_weight is None else norm_weight.contiguous(),
        slope=slope,
        affine=parts,
        poses=here.poses,
        per_split=per_split,
        eps=here.eps,
        **tile,
    )
    return slope, None if parts is None else parts.sum(0)


def attention_pass_backward(
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
    *,
    deterministic: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return the seven gradients; see :func:`fastcaps.reference.attention_pass_backward`.

    Parameters
    ----------
    needs
        Bit k asks for gradient k; bit 30 takes the coefficients for constants.
    deterministic
        Add everything up in one order: dP, dgate and dQ by a launch for each place in the window, which no two windows
        share, dW and dbias by programs that own them. Otherwise atomic additions do it.
    allow_tf32, limits
        As for :func:`attention_pass`.
    """
    frozen = bool(needs & FROZEN_NEEDS)
    here = Call(
        *(PASS, children, weight, bias, gate, window, (query, None, None)),
        mode=_FROZEN * frozen, scale=scale, eps=eps, allow_tf32=allow_tf32, limits=limits,
    )  # fmt: skip
    inputs = (children, weight, query, bias, gate)
    affine_shape = (here.pose[0] * here.pose[2],)
    wanted = [bool(needs >> k & 1) and tensor is not None for k, tensor in enumerate(inputs)]
    wanted += [bool(needs >> k & 1) and normalize and grad_parents is not None for k in (5, 6)]
    shapes = [None if tensor is None else tensor.shape for tensor in inputs] + [affine_shape] * 2
    if here.poses == 0:
        return skeleton.answer(here, wanted, shapes, [None] * 7)
    with current(here.device):
        slope, affine = _slope(here, grad_parents, grad_sums, norm_weight, sums, normalize, wanted[5] or wanted[6])
        asked = skeleton.Wanted(
            children=wanted[0],
            weight=wanted[1],
            bias=bias if wanted[3] else None,
            gate=wanted[4],
            own=[wanted[2] and not frozen],
        )
        found = skeleton.gradients(here, (slope,), asked, deterministic, query is not None)
    found["query"] = found["own"][0]
    made = [found.get(name) for name in ("children", "weight", "query", "bias", "gate")]
    return skeleton.answer(here, wanted, shapes, [*made, *([None] * 2 if affine is None else affine.unbind(0))])
