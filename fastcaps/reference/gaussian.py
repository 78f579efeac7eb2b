"""The oracle of routings whose parents are Gaussians: EM routing, and Heinsen's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.reference.seen import (
    POSE,
    Seen,
    collect,
    gate_backward,
    inverse_or_zero,
    log_or_zero,
    make_votes,
    see,
    votes_backward,
    widen,
    without_broken,
)
from fastcaps.rules import Rule
from fastcaps.votes import Votes

__all__ = [
    "distances",
    "gaussian_coefficients",
    "gaussian_routing",
    "gaussian_routing_backward",
    "log_sigmas",
    "next_log_weight",
]


def _precision(variance: Tensor | None) -> Tensor | float:
    """Return what multiplies squared differences from the mean: ``1 / (2 variance)``, or 1 without a variance.

    It is 0 where the variance is, which happens without eps alone: a parent that no child chose says nothing.
    """
    return 1.0 if variance is None else 0.5 * inverse_or_zero(variance).unsqueeze(3)


def distances(all_votes: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
    """Return ``sum_ce (V_im - mean_m)^2 / (2 variance_m)`` ``[B, Ho, Wo, I, M]``; 0 without a mean."""
    if mean is None:
        return all_votes.new_zeros(all_votes.shape[:5])
    return ((all_votes - mean.unsqueeze(3)).square() * _precision(variance)).sum((-2, -1))


def _responsibility(
    seen: Seen, mean: Tensor | None, variance: Tensor | None, log_weight: Tensor | None
) -> tuple[Seen, Tensor, Tensor]:
    """Return the children without the broken ones, their votes, and the responsibilities r ``[B, Ho, Wo, I, M]``."""

    def look(seen: Seen) -> tuple[Tensor, Tensor]:
        all_votes = make_votes(seen)  # whose square is no smaller than one about any mean within the votes
        return (2 * all_votes).square(), distances(all_votes, mean, variance)

    seen = without_broken(seen, look)
    all_votes = make_votes(seen)
    if seen.broken is not None:  # a vote at the mean: whatever the variance, nothing there overflows
        stand_in = torch.zeros((), device=all_votes.device) if mean is None else mean.detach().unsqueeze(3)
        all_votes = torch.where(seen.broken[..., None, None, None], stand_in.to(all_votes), all_votes)
    logits = -distances(all_votes, mean, variance)
    if log_weight is not None:
        logits = logits + log_weight.unsqueeze(3)
    return seen, all_votes, logits.softmax(-1)


def next_log_weight(scores: Tensor, variances: Tensor, rule: int) -> Tensor:
    """Return what the next turn adds to its logits: ``ln sigmoid(score) - sum ln sigma``; k-means has no sigma."""
    log_weight = F.logsigmoid(scores)
    return log_weight if rule == Rule.KMEANS else log_weight - log_sigmas(variances)


def log_sigmas(variances: Tensor) -> Tensor:
    """Return ``sum_ce ln sigma_m``, in which numbers without a variance are left out."""
    return 0.5 * log_or_zero(variances).sum(POSE)


def gaussian_routing(
    votes: Votes,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    temperatures: Sequence[float],
    rule: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """Explain once: parents are Gaussians, children go to those that make their votes likely (Hinton et al. 2018).

    ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2 / (2 variance_m)``, ``r_im = softmax_m a_im``,
    ``w_im = g_i r_im``, ``n_m = sum_i w_im``, ``means_m = sum_i w_im V_im / (n_m + eps)``,
    ``narrow_m = sum_i w_im (V_im - means_m)^2 / (n_m + eps)``, ``variances = narrow + eps``. Then EM's
    ``score_m = temperature (beta_a_m - sum_ce (beta_u_m + ln sigma_m) n_m)``, or Heinsen's
    ``score_m = sum_i beta_use_im w_im - sum_i beta_ignore_im (g_i - w_im)``.

    Without a mean the distances are 0, without a log-weight that is 0: with neither, r = 1 / M, the first turn. A mean
    without a variance makes it k-means: ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2``. Where ``n + eps`` is 0,
    means and narrow variances are 0, with gradient 0. Numbers of a parent whose variance is 0 have no part in the
    distance and in ``sum ln sigma``.

    Parameters
    ----------
    mean, variance, log_weight : Tensor, optional
        ``[B, Ho, Wo, M, C, E]``, twice, and ``[B, Ho, Wo, M]``.
    beta_use, beta_ignore : Tensor
        ``[I or 1, M or 1]``; of EM beta_u and beta_a, ``[M]``.
    temperatures : sequence of float
        EM's inverse temperature of the turn.
    rule : int
        ``EM``, ``HEINSEN`` or ``KMEANS``, see :class:`Rule`.

    Returns
    -------
    scores, means, variances : Tensor
        ``[B, Ho, Wo, M]`` and ``[B, Ho, Wo, M, C, E]``, twice, like all results in the accumulation dtype.
    all_counts, all_means, all_variances, all_scores : Tensor
        n, the means, the narrow variances and the scores, with a leading 1.
    """
    mean, variance, log_weight, beta_use, beta_ignore = widen(
        votes.children.dtype, mean, variance, log_weight, beta_use, beta_ignore
    )
    seen, all_votes, shares = _responsibility(see(votes), mean, variance, log_weight)
    gated = seen.gated(shares)
    counts = gated.sum(3)
    inverse = inverse_or_zero(counts + eps)[..., None, None]
    means = (torch.einsum("bhwim,bhwimce->bhwmce", gated, all_votes) * inverse).contiguous()
    # about the new mean itself, never as a difference of mean squares: that would lose all digits to a common offset
    offsets = all_votes - means.unsqueeze(3)
    narrow = (torch.einsum("bhwim,bhwimce->bhwmce", gated, offsets.square()) * inverse).contiguous()
    variances = narrow + eps
    assert beta_use is not None and beta_ignore is not None
    if rule == Rule.EM:
        numbers = narrow.shape[-2] * narrow.shape[-1]
        scores = temperatures[0] * (beta_ignore - (numbers * beta_use + log_sigmas(variances)) * counts)
    else:
        whole = 1.0 if seen.gate is None else seen.gate[..., None]
        scores = (beta_use * gated - beta_ignore * (whole - gated)).sum(3)
    history = (counts.unsqueeze(0), means.clone().unsqueeze(0), narrow.unsqueeze(0), scores.clone().unsqueeze(0))
    return scores, means, variances, *history


def gaussian_routing_backward(
    grad_counts: Tensor | None,
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_evidence: Tensor | None,
    votes: Votes,
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
    """Return the gradients of one turn by explicit formulas, from those of its counts, means, variances and evidence.

    With ``N = n + eps``, ``d_im = V_im - means_m``, ``rest_m = sum_i w_im d_im`` (eps means_m, but for rounding) and
    ``dmu_m = dmeans_m - 2 rest_m dvariances_m / N_m``:
    ``t_im = dL/dw_im = dn_m + <dmu_m, d_im> / N_m + <dvariances_m, d_im^2 - variances_m> / N_m
    + (beta_use_im + beta_ignore_im) devidence_m``, ``dlogit_im = g_i r_im (t_im - sum_m' r_im' t_im')``,
    ``dg_i = sum_m r_im t_im - sum_m beta_ignore_im devidence_m``,
    ``dV_im = w_im (dmu_m + 2 dvariances_m d_im) / N_m - dlogit_im (V_im - mean_m) / variance_m``,
    ``dmean_m = sum_i dlogit_im (V_im - mean_m) / variance_m``, ``dlog_weight_m = sum_i dlogit_im``,
    ``dvariance_m = sum_i dlogit_im (V_im - mean_m)^2 / (2 variance_m^2)``.

    Returns
    -------
    tuple of Tensor
        dchildren, dweight, dbias, dgate, dmean, dvariance, dlog_weight, dbeta_use, dbeta_ignore. One whose bit in
        ``needs`` is not set (``1 << k`` for the k-th), or whose input is absent, is an empty tensor; so are those of
        the betas without ``grad_evidence``.
    """
    inputs = (*votes[:4], mean, variance, log_weight, beta_use, beta_ignore)
    dtype = votes.children.dtype
    mean, variance, log_weight, beta_use, beta_ignore = widen(dtype, *inputs[4:])
    d_counts, d_means, d_variances, d_evidence = widen(dtype, grad_counts, grad_means, grad_variances, grad_evidence)
    d_counts = torch.zeros_like(counts) if d_counts is None else d_counts
    d_means = torch.zeros_like(means) if d_means is None else d_means
    d_variances = torch.zeros_like(means) if d_variances is None else d_variances
    gradients: list[Tensor | None] = [None] * 9

    seen, all_votes, shares = _responsibility(see(votes), mean, variance, log_weight)
    gated = seen.gated(shares)
    # the counts of these weights: another backend's logits, and so its counts, may differ by many last digits
    inverse = inverse_or_zero(gated.sum(3) + eps)[..., None, None]
    offsets = all_votes - means.unsqueeze(3)
    # on paper the rest is eps * means, but means are rounded: with the paper's, their last digit would count fully
    rest = torch.einsum("bhwim,bhwimce->bhwmce", gated, offsets)
    d_variances = d_variances * inverse
    d_means = (d_means - 2 * rest * d_variances) * inverse

    grad_shares = torch.einsum("bhwmce,bhwimce->bhwim", d_means, offsets)
    squares = offsets.square() - variances.unsqueeze(3)
    grad_shares = grad_shares + torch.einsum("bhwmce,bhwimce->bhwim", d_variances, squares) + d_counts.unsqueeze(3)
    ignored = grad_shares.new_zeros(())
    if beta_use is not None and beta_ignore is not None and d_evidence is not None:
        whole = 1.0 if seen.gate is None else seen.gate[..., None]
        spread = d_evidence.unsqueeze(3)
        grad_shares = grad_shares + (beta_use + beta_ignore) * spread
        ignored = beta_ignore * spread
        gradients[7] = (spread * gated).sum((0, 1, 2)).sum_to_size(beta_use.shape)
        gradients[8] = (spread * (gated - whole)).sum((0, 1, 2)).sum_to_size(beta_ignore.shape)
    grad_votes = gated[..., None, None] * (d_means.unsqueeze(3) + 2 * d_variances.unsqueeze(3) * offsets)
    grad_logits = gated * (grad_shares - (shares * grad_shares).sum(-1, keepdim=True))
    if log_weight is not None:
        gradients[6] = grad_logits.sum(3)
    if mean is not None:
        from_mean = all_votes - mean.unsqueeze(3)
        pull = 2 * grad_logits[..., None, None] * from_mean * _precision(variance)
        grad_votes = grad_votes - pull
        gradients[4] = pull.sum(3)
        if variance is not None:
            gradients[5] = (pull * from_mean).sum(3) * 0.5 * inverse_or_zero(variance)
    gradients[:3] = votes_backward(grad_votes, seen)
    if votes.gate is not None:
        gradients[3] = gate_backward((shares * grad_shares - ignored).sum(-1), seen)
    return collect(gradients, inputs, needs)


@torch.no_grad()
def gaussian_coefficients(
    votes: Votes, mean: Tensor | None, variance: Tensor | None, log_weight: Tensor | None
) -> Tensor:
    """Return the responsibilities r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, i]`` sums to 1 over the parents whatever the child's gate; of an absent (padded) child it is 0. One
    sample's votes at a time.
    """
    found = []
    for b in range(votes.children.shape[0]):
        state = (None if t is None else t[b : b + 1] for t in (mean, variance, log_weight))
        seen = see(votes._replace(children=votes.children[b : b + 1], gate=None))
        whole = Seen(seen.votes, seen.children, None, seen.present)  # the responsibility of a child that is not gated
        _, _, shares = _responsibility(whole, *widen(votes.children.dtype, *state))
        found.append(shares if seen.present is None else shares.masked_fill(seen.present[..., None] == 0, 0.0))
    if found:
        return torch.cat(found)
    (empty,) = widen(votes.children.dtype, votes.children.new_empty((0, *votes.grid, votes.seen, votes.parents)))
    return empty  # type: ignore[return-value]
