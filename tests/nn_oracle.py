"""Procedure 1 over flat poses, written out as einsums over stored votes: what the modules are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def windows(children: Tensor, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1)) -> tuple[Tensor, Tensor]:
    """Children ``[B, N, H, W, d]`` by position, ``[B, Ho, Wo, I, d]``; whether each is there, ``[Ho, Wo, I]``."""
    batch, types, height, width, dim = children.shape
    rows = (height + 2 * padding[0] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    columns = (width + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    seen = children.new_zeros(batch, rows, columns, kernel[0] * kernel[1] * types, dim)
    there = children.new_zeros(rows, columns, kernel[0] * kernel[1] * types)
    for y in range(rows):
        for x in range(columns):
            for ky in range(kernel[0]):
                for kx in range(kernel[1]):
                    at = (y * stride[0] - padding[0] + ky * dilation[0], x * stride[1] - padding[1] + kx * dilation[1])
                    if not (0 <= at[0] < height and 0 <= at[1] < width):
                        continue
                    for n in range(types):
                        child = (ky * kernel[1] + kx) * types + n
                        seen[:, y, x, child] = children[:, n, at[0], at[1]]
                        there[y, x, child] = 1
    return seen, there


def procedure(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None = None,
    *,
    rows: int,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    norm: tuple[Tensor, Tensor] | None = None,
    window: tuple | None = None,
) -> tuple[Tensor, Tensor]:
    """Parents ``[B, M, d']`` or ``[B, M, Ho, Wo, d']`` and coefficients ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``."""
    if window is None:
        seen, there = children[:, None, None], children.new_ones(1, 1, children.shape[1])
        gates = None if gate is None else gate[:, None, None]
        query = None if parents is None else parents[:, :, None, None]
    else:
        seen, there = windows(children, *window)
        gates = None if gate is None else windows(gate[..., None], *window)[0][..., 0]
        query = parents
    groups, many, columns, out_columns = weight.shape
    count = seen.shape[3]
    each = weight[torch.arange(count) % groups]
    votes = torch.einsum("bhwicd,imde->bhwimce", seen.unflatten(-1, (rows, columns)), each)
    if bias is not None:
        votes = votes + bias
    votes = votes.flatten(-2)
    if query is None:
        shares = torch.full(votes.shape[:-1], 1.0 / many, dtype=votes.dtype)
    else:
        agreement = torch.einsum("bmhwe,bhwime->bhwim", query, votes) / (rows * out_columns) ** 0.5
        shares = torch.softmax(agreement, -1)
    shares = shares * there[..., None]
    weights = shares if gates is None else shares * gates[..., None]
    sums = torch.einsum("bhwim,bhwime->bmhwe", weights, votes)
    if norm is not None:
        sums = F.layer_norm(sums, sums.shape[-1:], *norm, eps=1e-5)
    if window is None:
        return sums[:, :, 0, 0], shares[:, 0, 0]
    return sums, shares
