"""The first capsules of a network: a convolution whose channels are grouped into poses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.checks import (
    check_choice,
    check_count,
    check_dtype,
    check_finite,
    check_flag,
    check_map,
    check_parameters_dtype,
    known_arguments,
    shape_text,
)
from fastcaps.nn.layer import Pair
from fastcaps.nn.poses import arguments_repr, channels_last, normalize_poses
from fastcaps.results import Capsules
from fastcaps.vectors import squash
from fastcaps.votes import Window


class PrimaryCapsules(nn.Module):
    r"""Make a grid of capsules from a feature map: a convolution, then LayerNorm or squash of each pose.

    .. math:: P_{n} = \mathrm{LayerNorm}\big((\mathrm{conv}\,F)_{nd \ldots (n+1)d}\big)

    In memory the result is ``[B, H, W, N, d]``, the order that the routing layers read fastest. A channels_last
    convolution writes it, so features that are channels_last are never copied.

    Parameters
    ----------
    in_channels : int
        Channels of the feature map.
    capsules : int
        Capsule types N at every position.
    dim : int
        Components of a pose, d; the convolution has ``N * d`` output channels.
    kernel_size, stride, padding, dilation : int or pair
        Of the convolution. ``kernel_size=None`` uses no convolution: the features' ``N * d`` channels are the poses,
        followed by ``N`` channels of activations if ``activations``.
    bias : bool
        Whether the convolution has a bias.
    normalize : "layer_norm", "squash" or None
        LayerNorm over each pose, with one affine map for all capsules (skipped if d = 1); or squash
        (:func:`fastcaps.vectors.squash`), to lengths below 1, for dynamic routing; or neither.
    activations : bool
        Also return an activation of every capsule: the sigmoid of another convolution with the same window (as in
        Table 6 of Tsai et al. for EM routing).
    scores : bool
        With ``activations=True``: return scores for Heinsen routing, the activations without the sigmoid.
    batch_norm : bool
        BatchNorm of the features before each convolution (Heinsen, 2019, Figure 3d).
    eps : float, optional
        Of LayerNorm, by default 1e-5, or of squash, by default 0.

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

    @known_arguments
    def __init__(
        self,
        in_channels: int,
        capsules: int,
        dim: int,
        *,
        kernel_size: Pair | None = 1,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        bias: bool = True,
        normalize: str | None = "layer_norm",
        activations: bool = False,
        scores: bool = False,
        batch_norm: bool = False,
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        self.in_channels = check_count("in_channels", in_channels)
        self.capsules = check_count("capsules", capsules)
        self.dim = check_count("dim", dim)
        check_choice("normalize", normalize, ("layer_norm", "squash", None))
        self.normalize = normalize
        self.activations = check_flag("activations", activations)
        self.scores = check_flag("scores", scores)
        bias, batch_norm = check_flag("bias", bias), check_flag("batch_norm", batch_norm)
        if self.scores and not self.activations:
            raise ValueError("activations must be True with scores=True, got False")
        self.eps = eps if eps is None else check_finite("eps", eps, 0.0)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.window = None if kernel_size is None else Window(kernel_size, stride, padding, dilation)
        if self.window is None:
            if batch_norm or not bias or (stride, padding, dilation) != (1, 0, 1):
                raise ValueError(
                    "stride, padding, dilation, bias and batch_norm need a kernel_size: without one there is no "
                    "convolution"
                )
            wanted = self.capsules * (self.dim + self.activations)
            if self.in_channels != wanted:
                raise ValueError(
                    f"in_channels must be {wanted} with kernel_size=None, for {self.capsules} capsules of {self.dim}"
                    + f" values{' and their activations' if activations else ''}; got {self.in_channels}"
                )
        self.conv = self._convolution(self.capsules * self.dim, bias, place)
        self.activation_conv = self._convolution(self.capsules, True, place) if activations else None
        self.batch_norm = nn.BatchNorm2d(self.in_channels, **place) if batch_norm else None
        both = batch_norm and activations
        self.activation_batch_norm = nn.BatchNorm2d(self.in_channels, **place) if both else None
        self.norm: nn.LayerNorm | None = None
        if normalize == "layer_norm" and self.dim > 1:
            self.norm = nn.LayerNorm(self.dim, eps=1e-5 if self.eps is None else self.eps, **place)

    def _convolution(self, channels: int, bias: bool, place: dict[str, Any]) -> nn.Conv2d | None:
        if self.window is None:
            return None
        each: Any = self.window
        window = {name: getattr(each, name) for name in ("kernel_size", "stride", "padding", "dilation")}
        return nn.Conv2d(self.in_channels, channels, bias=bias, **window, **place)

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the grid (height, width) of capsules for a feature map of ``size``."""
        return size if self.window is None else self.window.output_size(*size)

    def forward(self, features: Tensor) -> Tensor | Capsules:
        """Return the capsules of ``features`` ``[B, in_channels, H, W]``: poses ``[B, N, Ho, Wo, d]``.

        With ``activations=True`` also activations in (0, 1), ``[B, N, Ho, Wo]``, or scores.
        """
        check_map("features", features, self.in_channels)
        rows, columns = self.output_size((features.shape[2], features.shape[3]))
        if rows < 1 or columns < 1:
            raise ValueError(f"features {shape_text(features)} are smaller than the window of {self.window}")
        if self.conv is not None:
            check_parameters_dtype("features", features, self.conv.weight)
        stored, active = self._convolve(channels_last(features))
        poses = channels_last(stored).unflatten(1, (self.capsules, self.dim)).permute(0, 1, 3, 4, 2)
        if self.norm is not None:
            poses = normalize_poses(poses, self.norm)
        elif self.normalize == "squash":
            poses = squash(poses, eps=self.eps or 0.0)
        if active is None:
            return poses
        return Capsules(poses, active if self.scores else torch.sigmoid(active))

    def _convolve(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the poses' channels ``[B, N * d, Ho, Wo]`` and the scores ``[B, N, Ho, Wo]`` or None."""
        if self.conv is None:
            numbers = self.capsules * self.dim
            return features[:, :numbers], features[:, numbers:] if self.activations else None
        stored = self.conv(features if self.batch_norm is None else self.batch_norm(features))
        if self.activation_conv is None:
            return stored, None
        if self.activation_batch_norm is not None:
            features = self.activation_batch_norm(features)
        return stored, self.activation_conv(features)

    extra_repr = arguments_repr
