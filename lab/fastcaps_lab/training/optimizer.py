"""Optimisers and schedules of the learning rate, by name.

A schedule returns factors for torch's ``LambdaLR``; its times are fractions of the run, from its start. (Torch's
schedulers count steps, and restart after a warm-up.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch import nn

from fastcaps_lab.training.settings import CHOICE, SHORT, Settings, Share

TORCH = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class Optimizer(Settings):
    """One of torch's optimisers, with its arguments, such as ``betas``, ``momentum`` and ``weight_decay``."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | float | tuple[float, ...]] = Field(init=False)
    name: Literal["adam", "adamw", "radam", "rmsprop", "sgd"] = "adam"
    lr: PositiveFloat = 1e-3

    @model_validator(mode="after")
    def _known_to_torch(self) -> Optimizer:
        try:
            self.build([nn.Parameter(torch.zeros(1))])
        except TypeError as error:
            raise ValueError(str(error)) from error
        return self

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return torch's optimiser."""
        return TORCH[self.name](parameters, lr=self.lr, **self.__pydantic_extra__)


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


class Milestones(Schedule):
    """A factor ``gamma`` at each milestone, a fraction of the run; by default Tsai et al.'s, 150 and 250 of 350."""

    at: tuple[Share, ...] = (150 / 350, 250 / 350)
    gamma: NonNegativeFloat = 0.1
    name: Literal["milestones"] = "milestones"

    def after_warmup(self, done: float, step: int) -> float:
        return self.gamma ** sum(done >= share for share in self.at)


class Exponential(Schedule):
    """A factor ``gamma`` after every ``every`` steps."""

    every: PositiveInt = 2000
    gamma: NonNegativeFloat = 0.96
    name: Literal["exponential"] = "exponential"

    def after_warmup(self, done: float, step: int) -> float:
        return float(self.gamma ** (step // self.every))


AnySchedule = Annotated[Constant | Cosine | Milestones | Exponential, CHOICE, SHORT]
