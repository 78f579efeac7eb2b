"""The oracle of routings whose children compete: vector-normed pooling, and dynamic routing the other way round."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcaps.reference.seen import (
    POSE,
    Seen,
    collect,
    gate_backward,
    inverse_or_zero,
    make_votes,
    see,
    votes_backward,
    widen,
    without_broken,
)
from fastcaps.rules import DETACH, Rule
from fastcaps.vectors import length, squash, unit
from fastcaps.votes import Votes

__all__ = ["pooling_coefficients", "pooling_routing", "pooling_routing_backward"]


def _logits(all_votes: Tensor, query: Tensor | None, scale: float, normalize: bool) -> Tensor:
    """Return ``a_im = scale <Q_m, K_im>`` ``[B, Ho, Wo, I, M]``, with ``K = V`` or ``V / |V|``; 0 without a query."""
    if query is None:
        return all_votes.new_zeros(all_votes.shape[:5])
    keys = unit(all_votes, POSE) if normalize else all_votes
    return torch.einsum("bhwmce,bhwimce->bhwim", query, keys) * scale


def _top(logits: Tensor, silent: Tensor | None) -> Tensor:
    """Return the largest logit among children that count, ``[B, Ho, Wo, 1, M]``; 0 where that is not finite."""
    if silent is not None:
        logits = logits.masked_fill(silent[..., None], -torch.inf)
    top = logits.detach().amax(3, keepdim=True)
    return top.masked_fill(~top.isfinite(), 0.0)


def _agreement(
    seen: Seen, query: Tensor | None, scale: float, normalize: bool, logsumexp: Tensor | None = None
) -> tuple[Seen, Tensor, Tensor, Tensor]:
    """Return the children without the broken ones, their votes, exp(logits - shift), and the shift.

    The shift ``[B, Ho, Wo, 1, M]`` is ``logsumexp`` ``[B, Ho, Wo, M]`` where that is known, else the largest logit.
    """

    def look(seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        all_votes = make_votes(seen)
        logits = _logits(all_votes, query, scale, normalize)
        if logsumexp is None:
            return all_votes, logits, _top(logits, seen.silent)
        empty = logsumexp == -torch.inf  # nobody there: shares are 0 by their gates, so that any finite shift will do
        return all_votes, logits, logsumexp.masked_fill(empty, 0.0).unsqueeze(3)

    def exponentials(seen: Seen) -> tuple[Tensor, Tensor]:
        all_votes, logits, shift = look(seen)
        return all_votes, (logits - shift).exp()

    seen = without_broken(seen, exponentials)
    all_votes, logits, shift = look(seen)
    exponents = logits - shift
    if seen.broken is not None:
        exponents = exponents.masked_fill(seen.broken[..., None], 0.0)
    return seen, all_votes, exponents.exp(), shift


def pooling_routing(
    votes: Votes,
    query: Tensor | None,
    scale: float,
    normalize: bool,
    rule: int,
    iterations: int = 1,
    detach: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pool once by attention: the children compete for every parent (Zhao & Huang 2019).

    ``a_im = scale <Q_m, K_im>`` with the keys ``K = V``, or ``V / |V|`` over the C * E numbers if ``normalize``,
    ``r_im = g_i exp(a_im) / sum_j g_j exp(a_jm)``, ``S_m = sum_i r_im V_im``. Without a query all a are 0: the average
    of the votes, weighed by their gates.

    Gates stand inside the softmax, so that shares add up to 1 and a gate of 0 is a child that is not there (as is a
    padded one). They must not be negative. Where no child is there, parents are 0 and the log-sum-exp is -infinity.

    Parameters
    ----------
    query : Tensor, optional
        Q, ``[B, Ho, Wo, M, C, E]``.
    rule : int
        ``UNIT`` (parents are S) or ``SQUASH``, see :class:`Rule`.
    detach : bool
        r (and the log-sum-exp) is a constant to the gradient, which so reaches neither query nor gate.

    Returns
    -------
    parents : Tensor
        ``[B, Ho, Wo, M, C, E]``, in the dtype of the children.
    sums : Tensor
        S, ``[1, B, Ho, Wo, M, C, E]``, in the dtype of the children.
    logsumexp : Tensor
        ``log sum_i g_i exp(a_im)``, ``[1, B, Ho, Wo, M]``, in the accumulation dtype.
    """
    dtype = votes.children.dtype
    (query,) = widen(dtype, query)
    seen, all_votes, shares, shift = _agreement(see(votes), query, scale, normalize)
    shares = seen.gated(shares)
    if detach:
        shares, shift = shares.detach(), shift.detach()
    total = shares.sum(3)
    sums = torch.einsum("bhwim,bhwimce->bhwmce", shares, all_votes) * inverse_or_zero(total)[..., None, None]
    stored = sums.to(dtype).contiguous()
    parents = squash(sums, POSE).to(dtype) if rule == Rule.SQUASH else stored.clone()
    empty = total == 0
    logsumexp = (total.masked_fill(empty, 1.0).log() + shift.squeeze(3)).masked_fill(empty, -torch.inf)
    return parents, stored.unsqueeze(0), logsumexp.contiguous().unsqueeze(0)


