"""The oracle of the pooling pass: eager, differentiable PyTorch that stores the votes.

Layout and meaning of the arguments: :mod:`fastcaps.reference`; gates: :mod:`fastcaps.reference.sight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcaps.reference.sight import (
    FROZEN,
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
from fastcaps.vectors import length, unit

__all__ = ["NEEDS", "coefficients", "parents_of", "pooling_pass", "pooling_pass_backward"]

NEEDS = ("children", "weight", "query", "bias", "gate")
"""The gradients of the pass in the order of their bits: gradient k is asked for if ``needs`` has bit ``1 << k``."""

POSE = (-2, -1)


def parents_of(weight: Tensor | None, query: Tensor | None, bias: Tensor | None) -> int:
    """Return M, which identity votes have from the query, or from the bias, or else it is 1."""
    if weight is not None:
        return weight.shape[1]
    if query is not None:
        return query.shape[3]
    return 1 if bias is None else bias.shape[1]


def _logits(all_votes: Tensor, query: Tensor | None, scale: float, normalize: bool) -> Tensor:
    """Return ``a_im = scale <Q_m, K_im>`` ``[B, Ho, Wo, I, M]``, with ``K = V`` or ``V / |V|``; 0 without a query."""
    if query is None:
        return all_votes.new_zeros(all_votes.shape[:5])
    keys = unit(all_votes, POSE) if normalize else all_votes
    return torch.einsum("bhwmce,bhwimce->bhwim", query, keys) * scale


def _top(logits: Tensor, silent: Tensor | None) -> Tensor:
    """Return the largest logit among children that count, ``[B, Ho, Wo, 1, M]``; 0 where that is no number."""
    if silent is not None:
        logits = logits.masked_fill(silent[..., None], -torch.inf)
    top = logits.detach().amax(3, keepdim=True)
    return top.masked_fill(~top.isfinite(), 0.0)


def _agreement(
    sight: Sight,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    scale: float,
    normalize: bool,
    logsumexp: Tensor | None = None,
) -> tuple[Sight, Tensor, Tensor, Tensor]:
    """Return the children without the broken ones, their votes, exp(logits - shift), and the shift.

    The shift ``[B, Ho, Wo, 1, M]`` is ``logsumexp`` ``[B, Ho, Wo, M]`` where that is known, else the largest logit.
    """
    many = parents_of(weight, query, bias)

    def run(seen: Sight) -> tuple[Tensor, Tensor, Tensor]:
        all_votes = make_votes(seen, weight, bias, many)
        logits = _logits(all_votes, query, scale, normalize)
        if logsumexp is None:
            return all_votes, logits, _top(logits, seen.silent)
        empty = logsumexp == -torch.inf  # nobody there: shares are 0 by their gates, so that any finite shift will do
        return all_votes, logits, logsumexp.masked_fill(empty, 0.0).unsqueeze(3)

    if sight.silent is None:
        all_votes, logits, shift = run(sight)
        return sight, all_votes, (logits - shift).exp(), shift
    with torch.no_grad():
        all_votes, logits, shift = run(sight)
        finite = all_votes.isfinite().all(-1).all(-1) & (logits - shift).exp().isfinite()
    sight = without(sight, finite.all(-1))
    assert sight.broken is not None
    all_votes, logits, shift = run(sight)
    exponents = (logits - shift).masked_fill(sight.broken[..., None], 0.0)
    return sight, all_votes, exponents.exp(), shift


def pooling_pass(
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    frozen: bool = False,
) -> tuple[Tensor, Tensor]:
    """Pool once by attention: the children compete for every parent (Zhao & Huang 2019).

    ``a_im = scale <Q_m, K_im>`` with the keys ``K = V``, or ``V / |V|`` over the C * E numbers if ``normalize``,
    ``r_im = g_i exp(a_im) / sum_j g_j exp(a_jm)``, ``S_m = sum_i r_im V_im``. Without a query all a are 0: the average
    of the votes, weighed by their gates. Votes are ``P W + bias``, without weights ``P + bias`` for every parent.

    Gates stand inside the softmax, so that shares add up to 1 and a gate of 0 is a child that is not there (as is a
    padded one). They must not be negative. Where no child is there, parents are 0 and the log-sum-exp is -infinity.

    If ``frozen``, r (and the log-sum-exp) is a constant to the gradient, which so reaches neither query nor gate.

    Returns
    -------
    parents : Tensor
        S, ``[B, Ho, Wo, M, C, E]``, in the dtype of the children.
    logsumexp : Tensor
        ``log sum_i g_i exp(a_im)``, ``[B, Ho, Wo, M]``, in the accumulation dtype.
    """
    dtype = accumulation_dtype(children.dtype)
    wide, weight, query, bias, gate = (
        None if tensor is None else tensor.to(dtype) for tensor in (children, weight, query, bias, gate)
    )
    assert wide is not None
    sight, all_votes, shares, shift = _agreement(see(wide, gate, window), weight, query, bias, scale, normalize)
    if sight.gate is not None:
        shares = shares * sight.gate[..., None]
    if frozen:
        shares, shift = shares.detach(), shift.detach()
    total = shares.sum(3)
    sums = torch.einsum("bhwim,bhwimce->bhwmce", shares, all_votes)
    empty = total == 0
    logsumexp = total.masked_fill(empty, 1.0).log() + shift.squeeze(3)
    parents = (sums * inverse_or_zero(total)[..., None, None]).to(children.dtype)
    return parents.contiguous(), logsumexp.masked_fill(empty, -torch.inf).contiguous()


def pooling_pass_backward(
    grad_parents: Tensor | None,
    grad_logsumexp: Tensor | None,
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the five gradients of :func:`pooling_pass` by explicit, themselves differentiable, formulas.

    With ``e_im = exp(a_im - logsumexp_m)``, ``r_im = g_i e_im`` and ``t_im = <dS_m, V_im> - <dS_m, S_m> +
    dlogsumexp_m``: ``da_im = r_im t_im``, ``dg_i = sum_m e_im t_im``, ``dQ_m = scale sum_i da_im K_im``,
    ``dK_im = scale da_im Q_m``, and ``dV_im = r_im dS_m`` plus dK itself, or ``(dK - K <K, dK>) / |V|`` if the keys
    were normalised.

    A gradient whose bit in ``needs`` is not set (see :data:`NEEDS`), or whose input is absent, is an empty tensor. With
    the bit :data:`~fastcaps.reference.FROZEN` r is a constant: dV is r dS alone, dQ and dg are 0.
    """
    inputs = (children, weight, query, bias, gate)
    dtype = accumulation_dtype(children.dtype)
    wide, weight, query, bias, gate, grad, grad_logsumexp, parents, logsumexp = (  # type: ignore[assignment]
        None if tensor is None else tensor.to(dtype)
        for tensor in (*inputs, grad_parents, grad_logsumexp, parents, logsumexp)
    )
    assert wide is not None
    grad = torch.zeros_like(parents) if grad is None else grad
    gradients: list[Tensor | None] = [None] * len(NEEDS)
    sight = see(wide, gate, window)
    sight, all_votes, free, _ = _agreement(sight, weight, query, bias, scale, normalize, logsumexp)
    share = free if sight.gate is None else free * sight.gate[..., None]
    frozen = bool(needs & FROZEN)
    if frozen:
        share = share.detach()
    heard = torch.einsum("bhwmce,bhwimce->bhwim", grad, all_votes) - (grad * parents).sum(POSE).unsqueeze(3)
    if grad_logsumexp is not None:
        heard = heard + grad_logsumexp.unsqueeze(3)
    grad_votes = share[..., None, None] * grad.unsqueeze(3)
    if query is not None and frozen:
        gradients[2] = torch.zeros_like(query)
    elif query is not None:
        grad_logits = scale * share * heard
        keys = unit(all_votes, POSE) if normalize else all_votes
        gradients[2] = torch.einsum("bhwim,bhwimce->bhwmce", grad_logits, keys)
        grad_keys = grad_logits[..., None, None] * query.unsqueeze(3)
        if normalize:
            along = (keys * grad_keys).sum(POSE, keepdim=True)
            grad_keys = (grad_keys - keys * along) * inverse_or_zero(length(all_votes, POSE, keepdim=True))
        grad_votes = grad_votes + grad_keys
    gradients[0], gradients[1], gradients[3] = votes_backward(grad_votes, sight, weight, bias, children.shape, window)
    if gate is not None and frozen:
        gradients[4] = torch.zeros_like(gate)
    elif gate is not None:
        empty = (logsumexp == -torch.inf).unsqueeze(3)
        grad_gate = (free * heard).masked_fill(empty, 0.0).sum(-1)
        gradients[4] = gate_backward(grad_gate, sight, children.shape, window)
    return collect(gradients, inputs, children, needs)


@torch.no_grad()
def coefficients(
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: float,
    normalize: bool,
    window: Sequence[int],
) -> Tensor:
    """Return the shares r ``[B, Ho, Wo, I, M]`` of :func:`pooling_pass` in the accumulation dtype, without gradient.

    ``r[b, l, :, m]`` sums to 1 over the children; those that are not there have 0.
    """
    dtype = accumulation_dtype(children.dtype)
    wide, weight, query, bias, gate = (
        None if tensor is None else tensor.to(dtype) for tensor in (children, weight, query, bias, gate)
    )
    assert wide is not None
    sight, _, shares, _ = _agreement(see(wide, gate, window), weight, query, bias, scale, normalize)
    if sight.gate is not None:
        shares = shares * sight.gate[..., None]
    return shares * inverse_or_zero(shares.sum(3, keepdim=True))
