"""Transforms of training images, for whole batches of bytes on any device.

A transform takes bytes ``[n, c, h, w]`` and random numbers ``[n, DRAWS]``, uniform in [0, 1), a row for each image, so
that an image does not depend on its batch, on the order of batches or on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

DRAWS = 6
"""Random numbers for each image: transforms of bytes use the first three, mixup the others."""
Augmentation = Callable[[Tensor, Tensor], Tensor]
Inputs = TypeVar("Inputs", Tensor, tuple[Tensor, ...])


def whole(numbers: Tensor, below: int | Tensor) -> Tensor:
    """Return int64 from 0 to ``below`` − 1, of numbers uniform in [0, 1)."""
    return torch.minimum((numbers * below).long(), torch.as_tensor(below, device=numbers.device) - 1)  # may round up


def cropped(images: Tensor, by: int, numbers: Tensor, flip: bool = False) -> Tensor:
    """Return a random crop of each image, smaller by ``by`` pixels; with ``flip`` half of them are mirrored."""
    height, width = (size - by for size in images.shape[2:])
    every = images.unfold(2, height, 1).unfold(3, width, 1)  # [n, c, y, x, height, width], a view
    top, left = whole(numbers[:, :2], by + 1).unbind(1)
    # advanced indices around a slice come first in the result
    made = every[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(numbers[:, 2, None, None, None] < 0.5, made.flip(3), made) if flip else made


def resized(images: Tensor, size: int) -> Tensor:
    """Return bytes ``[n, c, size, size]`` of bytes ``[n, c, h, w]``, resized bilinearly with antialiasing."""
    pixels = torch.nn.functional.interpolate(images.float(), (size, size), mode="bilinear", antialias=True)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


@dataclass(eq=False)
class RandomCropFlip:
    """Pad with zeros, crop randomly to the old size, flip half (Tsai et al. 2020, A.2).

    Without a flip it is a shift by up to ``padding`` pixels in each direction, as Sabour et al. (2017) shift MNIST by
    2. Use a flip only if mirrored images have the same class: a mirrored 2 is not a 2.
    """

    padding: int = 4  # zero pixels added on each side; 16 in Heinsen (2019) for smallNORB
    flip: bool = False  # left and right, with probability 1/2

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return transformed bytes ``[n, c, h, w]``."""
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        return cropped(padded, 2 * self.padding, numbers, self.flip)


@dataclass(eq=False)
class ResizeCrop:
    """Resize and crop randomly: 34 to 32 in Li et al. (2018) for CIFAR and SVHN, 48 to 32 in Hinton et al. (2018)."""

    resize: int  # height and width before the crop
    size: int  # and after it
    flip: bool = False  # left and right, with probability 1/2

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return bytes ``[n, c, size, size]`` of ``[n, c, h, w]``."""
        return cropped(resized(images, self.resize), self.resize - self.size, numbers, self.flip)


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

    def shares(self, numbers: Tensor) -> Tensor:
        """Return λ of each image: float32 ``[n]``.

        Beta(α, α) without rejection, so no device waits: Student's t by Bailey's (1994) polar method, mapped to (0, 1)
        as in Devroye (1996).
        """
        first, second = numbers[:, 3:5].unbind(1)
        direction = torch.cos(2 * torch.pi * second)
        squared = torch.expm1(-first.log() / self.alpha) * direction.square()  # t² / 2α
        return 0.5 + 0.5 * direction.sign() * torch.rsqrt(1 + 1 / squared)

    def __call__(self, images: Inputs, labels: Tensor, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """Return a blended batch and its targets, float32 ``[n, classes]`` with rows that sum to 1.

        Images are floating point ``[n, ...]``, or a tuple of several inputs of a network; labels are int64 ``[n]``.
        """
        share, partner = self.shares(numbers), numbers[:, 5].argsort(stable=True)
        targets = torch.nn.functional.one_hot(labels, self.classes).to(torch.float32)

        def blend(mine: Tensor) -> Tensor:
            return torch.lerp(mine[partner], mine, share.to(mine.dtype).view(-1, *(1,) * (mine.dim() - 1)))

        made: Any = tuple(map(blend, images)) if isinstance(images, tuple) else blend(images)
        return made, blend(targets)
