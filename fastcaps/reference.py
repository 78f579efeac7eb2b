"""The oracle: every op of the package in plain, eager, differentiable PyTorch.

Arguments, layouts and results are those of the ops (see :mod:`fastcaps.ops`): children ``[B, H, W, N, C, D]``, weight
``[G, M, D, E]``, query ``[B, Ho, Wo, M, C, E]``, bias ``[I | 1, M | 1, C, E]``, gate ``[B, H, W, N]``, and a window of
eight numbers. Clarity comes first here: votes are stored, all B * Ho * Wo * I * M * C * E of them. Every backend is
tested against this file, and this file against the paper's procedure as plain loops (``tests/oracle.py``).

Half-precision inputs are computed in float32 and rounded once, at the end; float32 and float64 in themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.geometry import output_size, window_extent

__all__ = [
    "accumulation_dtype",
    "attention_pass",
    "attention_pass_backward",
    "coefficients",
    "votes",
    "windows",
    "windows_adjoint",
]

NEEDS = ("children", "weight", "query", "bias", "gate", "norm_weight", "norm_bias")
"""The gradients of the pass in the order of their bits: gradient k is asked for if ``needs`` has bit ``1 << k``."""

_SLICE = 1 << 22  # votes that `coefficients` holds at a time, counted in numbers: 16 MB of float32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over ``dtype`` are kept: float32 for the half-precision types, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def windows(grid: Tensor, window: Sequence[int]) -> Tensor:
    """Return what every output position sees of ``grid`` ``[B, H, W, N, ...]``, as ``[B, Ho, Wo, I, ...]``.

    Child ``i = (ky * kw + kx) * N + n``. Padded positions hold zeros.
    """
    kh, kw, sh, sw, ph, pw, dh, dw = window
    if ph or pw:
        grid = F.pad(grid, [0, 0] * (grid.dim() - 3) + [pw, pw, ph, ph])
    rows, columns = window_extent(window)
    seen = grid.unfold(1, rows, sh)[..., ::dh].unfold(2, columns, sw)[..., ::dw]  # [B, Ho, Wo, N, ..., kh, kw]
    seen = seen.movedim((-2, -1), (3, 4))
    return seen.reshape(seen.shape[:3] + (kh * kw * grid.shape[3],) + grid.shape[4:])


def windows_adjoint(seen: Tensor, grid_shape: Sequence[int], window: Sequence[int]) -> Tensor:
    """Return the adjoint of :func:`windows`: ``[B, Ho, Wo, I, ...]`` summed back to the grid it was cut from."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    batch, height, width, types = grid_shape[:4]
    ho, wo = seen.shape[1:3]
    parts = seen.reshape(seen.shape[:3] + (kh, kw, types) + seen.shape[4:])
    padded = seen.new_zeros((batch, height + 2 * ph, width + 2 * pw, types, *seen.shape[4:]))
    for ky in range(kh):
        for kx in range(kw):
            rows = slice(ky * dh, ky * dh + sh * (ho - 1) + 1, sh)
            columns = slice(kx * dw, kx * dw + sw * (wo - 1) + 1, sw)
            padded[:, rows, columns] += parts[:, :, :, ky, kx]
    if not (ph or pw):
        return padded
    return padded[:, ph : ph + height, pw : pw + width].clone(memory_format=torch.contiguous_format)


def _presence(children: Tensor, window: Sequence[int]) -> Tensor | None:
    """Return which children exist, ``[1, Ho, Wo, I]`` of 0 and 1, or None where no window reaches into the padding."""
    if not (window[4] or window[5]):
        return None
    return windows(children.new_ones((1, *children.shape[1:4])), window)


