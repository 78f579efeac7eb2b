"""The ops of routings whose parents compete: inverted attention, and dynamic routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.query import QueryRouting, check_like
from fastcaps.reference.attention import layer_norm
from fastcaps.reference.seen import POSE
from fastcaps.rules import Rule
from fastcaps.vectors import squash
from fastcaps.votes import Votes

__all__ = ["attention_routing"]


class Attention(QueryRouting):
    """See :func:`fastcaps.reference.attention_routing` for one turn."""

    stem = "attention"
    state = ("query",)
    own = (
        "Tensor? query, Tensor? norm_weight, Tensor? norm_bias, float scale, float eps, SymInt rule, SymInt iterations"
    )
    results = "Tensor parents, Tensor sums"
    own_backward = "Tensor? query, Tensor? norm_weight, Tensor? sums, float scale, float eps"
    stacked = frozenset(("query", "sums"))

    def start(self, given: Any, turn: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*state, given.norm_weight, given.norm_bias, given.scale, given.eps, given.rule, 1)

    def advance(self, given: Any, state: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[Any, ...]:
        (query,) = state
        return (query + results[0] if query is not None and self.adds(given) else results[0],)

    def reference(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return reference.attention_routing, reference.attention_routing_backward

    def check(self, votes: Votes, given: Any) -> None:
        rows, _, columns = votes.pose
        pose = (rows * columns,)
        check_like(votes, given, {"query": votes.poses, "norm_weight": pose, "norm_bias": pose})
        if given.rule not in (Rule.LAYER_NORM, Rule.PLAIN, Rule.SQUASH):
            raise ValueError(f"rule must be 0, 1 or 2, got {given.rule}")

    def fakes(self, votes: Votes, given: Any) -> tuple[Tensor, ...]:
        children, poses = votes.children, votes.poses
        sums = children.new_empty((given.iterations, *poses), dtype=accumulation_dtype(children.dtype))
        return children.new_empty(poses), sums

    def shape_of(self, name: str, given: Any) -> Sequence[int] | None:
        if name in ("norm_weight", "norm_bias"):
            return None if given.sums is None else (given.sums.shape[-2] * given.sums.shape[-1],)
        return super().shape_of(name, given)

    def left(self, given: Any, sums: Tensor) -> Tensor:
        parents = sums
        if given.rule == Rule.SQUASH:
            parents = squash(sums, POSE)
        elif given.rule == Rule.LAYER_NORM:
            affine = [None if t is None else t.to(sums.dtype) for t in (given.norm_weight, given.norm_bias)]
            parents = layer_norm(sums, affine[0], affine[1], given.eps)
        return parents.to(given.children.dtype)

    def coefficients(self, votes: Votes, given: Any, results: Sequence[Tensor]) -> Tensor:
        queries = self.queries(given, self.left(given, results[1][:-1]).unbind())
        return reference.attention_coefficients(votes, None if queries is None else queries[-1], given.scale)

    def own_of(self, given: Any, queries: Tensor | None, history: Sequence[Tensor]) -> tuple[Any, ...]:
        sums = history[0] if given.rule == Rule.LAYER_NORM else None
        return queries, given.norm_weight, sums, given.scale, given.eps


attention_routing = Attention()
attention_routing.define()
