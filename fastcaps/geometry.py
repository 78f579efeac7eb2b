"""Windows over a grid of capsules, and the two layouts that a tensor of capsules has.

*Public layout* is what users see: a set of capsules is ``[B, I, C, D]``, a grid of them ``[B, N, H, W, C, D]``.
*Op layout* is what kernels see: always a channels-last grid ``[B, H, W, N, C, D]``, in which a set is a grid of one
position with ``N = I`` types and a 1 x 1 window. What turns one into the other here is a view: no number moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["SET_WINDOW", "Window", "from_op", "geometry_of", "output_size", "to_op", "window_extent"]

SET_WINDOW: tuple[int, ...] = (1, 1, 1, 1, 0, 0, 1, 1)
"""The op's ``window`` for a set: kernel 1 x 1, stride 1, no padding, dilation 1."""


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """Return ``value`` as (rows, columns); raise if it is not one or two integers of at least ``least``."""
    wanted = f"an int or a pair of ints >= {least}"
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"Window: {name} must be {wanted}, got {value!r}")
    for number in value:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"Window: {name} must be {wanted}, got {value!r}")
        if number < least:
            raise ValueError(f"Window: {name} must be {wanted}, got {value!r}")
    return value[0], value[1]


@dataclass(frozen=True)
class Window:
    """The children that one output position of a grid layer sees: those under a rectangular, possibly dilated, window.

    Parameters
    ----------
    kernel_size, stride, padding, dilation
        As in :class:`torch.nn.Conv2d`: an int, or a (rows, columns) pair. Padded positions hold no children at all:
        they send no vote, not even a bias.

    Attributes
    ----------
    spec
        The eight numbers ``(kh, kw, sh, sw, ph, pw, dh, dw)`` that the ops take.

    Raises
    ------
    TypeError
        If an argument is not an int or a pair of ints.
    ValueError
        If an argument is too small: kernel_size, stride and dilation start at 1, padding at 0.
    """

    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    spec: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = {
            name: _pair(name, getattr(self, name), least)
            for name, least in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
        }
        for name, pair in pairs.items():
            object.__setattr__(self, name, pair)
        object.__setattr__(self, "spec", tuple(number for pair in pairs.values() for number in pair))

    @property
    def positions(self) -> int:
        """Positions under the window, kh * kw: a grid layer with N child types sees kh * kw * N children."""
        return self.spec[0] * self.spec[1]

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (Ho, Wo) for an H x W grid; a number below 1 says that the window does not fit."""
        return output_size(self.spec, height, width)


def window_extent(spec: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns from a window's first to its last position, dilation included."""
    kh, kw, _, _, _, _, dh, dw = spec
    return (kh - 1) * dh + 1, (kw - 1) * dw + 1


def output_size(spec: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Return the output grid (Ho, Wo) of ``spec`` over an H x W grid, as a convolution counts it."""
    _, _, sh, sw, ph, pw, _, _ = spec
    rows, columns = window_extent(spec)
    return (height + 2 * ph - rows) // sh + 1, (width + 2 * pw - columns) // sw + 1


def to_op(tensor: torch.Tensor, window: Window | None) -> torch.Tensor:
    """Return a public tensor of capsules, parents or gates as a view in op layout.

    ``[B, I, ...]`` becomes ``[B, 1, 1, I, ...]``; with a window ``[B, N, H, W, ...]`` becomes ``[B, H, W, N, ...]``.
    """
    if window is None:
        return tensor.unsqueeze(1).unsqueeze(1)
    return tensor.movedim(1, 3)


def from_op(tensor: torch.Tensor, window: Window | None) -> torch.Tensor:
    """Return an op-layout tensor as a view in public layout; the inverse of :func:`to_op`."""
    if window is None:
        return tensor.squeeze((1, 2))
    return tensor.movedim(3, 1)


def geometry_of(
    children: torch.Tensor, weight: torch.Tensor | None, window: Sequence[int], parents: int = 1
) -> tuple[int, ...]:
    """Return the numbers that the native libraries know a call by: B H W N C D Ho Wo M E G, and the window's eight.

    Without a weight votes are the children's own poses, for each of ``parents``.
    """
    groups, many, _, columns = (1, parents, 0, children.shape[5]) if weight is None else weight.shape
    grid = output_size(window, children.shape[1], children.shape[2])
    return (*children.shape, *grid, many, columns, groups, *window)
