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


def _seen(numbers: Tensor) -> Tensor:
    """Return numbers of parents, ``[B, M]`` or ``[B, M, Ho, Wo]``, beside coefficients."""
    return numbers.movedim(1, -1).unsqueeze(-2)


def _parents(numbers: Tensor) -> Tensor:
    """Return sums of coefficients, ``[B, M]`` or ``[B, Ho, Wo, M]``, beside poses."""
    return numbers.movedim(-1, 1)[..., None, None]


def _attention(
    votes: fastcaps.Votes, parents: Tensor, norm_weight: Any = None, norm_bias: Any = None, normalize: bool = True
) -> tuple[Tensor, ...]:
    r = softmax(votes.agreement(parents) * votes.pose_shape.numel() ** -0.5)
    sums = votes.sum(r)
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


def _moments(votes: fastcaps.Votes, used: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    counts = _parents(used.sum(-2))
    means = votes.sum(used) / (counts + eps)
    return counts, means, votes.square_sum(used, means) / (counts + eps) + eps


def _explained(votes: fastcaps.Votes, log_weight: Tensor, means: Tensor, variances: Tensor) -> Tensor:
    return softmax(_seen(log_weight - variances.log().sum(POSE) / 2) - votes.distance(means, 0.5 / variances))


def _em(votes: fastcaps.Votes, activations: Tensor, beta_u: Tensor, beta_a: Tensor, iterations: int) -> Any:
    gates = votes.unfold(activations)[..., None]
    r: Any = 1 / votes.parents
    for iteration in range(iterations):
        used = (gates * r).expand(votes.coefficients_shape)
        counts, means, variances = _moments(votes, used, 1e-8)
        use, wanted = (x.view(-1, *[1] * (means.dim() - 4)) for x in (beta_u, beta_a))  # beside [B, M, Ho, Wo]
        benefit = wanted - (votes.pose_shape.numel() * use + variances.log().sum(POSE) / 2) * counts[..., 0, 0]
        scores = 0.01 * (1 - 0.95 ** (iteration + 1)) * benefit
        if iteration + 1 < iterations:
            r = _explained(votes, F.logsigmoid(scores), means, variances)
    return means, scores.sigmoid()


def _heinsen(votes: fastcaps.Votes, scores: Tensor, beta_use: Tensor, beta_ignore: Tensor, iterations: int) -> Any:
    gates = votes.unfold(scores.sigmoid())[..., None]
    r: Any = 1 / votes.parents
    for iteration in range(iterations):
        used = (gates * r).expand(votes.coefficients_shape)
        _, means, variances = _moments(votes, used, 1e-5)
        found = (beta_use * used - beta_ignore * (gates - used)).sum(-2).movedim(-1, 1)
        if iteration + 1 < iterations:
            r = _explained(votes, F.logsigmoid(found), means, variances)
    return means, found, variances


def _pool(votes: fastcaps.Votes, iterations: int, sharpness: float) -> tuple[Tensor, ...]:
    sums = votes.sum(1 / votes.count)
    lengths, asked = votes.distance(torch.zeros_like(sums)).sqrt(), torch.zeros_like(sums)
    for _ in range(iterations):
        asked = asked + unit(sums, POSE)
        logits = sharpness * votes.agreement(asked) / lengths.masked_fill(lengths == 0, torch.inf)
        sums = votes.sum(logits.softmax(-2))
    return (sums,)


_LOOPS = {
    "inverted_attention_routing": _attention,
    "dynamic_routing": _dynamic,
    "em_routing": _em,
    "heinsen_routing": _heinsen,
    "routing_pool": _pool,
}
