"""Data sets generated from digits.

Digits that are shifted, alone or in pairs (MultiMNIST, DiverseMultiMNIST), or rotated, sheared, scaled and shifted, as
in affNIST (Tieleman, 2013).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps_lab.data.files import Images, Labels
from fastcaps_lab.data.images import BatchDataset, Indices
from fastcaps_lab.data.transforms import cropped, whole

ROTATION, SHEAR, SCALE = math.radians(20), 0.2, (0.8, 1.2)
"""The ranges commonly reported for affNIST: the maxima of the angle and of the shear, both signs; of each scale."""


class ShiftedDigits(BatchDataset):
    """Each digit shifted by up to ``shift`` pixels in each direction, on a larger black square.

    An image is 2·shift larger than the digit. A shift of 6 puts MNIST's digits anywhere on 40 x 40 pixels, as in the
    training half of the affNIST experiment (Sabour et al. 2017, section 5.2).

    Images are uint8 ``[n, 1, h, w]``; labels int64 ``[n]``, 0 to ``classes`` − 1; the rest is as for
    :class:`BatchDataset`, with MNIST's mean and std by default.
    """

    def __init__(self, images: Images, labels: Labels, *, shift: int = 4, classes: int = 10, **options: Any) -> None:
        super().__init__(images, labels, **{"mean": 0.1307, "std": 0.3081, **options})
        self.shift, self.classes = shift, classes

    def _shifted(self, digits: Tensor, numbers: Tensor) -> Tensor:
        """Return each digit at its own position: bytes ``[n, 1, h + 2·shift, w + 2·shift]``."""
        return cropped(F.pad(digits, (2 * self.shift,) * 4), 2 * self.shift, numbers)

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, 1, h + 2·shift, w + 2·shift]`` and int64 ``[n]``."""
        digits, labels, numbers = gathered
        return self._normalised(self._shifted(digits, numbers)), labels


class OverlappingDigits(ShiftedDigits):
    """Two overlapping digits of different classes, each with a separate shift; a fraction ``single`` shows only one.

    ``single=0`` is MultiMNIST (Sabour et al. 2017, section 6): item i shows digit i and another, drawn uniformly from
    the digits of other classes. ``single=1/6`` is DiverseMultiMNIST (Tsai et al. 2020, B.2), where a sixth of the
    images shows one digit. Training images use MNIST's training digits, test images its test digits. The two are added
    and clamped to 255, as in the code of Sabour et al. The rest is as for :class:`ShiftedDigits`.
    """

    def __init__(self, images: Images, labels: Labels, *, single: float = 0.0, **options: Any) -> None:
        super().__init__(images, labels, **options)
        self.single = single
        counts = torch.bincount(self.labels, minlength=self.classes)
        if single < 1 and int(counts.max()) == len(self.labels):
            raise ValueError(f"labels: got digits of class {int(self.labels[0])} alone, want two classes or more")
        # sorted by class, in a ring: the digits of all other classes follow a class's, so that one draw picks any
        self._by_class = self.labels.argsort(stable=True)
        self._ends = counts.cumsum(0)
        self._others = len(self.labels) - counts

    def gather(self, indices: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Return both digits unshifted, bytes ``[n, 2, h, w]``, int64 ``[n, 2]`` (−1: none), and random numbers."""
        items, numbers = self._gathered(indices)
        label = self.labels[items]
        alone = numbers[:, 0] < self.single
        step = whole(numbers[:, 1], self._others[label].clamp(min=1))
        top = self._by_class[(self._ends[label] + step) % len(self.labels)]
        over = self.images[top].masked_fill(alone[:, None, None, None], 0)
        labels = torch.stack([label, self.labels[top].masked_fill(alone, -1)], 1)
        return torch.cat([self.images[items], over], 1), labels, numbers

    def apart(self, digits: Tensor, numbers: Tensor) -> Tensor:
        """Return gathered digits, each at its position: bytes ``[n, 2, h + 2·shift, w + 2·shift]``."""
        pairs = zip(digits.split(1, 1), (numbers[:, 2:4], numbers[:, 4:6]), strict=True)
        return torch.cat([self._shifted(digit, each) for digit, each in pairs], 1)

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, 1, h + 2·shift, w + 2·shift]`` and bool ``[n, classes]``, the classes in the image."""
        digits, labels, numbers = gathered
        images = self.apart(digits, numbers).sum(1, keepdim=True).clamp_(max=255)
        present = torch.zeros(len(labels), self.classes + 1, dtype=torch.bool, device=labels.device)
        present.scatter_(1, labels.remainder(self.classes + 1), True)  # −1 falls into the column that is left out
        return self._normalised(images), present[:, : self.classes]


class AffineDigits(ShiftedDigits):
    r"""Each digit under a random affine map, wholly inside a larger black square of ``size`` pixels.

    .. math:: x = R(\varphi) \begin{pmatrix} 1 & k \\ 0 & 1 \end{pmatrix}
              \begin{pmatrix} s_x & 0 \\ 0 & s_y \end{pmatrix} x_0 + t

    The angle is uniform up to 20 degrees, the shear up to 0.2, the two scales from 0.8 to 1.2, and the position where
    the digit's bounding box is inside the image. Pixels are sampled bilinearly. Digits are square; the rest is as for
    :class:`ShiftedDigits`.
    """

    def __init__(self, images: Images, labels: Labels, *, size: int = 40, **options: Any) -> None:
        super().__init__(images, labels, **options)
        self.size = size

    def maps(self, digits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrices ``[n, 2, 2]`` and translations ``[n, 2]`` of digits ``[n, 1, h, h]``: (x, y) from centres."""
        angle, shear = ROTATION * (2 * numbers[:, 0] - 1), SHEAR * (2 * numbers[:, 1] - 1)
        scale = SCALE[0] + (SCALE[1] - SCALE[0]) * numbers[:, 2:4]
        cos, sin = angle.cos(), angle.sin()
        # a rotation times a shear
        rows = (torch.stack([cos, shear * cos - sin], 1), torch.stack([sin, shear * sin + cos], 1))
        matrix = torch.stack(rows, 1) * scale[:, None, :]
        corners = _ink_boxes(digits) @ matrix.mT  # [n, 4, 2]
        low, high = -self.size / 2 - corners.amin(1), self.size / 2 - corners.amax(1)
        return matrix, low + (high - low) * numbers[:, 4:6]

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, 1, size, size]`` and int64 ``[n]``."""
        digits, labels, numbers = gathered
        matrix, place = self.maps(digits, numbers)
        back, side = torch.linalg.inv(matrix), digits.shape[2]
        # grid_sample counts from −1 to 1 over each image
        theta = torch.cat([back * (self.size / side), (back @ place[:, :, None]) * (-2 / side)], 2)
        grid = F.affine_grid(theta, [len(digits), 1, self.size, self.size], align_corners=False)
        return self._normalised(F.grid_sample(digits.to(torch.float32), grid, align_corners=False)), labels


def _ink_boxes(images: Tensor) -> Tensor:
    """Return the corners of each digit's bounding box, float32 ``[n, 4, 2]``, (x, y) from the image's centre."""
    side = images.shape[2]
    ink = images[:, 0] > 0
    edges = []
    for axis in (1, 2):  # over rows: which columns have ink; and the other way
        there = ink.any(axis).to(torch.uint8)  # argmax is the first of equals: 0 for a black image
        edges.append((there.argmax(1), side - there.flip(1).argmax(1)))
    (left, right), (top, bottom) = edges
    corners = torch.stack([torch.stack([x, y], 1) for x in (left, right) for y in (top, bottom)], 1)
    return corners.to(torch.float32) - side / 2
