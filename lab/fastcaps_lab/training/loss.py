"""Losses by name, settings that compute the loss; and the metrics.

A loss is called with the network, a :class:`Batch` and the fraction of the run that is done, and returns the loss and
the logits. The formulas are in :mod:`fastcaps.losses` and torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, model_validator
from torch import Tensor, nn

from fastcaps.losses import margin_loss, reconstruction_loss, spread_loss
from fastcaps_lab.training.settings import CHOICE, SHORT, Settings, Share


class Batch(NamedTuple):
    """The data of a step."""

    inputs: tuple[Tensor, ...]  # of the network: images [B, channels, H, W], normalised; or embeddings and a mask
    target: Tensor  # int64 [B]: classes; bool [B, M]: the classes in an image; floats [B, M]: probabilities
    mean: Tensor | None = None  # of the normalisation, [1, channels, 1, 1]
    std: Tensor | None = None
    parts: Tensor | None = None  # the digits of overlapping images: pixels [B, P, H, W] from 0 to 1
    part_labels: Tensor | None = None  # int64 [B, P], −1 for none

    @property
    def pixels(self) -> Tensor:
        """The images as pixels from 0 to 1."""
        if self.mean is None or self.std is None:
            return self.inputs[0]
        return self.inputs[0] * self.std + self.mean


class Loss(Settings, ABC):
    """The base of losses."""

    threshold: ClassVar[float] = 0.0  # with several classes per image, those with a logit above it are predicted

    @abstractmethod
    def of(self, logits: Tensor, target: Tensor, done: float) -> Tensor:
        """Return the loss of logits ``[B, M]``, a scalar."""

    def __call__(self, network: nn.Module, batch: Batch, done: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch and the network's logits; ``done`` is the finished fraction of the run."""
        logits = network(*batch.inputs)
        return self.of(logits, batch.target, done), logits


def _require_labels(what: str, target: Tensor) -> None:
    if target.dim() != 1:
        raise ValueError(f"{what} needs one class per sample, got {target.dtype} targets {list(target.shape)}")


class CrossEntropy(Loss):
    """Softmax and cross-entropy, of labels or class probabilities."""

    smoothing: Share = 0.0  # the fraction of each target that is spread over all classes
    name: Literal["cross-entropy"] = "cross-entropy"

    def of(self, logits: Tensor, target: Tensor, done: float) -> Tensor:
        if target.is_floating_point():
            target = target.to(logits.dtype)
        else:
            _require_labels("loss: cross-entropy", target)
        return F.cross_entropy(logits, target, label_smoothing=self.smoothing)


class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of each class, averaged over samples and classes."""

    probabilities: bool = False  # whether the network returns probabilities (lengths, activations) and not logits
    name: Literal["bce"] = "bce"

    @property
    def threshold(self) -> float:  # type: ignore[override]
        return 0.5 if self.probabilities else 0.0

    def of(self, logits: Tensor, target: Tensor, done: float) -> Tensor:
        present = F.one_hot(target, logits.shape[1]) if target.dim() == 1 else target
        if not self.probabilities:
            return F.binary_cross_entropy_with_logits(logits, present.to(logits.dtype))
        with torch.autocast(logits.device.type, enabled=False):  # autocast refuses this loss
            # a length may round above 1
            certain = logits.to(torch.promote_types(logits.dtype, torch.float32)).clamp(0, 1)
            return F.binary_cross_entropy(certain, present.to(certain.dtype))


class Margin(Loss):
    """Margin loss (Sabour et al. 2017) of the class capsules' lengths, and reconstruction loss.

    The arguments are those of :func:`fastcaps.losses.margin_loss`, and ``reconstruction``, the scale of
    :func:`fastcaps.losses.reconstruction_loss` on raw pixels: 0.0005 in the paper, 0 for none.
    """

    upper: NonNegativeFloat = 0.9
    lower: NonNegativeFloat = 0.1
    down_weight: NonNegativeFloat = 0.5
    reconstruction: NonNegativeFloat = 0.0
    name: Literal["margin"] = "margin"
    threshold: ClassVar[float] = 0.5

    def of(self, logits: Tensor, target: Tensor, done: float) -> Tensor:
        return margin_loss(logits, target, upper=self.upper, lower=self.lower, down_weight=self.down_weight)

    def __call__(self, network: nn.Module, batch: Batch, done: float = 0.0) -> tuple[Tensor, Tensor]:
        if not self.reconstruction:
            return super().__call__(network, batch, done)
        if getattr(getattr(network, "module", network), "decoder", None) is None:
            raise ValueError(
                "loss.reconstruction: the network has no decoder; want loss.reconstruction=0, or "
                "network.options.decoder=true"
            )
        if batch.target.dim() == 1:
            logits, drawn = network(*batch.inputs, reconstruct=batch.target)
            missed = reconstruction_loss(drawn, batch.pixels, scale=self.reconstruction)
        else:
            logits, missed = self._of_parts(network, batch)
        return self.of(logits, batch.target, done) + missed, logits

    def _of_parts(self, network: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits, and the sum of the reconstruction losses of all parts (Sabour et al. 2017, section 6)."""
        if batch.parts is None or batch.part_labels is None:
            raise ValueError(
                "loss.reconstruction: images of several classes are reconstructed part by part, and these data do not "
                "have their parts; want loss.reconstruction=0"
            )
        kept: list[Tensor] = []  # the class capsules' poses, the head's input
        hook = network.head.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        try:
            logits = network(*batch.inputs)
        finally:
            hook.remove()
        missed = logits.new_zeros(())
        for pixels, labels in zip(batch.parts.split(1, 1), batch.part_labels.unbind(1), strict=True):
            drawn = network.decoder(kept[0], labels.clamp(min=0))
            each = reconstruction_loss(drawn, pixels, scale=self.reconstruction, reduction="none")
            missed = missed + (each * (labels >= 0)).mean()
        return logits, missed


