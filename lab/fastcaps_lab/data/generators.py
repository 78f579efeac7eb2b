"""Data sets generated from digits.

Digits that are shifted, alone or in pairs (MultiMNIST, DiverseMultiMNIST), or rotated, sheared, scaled and shifted, as
in affNIST (Tieleman, 2013).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps_lab.checks import check_choice, check_count, check_number
from fastcaps_lab.data.draws import Draws
from fastcaps_lab.data.files import Images, Labels
from fastcaps_lab.data.images import BatchDataset
from fastcaps_lab.data.transforms import cropped


class ShiftedDigits(BatchDataset):
    """Each digit shifted by up to ``shift`` pixels in each direction, on a larger black square.

    An image is 2·shift larger than the digit. A shift of 6 puts MNIST's digits anywhere on 40 x 40 pixels, as in the
    training half of the affNIST experiment (Sabour et al. 2017, section 5.2).

    Images are uint8 ``[n, 1, h, w]``; labels int64 ``[n]``, 0 to ``classes`` − 1; the rest is as for
    :class:`BatchDataset`, with MNIST's mean and std by default.
    """

    def __init__(self, images: Images, labels: Labels, *, shift: int = 4, classes: int = 10, **options: Any) -> None:
        super().__init__(images, labels, **{"mean": 0.1307, "std": 0.3081, **options})
        if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
            found = f"{labels.min()} to {labels.max()}" if len(labels) else "none"
            raise ValueError(f"labels: got {found}, want 0 to {classes - 1}")
        self.shift, self.classes = check_count("shift", shift, 0), classes

    def _shifted(self, digits: Tensor, draws: Draws) -> Tensor:
        """Return each digit at its own position: bytes ``[n, 1, h + 2·shift, w + 2·shift]``."""
        return cropped(torch.nn.functional.pad(digits, (2 * self.shift,) * 4), 2 * self.shift, draws)

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, 1, h + 2·shift, w + 2·shift]`` and int64 ``[n]``."""
        digits, labels, states = gathered
        return self._normalised(self._shifted(digits, Draws.going_on(states))), labels