def pooling_routing_backward(
    grad: Tensor,
    votes: Votes,
    query: Tensor | None,
    sums: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of one turn by explicit formulas; ``grad`` is that of S, in the accumulation dtype.

    With ``e_im = exp(a_im - logsumexp_m)``, ``r_im = g_i e_im`` and ``t_im = <dS_m, V_im> - <dS_m, S_m>``:
    ``da_im = r_im t_im``, ``dg_i = sum_m e_im t_im``, ``dQ_m = scale sum_i da_im K_im``, ``dK_im = scale da_im Q_m``,
    and ``dV_im = r_im dS_m`` plus dK itself, or ``(dK - K <K, dK>) / |V|`` if the keys were normalised.

    Returns
    -------
    tuple of Tensor
        dchildren, dweight, dbias, dgate, dquery. One whose bit in ``needs`` is not set (``1 << k`` for the k-th), or
        whose input is absent, is an empty tensor. With the bit ``DETACH`` dV is r dS alone, dQ and dg are 0.
    """
    inputs, detach = (*votes[:4], query), needs & DETACH
    grad, query, sums, logsumexp = widen(votes.children.dtype, grad, query, sums, logsumexp)  # type: ignore[assignment]
    gradients: list[Tensor | None] = [None] * 5
    seen, all_votes, free, _ = _agreement(see(votes), query, scale, normalize, logsumexp)
    shares = seen.gated(free)
    grad_shares = torch.einsum("bhwmce,bhwimce->bhwim", grad, all_votes) - (grad * sums).sum(POSE).unsqueeze(3)
    grad_votes = shares[..., None, None] * grad.unsqueeze(3)
    if query is not None and detach:
        gradients[4] = torch.zeros_like(query)
    elif query is not None:
        grad_logits = scale * shares * grad_shares
        keys = unit(all_votes, POSE) if normalize else all_votes
        gradients[4] = torch.einsum("bhwim,bhwimce->bhwmce", grad_logits, keys)
        grad_keys = grad_logits[..., None, None] * query.unsqueeze(3)
        if normalize:
            along = (keys * grad_keys).sum(POSE, keepdim=True)
            grad_keys = (grad_keys - keys * along) * inverse_or_zero(length(all_votes, POSE, keepdim=True))
        grad_votes = grad_votes + grad_keys
    gradients[:3] = votes_backward(grad_votes, seen)
    if votes.gate is not None and detach:
        gradients[3] = torch.zeros_like(votes.gate)
    elif votes.gate is not None:
        empty = (logsumexp == -torch.inf).unsqueeze(3)
        gradients[3] = gate_backward((free * grad_shares).masked_fill(empty, 0.0).sum(-1), seen)
    return collect(gradients, inputs, needs)


@torch.no_grad()
def pooling_coefficients(votes: Votes, query: Tensor | None, scale: float, normalize: bool) -> Tensor:
    """Return the shares r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, :, m]`` sums to 1 over the children; those that are not there have 0. One sample's votes at a time.
    """
    found = []
    for b in range(votes.children.shape[0]):
        gate, asked = (None if t is None else t[b : b + 1] for t in (votes.gate, query))
        (asked,) = widen(votes.children.dtype, asked)
        sample = votes._replace(children=votes.children[b : b + 1], gate=gate)
        seen, _, shares, _ = _agreement(see(sample), asked, scale, normalize)
        shares = seen.gated(shares)
        found.append(shares * inverse_or_zero(shares.sum(3, keepdim=True)))
    if found:
        return torch.cat(found)
    (empty,) = widen(votes.children.dtype, votes.children.new_empty((0, *votes.grid, votes.seen, votes.parents)))
    return empty  # type: ignore[return-value]
