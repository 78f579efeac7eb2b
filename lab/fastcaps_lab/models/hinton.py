"""The network of Hinton, Sabour and Frosst (2018), Matrix Capsules with EM Routing, for smallNORB: Figure 1.

A = B = C = D = 32. lab/docs/networks.md lists our choices.
"""

from __future__ import annotations

from fastcaps.nn import CapsuleSpec, EMRouting
from fastcaps_lab.models.layers import Conv
from fastcaps_lab.models.networks import Config, NetworkConfig

NETWORKS: dict[str, Config] = {
    "hinton-norb": NetworkConfig(
        (Conv(32, 5, stride=2),),
        capsules=32,
        dim=16,
        hidden=(CapsuleSpec(32, kernel_size=3, stride=2), CapsuleSpec(32, kernel_size=3)),
        classes=5,
        image_size=32,
        in_channels=2,
        layer=EMRouting,
        iterations=3,
        primary={"normalize": None},
        class_layer={"kernel_size": "all", "share": True, "options": {"coordinates": True}},
    )
}
