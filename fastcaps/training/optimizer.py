"""Optimisers by name: their settings, and torch's class that does the work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import nn

from fastcaps.training.fields import Choice, require_number

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "RAdam", "RMSProp"]


class Optimizer(Choice):
    """The base of optimisers; the fields of each are arguments of ``torch_class``."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make torch's optimiser."""
        return self.torch_class(parameters, **asdict(self))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Adam(Optimizer, name="adam"):
    """Adam (Kingma and Ba, 2015).

    Attributes
    ----------
    lr : float
        Highest learning rate.
    betas : (float, float)
        Decay of the mean and of the mean square of the gradients.
    eps : float
        Added to the root of the mean square.
    weight_decay : float
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam

    def __post_init__(self) -> None:
        require_number(self, "lr eps", above=True)
        require_number(self, "weight_decay")
        require_number(self, "betas", most=1.0)


@dataclass(frozen=True)
class AdamW(Adam, name="adamw"):
    """Adam whose weight decay is apart from the gradient; the settings are Adam's."""

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW


@dataclass(frozen=True)
class RAdam(Adam, name="radam"):
    """Rectified Adam (Liu et al. 2019); the settings are Adam's."""

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RAdam


@dataclass(frozen=True)
class RMSProp(Optimizer, name="rmsprop"):
    """RMSProp.

    Attributes
    ----------
    lr : float
        Highest learning rate.
    alpha : float
        Decay of the mean square of the gradients.
    eps : float
        Added to its root.
    momentum, weight_decay : float
    """

    lr: float = 1e-3
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RMSprop

    def __post_init__(self) -> None:
        require_number(self, "lr eps", above=True)
        require_number(self, "alpha", most=1.0)
        require_number(self, "momentum weight_decay")


@dataclass(frozen=True)
class SGD(Optimizer, name="sgd"):
    """Stochastic gradient descent.

    Attributes
    ----------
    lr : float
        Highest learning rate.
    momentum, weight_decay : float
    nesterov : bool
        Nesterov's momentum.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD

    def __post_init__(self) -> None:
        require_number(self, "lr", above=True)
        require_number(self, "momentum weight_decay")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: got true with momentum 0, want momentum above 0")
