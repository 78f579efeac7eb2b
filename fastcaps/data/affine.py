"""Digits turned, sheared, stretched and moved, as in affNIST (Tieleman, 2013), made as they are asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastcaps.data.draws import Draws
from fastcaps.data.shifted import ShiftedDigits


class AffineDigits(ShiftedDigits):
    r"""Each digit under an affine map of its own, with all its ink on a larger black square.

    .. math:: x = R(\varphi) \begin{pmatrix} 1 & k \\ 0 & 1 \end{pmatrix}
              \begin{pmatrix} s_x & 0 \\ 0 & s_y \end{pmatrix} x_0 + t

    The angle, the shear and the two scales are uniform in their ranges; then the place is, among all where the box
    around the ink stays inside. Pixels are sampled bilinearly.

    Parameters
    ----------
    images, labels, **options
        As :class:`ShiftedDigits` takes them, but for ``shift``; images must be square.
    size : int
        Height and width of the images that are made.
    rotation, shear : float
        φ is up to so many degrees, and k up to so much, either way.
    scale : (float, float)
        Smallest and largest s.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        *,
        size: int = 40,
        rotation: float = 20.0,
        shear: float = 0.2,
        scale: tuple[float, float] = (0.8, 1.2),
        **options: Any,
    ) -> None:
        super().__init__(images, labels, shift=0, **options)
        if images.shape[2] != images.shape[3]:
            raise ValueError(f"images: got {images.shape[2]} x {images.shape[3]} pixels, want squares")
        if size < 1:
            raise ValueError(f"size: got {size}, want 1 or more")
        if rotation < 0 or shear < 0:
            raise ValueError(f"rotation, shear: got {rotation}, {shear}, want 0 or more")
        if not 0 < scale[0] <= scale[1]:
            raise ValueError(f"scale: got {scale}, want two numbers above 0, the smaller one first")
        self.size, self.rotation, self.shear, self.scale = size, rotation, shear, scale

    def maps(self, digits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """The matrix ``[n, 2, 2]`` and the translation ``[n, 2]`` of digits ``[n, 1, h, h]``: (x, y) from centres."""
        angle = torch.deg2rad(draws.between(-self.rotation, self.rotation))
        shear = draws.between(-self.shear, self.shear)
        scale = draws.between(*self.scale, 2)
        cos, sin = angle.cos(), angle.sin()
        # a rotation times a shear
        rows = (torch.stack([cos, shear * cos - sin], 1), torch.stack([sin, shear * sin + cos], 1))
        matrix = torch.stack(rows, 1) * scale[:, None, :]
        corners = _ink_boxes(digits) @ matrix.mT  # [n, 4, 2]
        low, high = -self.size / 2 - corners.amin(1), self.size / 2 - corners.amax(1)
        # ink that is too wide for the square is centred
        return matrix, torch.where(low < high, low + (high - low) * draws.uniform(2), (low + high) / 2)

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Float32 ``[n, 1, size, size]`` and int64 ``[n]``."""
        digits, labels, states = gathered
        matrix, place = self.maps(digits, Draws.going_on(states))
        back = torch.linalg.inv(matrix)
        side = digits.shape[2]
        # grid_sample counts from −1 to 1 over each image
        theta = torch.cat([back * (self.size / side), (back @ place[:, :, None]) * (-2 / side)], 2)
        grid = torch.nn.functional.affine_grid(theta, [len(digits), 1, self.size, self.size], align_corners=False)
        made = torch.nn.functional.grid_sample(digits.to(torch.float32), grid, mode="bilinear", align_corners=False)
        return self._normalised(made), labels


def _ink_boxes(images: Tensor) -> Tensor:
    """Corners of the box around each image's ink: float32 ``[n, 4, 2]``, (x, y) from its centre; all of it if black."""
    side = images.shape[2]
    ink = images[:, 0] > 0
    edges = []
    for axis in (1, 2):  # over rows: which columns have ink; and the other way
        there = ink.any(axis).to(torch.uint8)  # argmax is the first of equals: 0, where there is none
        edges.append((there.argmax(1), side - there.flip(1).argmax(1)))
    (left, right), (top, bottom) = edges
    corners = torch.stack([torch.stack([x, y], 1) for x in (left, right) for y in (top, bottom)], 1)
    return corners.to(torch.float32) - side / 2
