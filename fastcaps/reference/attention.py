"""The oracle of routings whose parents compete: inverted attention, and dynamic routing."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.reference.seen import (
    POSE,
    Seen,
    collect,
    gate_backward,
    make_votes,
    see,
    votes_backward,
    widen,
    without_broken,
)
from fastcaps.rules import DETACH, Rule
from fastcaps.vectors import squash
from fastcaps.votes import SET_WINDOW, Votes

__all__ = ["attention_coefficients", "attention_routing", "attention_routing_backward", "layer_norm"]

_SLICE = 1 << 22  # votes that `attention_coefficients` holds at a time, counted in numbers: 16 MB of float32


def _shares(all_votes: Tensor, query: Tensor | None, scale: float) -> Tensor:
    """Return the routing coefficients ``softmax over parents of scale * <Q_m, V_im>``, ``[B, Ho, Wo, I, M]``."""
    if query is None:
        return all_votes.new_full(all_votes.shape[:5], 1.0 / all_votes.shape[4])
    agreement = torch.einsum("bhwmce,bhwimce->bhwim", query, all_votes) * scale
    return agreement.softmax(dim=-1)


def _see_whole(votes: Votes, query: Tensor | None, scale: float) -> tuple[Seen, Tensor, Tensor]:
    """Return the children without the broken ones, their votes, and their shares ``[B, Ho, Wo, I, M]``."""

    def look(seen: Seen) -> tuple[Tensor, Tensor]:
        all_votes = make_votes(seen)
        return all_votes, _shares(all_votes, query, scale)

    seen = without_broken(see(votes), look)
    return seen, *look(seen)


def attention_routing(
    votes: Votes,
    query: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    rule: int,
    iterations: int = 1,
    detach: bool = False,
) -> tuple[Tensor, Tensor]:
    """Route once: the parents compete for every child (Tsai et al. 2020; Sabour et al. 2017).

    ``a_im = scale <Q_m, V_im>``, ``r_im = softmax_m a_im`` (1/M without a query), ``S_m = sum_i g_i r_im V_im``.

    Parameters
    ----------
    query : Tensor, optional
        Q, ``[B, Ho, Wo, M, C, E]``.
    norm_weight, norm_bias : Tensor, optional
        The affine of LayerNorm, ``[C * E]``.
    rule : int
        ``LAYER_NORM``, ``PLAIN`` or ``SQUASH``, see :class:`Rule`.
    detach : bool
        r is a constant to the gradient.

    Returns
    -------
    parents : Tensor
        ``[B, Ho, Wo, M, C, E]``, in the dtype of the children.
    sums : Tensor
        S, ``[1, B, Ho, Wo, M, C, E]``, in the accumulation dtype.
    """
    dtype = votes.children.dtype
    query, norm_weight, norm_bias = widen(dtype, query, norm_weight, norm_bias)
    seen, all_votes, shares = _see_whole(votes, query, scale)
    shares = seen.gated(shares.detach() if detach else shares)
    sums = torch.einsum("bhwim,bhwimce->bhwmce", shares, all_votes).contiguous()
    parents = sums
    if rule == Rule.LAYER_NORM:
        parents = layer_norm(sums, norm_weight, norm_bias, eps)
    elif rule == Rule.SQUASH:
        parents = squash(sums, POSE)
    return parents.to(dtype, copy=parents is sums), sums.unsqueeze(0)


def layer_norm(sums: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm over the last two dimensions, ``norm_weight * (S - mean) / sqrt(variance + eps) + norm_bias``.

    Parameters
    ----------
    sums : Tensor
        S, ``[..., C, E]``.
    norm_weight, norm_bias : Tensor, optional
        ``[C * E]``, in the dtype of S.
    eps : float
        Added to the variance.
    """
    parents, _ = _standardise(sums, eps)
    if norm_weight is not None:
        parents = parents * norm_weight
    if norm_bias is not None:
        parents = parents + norm_bias
    return parents.reshape(sums.shape)


