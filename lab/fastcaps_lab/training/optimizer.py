"""Optimisers and schedules of the learning rate, by name.

An optimiser's settings are the arguments of torch's class. A schedule returns factors for torch's ``LambdaLR``; its
times are fractions of the run (0.1, or ``150/350`` for 150 of 350 epochs), from its start. (Torch's schedulers count
steps, and restart after a warm-up.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

import torch
from torch import nn

from fastcaps_lab.training.fields import CHOICE, SHORT, Count, Flag, NotNegative, Positive, Settings, Share

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


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), AdamW and RAdam (Liu et al. 2019)."""

    lr: Positive = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    name: Literal["adam", "adamw", "radam"] = "adam"


class RMSProp(Optimizer):
    """RMSProp."""

    lr: Positive = 1e-3
    alpha: Share = 0.99
    eps: Positive = 1e-8
    momentum: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    name: Literal["rmsprop"] = "rmsprop"


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


class Schedule(Settings):
    """The base of schedules."""

    warmup: Share = 0.0  # the fraction of the run over which the rate grows linearly
    start: Share = 0.0  # the first rate of the warm-up, as a fraction of the optimiser's
    by: Literal["step", "epoch"] = "step"  # whether the rate changes with every step or epoch

    def after_warmup(self, done: float, step: int) -> float:
        """Return the factor after the warm-up, at a fraction ``done`` of the run and a step."""
        return 1.0

    def factor(self, step: int, total: int, steps_per_epoch: int = 1) -> float:
        """Return the learning rate at a step of ``total``, as a fraction of the optimiser's."""
        if self.by == "epoch":
            step = step // steps_per_epoch * steps_per_epoch
        done = min(step / max(total, 1), 1.0)
        if done < self.warmup:
            return self.start + (1 - self.start) * done / self.warmup
        return self.after_warmup(done, step)


class Constant(Schedule):
    """The optimiser's rate, after the warm-up."""

    name: Literal["constant"] = "constant"


class Cosine(Schedule):
    """Half a cosine from the end of the warm-up down to ``end``, a fraction of the optimiser's rate."""

    end: Share = 0.0
    name: Literal["cosine"] = "cosine"

    def after_warmup(self, done: float, step: int) -> float:
        way = 1.0 if self.warmup == 1 else (done - self.warmup) / (1 - self.warmup)
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * way))


class OneCycle(Cosine):
    """A cosine after a warm-up of a fifth of the run."""

    warmup: Share = 0.2
    start: Share = 0.04
    name: Literal["one-cycle"] = "one-cycle"  # type: ignore[assignment]


class Milestones(Schedule):
    """A factor ``gamma`` at each milestone, a fraction of the run; by default Tsai et al.'s, 150 and 250 of 350."""

    at: tuple[Share, ...] = (150 / 350, 250 / 350)
    gamma: NotNegative = 0.1
    name: Literal["milestones"] = "milestones"

    def after_warmup(self, done: float, step: int) -> float:
        return self.gamma ** sum(done >= share for share in self.at)


class Exponential(Schedule):
    """A factor ``gamma`` after every ``every`` steps; without ``stairs`` the rate falls smoothly."""

    every: Count = 2000
    gamma: NotNegative = 0.96
    stairs: Flag = True
    name: Literal["exponential"] = "exponential"

    def after_warmup(self, done: float, step: int) -> float:
        return float(self.gamma ** (step // self.every if self.stairs else step / self.every))


AnySchedule = Annotated[Constant | Cosine | OneCycle | Milestones | Exponential, CHOICE, SHORT]
