"""The networks of Zhao and Huang (2019), Exploring Dynamic Routing As A Pooling Layer: Tables 1, 2 and 4, Figure 2.

lab/docs/networks.md lists our choices.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fastcaps.nn import RoutingPool
from fastcaps_lab.models.layers import Blocks, Conv, Layer, Linear, Pool
from fastcaps_lab.models.networks import CNNConfig, Config, NetworkConfig


def resnet(depth: int) -> tuple[Layer, ...]:
    """Return He et al.'s network of depth 6 n + 2, without its last two layers."""
    count = (depth - 2) // 6
    return (
        Conv(16, 3, padding=1, bias=False, order="layer norm relu"),
        Blocks(16, count, shortcut="pad"),
        Blocks(32, count, stride=2, shortcut="pad"),
        Blocks(64, count, stride=2, shortcut="pad"),
    )


def capsules(image_size: int, sharpness: float) -> NetworkConfig:
    """Return the network of Figure 2."""
    return NetworkConfig(
        resnet(20),
        capsules=2,
        dim=32,
        classes=10,
        image_size=image_size,
        in_channels=1,
        layer=RoutingPool,
        pose="vector",
        iterations=3,
        primary={"kernel_size": None, "normalize": None},
        class_layer={"dim": 16, "kernel_size": "all", "share": True},
        options={"sharpness": sharpness, "activation": "squash"},
        decoder=True,
    )


CIFAR: dict[str, Any] = {"classes": 10, "image_size": 32, "in_channels": 3}

NETWORKS: dict[str, Config] = {"zhao-affnist": capsules(40, 1.0), "zhao-multimnist": capsules(36, 5.0)}
for _kind in ("max", "average", "routing"):
    _convs = (Conv(64, 5, padding=2),) * 4
    NETWORKS[f"zhao-cnn-{_kind}"] = CNNConfig((*_convs, Pool(_kind), nn.Flatten, Linear()), **CIFAR)
for _depth in (20, 32, 44, 56):
    for _pool in (Pool("average"), Pool("routing", sharpness=5.0)):
        NETWORKS[f"zhao-resnet{_depth}-{_pool.kind}"] = CNNConfig(
            (*resnet(_depth), _pool, nn.Flatten, Linear()), **CIFAR
        )
