"""The host side of every routing: workspace, the launches of forward and of backward, the deterministic mode.

Workspace, beside the outputs. "Parents" are the B * L * M * C * E values of one parents tensor in float32.

Forward: if positions are too few for the device, the sums of each range of children (attention: one parents; pooling:
one parents and two values for each parent; Gaussian: two or three parents and two values for each parent), in all at
most a few tiles for each processor. If competing parents take two sweeps, 2 * B * L * I values.

Backward: the parents' gradients of each range, 3 * B * L * I values for two sweeps, and in half precision the float32
sums that are rounded in the end. If the mode is deterministic or many children share their matrices, parts of dW, 64
MiB in all. All iterations add to the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .backward import _backward_kernel, _matrix_backward_kernel
from .call import Call, processors
from .forward import _finish_kernel, _forward_kernel, _normalizer_kernel
from .schedule import Schedule, matrix_schedule, power_of_two
from .tiles import ADD, ATOMIC, STORE

_MANY_SHARE = 64  # children that share their matrices
_ALONE = (1, 1, 1, 1, 0, 0, 1, 1)  # every child is seen once, by one position


def _normalizers(call: Call, iteration: Any, chosen: Schedule, grads: Any) -> tuple[Tensor, Tensor | None]:
    """Return the log-sum-exp of scores over all parents, for every (position, child).

    With given gradients also the average gain, weighed by the coefficients.
    """
    normalizers = call.empty(call.positions, call.children)
    averages = None if grads is None else torch.empty_like(normalizers)
    wanted = call.facts.limits.resident * processors(call.device) // (chosen.blocks * chosen.warps)
    per_split = -(-call.children // min(call.children, max(1, wanted)))
    call.walk(
        _normalizer_kernel,
        chosen.blocks * -(-call.children // per_split),
        iteration=iteration,
        grads=grads,
        normalizers=normalizers,
        totals=torch.empty_like(normalizers),
        averages=averages,
        blocks=chosen.blocks,
        tiles=chosen.tiles,
        per_split=per_split,
        **call.tile(chosen),
    )
    return normalizers, averages


def forward(call: Call, iteration: Any, results: tuple[Tensor | None, ...], scored: bool) -> None:
    """Run an iteration into its ``results``.

    Parameters
    ----------
    iteration
        Its tensors and numbers.
    scored
        Whether a child's logits may differ between parents; else no softmax is needed.
    """
    chosen = call.schedule(backward=False)
    normalizers = None
    if call.routing.traits.competing and chosen.tiles > 1 and scored:
        normalizers, _ = _normalizers(call, iteration, chosen, None)
    whole = chosen.splits == 1 or not call.routing.sums
    parts = () if whole else tuple(call.empty(*call.parts(kind, chosen.splits)) for kind in call.routing.sums)
    call.walk(
        _forward_kernel,
        chosen.blocks * chosen.tiles * chosen.splits,
        iteration=iteration,
        results=results if whole else parts,
        normalizers=normalizers,
        blocks=chosen.blocks,
        tiles=chosen.tiles,
        per_split=chosen.per_split,
        WHOLE=whole,
        **call.tile(chosen),
    )
    if not whole:
        tile, blocks = call.pose_tile(call.poses)
        call.launch(
            _finish_kernel,
            blocks,
            parts=parts,
            iteration=iteration,
            results=results,
            poses=call.poses,
            splits=chosen.splits,
            algebra=call.routing.algebra,
            **tile,
        )


@dataclass
class Gradients:
    """The gradients that a backward call makes, in float32, summed over the iterations that :meth:`add` walks.

    Attributes
    ----------
    call
        The call.
    wanted
        Which of the gradients of children, weight, bias and gate.
    parents
        Which of the parents' gradients (:attr:`fastcaps.triton_kernels.call.Routing.gradients`).
    betas
        Whether gradients of the betas have a pair of values for every child and parent.
    each_tile
        Whether every tile of parents has its own part of a gate's gradient.
    iterations
        How many there are.
    found
        By name, tensors that were made; ``parents`` is a list.
    """

    call: Call
    wanted: Sequence[bool]
    parents: Sequence[bool]
    betas: bool = False
    each_tile: bool = False
    iterations: int = 1
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.children, self.weight, with_bias, self.gate = self.wanted
        self.bias = self.call.tensors[2] if with_bias else None

    def add(self, iteration: Any, grads: tuple[Tensor | None, ...], scored: bool) -> None:
        """Add the gradients of an iteration, from ``grads``: those of its sums, and other tensors of its algebra."""
        call, given = self.call, {"iteration": iteration, "grads": grads}
        swept: list[tuple[Tensor, Tensor | None]] = []

        def sweep(chosen: Schedule) -> tuple[Tensor | None, Tensor | None]:
            if not call.routing.traits.competing or chosen.tiles == 1 or not (scored or self.gate):
                return None, None
            if not swept:  # both kernels use the result, whatever their tiles
                swept.append(_normalizers(call, iteration, chosen, grads))
            return swept[0]

        matrices = self.weight or self.bias is not None or self.betas
        # Atomic additions of many children to the same matrices would queue up: instead each program owns matrices, and
        # the votes are made once more.
        apart = call.deterministic or _MANY_SHARE * call.groups <= call.children
        if apart and matrices:
            self._add_matrices(given, sweep)
        if self.children or self.gate or any(self.parents) or (matrices and not apart):
            self._add_others(given, sweep, apart)

    def _sum(self, name: str, *shape: int) -> Tensor:
        """Return the sum of a gradient so far."""
        if name not in self.found:
            self.found[name] = self.call.zeros(*shape)
        return self.found[name]

    def _add_matrices(self, given: dict[str, Any], sweep: Any) -> None:
        """Add dW, dbias (of every parent) and dbetas, summed in a fixed order."""
        call, bias = self.call, self.bias
        chosen, (rows, inner, columns) = matrix_schedule(call.facts), call.pose
        tile, parts = chosen.tile, (chosen.position_splits, chosen.splits)
        depth = chosen.depth if self.weight else power_of_two(inner)
        own_bias = bias is not None and bias.shape[0] > 1
        made: dict[str, Tensor | None] = {"weight": None, "bias": None, "betas": None}
        if self.weight:
            made["weight"] = call.empty(*parts, call.groups, call.parents, inner, columns)
        if bias is not None:
            lead = (parts[0], call.children) if own_bias else (parts[0] * parts[1] * call.groups, 1)
            made["bias"] = call.empty(*lead, call.parents, rows, columns)
        if self.betas:
            made["betas"] = call.empty(parts[0], 2, call.children, call.parents)
        normalizers, averages = sweep(tile)
        call.walk(
            _matrix_backward_kernel,
            call.groups * tile.tiles * -(-inner // depth) * chosen.splits * chosen.position_splits,
            **given,
            normalizers=normalizers,
            averages=averages,
            dweight=made["weight"],
            dbias=made["bias"],
            dbetas=made["betas"],
            blocks=tile.blocks,
            tiles=tile.tiles,
            splits=chosen.splits,
            per_split=chosen.per_split,
            group_children=chosen.group_children,
            OWN_BIAS=own_bias,
            **call.tile(tile, depth),
        )
        for name, part in made.items():
            if part is not None:
                total = part.sum((0, 1)) if name == "weight" else part.sum(0)
                self.found[name] = self.found[name].add_(total) if name in self.found else total

    def _add_others(self, given: dict[str, Any], sweep: Any, apart: bool) -> None:
        """Add dP, dg, the gradients of the parents, and those of matrices unless they are made ``apart``."""
        call, bias, found = self.call, self.bias, self.found
        children, (rows, inner, columns) = call.tensors[0], call.pose
        chosen = call.schedule(backward=True)
        direct = call.window == _ALONE and chosen.tiles == 1
        ordered = call.deterministic and not direct
        if ordered:
            chosen = call.schedule(backward=True, children=call.types)
        dweight = dbias = dbetas = None
        if not apart:
            dweight = self._sum("weight", call.groups, call.parents, inner, columns) if self.weight else None
            dbias = None if bias is None else self._sum("bias", bias.shape[0], call.parents, rows, columns)
            dbetas = self._sum("betas", 2, call.children, call.parents) if self.betas else None
        how = ATOMIC
        if direct and self.children:
            how = ADD if "children" in found else STORE
            if how is STORE:
                dtype = call.dtype if self.iterations == 1 else torch.float32
                found["children"] = torch.empty(children.shape, device=call.device, dtype=dtype)
        tile, within = call.tile(chosen), chosen.positions * chosen.rows <= chosen.depth and chosen.votes >= inner
        if dweight is None and within and call.precision != "ieee":
            # Triton lays out the warps of consecutive products alike: along the rows, if one has no more columns than
            # rows (few rows go to one warp). Then each warp holds all votes. dW has many columns; without it, dP gets
            # more. One stage: loading ahead takes too many registers.
            tile = {**call.tile(chosen, 2 * chosen.depth), "num_stages": 1}
        make = call.zeros if ordered else call.empty
        parents = tuple(
            make(*call.parts(kind, chosen.splits)) if want else None
            for kind, want in zip(call.routing.gradients, self.parents, strict=True)
        )
        normalizers, averages = sweep(chosen)
        launches = [(0, chosen.tiles, 0, call.children)]
        if ordered:
            launches = [
                (tile, 1, first, first + call.types)
                for first in range(0, call.children, call.types)
                for tile in range(chosen.tiles)
            ]
        for first_tile, tiles, first_child, last_child in launches:
            call.walk(
                _backward_kernel,
                chosen.blocks * tiles * chosen.splits,
                **given,
                normalizers=normalizers,
                averages=averages,
                dchildren=self._sum("children", *children.shape) if self.children else None,
                dweight=dweight,
                dbias=dbias,
                dgate=self._sum("gate", *children.shape[:4]) if self.gate else None,
                dbetas=dbetas,
                results=parents,
                blocks=chosen.blocks,
                tiles=tiles,
                first_tile=first_tile,
                first_child=first_child,
                last_child=last_child,
                per_split=chosen.per_split,
                ds_i=0 if bias is None or bias.shape[0] == 1 else call.parents * rows * columns,
                CHILDREN=how.value,
                PARENTS=(ADD if ordered else STORE).value,
                EACH_TILE=self.each_tile,
                **tile,
            )
        found["parents"] = [t if t is None else t.sum(0) if chosen.splits > 1 else t[0] for t in parents]

    def all(self) -> list[Tensor | None]:
        """Return those of children, weight, bias (in its own shape), gate, and of the parents."""
        bias = self.found.get("bias")
        if bias is not None and self.bias is not None:
            bias = bias.sum_to_size(self.bias.shape)
        parents = self.found.get("parents", [None] * len(self.parents))
        return [self.found.get("children"), self.found.get("weight"), bias, self.found.get("gate"), *parents]


def shapes_of(*tensors: Tensor | None) -> list[Sequence[int] | None]:
    """Return the shapes of the tensors; None for those that are absent."""
    return [None if tensor is None else tensor.shape for tensor in tensors]


class Answer:
    """Gradients as the ops return them: empty if not wanted, 0 if not computed.

    ``shapes`` are those of the op's tensors, None where one is absent; the last ``wide`` of them are in float32.
    """

    def __init__(self, call: Call, shapes: Sequence[Sequence[int] | None], needs: int, wide: int = 0) -> None:
        self.shapes, self.device = shapes, call.device
        self.wanted = [bool(needs >> k & 1) and shape is not None for k, shape in enumerate(shapes)]
        self.dtypes = [call.dtype] * (len(shapes) - wide) + [torch.float32] * wide

    def of(self, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the gradients, each in its dtype and shape."""
        answers = []
        for want, shape, gradient, dtype in zip(self.wanted, self.shapes, found, self.dtypes, strict=True):
            if not want or shape is None:
                answers.append(torch.empty(0, device=self.device, dtype=dtype))
            elif gradient is None:
                answers.append(torch.zeros(tuple(shape), device=self.device, dtype=dtype))
            else:
                answers.append(gradient.reshape(shape).to(dtype).contiguous())
        return tuple(answers)
