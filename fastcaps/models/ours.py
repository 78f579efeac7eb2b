"""Networks of ours, small enough to train on two CPU cores while one watches."""

from __future__ import annotations

from fastcaps.models.networks import Config, NetworkConfig
from fastcaps.nn.stack import CapsuleSpec

__all__ = ["NETWORKS"]

NETWORKS: dict[str, Config] = {
    "mnist": NetworkConfig("small", 64, 16, 16, (CapsuleSpec(16, kernel_size=3, stride=2),), 10, 28, 1),
    "digits": NetworkConfig("tiny", 32, 8, 16, (CapsuleSpec(8, kernel_size=3),), 10, 8, 1),
}