def _standardise(sums: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``[B, Ho, Wo, M, C * E]`` with mean 0 and variance 1 over the pose, and 1 / sqrt(variance + eps).

    Written out, since torch 2.13's layer_norm has wrong derivatives from the third on. Centred twice: the backward
    formula wants a mean of 0 to the last place of the differences, not of the sums that they are taken from.
    """
    flat = sums.flatten(-2)
    centred = flat - flat.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * inverse, inverse


def _layer_norm_backward(
    grad: Tensor, sums: Tensor, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dS, dL/dnorm_weight, dL/dnorm_bias of LayerNorm over the last two dimensions."""
    grad = grad.flatten(-2)
    standard, inverse = _standardise(sums, eps)
    scaled = grad if norm_weight is None else grad * norm_weight
    inner = scaled - scaled.mean(-1, keepdim=True) - standard * (scaled * standard).mean(-1, keepdim=True)
    outer = tuple(range(grad.dim() - 1))
    return (inverse * inner).reshape(sums.shape), (grad * standard).sum(outer), grad.sum(outer)


def attention_routing_backward(
    grad: Tensor,
    votes: Votes,
    query: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor | None,
    scale: float,
    eps: float,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of one turn by explicit formulas; ``grad`` is that of LayerNorm(S), without sums that of S.

    It is in the accumulation dtype, as what comes to S through squash must not be rounded on its way.

    With ``h_im = <dS_m, V_im>``: ``da_im = g_i r_im (h_im - sum_m' r_im' h_im')``,
    ``dV_im = g_i r_im dS_m + scale da_im Q_m``, ``dQ_m = scale sum_i da_im V_im``, ``dg_i = sum_m r_im h_im``,
    ``dP_i = sum_m dV_im W_gm^T``, ``dW_gm = sum over (b, l, i of group g) of P_i^T dV_im``, ``dbias = sum dV``.

    Returns
    -------
    tuple of Tensor
        dchildren, dweight, dbias, dgate, dquery, dnorm_weight, dnorm_bias. One whose bit in ``needs`` is not set
        (``1 << k`` for the k-th), or whose input is absent, is an empty tensor. With the bit ``DETACH`` da is 0.
    """
    inputs = (*votes[:4], query, *((norm_weight if sums is None else votes.children,) * 2))
    grad, query, norm_weight, sums = widen(votes.children.dtype, grad, query, norm_weight, sums)  # type: ignore[assignment]
    gradients: list[Tensor | None] = [None] * 7
    if sums is not None:
        grad, *gradients[5:] = _layer_norm_backward(grad, sums, norm_weight, eps)
    seen, all_votes, shares = _see_whole(votes, query, scale)
    gated = seen.gated(shares)
    grad_shares = torch.einsum("bhwmce,bhwimce->bhwim", grad, all_votes)
    grad_votes = gated[..., None, None] * grad.unsqueeze(3)
    if query is not None and needs & DETACH:
        gradients[4] = torch.zeros_like(query)
    elif query is not None:
        grad_agreement = gated * (grad_shares - (shares * grad_shares).sum(-1, keepdim=True))
        grad_votes = grad_votes + scale * grad_agreement[..., None, None] * query.unsqueeze(3)
        gradients[4] = scale * torch.einsum("bhwim,bhwimce->bhwmce", grad_agreement, all_votes)
    gradients[:3] = votes_backward(grad_votes, seen)
    if votes.gate is not None:
        gradients[3] = gate_backward((shares * grad_shares).sum(-1), seen)
    return collect(gradients, inputs, needs)


@torch.no_grad()
def attention_coefficients(votes: Votes, query: Tensor | None, scale: float) -> Tensor:
    """Return the routing coefficients r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, i]`` sums to 1 over the parents whatever the child's gate; of an absent (padded) child it is 0. Votes are
    made for a few children at a time, so that beside the result only some 16 MB are used.
    """
    children, weight, bias, _, parents, _ = votes
    (ho, wo), count, (rows, depth, columns) = votes.grid, votes.seen, votes.pose
    dtype = accumulation_dtype(children.dtype)
    result = children.new_full((children.shape[0], ho, wo, count, parents), 1.0 / parents, dtype=dtype)
    per_child = max(ho * wo * rows, depth) * parents * columns  # its votes, or its weights
    step = max(1, _SLICE // per_child)
    for b in range(children.shape[0]):
        seen = see(votes._replace(children=children[b : b + 1], gate=None))
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            if query is not None:
                own = None if weight is None else weight[torch.arange(part.start, part.stop) % votes.groups]
                own_bias = bias if bias is None or bias.shape[0] == 1 else bias[part]
                some = Votes(
                    seen.children[:, :, :, part].flatten(0, 2)[:, None, None], own, own_bias, None, parents, SET_WINDOW
                )
                some_votes = make_votes(see(some)).reshape(1, ho, wo, part.stop - first, parents, rows, columns)
                result[b, :, :, part] = _shares(some_votes, query[b : b + 1].to(dtype), scale)[0]
        if seen.present is not None:
            result[b].masked_fill_(seen.present[0, ..., None] == 0, 0.0)
    return result
