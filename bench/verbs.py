"""The routings as a user of :class:`fastcaps.Votes` writes them: a contender only where ``--against verbs`` asks.

It is this package's, and no alternative to it: what it shows is the price of a routing that has no op.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastcaps
from bench.workload import Implementation, Workload
from fastcaps.functional import softmax, squash, unit

POSE = (-2, -1)


def by_verbs(work: Workload) -> Implementation:
    """Return a workload's routing over the verbs, with the arguments of the public function."""
    settings = work.routing.settings(work)
    window, loop = settings.pop("window"), _LOOPS[type(work.routing).function.__name__]

    def run(*, children: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **own: Any) -> Any:
        votes = fastcaps.Votes(children, weight, bias, window)
        return loop(votes, **own, **settings)

    return run


def _attention(
    votes: fastcaps.Votes, parents: Any = None, norm_weight: Any = None, norm_bias: Any = None, normalize: bool = True
) -> tuple[Tensor, ...]:
    scale = votes.pose_shape.numel() ** -0.5
    sums = votes.sum(1 / votes.parents if parents is None else softmax(votes.agreement(parents) * scale))
    if normalize:
        affine = (None if x is None else x.view(votes.pose_shape) for x in (norm_weight, norm_bias))
        sums = F.layer_norm(sums, votes.pose_shape, *affine, 1e-5)
    return (sums,)


def _dynamic(votes: fastcaps.Votes, iterations: int) -> tuple[Tensor, ...]:
    parents = asked = squash(votes.sum(1 / votes.parents), POSE)
    for iteration in range(1, iterations):
        parents = squash(votes.sum(softmax(votes.agreement(asked))), POSE)
        if iteration + 1 < iterations:
            asked = asked + parents
    return (parents,)


def _gaussian(votes: fastcaps.Votes, gates: Tensor, eps: float, iterations: int, score: Any) -> tuple[Tensor, ...]:
    """Return means, what ``score`` makes of an iteration's coefficients, counts and logarithms of sigma, variances."""
    r: Any = 1 / votes.parents
    for iteration in range(iterations):
        used = (gates * r).expand(votes.coefficients_shape)
        counts = used.sum(-2).movedim(-1, 1)[..., None, None]
        means = votes.sum(used) / (counts + eps)
        variances = votes.square_sum(used, means) / (counts + eps) + eps
        log_sigma = variances.log().sum(POSE) / 2
        found = score(iteration, used, counts[..., 0, 0], log_sigma)
        if iteration + 1 < iterations:
            log_weight = (F.logsigmoid(found) - log_sigma).movedim(1, -1).unsqueeze(-2)
            r = softmax(log_weight - votes.distance(means, 0.5 / variances))
    return means, found, variances


def _em(votes: fastcaps.Votes, activations: Tensor, beta_u: Tensor, beta_a: Tensor, iterations: int) -> Any:
    def score(iteration: int, _: Tensor, counts: Tensor, log_sigma: Tensor) -> Tensor:
        use, wanted = (x.view(-1, *[1] * (counts.dim() - 2)) for x in (beta_u, beta_a))  # beside [B, M, Ho, Wo]
        benefit = wanted - (votes.pose_shape.numel() * use + log_sigma) * counts
        return 0.01 * (1 - 0.95 ** (iteration + 1)) * benefit

    means, found, _ = _gaussian(votes, votes.unfold(activations)[..., None], 1e-8, iterations, score)
    return means, found.sigmoid()


def _heinsen(votes: fastcaps.Votes, scores: Tensor, beta_use: Tensor, beta_ignore: Tensor, iterations: int) -> Any:
    def score(_: int, used: Tensor, *__: Tensor) -> Tensor:
        return (beta_use * used - beta_ignore * (gates - used)).sum(-2).movedim(-1, 1)

    gates = votes.unfold(scores.sigmoid())[..., None]
    return _gaussian(votes, gates, 1e-5, iterations, score)


def _pool(votes: fastcaps.Votes, iterations: int, sharpness: float) -> tuple[Tensor, ...]:
    sums = votes.sum(1 / votes.count)
    squares, asked = votes.distance(torch.zeros_like(sums)), torch.zeros_like(sums)
    lengths = squares.masked_fill(squares == 0, torch.inf).sqrt()
    for _ in range(iterations):
        asked = asked + unit(sums, POSE)
        logits = sharpness * votes.agreement(asked) / lengths
        sums = votes.sum(logits.softmax(-2))
    return (sums,)


_LOOPS = {
    "inverted_attention_routing": _attention, "dynamic_routing": _dynamic, "em_routing": _em,
    "heinsen_routing": _heinsen, "routing_pool": _pool,
}  # fmt: skip
