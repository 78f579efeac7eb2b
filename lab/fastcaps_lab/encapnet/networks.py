"""The networks of EncapNet (Li et al., 2018): capsules in channels, routed in one pass.

``li-encapnet-v1`` is Table 2's, ``-six-master`` and ``-six`` are (e) and (f) of Table 1; :mod:`fastcaps_lab.models.li`
has the networks compared with them. lab/docs/encapnet.md lists our choices, above all for ``-v2`` and ``-v3``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.nn import ClassHead
from fastcaps_lab.checks import check_choice, check_map, image_size
from fastcaps_lab.encapnet.cap_conv import CapConv2d, CapFC
from fastcaps_lab.encapnet.feedback import FeedbackAgreement, convolutions


class EncapModule(nn.Module):
    """Several layers of capsules (Li et al., 2018, Figure 3a): one of type I, with the stride, then those of type II.

    ``skip`` says which layers have a skip connection: with "I" or "both" the type I layer its own, with "II" or "both"
    the type II layers one over all.
    """

    def __init__(
        self, types: int, in_dim: int, out_dim: int, layers: int, stride: int, coefficients: str, skip: str
    ) -> None:
        super().__init__()
        check_choice("skip", skip, ("none", "I", "II", "both"))
        over = skip in ("I", "both")
        self.first = CapConv2d(types, in_dim, out_dim, stride=stride, coefficients=coefficients, skip=over)
        self.rest = nn.ModuleList(
            CapConv2d(types, out_dim, out_dim, kernel_size=1, coefficients=coefficients) for _ in range(layers - 1)
        )
        self.skips_rest = skip in ("II", "both")

    def forward(self, capsules: Tensor) -> tuple[Tensor, Tensor]:
        """Return the capsules after the type I layer, and those at the end."""
        first = found = self.first(capsules)
        for k, layer in enumerate(self.rest, 1):
            is_last = k == len(self.rest)
            found = layer(found, first if self.skips_rest and is_last else None)
        return first, found


class EncapNet(nn.Module):
    """A network of modules from images to logits, with optional feedback units for the loss.

    ``stem`` and ``head`` map images to the first map, and the last map to logits. Each of ``modules_`` takes a map and
    returns two: the one after its first layer, and the one at its end. Each has ``feedback`` units: none; or one, which
    reconstructs the module's input from its output; or a second one, which reconstructs the output of its first layer.
    Images have ``in_channels`` and ``image_size``.
    """

    def __init__(
        self,
        stem: nn.Module,
        modules_: Sequence[nn.Module],
        feedback: Sequence[Sequence[FeedbackAgreement]],
        head: nn.Module,
        *,
        in_channels: int,
        image_size: tuple[int, int],
    ) -> None:
        super().__init__()
        self.stem, self.layers, self.head = stem, nn.ModuleList(modules_), head
        self.feedback = nn.ModuleList(nn.ModuleList(units) for units in feedback)
        self.in_channels, self.image_size = in_channels, image_size

    def forward(self, images: Tensor, *, return_feedback: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits ``[B, classes]``, the lengths of class capsules if there are any, of ``[B, channels, H, W]``.

        ``return_feedback`` adds the sum of the feedback units' divergences, for the loss: a scalar, 0 in evaluation
        mode.
        """
        check_map("images", images, self.in_channels, self.image_size)
        found = self.stem(images)
        feedback = found.new_zeros((), dtype=torch.promote_types(found.dtype, torch.float32))
        for k, layer in enumerate(self.layers):
            before = found
            first, found = layer(before)
            if return_feedback and self.training:
                units: Any = self.feedback[k]
                for unit, lower in zip(units, (before, first), strict=False):
                    feedback = feedback + unit(found, lower)
        logits = self.head(found)
        return (logits, feedback) if return_feedback else logits


