"""Flat poses, as modules speak them, and the ``C x D`` poses of the functional API.

A module sees ``[B, I, d]`` or ``[B, N, H, W, d]``; the votes need ``C x D`` matrices. Splitting the last dimension is
a view for any strides, so going back and forth costs nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps import functional

if TYPE_CHECKING:
    from fastcaps.votes import Window

POSES = ("matrix", "vector")


def positive(value: object, name: str) -> int:
    """Return ``value`` if it is an int of at least 1; raise TypeError or ValueError naming ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def probability(value: float, name: str) -> float:
    """Return ``value`` as a float if it lies in [0, 1); raise ValueError naming ``name`` otherwise."""
    value = float(value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return value


def pose_shape(in_dim: int, out_dim: int, pose: str) -> tuple[int, int, int]:
    """Give (C, D, E): a child's pose is ``C x D`` and a parent's ``C x E``.

    A matrix pose of d numbers has ``C = D = E = sqrt(d)``; a vector pose has ``C = 1``, ``D = in_dim``, ``E =
    out_dim``.

    Raises
    ------
    ValueError
        If ``pose`` is unknown, or it is ``"matrix"`` and ``in_dim`` is not a square or differs from ``out_dim``.

    Examples
    --------
    >>> pose_shape(16, 16, "matrix")
    (4, 4, 4)
    >>> pose_shape(8, 16, "vector")
    (1, 8, 16)
    """
    if pose not in POSES:
        raise ValueError(f"pose must be one of {', '.join(map(repr, POSES))}, got {pose!r}")
    if pose == "vector":
        return 1, in_dim, out_dim
    side = math.isqrt(in_dim)
    if side * side != in_dim:
        raise ValueError(f"in_dim must be a square number for a matrix pose, got {in_dim} (pose='vector' takes any)")
    if out_dim != in_dim:
        raise ValueError(
            f"out_dim must equal in_dim for a matrix pose, got in_dim {in_dim} and out_dim {out_dim} "
            "(pose='vector' takes any pair)"
        )
    return side, side, side


def normalize_poses(poses: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over the last dimension of a set ``[B, M, d]`` or a grid ``[B, M, H, W, d]``, keeping a grid's memory
    order."""
    if poses.dim() != 5:
        return F.layer_norm(poses, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    stored = poses.permute(
        0, 2, 3, 1, 4
    )  # as it lies in memory: F.layer_norm would otherwise copy it into logical order
    return F.layer_norm(stored, norm.normalized_shape, norm.weight, norm.bias, norm.eps).permute(0, 3, 1, 2, 4)


def route(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    shape: tuple[int, int, int],
    *,
    window: Window | None,
    scale: float,
    norm: nn.LayerNorm | None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    iterations: int = 1,
    return_coefficients: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Route flat poses, turn by turn: votes, agreement, softmax over parents, sum, dropout, LayerNorm.

    Dropout stands between the sum and LayerNorm, as in the authors' code; while it is active (``dropout > 0``)
    normalisation is a step of its own, otherwise the pass normalises its own sums.

    Parameters
    ----------
    children : Tensor
        ``[B, I, C*D]`` or, with a window, ``[B, N, H, W, C*D]``.
    weight : Tensor
        ``[G, M, D, E]``.
    parents : Tensor or None
        ``[B, M, C*E]`` or ``[B, M, Ho, Wo, C*E]``: the last poses; None for the first iteration.
    shape : (C, D, E)
    norm : nn.LayerNorm or None
        Over the C*E numbers; None leaves the sums as they are.
    iterations : int
        Turns.

    Returns
    -------
    (Tensor, Tensor or None)
        The parents' flat poses, and the coefficients if they were asked for.
    """
    if dropout > 0.0 and iterations > 1:  # a step between sum and LayerNorm: no turn can run on into the next
        options: dict[str, Any] = {"window": window, "scale": scale, "norm": norm, "bias": bias, "gate": gate}
        for _ in range(iterations - 1):
            parents, _ = route(children, weight, parents, shape, dropout=dropout, **options)
        iterations = 1
    rows, columns, out_columns = shape
    apart = dropout > 0.0 and norm is not None
    fused = norm is not None and not apart
    result = functional.inverted_attention_routing(
        children.unflatten(-1, (rows, columns)),
        weight,
        None if parents is None else parents.unflatten(-1, (rows, out_columns)),
        bias=bias,
        gate=gate,
        norm_weight=norm.weight if norm is not None and fused else None,
        norm_bias=norm.bias if norm is not None and fused else None,
        eps=norm.eps if norm is not None else 1e-5,
        scale=scale,
        window=window,
        normalize=fused,
        iterations=iterations,
        return_coefficients=return_coefficients,
    )
    poses, coefficients = result if isinstance(result, tuple) else (result, None)
    poses = poses.flatten(-2)
    if dropout > 0.0:
        poses = F.dropout(poses, dropout)
    if norm is not None and apart:
        poses = normalize_poses(poses, norm)
    return poses, coefficients


def flatten_grid(children: Tensor) -> Tensor:
    """Turn a grid ``[B, N, H, W, d]`` into the set ``[B, N*H*W, d]`` that a set layer reads: n slowest, then h, then
    w."""
    return children.flatten(1, 3)


def flatten_gate(gate: Tensor | None) -> Tensor | None:
    """The gates ``[B, N, H, W]`` of :func:`flatten_grid`'s children, ``[B, N*H*W]``."""
    return None if gate is None else gate.flatten(1)


def shape_of(tensor: Tensor) -> str:
    """A shape as error messages print it."""
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


def require_tensor(value: object, name: str) -> None:
    """Raise TypeError naming ``name`` unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
