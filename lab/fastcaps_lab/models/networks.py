"""Networks as data: their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from fastcaps.nn import CapsNet, CapsuleSpec, InvertedAttentionRouting, RoutingLayer
from fastcaps_lab.checks import check_map, image_size
from fastcaps_lab.models.layers import Layer, assemble


class Config(Protocol):
    """The configuration of a network of :func:`fastcaps_lab.models.create`: a frozen dataclass of the overrides."""

    def build(self) -> nn.Module:
        """Return the network with new weights."""
        ...


@dataclass(frozen=True)
class NetworkConfig:
    """The configuration of a capsule network, :class:`fastcaps.nn.CapsNet`."""

    backbone: tuple[Layer, ...]
    _: KW_ONLY
    capsules: int  # types of primary capsules
    dim: int  # components of every capsule's pose
    hidden: tuple[CapsuleSpec, ...] = ()  # the layers between the primary and the class capsules
    classes: int
    image_size: int | tuple[int, int]  # height and width
    in_channels: int  # of an image
    layer: type[RoutingLayer[Any, Any]] = InvertedAttentionRouting  # the class of the routing layers
    iterations: int = 2  # of every layer
    routing: str = "concurrent"  # or "sequential", for inverted attention (the paper's ablation B)
    pose: str = "matrix"  # or "vector"
    primary: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the primary capsules
    class_layer: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the class layer's CapsuleSpec
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of all routing layers
    decoder: bool | tuple[int, ...] = False  # its hidden widths; True: those of Sabour et al., 512 and 1024
    kaiming: bool = False  # draw convolutions from Kaiming's normal distribution, with biases of 0

    def build(self) -> CapsNet:
        """Return the network with new weights."""
        if self.layer is not InvertedAttentionRouting and self.routing != "concurrent":
            raise ValueError(f"routing must be 'concurrent' for {self.layer.__name__}, got {self.routing!r}")
        names = ("in_channels", "image_size", "capsules", "dim", "hidden", "iterations", "routing", "layer", "primary")
        net = CapsNet.build(
            assemble(self.backbone, (self.in_channels, *image_size(self.image_size))),
            **{name: getattr(self, name) for name in names},
            classes=CapsuleSpec(self.classes, **self.class_layer),
            head=self.layer.head,
            decoder=self.decoder,
            **{"pose": self.pose, **self.options},
        )
        for module in net.modules() if self.kaiming else ():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        return net


@dataclass(frozen=True)
class CNNConfig:
    """The configuration of a network without capsules."""

    layers: tuple[Layer, ...]  # of fastcaps_lab.models.layers, in a row
    _: KW_ONLY
    classes: int
    image_size: int | tuple[int, int]
    in_channels: int

    def build(self) -> CNN:
        """Return the network with new weights."""
        images = (self.in_channels, *image_size(self.image_size))
        return CNN(*assemble(self.layers, images, self.classes), images=images)


class CNN(nn.Sequential):
    """A network without capsules: its modules in order, for images of (channels, height, width)."""

    def __init__(self, *modules: nn.Module, images: tuple[int, int, int]) -> None:
        super().__init__(*modules)
        self.in_channels, self.image_size = images[0], images[1:]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[B, classes]`` of images ``[B, in_channels, H, W]``; ValueError for another shape."""
        check_map("images", images, self.in_channels, self.image_size)
        return super().forward(images)
