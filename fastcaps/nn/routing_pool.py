"""Routing as pooling: a layer of capsules, and a drop-in for pooling layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps import functional
from fastcaps.checks import check_count, check_dtype, check_finite, check_flag, check_map, known_arguments, shape_text
from fastcaps.functional.pooling import activation_function
from fastcaps.nn.layer import LayerCall, LayerOptions, RoutingLayer
from fastcaps.nn.poses import arguments_repr, channels_last
from fastcaps.results import Routed
from fastcaps.votes import Window

Activation = str | Callable[[Tensor], Tensor]


class RoutingPool(RoutingLayer[Tensor, Routed]):
    r"""Route child capsules to parents by vector-normed pooling (Zhao & Huang, 2019, Algorithm 1).

    The equation is that of :func:`fastcaps.functional.routing_pool`: the **children** compete for each parent, which is
    a weighted mean of their votes. The kernels store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias,
    break_symmetry, iterations, device, dtype
        See :class:`~fastcaps.nn.layer.RoutingLayer`; ``iterations`` may be 0; one more sum follows.
    sharpness, activation, detach
        See :func:`fastcaps.functional.routing_pool`.

    Calls
    -----
    ``activations``, not negative, are the children's weights in the softmax: 0 for a child that does not exist. A call
    also takes another ``sharpness``.

    Examples
    --------
    >>> import torch
    >>> layer = RoutingPool(8, 4, 16, 16, kernel_size=3)
    >>> layer(torch.randn(2, 8, 9, 9, 16)).shape
    torch.Size([2, 4, 7, 7, 16])
    """

    head = "length"
    compete = "children"
    call_options = ("sharpness",)
    fewest_iterations = 0

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 3,
        sharpness: float = 0.5,
        activation: Activation | None = None,
        detach: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_capsules, out_capsules, in_dim, out_dim, iterations=iterations, **options)
        self.sharpness = check_finite("sharpness", sharpness, 0.0)
        activation_function(activation)  # raises if it is invalid
        self.activation, self.detach = activation, check_flag("detach", detach)
        self.reset_parameters()

    def first_std(self) -> float:
        """``1 / sqrt(D)``."""
        return 1.0 / math.sqrt(self.pose_shape[1])

    def run(
        self, call: LayerCall, iterations: int, return_coefficients: bool, *, sharpness: float | None = None
    ) -> Tensor | Routed:
        """Return the routing of a checked call."""
        return functional.routing_pool(
            call.children,
            weight=call.weight,
            bias=call.bias,
            gate=call.activity,
            parents=call.parent_count,
            iterations=iterations,
            sharpness=self.sharpness if sharpness is None else sharpness,
            activation=self.activation,
            detach=self.detach,
            window=call.window,
            return_coefficients=return_coefficients,
        )


class RoutingPool2d(nn.Module):
    r"""Pool a feature map by routing (Zhao & Huang, 2019, Algorithm 1), instead of averaging.

    Every ``dim`` consecutive channels at one position are a capsule. Capsules that agree with the others weigh more:
    λ = 0 is average pooling, a large λ nearly selects one capsule. A drop-in for ``nn.AdaptiveAvgPool2d(1)`` or, with a
    ``kernel_size``, for ``nn.AvgPool2d(kernel_size, stride, padding, count_include_pad=False)``: it has no parameters
    (except with several parents) and keeps the number of channels. With λ = 0 it calls these functions.

    Parameters
    ----------
    dim : int
        Channels of a capsule; must divide the channels of the map.
    sharpness : float
        :math:`\lambda`. The paper uses 0.5 after a small network, 5 in residual networks. May be set later.
    iterations : int
        Number of times the coefficients are computed; one more sum follows.
    kernel_size : int, pair or None
        None pools the whole map, otherwise a window of that size.
    stride : int, pair or None
        ``kernel_size`` by default.
    padding : int or pair
        Padded positions hold no capsules.
    parents : int or None
        None: each group of channels has its own parent, which pools over positions only. 1: all capsules of a window
        go to one parent, of ``dim`` channels. More: that many parents, with one learned matrix for each group of
        channels and parent; then the result has ``parents * out_dim`` channels.
    activation, detach
        See :func:`fastcaps.functional.routing_pool`.
    in_channels, out_dim : int, optional
        For several parents: channels of the map, and of a parent (``dim`` by default).

    Attributes
    ----------
    weight : Parameter or None
        ``[groups, parents, dim, out_dim]``; drawn from N(0, 1) / sqrt(dim).

    Examples
    --------
    >>> import torch
    >>> features = torch.randn(2, 64, 8, 8)
    >>> RoutingPool2d(16, sharpness=5.0)(features).shape  # instead of nn.AdaptiveAvgPool2d(1)
    torch.Size([2, 64, 1, 1])
    >>> RoutingPool2d(16, kernel_size=2)(features).shape  # instead of nn.AvgPool2d(2)
    torch.Size([2, 64, 4, 4])
    >>> torch.equal(RoutingPool2d(16, sharpness=0.0)(features), nn.AdaptiveAvgPool2d(1)(features))
    True
    >>> RoutingPool2d(16, parents=10, activation="squash", in_channels=64)(features).shape
    torch.Size([2, 160, 1, 1])
    """

    compete = "children"
    weight: nn.Parameter | None

    @known_arguments
    def __init__(
        self,
        dim: int = 16,
        *,
        sharpness: float = 0.5,
        iterations: int = 3,
        kernel_size: int | tuple[int, int] | None = None,
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        parents: int | None = None,
        activation: str | Callable[[Tensor], Tensor] | None = None,
        detach: bool = False,
        in_channels: int | None = None,
        out_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dim, SupportsIndex):
            raise TypeError(
                f"dim must be an int, the channels of a capsule, got {dim}; kernel_size=None pools the whole map"
            )
        check_dtype(dtype)
        self.dim = check_count("dim", dim)
        self.sharpness = check_finite("sharpness", sharpness, 0.0)
        self.iterations = check_count("iterations", iterations, 0)
        self.window: Window | None = None
        if kernel_size is not None:
            self.window = Window(kernel_size, kernel_size if stride is None else stride, padding)
        elif stride is not None or padding not in (0, (0, 0)):
            raise ValueError("stride and padding need a kernel_size; kernel_size=None pools the whole map")
        self.stride, self.padding = stride, padding
        if kernel_size is not None:  # torchinfo reads it, and cannot read None
            self.kernel_size = kernel_size
        self.parents = None if parents is None else check_count("parents", parents)
        activation_function(activation)  # raises if it is invalid
        self.activation = activation
        self.detach = check_flag("detach", detach)
        self.in_channels = None if in_channels is None else check_count("in_channels", in_channels)
        self.out_dim = out_dim
        size = self.dim if out_dim is None else check_count("out_dim", out_dim)
        shape = None
        if self.parents is not None and self.parents > 1:
            if self.in_channels is None:
                raise ValueError("in_channels must be given with several parents: there is a matrix for every group")
            shape = (self._groups(self.in_channels), self.parents, self.dim, size)
        elif size != self.dim:
            raise ValueError(f"out_dim must be dim = {dim} without several parents, got {out_dim}")
        parameter = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter("weight", parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters, if there are any."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.dim))

    def _groups(self, channels: int) -> int:
        if channels % self.dim:
            raise ValueError(f"features must have channels that dim = {self.dim} divides, got {channels}")
        return channels // self.dim

    def forward(
        self,
        features: Tensor,
        *,
        iterations: int | None = None,
        sharpness: float | None = None,
        return_coefficients: bool = False,
    ) -> Tensor | Routed:
        """Return features ``[B, channels, H, W]`` pooled.

        The result is ``[B, channels, Ho, Wo]``, for one parent ``[B, dim, Ho, Wo]``, for several
        ``[B, parents * out_dim, Ho, Wo]``. ``iterations`` and ``sharpness`` override the layer's.

        ``return_coefficients`` adds the coefficients r of the capsules, without gradient: ``[B, Ho, Wo, kh * kw,
        groups]`` if each group has its own parent, else ``[B, Ho, Wo, kh * kw * groups, parents]``, the groups fastest.
        For a whole map, Ho = Wo = 1 and kh, kw = H, W: ``r[b, 0, 0, :, m].view(H, W)`` shows where parent m looks. An
        argument of a wrong shape, dtype or device raises ValueError or TypeError naming it.
        """
        check_map("features", features, self.in_channels)
        groups = self._groups(features.shape[1])
        height, width = features.shape[2:]
        if self.window is not None and min(self.window.output_size(height, width)) < 1:
            raise ValueError(f"features must be as large as the window, {self.window}; got {shape_text(features)}")
        options = {
            "iterations": self.iterations if iterations is None else iterations,
            "sharpness": self.sharpness if sharpness is None else sharpness,
            "detach": self.detach,
            "return_coefficients": return_coefficients,
        }
        averages = options["sharpness"] == 0 and self.weight is None
        if averages and not return_coefficients:
            return self._finish(self._average(features, groups))
        if self.parents is None:  # every group as a sample of its own
            batch = features.shape[0]
            each = features.reshape(batch * groups, self.dim, height, width)
            poses, shares = self._pool(each, 1, options)
            poses = poses.squeeze(1).unflatten(0, (batch, groups))
            shares = None if shares is None else shares.squeeze(-1).unflatten(0, (batch, groups)).movedim(1, -1)
        else:
            poses, shares = self._pool(features, groups, options)
        if averages:
            poses = self._average(features, groups)
        return self._finish(poses) if shares is None else Routed(self._finish(poses), shares)

    def _average(self, features: Tensor, groups: int) -> Tensor:
        """Return the parents' poses ``[B, M, Ho, Wo, dim]`` by the library's average pooling."""
        if self.window is None:
            means = F.adaptive_avg_pool2d(features, 1)
        else:
            kernel, stride, padding = self.window.kernel_size, self.window.stride, self.window.padding
            means = F.avg_pool2d(features, kernel, stride, padding, count_include_pad=False)
        poses = means.unflatten(1, (groups, self.dim)).movedim(2, -1)
        return poses if self.parents is None else poses.mean(1, keepdim=True)

    def _pool(self, features: Tensor, groups: int, options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Pool ``[B, groups * dim, H, W]`` into ``[B, M, Ho, Wo, out_dim]``."""
        # Every iteration reads all capsules, which is several times as fast if each lies together in memory.
        capsules = channels_last(features).unflatten(1, (groups, self.dim)).movedim(2, -1)  # [B, N, H, W, dim]
        window = self.window or Window((features.shape[2], features.shape[3]))
        result = functional.routing_pool(capsules.unsqueeze(-2), weight=self.weight, window=window, **options)
        poses, *shares = result if isinstance(result, tuple) else (result,)
        return poses.squeeze(-2), shares[0] if shares else None

    def _finish(self, poses: Tensor) -> Tensor:
        """Return the parents ``[B, M, Ho, Wo, d]`` activated, as channels ``[B, M * d, Ho, Wo]``."""
        function = activation_function(self.activation)
        if function is not None:
            poses = function(poses.unsqueeze(-2)).squeeze(-2) if self.activation == "squash" else function(poses)
        return poses.movedim(-1, 2).flatten(1, 2)

    extra_repr = arguments_repr
