"""The op of routings whose parents compete: sequential inverted attention, and dynamic routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.attention import ATTENTION, check_attention
from fastcaps.ops.checks import check, frame_of
from fastcaps.ops.registration import Grads
from fastcaps.ops.routing import Reverse, Routing, Steps, asked, queries_of, squashed
from fastcaps.reference import FROZEN, accumulation_dtype
from fastcaps.reference.attention import layer_norm

__all__ = ["ATTENTION_ROUTING", "attention_routing"]

SEQUENTIAL, DYNAMIC = 0, 1
"""Values of ``rule``: parents are ``LayerNorm(S)`` and the next query; parents are ``squash(S)``, the next query their
sum so far."""


def _check(given: Any) -> None:
    check_attention(given)
    check(given.rule in (SEQUENTIAL, DYNAMIC), f"rule must be 0 or 1, got {given.rule}")
    check(given.iterations >= 1, f"iterations must be at least 1, got {given.iterations}")
    norm = given.normalize or given.norm_weight is not None or given.norm_bias is not None
    check(given.rule == SEQUENTIAL or not norm, "rule 1 squashes: it has no LayerNorm")


def _parents(sums: Tensor, affine: Sequence[Tensor | None], eps: float, normalize: bool) -> Tensor:
    """Return the parents of turns of sequential attention from S, in the dtype of S."""
    if not normalize:
        return sums
    norm_weight, norm_bias = (None if tensor is None else tensor.to(sums.dtype) for tensor in affine)
    return layer_norm(sums, norm_weight, norm_bias, eps)


def _loop(
    run: Callable[..., Any],
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
    rule: int,
    iterations: int,
    frozen: bool,
    window: Sequence[int],
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(children.dtype)
    constant = (True,) if frozen else ()
    history: list[Tensor] = []
    parents = children
    for _ in range(iterations):
        tensors = (children, weight, query, bias, gate, norm_weight, norm_bias)
        parents, sums = run(*tensors, scale, eps, normalize, window, *constant)
        history.append((sums if normalize else parents).detach().to(wide))
        if rule == DYNAMIC:
            parents = squashed(parents.to(wide), children.dtype)
            query = parents if query is None else query + parents
        else:
            query = parents
    # a pass that neither normalises nor rounds returns what it would keep: that is its result, not a copy of it
    return parents, torch.stack(history)


def _fake(given: Any) -> tuple[Tensor, ...]:
    shape = frame_of(given.children, given.weight, 0, given.window).poses
    wide = accumulation_dtype(given.children.dtype)
    return given.children.new_empty(shape), given.children.new_empty((given.iterations, *shape), dtype=wide)


def _backward(
    run: Callable[..., Any],
    many: Callable[..., Any] | None,
    grads: Grads,
    tensors: Grads,
    outputs: Sequence[Tensor],
    settings: tuple[Any, ...],
    needed: Sequence[bool],
) -> Grads:
    scale, eps, normalize, rule, iterations, frozen, window = settings
    children, weight, query, bias, gate, norm_weight, norm_bias = tensors
    assert children is not None and grads[0] is not None
    sums, dtype = outputs[1], children.dtype
    steps = Steps(sums, True) if rule == DYNAMIC else None
    left = steps.vectors[:-1] if steps else _parents(sums[:-1], (norm_weight, norm_bias), eps, normalize)
    queries = queries_of(query, left.to(dtype), rule == DYNAMIC)
    each = torch.empty_like(sums, dtype=dtype)  # the gradients of what the passes return, parents or S

    # turns are counted from the last, as the first may have no query
    def reach(turn: int, grad: Tensor) -> None:
        each[turn] = steps.backward(grad.to(sums.dtype), turn) if steps else grad

    def arguments(turn: int | slice) -> Sequence[Any]:
        query_then, kept = asked(queries, turn), sums[turn] if normalize else sums.new_empty(0)
        given = (each[turn], None, children, weight, query_then, bias, gate, norm_weight, kept)
        return (*given, scale, eps, normalize, window)

    first = 4 if needed[2] and not frozen else 0  # whether the first turn's query has a gradient
    needs = sum(1 << k for k, need in enumerate(needed) if need and k != 2 and (normalize or k < 5))
    gradients: list[Tensor | None] = [None] * len(tensors)
    if not needs and not first:
        return gradients
    reach(-1, grads[0])
    reverse = Reverse(run, many if iterations > 1 and not frozen else None, arguments, needs)
    if frozen:
        reverse.ask(-1, FROZEN)
    else:
        carried = None  # the gradient of the parents, or of their sum so far
        for turn in range(-1, -iterations - 1, -1):
            own = 4 if turn > -iterations else first
            found = reverse.ask(turn, own)
            if own:
                carried = found[2] if rule == SEQUENTIAL or carried is None else carried + found[2]
            if turn > -iterations and carried is not None:
                reach(turn - 1, carried)
        gradients[2] = carried if first else None
    for k, gradient in reverse.sums().items():
        gradients[k] = gradient
    return gradients


ATTENTION_ROUTING = Routing(
    name="attention_routing",
    schema="(Tensor children, Tensor weight, Tensor? query, Tensor? bias, Tensor? gate, Tensor? norm_weight, "
    "Tensor? norm_bias, float scale, float eps, bool normalize, int rule, int iterations, bool frozen, int[] window) "
    "-> (Tensor parents, Tensor sums)",
    one=ATTENTION,
    tensors=ATTENTION.tensors,
    loop=_loop,
    checks=_check,
    fakes=_fake,
    results=1,
    backward=_backward,
)
ATTENTION_ROUTING.define()
attention_routing = torch.ops.fastcaps.attention_routing.default
