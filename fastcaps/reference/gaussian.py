"""The reference of routings whose parents are Gaussians: EM and Heinsen routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.checks import widen
from fastcaps.reference.derivatives import differentiate, inverse_or_zero
from fastcaps.reference.verbs import VoteBlocks, blocks_of
from fastcaps.rules import Rule
from fastcaps.votes import POSE, VoteInputs


def logits_of(seen: VoteBlocks, mean: Tensor | None, variance: Tensor | None, log_weight: Tensor | None) -> Tensor:
    """Return ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2 / (2 variance_m)``, ``[*places, I, M]``.

    Without a mean the distances are 0, without a variance the factor of squared differences is 1.
    """
    # a variance of 0 only occurs without eps, for a parent without children
    precisions = None if variance is None else 0.5 * inverse_or_zero(variance)
    logits = seen.zeros() if mean is None else -seen.scores(mean, precisions, squared=True)
    return logits if log_weight is None else logits + log_weight.unsqueeze(-2)


def next_log_weight(scores: Tensor, variances: Tensor, rule: int) -> Tensor:
    """Return the next iteration's ``log_weight``: ``ln sigmoid(score) - sum ln sigma``; k-means has no sigma."""
    log_weight = F.logsigmoid(scores)
    return log_weight if rule == Rule.KMEANS else log_weight - log_sigmas(variances)


def log_sigmas(variances: Tensor) -> Tensor:
    """Return ``sum_ce ln sigma_m``, over values with a variance above 0: a parent without children has no spread."""
    return 0.5 * variances.masked_fill(variances == 0, 1.0).log().sum(POSE)


def benefits(counts: Tensor, variances: Tensor, beta_u: Tensor, beta_a: Tensor) -> Tensor:
    """Return EM's benefit of each parent minus its cost, ``beta_a - sum_ce (beta_u + ln sigma_m) n_m``."""
    numbers = variances.shape[-2] * variances.shape[-1]
    return beta_a - (numbers * beta_u + log_sigmas(variances)) * counts


def gaussian_routing(
    votes: VoteInputs | VoteBlocks,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    temperatures: Sequence[float],
    rule: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return one iteration in which parents are Gaussians that explain the children's votes (Hinton et al. 2018).

    ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2 / (2 variance_m)``, ``r_im = softmax_m a_im``,
    ``w_im = g_i r_im``, ``n_m = sum_i w_im``, ``means_m = sum_i w_im V_im / (n_m + eps)``,
    ``narrow_m = sum_i w_im (V_im - means_m)^2 / (n_m + eps)``, ``variances = narrow + eps``. Then EM's
    ``score_m = temperature (beta_a_m - sum_ce (beta_u_m + ln sigma_m) n_m)``, or Heinsen's
    ``score_m = sum_i beta_use_im w_im - sum_i beta_ignore_im (g_i - w_im)``.

    Without a mean the distances are 0, and a log-weight of None is 0: with neither, r = 1 / M, the first iteration. A
    mean without a variance is k-means: ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2``. If ``n + eps`` is 0, means
    and narrow variances are 0, with gradient 0. Values of a parent with variance 0 are skipped in the distance and in
    ``sum ln sigma``.

    Parameters
    ----------
    mean, variance, log_weight : Tensor, optional
        ``[B, Ho, Wo, M, C, E]``, twice, and ``[B, Ho, Wo, M]``.
    beta_use, beta_ignore : Tensor
        ``[I or 1, M or 1]``; for EM beta_u and beta_a, ``[M]``.
    temperatures : sequence of float
        EM's inverse temperature of the iteration.
    rule : int
        ``EM``, ``HEINSEN`` or ``KMEANS``, see :class:`Rule`.

    Returns
    -------
    scores, means, variances : Tensor
        ``[B, Ho, Wo, M]`` and ``[B, Ho, Wo, M, C, E]``, twice; all results have the accumulation dtype.
    all_counts, all_means, all_variances, all_scores : Tensor
        n, the means, the narrow variances and the scores, with a leading 1.
    """
    whole = blocks_of(votes)
    mean, variance, log_weight, beta_use, beta_ignore = widen(
        whole.dtype, mean, variance, log_weight, beta_use, beta_ignore
    )
    seen = whole.without_broken(lambda: logits_of(whole, mean, variance, None), squared=True)
    gated = seen.gated(logits_of(seen, mean, variance, log_weight).softmax(-1))
    counts = gated.sum(-2)
    inverse = inverse_or_zero(counts + eps)[..., None, None]
    means = (seen.sums(gated) * inverse).contiguous()
    # around the new mean, not as a difference of mean squares, which would lose all digits to a common offset
    narrow = (seen.sums(gated, means, power=2) * inverse).contiguous()
    variances = narrow + eps
    assert beta_use is not None and beta_ignore is not None
    if rule == Rule.EM:
        scores = temperatures[0] * benefits(counts, variances, beta_use, beta_ignore)
    else:
        gates = 1.0 if seen.gate is None else seen.gate[..., None]
        scores = (beta_use * gated - beta_ignore * (gates - gated)).sum(-2)
    history = (counts.unsqueeze(0), means.clone().unsqueeze(0), narrow.unsqueeze(0), scores.clone().unsqueeze(0))
    return scores, means, variances, *history


def gaussian_routing_backward(
    grad_counts: Tensor | None,
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_evidence: Tensor | None,
    votes: VoteInputs,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    counts: Tensor,
    means: Tensor,
    variances: Tensor,
    eps: float,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of one iteration, from those of its counts, means, variances without eps, and evidence.

    ``counts``, ``means`` and ``variances`` are the iteration's results; they are computed again here.
    """
    betas = (None, None) if grad_evidence is None else (beta_use, beta_ignore)
    nothing = votes.children.new_zeros((1, 1), dtype=counts.dtype)

    def run(*tensors: Any) -> Sequence[Tensor]:
        inputs, state = VoteInputs._make((*tensors[:4], votes.parents, votes.window)), tensors[4:7]
        use, ignore = (nothing if beta is None else beta for beta in tensors[7:])
        rest: Any = (*state, use, ignore, (), Rule.HEINSEN, eps)
        evidence, *_, counts, means, narrow, _ = gaussian_routing(inputs, *rest)
        return counts[0], means[0], narrow[0], evidence

    heads = (grad_counts, grad_means, grad_variances, grad_evidence)
    return differentiate(run, (*votes[:4], mean, variance, log_weight, *betas), heads, needs)


@torch.no_grad()
def gaussian_coefficients(
    votes: VoteInputs | VoteBlocks, mean: Tensor | None, variance: Tensor | None, log_weight: Tensor | None
) -> Tensor:
    """Return the coefficients r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, i]`` sums to 1 over the parents for any gate of the child; it is 0 for an absent (padded) child.
    """
    seen = blocks_of(votes)
    mean, variance, log_weight = widen(seen.dtype, mean, variance, log_weight)
    return seen.present(logits_of(seen, mean, variance, log_weight).softmax(-1))
