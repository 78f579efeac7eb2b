"""The networks of Sabour, Frosst and Hinton (2017), Dynamic Routing Between Capsules: Figures 1 and 2, section 5.

:func:`fastcaps.losses.margin_loss` trains the class capsules' lengths; ``net(images, reconstruct=labels)`` also returns
reconstructions, for :func:`fastcaps.losses.reconstruction_loss`. Of two overlapping digits (MultiMNIST) each needs its
own call of ``net.decoder``. lab/docs/networks.md lists our choices.
"""

from __future__ import annotations

from torch import nn

from fastcaps.nn import DynamicRouting
from fastcaps_lab.models.layers import Conv, Linear
from fastcaps_lab.models.networks import CNNConfig, Config, NetworkConfig


def capsules(image_size: int) -> NetworkConfig:
    """Return the network of Figure 1, for an image size."""
    return NetworkConfig(
        (Conv(256, 9),),
        capsules=32,
        dim=8,
        classes=10,
        image_size=image_size,
        in_channels=1,
        layer=DynamicRouting,
        pose="vector",
        iterations=3,
        primary={"kernel_size": 9, "stride": 2, "normalize": "squash"},
        class_layer={"dim": 16},
        decoder=True,
    )


NETWORKS: dict[str, Config] = {
    "sabour-mnist": capsules(28),
    "sabour-multimnist": capsules(36),
    "sabour-affnist": capsules(40),
    "sabour-cnn": CNNConfig(
        (
            Conv(256, 5, padding=2),
            Conv(256, 5, padding=2),
            Conv(128, 5, padding=2),
            nn.Flatten,
            Linear(328, order="layer relu"),
            Linear(192, order="layer relu"),
            nn.Dropout,  # of 0.5
            Linear(),
        ),
        classes=10,
        image_size=28,
        in_channels=1,
    ),
}
