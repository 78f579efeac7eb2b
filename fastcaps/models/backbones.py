"""What stands before the capsules: ordinary convolutions that make a feature map of an image."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SimpleBackbone(nn.Sequential):
    """One 3 x 3 convolution of stride 2 and ReLU (Tsai et al., Tables 8 and 9).

    Parameters
    ----------
    in_channels, channels : int
        Of the image and of the feature map, whose height and width are half the image's.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__(nn.Conv2d(in_channels, channels, 3, stride=2, padding=1), nn.ReLU())


class BasicBlock(nn.Module):
    """A residual block of two 3 x 3 convolutions (He et al., 2016); the shortcut is a 1 x 1 convolution where the
    shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_channels, H, W]`` to ``[B, channels, H / stride, W / stride]``."""
        inner = F.relu(self.bn1(self.conv1(features)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(features))


class ResNetBackbone(nn.Sequential):
    """The paper's ResNet backbone (appendix A.1): 3 x 3 convolution to 64, three blocks of 64, four of ``channels``
    at stride 2.

    Parameters
    ----------
    in_channels, channels : int
        Of the image and of the feature map, whose height and width are half the image's.
    """

    def __init__(self, in_channels: int, channels: int = 128) -> None:
        super().__init__(
            nn.Conv2d(in_channels, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            *(BasicBlock(64, 64) for _ in range(3)),
            BasicBlock(64, channels, stride=2),
            *(BasicBlock(channels, channels) for _ in range(3)),
        )


class SmallBackbone(nn.Sequential):
    """Two 3 x 3 convolutions with BatchNorm and ReLU, each of stride ``stride``: for small grey images on a CPU.

    Parameters
    ----------
    in_channels, channels : int
        Of the image and of the feature map.
    stride : int
        Of the first convolution and of the second.
    """

    def __init__(self, in_channels: int, channels: int, stride: tuple[int, int] = (2, 2)) -> None:
        half = max(1, channels // 2)
        super().__init__(
            nn.Conv2d(in_channels, half, 3, stride=stride[0], padding=1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(),
            nn.Conv2d(half, channels, 3, stride=stride[1], padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
