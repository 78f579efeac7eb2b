"""The networks by name, each as a configuration from which it is built."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fastcaps.models.backbones import ResNetBackbone, SimpleBackbone, SmallBackbone
from fastcaps.nn.capsnet import CapsNet
from fastcaps.nn.stack import CapsuleSpec


@dataclass(frozen=True)
class NetworkConfig:
    """Everything a network is built from.

    Attributes
    ----------
    backbone : str
        "simple", "resnet", "small" (quarter-size features) or "tiny" (features as large as the image).
    channels : int
        Channels of the backbone's features.
    capsules, dim : int
        Primary capsule types, and the numbers in every capsule's pose.
    hidden : tuple of CapsuleSpec
        The layers between the primary and the class capsules.
    classes : int
        Class capsules.
    image_size : int or (int, int)
        Height and width.
    in_channels : int
        Channels of an image.
    iterations : int
        Routing iterations t. The authors report 1 and 2, with 2 ahead.
    routing : "concurrent" or "sequential"
        "sequential" is the paper's ablation B.
    layer_norm : bool
        LayerNorm in the routing; False is ablation A.
    activations : bool
        Capsules with activations: ablation C.
    dropout : float
        In the routing layers, before LayerNorm.
    pose : "matrix" or "vector"
        The poses' structure.
    primary_bias : bool
        Bias of the convolution that makes the primary capsules. The authors' code has none there; LayerNorm follows
        either way.
    """

    backbone: str
    channels: int
    capsules: int
    dim: int
    hidden: tuple[CapsuleSpec, ...]
    classes: int
    image_size: int | tuple[int, int]
    in_channels: int
    iterations: int = 2
    routing: str = "concurrent"
    layer_norm: bool = True
    activations: bool = False
    dropout: float = 0.0
    pose: str = "matrix"
    primary_bias: bool = True


CONV_PAIR = (CapsuleSpec(32, kernel_size=3, stride=2), CapsuleSpec(32, kernel_size=3))

NETWORKS: dict[str, NetworkConfig] = {
    # Table 8 and Table 9, and the ResNet backbone of appendix A.1 in place of the single convolution.
    "tsai-iar-simple-c10": NetworkConfig("simple", 256, 32, 16, CONV_PAIR, 10, 32, 3),
    "tsai-iar-simple-c100": NetworkConfig("simple", 128, 32, 36, (*CONV_PAIR, CapsuleSpec(20)), 100, 32, 3),
    "tsai-iar-resnet-c10": NetworkConfig("resnet", 128, 32, 16, CONV_PAIR, 10, 32, 3),
    "tsai-iar-resnet-c100": NetworkConfig("resnet", 128, 32, 36, (*CONV_PAIR, CapsuleSpec(20)), 100, 32, 3),
    # Ours: small enough to train on two CPU cores while one watches.
    "mnist": NetworkConfig("small", 64, 16, 16, (CapsuleSpec(16, kernel_size=3, stride=2),), 10, 28, 1),
    "digits": NetworkConfig("tiny", 32, 8, 16, (CapsuleSpec(8, kernel_size=3),), 10, 8, 1),
}


def make_backbone(name: str, in_channels: int, channels: int) -> nn.Module:
    """The backbone ``name``; ValueError if there is none."""
    if name == "simple":
        return SimpleBackbone(in_channels, channels)
    if name == "resnet":
        return ResNetBackbone(in_channels, channels)
    if name == "small":
        return SmallBackbone(in_channels, channels)
    if name == "tiny":
        return SmallBackbone(in_channels, channels, stride=(1, 1))
    raise ValueError(f"backbone must be 'simple', 'resnet', 'small' or 'tiny', got {name!r}")


def build(config: NetworkConfig) -> CapsNet:
    """The network of ``config``, freshly drawn."""
    return CapsNet.build(
        make_backbone(config.backbone, config.in_channels, config.channels),
        in_channels=config.in_channels,
        image_size=config.image_size,
        capsules=config.capsules,
        dim=config.dim,
        hidden=config.hidden,
        classes=config.classes,
        iterations=config.iterations,
        routing=config.routing,
        primary={"bias": config.primary_bias},
        pose=config.pose,
        dropout=config.dropout,
        layer_norm=config.layer_norm,
        activations=config.activations,
    )
