"""The ops of routings whose parents are Gaussians: EM and Heinsen routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.query import check_like
from fastcaps.ops.reverse import Reverse
from fastcaps.ops.routing import Routing
from fastcaps.ops.signature import Gradients, Results, State
from fastcaps.reference.derivatives import inverse_or_zero
from fastcaps.reference.gaussian import log_sigmas, next_log_weight
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs

STATE = ("mean", "variance", "log_weight")


class Gaussian(NamedTuple):
    """The op's arguments after the votes; :func:`fastcaps.reference.gaussian_routing` describes one iteration."""

    mean: Tensor | None = None
    variance: Tensor | None = None
    log_weight: Tensor | None = None
    beta_use: Tensor | None = None
    beta_ignore: Tensor | None = None
    temperatures: Sequence[float] = ()
    rule: int = int(Rule.EM)
    eps: float = 0.0
    coefficients: bool = False


class Backward(NamedTuple):
    """The backward's arguments after the votes."""

    mean: Tensor | None
    variance: Tensor | None
    log_weight: Tensor | None
    beta_use: Tensor | None
    beta_ignore: Tensor | None
    counts: Tensor
    means: Tensor
    variances: Tensor
    eps: float


class GaussianRouting(Routing):
    """The op and its backward."""

    stem = "gaussian"
    Own, Rest = Gaussian, Backward
    state = STATE
    finals = ("scores", "means", "variances")
    history = ("all_counts", "all_means", "all_variances", "all_scores")
    heads = dict.fromkeys(("grad_counts", "grad_means", "grad_variances", "grad_evidence"), "Tensor | None")
    moments = 2
    wide = True

    def iterations(self, own: Gaussian) -> int:
        return len(own.temperatures)

    def single(self, own: Gaussian, k: int) -> Gaussian:
        return own._replace(temperatures=own.temperatures[k : k + 1])

    def tables(self, own: Gaussian) -> tuple[Tensor | None, ...]:
        return () if own.rule == Rule.EM else (own.beta_use, own.beta_ignore)

    def advance(self, own: Gaussian, results: Results) -> State:
        scores, means, variances = results[:3]
        log_weight = next_log_weight(scores, variances, own.rule)
        return {"mean": means, "variance": None if own.rule == Rule.KMEANS else variances, "log_weight": log_weight}

    def reference(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return reference.gaussian_routing, reference.gaussian_routing_backward

    def check(self, votes: VoteInputs, own: Gaussian) -> None:
        shapes = {"mean": votes.poses, "variance": votes.poses, "log_weight": votes.parent_values_shape}
        check_like(votes, own, shapes, wide=True)
        if own.rule not in (Rule.EM, Rule.HEINSEN, Rule.KMEANS):
            raise ValueError(f"rule must be 4, 5 or 6, got {own.rule}")
        for name in ("beta_use", "beta_ignore"):
            beta = getattr(own, name)
            if beta is None:
                raise TypeError(f"{name} must be a tensor, got None")
            rows = 1 if beta.dim() == 2 and beta.shape[0] == 1 else votes.seen
            columns = 1 if beta.dim() == 2 and beta.shape[1] == 1 else votes.parents
            check_like(votes, own, {name: (votes.parents,) if own.rule == Rule.EM else (rows, columns)}, wide=True)

    def fakes(self, votes: VoteInputs, own: Gaussian) -> Results:
        count, dtype = len(own.temperatures), accumulation_dtype(votes.children.dtype)
        shapes: list[Any] = [votes.parent_values_shape, votes.poses, votes.poses]
        shapes += [
            (count, *shape)
            for shape in (votes.parent_values_shape, votes.poses, votes.poses, votes.parent_values_shape)
        ]
        return tuple(votes.children.new_empty(shape, dtype=dtype) for shape in shapes)

    def coefficients(self, votes: VoteInputs, own: Gaussian, results: Results) -> Tensor:
        state: State = {name: getattr(own, name) for name in STATE}
        if len(own.temperatures) > 1:
            _, means, narrow, scores = (kind[-2] for kind in results[3:])
            state = self.advance(own, (scores, means, narrow + own.eps))
        return reference.gaussian_coefficients(votes, **state)

    def backward(self, reverse: Reverse, grads: Gradients, votes: VoteInputs, own: Gaussian, history: Results) -> None:
        counts, means, narrow, scores = history
        beta_u: Any = own.beta_use
        em, kmeans, count = own.rule == Rule.EM, own.rule == Rule.KMEANS, len(own.temperatures)
        numbers = means.shape[-2] * means.shape[-1]
        variances = narrow + own.eps
        log_sigma = log_sigmas(variances)
        left = self.advance(own, (scores, means, variances))
        mean, variance, log_weight = (_queue(getattr(own, name), left[name]) for name in STATE)
        betas = (None, None) if em else (own.beta_use, own.beta_ignore)
        rest = Backward(mean, variance, log_weight, *betas, counts, means, narrow, own.eps)
        d_score, d_mean, d_variance = grads
        if not em and d_score is None and count > 1:
            d_score = torch.zeros_like(scores[-1])  # the betas matter in earlier iterations
        made = {"beta_use", "beta_ignore"} if em or d_score is None else set()
        reverse.summed = reverse.needs - made - {*STATE}

        heads: list[tuple[Tensor | None, ...]] = []  # the gradients of the results, from the current iteration on
        heats: list[Tensor | None] = []
        d_log_sigma: Tensor | None = None
        found: dict[str, Tensor] = {}
        between = {*STATE} - ({"variance"} if kmeans else set())
        for k in range(-1, -count - 1, -1):
            heat = d_counts = None
            if em and d_score is not None:
                heat = own.temperatures[k] * d_score
                d_log_sigma = _plus(d_log_sigma, -heat * counts[k])
                d_counts = -heat * (numbers * beta_u + log_sigma[k])
            if d_log_sigma is not None:
                d_variance = _plus(d_variance, 0.5 * d_log_sigma[..., None, None] * inverse_or_zero(variances[k]))
            heats.insert(0, heat)
            heads.insert(0, (d_counts, d_mean, d_variance, None if em else d_score))
            first = k == -count
            wanted = reverse.needs & {*STATE} if first else between
            found = reverse.ask(k, [_stacked([head]) for head in heads[0]], rest, wanted)
            if not first:
                d_mean, d_variance = found["mean"], None if kmeans else found["variance"]
                d_score = found["log_weight"] * (-scores[k - 1]).sigmoid()
                d_log_sigma = None if kmeans else -found["log_weight"]
        for name in reverse.needs & {*STATE}:
            reverse.gradients[name] = found[name]
        if reverse.together:
            reverse.ask(None, [_stacked(kind) for kind in zip(*heads, strict=True)], rest)
        if (heat := _stacked(heats)) is not None:
            for name, part in (("beta_use", -numbers * (heat * counts)), ("beta_ignore", heat)):
                if name in reverse.needs:
                    reverse.gradients[name] = part.flatten(0, -2).sum(0)


def _queue(first: Tensor | None, left: Tensor | None) -> Tensor | None:
    """Return the states of all iterations: the first one's, if any, then those that earlier iterations left."""
    if left is None:
        return None
    every = left[:-1] if first is None else torch.cat((first[None], left[:-1]))
    return every if len(every) else None


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _stacked(each: Sequence[Tensor | None]) -> Tensor | None:
    """Return a gradient of all iterations, 0 in those without it; None if all are without it."""
    like = next((x for x in each if x is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if t is None else t for t in each])


gaussian_routing = GaussianRouting()
