"""The ops of routings whose children compete: vector-normed pooling, and dynamic routing of that kind."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.query import QueryRouting, check_like
from fastcaps.ops.signature import Results
from fastcaps.rules import Rule
from fastcaps.vectors import squash, unit
from fastcaps.votes import POSE, VoteInputs


class Pooling(NamedTuple):
    """The op's arguments after the votes; :func:`fastcaps.reference.pooling_routing` describes one iteration."""

    query: Tensor | None = None
    scale: float = 1.0
    normalize: bool = False
    rule: int = int(Rule.SQUASH)
    iterations: int = 1
    detach: bool = False
    coefficients: bool = False


class Backward(NamedTuple):
    """The backward's arguments after the votes."""

    query: Tensor | None
    sums: Tensor
    logsumexp: Tensor
    scale: float
    normalize: bool


class PoolingRouting(QueryRouting):
    """The op and its backward."""

    stem = "pooling"
    Own, Rest = Pooling, Backward
    history = ("sums", "logsumexp")
    constant = frozenset(("gate", "query"))
    competing = False
    reversed = (
        "Tensor grad",
        "Tensor? query, Tensor sums, Tensor logsumexp, float scale, bool normalize, int rule",
    )

    def reverse_arguments(self, own: Any, history: Results) -> tuple[Any, ...]:
        return own.query, *history, own.scale, own.normalize, own.rule

    def step(self, own: Pooling, results: Results) -> Tensor:
        return results[0] if own.rule == Rule.SQUASH else self.steps_of(own, results[0], results[0].dtype)

    def check(self, votes: VoteInputs, own: Pooling) -> None:
        check_like(votes, own, {"query": votes.poses})
        if own.rule not in (Rule.SQUASH, Rule.UNIT):
            raise ValueError(f"rule must be 2 or 3, got {own.rule}")

    def fakes(self, votes: VoteInputs, own: Pooling) -> Results:
        children, count = votes.children, own.iterations
        logsumexp = children.new_empty((count, *votes.parent_values_shape), dtype=accumulation_dtype(children.dtype))
        return children.new_empty(votes.poses), children.new_empty((count, *votes.poses)), logsumexp

    def steps_of(self, own: Pooling, sums: Tensor, dtype: torch.dtype) -> Tensor:
        wide = sums.to(accumulation_dtype(dtype))
        return (squash(wide, POSE) if own.rule == Rule.SQUASH else unit(wide, POSE)).to(dtype)

    def coefficients(self, votes: VoteInputs, own: Pooling, results: Results) -> Tensor:
        query = self.last_query(own, results[1], votes.children.dtype)
        return reference.pooling_coefficients(votes, query, own.scale, own.normalize)

    def rest(self, own: Pooling, queries: Tensor | None, history: Results) -> Backward:
        sums, logsumexp = history
        return Backward(queries, sums, logsumexp, own.scale, own.normalize)


pooling_routing = PoolingRouting()
