"""The oracle of routings whose parents compete: inverted attention, and dynamic routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype, widen
from fastcaps.reference.seen import (
    Seen,
    differentiate,
    make_votes,
    see,
    without_broken,
)
from fastcaps.rules import DETACH, Rule
from fastcaps.vectors import squash
from fastcaps.votes import POSE, SET_WINDOW, Votes

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

    Written out, since torch 2.13's layer_norm has wrong derivatives from the third on.

    Parameters
    ----------
    sums : Tensor
        S, ``[..., C, E]``.
    norm_weight, norm_bias : Tensor, optional
        ``[C * E]``, in the dtype of S.
    eps : float
        Added to the variance.
    """
    flat = sums.flatten(-2)
    centred = flat - flat.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # a mean of 0 to the last place of the differences, not of S
    parents = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    if norm_weight is not None:
        parents = parents * norm_weight
    if norm_bias is not None:
        parents = parents + norm_bias
    return parents.reshape(sums.shape)


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
    """Return the gradients of one iteration; ``grad`` is that of LayerNorm(S), without sums that of S.

    It is in the accumulation dtype, as what comes to S through squash must not be rounded on its way.
    """
    pose = votes.pose[0] * votes.pose[2]
    affine: tuple[Tensor | None, Tensor | None] = (None, None)
    if sums is not None:  # the backward is not told of norm_bias, whose gradient does not depend on it
        affine = (votes.children.new_ones(pose) if norm_weight is None else norm_weight, votes.children.new_zeros(pose))

    def run(*tensors: Any) -> tuple[Tensor]:
        own, query = Votes._make((*tensors[:4], votes.parents, votes.window)), tensors[4]
        _, found = attention_routing(own, query, None, None, scale, eps, Rule.PLAIN, 1, bool(needs & DETACH))
        if sums is None:
            return (found[0],)
        norm_weight, norm_bias = widen(own.children.dtype, *tensors[5:])
        return (layer_norm(found[0], norm_weight, norm_bias, eps),)

    return differentiate(run, (*votes[:4], query, *affine), (grad,), needs)


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