class OverlappingDigits(ShiftedDigits):
    """Two overlapping digits of different classes, each with a separate shift; a fraction ``single`` shows only one.

    ``single=0`` is MultiMNIST (Sabour et al. 2017, section 6): item i shows digit i and another, drawn uniformly from
    the digits of other classes. ``single=1/6`` is DiverseMultiMNIST (Tsai et al. 2020, B.2), where a sixth of the
    images shows one digit. Training images use MNIST's training digits, test images its test digits.

    ``overlay`` is ``"sum"``, clamped to 255, as in the code of Sabour et al., or ``"max"`` of the two; the papers do
    not say which. The rest is as for :class:`ShiftedDigits`.
    """

    def __init__(
        self, images: Images, labels: Labels, *, single: float = 0.0, overlay: str = "sum", **options: Any
    ) -> None:
        super().__init__(images, labels, **options)
        if not 0 <= single <= 1:
            raise ValueError(f"single: got {single}, want 0 to 1")
        check_choice("overlay", overlay, ("sum", "max"))
        self.single, self.overlay = single, overlay
        counts = torch.bincount(self.labels, minlength=self.classes)
        if single < 1 and int(counts.max()) == len(self.labels):
            raise ValueError(f"labels: got digits of class {int(self.labels[0])} alone, want two classes or more")
        # sorted by class, in a ring: the digits of all other classes follow a class's, so that one draw picks any
        self._by_class = self.labels.argsort(stable=True)
        self._ends = counts.cumsum(0)
        self._others = len(self.labels) - counts

    def gather(self, indices: Sequence[int] | slice | Tensor) -> tuple[Tensor, ...]:
        """Return both digits unshifted, bytes ``[n, 2, h, w]``, int64 ``[n, 2]`` (−1: none), and states of draws."""
        items = self._items(indices)
        draws = self._draws(items)
        label = self.labels[items]
        alone = draws.uniform() < self.single
        step = draws.integers(self._others[label].clamp(min=1)[:, None], 1)[:, 0]
        top = self._by_class[(self._ends[label] + step) % len(self.labels)]
        over = self.images[top].masked_fill(alone[:, None, None, None], 0)
        labels = torch.stack([label, self.labels[top].masked_fill(alone, -1)], 1)
        return torch.cat([self.images[items], over], 1), labels, draws.states

    def apart(self, digits: Tensor, states: Tensor) -> Tensor:
        """Return gathered digits, each at its position: bytes ``[n, 2, h + 2·shift, w + 2·shift]``."""
        draws = Draws.going_on(states)
        return torch.cat([self._shifted(digit, draws) for digit in digits.split(1, 1)], 1)

    def layers(self, indices: Sequence[int] | slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the two digits of each image separately, to compare reconstructions with.

        Bytes ``[n, 2, h + 2·shift, w + 2·shift]`` and int64 ``[n, 2]``; black and −1 for a missing second digit.
        """
        digits, labels, states = self.gather(indices)
        return self.apart(digits, states), labels

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, 1, h + 2·shift, w + 2·shift]`` and bool ``[n, classes]``, the classes in the image."""
        digits, labels, states = gathered
        digits = self.apart(digits, states)
        if self.overlay == "max":
            images = digits.amax(1, keepdim=True)
        else:
            images = digits.to(torch.int16).sum(1, keepdim=True, dtype=torch.int16).clamp_(max=255)
        present = torch.zeros(len(labels), self.classes + 1, dtype=torch.bool, device=labels.device)
        present.scatter_(1, labels.remainder(self.classes + 1), True)  # −1 falls into the column that is left out
        return self._normalised(images), present[:, : self.classes]


class AffineDigits(ShiftedDigits):
    r"""Each digit under a random affine map, wholly inside a larger black square.

    .. math:: x = R(\varphi) \begin{pmatrix} 1 & k \\ 0 & 1 \end{pmatrix}
              \begin{pmatrix} s_x & 0 \\ 0 & s_y \end{pmatrix} x_0 + t

    The angle, the shear and the two scales are uniform in their ranges, and the position is uniform where the digit's
    bounding box is inside the image. Pixels are sampled bilinearly.

    ``rotation`` and ``shear`` are the maxima of :math:`|\varphi|` in degrees and of :math:`|k|`, ``scale`` the minimum
    and maximum of s, ``size`` the height and width of the generated images. The rest is as for
    :class:`ShiftedDigits`, without ``shift``; images must be square.
    """

    def __init__(
        self,
        images: Images,
        labels: Labels,
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
        if not 0 < scale[0] <= scale[1]:
            raise ValueError(f"scale: got {scale}, want two numbers above 0, the smaller one first")
        self.size, self.scale = check_count("size", size), scale
        self.rotation, self.shear = check_number("rotation", rotation), check_number("shear", shear)

    def maps(self, digits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return matrices ``[n, 2, 2]`` and translations ``[n, 2]`` of digits ``[n, 1, h, h]``: (x, y) from centres."""
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
        """Return float32 ``[n, 1, size, size]`` and int64 ``[n]``."""
        digits, labels, states = gathered
        if not len(digits):  # affine_grid takes no empty batch
            return self._normalised(digits.new_zeros(0, 1, self.size, self.size)), labels
        matrix, place = self.maps(digits, Draws.going_on(states))
        back = torch.linalg.inv(matrix)
        side = digits.shape[2]
        # grid_sample counts from −1 to 1 over each image
        theta = torch.cat([back * (self.size / side), (back @ place[:, :, None]) * (-2 / side)], 2)
        grid = torch.nn.functional.affine_grid(theta, [len(digits), 1, self.size, self.size], align_corners=False)
        made = torch.nn.functional.grid_sample(digits.to(torch.float32), grid, mode="bilinear", align_corners=False)
        return self._normalised(made), labels


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
