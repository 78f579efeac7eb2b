"""The networks of Tsai et al. (2020), Capsules with Inverted Dot-Product Attention Routing: Tables 2 to 12, Figure 5.

lab/docs/networks.md lists our choices.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastcaps.nn import CapsuleSpec, DynamicRouting, EMRouting
from fastcaps_lab.models.layers import STEM, Blocks, Conv, Layer, Linear, Pool, resnet, simple
from fastcaps_lab.models.networks import CNNConfig, Config, NetworkConfig

PAIR = (CapsuleSpec(32, kernel_size=3, stride=2), CapsuleSpec(32, kernel_size=3))
"""Tables 6 to 9: two layers of 32 capsule types."""

CIFAR: dict[str, Any] = {"image_size": 32, "in_channels": 3}
DMM: dict[str, Any] = {"classes": 10, "image_size": 36, "in_channels": 1}
"""DiverseMultiMNIST."""

SQUASHED: dict[str, Any] = {"normalize": "squash"}
DYNAMIC: dict[str, Any] = {"layer": DynamicRouting, "pose": "vector", "iterations": 3, "class_layer": {"dim": 16}}
EM: dict[str, Any] = {
    "layer": EMRouting,
    "primary": {"normalize": None},
    "class_layer": {"kernel_size": "all", "share": True, "options": {"coordinates": True}},
}


def attention(backbone: tuple[Layer, ...], dim: int, classes: int) -> NetworkConfig:
    """Return a network of Table 8, or of Table 9 with one more layer for 100 classes."""
    hidden = (*PAIR, CapsuleSpec(20)) if classes == 100 else PAIR
    return NetworkConfig(backbone, capsules=32, dim=dim, hidden=hidden, classes=classes, **CIFAR)


def dynamic(classes: int, backbone: tuple[Layer, ...], stride: int) -> NetworkConfig:
    """Return a network of Tables 4 and 5, where a 9 x 9 convolution returns 8 x 8 positions of 32 capsules."""
    primary = {**SQUASHED, "kernel_size": 9, "stride": stride}
    return NetworkConfig(backbone, capsules=32, dim=8, classes=classes, primary=primary, **CIFAR, **DYNAMIC)


def em(classes: int, backbone: tuple[Layer, ...]) -> NetworkConfig:
    """Return a network of Tables 6 and 7."""
    return NetworkConfig(backbone, capsules=32, dim=16, hidden=PAIR, classes=classes, iterations=2, **CIFAR, **EM)


def dmm(types: int = 16, **more: Any) -> NetworkConfig:
    """Return a network of Tables 10 and 11, with poses of 64 values."""
    backbone = (Conv(1024, 3, stride=2, padding=1),)
    primary = {"kernel_size": 3, "stride": 2, **more.pop("primary", {})}
    hidden = (CapsuleSpec(types, kernel_size=3),)
    return NetworkConfig(backbone, capsules=types, dim=64, hidden=hidden, primary=primary, **DMM, **more)


def cnn(classes: int) -> CNNConfig:
    """Return a network of Tables 2 and 3."""
    first = Conv(1024, 3, stride=2, padding=1)
    pair = (Conv(1024, 3, stride=2, padding=1, order="layer relu norm"), Pool("average", 2))
    return CNNConfig((first, *pair, *pair, nn.Flatten, Linear()), classes=classes, **CIFAR)


def dmm_cnn(*end: Layer) -> CNNConfig:
    """Return a network of Table 12."""
    convs = (
        Conv(1024, 3, stride=2, padding=1),
        Conv(1024, 3, stride=2, order="layer relu norm"),
        Conv(1024, 3, order="layer relu norm"),
    )
    return CNNConfig((*convs, *end, Linear()), **DMM)


def resnet18(classes: int) -> CNNConfig:
    """Return He et al.'s (2016) network with a 3 x 3 convolution before the blocks, as usual for small images."""
    blocks = (Blocks(64, 2), Blocks(128, 2, stride=2), Blocks(256, 2, stride=2), Blocks(512, 2, stride=2))
    return CNNConfig((STEM, *blocks, Pool("average"), nn.Flatten, Linear()), classes=classes, **CIFAR)


NETWORKS: dict[str, Config] = {
    "tsai-iar-simple-c10": attention(simple(256), 16, 10),
    "tsai-iar-simple-c100": attention(simple(128), 36, 100),
    "tsai-iar-resnet-c10": attention(resnet(128), 16, 10),
    "tsai-iar-resnet-c100": attention(resnet(128), 36, 100),
    "tsai-dmm-matrix": dmm(),
    "tsai-dmm-matrix-42m": dmm(types=64),
    "tsai-dmm-vector": dmm(pose="vector"),
    "tsai-dmm-dynamic": dmm(primary=SQUASHED, layer=DynamicRouting, pose="vector", iterations=3),
    "tsai-dmm-cnn": dmm_cnn(Conv(640, 1, order="layer"), Pool("average"), nn.Flatten),
    "tsai-dmm-cnn-learned": dmm_cnn(nn.Flatten, Linear(640)),
}
for _classes in (10, 100):
    NETWORKS |= {
        f"tsai-dr-simple-c{_classes}": dynamic(_classes, (Conv(256, 9),), stride=2),
        f"tsai-dr-resnet-c{_classes}": dynamic(_classes, resnet(256), stride=1),
        f"tsai-em-simple-c{_classes}": em(_classes, (Conv(256, 4, stride=2, padding=1, order="layer norm relu"),)),
        f"tsai-em-resnet-c{_classes}": em(_classes, resnet(128)),
        f"tsai-cnn-c{_classes}": cnn(_classes),
        f"resnet18-c{_classes}": resnet18(_classes),
    }
