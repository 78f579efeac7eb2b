"""The networks with which Li et al. (2018), Neural Network Encapsulation, compare :mod:`fastcaps_lab.encapnet`'s.

CapNet: rows (a) and (b) of Table 1, section 2.2 and appendix A. The others have no capsules: rows (c) and (d), the
latter widened to about six times the size, and ``li-resnet18`` of Table 2; these can have feedback units, too (Table
3). lab/docs/networks.md and lab/docs/encapnet.md list our choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastcaps.nn import CapsuleSpec, DynamicRouting, EMRouting
from fastcaps_lab.checks import image_size
from fastcaps_lab.encapnet import networks as encapnet
from fastcaps_lab.models.layers import Blocks, Conv
from fastcaps_lab.models.networks import Config, NetworkConfig


def capnet(channels: int, order: str, layer: Any, normalize: str | None, **options: Any) -> NetworkConfig:
    """Return a CapNet; its fourth convolution has so many channels and this order of modules."""
    convs = ((32, 1, "layer norm relu"), (64, 1, "layer norm relu"), (128, 2, "layer norm relu"), (channels, 2, order))
    return NetworkConfig(
        tuple(Conv(width, 3, stride=stride, padding=1, bias=False, order=words) for width, stride, words in convs),
        capsules=32,
        dim=8,
        hidden=(CapsuleSpec(512, dim=16, kernel_size="all", share=True),),
        classes=10,
        image_size=32,
        in_channels=3,
        layer=layer,
        pose="vector",
        iterations=3,
        primary={"kernel_size": None, "normalize": normalize},
        class_layer={"kernel_size": "all", "share": True, "types": 32},
        options=options,
    )


class Stage(nn.Module):
    """Residual blocks that return two maps, as :class:`~fastcaps_lab.encapnet.networks.EncapModule` does."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.rest = blocks[0], nn.Sequential(*blocks[1:])

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features after the first block, and those at the end."""
        first = self.first(features)
        return first, self.rest(first)


@dataclass(frozen=True)
class PlainNetConfig(encapnet.FeedbackConfig):
    """The configuration of the paper's convolutional networks."""

    classes: int = 10
    image_size: int | tuple[int, int] = 32  # of the paper's images
    in_channels: int = 3
    stem: tuple[tuple[int, int], ...] = ((32, 1),)  # 3 x 3 convolutions with BatchNorm and ReLU: channels, stride
    stages: tuple[tuple[int, int, int], ...] = ()  # residual blocks: channels, how many, stride of the first

    def build(self) -> encapnet.EncapNet:
        """Return the network with new weights."""
        size, channels = image_size(self.image_size), self.in_channels
        stem = encapnet.convolutions(channels, [(width, 3, stride) for width, stride in self.stem])
        channels = self.stem[-1][0] if self.stem else channels
        modules, units = [], []
        for width, blocks, stride in self.stages:
            modules.append(Stage(Blocks(width, blocks, stride).modules((channels,), None)))
            units.append(self.units(channels, width, stride, blocks > 1, None))
            channels = width
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes))
        return encapnet.EncapNet(stem, modules, units, head, in_channels=self.in_channels, image_size=size)


NETWORKS: dict[str, Config] = {
    "li-capnet-dynamic": capnet(256, "layer norm relu", DynamicRouting, "squash", compete="children"),
    "li-capnet-em": capnet(256 + 32, "layer norm", EMRouting, None, normalize_cost=True),
    "li-cnn-same": PlainNetConfig(stem=((32, 1), (64, 1), (128, 2), (256, 2), (512, 2))),
    "li-cnn-large": PlainNetConfig(stem=((80, 1), (160, 1), (320, 2), (640, 2), (1280, 2))),
    "li-resnet18": PlainNetConfig(stages=((64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2))),
}
