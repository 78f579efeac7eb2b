"""The attention pass in Triton, host side: arguments, workspace, launches.

``S_m = sum_i g_i softmax_m(scale <Q_m, V_im>) V_im``, ``parents = LayerNorm(S)``: arguments, layouts and results are
those of the ops (:mod:`fastcaps.reference`). Kernels: ``attention_forward.py``, ``attention_backward.py``,
``attention_ordered.py``; what they share of a call: ``attention_call.py``; how it is cut up: ``attention_plan.py``.

Workspace, beside the outputs, with "parents" short for the B * L * M * C * E numbers of one parents tensor in float32:
forward, one parents for each range of children where positions are too few for the device (together at most four tiles
a processor) and B * L * I numbers where parents take two sweeps; backward, one parents (dL/dS), as many ranges for dQ,
2 * B * L * I numbers for two sweeps, and in half precision the float32 sums that are rounded in the end; deterministic
backward, parts of dW of 64 MiB together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .attention_backward import _attention_backward_kernel, _attention_norm_backward_kernel
from .attention_call import Call, current, launch, processors, watched
from .attention_forward import _attention_finish_kernel, _attention_forward_kernel
from .attention_ordered import _attention_matrix_backward_kernel
from .attention_plan import LIMITS, Limits, Plan, largest_pose, matrix_plan, plan, power_of_two

__all__ = ["attention_pass", "attention_pass_backward", "plan", "plan_call", "refusal", "watched"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int) -> str | None:
    """Return why the Triton kernels cannot take a call with poses (C, D, E) and M parents, or None if they can."""
    if device.type in ("cpu", "meta"):
        return f"it runs on GPUs only, the tensors are on {device}"
    if dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, got {dtype}"
    padded = power_of_two(pose[0]) * power_of_two(pose[2])
    if padded > largest_pose():
        return (
            f"a program holds poses of up to {largest_pose()} numbers, got C x E = {pose[0]} x {pose[2]}, "
            f"{padded} when padded to powers of two"
        )
    if parents * pose[0] * pose[2] >= 1 << 31 or pose[1] * pose[2] >= 1 << 31:
        return f"it takes M * C * E and D * E below 2**31, got M = {parents}, (C, D, E) = {pose}"
    return None


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
    return Call(children, weight, None, None, None, 1.0, window, allow_tf32, limits).plan(backward)


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
    call = Call(children, weight, query, bias, gate, scale, window, allow_tf32, limits)
    parents = children.new_empty(call.shape)
    sums = call.empty(*call.shape) if normalize else call.empty(0)
    if call.numbers == 0:
        return parents, sums
    affine = [None if t is None or not normalize else t.contiguous() for t in (norm_weight, norm_bias)]
    chosen = call.plan(backward=False)
    norms = {"norm_weight": affine[0], "norm_bias": affine[1], "eps": eps, "NORMALIZE": bool(normalize)}
    whole = chosen.splits == 1
    with current(call.device):
        normalizer = None
        if chosen.tiles > 1 and query is not None:
            normalizer, _ = call.normalizer(chosen, None)
        target = sums if whole else call.empty(chosen.splits, call.numbers)
        launch(
            _attention_forward_kernel,
            chosen.blocks * chosen.tiles * chosen.splits,
            **call.tensors,
            **call.gate,
            normalizer=normalizer,
            parents=parents,
            saved_sums=target,
            per_split=chosen.per_split,
            WHOLE=whole,
            **norms,
            **call.arguments,
            **call.tile(chosen),
        )
        if not whole:
            poses = call.positions * call.parents
            tile, blocks = call.pose_tile(poses)
            launch(
                _attention_finish_kernel,
                blocks,
                partial=target,
                parents=parents,
                saved_sums=sums,
                poses=poses,
                splits=chosen.splits,
                **norms,
                **tile,
            )
    return parents, sums


def _slope(
    call: Call,
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    eps: float,
    normalize: bool,
    affine: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return dL/dS in float32, and the gradients of the affine ``[2, C * E]`` if they are asked for."""
    if not normalize:
        if grad_parents is None:
            return call.zeros(*call.shape), None
        return grad_parents.to(torch.float32).contiguous(), None
    slope = call.empty(*call.shape)
    poses = call.positions * call.parents
    tile, blocks = call.pose_tile(poses)
    per_split = -(-blocks // min(blocks, max(1, call.limits.resident * processors(call.device) // tile["num_warps"])))
    programs = -(-blocks // per_split)
    parts = call.empty(programs, 2, call.pose[0] * call.pose[2]) if affine else None
    launch(
        _attention_norm_backward_kernel,
        programs,
        grad_parents=None if grad_parents is None else grad_parents.contiguous(),
        grad_sums=None if grad_sums is None else grad_sums.contiguous(),
        saved_sums=sums.contiguous(),
        norm_weight=None if norm_weight is None else norm_weight.contiguous(),
        slope=slope,
        affine=parts,
        poses=poses,
        per_split=per_split,
        eps=eps,
        **tile,
    )
    return slope, None if parts is None else parts.sum(0)


def _ordered_matrix_gradients(
    call: Call, shared: dict[str, Any], sweep: Any, weight: bool, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return dW and dbias (of every parent) in float32, every sum in one order."""
    chosen = matrix_plan(
        call.positions,
        call.children,
        call.groups,
        call.parents,
        call.pose,
        processors=processors(call.device),
        limits=call.limits,
    )
    tile, (rows, inner, columns) = chosen.tile, call.pose
    parts = (chosen.position_splits, chosen.splits)
    dweight = call.empty(*parts, call.groups, call.parents, inner, columns) if weight else None
    own = bias is not None and bias.shape[0] > 1
    dbias = None
    if bias is not None:
        lead = (parts[0], call.children) if own else (parts[0] * parts[1] * call.groups, 1)
        dbias = call.empty(*lead, call.parents, rows, columns)
    normalizer, heard = sweep(tile)
    slices = -(-inner // chosen.depth)
    launch(
        _attention_matrix_backward_kernel,
        call.groups * tile.tiles * slices * chosen.splits * chosen.position_splits,
        **shared,
        normalizer=normalizer,
        heard=heard,
        dweight=dweight,
        dbias=dbias,
        splits=chosen.splits,
        per_split=chosen.per_split,
        group_children=chosen.group_children,
        position_splits=chosen.position_splits,
        OWN_BIAS=own,
        VOTES_BK=chosen.depth if call.tensor_cores or inner >= chosen.depth else 0,
        **{**call.tile(tile), "BK": chosen.depth},
    )
    return (None if dweight is None else dweight.sum((0, 1))), (None if dbias is None else dbias.sum(0))


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
    deterministic
        Add everything up in one order: dP, dgate and dQ by a launch for each place in the window, which no two windows
        share, dW and dbias by programs that own them. Otherwise atomic additions do it.
    allow_tf32, limits
        As for :func:`attention_pass`.
    """
    call = Call(children, weight, query, bias, gate, scale, window, allow_tf32, limits)
    wanted = [bool(needs >> k & 1) for k in range(7)]
    for k, tensor in ((2, query), (3, bias), (4, gate)):
        wanted[k] = wanted[k] and tensor is not None
    wanted[5:] = [w and normalize and grad_parents is not None for w in wanted[5:]]
    found: list[Tensor | None] = [None] * 7
    rows, _, columns = call.pose
    if call.numbers == 0:
        shapes: list[Any] = [t if t is None else t.shape for t in (children, weight, query, bias, gate)]
        shapes += [(rows * columns,)] * 2
        found = [call.zeros(*shape) if want else None for want, shape in zip(wanted, shapes, strict=True)]
    else:
        with current(call.device):
            slope, affine = _slope(
                call, grad_parents, grad_sums, norm_weight, sums, eps, normalize, wanted[5] or wanted[6]
            )
            found[:5] = _gradients(call, slope, wanted, bias, deterministic)
        if affine is not None:
            found[5:] = affine.unbind(0)
    nothing = children.new_empty(0)
    return tuple(
        nothing.clone() if not want or gradient is None else gradient.to(call.dtype).contiguous()
        for want, gradient in zip(wanted, found, strict=True)
    )


def _gradients(
    call: Call, slope: Tensor, wanted: Sequence[bool], bias: Tensor | None, deterministic: bool
) -> list[Tensor | None]:
    """Return the gradients of children, weight, query, bias and gate that are wanted, from dL/dS."""
    children, weight = call.tensors["children"], call.tensors["weight"]
    shared = {**call.tensors, **call.gate, "slope": slope, **call.arguments}

    def sweep(chosen: Plan) -> tuple[Tensor | None, Tensor | None]:
        if chosen.tiles == 1 or (call.tensors["query"] is None and not wanted[4]):
            return None, None
        return call.normalizer(chosen, slope)

    found: list[Tensor | None] = [None] * 5
    many_bias = None if bias is None or not wanted[3] else (bias.shape[0], call.parents, call.pose[0], call.pose[2])
    alone = call.window == (1, 1, 1, 1, 0, 0, 1, 1)  # every child is seen once, by one position
    chosen = call.plan(backward=True)
    direct = alone and chosen.tiles == 1
    ordered = deterministic and not direct
    if ordered:
        chosen = call.plan(backward=True, children=call.types)
    if deterministic:
        if wanted[1] or wanted[3]:
            found[1], found[3] = _ordered_matrix_gradients(call, shared, sweep, wanted[1], bias if wanted[3] else None)
    else:
        found[1] = call.zeros(*weight.shape) if wanted[1] else None
        found[3] = call.zeros(*many_bias) if many_bias is not None else None
    found[4] = call.zeros(*children.shape[:4]) if wanted[4] else None
    dquery = None
    if wanted[2]:
        dquery = (call.zeros if ordered else call.empty)(chosen.splits, call.numbers)
    if wanted[0]:
        found[0] = torch.empty_like(children, memory_format=torch.contiguous_format) if direct else None
        found[0] = call.zeros(*children.shape) if found[0] is None else found[0]
    if wanted[0] or wanted[2] or wanted[4] or not deterministic:
        normalizer, heard = sweep(chosen)
        launches = [(0, chosen.tiles, 0, call.children)]
        if ordered:
            launches = [
                (tile, 1, slot * call.types, (slot + 1) * call.types)
                for slot in range(call.slots)
                for tile in range(chosen.tiles)
            ]
        for first_tile, tiles, first_child, last_child in launches:
            launch(
                _attention_backward_kernel,
                chosen.blocks * tiles * chosen.splits,
                **shared,
                normalizer=normalizer,
                heard=heard,
                dchildren=found[0],
                dweight=None if deterministic else found[1],
                dquery=dquery,
                dbias=None if deterministic else found[3],
                dgate=found[4],
                first_tile=first_tile,
                first_child=first_child,
                last_child=last_child,
                per_split=chosen.per_split,
                ds_i=0 if many_bias is None or many_bias[0] == 1 else call.parents * call.pose[0] * call.pose[2],
                DIRECT=direct,
                ORDERED=ordered,
                **{**call.tile(chosen), "tiles": tiles},
            )
    if dquery is not None:
        found[2] = dquery.sum(0).view(call.shape) if chosen.splits > 1 else dquery.view(call.shape)
    if found[3] is not None and bias is not None:
        found[3] = found[3].sum_to_size(bias.shape)
    return found
