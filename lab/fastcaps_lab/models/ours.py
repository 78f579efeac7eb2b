"""Our own networks, small enough to train in a minute or two on two CPU cores."""

from __future__ import annotations

from fastcaps.nn import CapsuleSpec
from fastcaps_lab.models.layers import small
from fastcaps_lab.models.networks import Config, NetworkConfig

NETWORKS: dict[str, Config] = {
    "mnist": NetworkConfig(
        small(64, stride=2),
        capsules=16,
        dim=16,
        hidden=(CapsuleSpec(16, kernel_size=3, stride=2),),
        classes=10,
        image_size=28,
        in_channels=1,
    ),
    "digits": NetworkConfig(
        small(32, stride=1),
        capsules=8,
        dim=16,
        hidden=(CapsuleSpec(8, kernel_size=3),),
        classes=10,
        image_size=8,
        in_channels=1,
    ),
}
