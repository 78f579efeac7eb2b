"""Optimisers by name: their settings are the arguments of torch's classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import nn

from fastcaps.training.fields import CHOICE, SHORT, STRICT, Flag, NotNegative, Positive, Settings, Share

TORCH = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class Optimizer(Settings):
    """The base of optimisers."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimiser."""
        settings = asdict(self)
        return TORCH[settings.pop("name")](parameters, **settings)


@dataclass(frozen=True, config=STRICT)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), AdamW and RAdam (Liu et al. 2019)."""

    lr: Positive = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    name: Literal["adam", "adamw", "radam"] = "adam"


@dataclass(frozen=True, config=STRICT)
class RMSProp(Optimizer):
    """RMSProp."""

    lr: Positive = 1e-3
    alpha: Share = 0.99
    eps: Positive = 1e-8
    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    name: Literal["rmsprop"] = "rmsprop"


@dataclass(frozen=True, config=STRICT)
class SGD(Optimizer):
    """Stochastic gradient descent."""

    lr: Positive = 0.1
    momentum: NotNegative = 0.9
    weight_decay: NotNegative = 0.0
    nesterov: Flag = False
    name: Literal["sgd"] = "sgd"

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: got true with momentum 0, want momentum above 0")


AnyOptimizer = Annotated[Adam | RMSProp | SGD, CHOICE, SHORT]
