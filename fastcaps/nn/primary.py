"""The first capsules of a network: a convolution whose channels are grouped into poses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.checks import check_choice, check_finite
from fastcaps.nn.layer import Pair
from fastcaps.nn.poses import arguments_repr, normalize_poses, positive, require_tensor, shape_of
from fastcaps.results import Capsules
from fastcaps.vectors import squash
from fastcaps.votes import Window


class PrimaryCapsules(nn.Module):
    r"""Turn a feature map into a grid of capsules: convolution, then LayerNorm over each pose's numbers, or a squash.

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
    kernel_size, stride, padding, dilation : int or pair
        The convolution's.
    bias : bool
        Whether the convolution has a bias.
    normalize : "layer_norm", "squash" or None
        LayerNorm over the pose, its affine shared by all capsules (skipped where d = 1); or squashed poses, of lengths
        below 1, as dynamic routing wants them (:func:`fastcaps.vectors.squash`); or poses as they are.
    activations : bool
        Also give every capsule an activation, the sigmoid of one more channel of a convolution of the same window (as
        the paper's Table 6 does for EM routing).
    eps : float, optional
        LayerNorm's, 1e-5 by default, or the squash's, 0 by default.

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
        kernel_size: Pair = 1,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        bias: bool = True,
        normalize: str | None = "layer_norm",
        activations: bool = False,
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = positive(in_channels, "in_channels")
        self.capsules = positive(capsules, "capsules")
        self.dim = positive(dim, "dim")
        if normalize is not None:
            check_choice("normalize", normalize, ("layer_norm", "squash"))
        self.normalize = normalize
        self.activations = bool(activations)
        self.eps = eps if eps is None else check_finite("eps", eps, 0.0)
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        def convolution(channels: int, bias: bool) -> nn.Conv2d:
            each: Any = Window(kernel_size, stride, padding, dilation)
            window = {name: getattr(each, name) for name in ("kernel_size", "stride", "padding", "dilation")}
            return nn.Conv2d(self.in_channels, channels, bias=bias, **window, **place)

        self.conv = convolution(self.capsules * self.dim, bias)
        self.activation_conv = convolution(self.capsules, True) if activations else None
        self.norm: nn.LayerNorm | None = None
        if normalize == "layer_norm" and self.dim > 1:
            self.norm = nn.LayerNorm(self.dim, eps=1e-5 if self.eps is None else self.eps, **place)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for module in (self.conv, self.activation_conv, self.norm):
            if module is not None:
                module.reset_parameters()

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The grid (height, width) of capsules for a feature map of ``size``."""
        conv: Any = self.conv
        return Window(conv.kernel_size, conv.stride, conv.padding, conv.dilation).output_size(*size)

    def forward(self, features: Tensor) -> Tensor | Capsules:
        """Make capsules of ``features``.

        Parameters
        ----------
        features : Tensor
            ``[B, in_channels, H, W]``.

        Returns
        -------
        Tensor or Capsules
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
        features = features.movedim(1, -1).contiguous().movedim(-1, 1)  # channels last, in words that vmap knows
        stored = self.conv(features).permute(0, 2, 3, 1)  # [B, H, W, N*d]; contiguous unless the convolution chose not
        poses = stored.contiguous().unflatten(-1, (self.capsules, self.dim)).permute(0, 3, 1, 2, 4)
        if self.norm is not None:
            poses = normalize_poses(poses, self.norm)
        elif self.normalize == "squash":
            poses = squash(poses, eps=self.eps or 0.0)
        if self.activation_conv is None:
            return poses
        return Capsules(poses, torch.sigmoid(self.activation_conv(features)))

    extra_repr = arguments_repr
