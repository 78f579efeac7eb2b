"""The ops of routings whose parents are Gaussians: EM and Heinsen routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
    temperatures: Sequence[float] = ()  # inverse ones; their number is that of the iterations
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
    reversed = (
        "Tensor? grad_scores, Tensor? grad_means, Tensor? grad_variances",
        "Tensor? beta_use, Tensor? beta_ignore, Tensor counts, Tensor means, Tensor variances, Tensor scores, "
        "float[] temperatures, int rule, float eps",
    )

    def reverse_arguments(self, own: Any, history: Results) -> tuple[Any, ...] | None:
        begins = any(getattr(own, name) is not None for name in STATE)
        return None if begins else (own.beta_use, own.beta_ignore, *history, own.temperatures, own.rule, own.eps)

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
        # sizes made anew for each result: Inductor fails on grids of any size if they are shared
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

    def run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a backward by the chosen backend. A bias that children share has its gradient from those of the means, as
        in :meth:`backward`, which asks for it itself: only calls of the backward op alone come here with one."""
        heads, votes, rest, needs = self.given_backward(arguments)
        _, d_means, d_variances, _ = heads
        bias, mean = self.bit["bias"], self.bit["mean"]
        if not needs & bias or not _is_shared(votes.bias):
            return super().run_backward(*arguments)
        d_means = torch.zeros_like(rest.means) if d_means is None else d_means
        left, parts = d_means.sum(0), self.parts(rest, len(rest.counts))
        found = [*super().run_backward(*arguments[:-1], needs & ~bias | (mean if len(parts) == 1 else 0))]
        at = self.tensors.index("mean")
        for k, part in enumerate(parts):
            if part[0] is not None:
                here = [None if x is None else x[k : k + 1] for x in heads]
                alone = found if len(parts) == 1 else super().run_backward(*here, *votes, *part, mean)
                left = left - alone[at]
        if not needs & mean:
            found[at] = votes.children.new_empty(0, dtype=left.dtype)
        history = (rest.counts, rest.means)
        gradient = _shared_bias_gradient(votes.bias, left, d_means, d_variances, history, rest.eps)
        found[self.tensors.index("bias")] = gradient
        return tuple(found)

    def backward(self, reverse: Reverse, grads: Gradients, votes: VoteInputs, own: Gaussian, history: Results) -> None:
        counts, means, narrow, scores = history
        em, kmeans, count = own.rule == Rule.EM, own.rule == Rule.KMEANS, len(own.temperatures)
        variances, numbers = narrow + own.eps, means.shape[-2] * means.shape[-1]
        log_sigma = log_sigmas(variances)
        log_weights = F.logsigmoid(scores) if kmeans else F.logsigmoid(scores) - log_sigma
        left: State = {"mean": means, "variance": None if kmeans else variances, "log_weight": log_weights}
        mean, variance, log_weight = (_queue(getattr(own, name), left[name]) for name in STATE)
        betas = (None, None) if em else (own.beta_use, own.beta_ignore)
        rest = Backward(mean, variance, log_weight, *betas, counts, means, narrow, own.eps)
        shared_bias = "bias" in reverse.needs and _is_shared(votes.bias)
        apart = {*STATE, *(("beta_use", "beta_ignore") if em else ()), *(("bias",) if shared_bias else ())}
        reverse.summed = reverse.needs - apart

        d_variance: Any
        d_score, d_mean, d_variance = grads
        d_score = torch.zeros_like(scores[-1]) if d_score is None else d_score
        d_mean = torch.zeros_like(means[-1]) if d_mean is None else d_mean
        if d_variance is None and not kmeans:  # no iteration of k-means reads variances
            d_variance = torch.zeros_like(narrow[-1])
        d_log_sigma: Any = None
        # factors of all iterations at once, as every operation takes long beside a tiny call
        slopes, every_count = (-scores).sigmoid().unbind(), counts.unbind()
        falls = () if kmeans else (0.5 * inverse_or_zero(variances)).unbind()
        costs = (numbers * own.beta_use + log_sigma).unbind() if em and own.beta_use is not None else ()
        heats: list[Tensor] = []  # negative
        heads: list[tuple[Tensor | None, ...]] = []  # the gradients of each iteration's results, from the last on
        for k in range(-1, -count - 1, -1):
            d_counts = None
            if em:
                heats.append(-own.temperatures[k] * d_score)
                d_counts = heats[-1] * costs[k]
                heat_counts = heats[-1] * every_count[k]
                d_log_sigma = heat_counts if d_log_sigma is None else d_log_sigma + heat_counts
            if d_log_sigma is not None and not kmeans:
                d_variance = torch.addcmul(d_variance, d_log_sigma[..., None, None], falls[k])
            heads.append((d_counts, d_mean, d_variance, None if em else d_score))
            first = k == -count
            wanted = reverse.needs & {*STATE} if first else {*STATE} - ({"variance"} if kmeans else set())
            if first and shared_bias and own.mean is not None:
                wanted = wanted | {"mean"}
            found = reverse.ask(k, [x if x is None else x.unsqueeze(0) for x in heads[-1]], rest, wanted)
            if first:
                reverse.gradients |= {name: found[name] for name in wanted}
                break
            d_mean, d_log_sigma = found["mean"], -found["log_weight"]
            d_score = found["log_weight"] * slopes[k - 1]
            if not kmeans:
                d_variance = found["variance"]
            elif d_variance is not None:
                d_variance = torch.zeros_like(d_variance)
        columns: Any = zip(*reversed(heads), strict=True)
        every: Any = ()
        if reverse.together or shared_bias:
            every = [None if x[-1] is None else torch.stack(x) for x in columns]
        if reverse.together:
            reverse.ask(None, every, rest)
        if shared_bias:  # an iteration starts from the mean of the one before
            change = every[1][-1] if own.mean is None else every[1][-1] - reverse.gradients["mean"]
            reverse.gradients["bias"] = _shared_bias_gradient(votes.bias, change, every[1], every[2], history, own.eps)
        if em:
            heat = torch.stack(heats[::-1])
            for name, factor, part in (("beta_use", numbers, heat * counts), ("beta_ignore", -1, heat)):
                whole = [*range(part.dim() - 1)]  # vmap over gradients has no flatten
                reverse.gradients[name] = factor * part.sum(whole)


