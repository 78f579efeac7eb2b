"""Transforms of training images, for whole batches of bytes on any device.

A transform takes bytes ``[n, c, h, w]`` and :class:`~fastcaps_lab.data.Draws`, and returns bytes. Every image has its
own random numbers; without draws, torch's global generator seeds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastcaps_lab.checks import check_count
from fastcaps_lab.data.draws import Draws

Augmentation = Callable[[Tensor, Draws], Tensor]
Inputs = TypeVar("Inputs", Tensor, tuple[Tensor, ...])

_TO_YIQ = torch.tensor(  # FCC's, as in Python's colorsys; the first row is brightness
    [[0.30, 0.59, 0.11], [0.599, -0.2773, -0.3217], [0.213, -0.5251, 0.3121]], dtype=torch.float64
)


def _require_images(images: Tensor) -> None:
    if images.dim() != 4 or images.dtype != torch.uint8:
        raise ValueError(f"images: got {images.dtype} {list(images.shape)}, want torch.uint8 [n, c, h, w]")


def cropped(images: Tensor, by: int, draws: Draws, flip: bool = False) -> Tensor:
    """Return a random crop of each image, smaller by ``by`` pixels; with ``flip`` half of them are mirrored."""
    height, width = (size - by for size in images.shape[2:])
    every = images.unfold(2, height, 1).unfold(3, width, 1)  # [n, c, y, x, height, width], a view
    top, left = draws.integers(by + 1, 2).unbind(1)
    # advanced indices around a slice come first in the result
    made = every[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(draws.uniform(1, 1, 1) < 0.5, made.flip(3), made) if flip else made


class Chain:
    """Several transforms in a row."""

    def __init__(self, *transforms: Augmentation) -> None:
        self.transforms = transforms

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """Return transformed bytes ``[n, c, h, w]``."""
        draws = draws or Draws.fresh(len(images), images.device)
        for transform in self.transforms:
            images = transform(images, draws)
        return images


@dataclass(eq=False)
class RandomCropFlip:
    """Pad with zeros, crop randomly to the old size, flip half (Tsai et al. 2020, A.2).

    Without a flip it is a shift by up to ``padding`` pixels in each direction, as Sabour et al. (2017) shift MNIST by
    2. Use a flip only if mirrored images have the same class: a mirrored 2 is not a 2.
    """

    padding: int = 4  # zero pixels added on each side; 16 in Heinsen (2019) for smallNORB
    flip: bool = False  # left and right, with probability 1/2

    def __post_init__(self) -> None:
        check_count("padding", self.padding, 0)

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """Return transformed bytes ``[n, c, h, w]``."""
        draws = draws or Draws.fresh(len(images), images.device)
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        return cropped(padded, 2 * self.padding, draws, self.flip)


@dataclass(eq=False)
class ResizeCrop:
    """Resize and crop randomly: 34 to 32 in Li et al. (2018) for CIFAR and SVHN, 48 to 32 in Hinton et al. (2018)."""

    resize: int  # height and width before the crop
    size: int  # and after it
    flip: bool = False  # left and right, with probability 1/2

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ValueError(f"size: got {self.size}, want 1 to {self.resize}, the size before the crop")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """Return bytes ``[n, c, size, size]`` of ``[n, c, h, w]``."""
        draws = draws or Draws.fresh(len(images), images.device)
        return cropped(resized(images, self.resize), self.resize - self.size, draws, self.flip)


@dataclass(eq=False)
class ColorJitter:
    """Change brightness, contrast, saturation and hue, in this order, by random factors of each image.

    A factor is uniform from 1 − s to 1 + s, where s is the strength. Brightness multiplies pixels; contrast scales
    their difference from the image's mean brightness, saturation their difference from the pixel's brightness; hue
    rotates colours around the grey axis (in YIQ) by up to ``hue`` of 360°. Only the result is rounded and clamped to
    0..255. Li et al. (2018) use all four without giving the strengths; the defaults are ours. Saturation and hue must
    be 0 unless images have three channels.
    """

    brightness: float = 0.4  # strengths from 0 to 1
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1  # from 0 to 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = 0.5 if name == "hue" else 1.0
            if not 0 <= value <= most:
                raise ValueError(f"{name}: got {value}, want 0 to {most}")

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """Return transformed bytes ``[n, c, h, w]``."""
        _require_images(images)
        colours = images.shape[1] == 3
        if not colours and (self.saturation or self.hue):
            raise ValueError(
                f"saturation, hue: got {self.saturation}, {self.hue} for images of {images.shape[1]} channels; "
                "want 0, 0, or three channels"
            )
        draws = draws or Draws.fresh(len(images), images.device)
        spread = torch.tensor(astuple(self), device=images.device)
        brightness, contrast, saturation, hue = (spread * draws.between(-1, 1, 4)).unbind(1)
        pixels = images.to(torch.float32) * (1 + brightness)[:, None, None, None]
        to_yiq = _TO_YIQ.to(images.device, torch.float32)
        if self.contrast:
            grey = torch.einsum("c,nchw->nhw", to_yiq[0], pixels) if colours else pixels.mean(1)
            grey = grey.mean((1, 2))[:, None, None, None]
            pixels = torch.lerp(grey, pixels, (1 + contrast)[:, None, None, None])
        if self.saturation or self.hue:
            angle = 2 * torch.pi * hue
            a, b = (1 + saturation) * angle.cos(), (1 + saturation) * angle.sin()
            zero = torch.zeros_like(a)
            rows = (torch.stack([zero + 1, zero, zero], 1), torch.stack([zero, a, -b], 1), torch.stack([zero, b, a], 1))
            from_yiq = torch.linalg.inv(_TO_YIQ).to(images.device, torch.float32)
            matrix = from_yiq @ torch.stack(rows, 1) @ to_yiq  # [n, 3, 3]
            pixels = (matrix @ pixels.flatten(2)).view_as(pixels)
        return pixels.round_().clamp_(0, 255).to(torch.uint8)


@dataclass(eq=False)
class Mixup:
    """Blend each image with another of the batch, and their targets with the same factor (Zhang et al. 2017).

    .. math:: x = \\lambda x_i + (1 - \\lambda) x_j, \\quad y = \\lambda y_i + (1 - \\lambda) y_j, \\quad
              \\lambda \\sim \\mathrm{Beta}(\\alpha, \\alpha)

    Every image has its own λ; the partners are a permutation of the batch. Cross-entropy takes the blended targets. For
    texts, embeddings and masks are blended, as in Heinsen (2019).
    """

    classes: int  # number of classes
    alpha: float = 0.2  # the Beta distribution's parameter, as in Heinsen (2019)

    def __post_init__(self) -> None:
        check_count("classes", self.classes)
        if not self.alpha > 0:
            raise ValueError(f"alpha: got {self.alpha}, want more than 0")

    def shares(self, draws: Draws) -> Tensor:
        """Return λ of each image: float32 ``[n]``.

        Beta(α, α) without rejection, so no device waits: Student's t by Bailey's (1994) polar method, mapped to (0, 1)
        as in Devroye (1996).
        """
        first, second = draws.uniform(2).unbind(1)
        direction = torch.cos(2 * torch.pi * second)
        squared = torch.expm1(-first.log() / self.alpha) * direction.square()  # t² / 2α
        return 0.5 + 0.5 * direction.sign() * torch.rsqrt(1 + 1 / squared)

    def __call__(self, images: Inputs, labels: Tensor, draws: Draws | None = None) -> tuple[Inputs, Tensor]:
        """Return a blended batch and its targets, float32 ``[n, classes]`` with rows that sum to 1.

        Images are floating point ``[n, ...]``, or a tuple of several inputs of a network; labels are int64 ``[n]``, or
        soft targets ``[n, classes]``.
        """
        for each in images if isinstance(images, tuple) else (images,):
            if not each.is_floating_point():
                raise ValueError(f"images: got {each.dtype}, want floating point: normalise them before mixup")
        draws = draws or Draws.fresh(len(labels), labels.device)
        share = self.shares(draws)
        partner = draws.uniform().argsort(stable=True)
        targets = torch.nn.functional.one_hot(labels, self.classes) if labels.dim() == 1 else labels

        def blend(mine: Tensor) -> Tensor:
            return torch.lerp(mine[partner], mine, share.to(mine.dtype).view(-1, *(1,) * (mine.dim() - 1)))

        made: Any = tuple(map(blend, images)) if isinstance(images, tuple) else blend(images)
        return made, blend(targets.to(torch.float32))


def resized(images: Tensor, size: int) -> Tensor:
    """Return bytes ``[n, c, size, size]``, resized bilinearly with antialiasing."""
    _require_images(images)
    if images.shape[2:] == (size, size):
        return images
    pixels = torch.nn.functional.interpolate(
        images.to(torch.float32), (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def crops(images: Tensor, size: int | Sequence[int], *, flip: bool = False) -> Tensor:
    """Return crops of the four corners and the centre of each image, for the multi-crop test.

    Images are ``[n, c, h, w]``, bytes or normalised, and ``size`` is the height and width of a crop. The result is
    ``[n, 5, c, size, size]``: top left, top right, bottom left, bottom right, centre; with ``flip``, ``[n, 10, ...]``,
    followed by their mirror images, for data whose mirrored images have the same class.
    """
    height, width = (size, size) if isinstance(size, int) else size
    down, right = images.shape[-2] - height, images.shape[-1] - width
    if height < 1 or width < 1 or down < 0 or right < 0:
        raise ValueError(f"size: got {height} x {width}, want 1 x 1 to {images.shape[-2]} x {images.shape[-1]}")
    corners = [(0, 0), (0, right), (down, 0), (down, right), (down // 2, right // 2)]
    made = torch.stack([images[..., y : y + height, x : x + width] for y, x in corners], 1)
    return torch.cat([made, made.flip(-1)], 1) if flip else made
