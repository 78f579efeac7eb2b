"""What the host does for every pass: workspace, the launches of forward and of backward, the deterministic mode.

Workspace, beside the outputs, with "parents" short for the B * L * M * C * E numbers of one parents tensor in float32:
forward, what a pass sums up (attention one parents, pooling as much and two numbers a parent, the Gaussian pass twice
or three times as much and two numbers a parent) for each range of children where positions are too few for the device
(together at most a few tiles a processor), and B * L * I numbers where competing parents take two sweeps; backward, as
many ranges for the gradients of the parents, 2 * B * L * I numbers for two sweeps, and in half precision the float32
sums that are rounded in the end; where the mode is deterministic or many children share their matrices, parts of dW of
64 MiB together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .backward import _backward_kernel
from .call import Call, processors
from .forward import _finish_kernel, _forward_kernel, _normalizer_kernel
from .ordered import _matrix_backward_kernel
from .plan import Plan, power_of_two

__all__ = ["Wanted", "answer", "forward", "gradients"]

_CROWDED = 64  # children that share their matrices


def _normalizer(call: Call, chosen: Plan, given: tuple[Any, ...] | None) -> tuple[Tensor, Tensor | None]:
    """Sweep over all parents once: log-sum-exp of every (position, child), and what is heard of given gradients."""
    normalizer = call.empty(call.positions, call.children)
    heard = None if given is None else torch.empty_like(normalizer)
    wanted = call.limits.resident * processors(call.device) // (chosen.blocks * chosen.warps)
    ranges = min(call.children, max(1, wanted))
    per_split = -(-call.children // ranges)
    call.launch(
        _normalizer_kernel,
        chosen.blocks * -(-call.children // per_split),
        given=given or (),
        normalizer=normalizer,
        heard=heard,
        per_split=per_split,
        **call.arguments,
        **call.tile(chosen),
    )
    return normalizer, heard


def forward(call: Call, results: tuple[Tensor | None, ...], parts: Sequence[str], scored: bool) -> None:
    """Run a pass into its ``results``.

    Parameters
    ----------
    parts
        Which sums of a range of children meet in memory: "pose" for a parents tensor, "each" for a number a parent.
    scored
        Whether a child's parents differ before its votes are summed; else nobody's softmax need be known.
    """
    chosen = call.plan(backward=False)
    whole = chosen.splits == 1
    normalizer = None
    if call.which.competing and chosen.tiles > 1 and scored:
        normalizer, _ = _normalizer(call, chosen, None)
    left = None if whole else tuple(call.sums(parts, chosen.splits, call.empty))
    call.launch(
        _forward_kernel,
        chosen.blocks * chosen.tiles * chosen.splits,
        **call.gate,
        normalizer=normalizer,
        results=results if left is None else left,
        per_split=chosen.per_split,
        eps=call.eps,
        WHOLE=whole,
        **call.arguments,
        **call.tile(chosen),
    )
    if left is not None:
        tile, blocks = call.pose_tile()
        call.launch(
            _finish_kernel,
            blocks,
            parts=left,
            tensors=call.own,
            results=results,
            poses=call.poses,
            splits=chosen.splits,
            many=call.parents,
            eps=call.eps,
            **tile,
        )


@dataclass
class Wanted:
    """Which gradients a backward call makes, and later those gradients, in float32.

    Attributes
    ----------
    children, weight, gate
        Whether they are wanted.
    bias
        The bias if its gradient is.
    betas
        Whether every child and parent has its own pair of numbers in the gradients of the betas.
    own
        Which of the gradients that the parents have (:attr:`fastcaps.triton_kernels.call.Pass.gradients`).
    each_tile
        Whether every tile of parents has its own part in a gate's gradient.
    found
        By name, tensors; ``own`` is a list.
    """

    children: bool
    weight: bool
    bias: Tensor | None
    gate: bool
    own: Sequence[bool]
    betas: bool = False
    each_tile: bool = False
    found: dict[str, Any] = field(default_factory=dict)


def _ordered_matrix_gradients(call: Call, shared: dict[str, Any], sweep: Any, wanted: Wanted) -> None:
    """Make dW, dbias (of every parent) and dbetas in float32, every sum in one order."""
    chosen = call.matrix_plan()
    tile, (rows, inner, columns) = chosen.tile, call.pose
    bias, parts = wanted.bias, (chosen.position_splits, chosen.splits)
    depth = chosen.depth if wanted.weight else power_of_two(inner)
    dweight = call.empty(*parts, call.groups, call.parents, inner, columns) if wanted.weight else None
    own = bias is not None and bias.shape[0] > 1
    dbias = None
    if bias is not None:
        lead = (parts[0], call.children) if own else (parts[0] * parts[1] * call.groups, 1)
        dbias = call.empty(*lead, call.parents, rows, columns)
    dbetas = call.empty(parts[0], 2, call.children, call.parents) if wanted.betas else None
    normalizer, heard = sweep(tile)
    call.launch(
        _matrix_backward_kernel,
        call.groups * tile.tiles * -(-inner // depth) * chosen.splits * chosen.position_splits,
        **shared,
        normalizer=normalizer,
        heard=heard,
        dweight=dweight,
        dbias=dbias,
        dbetas=dbetas,
        splits=chosen.splits,
        per_split=chosen.per_split,
        group_children=chosen.group_children,
        position_splits=chosen.position_splits,
        OWN_BIAS=own,
        VOTES_BK=tile.depth if call.tensor_cores or inner >= tile.depth else 0,
        **{**call.tile(tile), "BK": depth},
    )
    wanted.found["weight"] = None if dweight is None else dweight.sum((0, 1))
    wanted.found["bias"] = None if dbias is None else dbias.sum(0)
    wanted.found["betas"] = None if dbetas is None else dbetas.sum(0)


def gradients(
    call: Call, given: tuple[Tensor | None, ...], wanted: Wanted, deterministic: bool, scored: bool
) -> dict[str, Any]:
    """Return the gradients that are ``wanted``, by name, in float32; ``own`` of ``[positions * M * ...]``."""
    children, bias, found = call.operands["children"], wanted.bias, wanted.found
    shared = {**call.gate, **call.arguments, "given": given}

    swept: list[tuple[Tensor, Tensor | None]] = []

    def sweep(chosen: Plan) -> tuple[Tensor | None, Tensor | None]:
        if not call.which.competing or chosen.tiles == 1 or not (scored or wanted.gate):
            return None, None
        if not swept:  # what it finds is the same for all tiles
            swept.append(_normalizer(call, chosen, given))
        return swept[0]

    rows, inner, columns = call.pose
    many_bias = None if bias is None else (bias.shape[0], call.parents, rows, columns)
    alone = call.window == (1, 1, 1, 1, 0, 0, 1, 1)  # every child is seen once, by one position
    chosen = call.plan(backward=True)
    direct = alone and chosen.tiles == 1
    ordered = deterministic and not direct
    if ordered:
        chosen = call.plan(backward=True, children=call.types)
    matrices = wanted.weight or bias is not None or wanted.betas
    # Atomics of many children to the same matrices queue up: programs that own these make the votes once more instead.
    apart = deterministic or _CROWDED * call.groups <= call.children
    if apart:
        if matrices:
            _ordered_matrix_gradients(call, shared, sweep, wanted)
    else:
        found["weight"] = call.zeros(call.groups, call.parents, inner, columns) if wanted.weight else None
        found["bias"] = call.zeros(*many_bias) if many_bias is not None else None
        found["betas"] = call.zeros(2, call.children, call.parents) if wanted.betas else None
    found["gate"] = call.zeros(*children.shape[:4]) if wanted.gate else None
    make = call.zeros if ordered else call.empty
    own = [
        call.sums([kind], chosen.splits, make)[0] if want else None
        for kind, want in zip(call.which.gradients, wanted.own, strict=True)
    ]
    if wanted.children and direct:
        found["children"] = torch.empty_like(children, memory_format=torch.contiguous_format)
    elif wanted.children:
        found["children"] = call.zeros(*children.shape)
    if wanted.children or wanted.gate or any(wanted.own) or (matrices and not apart):
        normalizer, heard = sweep(chosen)
        launches = [(0, chosen.tiles, 0, call.children)]
        if ordered:
            launches = [
                (tile, 1, slot * call.types, (slot + 1) * call.types)
                for slot in range(call.slots)
                for tile in range(chosen.tiles)
            ]
        for first_tile, tiles, first_child, last_child in launches:
            call.launch(
                _backward_kernel,
                chosen.blocks * tiles * chosen.splits,
                **shared,
                normalizer=normalizer,
                heard=heard,
                dchildren=found.get("children"),
                dweight=None if apart else found["weight"],
                dbias=None if apart else found["bias"],
                dgate=found["gate"],
                dbetas=None if apart else found["betas"],
                results=tuple(own),
                first_tile=first_tile,
                first_child=first_child,
                last_child=last_child,
                per_split=chosen.per_split,
                ds_i=0 if many_bias is None or many_bias[0] == 1 else call.parents * rows * columns,
                DIRECT=direct,
                ORDERED=ordered,
                EACH_TILE=wanted.each_tile,
                **{**call.tile(chosen), "tiles": tiles},
            )
    found["own"] = [t if t is None else t.sum(0) if chosen.splits > 1 else t[0] for t in own]
    if found.get("bias") is not None and bias is not None:
        found["bias"] = found["bias"].sum_to_size(bias.shape)
    return found


def answer(
    call: Call,
    wanted: Sequence[bool],
    shapes: Sequence[Sequence[int] | None],
    found: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[Tensor, ...]:
    """Return gradients as the ops do: in the children's or the given dtypes, empty ones for what is not wanted.

    What is wanted but was not found is 0.
    """
    answers = []
    for k, (want, shape) in enumerate(zip(wanted, shapes, strict=True)):
        dtype = call.dtype if dtypes is None else dtypes[k]
        if not want or shape is None:
            answers.append(torch.empty(0, device=call.device, dtype=call.dtype))
        elif found[k] is None:
            answers.append(torch.zeros(tuple(shape), device=call.device, dtype=dtype))
        else:
            answers.append(found[k].reshape(shape).to(dtype).contiguous())  # type: ignore[union-attr]
    return tuple(answers)