@dataclass(frozen=True)
class FeedbackConfig:
    """The options of the feedback units (Li et al., 2018, Table 3), most of
    :class:`~fastcaps_lab.encapnet.FeedbackAgreement`. Units have their own parameters, for training only."""

    feedback: str = "none"  # or "one" unit for each module, (c) of the table, or "two", (8)
    divergence: str = "ot"  # (b): "kl"
    bias_fix: bool = True  # (d1): False
    through_plan: bool = False  # (d2): True
    critic: bool = True  # (d3): False
    generator: str = "capsules"  # (d4): "vanilla", without groups and squash, as for networks without capsules
    cost: str = "cosine"  # (d5): "l2"

    def units(self, before: int, after: int, stride: int, several: bool, types: int | None) -> list[FeedbackAgreement]:
        """Return the units of a module from ``before`` channels to ``after``, with ``several`` layers or one."""
        check_choice("feedback", self.feedback, ("none", "one", "two"))
        check_choice("generator", self.generator, ("capsules", "vanilla"))
        count = {"none": 0, "one": 1, "two": 1 + several}[self.feedback]
        names = ("divergence", "bias_fix", "through_plan", "critic", "cost")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options["types"] = types if self.generator == "capsules" else None
        lower = [(before, stride), (after, 1)][:count]
        return [FeedbackAgreement(after, channels, stride=step, **options) for channels, step in lower]


@dataclass(frozen=True)
class EncapNetConfig(FeedbackConfig):
    """The configuration of an EncapNet."""

    classes: int = 10
    image_size: int | tuple[int, int] = 32  # height and width, on which the class capsules depend
    in_channels: int = 3  # of an image
    types: int = 32  # capsule types in every layer
    # first convolutions, with BatchNorm and ReLU: channels per type (in the end values in a capsule), kernel, stride
    stem: tuple[tuple[int, int, int], ...] = ((1, 3, 1),)
    dims: tuple[int, ...] = (2, 4, 8, 16)  # for each module: values in a capsule,
    layers: tuple[int, ...] = (4, 4, 4, 4)  # layers,
    strides: tuple[int, ...] = (1, 2, 2, 2)  # and the stride of the first layer
    coefficients: str | tuple[str, ...] = "both"  # of all modules, or of each: (1) to (4) of Table 3
    skip: str = "both"  # or "none", "I", "II": (5) to (7)

    def build(self) -> EncapNet:
        """Return the network with new weights."""
        size, types, given = image_size(self.image_size), self.types, self.coefficients
        of_modules = (given,) * len(self.dims) if isinstance(given, str) else tuple(given)
        stem = convolutions(self.in_channels, [(types * dim, kernel, stride) for dim, kernel, stride in self.stem])
        modules: list[nn.Module] = []
        units = []
        dim_below = self.stem[-1][0]
        for dim, layers, stride, coefficients in zip(self.dims, self.layers, self.strides, of_modules, strict=True):
            modules.append(EncapModule(types, dim_below, dim, layers, stride, coefficients, self.skip))
            units.append(self.units(types * dim_below, types * dim, stride, layers > 1, types))
            dim_below = dim
        height, width = size
        for stride in (*(stride for _, _, stride in self.stem), *self.strides):
            height, width = -(-height // stride), -(-width // stride)
        last = CapFC(types * height * width, self.classes, dim_below)
        head = nn.Sequential(OrderedDict(capsules=last, head=ClassHead(dim_below, read="length")))
        return EncapNet(stem, modules, units, head, in_channels=self.in_channels, image_size=size)


V1 = EncapNetConfig()
SIX = EncapNetConfig(
    stem=((1, 3, 1), (2, 3, 1), (4, 3, 2), (8, 3, 2)), dims=(16,), layers=(1,), strides=(2,), skip="none"
)
V2 = EncapNetConfig(
    classes=200, image_size=128, stem=((1, 7, 4),), layers=(9, 12, 69, 9), coefficients=("none", "none", "both", "both")
)
NETWORKS = {
    "li-encapnet-master": replace(V1, coefficients="none"),
    "li-encapnet-v1": V1,
    "li-encapnet-v2": V2,
    "li-encapnet-v3": replace(V2, image_size=224),
    "li-encapnet-six-master": replace(SIX, coefficients="none"),
    "li-encapnet-six": SIX,
}
