"""The oracle of the Gaussian pass: eager, differentiable PyTorch that stores the votes.

Layout and meaning of the arguments: :mod:`fastcaps.reference`; gates: :mod:`fastcaps.reference.sight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcaps.reference.sight import (
    Sight,
    accumulation_dtype,
    collect,
    gate_backward,
    inverse_or_zero,
    make_votes,
    see,
    votes_backward,
    without,
)

__all__ = ["NEEDS", "coefficients", "gaussian_pass", "gaussian_pass_backward"]

NEEDS = ("children", "weight", "mean", "variance", "log_weight", "bias", "gate", "beta_use", "beta_ignore")
"""The gradients of the pass in the order of their bits: gradient k is asked for if ``needs`` has bit ``1 << k``."""

STATE = (2, 3, 4)
"""The positions of the parents' state, which is in the accumulation dtype, as are the betas."""


def _wide(children: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors in the accumulation dtype of the children."""
    dtype = accumulation_dtype(children.dtype)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _precision(variance: Tensor | None) -> Tensor | float:
    """Return what multiplies squared differences from the mean: ``1 / (2 variance)``, or 1 without a variance."""
    return 1.0 if variance is None else 0.5 / variance.unsqueeze(3)


def _distances(all_votes: Tensor, mean: Tensor | None, variance: Tensor | None) -> Tensor:
    """Return ``sum_ce (V_im - mean_m)^2 / (2 variance_m)`` ``[B, Ho, Wo, I, M]``; 0 without a mean."""
    if mean is None:
        return all_votes.new_zeros(all_votes.shape[:5])
    return ((all_votes - mean.unsqueeze(3)).square() * _precision(variance)).sum((-2, -1))


def _responsibility(
    sight: Sight,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Sight, Tensor, Tensor]:
    """Return the children without the broken ones, their votes, and the responsibilities r ``[B, Ho, Wo, I, M]``."""
    many = weight.shape[1]
    if sight.silent is not None:
        with torch.no_grad():
            all_votes = make_votes(sight, weight, bias, many)
            squares = (2 * all_votes).square()  # no smaller than a square about any mean within the votes
            finite = squares.isfinite().all(-1).all(-1) & _distances(all_votes, mean, variance).isfinite()
        sight = without(sight, finite.all(-1))
    all_votes = make_votes(sight, weight, bias, many)
    if sight.broken is not None:  # a vote at the mean: whatever the variance, nothing there overflows
        stand_in = torch.zeros(()) if mean is None else mean.detach().unsqueeze(3)
        all_votes = torch.where(sight.broken[..., None, None, None], stand_in.to(all_votes), all_votes)
    logits = -_distances(all_votes, mean, variance)
    if log_weight is not None:
        logits = logits + log_weight.unsqueeze(3)
    return sight, all_votes, logits.softmax(-1)


def gaussian_pass(
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    eps: float,
    window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Explain once: parents are Gaussians, children go to those that make their votes likely (Hinton et al. 2018).

    ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2 / (2 variance_m)``, ``r_im = softmax_m a_im``,
    ``w_im = g_i r_im``, ``n_m = sum_i w_im``, ``means_m = sum_i w_im V_im / (n_m + eps)``,
    ``variances_m = sum_i w_im (V_im - means_m)^2 / (n_m + eps)``,
    ``evidence_m = sum_i beta_use_im w_im - sum_i beta_ignore_im (g_i - w_im)``.

    Without a mean the distances are 0, without a log-weight that is 0: with neither, r = 1 / M, the first turn. A mean
    without a variance makes it k-means: ``a_im = log_weight_m - sum_ce (V_im - mean_m)^2``. Normalising constants of
    the Gaussians belong to the log-weight. The betas ``[I | 1, M | 1]`` come together or not at all.

    Where ``n + eps`` is 0, means and variances are 0, with gradient 0.

    Returns
    -------
    counts : Tensor
        n, ``[B, Ho, Wo, M]``, like all results in the accumulation dtype: they are the next turn's parents.
    means, variances : Tensor
        ``[B, Ho, Wo, M, C, E]``.
    evidence : Tensor
        ``[B, Ho, Wo, M]``, empty without the betas.
    """
    wide, matrices, mean, variance, log_weight, bias, gate, beta_use, beta_ignore = _wide(
        children, children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore
    )
    assert wide is not None and matrices is not None
    sight = see(wide, gate, window)
    sight, all_votes, share = _responsibility(sight, matrices, mean, variance, log_weight, bias)
    gated = share if sight.gate is None else share * sight.gate[..., None]
    counts = gated.sum(3)
    inverse = inverse_or_zero(counts + eps)[..., None, None]
    means = torch.einsum("bhwim,bhwimce->bhwmce", gated, all_votes) * inverse
    # about the new mean itself, never as a difference of mean squares: that would lose all digits to a common offset
    offsets = all_votes - means.unsqueeze(3)
    variances = torch.einsum("bhwim,bhwimce->bhwmce", gated, offsets.square()) * inverse
    evidence = counts.new_empty(0)
    if beta_use is not None and beta_ignore is not None:
        whole = 1.0 if sight.gate is None else sight.gate[..., None]
        evidence = (beta_use * gated - beta_ignore * (whole - gated)).sum(3)
    return counts, means.contiguous(), variances.contiguous(), evidence


def gaussian_pass_backward(
    grad_counts: Tensor | None,
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_evidence: Tensor | None,
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    counts: Tensor,
    means: Tensor,
    variances: Tensor,
    eps: float,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the nine gradients of :func:`gaussian_pass` by explicit, themselves differentiable, formulas.

    With ``N = n + eps``, ``d_im = V_im - means_m`` and ``dmu_m = dmeans_m - 2 eps means_m dvariances_m / N_m``:
    ``t_im = dL/dw_im = dn_m + <dmu_m, d_im> / N_m + <dvariances_m, d_im^2 - variances_m> / N_m
    + (beta_use_im + beta_ignore_im) devidence_m``, ``dlogit_im = g_i r_im (t_im - sum_m' r_im' t_im')``,
    ``dg_i = sum_m r_im t_im - sum_m beta_ignore_im devidence_m``,
    ``dV_im = w_im (dmu_m + 2 dvariances_m d_im) / N_m - dlogit_im (V_im - mean_m) / variance_m``,
    ``dmean_m = sum_i dlogit_im (V_im - mean_m) / variance_m``, ``dlog_weight_m = sum_i dlogit_im``,
    ``dvariance_m = sum_i dlogit_im (V_im - mean_m)^2 / (2 variance_m^2)``.

    A gradient whose bit in ``needs`` is not set (see :data:`NEEDS`), or whose input is absent, is an empty tensor; so
    are those of the betas without ``grad_evidence``.
    """
    inputs = (children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore)
    wide, matrices, mean, variance, log_weight, bias, gate, beta_use, beta_ignore = _wide(children, *inputs)
    saved = _wide(children, counts, means, variances)
    given = (grad_counts, grad_means, grad_variances)
    d_counts, d_means, d_variances = (
        torch.zeros_like(like) if grad is None else grad  # type: ignore[arg-type]
        for grad, like in zip(_wide(children, *given), saved, strict=True)
    )
    counts, means, variances = saved  # type: ignore[assignment]
    (d_evidence,) = _wide(children, grad_evidence)
    assert wide is not None and matrices is not None
    gradients: list[Tensor | None] = [None] * len(NEEDS)

    sight = see(wide, gate, window)
    sight, all_votes, share = _responsibility(sight, matrices, mean, variance, log_weight, bias)
    gated = share if sight.gate is None else share * sight.gate[..., None]
    inverse = inverse_or_zero(counts + eps)[..., None, None]
    d_means = (d_means - 2 * eps * means * inverse * d_variances) * inverse
    d_variances = d_variances * inverse
    offsets = all_votes - means.unsqueeze(3)

    heard = torch.einsum("bhwmce,bhwimce->bhwim", d_means, offsets)
    heard = heard + torch.einsum("bhwmce,bhwimce->bhwim", d_variances, offsets.square() - variances.unsqueeze(3))
    heard = heard + d_counts.unsqueeze(3)
    ignored = heard.new_zeros(())
    if beta_use is not None and beta_ignore is not None and d_evidence is not None:
        whole = 1.0 if sight.gate is None else sight.gate[..., None]
        spread = d_evidence.unsqueeze(3)
        heard = heard + (beta_use + beta_ignore) * spread
        ignored = beta_ignore * spread
        gradients[7] = (spread * gated).sum((0, 1, 2)).sum_to_size(beta_use.shape)
        gradients[8] = (spread * (gated - whole)).sum((0, 1, 2)).sum_to_size(beta_ignore.shape)
    grad_votes = gated[..., None, None] * (d_means.unsqueeze(3) + 2 * d_variances.unsqueeze(3) * offsets)
    grad_logits = gated * (heard - (share * heard).sum(-1, keepdim=True))
    if log_weight is not None:
        gradients[4] = grad_logits.sum(3)
    if mean is not None:
        from_mean = all_votes - mean.unsqueeze(3)
        pull = 2 * grad_logits[..., None, None] * from_mean * _precision(variance)
        grad_votes = grad_votes - pull
        gradients[2] = pull.sum(3)
        if variance is not None:
            gradients[3] = (pull * from_mean).sum(3) / (2 * variance)
    gradients[0], gradients[1], gradients[5] = votes_backward(grad_votes, sight, matrices, bias, children.shape, window)
    if gate is not None:
        gradients[6] = gate_backward((share * heard - ignored).sum(-1), sight, children.shape, window)
    return collect(gradients, inputs, children, needs, STATE)


@torch.no_grad()
def coefficients(
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    window: Sequence[int],
) -> Tensor:
    """Return the responsibilities r ``[B, Ho, Wo, I, M]`` of :func:`gaussian_pass` in the accumulation dtype, without
    gradient.

    ``r[b, l, i]`` sums to 1 over the parents whatever the child's gate; of an absent (padded) child it is 0.
    """
    wide, matrices, mean, variance, log_weight, bias = _wide(
        children, children, weight, mean, variance, log_weight, bias
    )
    assert wide is not None and matrices is not None
    sight, _, share = _responsibility(see(wide, None, window), matrices, mean, variance, log_weight, bias)
    return share if sight.present is None else share.masked_fill(sight.present[..., None] == 0, 0.0)
