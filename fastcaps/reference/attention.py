"""The reference of routings whose parents compete: inverted attention, and dynamic routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import widen
from fastcaps.reference.derivatives import differentiate
from fastcaps.reference.verbs import VoteBlocks, blocks_of
from fastcaps.rules import DETACH, Rule
from fastcaps.vectors import squash
from fastcaps.votes import POSE, VoteInputs


def attention_routing(
    votes: VoteInputs | VoteBlocks,
    query: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    rule: int,
    iterations: int = 1,
    detach: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return one iteration in which the parents compete for every child (Tsai et al. 2020; Sabour et al. 2017).

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
        Treat r as a constant in the gradient.

    Returns
    -------
    parents : Tensor
        ``[B, Ho, Wo, M, C, E]``, in the dtype of the children.
    sums : Tensor
        S, ``[1, B, Ho, Wo, M, C, E]``, in the accumulation dtype.
    """
    seen = blocks_of(votes)
    query, norm_weight, norm_bias = widen(seen.dtype, query, norm_weight, norm_bias)
    if query is None:
        seen = seen.without_broken()
        shares = seen.uniform()
    else:
        whole = seen
        seen = whole.without_broken(lambda: scale * whole.scores(query))
        shares = (scale * seen.scores(query)).softmax(-1)
    sums = seen.sums(seen.gated(shares.detach() if detach else shares)).contiguous()
    parents = parents_of(sums, norm_weight, norm_bias, eps, rule)
    return parents.to(seen.dtype, copy=parents is sums), sums.unsqueeze(0)


def parents_of(sums: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, rule: int) -> Tensor:
    """Return the parents of S by a rule; the affine of LayerNorm has the dtype of S."""
    if rule == Rule.SQUASH:
        return squash(sums, POSE)
    return layer_norm(sums, norm_weight, norm_bias, eps) if rule == Rule.LAYER_NORM else sums


def layer_norm(sums: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm over the last two dimensions, ``norm_weight * (S - mean) / sqrt(variance + eps) + norm_bias``.

    S is ``[..., C, E]``, the affine ``[C * E]`` in its dtype. Equal values become 0, with gradient 0, even if eps is 0.
    Torch 2.13's layer_norm has wrong third derivatives.
    """
    flat = sums.flatten(-2)
    centred = flat - flat.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # a mean of 0 to the precision of the differences, not of S
    variance = centred.square().mean(-1, keepdim=True) + eps
    equal = variance == 0  # without eps: all values are equal, as where no child exists
    parents = centred * variance.masked_fill(equal, 1.0).rsqrt().masked_fill(equal, 0.0)
    if norm_weight is not None:
        parents = parents * norm_weight
    if norm_bias is not None:
        parents = parents + norm_bias
    return parents.reshape(sums.shape)


def attention_routing_backward(
    grad: Tensor,
    votes: VoteInputs,
    query: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor | None,
    scale: float,
    eps: float,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of one iteration; ``grad`` is that of LayerNorm(S), or of S if ``sums`` is None.

    It is in the accumulation dtype, as the gradient of squash must not be rounded.
    """
    pose = votes.pose[0] * votes.pose[2]
    affine: tuple[Tensor | None, Tensor | None] = (None, None)
    if sums is not None:  # norm_bias is no argument, as no gradient depends on it
        affine = (votes.children.new_ones(pose) if norm_weight is None else norm_weight, votes.children.new_zeros(pose))

    rule = Rule.PLAIN if sums is None else Rule.LAYER_NORM

    def run(*tensors: Any) -> tuple[Tensor, ...]:
        wide: Any = widen(votes.children.dtype, *tensors)  # so that the parents are not rounded
        inputs, (query, norm_weight, norm_bias) = VoteInputs._make((*wide[:4], votes.parents, votes.window)), wide[4:]
        detach = bool(needs & DETACH)
        return attention_routing(inputs, query, norm_weight, norm_bias, scale, eps, rule, 1, detach)[:1]

    return differentiate(run, (*votes[:4], query, *affine), (grad,), needs)


@torch.no_grad()
def attention_coefficients(votes: VoteInputs | VoteBlocks, query: Tensor | None, scale: float) -> Tensor:
    """Return the coefficients r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, i]`` sums to 1 over the parents for any gate of the child; it is 0 for an absent (padded) child.
    """
    seen = blocks_of(votes)
    (query,) = widen(seen.dtype, query)
    if query is None:
        return seen.uniform()
    return seen.present((scale * seen.scores(query)).softmax(-1))
