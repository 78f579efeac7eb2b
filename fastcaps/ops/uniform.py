"""Routing with r = 1 / M: the first iteration of inverted attention, as the library's convolution or matmul.

``S_m = 1/M sum_i g_i (P_i W_im + b_im)`` is linear in the children: a convolution with the rows C of a pose folded into
the batch, N * D input and M * E output channels. Where the children of a position share matrices (G divides N), they
are summed first and one matmul is left. It is ordinary differentiable PyTorch, whose way back is a convolution's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import is_tracing, widen
from fastcaps.votes import SET_WINDOW, VoteInputs, autocast_dtype, hidden, output_size, seen_of
from fastcaps.watchers import is_sharded

_LARGE = 1 << 23  # numbers: 32 MB, which the system hands out page by page at every call


def library_serves(votes: VoteInputs) -> bool:
    """Return whether the library runs a call's first iteration, rather than a backend.

    The library needs the weights in another order. Copying them is little beside the convolution itself, except where
    they are large: with a 3 x 3 window of 16 types of 1 x 64 poses it takes 50 ms, and the kernel, which reads them as
    they lie, 17. Where children share weights, summing them first wins. On a GPU the library's convolution may round
    float32 to TF32 though its matmul, whose setting is the one that counts here, may not; and neither makes three
    products of one (:func:`fastcaps.backends.tf32x3`): then our kernel runs. Nothing but shapes and settings decides,
    so that the same numbers give the same bits with and without gradients. DTensors are parted first: each
    process's own part then comes here.
    """
    children, weight, window = votes.children, votes.weight, votes.window
    if weight is None or backends.forced() == "reference" or is_sharded(votes[:4]):
        return False
    if children.device.type == "cuda":
        convolution = tuple(window) != SET_WINDOW and children.shape[3] % weight.shape[0] != 0
        return not (_rounds(convolution) and (autocast_dtype("cuda") or children.dtype) == torch.float32)
    large = weight.shape[0] == seen_of(votes) and weight.numel() >= _LARGE
    return not (large and children.device.type == "cpu" and backends.native_serves())


@torch.compiler.assume_constant_result
def _rounds(convolution: bool) -> bool:
    """Return whether torch's own float32 products on a GPU round to TF32 where they may not, or where three are wanted.

    Convolutions have a setting of their own."""
    alone = torch.backends.cudnn.conv.fp32_precision == "tf32" and not backends.tf32_allowed()  # type: ignore[attr-defined]
    return backends.tf32x3_wanted() or (convolution and alone)


def uniform_parents(
    votes: VoteInputs, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, norm: bool
) -> Tensor:
    """Return the parents that r = 1 / M makes, contiguous ``[B, Ho, Wo, M, C, E]`` or ``[B, M, C, E]``.

    Half precision is widened first: LayerNorm and its backward are differences, of which a rounded S and a rounded dS
    would leave noise. A child behind a gate of 0 leaves no trace, be it NaN.

    ``norm`` says whether LayerNorm follows. Workspace, in the accumulation dtype: children and weights once each (with
    a gate the children twice), S twice.
    """
    many, window, dtype = votes.parents, votes.window, votes.children.dtype
    children, weight, bias, gate, norm_weight, norm_bias = widen(dtype, *votes[:4], norm_weight, norm_bias)
    assert children is not None and weight is not None
    children = gated = children.flatten(-2).unflatten(-1, children.shape[-2:])  # so that their gradient lies as they do
    if gate is not None:
        broken = hidden(children, gate)  # 0 times NaN is NaN
        gate = gate.masked_fill(broken, 0.0)  # a bias may be behind it
        gated = children.masked_fill(broken[..., None, None], 0.0) * gate[..., None, None]
    sums = _sums(gated, weight, window)
    if bias is not None:
        sums = sums + _sum_of_bias(children, bias, gate, window)
    if not norm:
        return (sums / many).to(dtype).contiguous()
    # LayerNorm(S / M; eps) = LayerNorm(S; eps M^2), which saves a pass over S
    flat = sums.flatten(-2)
    if flat.dtype != dtype:  # as the reference does: for two numbers the gradient is a small difference
        flat = flat - flat.mean(-1, keepdim=True)
    flat = F.layer_norm(flat, [sums.shape[-2] * sums.shape[-1]], norm_weight, norm_bias, eps * many**2)
    return flat.view(sums.shape).to(dtype)


def _sums(children: Tensor, weight: Tensor, window: Sequence[int]) -> Tensor:
    """Return ``sum_i P_i W_im``, the parents' sums."""
    if tuple(window) == SET_WINDOW or children.shape[-3] % weight.shape[0] == 0:
        return _sums_by_matmul(children, weight, window)
    return _sums_by_convolution(children, weight, window)


def _window_sum(grid: Tensor, window: Sequence[int]) -> Tensor:
    """Return each window's sum over its positions: ``[B, H, W, ...]`` to ``[B, Ho, Wo, ...]``, rows, then columns."""
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
    """Return ``sum_i P_i W_im``, the parents' sums, where G divides N: children summed by group, then a matmul."""
    groups, many, depth, columns = weight.shape
    types = children.shape[-3]
    if types != groups:
        children = children.unflatten(-3, (types // groups, groups)).sum(-4)
    if tuple(window) != SET_WINDOW:
        children = _window_sum(children, window)
    left = children.transpose(-3, -2).flatten(-2)  # [..., C, G * D]
    right = weight.transpose(1, 2).reshape(groups * depth, many * columns)
    return (left @ right).unflatten(-1, (many, columns)).transpose(-3, -2)


def _sums_by_convolution(children: Tensor, weight: Tensor, window: Sequence[int]) -> Tensor:
    """Return ``sum_i P_i W_im`` ``[B, Ho, Wo, M, C, E]`` by a convolution over the grid."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    groups, many, depth, columns = weight.shape
    batch, height, width, types, rows, _ = children.shape
    count = kh * kw * types
    if groups != count:
        weight = weight.repeat(count // groups, 1, 1, 1)
    # both operands channels last, the layout that convolutions like best: [M, E, kh, kw, N, D] and [B, C, H, W, N, D]
    kernel = weight.view(kh, kw, types, many, depth, columns).permute(3, 5, 0, 1, 2, 4)
    kernel = kernel.reshape(many * columns, kh, kw, types * depth).movedim(-1, 1)
    images = children.movedim(4, 1).reshape(batch * rows, height, width, types * depth).movedim(-1, 1)
    if is_tracing():  # Inductor fails where a permuted view of free sizes meets a convolution, but takes arithmetic
        images, kernel = -images, -kernel
    result = F.conv2d(images, kernel, None, (sh, sw), (ph, pw), (dh, dw))
    ho, wo = result.shape[2:]
    return result.movedim(1, -1).reshape(batch, rows, ho, wo, many, columns).movedim(1, 4)


def _sum_of_bias(children: Tensor, bias: Tensor, gate: Tensor | None, window: Sequence[int]) -> Tensor:
    """Return ``sum_i g_i b_im`` over the children that exist, to be added to the parents' sums."""
    if gate is None and not (window[4] or window[5]):
        return bias.sum(0) if len(bias) > 1 else bias[0] * (window[0] * window[1] * children.shape[-3])
    if gate is None:
        gate = children.new_ones((1, *children.shape[1:4]))
    matrices = bias.flatten(2).unsqueeze(2)  # of poses of one number, the gates: [I or 1, M or 1, 1, C * E]
    return _sums(gate[..., None, None], matrices, window).squeeze(-2).unflatten(-1, bias.shape[2:])
