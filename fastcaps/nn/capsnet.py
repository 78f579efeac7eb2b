"""A whole capsule network: backbone, primary capsules, routed layers, class head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.nn.head import ClassHead
from fastcaps.nn.poses import positive, require_tensor, shape_of
from fastcaps.nn.primary import PrimaryCapsules
from fastcaps.nn.stack import CapsuleSpec, RoutingStack


def feature_shape(backbone: nn.Module, in_channels: int, image_size: tuple[int, int]) -> tuple[int, int, int]:
    """Channels, height and width that ``backbone`` makes of an image, found without running it on any data.

    A copy on the meta device does the sum, so that neither the backbone's state (BatchNorm) nor a random generator is
    touched.
    """
    probe = copy.deepcopy(backbone).to("meta").eval()
    features = probe(torch.empty(1, in_channels, *image_size, device="meta"))
    if not isinstance(features, Tensor) or features.dim() != 4:
        got = shape_of(features) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"backbone must return a feature map [B, channels, H, W], got {got}")
    return features.shape[1], features.shape[2], features.shape[3]


class CapsNet(nn.Module):
    """Images to class logits by way of capsules (Tsai et al., 2020, Figure 1 and Procedure 2).

    Parameters
    ----------
    backbone : Module
        Images ``[B, channels, H, W]`` to a feature map.
    primary : PrimaryCapsules
    routing : RoutingStack
        Its last layer's parents are the class capsules.
    head : ClassHead
    in_channels, image_size
        What the network was built for; for those who feed it.

    Examples
    --------
    >>> import torch
    >>> net = CapsNet.build(
    ...     nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
    ...     in_channels=1,
    ...     image_size=(28, 28),
    ...     capsules=8,
    ...     dim=16,
    ...     hidden=[CapsuleSpec(8, kernel_size=3, stride=2)],
    ...     classes=10,
    ... )
    >>> net(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        backbone: nn.Module,
        primary: PrimaryCapsules,
        routing: RoutingStack,
        head: ClassHead,
        *,
        in_channels: int | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.primary = primary
        self.routing = routing
        self.head = head
        self.in_channels = in_channels
        self.image_size = image_size

    @classmethod
    def build(
        cls,
        backbone: nn.Module,
        *,
        in_channels: int,
        image_size: int | tuple[int, int],
        capsules: int,
        dim: int,
        hidden: Sequence[CapsuleSpec] = (),
        classes: int,
        iterations: int = 2,
        routing: str = "concurrent",
        primary: dict[str, Any] | None = None,
        **options: Any,
    ) -> CapsNet:
        """Build a network around ``backbone``; every number of capsules is computed from the image's size.

        Parameters
        ----------
        backbone : Module
            Images to a feature map of any size.
        in_channels : int
            Channels of an image.
        image_size : int or (int, int)
            Its height and width.
        capsules, dim : int
            Primary capsule types, and the numbers in a pose.
        hidden : sequence of CapsuleSpec
            The layers between the primary and the class capsules.
        classes : int
            Class capsules, one a class.
        iterations, routing
            As :class:`RoutingStack` has them.
        primary : dict, optional
            Further arguments of :class:`PrimaryCapsules`: kernel_size, stride, padding, bias.
        **options
            Further arguments of every routing layer: pose, bias, dropout, layer_norm, activations, eps.
            ``activations=True`` gives the primary capsules activations too. ``layer_norm=False`` leaves the primary
            capsules' LayerNorm where it is: the paper's ablation takes it out of the routing.
        """
        size = (image_size, image_size) if isinstance(image_size, int) else (int(image_size[0]), int(image_size[1]))
        for number in size:
            positive(number, "image_size")
        channels, height, width = feature_shape(backbone, positive(in_channels, "in_channels"), size)
        first = PrimaryCapsules(
            channels, capsules, dim, activations=bool(options.get("activations", False)), **(primary or {})
        )
        grid = first.output_size((height, width))
        if min(grid) < 1:
            raise ValueError(
                f"image_size {size} is too small: the primary capsules' window does not fit on features of "
                f"{height} x {width}"
            )
        stack = RoutingStack.build(
            [*hidden, CapsuleSpec(positive(classes, "classes"))],
            in_capsules=capsules,
            in_dim=dim,
            size=grid,
            iterations=iterations,
            routing=routing,
            **options,
        )
        head = ClassHead(stack.layers[-1].out_dim)  # type: ignore[arg-type]
        # Channels last from the start: the primary convolution then leaves a position's capsules together in memory.
        backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return cls(backbone, first, stack, head, in_channels=in_channels, image_size=size)

    def forward(
        self, images: Tensor, *, iterations: int | None = None, return_trace: bool = False
    ) -> Tensor | tuple[Tensor, Any]:
        """Classify ``images``.

        Parameters
        ----------
        images : Tensor
            ``[B, channels, H, W]``.
        iterations : int, optional
            Another number of routing iterations for this call.
        return_trace : bool
            Also return the :class:`~fastcaps.nn.stack.RoutingTrace`, with the poses and the coefficients of every
            layer.

        Returns
        -------
        Tensor or (Tensor, RoutingTrace)
            Logits ``[B, classes]``.
        """
        require_tensor(images, "images")
        if images.dim() != 4 or (self.in_channels is not None and images.shape[1] != self.in_channels):
            raise ValueError(f"images must be [B, {self.in_channels or 'channels'}, H, W], got {shape_of(images)}")
        made = self.primary(self.backbone(images.contiguous(memory_format=torch.channels_last)))
        children, activations = made if isinstance(made, tuple) else (made, None)
        routed = self.routing(children, activations, iterations=iterations, return_trace=return_trace)
        parts = list(routed) if isinstance(routed, tuple) else [routed]
        trace = parts.pop() if return_trace else None
        logits = self.head(*parts)
        return (logits, trace) if return_trace else logits
