"""The capsule networks that Li et al. (2018), Neural Network Encapsulation, compare theirs with: rows (a) and (b) of
Table 1, section 2.2 and appendix A.

Four convolutions with BatchNorm and ReLU make a map of 8 x 8 places with 32 capsules of 8 numbers. The fifth layer
routes them to capsules of 16 numbers, its matrices shared over space; those, laid out as 32 types again, are routed to
the classes, whose matrices are shared likewise. Three turns each.

The text counts 2,048 capsules in the fifth layer and the code has 512, which we follow; ``create(..., parents=2048)``
gives the text's. What the appendix found out are options, and on as there: the softmax of dynamic routing runs over the
children (``compete="parents"`` is Sabour et al.'s), and EM's cost is normalised before its sigmoid
(``normalize_cost=False`` leaves it alone). So are the initial logits of its Table 5: ``prior="random"``, ``"learned"``.

Ours, as the text does not say: channels of 32, 64, 128 and 256, strides of 2 in the last two; for EM, 32 channels more
in the fourth convolution for the activations, and no ReLU there, which would keep them above a half. The table's sizes,
151.24 and 152.44 "Mb", cannot be reached by this text: the parameters below take 10.3 and 10.4 MB as float32 (with
2,048 capsules 35 MB).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from fastcaps.models.layers import Conv
from fastcaps.models.networks import Config, NetworkConfig
from fastcaps.nn.capsnet import CapsNet
from fastcaps.nn.dynamic import DynamicRouting
from fastcaps.nn.em import EMRouting
from fastcaps.nn.stack import CapsuleSpec

__all__ = ["NETWORKS", "CapNetConfig"]


@dataclass(frozen=True)
class CapNetConfig(NetworkConfig):
    """The configuration of a CapNet.

    Attributes
    ----------
    parents : int
        Capsules of the fifth layer: a multiple of 32.
    """

    _: KW_ONLY
    parents: int = 512

    def build(self) -> CapsNet:
        """Make the network, freshly drawn."""
        first = CapsuleSpec(self.parents, dim=16, kernel_size="all", share=True)
        return super(CapNetConfig, replace(self, hidden=(first,))).build()


def convolutions(channels: int, last: str) -> tuple[Conv, ...]:
    """The first four layers."""
    options = {"padding": 1, "bias": False}
    widths = ((32, 1), (64, 1), (128, 2))
    first = (Conv(width, 3, stride=stride, order="conv norm relu", **options) for width, stride in widths)  # type: ignore[arg-type]
    return *first, Conv(channels, 3, stride=2, order=last, **options)  # type: ignore[arg-type]


CLASSES = {"kernel_size": "all", "share": True, "types": 32}

NETWORKS: dict[str, Config] = {
    "li-capnet-dynamic": CapNetConfig(
        convolutions(256, "conv norm relu"),
        capsules=32,
        dim=8,
        classes=10,
        image_size=32,
        in_channels=3,
        layer=DynamicRouting,
        pose="vector",
        iterations=3,
        primary={"kernel_size": None, "normalize": "squash"},
        class_layer=CLASSES,
        options={"compete": "children"},
    ),
    "li-capnet-em": CapNetConfig(
        convolutions(256 + 32, "conv norm"),
        capsules=32,
        dim=8,
        classes=10,
        image_size=32,
        in_channels=3,
        layer=EMRouting,
        pose="vector",
        iterations=3,
        primary={"kernel_size": None, "normalize": None},
        class_layer=CLASSES,
        options={"normalize_cost": True},
    ),
}
