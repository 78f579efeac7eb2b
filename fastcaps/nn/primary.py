"""The first capsules of a network: a convolution whose channels are grouped into poses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.nn.poses import normalize_poses, positive, require_tensor, shape_of


class PrimaryCapsules(nn.Module):
    r"""Turn a feature map into a grid of capsules: convolution, then LayerNorm over each pose's numbers.

    .. math:: P_{n} = \mathrm{LayerNorm}\big((\mathrm{conv}\,F)_{nd \ldots (n+1)d}\big)

    The result lies in memory as ``[B, H, W, N, d]``, a position's capsules together, as the routing layers want them.
    That is how a channels_last convolution writes its channels, so features that are channels_last already are not
    copied on the way.

    Parameters
    ----------
    in_channels : int
        Channels of the feature map.
    capsules : int
        Capsule types N at every position.
    dim : int
        Numbers in a pose, d; the convolution has ``N * d`` output channels.
    kernel_size, stride, padding : int or pair
        The convolution's.
    bias : bool
        Whether the convolution has a bias.
    layer_norm : bool
        LayerNorm over the pose, its affine shared by all capsules. Skipped where d = 1.
    activations : bool
        Also give every capsule an activation, the sigmoid of one more channel of a convolution of the same window (as
        the paper's Table 6 does for EM routing).

    Examples
    --------
    >>> import torch
    >>> primary = PrimaryCapsules(64, capsules=8, dim=16)
    >>> poses = primary(torch.randn(2, 64, 10, 12))
    >>> poses.shape
    torch.Size([2, 8, 10, 12, 16])
    >>> poses.permute(0, 2, 3, 1, 4).is_contiguous()
    True
    """

    def __init__(
        self,
        in_channels: int,
        capsules: int,
        dim: int,
        *,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        layer_norm: bool = True,
        activations: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.capsules = positive(capsules, "capsules")
        self.dim = positive(dim, "dim")
        self.in_channels = positive(in_channels, "in_channels")

        def convolution(channels: int, bias: bool) -> nn.Conv2d:
            return nn.Conv2d(in_channels, channels, kernel_size, stride, padding, bias=bias, device=device, dtype=dtype)

        self.conv = convolution(capsules * dim, bias)
        self.activation_conv = convolution(capsules, True) if activations else None
        self.norm = nn.LayerNorm(dim, eps=eps, device=device, dtype=dtype) if layer_norm and dim > 1 else None

    @property
    def activations(self) -> bool:
        """Whether the capsules come with activations."""
        return self.activation_conv is not None

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The grid (height, width) of capsules for a feature map of ``size``."""
        kernel, stride, padding = self.conv.kernel_size, self.conv.stride, self.conv.padding
        rows, columns = ((size[k] + 2 * int(padding[k]) - kernel[k]) // stride[k] + 1 for k in range(2))
        return rows, columns

    def forward(self, features: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Make capsules of ``features``.

        Parameters
        ----------
        features : Tensor
            ``[B, in_channels, H, W]``.

        Returns
        -------
        Tensor or (Tensor, Tensor)
            Poses ``[B, N, Ho, Wo, d]``; with ``activations=True`` also activations in (0, 1), ``[B, N, Ho, Wo]``.
        """
        require_tensor(features, "features")
        if features.dim() != 4 or features.shape[1] != self.in_channels:
            raise ValueError(f"features must be [B, {self.in_channels}, H, W], got {shape_of(features)}")
        rows, columns = self.output_size((features.shape[2], features.shape[3]))
        if rows < 1 or columns < 1:
            raise ValueError(
                f"features {shape_of(features)} are smaller than the window of kernel_size {self.conv.kernel_size}"
            )
        features = features.contiguous(memory_format=torch.channels_last)
        stored = self.conv(features).permute(
            0, 2, 3, 1
        )  # [B, H, W, N*d]; contiguous unless the convolution chose otherwise
        poses = stored.contiguous().unflatten(-1, (self.capsules, self.dim)).permute(0, 3, 1, 2, 4)
        if self.norm is not None:
            poses = normalize_poses(poses, self.norm)
        if self.activation_conv is None:
            return poses
        return poses, torch.sigmoid(self.activation_conv(features))

    def extra_repr(self) -> str:
        """The capsules made."""
        return f"capsules={self.capsules}, dim={self.dim}"
