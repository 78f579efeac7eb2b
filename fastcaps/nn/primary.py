"""The first capsules of a network: a convolution whose channels are grouped into poses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.checks import check_choice, check_count, check_finite, check_map, known_arguments, shape_text
from fastcaps.nn.layer import Pair
from fastcaps.nn.poses import arguments_repr, channels_last, normalize_poses
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
        The convolution's. ``kernel_size=None``: there is none, the features' channels are the poses' numbers, ``N * d``
        of them, and ``N`` more for the activations if there are any.
    bias : bool
        Whether the convolution has a bias.
    normalize : "layer_norm", "squash" or None
        LayerNorm over the pose, its affine shared by all capsules (skipped where d = 1); or squashed poses, of lengths
        below 1, as dynamic routing wants them (:func:`fastcaps.vectors.squash`); or poses as they are.
    activations : bool
        Also give every capsule an activation, the sigmoid of one more channel of a convolution of the same window (as
        Table 6 of Tsai et al. does for EM routing).
    scores : bool
        Leave the activations as they are, without the sigmoid: scores, as Heinsen's routing wants them. For
        ``activations=True``.
    batch_norm : bool
        BatchNorm of the features before each convolution (Heinsen, 2019, Figure 3d).
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
        self.in_channels = check_count("in_channels", in_channels)
        self.capsules = check_count("capsules", capsules)
        self.dim = check_count("dim", dim)
        if normalize is not None:
            check_choice("normalize", normalize, ("layer_norm", "squash"))
        self.normalize = normalize
        self.activations = bool(activations)
        self.scores = bool(scores)
        if self.scores and not self.activations:
            raise ValueError("scores must be False with activations=False: there are none")
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
                    + f" numbers{' and their activations' if activations else ''}; got {self.in_channels}"
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
        """Draw the parameters anew."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The grid (height, width) of capsules for a feature map of ``size``."""
        return size if self.window is None else self.window.output_size(*size)

    def forward(self, features: Tensor) -> Tensor | Capsules:
        """Make capsules of ``features``.

        Parameters
        ----------
        features : Tensor
            ``[B, in_channels, H, W]``.

        Returns
        -------
        Tensor or Capsules
            Poses ``[B, N, Ho, Wo, d]``; with ``activations=True`` also activations in (0, 1), ``[B, N, Ho, Wo]``, or
            scores.
        """
        check_map("features", features, self.in_channels)
        rows, columns = self.output_size((features.shape[2], features.shape[3]))
        if rows < 1 or columns < 1:
            raise ValueError(f"features {shape_text(features)} are smaller than the window of {self.window}")
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
        """Return the poses' numbers ``[B, N * d, Ho, Wo]`` and the scores ``[B, N, Ho, Wo]`` if there are any."""
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
