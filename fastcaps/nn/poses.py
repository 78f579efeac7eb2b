"""Flat poses, as modules speak them, and the ``C x D`` poses of the functional API.

A module sees ``[B, I, d]`` or ``[B, N, H, W, d]``; the votes need ``C x D`` matrices. Splitting the last dimension is
a view for any strides, so going back and forth costs nothing.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, check_finite

if TYPE_CHECKING:
    from fastcaps.nn.layer import Call


def probability(value: float, name: str) -> float:
    """Return ``value`` as a float if it lies in [0, 1); raise ValueError naming ``name`` otherwise."""
    value = check_finite(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return value


def arguments_repr(module: nn.Module) -> str:
    """Show a module's arguments, which are its attributes: those by position, and those by name that differ from their
    defaults.

    An option that is on or off may stand for a parameter or submodule, which is then there or None.
    """
    shown = []
    for name, argument in inspect.signature(type(module)).parameters.items():
        default, value = argument.default, getattr(module, name, argument.default)
        by_name = argument.kind is argument.KEYWORD_ONLY
        if isinstance(default, bool):
            value = value is not None and value is not False
        if isinstance(value, nn.Module) or (by_name and (value == default or value == (default, default))):
            continue
        text = getattr(value, "__name__", repr(value))
        shown.append(f"{name}={text}" if by_name else text)
    return ", ".join(shown)


def every_argument_repr(module: nn.Module) -> str:
    """Show all of a module's arguments, by name."""
    return ", ".join(f"{name}={getattr(module, name)}" for name in inspect.signature(type(module)).parameters)


def pose_shape(in_dim: int, out_dim: int, pose: str | int) -> tuple[int, int, int]:
    """Give (C, D, E): a child's pose is ``C x D``, a parent's ``C x E``, and so a vote is a product with ``D x E``.

    ``pose`` is the number of rows C; "matrix" stands for ``sqrt(in_dim)``, "vector" for 1. ``D = in_dim / C``,
    ``E = out_dim / C``.

    Raises
    ------
    ValueError
        If ``pose`` is unknown or does not divide ``in_dim`` and ``out_dim``; if it is "matrix" and ``in_dim`` is not a
        square.

    Examples
    --------
    >>> pose_shape(16, 16, "matrix"), pose_shape(16, 8, "matrix")
    ((4, 4, 4), (4, 4, 2))
    >>> pose_shape(8, 16, "vector")
    (1, 8, 16)
    >>> pose_shape(6, 10, 2)
    (2, 3, 5)
    """
    if pose == "vector":
        rows = 1
    elif pose == "matrix":
        rows = math.isqrt(in_dim)
        if rows * rows != in_dim:
            wanted = "(pose='vector' takes any, pose=C takes C x D matrices)"
            raise ValueError(f"in_dim must be a square number for pose='matrix', got {in_dim} {wanted}")
    elif isinstance(pose, str):
        raise ValueError(f"pose must be one of 'matrix', 'vector' or a number of rows, got {pose!r}")
    else:
        rows = check_count("pose", pose)
    for name, size in (("in_dim", in_dim), ("out_dim", out_dim)):
        if size % rows:
            raise ValueError(f"{name} must be a multiple of the {rows} rows of a pose, got {size} (pose={pose!r})")
    return rows, in_dim // rows, out_dim // rows


def normalize_poses(poses: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm over the last dimension of a set ``[B, M, d]`` or a grid ``[B, M, H, W, d]``, keeping a grid's memory
    order."""
    grid = poses.dim() == 5  # normalised as it lies in memory: F.layer_norm would copy it into logical order
    stored = poses.permute(0, 2, 3, 1, 4) if grid else poses
    normal = F.layer_norm(stored, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normal.permute(0, 3, 1, 2, 4) if grid else normal


def route(
    call: Call,
    parents: Tensor | None,
    shape: tuple[int, int, int],
    *,
    scale: float,
    norm: nn.LayerNorm | None,
    dropout: float = 0.0,
    iterations: int = 1,
    return_coefficients: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Route flat poses, turn by turn: votes, agreement, softmax over parents, sum, dropout, LayerNorm.

    Dropout stands between the sum and LayerNorm, as in the authors' code; while it is active (``dropout > 0``)
    normalisation is a step of its own, otherwise the pass normalises its own sums.

    Parameters
    ----------
    call : Call
        Children, weight, bias, gate and window.
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
        for _ in range(iterations - 1):
            parents, _ = route(call, parents, shape, scale=scale, norm=norm, dropout=dropout)
        iterations = 1
    apart = dropout > 0.0 and norm is not None
    fused = None if apart else norm
    found = functional.inverted_attention_routing(
        call.children,
        call.weight,
        None if parents is None else parents.unflatten(-1, (shape[0], shape[2])),
        bias=call.bias,
        gate=call.numbers,
        norm_weight=None if fused is None else fused.weight,
        norm_bias=None if fused is None else fused.bias,
        eps=1e-5 if norm is None else norm.eps,
        scale=scale,
        window=call.window,
        normalize=fused is not None,
        iterations=iterations,
        return_coefficients=return_coefficients,
    )
    poses, coefficients = found if isinstance(found, tuple) else (found, None)
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


def require_tensor(value: object, name: str) -> None:
    """Raise TypeError naming ``name`` unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
