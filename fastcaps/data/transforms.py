"""What is done to training images: whole batches of bytes at a time, on whatever device they lie.

A transform takes bytes ``[n, c, h, w]`` and :class:`~fastcaps.data.Draws`, and gives bytes. Every image draws its own
numbers. Without draws they come from torch's global generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastcaps.checks import check_count
from fastcaps.data.draws import Draws

Augmentation = Callable[[Tensor, Draws], Tensor]
Inputs = TypeVar("Inputs", Tensor, tuple[Tensor, ...])

_TO_YIQ = torch.tensor(  # FCC's, as Python's colorsys has them; the first row is how bright a colour looks
    [[0.30, 0.59, 0.11], [0.599, -0.2773, -0.3217], [0.213, -0.5251, 0.3121]], dtype=torch.float64
)


def _require_images(images: Tensor) -> None:
    if images.dim() != 4 or images.dtype != torch.uint8:
        raise ValueError(f"images: got {images.dtype} {list(images.shape)}, want torch.uint8 [n, c, h, w]")


def cropped(images: Tensor, by: int, draws: Draws, flip: bool = False) -> Tensor:
    """A window of each image, at any place, ``by`` pixels lower and narrower; with ``flip`` half of them mirrored."""
    height, width = (size - by for size in images.shape[2:])
    every = images.unfold(2, height, 1).unfold(3, width, 1)  # [n, c, y, x, height, width], a view
    top, left = draws.integers(by + 1, 2).unbind(1)
    # advanced indices around a slice come first in the result
    made = every[torch.arange(len(images), device=images.device), :, top, left]
    return torch.where(draws.uniform(1, 1, 1) < 0.5, made.flip(3), made) if flip else made


class Chain:
    """Transforms one after the other."""

    def __init__(self, *transforms: Augmentation) -> None:
        self.transforms = transforms

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """Bytes ``[n, c, h, w]`` in, bytes out."""
        draws = draws or Draws.fresh(len(images), images.device)
        for transform in self.transforms:
            images = transform(images, draws)
        return images


class RandomCropFlip:
    """Pad with zeros, crop at random to the old size, flip half (Tsai et al. 2020, A.2).

    Without a flip it is a shift by up to ``padding`` pixels in each direction, as Sabour et al. (2017) shift MNIST by
    2. Flip only what has the same class in the mirror: a mirrored 2 is no 2.

    Parameters
    ----------
    padding : int
        Zero pixels added on each side; 4 in the paper, 16 in Heinsen's (2019) for smallNORB.
    flip : bool
        Flip left and right with probability 1/2.
    """

    def __init__(self, padding: int = 4, flip: bool = False) -> None:
        self.padding, self.flip = check_count("padding", padding, 0), flip

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """``[n, c, h, w]`` in, the same shape and dtype out."""
        draws = draws or Draws.fresh(len(images), images.device)
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        return cropped(padded, 2 * self.padding, draws, self.flip)


class ResizeCrop:
    """Resize, and crop at random: 34 and 32 in Li et al. (2018) for CIFAR and SVHN, 48 and 32 in Hinton et al. (2018).

    Parameters
    ----------
    resize, size : int
        Height and width before and after the crop.
    flip : bool
        Flip left and right with probability 1/2.
    """

    def __init__(self, resize: int, size: int, flip: bool = False) -> None:
        if not 1 <= size <= resize:
            raise ValueError(f"size: got {size}, want 1 to {resize}, the size before the crop")
        self.resize, self.size, self.flip = resize, size, flip

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """``[n, c, h, w]`` in, ``[n, c, size, size]`` out."""
        draws = draws or Draws.fresh(len(images), images.device)
        return cropped(resized(images, self.resize), self.resize - self.size, draws, self.flip)


class ColorJitter:
    """Disturb brightness, contrast, saturation and hue, in this order, each image by factors of its own.

    A factor is uniform from 1 − s to 1 + s, where s is the strength. Brightness multiplies; contrast moves away from
    the image's mean brightness; saturation away from each pixel's; hue turns the colours around the axis of greys (in
    YIQ) by up to ``hue`` of a full turn. Only the end result is rounded and cut to 0..255. Li et al. (2018) use all
    four; the text lost their strengths, so the defaults are ours.

    Parameters
    ----------
    brightness, contrast, saturation : float
        Strengths from 0 to 1. Saturation must be 0 where images have not three channels.
    hue : float
        From 0 to 0.5; likewise.
    """

    def __init__(
        self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4, hue: float = 0.1
    ) -> None:
        strengths = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        for name, value, most in (*((n, s, 1.0) for n, s in strengths.items()), ("hue", hue, 0.5)):
            if not 0 <= value <= most:
                raise ValueError(f"{name}: got {value}, want 0 to {most}")
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue

    def __call__(self, images: Tensor, draws: Draws | None = None) -> Tensor:
        """``[n, c, h, w]`` in, the same shape and dtype out."""
        _require_images(images)
        colours = images.shape[1] == 3
        if not colours and (self.saturation or self.hue):
            raise ValueError(
                f"saturation, hue: got {self.saturation}, {self.hue} for images of {images.shape[1]} channels; "
                "want 0, 0, or three channels"
            )
        draws = draws or Draws.fresh(len(images), images.device)
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        spread = torch.tensor(strengths, device=images.device)
        brightness, contrast, saturation, turn = (spread * draws.between(-1, 1, 4)).unbind(1)
        pixels = images.to(torch.float32) * (1 + brightness)[:, None, None, None]
        to_yiq = _TO_YIQ.to(images.device, torch.float32)
        if self.contrast:
            grey = torch.einsum("c,nchw->nhw", to_yiq[0], pixels) if colours else pixels.mean(1)
            grey = grey.mean((1, 2))[:, None, None, None]
            pixels = torch.lerp(grey, pixels, (1 + contrast)[:, None, None, None])
        if self.saturation or self.hue:
            angle = 2 * torch.pi * turn
            a, b = (1 + saturation) * angle.cos(), (1 + saturation) * angle.sin()
            zero = torch.zeros_like(a)
            rows = (torch.stack([zero + 1, zero, zero], 1), torch.stack([zero, a, -b], 1), torch.stack([zero, b, a], 1))
            from_yiq = torch.linalg.inv(_TO_YIQ).to(images.device, torch.float32)
            matrix = from_yiq @ torch.stack(rows, 1) @ to_yiq  # [n, 3, 3]
            pixels = (matrix @ pixels.flatten(2)).view_as(pixels)
        return pixels.round_().clamp_(0, 255).to(torch.uint8)


class Mixup:
    """Blend each image with another of the batch, and their targets in the same shares (Zhang et al. 2017).

    .. math:: x = \\lambda x_i + (1 - \\lambda) x_j, \\quad y = \\lambda y_i + (1 - \\lambda) y_j, \\quad
              \\lambda \\sim \\mathrm{Beta}(\\alpha, \\alpha)

    Every image draws a λ of its own; the partners are the batch in another order. The targets serve cross-entropy as
    they are. Of texts, embeddings and mask are blended, as Heinsen (2019) does.

    Parameters
    ----------
    classes : int
        Number of classes.
    alpha : float
        The Beta distribution's parameter; 0.2 in Heinsen (2019).
    """

    def __init__(self, classes: int, alpha: float = 0.2) -> None:
        if not alpha > 0:
            raise ValueError(f"alpha: got {alpha}, want more than 0")
        self.classes, self.alpha = check_count("classes", classes), alpha

    def shares(self, draws: Draws) -> Tensor:
        """λ of each image: float32 ``[n]``.

        Beta(α, α) without rejection, so that a device is never waited for: Student's t by Bailey's (1994) polar method,
        brought to (0, 1) as Devroye (1996) does.
        """
        first, second = draws.uniform(2).unbind(1)
        direction = torch.cos(2 * torch.pi * second)
        squared = torch.expm1(-first.log() / self.alpha) * direction.square()  # t² / 2α
        return 0.5 + 0.5 * direction.sign() * torch.rsqrt(1 + 1 / squared)

    def __call__(self, images: Inputs, labels: Tensor, draws: Draws | None = None) -> tuple[Inputs, Tensor]:
        """Mix a batch: float32 targets ``[n, classes]``, each row of which sums to 1, beside what came, blended.

        Images are floating point ``[n, ...]``, or several such inputs of a network, blended in the same shares; labels
        int64 ``[n]``, or soft targets ``[n, classes]``.
        """
        several: tuple[Tensor, ...] = images if isinstance(images, tuple) else (images,)
        for each in several:
            if not each.is_floating_point():
                raise ValueError(f"images: got {each.dtype}, want floating point: mix what is normalised")
        draws = draws or Draws.fresh(len(labels), labels.device)
        share = self.shares(draws)
        partner = draws.uniform().argsort(stable=True)
        targets = torch.nn.functional.one_hot(labels, self.classes) if labels.dim() == 1 else labels

        def blend(mine: Tensor) -> Tensor:
            return torch.lerp(mine[partner], mine, share.to(mine.dtype).view(-1, *(1,) * (mine.dim() - 1)))

        made: Any = tuple(map(blend, several)) if isinstance(images, tuple) else blend(images)
        return made, blend(targets.to(torch.float32))


def resized(images: Tensor, size: int) -> Tensor:
    """Bytes ``[n, c, h, w]`` at another height and width, bilinear, smoothed where they shrink."""
    _require_images(images)
    if images.shape[2:] == (size, size):
        return images
    pixels = torch.nn.functional.interpolate(
        images.to(torch.float32), (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def crops(images: Tensor, size: int | Sequence[int], *, flip: bool = False) -> Tensor:
    """The four corners and the centre of each image, and with ``flip`` their mirror images: for the multi-crop test.

    Images are ``[n, c, h, w]``, bytes or normalised, ``size`` is the height and width of a crop, what is returned
    ``[n, 5, c, size, size]`` or ``[n, 10, ...]``: top left, top right, bottom left, bottom right, centre. Mirror images
    are for images that have the same class there.
    """
    height, width = (size, size) if isinstance(size, int) else size
    down, right = images.shape[-2] - height, images.shape[-1] - width
    if height < 1 or width < 1 or down < 0 or right < 0:
        raise ValueError(f"size: got {height} x {width}, want 1 x 1 to {images.shape[-2]} x {images.shape[-1]}")
    corners = [(0, 0), (0, right), (down, 0), (down, right), (down // 2, right // 2)]
    made = torch.stack([images[..., y : y + height, x : x + width] for y, x in corners], 1)
    return torch.cat([made, made.flip(-1)], 1) if flip else made
