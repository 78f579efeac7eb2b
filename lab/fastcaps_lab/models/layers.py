"""Layers as data, for backbones and for networks without capsules.

A network's ordinary layers are a tuple of these declarations; :func:`assemble` builds their modules, for images of any
size and number of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps.nn import RoutingPool2d

Shape = tuple[int, ...]


class Declaration(Protocol):
    """A declaration of one or several modules in a row."""

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        """Return the modules for an input of ``shape``, without the batch, in a network of ``classes``."""


Layer = Declaration | type[nn.Module]
"""A declaration, or the class of a module without arguments."""


def _in_order(order: str, named: nn.Module, before: int, after: int) -> list[nn.Module]:
    """Return the modules named by the words of ``order``; a norm normalises its input's channels."""
    words = order.split()
    at = words.index("layer")
    kinds = {"layer": named, "relu": nn.ReLU(), "swish": nn.SiLU()}
    return [
        nn.BatchNorm2d(before if k < at else after) if word == "norm" else kinds[word] for k, word in enumerate(words)
    ]


@dataclass(frozen=True)
class Conv:
    """A convolution, with normalisation and activation."""

    channels: int  # of the result
    kernel_size: int
    stride: int = 1
    padding: int = 0
    bias: bool = True
    order: str = "layer relu"  # "layer" (the convolution), "norm" (BatchNorm), "relu", "swish", in their order

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        conv = nn.Conv2d(shape[0], self.channels, self.kernel_size, self.stride, self.padding, bias=self.bias)
        return _in_order(self.order, conv, shape[0], self.channels)


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
    sharpness: float = 0.5  # of the routing, whose capsules have 16 values

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        size = self.kernel_size
        if self.kind == "routing":
            return [RoutingPool2d(16, kernel_size=size, sharpness=self.sharpness, iterations=3)]
        if self.kind == "average":
            return [nn.AdaptiveAvgPool2d(1) if size is None else nn.AvgPool2d(size)]
        return [nn.AdaptiveMaxPool2d(1) if size is None else nn.MaxPool2d(size)]


@dataclass(frozen=True)
class Linear:
    """A linear layer, with an activation."""

    features: int | None = None  # of the result; the number of classes if None
    order: str = "layer"  # "layer", "relu" or "swish", in their order

    def modules(self, shape: Shape, classes: int | None) -> list[nn.Module]:
        features = classes if self.features is None else self.features
        assert features is not None
        return _in_order(self.order, nn.Linear(shape[0], features), shape[0], features)


class Coordinates(nn.Module):
    """Two more channels with a pixel's coordinates, from -1 to 1, across and down (Heinsen, 2019, Figure 3b)."""

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[B, channels + 2, H, W]`` of ``[B, channels, H, W]``."""
        down, across = (torch.linspace(-1, 1, n, device=images.device, dtype=images.dtype) for n in images.shape[2:])
        grid = torch.stack(torch.meshgrid(across, down, indexing="xy"))
        return torch.cat([images, grid.expand(images.shape[0], -1, -1, -1)], dim=1)


class BasicBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions (He et al., 2016).

    If the shape changes, its shortcut is a 1 x 1 convolution with BatchNorm, or, without parameters (option A), takes
    every ``stride``-th pixel and zeros in new channels.
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1, shortcut: str = "conv") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module | None = None
        self.stride, self.new_channels = stride, channels - in_channels
        if shortcut == "conv" and (stride != 1 or in_channels != channels):
            conv = nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[B, channels, H / stride, W / stride]`` of ``[B, in_channels, H, W]``."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(features)))))
        if self.shortcut is not None:
            features = self.shortcut(features)
        elif self.stride > 1 or self.new_channels:
            features = F.pad(features[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(inner + features)


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


STEM = Conv(64, 3, padding=1, bias=False, order="layer norm relu")


def simple(channels: int) -> tuple[Layer, ...]:
    """Return Tsai et al.'s single convolution (Tables 8 and 9), whose features have half the image's size."""
    return (Conv(channels, 3, stride=2, padding=1),)


def resnet(channels: int) -> tuple[Layer, ...]:
    """Return Tsai et al.'s ResNet (appendix A.1), whose features have half the image's size."""
    return STEM, Blocks(64, 3), Blocks(channels, 4, stride=2)


def small(channels: int, stride: int) -> tuple[Layer, ...]:
    """Return our two convolutions for small grey images."""
    widths = channels // 2, channels
    return tuple(Conv(each, 3, stride, padding=1, bias=False, order="layer norm relu") for each in widths)
