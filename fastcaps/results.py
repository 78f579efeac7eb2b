"""The results of routings that return more than poses: named tuples, poses first."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.utils._pytree import _register_namedtuple

__all__ = ["Capsules", "Gaussians", "Routed", "RoutedCapsules", "RoutedGaussians"]


class Routed(NamedTuple):
    """Parents' poses, and the last iteration's coefficients r ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, no gradient."""

    poses: Tensor
    coefficients: Tensor


class Capsules(NamedTuple):
    """Poses, and an activation for each."""

    poses: Tensor
    activations: Tensor


class RoutedCapsules(NamedTuple):
    """As :class:`Capsules`, with the coefficients as :class:`Routed` has them."""

    poses: Tensor
    activations: Tensor
    coefficients: Tensor


class Gaussians(NamedTuple):
    """Parents of Heinsen routing: poses (the means), scores, and variances of the poses' shape."""

    poses: Tensor
    scores: Tensor
    variances: Tensor


class RoutedGaussians(NamedTuple):
    """As :class:`Gaussians`, with the coefficients as :class:`Routed` has them."""

    poses: Tensor
    scores: Tensor
    variances: Tensor
    coefficients: Tensor


for _result in (Routed, Capsules, RoutedCapsules, Gaussians, RoutedGaussians):  # so that exported programs can be saved
    _register_namedtuple(_result, serialized_type_name=f"{__name__}.{_result.__name__}")
