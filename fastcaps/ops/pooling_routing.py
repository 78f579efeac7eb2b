"""The op of routings whose children compete: vector-normed pooling, and dynamic routing the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.checks import check, frame_of
from fastcaps.ops.pooling import POOLING, check_pooling
from fastcaps.ops.registration import Grads
from fastcaps.ops.routing import POSE, Reverse, Routing, Steps, asked, queries_of, squashed
from fastcaps.reference import FROZEN, accumulation_dtype
from fastcaps.reference.pooling import parents_of
from fastcaps.vectors import unit

__all__ = ["POOLING_ROUTING", "pooling_routing"]

VECTOR_NORMED, DYNAMIC = 0, 1
"""Values of ``rule``: the query is the sum of ``S / |S|`` and the result S; or it is that of ``squash(S)``, the last of
which is the result."""

TENSORS = ("children", "weight", "bias", "gate")


def _first_query(
    children: Tensor, weight: Tensor | None, bias: Tensor | None, parents: int, window: Sequence[int]
) -> Tensor | None:
    """Return what the first turn asks: nothing, or zeros where only a query can say how many parents there are."""
    if parents_of(weight, None, bias) == parents:
        return None
    return children.new_zeros(frame_of(children, weight, parents, window).poses)


def _check(given: Any) -> None:
    weight, bias, parents = given.weight, given.bias, given.parents
    check(parents >= 1, f"parents must be at least 1, got {parents}")
    check(weight is None or weight.dim() != 4 or weight.shape[1] == parents, f"weight is not for {parents} parents")
    check(bias is None or bias.dim() != 4 or bias.shape[1] in (1, parents), f"bias is not for {parents} parents")
    check_pooling(SimpleNamespace(**vars(given), query=None))
    check(given.rule in (VECTOR_NORMED, DYNAMIC), f"rule must be 0 or 1, got {given.rule}")
    check(given.iterations >= 1, f"iterations must be at least 1, got {given.iterations}")


def _step(sums: Tensor, rule: int) -> Tensor:
    """Return what a turn adds to the query."""
    wide = sums.to(accumulation_dtype(sums.dtype))
    return squashed(wide, sums.dtype) if rule == DYNAMIC else unit(wide, POSE).to(sums.dtype)


def _loop(
    run: Callable[..., Any],
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: float,
    normalize: bool,
    parents: int,
    rule: int,
    iterations: int,
    frozen: bool,
    window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    query = _first_query(children, weight, bias, parents, window)
    history: list[Tensor] = []
    sizes: list[Tensor] = []
    result = children
    for turn in range(iterations):
        result, logsumexp = run(children, weight, query, bias, gate, scale, normalize, window, frozen)
        history.append(result.detach())
        sizes.append(logsumexp.detach())
        if rule == DYNAMIC or turn + 1 < iterations:
            step = _step(result, rule)
            query = step if query is None else query + step
            result = step if rule == DYNAMIC else result
    return result, torch.stack(history), torch.stack(sizes)


def _fake(given: Any) -> tuple[Tensor, ...]:
    children, turns = given.children, given.iterations
    frame = frame_of(children, given.weight, given.parents, given.window)
    logsumexp = children.new_empty((turns, *frame.numbers), dtype=accumulation_dtype(children.dtype))
    return children.new_empty(frame.poses), children.new_empty((turns, *frame.poses)), logsumexp


def _backward(
    run: Callable[..., Any],
    many: Callable[..., Any] | None,
    grads: Grads,
    tensors: Grads,
    outputs: Sequence[Tensor],
    settings: tuple[Any, ...],
    needed: Sequence[bool],
) -> Grads:
    scale, normalize, parents, rule, iterations, frozen, window = settings
    children, weight, bias, gate = tensors
    assert children is not None and grads[0] is not None
    (_, sums, logsumexp), wide = outputs, accumulation_dtype(children.dtype)
    first = _first_query(children, weight, bias, parents, window)
    steps = Steps(sums.to(wide), rule == DYNAMIC)
    queries = queries_of(first, steps.vectors[:-1].to(sums.dtype), True)
    each = torch.empty_like(sums)  # the gradients of S

    # turns are counted from the last, as the first may have no query
    def reach(turn: int, grad: Tensor) -> None:
        straight = rule == VECTOR_NORMED and turn == -1  # the last S is the result
        each[turn] = grad if straight else steps.backward(grad.to(wide), turn)

    def arguments(turn: int | slice) -> Sequence[Any]:
        kept = (children, weight, asked(queries, turn), bias, gate, sums[turn], logsumexp[turn])
        return (each[turn], None, *kept, scale, normalize, window)

    positions = (0, 1, 3, 4)  # of the routing's tensors in the pass, which has a query between them
    wanted = [need and not (frozen and name == "gate") for name, need in zip(TENSORS, needed, strict=True)]
    needs = sum(1 << place for place, want in zip(positions, wanted, strict=True) if want)
    if not needs:
        return [None] * len(tensors)
    reach(-1, grads[0])
    reverse = Reverse(run, many if iterations > 1 and not frozen else None, arguments, needs)
    if frozen:
        reverse.ask(-1, FROZEN)
    else:
        carried = None  # the gradient of the sum that is the query
        for turn in range(-1, -iterations, -1):
            dquery = reverse.ask(turn, 4)[2]
            carried = dquery if carried is None else carried + dquery
            reach(turn - 1, carried)
        reverse.ask(-iterations, 0)
    found = reverse.sums()
    return [found.get(place) for place in positions]


POOLING_ROUTING = Routing(
    name="pooling_routing",
    schema="(Tensor children, Tensor? weight, Tensor? bias, Tensor? gate, float scale, bool normalize, int parents, "
    "int rule, int iterations, bool frozen, int[] window) -> (Tensor result, Tensor sums, Tensor logsumexp)",
    one=POOLING,
    tensors=TENSORS,
    loop=_loop,
    checks=_check,
    fakes=_fake,
    results=1,
    backward=_backward,
)
POOLING_ROUTING.define()
pooling_routing = torch.ops.fastcaps.pooling_routing.default
