"""The flat poses of modules and the ``C x D`` poses of the functional API.

A module takes ``[B, I, d]`` or ``[B, N, H, W, d]``; the votes need ``C x D`` matrices. Splitting the last dimension is
always a view, so it costs nothing.
"""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps.checks import check_count, is_tracing


def arguments(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class by name, and those of its base if it passes ``**options`` on to it."""
    own = inspect.signature(kind).parameters
    named = {name: each for name, each in own.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    base = kind.__base__
    if len(named) == len(own) or base is None or base is nn.Module:
        return named
    return {**arguments(base), **named}


def arguments_repr(module: nn.Module) -> str:
    """Return a module's arguments as text: the positional ones, and the keyword ones that differ from their defaults.

    An argument is read from the attribute of its name. A bool may be stored as a parameter or submodule, or None, and
    "random" as a buffer.
    """
    shown = []
    for name, argument in arguments(type(module)).items():
        default = argument.default
        missing = None if name == "kernel_size" and getattr(module, "window", module) is None else default
        value = getattr(module, name, missing)
        by_name = argument.kind is argument.KEYWORD_ONLY
        if isinstance(default, bool):
            drawn = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            value = "random" if drawn else value is not None and value is not False
        if isinstance(value, nn.Module) or (by_name and value in (default, (default, default))):
            continue
        text = getattr(value, "__name__", repr(value))
        shown.append(f"{name}={text}" if by_name else text)
    return ", ".join(shown)


_OF_VECTORS = "(pass pose='vector' for vectors of any size, as in Sabour et al., or pose=C for C x D matrices)"


def pose_shape(in_dim: int, out_dim: int, pose: str | int) -> tuple[int, int, int]:
    """Return (C, D, E): a child's pose is ``C x D``, a parent's ``C x E``, and so a vote is a product with ``D x E``.

    ``pose`` is the number of rows C; "matrix" means ``sqrt(in_dim)``, "vector" means 1. ``D = in_dim / C``,
    ``E = out_dim / C``. An unknown ``pose``, or one that does not divide both, raises ValueError.

    Examples
    --------
    >>> pose_shape(16, 16, "matrix"), pose_shape(16, 8, "matrix")
    ((4, 4, 4), (4, 4, 2))
    >>> pose_shape(8, 16, "vector"), pose_shape(6, 10, 2)
    ((1, 8, 16), (2, 3, 5))
    """
    if pose == "vector":
        rows = 1
    elif pose == "matrix":
        rows = math.isqrt(in_dim)
        if rows * rows != in_dim:
            raise ValueError(f"in_dim must be a square number for pose='matrix', got {in_dim} {_OF_VECTORS}")
    elif isinstance(pose, str):
        raise ValueError(f"pose must be one of 'matrix', 'vector' or a number of rows, got {pose!r}")
    else:
        rows = check_count("pose", pose)
    for name, size in (("in_dim", in_dim), ("out_dim", out_dim)):
        if size % rows:
            hint = _OF_VECTORS if pose == "matrix" else f"(pose={pose!r})"
            raise ValueError(f"{name} must be a multiple of the {rows} rows of a pose, got {size} {hint}")
    return rows, in_dim // rows, out_dim // rows


def shape_hint(children: Tensor, in_dim: int) -> str:
    """Return what to do with children of a wrong number of dimensions for a layer, as the end of an error."""
    if children.dim() in (4, 6) and children.shape[-2:].numel() == in_dim:
        return f"; layers take flat poses: pass children.flatten({children.dim() - 2})"
    if children.dim() == 2 and children.shape[1] == in_dim:
        return "; of one sample pass children.unsqueeze(0)"
    hints = {2: "; leave out nn.Flatten", 4: "; PrimaryCapsules turns a feature map into capsules"}
    return hints.get(children.dim(), "")


def normalize_poses(poses: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return LayerNorm over the last dimension of ``[B, M, d]`` or ``[B, M, H, W, d]``, in the same memory order."""
    grid = poses.dim() == 5  # normalised as it lies in memory: F.layer_norm would copy it into logical order
    stored = poses.permute(0, 2, 3, 1, 4) if grid else poses
    if grid and is_tracing():  # Inductor fails if free sizes end in a permutation: the affine map comes after it
        normal = F.layer_norm(stored, norm.normalized_shape, None, None, norm.eps)
        return normal.permute(0, 3, 1, 2, 4) * norm.weight + norm.bias
    normal = F.layer_norm(stored, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normal.permute(0, 3, 1, 2, 4) if grid else normal


def channels_last(features: Tensor) -> Tensor:
    """Return features ``[B, C, H, W]`` with the values of each position together in memory."""
    if is_tracing():  # Inductor cannot order the strides that movedim().contiguous() makes
        return features.contiguous(memory_format=torch.channels_last)
    return features.movedim(1, -1).contiguous().movedim(-1, 1)  # a form that vmap supports
