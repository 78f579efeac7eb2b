"""The ops of routings whose children compete: vector-normed pooling, and dynamic routing the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.query import GATE, QUERY, QueryRouting, check_like
from fastcaps.reference.seen import POSE
from fastcaps.rules import Rule
from fastcaps.vectors import squash, unit
from fastcaps.votes import Votes

__all__ = ["pooling_routing"]


class Pooling(QueryRouting):
    """See :func:`fastcaps.reference.pooling_routing` for one turn."""

    stem = "pooling"
    state = ("query",)
    own = "Tensor? query, float scale, bool normalize, SymInt rule, SymInt iterations"
    results = "Tensor parents, Tensor sums, Tensor logsumexp"
    own_backward = "Tensor? query, Tensor sums, Tensor logsumexp, float scale, bool normalize"
    stacked = frozenset(("query", "sums", "logsumexp"))
    constant = GATE | QUERY

    def start(self, given: Any, turn: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*state, given.scale, given.normalize, given.rule, 1)

    def advance(self, given: Any, state: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[Any, ...]:
        (query,) = state
        step = results[0] if given.rule == Rule.SQUASH else self.left(given, results[0])
        return (step if query is None else query + step,)

    def reference(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return reference.pooling_routing, reference.pooling_routing_backward

    def check(self, votes: Votes, given: Any) -> None:
        check_like(votes, given, {"query": votes.poses})
        if given.rule not in (Rule.SQUASH, Rule.UNIT):
            raise ValueError(f"rule must be 2 or 3, got {given.rule}")

    def fakes(self, votes: Votes, given: Any) -> tuple[Tensor, ...]:
        children, turns = votes.children, given.iterations
        logsumexp = children.new_empty((turns, *votes.numbers), dtype=accumulation_dtype(children.dtype))
        return children.new_empty(votes.poses), children.new_empty((turns, *votes.poses)), logsumexp

    def left(self, given: Any, sums: Tensor) -> Tensor:
        wide = sums.to(accumulation_dtype(sums.dtype))
        return (squash(wide, POSE) if given.rule == Rule.SQUASH else unit(wide, POSE)).to(sums.dtype)

    def coefficients(self, votes: Votes, given: Any, results: Sequence[Tensor]) -> Tensor:
        queries = self.queries(given, self.left(given, results[1][:-1]).unbind())
        asked = None if queries is None else queries[-1]
        return reference.pooling_coefficients(votes, asked, given.scale, given.normalize)

    def own_of(self, given: Any, queries: Tensor | None, history: Sequence[Tensor]) -> tuple[Any, ...]:
        return queries, *history, given.scale, given.normalize


pooling_routing = Pooling()
pooling_routing.define()
