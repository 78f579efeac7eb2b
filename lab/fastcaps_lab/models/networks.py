"""Networks as data: their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from inspect import signature
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from fastcaps.nn import CapsNet, CapsuleSpec, InvertedAttentionRouting, RoutingLayer
from fastcaps_lab.checks import check_choice, check_count, check_map, did_you_mean, image_size
from fastcaps_lab.models.layers import BACKBONES, Layer, Pool, assemble

FOLLOWING = {"self", "options", "in_capsules", "out_capsules", "in_dim", "out_dim", "device", "dtype"}
FOLLOWING |= {each.name for each in fields(CapsuleSpec)}
"""Arguments of routing layers that follow from the network."""


def arguments(layer: type[RoutingLayer[Any, Any]]) -> set[str]:
    """Return the names of a layer's arguments, its bases' among them, to which it passes its ``**options`` on."""
    kinds = [kind for kind in layer.__mro__ if issubclass(kind, RoutingLayer)]
    return {name for kind in kinds for name in signature(kind.__init__).parameters}


class Config(Protocol):
    """The configuration of a network of :func:`fastcaps_lab.models.create`: a frozen dataclass of the overrides."""

    def build(self) -> nn.Module:
        """Return the network with new weights."""
        ...


@dataclass(frozen=True)
class NetworkConfig:
    """The configuration of a capsule network, :class:`fastcaps.nn.CapsNet`."""

    backbone: str | tuple[Layer, ...]  # a name of layers.BACKBONES, or the layers themselves
    _: KW_ONLY
    channels: int | None = None  # of the features of a named backbone
    capsules: int  # types of primary capsules
    dim: int  # components of every capsule's pose
    hidden: tuple[CapsuleSpec, ...] = ()  # the layers between the primary and the class capsules
    classes: int
    image_size: int | tuple[int, int]  # height and width
    in_channels: int  # of an image
    layer: type[RoutingLayer[Any, Any]] = InvertedAttentionRouting  # the class of the routing layers
    iterations: int | None = None  # of every layer, 2 if None
    routing: str = "concurrent"  # or "sequential", for inverted attention (the paper's ablation B)
    pose: str = "matrix"  # or "vector"
    primary: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the primary capsules
    class_layer: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the class layer's CapsuleSpec
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of all routing layers
    primary_bias: bool = True  # of the primary capsules' convolution; Tsai et al.'s code has none
    decoder: bool | tuple[int, ...] = False  # its hidden widths; True: those of Sabour et al., 512 and 1024
    kaiming: bool = False  # draw convolutions from Kaiming's normal distribution, with biases of 0

    def __post_init__(self) -> None:
        for name in ("primary", "class_layer", "options"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise TypeError(f"{name} must be a mapping, got {value!r}")

    def build(self) -> CapsNet:
        """Return the network with new weights."""
        size, channels = image_size(self.image_size), check_count("in_channels", self.in_channels)
        options = {"pose": self.pose, **self.options}
        check_choice("routing", self.routing, ("concurrent", "sequential"))
        if self.layer is not InvertedAttentionRouting and self.routing != "concurrent":
            raise ValueError(f"routing must be 'concurrent' for {self.layer.__name__}, got {self.routing!r}")
        count = 2 if self.iterations is None else check_count("iterations", self.iterations)
        specs = [*self.hidden, CapsuleSpec(check_count("classes", self.classes), **self.class_layer)]
        primary = {} if self.primary_bias else {"bias": False}
        net = CapsNet.build(
            assemble(self.layers(), (channels, *size)),
            in_channels=channels,
            image_size=size,
            capsules=self.capsules,
            dim=self.dim,
            hidden=specs[:-1],
            classes=specs[-1],
            iterations=count,
            routing=self.routing,
            layer=self.layer,
            primary={**primary, **self.primary},
            head=self.layer.head,
            decoder=self.decoder,
            **options,
        )
        if self.kaiming:
            for module in net.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
        return net

    def layers(self) -> tuple[Layer, ...]:
        """Return the declarations of the backbone."""
        if not isinstance(self.backbone, str):
            if self.channels is not None:
                raise ValueError(f"channels must be None without a named backbone, got {self.channels}")
            return tuple(self.backbone)
        check_choice("backbone", self.backbone, tuple(BACKBONES))
        return BACKBONES[self.backbone](check_count("channels", self.channels))

    def extras(self) -> list[str]:
        """Return the arguments of all routing layers of the network that are overrides besides the fields."""
        known = {each.name for each in fields(self)}
        layers = {self.layer, *(spec.layer or self.layer for spec in self.hidden)}
        return sorted(set.intersection(*map(arguments, layers)) - known - FOLLOWING)

    def extended(self, more: Mapping[str, Any]) -> NetworkConfig:
        """Return the configuration with other values for some of :meth:`extras`."""
        return replace(self, options={**self.options, **more})


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
        images = (check_count("in_channels", self.in_channels), *image_size(self.image_size))
        return CNN(*assemble(self.layers, images, check_count("classes", self.classes)), images=images)

    def extras(self) -> list[str]:
        """Return the arguments of its routing as pooling, which are overrides, too."""
        return ["detach", "dim", "iterations", "sharpness"] if any(map(routes, self.layers)) else []

    def extended(self, more: Mapping[str, Any]) -> CNNConfig:
        """Return the configuration with other values for some of :meth:`extras`."""
        return replace(self, layers=tuple(replace(each, **more) if routes(each) else each for each in self.layers))  # type: ignore[type-var]


def routes(layer: Layer) -> bool:
    """Return whether a layer is routing as pooling."""
    return isinstance(layer, Pool) and layer.kind == "routing"


class CNN(nn.Sequential):
    """A network without capsules: its modules in order, for images of (channels, height, width)."""

    def __init__(self, *modules: nn.Module, images: tuple[int, int, int]) -> None:
        super().__init__(*modules)
        self.in_channels, self.image_size = images[0], images[1:]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[B, classes]`` of images ``[B, in_channels, H, W]``; ValueError for another shape."""
        check_map("images", images, self.in_channels, self.image_size)
        return super().forward(images)


Some = TypeVar("Some", bound=Config)


def override(config: Some, overrides: Mapping[str, Any]) -> Some:
    """Return a configuration with other values.

    TypeError if an override is neither a field nor an argument of the network's routing layers.
    """
    known = [each.name for each in fields(config)]  # type: ignore[arg-type]
    config = replace(config, **{name: value for name, value in overrides.items() if name in known})  # type: ignore[type-var]
    extras = config.extras() if isinstance(config, (NetworkConfig, CNNConfig)) else []
    for name in overrides:
        if name not in (every := [*known, *extras]):
            hint = did_you_mean(name, every)
            raise TypeError(f"create() has no override {name}{hint}; there are: {', '.join(every)}")
    more = {name: value for name, value in overrides.items() if name in extras}
    return config.extended(more) if more else config  # type: ignore[attr-defined]
