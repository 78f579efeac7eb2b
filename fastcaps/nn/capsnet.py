"""A whole capsule network: backbone, primary capsules, routed layers, class head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.parameter import is_lazy

from fastcaps.checks import (
    check_choice,
    check_count,
    check_flag,
    check_map,
    check_pair,
    did_you_mean,
    known_arguments,
    one_line,
    shape_text,
)
from fastcaps.functional.explanation import shapes_alone
from fastcaps.losses import ReconstructionDecoder
from fastcaps.nn.head import READS, ClassHead
from fastcaps.nn.inverted_attention import InvertedAttentionRouting
from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.poses import arguments, channels_last
from fastcaps.nn.primary import PrimaryCapsules
from fastcaps.nn.stack import CapsuleSpec, RoutingStack, checked_specs, converted, parts_of


def feature_shape(backbone: nn.Module, in_channels: int, image_size: tuple[int, int]) -> tuple[int, int, int]:
    """Return channels, height and width of ``backbone``'s feature map.

    A copy without values computes them, so that neither the state of BatchNorm nor a random generator changes.
    """
    if not isinstance(backbone, nn.Module):
        raise TypeError(f"backbone must be a torch.nn.Module, got {one_line(backbone)}")
    if any(map(is_lazy, (*backbone.parameters(), *backbone.buffers()))):
        raise ValueError("backbone must have no lazy parameters: call it once on images")
    tensors = (*backbone.parameters(), *backbone.buffers())
    like = next((each for each in tensors if each.is_floating_point()), torch.empty(0))
    with shapes_alone(backbone) as (probe, _), torch.enable_grad():  # a backbone may need gradients inside
        try:
            for module in probe.modules():  # type: ignore[attr-defined]
                module.training = False
            features = probe(torch.empty(1, in_channels, *image_size, device=like.device, dtype=like.dtype))
        except RuntimeError as error:
            wanted = f"[B, {in_channels}, {image_size[0]}, {image_size[1]}] of in_channels and image_size"
            why = str(error).partition("\n")[0] or type(error).__name__
            if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
                why = "its result depends on the images' values, and it is called with shapes alone"
            raise ValueError(f"backbone must take images {wanted}, but it fails: {why}") from error
    if not isinstance(features, Tensor) or features.dim() != 4:
        got = shape_text(features) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"backbone must return a feature map [B, channels, H, W], got {got}")
    return features.shape[1], features.shape[2], features.shape[3]


class CapsNet(nn.Module):
    """A capsule network from images to class logits (Tsai et al., 2020, Figure 1 and Procedure 2).

    Parameters
    ----------
    backbone : Module
        Maps images ``[B, channels, H, W]`` to features.
    primary : PrimaryCapsules
        Maps features to capsules.
    routing : RoutingStack
        Maps capsules to class capsules.
    head : ClassHead
        Maps class capsules to logits.
    in_channels, image_size
        The images that the network was built for; training reads them.
    decoder : Module, optional
        Reconstructs images from the class capsules' poses: :class:`fastcaps.losses.ReconstructionDecoder`.

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

    @known_arguments
    def __init__(
        self,
        backbone: nn.Module,
        primary: PrimaryCapsules,
        routing: RoutingStack,
        head: ClassHead,
        *,
        in_channels: int | None = None,
        image_size: tuple[int, int] | None = None,
        decoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.primary = primary
        self.routing = routing
        self.head = head
        self.in_channels = in_channels
        self.image_size = image_size
        self.decoder = decoder

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
        classes: int | CapsuleSpec,
        iterations: int | None = None,
        routing: str = "concurrent",
        layer: type[RoutingLayer[Any, Any]] = InvertedAttentionRouting,
        primary: Mapping[str, Any] | None = None,
        head: str = "linear",
        decoder: bool | Sequence[int] = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> CapsNet:
        """Return a network around ``backbone``; the image's size sets every number of capsules.

        Parameters
        ----------
        backbone : Module
            Maps images to a feature map of any size.
        in_channels : int
            Channels of an image.
        image_size : int or (int, int)
            Its height and width.
        capsules, dim : int
            Primary capsule types, and the components of a pose.
        hidden, classes : sequence of CapsuleSpec, int or CapsuleSpec
            The layers between the primary and the class capsules; and the number of classes, or the layer of class
            capsules.
        iterations, routing, layer
            See :class:`RoutingStack` and its ``build``.
        primary : mapping, optional
            Further arguments of :class:`PrimaryCapsules`. They have activations if the first layer reads them
            (``activations=True`` of the attention layer, or EM), scores if it is Heinsen's.
        head : str
            The ``read`` of :class:`ClassHead`: "linear" for cross-entropy, "length" for the margin loss of dynamic
            routing, "activations" for the spread loss of EM.
        decoder : bool or sequence of int
            Add a :class:`~fastcaps.losses.ReconstructionDecoder`; a sequence sets the widths of its hidden layers.
        device, dtype
            Of all parameters and buffers.
        **options
            Further arguments of every routing layer: pose, bias, and others that all their classes take. As in the
            paper's ablation, ``layer_norm=False`` does not change the primary capsules.
        """
        specs = checked_specs("hidden", hidden, layer, options)
        specs += [classes if isinstance(classes, CapsuleSpec) else CapsuleSpec(check_count("classes", classes))]
        kinds = [spec.layer or layer for spec in specs]
        of_layers = [name for kind in kinds for name in arguments(kind)]
        own = [name for name in inspect.signature(cls.build).parameters if name != "options"]
        for name in options.keys() - {*of_layers}:
            near = did_you_mean(name, own)
            if near and name.startswith("class_"):
                near = "; classes=CapsuleSpec(10, dim=16) sets the class layer"
            if near or all(kind.__module__.startswith("fastcaps.") for kind in kinds):  # a user's layer may take any
                near = near or did_you_mean(name, of_layers) or f"; there are: {', '.join(own)}"
                raise TypeError(f"CapsNet.build has no argument {name}{near}")
        primary = {} if primary is None else primary
        if not isinstance(primary, Mapping):
            raise TypeError(f"primary must be a mapping, such as {{'normalize': 'squash'}}, got {one_line(primary)}")
        for name in {"in_channels", "capsules", "dim"}.intersection(primary):
            raise TypeError(f"primary cannot set {name}: build sets it")
        whole: object = decoder
        if isinstance(whole, str) or not isinstance(whole, (bool, Sequence)):
            raise TypeError(f"decoder must be True, False or a sequence of ints, got {one_line(decoder)}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        size, in_channels = check_pair("image_size", image_size, 1), check_count("in_channels", in_channels)
        channels, *features = feature_shape(backbone, in_channels, size)
        check_choice("head", head, READS)
        lowest = {**options, **specs[0].options}
        first_layer = specs[0].layer or layer
        scores = first_layer.activity_name == "scores"
        reads = first_layer.route_options is not None and first_layer.route_takes_activity
        active = bool(lowest.get("activations")) or first_layer.head == "activations" or reads
        more: dict[str, Any] = {"activations": active, **place, **primary}
        first = PrimaryCapsules(channels, capsules, dim, **{"scores": scores and bool(more["activations"]), **more})
        grid = first.output_size((features[0], features[1]))
        if min(grid) < 1:
            least, found = (" x ".join(map(str, each)) for each in (first.window.smallest_grid, features))  # type: ignore[union-attr]
            raise ValueError(
                f"image_size {size} is too small: the primary capsules' window needs features of {least}, got {found}"
            )
        stack = RoutingStack.build(
            specs,
            in_capsules=first.capsules,
            in_dim=first.dim,
            size=grid,
            iterations=iterations,
            routing=routing,
            layer=layer,
            **place,
            **options,
        )
        stack = stack.to(device=device, dtype=dtype)  # also what a layer adds itself
        # channels_last from the start: the primary convolution then writes a position's capsules together in memory
        backbone = backbone.to(device=device, dtype=dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        top = stack.layers[-1].out_dim
        net = cls(backbone, first, stack, ClassHead(top, read=head, **place), in_channels=in_channels, image_size=size)
        if decoder:
            widths: dict[str, Any] = {} if decoder is True else {"hidden": decoder}
            net.decoder = ReconstructionDecoder(specs[-1].capsules, top, (in_channels, *size), **widths, **place)
        return net

    def forward(
        self,
        images: Tensor,
        *,
        iterations: int | None = None,
        return_trace: bool = False,
        reconstruct: bool | Tensor = False,
    ) -> Tensor | tuple[Any, ...]:
        """Return logits ``[B, classes]`` of images ``[B, channels, H, W]``; ``iterations`` overrides the network's.

        ``reconstruct`` adds the decoder's images: from the class capsules of its labels ``[B]``, as in training, or
        from the longest ones if it is True. ``return_trace`` adds the :class:`~fastcaps.nn.stack.RoutingTrace`, last:
        poses, activations, coefficients of every layer. Images that do not fit, or ``reconstruct`` without a decoder,
        raise ValueError or TypeError.
        """
        check_map("images", images, self.in_channels)
        if not images.is_floating_point():  # they are often bytes
            raise TypeError(f"images must be floating-point numbers (normalised), got {images.dtype}")
        if not isinstance(reconstruct, Tensor):
            reconstruct = check_flag("reconstruct, if no tensor of labels,", reconstruct)
        if reconstruct is not False and self.decoder is None:
            raise ValueError(
                "reconstruct must be False for a network without a decoder; CapsNet.build(..., decoder=True) adds one"
            )
        children, activity, _ = parts_of(self.primary(self.backbone(channels_last(images))))
        wants_scores = self.routing.layers[0].activity_name == "scores"
        activity = converted(activity, getattr(self.primary, "scores", False), wants_scores)
        more: list[Any] = []
        if return_trace:
            result, trace = self.routing(children, activity, iterations=iterations, return_trace=True)
            more.append(trace)
        else:
            result = self.routing(children, activity, iterations=iterations)
        poses, activity, scores = parts_of(result)
        if self.decoder is not None and reconstruct is not False:
            more.insert(0, self.decoder(poses, reconstruct if isinstance(reconstruct, Tensor) else None))
        # scores are logits; a linear read-out needs them as activations
        logits = self.head(poses, converted(activity, scores, scores and self.head.read == "activations"))
        return (logits, *more) if more else logits
