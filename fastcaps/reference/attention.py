"""The oracle of the attention pass: eager, differentiable PyTorch that stores the votes.

Layout and meaning of the arguments: :mod:`fastcaps.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastcaps.geometry import output_size
from fastcaps.reference.sight import (
    FROZEN,
    accumulation_dtype,
    matmul_votes,
    presence,
    seen_gate,
    votes,
    windows,
    windows_adjoint,
)

__all__ = ["NEEDS", "attention_pass", "attention_pass_backward", "coefficients", "layer_norm"]

NEEDS = ("children", "weight", "query", "bias", "gate", "norm_weight", "norm_bias")
"""The gradients of the pass in the order of their bits: gradient k is asked for if ``needs`` has bit ``1 << k``."""

_SLICE = 1 << 22  # votes that `coefficients` holds at a time, counted in numbers: 16 MB of float32


def _weights(all_votes: Tensor, query: Tensor | None, scale: float) -> Tensor:
    """Return the routing coefficients ``softmax over parents of scale * <Q_m, V_im>``, ``[B, Ho, Wo, I, M]``."""
    if query is None:
        return all_votes.new_full(all_votes.shape[:5], 1.0 / all_votes.shape[4])
    agreement = torch.einsum("bhwmce,bhwimce->bhwim", query, all_votes) * scale
    return agreement.softmax(dim=-1)


def attention_pass(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    frozen: bool = False,
) -> tuple[Tensor, Tensor]:
    """Route once by inverted dot-product attention: the parents compete for every child (Tsai et al. 2020).

    ``a_im = scale <Q_m, V_im>``, ``r_im = softmax_m a_im`` (1/M without a query), ``S_m = sum_i g_i r_im V_im``, and
    ``parents = LayerNorm(S)`` over the C * E numbers of a pose if ``normalize``, else S. If ``frozen``, r is a constant
    to the gradient.

    Returns
    -------
    parents : Tensor
        ``[B, Ho, Wo, M, C, E]`` in the dtype of the children.
    sums : Tensor
        S in the accumulation dtype if ``normalize``, else an empty tensor.
    """
    dtype = accumulation_dtype(children.dtype)
    query, gate, norm_weight, norm_bias = (
        None if tensor is None else tensor.to(dtype) for tensor in (query, gate, norm_weight, norm_bias)
    )
    all_votes = votes(children, weight, bias, window)
    shares = _weights(all_votes, query, scale)
    if frozen:
        shares = shares.detach()
    allowed = seen_gate(gate, presence(children.to(dtype), window), window)
    if allowed is not None:
        shares = shares * allowed[..., None]
    sums = torch.einsum("bhwim,bhwimce->bhwmce", shares, all_votes).contiguous()
    if not normalize:
        return sums.to(children.dtype), sums.new_empty(0)
    return layer_norm(sums, norm_weight, norm_bias, eps).to(children.dtype), sums


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


def attention_pass_backward(
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the seven gradients of :func:`attention_pass` by explicit, themselves differentiable, formulas.

    With ``h_im = <dS_m, V_im>``: ``da_im = g_i r_im (h_im - sum_m' r_im' h_im')``,
    ``dV_im = g_i r_im dS_m + scale da_im Q_m``, ``dQ_m = scale sum_i da_im V_im``, ``dg_i = sum_m r_im h_im``,
    ``dP_i = sum_m dV_im W_gm^T``, ``dW_gm = sum over (b, l, i of group g) of P_i^T dV_im``, ``dbias = sum dV``.

    A gradient whose bit in ``needs`` is not set (see :data:`NEEDS`), or whose input is absent, is an empty tensor; so
    are those of the affine without ``grad_parents``. With the bit :data:`~fastcaps.reference.FROZEN` da is 0.
    """
    out_dtype, dtype = children.dtype, accumulation_dtype(children.dtype)
    children_shape, bias_shape = children.shape, None if bias is None else bias.shape
    children, weight = children.to(dtype), weight.to(dtype)
    grad_parents, grad_sums, query, bias, gate, norm_weight = (
        None if tensor is None else tensor.to(dtype)
        for tensor in (grad_parents, grad_sums, query, bias, gate, norm_weight)
    )
    gradients: list[Tensor | None] = [None] * len(NEEDS)
    shape = (
        children.shape[0],
        *output_size(window, children.shape[1], children.shape[2]),
        weight.shape[1],
        children.shape[4],
        weight.shape[3],
    )
    grad = children.new_zeros(shape) if grad_parents is None else grad_parents
    if normalize:
        grad, *affine = _layer_norm_backward(grad, sums.to(dtype), norm_weight, eps)
        gradients[5:7] = affine if grad_parents is not None else (None, None)
        if grad_sums is not None:
            grad = grad + grad_sums

    present = presence(children, window)
    seen = windows(children, window)
    all_votes = matmul_votes(seen, weight, bias, present)
    share = _weights(all_votes, query, scale)
    frozen = bool(needs & FROZEN)
    if frozen:
        share = share.detach()
    allowed = seen_gate(gate, present, window)
    gated = share if allowed is None else share * allowed[..., None]
    heard = torch.einsum("bhwmce,bhwimce->bhwim", grad, all_votes)
    grad_votes = gated[..., None, None] * grad.unsqueeze(3)
    if query is not None and frozen:
        gradients[2] = torch.zeros_like(query)
    elif query is not None:
        grad_agreement = gated * (heard - (share * heard).sum(-1, keepdim=True))
        grad_votes = grad_votes + scale * grad_agreement[..., None, None] * query.unsqueeze(3)
        gradients[2] = scale * torch.einsum("bhwim,bhwimce->bhwmce", grad_agreement, all_votes)
    if present is not None:
        grad_votes = grad_votes.masked_fill(present[..., None, None, None] == 0, 0.0)

    groups = weight.shape[0]
    batch, ho, wo, count, rows, depth = seen.shape
    grouped_votes = grad_votes.reshape(batch, ho, wo, count // groups, groups, *grad_votes.shape[4:])
    if needs & 1:
        grad_seen = torch.einsum("bhwjgmce,gmde->bhwjgcd", grouped_votes, weight).reshape(seen.shape)
        gradients[0] = windows_adjoint(grad_seen, children_shape, window)
    if needs & 2:
        grouped = seen.reshape(batch, ho, wo, count // groups, groups, rows, depth)
        gradients[1] = torch.einsum("bhwjgcd,bhwjgmce->gmde", grouped, grouped_votes)
    if bias_shape is not None:
        gradients[3] = grad_votes.sum((0, 1, 2)).sum_to_size(bias_shape)
    if gate is not None:
        gradients[4] = windows_adjoint((share * heard).sum(-1), children_shape[:4], window)
    nothing = children.new_empty(0, dtype=out_dtype)
    return tuple(
        nothing.clone() if gradient is None or not needs >> k & 1 else gradient.to(out_dtype).contiguous()
        for k, gradient in enumerate(gradients)
    )


@torch.no_grad()
def coefficients(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    scale: float,
    window: Sequence[int],
) -> Tensor:
    """Return the routing coefficients r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, i]`` sums to 1 over the parents whatever the child's gate; of an absent (padded) child it is 0. Votes are
    made for a few children at a time, so that beside the result only some 16 MB are used.
    """
    dtype = accumulation_dtype(children.dtype)
    children, weight = children.to(dtype), weight.to(dtype)
    query = None if query is None else query.to(dtype)
    groups, parents, _, columns = weight.shape
    ho, wo = output_size(window, children.shape[1], children.shape[2])
    count = window[0] * window[1] * children.shape[3]
    result = children.new_full((children.shape[0], ho, wo, count, parents), 1.0 / parents)
    present = presence(children, window)
    if query is not None:
        per_child = max(ho * wo * children.shape[4], children.shape[5]) * parents * columns  # its votes, or its weights
        step = max(1, _SLICE // per_child)
        for b in range(children.shape[0]):
            seen = windows(children[b : b + 1], window)
            for first in range(0, count, step):
                part = slice(first, min(first + step, count))
                group = torch.arange(part.start, part.stop, device=children.device) % groups
                part_bias = bias if bias is None or bias.shape[0] == 1 else bias[part]
                part_votes = matmul_votes(
                    seen[:, :, :, part], weight[group], None if part_bias is None else part_bias.to(dtype), None
                )
                result[b, :, :, part] = _weights(part_votes, query[b : b + 1], scale)[0]
    return result if present is None else result.masked_fill(present[..., None] == 0, 0.0)
