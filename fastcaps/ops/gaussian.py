"""The ops of routings whose parents are Gaussians: EM routing, and Heinsen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.query import check_like
from fastcaps.ops.reverse import Reverse
from fastcaps.ops.routing import Gradients, Routing
from fastcaps.reference.gaussian import log_sigmas, next_log_weight
from fastcaps.reference.seen import inverse_or_zero
from fastcaps.rules import Rule
from fastcaps.votes import Votes

__all__ = ["gaussian_routing"]

MEAN, VARIANCE, LOG_WEIGHT, BETA_USE, BETA_IGNORE = range(4, 9)
"""The places of gradients, in the order of the op's tensors."""


class Gaussian(Routing):
    """See :func:`fastcaps.reference.gaussian_routing` for one turn."""

    stem = "gaussian"
    state = ("mean", "variance", "log_weight")
    own = (
        "Tensor? mean, Tensor? variance, Tensor? log_weight, Tensor? beta_use, Tensor? beta_ignore, "
        "float[] temperatures, SymInt rule, float eps"
    )
    flags = ("coefficients",)
    results = (
        "Tensor scores, Tensor means, Tensor variances, Tensor all_counts, Tensor all_means, Tensor all_variances, "
        "Tensor all_scores"
    )
    final_count = 3
    grads = "Tensor? grad_counts, Tensor? grad_means, Tensor? grad_variances, Tensor? grad_evidence"
    own_backward = (
        "Tensor? mean, Tensor? variance, Tensor? log_weight, Tensor? beta_use, Tensor? beta_ignore, Tensor counts, "
        "Tensor means, Tensor variances, float eps"
    )
    moments = 2
    wide = frozenset((*state, "beta_use", "beta_ignore"))
    stacked = frozenset((*state, "counts", "means", "variances"))

    def turns(self, given: Any) -> int:
        return len(given.temperatures)

    def tables(self, given: Any) -> tuple[Tensor | None, ...]:
        return () if given.rule == Rule.EM else (given.beta_use, given.beta_ignore)

    def first(self, given: Any) -> tuple[Any, ...]:
        return given.mean, given.variance, given.log_weight

    def start(self, given: Any, turn: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*state, given.beta_use, given.beta_ignore, [given.temperatures[turn]], given.rule, given.eps)

    def advance(self, given: Any, state: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[Any, ...]:
        scores, means, variances = results[:3]
        log_weight = next_log_weight(scores, variances, given.rule)
        return means, None if given.rule == Rule.KMEANS else variances, log_weight

    def reference(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return reference.gaussian_routing, reference.gaussian_routing_backward

    def check(self, votes: Votes, given: Any) -> None:
        shapes = {"mean": votes.poses, "variance": votes.poses, "log_weight": votes.numbers}
        check_like(votes, given, shapes, wide=True)
        if given.rule not in (Rule.EM, Rule.HEINSEN, Rule.KMEANS):
            raise ValueError(f"rule must be 4, 5 or 6, got {given.rule}")
        for name in ("beta_use", "beta_ignore"):
            beta = getattr(given, name)
            if beta is None:
                raise TypeError(f"{name} must be a tensor, got None")
            rows = 1 if beta.dim() == 2 and beta.shape[0] == 1 else votes.seen
            columns = 1 if beta.dim() == 2 and beta.shape[1] == 1 else votes.parents
            check_like(votes, given, {name: (votes.parents,) if given.rule == Rule.EM else (rows, columns)}, wide=True)

    def fakes(self, votes: Votes, given: Any) -> tuple[Tensor, ...]:
        turns, dtype = len(given.temperatures), accumulation_dtype(votes.children.dtype)
        shapes: list[Any] = [votes.numbers, votes.poses, votes.poses]
        shapes += [(turns, *shape) for shape in (votes.numbers, votes.poses, votes.poses, votes.numbers)]
        return tuple(votes.children.new_empty(shape, dtype=dtype) for shape in shapes)

    def coefficients(self, votes: Votes, given: Any, results: Sequence[Tensor]) -> Tensor:
        state = self.first(given)
        if len(given.temperatures) > 1:
            _, means, narrow, scores = (kind[-2] for kind in results[3:])
            state = self.advance(given, state, (scores, means, narrow + given.eps))
        return reference.gaussian_coefficients(votes, *state)

    def backward(self, reverse: Reverse, grads: Gradients, votes: Votes, given: Any, history: Any) -> None:
        counts, means, narrow, scores = history
        rule, turns, (beta_u, beta_a) = given.rule, len(given.temperatures), (given.beta_use, given.beta_ignore)
        em, kmeans = rule == Rule.EM, rule == Rule.KMEANS
        numbers = means.shape[-2] * means.shape[-1]
        variances = narrow + given.eps
        log_sigma = log_sigmas(variances)
        left = (means, None if kmeans else variances, next_log_weight(scores, variances, rule))
        first = self.first(given)
        state = [
            None if x is None else x[:-1] if own is None else torch.cat((own[None], x[:-1]))
            for own, x in zip(first, left, strict=True)
        ]
        state = [None if x is None or len(x) == 0 else x for x in state]
        betas = (None, None) if em else (beta_u, beta_a)
        state_bits = 1 << MEAN | 1 << VARIANCE | 1 << LOG_WEIGHT
        d_score, d_mean, d_variance = grads
        if not em and d_score is None and turns > 1:
            d_score = torch.zeros_like(scores[-1])  # the betas count for the turns before
        silent = 1 << BETA_USE | 1 << BETA_IGNORE if em or d_score is None else 0
        reverse.summed = reverse.needs & ~(silent | state_bits)

        heads: list[tuple[Tensor | None, ...]] = []  # the gradients of what the passes return, from the turn asked on
        heats: list[Tensor | None] = []
        d_log_sigma: Tensor | None = None
        found: Sequence[Tensor] = ()

        own = (*state, *betas, counts, means, narrow, given.eps)

        def ask(turn: int | None, bits: int) -> Sequence[Tensor]:
            wanted = heads if turn is None else heads[:1]
            return reverse.ask(turn, [_stacked(kind) for kind in zip(*wanted, strict=True)], votes, own, bits)

        for turn in range(-1, -turns - 1, -1):
            heat = d_counts = None
            if em and d_score is not None:
                heat = given.temperatures[turn] * d_score
                d_log_sigma = _plus(d_log_sigma, -heat * counts[turn])
                d_counts = -heat * (numbers * beta_u + log_sigma[turn])
            if d_log_sigma is not None:
                d_variance = _plus(d_variance, 0.5 * d_log_sigma[..., None, None] * inverse_or_zero(variances[turn]))
            heats.insert(0, heat)
            heads.insert(0, (d_counts, d_mean, d_variance, None if em else d_score))
            last = turn == -turns
            found = ask(turn, reverse.needs & state_bits if last else state_bits & ~(kmeans << VARIANCE))
            if not last:
                d_mean, d_variance, d_log_weight = found[MEAN], None if kmeans else found[VARIANCE], found[LOG_WEIGHT]
                d_score = d_log_weight * (-scores[turn - 1]).sigmoid()
                d_log_sigma = None if kmeans else -d_log_weight
        for k in (MEAN, VARIANCE, LOG_WEIGHT):
            if reverse.needs >> k & 1:
                reverse.gradients[k] = found[k]
        if reverse.together:
            ask(None, 0)
        if (heat := _stacked(heats)) is not None:
            for k, part in ((BETA_USE, -numbers * (heat * counts)), (BETA_IGNORE, heat)):
                if reverse.needs >> k & 1:
                    reverse.gradients[k] = part.flatten(0, -2).sum(0)


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of what there is."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _stacked(turns: Sequence[Tensor | None]) -> Tensor | None:
    """Return a gradient of all turns, 0 in those that have none; None if no turn has it."""
    like = next((turn for turn in turns if turn is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if t is None else t for t in turns])


gaussian_routing = Gaussian()
gaussian_routing.define()