def _is_shared(bias: Tensor | None) -> bool:
    return bias is not None and bias.shape[0] == 1


def _shared_bias_gradient(
    bias: Any, left: Tensor, d_means: Tensor, d_variances: Tensor | None, history: Results, eps: float
) -> Tensor:
    """Return the gradient of a bias that children share, ``[1, M or 1, C, E]``: the sum of dV over the children.

    Added up, large terms cancel and leave their rounding. But such a bias moves all votes of a parent, and with them
    its mean, but for the part ``eps / (n + eps)``, so that squared distances from a mean hardly change.

    Parameters
    ----------
    left
        The gradients of all iterations' means minus those of the means that they started from, ``[*places, M, C, E]``.
    d_means, d_variances
        ``[T, *places, M, C, E]``; the gradients of each iteration's means, and of its variances without eps.
    history
        n and the means of each iteration.
    """
    counts, means, *_ = history
    whole = (counts + eps)[..., None, None]
    still = torch.where(whole == 0, 1.0, eps / whole)
    moved = left - (still * d_means).sum(0)
    if d_variances is not None:
        moved = moved + (2 * still.square() * means * d_variances).sum(0)
    moved = moved.sum([*range(moved.dim() - 3)])
    return (moved.sum(0, keepdim=True) if bias.shape[1] == 1 else moved).unsqueeze(0).to(bias.dtype)


def _queue(first: Tensor | None, left: Tensor | None) -> Tensor | None:
    """Return the states of all iterations: the first one's, if any, then those that the iterations before computed."""
    if left is None:
        return None
    every = left[:-1] if first is None else torch.cat((first[None], left[:-1]))
    return every if len(every) else None


gaussian_routing = GaussianRouting()
