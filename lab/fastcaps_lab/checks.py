"""Checks of arguments, whose messages name the argument, what came and what is wanted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def did_you_mean(name: object, names: Iterable[str], most: int = 1) -> str:
    """Return the end of a message about an unknown name: up to ``most`` similar ones of ``names``, if any."""
    near = difflib.get_close_matches(str(name).lower(), names, n=most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_map(name: str, value: Tensor, channels: int, size: Sequence[int] | None = None) -> None:
    """Raise unless ``value`` is a floating-point ``[B, channels, H, W]``, of height and width ``size`` if given."""
    if value.dim() != 4 or value.shape[1] != channels or size not in (None, tuple(value.shape[2:])):
        rows, columns = size or ("H", "W")
        raise ValueError(f"{name} must be [B, {channels}, {rows}, {columns}], got {list(value.shape)}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating-point numbers (normalised), got {value.dtype}")


def image_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of an image of a size."""
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return height, width
