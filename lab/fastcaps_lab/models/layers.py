"""Layers as data, for backbones and for networks without capsules.

A network's ordinary layers are a tuple of these declarations; :func:`assemble` builds their modules, for images of any
size and number of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps.nn import RoutingPool2d
from fastcaps_lab.checks import check_choice

Shape = tuple[int, ...]
WORDS = ("conv", "linear", "norm", "relu", "swish")


class Declaration(Protocol):
    """A declaration of one or several modules in a row."""

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        """Return the modules for an input of ``shape``, without the batch, in a network of ``classes``."""
        ...


Layer = Declaration | type[nn.Module]
"""A declaration, or the class of a module without arguments."""


def _in_order(order: str, named: dict[str, nn.Module], before: int, after: int) -> list[nn.Module]:
    """Return the modules named by the words of ``order``; a norm normalises its input's channels."""
    made: list[nn.Module] = []
    channels = before
    for word in order.split():
        check_choice("order", word, WORDS)
        if word == "norm":
            made.append(nn.BatchNorm2d(channels))
        elif word in named:
            made.append(named[word])
            channels = after
        else:
            made.append(nn.ReLU() if word == "relu" else nn.SiLU())
    return made


@dataclass(frozen=True)
class Conv:
    """A convolution, with normalisation and activation."""

    channels: int  # of the result
    kernel_size: int
    stride: int = 1
    padding: int = 0
    bias: bool = True
    order: str = "conv relu"  # "conv", "norm" (BatchNorm), "relu", "swish", in their order

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        conv = nn.Conv2d(
            shape[0], self.channels, self.kernel_size, stride=self.stride, padding=self.padding, bias=self.bias
        )
        return _in_order(self.order, {"conv": conv}, shape[0], self.channels)


@dataclass(frozen=True)
class Blocks:
    """Residual blocks; the stride is that of the first."""

    channels: int
    count: int
    stride: int = 1
    shortcut: str = "conv"  # or "pad", as in BasicBlock

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        first = BasicBlock(shape[0], self.channels, self.stride, self.shortcut)
        return [first, *(BasicBlock(self.channels, self.channels) for _ in range(self.count - 1))]


@dataclass(frozen=True)
class Pool:
    """A pooling layer: "average", "max", or "routing" (:class:`~fastcaps.nn.RoutingPool2d`)."""

    kind: str
    kernel_size: int | None = None  # also the stride; None pools the whole map
    dim: int = 16  # of the routing, as all that follow
    sharpness: float = 0.5
    iterations: int = 3
    detach: bool = False  # no gradient through its coefficients

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        check_choice("kind", self.kind, ("average", "max", "routing"))
        size = self.kernel_size
        if self.kind == "routing":
            options = {"sharpness": self.sharpness, "iterations": self.iterations, "detach": self.detach}
            return [RoutingPool2d(self.dim, kernel_size=size, **options)]  # type: ignore[arg-type]
        if self.kind == "average":
            return [nn.AdaptiveAvgPool2d(1) if size is None else nn.AvgPool2d(size)]
        return [nn.AdaptiveMaxPool2d(1) if size is None else nn.MaxPool2d(size)]


@dataclass(frozen=True)
class Linear:
    """A linear layer, with dropout and activation."""

    features: int | None = None  # of the result; the number of classes if None
    dropout: float = 0.0  # the fraction of inputs dropped in training
    order: str = "linear"  # "linear", "relu" or "swish", in their order

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        features = classes if self.features is None else self.features
        if features is None:
            raise ValueError("features must be given without classes, got None")
        made = _in_order(self.order, {"linear": nn.Linear(shape[0], features)}, shape[0], features)
        return [nn.Dropout(self.dropout), *made] if self.dropout else made


class Coordinates(nn.Module):
    """Two more channels with a pixel's coordinates, from -1 to 1, across and down (Heinsen, 2019, Figure 3b)."""

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[B, channels + 2, H, W]`` of ``[B, channels, H, W]``."""
        options: dict[str, Any] = {"device": images.device, "dtype": images.dtype}
        down, across = (torch.linspace(-1, 1, size, **options) for size in images.shape[2:])
        grid = torch.stack(torch.meshgrid(across, down, indexing="xy"))
        return torch.cat([images, grid.expand(images.shape[0], -1, -1, -1)], dim=1)


class PadShortcut(nn.Module):
    """A shortcut without parameters (He et al., 2016, option A): every ``stride``-th pixel, zeros in new channels."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[B, channels, H / stride, W / stride]`` of ``[B, fewer channels, H, W]``."""
        kept = features[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, 0, self.channels - features.shape[1]))


class BasicBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions (He et al., 2016).

    If the shape changes, its shortcut is "conv", a 1 x 1 convolution with BatchNorm, or "pad", zeros in new channels,
    without parameters.
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1, shortcut: str = "conv") -> None:
        super().__init__()
        check_choice("shortcut", shortcut, ("conv", "pad"))
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = (
                PadShortcut(channels, stride)
                if shortcut == "pad"
                else nn.Sequential(
                    nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
                )
            )

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[B, channels, H / stride, W / stride]`` of ``[B, in_channels, H, W]``."""
        inner = F.relu(self.bn1(self.conv1(features)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(features))


def assemble(layers: Sequence[Layer], shape: Shape, classes: int | None = None) -> nn.Sequential:
    """Return the modules of declarations, in a row, for an input of shape (channels, height, width).

    ``classes`` are the features of a :class:`Linear` without any. ValueError if an image is too small for a layer.
    """

    def made(layer: Layer) -> list[nn.Module]:
        return [layer()] if isinstance(layer, type) else layer.modules(shape, classes)

    modules: list[nn.Module] = []
    size = shape[1:]
    for layer in layers:
        modules += made(layer)
        with torch.device("meta"):
            probe = nn.Sequential(*made(layer)).eval()
            try:
                shape = tuple(probe(torch.empty(1, *shape)).shape[1:])
            except RuntimeError as error:
                raise ValueError(f"image_size {size} is too small: {layer} gets {list(shape)}; {error}") from error
    return nn.Sequential(*modules)


def _resnet(channels: int) -> tuple[Layer, ...]:
    stem = Conv(64, 3, padding=1, bias=False, order="conv norm relu")
    return stem, Blocks(64, 3), Blocks(channels, 4, stride=2)


def _small(channels: int, stride: int) -> tuple[Layer, ...]:
    half, options = max(1, channels // 2), {"stride": stride, "padding": 1, "bias": False, "order": "conv norm relu"}
    return Conv(half, 3, **options), Conv(channels, 3, **options)  # type: ignore[arg-type]


BACKBONES: dict[str, Any] = {
    "simple": lambda channels: (Conv(channels, 3, stride=2, padding=1),),
    "resnet": _resnet,
    "small": lambda channels: _small(channels, 2),
    "tiny": lambda channels: _small(channels, 1),
}
"""Backbones by name, as functions of their features' channels: Tsai et al.'s single convolution (Tables 8 and 9) and
ResNet (appendix A.1), with features of half the image's size; ours for small grey images, of a quarter of the image's
size and of the full size."""
