"""Routing with r = 1 / M: the first iteration of inverted attention, as the library's convolution or matmul.

``S_m = 1/M sum_i g_i (P_i W_im + b_im)`` is linear in the children: a convolution with the rows C of a pose folded into
the batch, N * D input and M * E output channels. If the children of a position share matrices (G divides N), it is the
sum of the children followed by a matmul. All is ordinary differentiable PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import is_tracing, widen
from fastcaps.reference.attention import layer_norm
from fastcaps.settings import constant_in_graphs
from fastcaps.votes import SET_WINDOW, VoteInputs, autocast_dtype, hidden, output_size, seen_of
from fastcaps.watchers import is_sharded

_LARGE = 1 << 23  # values: 32 MB, which the system allocates page by page in every call


def torch_runs_first_iteration(votes: VoteInputs) -> bool:
    """Return whether torch's library, not a backend, runs a call's first iteration.

    The library needs the weights in another order. Copying them is cheap beside the convolution unless they are large.
    If children share weights, summing them first is fastest. Our kernel also runs if the library's convolution on a GPU
    may round float32 to TF32 but its matmul, whose setting counts here, may not; and under
    :func:`fastcaps.backends.tf32x3`, which the library does not have. Only shapes and settings decide, so that results
    have the same bits with and without gradients. Parts of DTensors come here, not DTensors.
    """
    children, weight, window = votes.children, votes.weight, votes.window
    if weight is None or backends.forced() == "reference" or is_sharded(votes[:4]):
        return False
    if children.device.type == "cuda":
        convolution = tuple(window) != SET_WINDOW and children.shape[3] % weight.shape[0] != 0
        return not (_rounds(convolution) and (autocast_dtype("cuda") or children.dtype) == torch.float32)
    large = weight.shape[0] == seen_of(votes) and weight.numel() >= _LARGE
    return not (large and children.device.type == "cpu" and backends.native_serves())


@constant_in_graphs
def _rounds(convolution: bool) -> bool:
    """Return whether torch's float32 products on a GPU may round to TF32 more than :mod:`fastcaps.backends` allows."""
    alone = torch.backends.cudnn.conv.fp32_precision == "tf32" and not backends.tf32_allowed()  # type: ignore[attr-defined]
    return backends.tf32x3_wanted() or (convolution and alone)


def uniform_parents(
    votes: VoteInputs, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, norm: bool
) -> Tensor:
    """Return the parents for r = 1 / M, contiguous ``[B, Ho, Wo, M, C, E]`` or ``[B, M, C, E]``.

    Half precision is widened first, as LayerNorm and its backward subtract, which leaves only noise of rounded S and
    dS. A child with a gate of 0 has no effect, even if it is NaN. ``norm``: apply LayerNorm. Workspace, in the
    accumulation dtype: one copy of children and weights (with a gate, two of the children), two of S.
    """
    parents, window, dtype = votes.parents, votes.window, votes.children.dtype
    children, weight, bias, gate, norm_weight, norm_bias = widen(dtype, *votes[:4], norm_weight, norm_bias)
    assert children is not None and weight is not None
    children = gated = children.flatten(-2).unflatten(-1, children.shape[-2:])  # the gradient then has their strides
    if gate is not None:
        broken = hidden(children, gate)  # as 0 times NaN is NaN
        gate = gate.masked_fill(broken, 0.0)  # for the bias
        gated = children.masked_fill(broken[..., None, None], 0.0) * gate[..., None, None]
    sums = _sums(gated, weight, window)
    if bias is not None:
        sums = sums + _sum_of_bias(children, bias, gate, window)
    if not norm:
        return (sums / parents).to(dtype).contiguous()
    if eps == 0:
        return layer_norm(sums, norm_weight, norm_bias, eps).to(dtype).contiguous()
    # LayerNorm(S / M; eps) = LayerNorm(S; eps M^2), which saves a pass over S
    flat = sums.flatten(-2)
    if flat.dtype != dtype:  # as in the reference: for two values the gradient is a small difference
        flat = flat - flat.mean(-1, keepdim=True)
    flat = F.layer_norm(flat, [sums.shape[-2] * sums.shape[-1]], norm_weight, norm_bias, eps * parents**2)
    return flat.view(sums.shape).to(dtype)


