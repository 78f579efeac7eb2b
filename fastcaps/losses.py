"""Losses of capsule networks: margin loss, spread loss, and the reconstruction of Sabour et al. 2017.

Their gradients are finite everywhere, and so is that of :func:`fastcaps.functional.length` at the zero vector. With
``reduction="mean"``, the default, or "sum" they return a scalar for the batch, with "none" one value per sample,
``[B]``. An argument of a wrong type, dtype or shape raises TypeError or ValueError naming it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.checks import (
    check_choice,
    check_count,
    check_finite,
    check_parameters_dtype,
    is_tracing,
    known_arguments,
    one_line,
    require_tensor,
    shape_text,
    suggest,
)
from fastcaps.vectors import length
from fastcaps.watchers import is_transformed

__all__ = ["ReconstructionDecoder", "margin_loss", "reconstruction_loss", "spread_loss"]
suggest(__name__)


def _reduce(per_sample: Tensor, reduction: str) -> Tensor:
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    return per_sample if reduction == "none" else getattr(per_sample, reduction)()


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            check_finite(name, value)


def _check_activations(activations: Tensor, name: str) -> None:
    require_tensor(activations, name)
    if not activations.is_floating_point():
        raise TypeError(f"{name} must have a floating-point dtype, got {activations.dtype}")
    if activations.dim() != 2 or activations.shape[1] < 1:
        raise ValueError(f"{name} must be [B, M] with M >= 1, got {shape_text(activations)}")


def _check_labels(target: Tensor, batch: int, classes: int) -> None:
    require_tensor(target, "target")
    if target.shape != (batch,):
        raise ValueError(f"target must be [{batch}], a class for every sample, got {shape_text(target)}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must hold classes as int64, got {target.dtype}")
    _check_range(target, classes - 1, f"target must hold classes from 0 to {classes - 1}")


def _check_range(target: Tensor, most: int, wanted: str) -> None:
    if is_tracing() or torch._C._is_tracing() or is_transformed() or type(target) is not Tensor or target.is_meta:
        return  # the values cannot be read
    if torch._C._len_torch_dispatch_stack():  # make_fx, say
        return
    wrong = (target < 0) | (target > most)
    if target.device.type == "cuda":
        torch._assert_async(~wrong.any(), wanted)  # does not wait for the GPU
    elif wrong.any():
        raise ValueError(f"{wanted}, got {target[wrong][0].item()}")


def _one_hot(target: Tensor, classes: int) -> Tensor:
    """Return booleans ``[B, M]``, True for the class of every sample; F.one_hot has no rule for vmap."""
    return target.unsqueeze(1) == torch.arange(classes, device=target.device)


@known_arguments
def margin_loss(
    lengths: Tensor,
    target: Tensor,
    *,
    upper: float = 0.9,
    lower: float = 0.1,
    down_weight: float = 0.5,
    reduction: str = "mean",
) -> Tensor:
    r"""Return the margin loss (Sabour et al. 2017), for samples of one or several classes.

    .. math:: L = \sum_k T_k \max(0, m^+ - \lVert v_k \rVert)^2
              + \lambda (1 - T_k) \max(0, \lVert v_k \rVert - m^-)^2

    Parameters
    ----------
    lengths : Tensor
        ``[B, M]``, the class capsules' lengths (:func:`~fastcaps.functional.length`) or other activations.
    target : Tensor
        ``[B]`` int64, the class of every sample; or ``[B, M]``, 1 (True) for each class in the image.
    upper, lower : float
        :math:`m^+`, above which a class in the image has no loss; :math:`m^-`, below which any other class has none.
    down_weight : float
        :math:`\lambda`, which keeps the other classes from shrinking all capsules early in training.

    Examples
    --------
    >>> import torch
    >>> lengths = torch.tensor([[0.7, 0.3, 0.05]])
    >>> margin_loss(lengths, torch.tensor([0]))  # (0.9 - 0.7)^2 + 0.5 (0.3 - 0.1)^2
    tensor(0.0600)
    >>> margin_loss(lengths, torch.tensor([[1, 1, 0]]))  # two classes: (0.9 - 0.7)^2 + (0.9 - 0.3)^2
    tensor(0.4000)
    """
    _check_activations(lengths, "lengths")
    require_tensor(target, "target")
    _check_numbers(upper=upper, lower=lower, down_weight=down_weight)
    if target.dim() == 2:
        if target.shape != lengths.shape:
            wanted = f"[{len(lengths)}] or {shape_text(lengths)}"
            raise ValueError(f"target must be {wanted} to fit the lengths, got {shape_text(target)}")
        _check_range(target, 1, "target must hold values from 0 to 1")
        present = target.to(lengths.dtype)
    else:
        _check_labels(target, *lengths.shape)
        present = _one_hot(target, lengths.shape[1]).to(lengths.dtype)
    missed = (upper - lengths).clamp(min=0).square()
    imagined = (lengths - lower).clamp(min=0).square()
    return _reduce((present * missed + down_weight * (1 - present) * imagined).sum(1), reduction)


@known_arguments
def spread_loss(activations: Tensor, target: Tensor, margin: float, *, reduction: str = "mean") -> Tensor:
    r"""Return the spread loss (Hinton et al. 2018), 0 if the right class leads every other by a margin.

    .. math:: L = \sum_{i \ne t} \max(0, m - (a_t - a_i))^2

    Parameters
    ----------
    activations, target : Tensor
        ``[B, M]``, the class capsules' activations, and ``[B]`` int64, the class of every sample.
    margin : float
        m, which grows from 0.2 to 0.9 during training: a large one at the start would leave many capsules dead.

    Examples
    --------
    >>> import torch
    >>> activations = torch.tensor([[0.6, 0.5, 0.1]])
    >>> spread_loss(activations, torch.tensor([0]), margin=0.2)  # (0.2 - 0.1)^2; the third class is far enough
    tensor(0.0100)
    """
    _check_activations(activations, "activations")
    _check_labels(target, *activations.shape)
    _check_numbers(margin=margin)
    ahead = activations.gather(1, target.unsqueeze(1)) - activations
    short = (margin - ahead).clamp(min=0).square()
    return _reduce(short.scatter(1, target.unsqueeze(1), 0.0).sum(1), reduction)


@known_arguments
def reconstruction_loss(
    reconstruction: Tensor, images: Tensor, *, scale: float = 0.0005, reduction: str = "mean"
) -> Tensor:
    r"""Return the scaled sum of squared differences between images and reconstructions (Sabour et al. 2017).

    .. math:: L = 0.0005 \sum_x (\hat I_x - I_x)^2

    ``reconstruction`` and ``images`` are ``[B, ...]``, of the same shape. Images are raw pixels in [0, 1], as the
    decoder ends in a sigmoid: if they were normalised, pass ``images * std + mean``. The scale keeps the sum over an
    image small beside the margin loss, to which it is added.

    Examples
    --------
    >>> import torch
    >>> reconstruction_loss(torch.zeros(2, 1, 28, 28), torch.ones(2, 1, 28, 28))  # 784 * 0.0005
    tensor(0.3920)
    """
    require_tensor(reconstruction, "reconstruction")
    require_tensor(images, "images")
    _check_numbers(scale=scale)
    if reconstruction.dim() < 2:
        raise ValueError(f"reconstruction must be [B, ...], got {shape_text(reconstruction)}")
    if images.shape != reconstruction.shape:
        raise ValueError(f"images must be {shape_text(reconstruction)}, the reconstruction's, got {shape_text(images)}")
    if not images.is_floating_point():
        raise TypeError(f"images must be floating-point pixels in [0, 1], got {images.dtype}")
    return _reduce(scale * (reconstruction - images).square().flatten(1).sum(1), reduction)


class ReconstructionDecoder(nn.Module):
    """Reconstruct the image from one class capsule (Sabour et al. 2017): three linear layers, ReLU, ReLU, sigmoid.

    It sets all class capsules but one to zero: in training it keeps that of the right class, afterwards the longest. So
    the decoder knows the class from the capsule's place, and its look from the values.

    Parameters
    ----------
    classes, dim : int
        Class capsules M, and the components of the pose of one.
    image_shape, hidden : sequence of int
        Shape of an image, without the batch; widths of the layers before the last.

    Examples
    --------
    >>> import torch
    >>> decoder = ReconstructionDecoder(10, 16, (1, 28, 28))
    >>> capsules, labels = torch.randn(4, 10, 16), torch.tensor([3, 1, 4, 1])
    >>> decoder(capsules, labels).shape
    torch.Size([4, 1, 28, 28])
    >>> decoder(capsules).shape  # of the longest capsule
    torch.Size([4, 1, 28, 28])
    """

    @known_arguments
    def __init__(
        self,
        classes: int,
        dim: int,
        image_shape: Sequence[int],
        *,
        hidden: Sequence[int] = (512, 1024),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.classes = check_count("classes", classes)
        self.dim = check_count("dim", dim)
        for name, sizes in (("image_shape", image_shape), ("hidden", hidden)):
            if not isinstance(sizes, Iterable):
                raise TypeError(f"{name} must be a sequence of ints, got {one_line(sizes)}")
        self.image_shape = tuple(check_count("image_shape", size) for size in image_shape)
        widths = [classes * dim, *(check_count("hidden", width) for width in hidden), math.prod(self.image_shape)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after, device=device, dtype=dtype), nn.ReLU()]
        layers[-1] = nn.Sigmoid()
        self.layers = nn.Sequential(*layers)

    def mask(self, capsules: Tensor, target: Tensor | None = None) -> Tensor:
        """Return ``capsules`` ``[B, M, dim]`` with zeros for all but those of ``target`` ``[B]``, or the longest."""
        require_tensor(capsules, "capsules")
        if capsules.dim() != 3 or capsules.shape[1:] != (self.classes, self.dim):
            raise ValueError(f"capsules must be [B, {self.classes}, {self.dim}], got {shape_text(capsules)}")
        if target is None:
            target = length(capsules.detach()).argmax(1)
        else:
            _check_labels(target, *capsules.shape[:2])
        return capsules.masked_fill(~_one_hot(target, self.classes).unsqueeze(-1), 0.0)

    def forward(self, capsules: Tensor, target: Tensor | None = None) -> Tensor:
        """Return images ``[B, *image_shape]``, in (0, 1), of class capsules ``[B, M, dim]``.

        ``target``, int64 ``[B]``, is the class to draw; None draws each sample's longest capsule.
        """
        masked = self.mask(capsules, target).flatten(1)
        check_parameters_dtype("capsules", masked, next(self.parameters(), None))
        return self.layers(masked).unflatten(1, self.image_shape)