class Spread(Loss):
    """Spread loss (Hinton et al. 2018) of the class capsules' activations, with a linearly growing margin."""

    start: NonNegativeFloat = 0.2
    end: NonNegativeFloat = 0.9
    over: Annotated[float, Field(gt=0, le=1)] = 1.0  # the fraction of the run over which the margin grows
    name: Literal["spread"] = "spread"
    threshold: ClassVar[float] = 0.5

    def of(self, logits: Tensor, target: Tensor, done: float) -> Tensor:
        _require_labels("loss: spread", target)
        return spread_loss(logits, target, self.start + min(done / self.over, 1.0) * (self.end - self.start))


class Feedback(Loss):
    """The loss of a network with feedback units (Li et al. 2018): a base loss, and the divergences between layers."""

    base: Annotated[CrossEntropy | BinaryCrossEntropy | Margin | Spread, CHOICE, SHORT] = Margin()
    weight: NonNegativeFloat = 10.0  # of the sum of the divergences
    name: Literal["feedback"] = "feedback"

    @model_validator(mode="after")
    def _logits_alone(self) -> Feedback:
        if getattr(self.base, "reconstruction", False):
            raise ValueError(f"base is {self.base}, want a loss of logits alone")
        return self

    @property
    def threshold(self) -> float:  # type: ignore[override]
        return self.base.threshold

    def of(self, logits: Tensor, target: Tensor, done: float) -> Tensor:
        return self.base.of(logits, target, done)

    def __call__(self, network: nn.Module, batch: Batch, done: float = 0.0) -> tuple[Tensor, Tensor]:
        logits, divergence = network(*batch.inputs, return_feedback=True)
        return self.of(logits, batch.target, done) + self.weight * divergence, logits


AnyLoss = Annotated[CrossEntropy | BinaryCrossEntropy | Margin | Spread | Feedback, CHOICE, SHORT]


def right(metric: str, logits: Tensor, target: Tensor, threshold: float) -> Tensor:
    """Return which samples are classified correctly, bool ``[B]``; files and tables call their share accuracy.

    - ``accuracy``: the highest logit is the sample's class (with mixup, its most probable one).
    - ``exact-match``: the classes with logits above ``threshold`` are exactly those in the image.
    - ``top-2``: every class in the image is among the two highest logits.

    Logits are ``[B, M]``, the target is as for a loss.
    """
    if metric == "accuracy":
        if not target.is_floating_point():
            _require_labels("metric: accuracy", target)
        return logits.argmax(1) == (target.argmax(1) if target.dim() == 2 else target)
    there = (F.one_hot(target, logits.shape[1]) if target.dim() == 1 else target) > 0
    if metric == "exact-match":
        return ((logits > threshold) == there).all(1)
    highest = logits.topk(min(2, logits.shape[1]), 1).indices
    return there.sum(1) == there.gather(1, highest).sum(1)