def _matmul_votes(seen: Tensor, weight: Tensor, bias: Tensor | None, present: Tensor | None) -> Tensor:
    """Return ``P W + bias`` for children ``seen`` ``[B, Ho, Wo, I, C, D]``, zero where a child is absent."""
    groups, parents, _, columns = weight.shape
    batch, ho, wo, count, rows = seen.shape[:5]
    grouped = seen.reshape(batch, ho, wo, count // groups, groups, rows, seen.shape[5])
    result = torch.einsum("bhwjgcd,gmde->bhwjgmce", grouped, weight)
    result = result.reshape(batch, ho, wo, count, parents, rows, columns)
    if bias is not None:
        result = result + bias
    if present is not None:
        # not a product: a bias or a weight of infinity must not turn an absent child into NaN
        result = result.masked_fill(present[..., None, None, None] == 0, 0.0)
    return result


def votes(children: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int]) -> Tensor:
    """Return all votes ``V[b, l, i, m] = P[b, l, i] W[i mod G, m] + bias[i, m]`` as ``[B, Ho, Wo, I, M, C, E]``.

    Votes are in the accumulation dtype; those of absent (padded) children are zero.
    """
    dtype = accumulation_dtype(children.dtype)
    children, weight = children.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return _matmul_votes(windows(children, window), weight, bias, _presence(children, window))


def _weights(all_votes: Tensor, query: Tensor | None, scale: float) -> Tensor:
    """Return the routing coefficients ``softmax over parents of scale * <Q_m, V_im>``, ``[B, Ho, Wo, I, M]``."""
    if query is None:
        return all_votes.new_full(all_votes.shape[:5], 1.0 / all_votes.shape[4])
    agreement = torch.einsum("bhwmce,bhwimce->bhwim", query, all_votes) * scale
    return agreement.softmax(dim=-1)


def _seen_gate(gate: Tensor | None, present: Tensor | None, window: Sequence[int]) -> Tensor | None:
    """Return what multiplies each child's share, ``[B | 1, Ho, Wo, I]``; None where that is 1 everywhere."""
    return present if gate is None else windows(gate, window)  # padded gates are already 0


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
) -> tuple[Tensor, Tensor]:
    """Route once by inverted dot-product attention: the parents compete for every child (Tsai et al. 2020).

    ``a_im = scale <Q_m, V_im>``, ``r_im = softmax_m a_im`` (1/M without a query), ``S_m = sum_i g_i r_im V_im``, and
    ``parents = LayerNorm(S)`` over the C * E numbers of a pose if ``normalize``, else S.

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
    seen_gate = _seen_gate(gate, _presence(children.to(dtype), window), window)
    if seen_gate is not None:
        shares = shares * seen_gate[..., None]
    sums = torch.einsum("bhwim,bhwimce->bhwmce", shares, all_votes).contiguous()
    if not normalize:
        return sums.to(children.dtype), sums.new_empty(0)
    parents, _ = _standardise(sums, eps)
    if norm_weight is not None:
        parents = parents * norm_weight
    if norm_bias is not None:
        parents = parents + norm_bias
    return parents.reshape(sums.shape).to(children.dtype), sums


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
    are those of the affine without ``grad_parents``.
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

    present = _presence(children, window)
    seen = windows(children, window)
    all_votes = _matmul_votes(seen, weight, bias, present)
    share = _weights(all_votes, query, scale)
    seen_gate = _seen_gate(gate, present, window)
    gated = share if seen_gate is None else share * seen_gate[..., None]
    heard = torch.einsum("bhwmce,bhwimce->bhwim", grad, all_votes)
    grad_votes = gated[..., None, None] * grad.unsqueeze(3)
    if query is not None:
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
    present = _presence(children, window)
    if query is not None:
        per_child = max(ho * wo * children.shape[4], children.shape[5]) * parents * columns  # its votes, or its weights
        step = max(1, _SLICE // per_child)
        for b in range(children.shape[0]):
            seen = windows(children[b : b + 1], window)
            for first in range(0, count, step):
                part = slice(first, min(first + step, count))
                group = torch.arange(part.start, part.stop, device=children.device) % groups
                part_bias = bias if bias is None or bias.shape[0] == 1 else bias[part]
                part_votes = _matmul_votes(
                    seen[:, :, :, part], weight[group], None if part_bias is None else part_bias.to(dtype), None
                )
                result[b, :, :, part] = _weights(part_votes, query[b : b + 1], scale)[0]
    return result if present is None else result.masked_fill(present[..., None] == 0, 0.0)
