"""The ops of routings whose children compete: vector-normed pooling, and dynamic routing the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.routing import Gradients, Reverse, Routing, part_of, queries_of
from fastcaps.ops.steps import POSE, Steps, check_like
from fastcaps.reference import DETACH, Rule
from fastcaps.vectors import squash, unit
from fastcaps.votes import Votes

__all__ = ["pooling_routing"]

QUERY = 16
"""The bit of dquery."""


class Pooling(Routing):
    """See :func:`fastcaps.reference.pooling_routing` for one turn."""

    stem = "pooling"
    own = "Tensor? query, float scale, bool normalize, SymInt rule, SymInt iterations"
    flags = ("detach", "coefficients")
    results = "Tensor parents, Tensor sums, Tensor logsumexp"
    finals = 1
    grads = "Tensor grad"
    own_backward = "Tensor? query, Tensor sums, Tensor logsumexp, float scale, bool normalize"
    gradients = "Tensor dchildren, Tensor dweight, Tensor dbias, Tensor dgate, Tensor dquery"
    stacked = frozenset(("query", "sums", "logsumexp"))

    def turns(self, given: Any) -> int:
        return given.iterations

    def first(self, given: Any) -> tuple[Any, ...]:
        return (given.query,)

    def start(self, given: Any, turn: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*state, given.scale, given.normalize, given.rule, 1)

    def advance(self, given: Any, state: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[Any, ...]:
        (query,) = state
        step = results[0] if given.rule == Rule.SQUASH else self._step(given, results[0])
        return (step if query is None else query + step,)

    def _step(self, given: Any, sums: Tensor) -> Tensor:
        """Return what S adds to the query, rounded to the dtype of the children."""
        wide = sums.to(accumulation_dtype(sums.dtype))
        return (squash(wide, POSE) if given.rule == Rule.SQUASH else unit(wide, POSE)).to(sums.dtype)

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

    def coefficients(self, votes: Votes, given: Any, results: Sequence[Tensor]) -> Tensor:
        queries = queries_of(given.query, list(self._step(given, results[1][:-1])), True)
        asked = None if queries is None else queries[-1]
        return reference.pooling_coefficients(votes, asked, given.scale, given.normalize)

    def backward(
        self, run: Callable[..., Any], together: bool, grads: Gradients, votes: Votes, given: Any, history: Any
    ) -> dict[str, Tensor | None]:
        (grad,), (sums, logsumexp), turns = grads, history, given.iterations
        wide = sums.to(logsumexp.dtype)
        steps = Steps(wide, given.rule == Rule.SQUASH)
        each = sums.new_empty(sums.shape)  # the gradients of S
        queries = queries_of(given.query, list(steps.vectors[:-1].to(sums.dtype)), True)
        own = (queries, sums, logsumexp, given.scale, given.normalize)
        constant = {"query", "gate"} if given.detach else {"query"}
        reverse = Reverse(self, run, together and not given.detach, given.needed - constant)

        def ask(turn: int | None, bits: int = 0) -> Sequence[Tensor]:
            return reverse.ask(turn, (part_of(each, turn),), votes, own, bits)

        def reach(turn: int, gradient: Tensor) -> None:
            straight = given.rule == Rule.UNIT and turn == -1  # the last S is the result
            each[turn] = gradient if straight else steps.backward(gradient.to(wide.dtype), turn)

        assert grad is not None
        reach(-1, grad)
        if given.detach:
            if reverse.needs:
                reverse.needs |= DETACH
                ask(-1)
            return reverse.total
        carried: Tensor | None = None  # the gradient of the sum that is the query
        for turn in range(-1, -turns - 1, -1):
            bits = QUERY if turn > -turns or "query" in given.needed else 0
            found = ask(turn, bits)
            if bits:
                carried = found[4] if carried is None else carried + found[4]
            if turn > -turns:
                assert carried is not None
                reach(turn - 1, carried)
        if together:
            ask(None)
        return {**reverse.total, "query": carried}


pooling_routing = Pooling()
pooling_routing.define()
