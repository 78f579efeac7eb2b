"""The ops of routings whose parents compete: inverted attention, and dynamic routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.routing import Gradients, Reverse, Routing, part_of, queries_of
from fastcaps.ops.steps import Steps, check_like
from fastcaps.reference import DETACH, Rule
from fastcaps.reference.attention import layer_norm
from fastcaps.vectors import squash
from fastcaps.votes import Votes

__all__ = ["attention_routing"]

QUERY = 16
"""The bit of dquery."""


class Attention(Routing):
    """See :func:`fastcaps.reference.attention_routing` for one turn."""

    stem = "attention"
    own = (
        "Tensor? query, Tensor? norm_weight, Tensor? norm_bias, float scale, float eps, SymInt rule, SymInt iterations"
    )
    flags = ("detach", "coefficients")
    results = "Tensor parents, Tensor sums"
    finals = 1
    grads = "Tensor grad"
    own_backward = "Tensor? query, Tensor? norm_weight, Tensor? sums, float scale, float eps"
    gradients = (
        "Tensor dchildren, Tensor dweight, Tensor dbias, Tensor dgate, Tensor dquery, Tensor dnorm_weight, "
        "Tensor dnorm_bias"
    )
    stacked = frozenset(("query", "sums"))

    def turns(self, given: Any) -> int:
        return given.iterations

    def first(self, given: Any) -> tuple[Any, ...]:
        return (given.query,)

    def start(self, given: Any, turn: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*state, given.norm_weight, given.norm_bias, given.scale, given.eps, given.rule, 1)

    def advance(self, given: Any, state: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[Any, ...]:
        (query,) = state
        return (results[0] if query is None or given.rule != Rule.SQUASH else query + results[0],)

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

    def _left(self, given: Any, sums: Tensor) -> Tensor:
        """Return what turns leave to the next from their S: parents, in the dtype of the children."""
        dtype = given.children.dtype
        if given.rule == Rule.SQUASH:
            return squash(sums, (-2, -1)).to(dtype)
        if given.rule == Rule.PLAIN:
            return sums.to(dtype)
        norm_weight, norm_bias = (None if t is None else t.to(sums.dtype) for t in (given.norm_weight, given.norm_bias))
        return layer_norm(sums, norm_weight, norm_bias, given.eps).to(dtype)

    def coefficients(self, votes: Votes, given: Any, results: Sequence[Tensor]) -> Tensor:
        queries = queries_of(given.query, list(self._left(given, results[1][:-1])), given.rule == Rule.SQUASH)
        return reference.attention_coefficients(votes, None if queries is None else queries[-1], given.scale)

    def backward(
        self, run: Callable[..., Any], together: bool, grads: Gradients, votes: Votes, given: Any, history: Any
    ) -> dict[str, Tensor | None]:
        (grad,), (sums,), turns = grads, history, given.iterations
        adds = given.rule == Rule.SQUASH
        steps = Steps(sums, True) if adds else None
        left = self._left(given, sums[:-1]) if steps is None else steps.vectors[:-1].to(votes.children.dtype)
        # the gradients of LayerNorm(S), or of S
        each = votes.children.new_empty((turns, *sums.shape[1:]))
        queries = queries_of(given.query, list(left), adds)
        normalised = sums if given.rule == Rule.LAYER_NORM else None
        own = (queries, given.norm_weight, normalised, given.scale, given.eps)
        reverse = Reverse(self, run, together and not given.detach, given.needed - {"query"})

        def ask(turn: int | None, bits: int = 0) -> Sequence[Tensor]:
            return reverse.ask(turn, (part_of(each, turn),), votes, own, bits)

        def reach(turn: int, gradient: Tensor) -> None:
            each[turn] = gradient if steps is None else steps.backward(gradient.to(sums.dtype), turn)

        assert grad is not None
        reach(-1, grad)
        if given.detach:
            if reverse.needs:
                reverse.needs |= DETACH
                ask(-1)
            return reverse.total
        carried: Tensor | None = None  # the gradient of the parents, or of their sum so far
        for turn in range(-1, -turns - 1, -1):
            bits = QUERY if turn > -turns or "query" in given.needed else 0
            found = ask(turn, bits)
            if bits:
                carried = carried + found[4] if adds and carried is not None else found[4]
            if turn > -turns:
                assert carried is not None
                reach(turn - 1, carried)
        if together:
            ask(None)
        return {**reverse.total, "query": carried}


attention_routing = Attention()
attention_routing.define()
