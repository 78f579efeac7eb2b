"""The ops of routings whose parents compete: inverted attention, and dynamic routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import backends, reference
from fastcaps.checks import accumulation_dtype, widen
from fastcaps.ops import folded, products, uniform
from fastcaps.ops.query import QueryRouting, check_like
from fastcaps.ops.reverse import Reverse
from fastcaps.ops.shared import EVEN, FUSED, LIBRARY
from fastcaps.ops.signature import Gradients, Results
from fastcaps.reference.attention import parents_of
from fastcaps.reference.verbs import blocks_of
from fastcaps.rules import DETACH, Rule
from fastcaps.votes import VoteInputs, autocast_dtype, without_autocast


class Attention(NamedTuple):
    """What the op takes after the votes; see :func:`fastcaps.reference.attention_routing` for one iteration."""

    query: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    scale: float = 1.0
    eps: float = 0.0
    rule: int = int(Rule.SQUASH)
    iterations: int = 1
    detach: bool = False
    coefficients: bool = False


class Backward(NamedTuple):
    """What its backward takes after the votes."""

    query: Tensor | None
    norm_weight: Tensor | None
    sums: Tensor | None
    scale: float
    eps: float


class AttentionRouting(QueryRouting):
    """The op and its backward."""

    stem = "attention"
    Own, Rest = Attention, Backward
    history = ("sums",)
    constant = frozenset(("query",))
    reversed = (
        "Tensor grad",
        "Tensor? query, Tensor? norm_weight, Tensor? norm_bias, Tensor sums, float scale, float eps, int rule",
    )

    def __call__(self, votes: VoteInputs, own: Attention) -> tuple[Any, ...]:
        """Run the op, except a first iteration that torch's convolution or matmul computes."""
        if own.query is not None or self.adds(own) or not uniform.torch_runs_first_iteration(votes):
            return self.route(votes, own)
        parents = self._without_parents(votes, own)
        if own.iterations > 1:
            return self.route(votes, own._replace(query=parents, iterations=own.iterations - 1))
        return parents, None, blocks_of(votes).uniform() if own.coefficients else None

    def _without_parents(self, votes: VoteInputs, own: Attention) -> Tensor:
        """Return the parents of a first iteration by the library's product, under the op's rule for autocast."""
        device, norm = votes.children.device.type, own.rule == Rule.LAYER_NORM
        if autocast_dtype(device) is not None:
            votes, own = self.given(self.cast((*votes, *own)))
        backends.choose_formula(self.name, self.stem, votes, EVEN)
        with without_autocast(device):
            return uniform.uniform_parents(votes, own.norm_weight, own.norm_bias, own.eps, norm)

    def library(self, votes: VoteInputs, backward: bool) -> tuple[str, str] | None:
        if folded.serves(votes):
            return FUSED if folded.fuses(votes) else LIBRARY
        return LIBRARY if products.serves(votes, backward) else None

    def by_library(self, votes: VoteInputs, own: Attention) -> tuple[Any, ...]:
        votes = votes if votes.weight is not None else products.cleaned(votes)
        return self.joined_by(products.attention_routing, votes, own)

    def backward_by_library(self, heads: Gradients, votes: VoteInputs, rest: Backward, needs: int) -> Sequence[Tensor]:
        (grad,) = heads
        assert grad is not None
        self.check_backward(heads, votes, rest)
        given = {**votes._asdict(), **rest._asdict()}
        names = {name for name in self.tensors if needs & self.bit[name] and self.gradient_shape(name, given)}
        reverse = products.Reverse(self, self.run_backward, votes, len(grad), names - {"query"}, False)
        found: dict[str, Tensor] = {}
        for k in range(-1, -len(grad) - 1, -1):
            found = reverse.ask(k, (grad[k].unsqueeze(0),), rest, names & {"query"}, bool(needs & DETACH))
        found |= reverse.gradients
        empty = votes.children.new_empty
        made = [found[name].to(votes.children.dtype) if name in names else empty(0) for name in self.tensors]
        return self.with_weight_strides(made, votes, needs)

    def reverse(self, votes: VoteInputs, count: int, needs: set[str], eager: bool) -> Reverse:
        if eager and self.library(votes, backward=True) is not None:
            return products.Reverse(self, self.run_backward, votes, count, needs, False)
        return super().reverse(votes, count, needs, eager)

    def reverse_arguments(self, own: Any, history: Results) -> tuple[Any, ...]:
        return own.query, own.norm_weight, own.norm_bias, *history, own.scale, own.eps, own.rule

    def check(self, votes: VoteInputs, own: Attention) -> None:
        rows, _, columns = votes.pose
        pose = (rows * columns,)
        check_like(votes, own, {"query": votes.poses, "norm_weight": pose, "norm_bias": pose})
        if own.rule not in (Rule.LAYER_NORM, Rule.PLAIN, Rule.SQUASH):
            raise ValueError(f"rule must be 0, 1 or 2, got {own.rule}")

    def fakes(self, votes: VoteInputs, own: Attention) -> Results:
        children, poses = votes.children, votes.poses
        sums = children.new_empty((own.iterations, *poses), dtype=accumulation_dtype(children.dtype))
        return children.new_empty(poses), sums

    def gradient_shape(self, name: str, given: Mapping[str, Any]) -> Sequence[int] | None:
        if name in ("norm_weight", "norm_bias"):
            return None if given["sums"] is None else (given["sums"].shape[-2] * given["sums"].shape[-1],)
        return super().gradient_shape(name, given)

    def steps_of(self, own: Attention, sums: Tensor, dtype: torch.dtype) -> Tensor:
        norm_weight, norm_bias = widen(dtype, own.norm_weight, own.norm_bias)
        return parents_of(sums, norm_weight, norm_bias, own.eps, own.rule).to(dtype)

    def coefficients(self, votes: VoteInputs, own: Attention, results: Results) -> Tensor:
        query = self.last_query(own, results[1], votes.children.dtype)
        return reference.attention_coefficients(votes, query, own.scale)

    def rest(self, own: Attention, queries: Tensor | None, history: Results) -> Backward:
        sums = history[0] if own.rule == Rule.LAYER_NORM else None
        return Backward(queries, own.norm_weight, sums, own.scale, own.eps)


attention_routing = AttentionRouting()