def _sums(children: Tensor, weight: Tensor, window: Sequence[int]) -> Tensor:
    if tuple(window) == SET_WINDOW or children.shape[-3] % weight.shape[0] == 0:
        return _sums_by_matmul(children, weight, window)
    return _sums_by_convolution(children, weight, window)


def _window_sum(grid: Tensor, window: Sequence[int]) -> Tensor:
    """Return each window's sum over its positions, ``[B, Ho, Wo, ...]`` of ``[B, H, W, ...]``: rows, then columns."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    ho, wo = output_size(window, grid.shape[1], grid.shape[2])
    if ph or pw:
        grid = F.pad(grid, [0, 0] * (grid.dim() - 3) + [pw, pw, ph, ph])
    rows = grid[:, : sh * (ho - 1) + 1 : sh]
    for ky in range(1, kh):
        rows = rows + grid[:, ky * dh : ky * dh + sh * (ho - 1) + 1 : sh]
    total = rows[:, :, : sw * (wo - 1) + 1 : sw]
    for kx in range(1, kw):
        total = total + rows[:, :, kx * dw : kx * dw + sw * (wo - 1) + 1 : sw]
    return total


def _sums_by_matmul(children: Tensor, weight: Tensor, window: Sequence[int]) -> Tensor:
    """Return ``sum_i P_i W_im`` if G divides N: children summed by group, then a matmul."""
    groups, parents, depth, columns = weight.shape
    types = children.shape[-3]
    if types != groups:
        children = children.unflatten(-3, (types // groups, groups)).sum(-4)
    if tuple(window) != SET_WINDOW:
        children = _window_sum(children, window)
    left = children.transpose(-3, -2).flatten(-2)  # [..., C, G * D]
    right = weight.transpose(1, 2).reshape(groups * depth, parents * columns)
    return (left @ right).unflatten(-1, (parents, columns)).transpose(-3, -2)


def _sums_by_convolution(children: Tensor, weight: Tensor, window: Sequence[int]) -> Tensor:
    """Return ``sum_i P_i W_im`` ``[B, Ho, Wo, M, C, E]`` by a convolution over the grid."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    groups, parents, depth, columns = weight.shape
    batch, height, width, types, rows, _ = children.shape
    count = kh * kw * types
    if groups != count:
        weight = weight.repeat(count // groups, 1, 1, 1)
    # both operands channels last, the fastest layout for convolutions: [M, E, kh, kw, N, D] and [B, C, H, W, N, D]
    kernel = weight.view(kh, kw, types, parents, depth, columns).permute(3, 5, 0, 1, 2, 4)
    kernel = kernel.reshape(parents * columns, kh, kw, types * depth).movedim(-1, 1)
    images = children.movedim(4, 1).reshape(batch * rows, height, width, types * depth).movedim(-1, 1)
    if types * depth == 1:  # torch 2.13's convolution reads beyond one channel that it takes for channels last
        images, kernel = (x.flatten().view(x.shape) for x in (images, kernel))
    if is_tracing():  # Inductor fails for a convolution of a permuted view of symbolic sizes, but not after arithmetic
        images, kernel = -images, -kernel
    result = F.conv2d(images, kernel, None, (sh, sw), (ph, pw), (dh, dw))
    ho, wo = result.shape[2:]
    return result.movedim(1, -1).reshape(batch, rows, ho, wo, parents, columns).movedim(1, 4)


def _sum_of_bias(children: Tensor, bias: Tensor, gate: Tensor | None, window: Sequence[int]) -> Tensor:
    """Return ``sum_i g_i b_im`` over the children that exist, a term of the parents' sums."""
    if gate is None and not (window[4] or window[5]):
        return bias.sum(0) if len(bias) > 1 else bias[0] * (window[0] * window[1] * children.shape[-3])
    if gate is None:
        gate = children.new_ones((1, *children.shape[1:4]))
    matrices = bias.flatten(2).unsqueeze(2)  # for the gates as poses of one value: [I or 1, M or 1, 1, C * E]
    return _sums(gate[..., None, None], matrices, window).squeeze(-2).unflatten(-1, bias.shape[2:])
