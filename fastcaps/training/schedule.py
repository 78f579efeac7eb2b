"""How the learning rate changes in a run: schedules by name.

Times are shares of the run (0.1, or ``150/350`` for 150 of 350 epochs). All schedules can begin with a warm-up, and
follow the steps or only the epochs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from fastcaps.training.fields import Choice, require_number

__all__ = ["Constant", "Cosine", "Exponential", "Milestones", "OneCycle", "Schedule"]


@dataclass(frozen=True)
class Schedule(Choice, ABC):
    """The base of schedules.

    Attributes
    ----------
    warmup : float
        The share of the run over which the rate grows in a straight line.
    start : float
        The first rate of the warm-up, as a share of the optimiser's.
    by : "step" or "epoch"
        Whether the rate changes with every step, or stays for an epoch.
    """

    warmup: float = 0.0
    start: float = 0.0
    by: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        require_number(self, "warmup start", most=1.0)

    @abstractmethod
    def after_warmup(self, done: float, step: int) -> float:
        """The factor when this share of the run is done, so many steps, and the warm-up over."""

    def factor(self, step: int, total: int, steps_per_epoch: int = 1) -> float:
        """The learning rate at a step of ``total``, as a share of the optimiser's."""
        if self.by == "epoch":
            step = step // steps_per_epoch * steps_per_epoch
        done = min(step / max(total, 1), 1.0)
        if done < self.warmup:
            return self.start + (1 - self.start) * done / self.warmup
        return self.after_warmup(done, step)


@dataclass(frozen=True)
class Constant(Schedule, name="constant"):
    """The optimiser's rate, once warmed up."""

    def after_warmup(self, done: float, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule, name="cosine"):
    """Down along half a cosine, from the end of the warm-up to the end of the run.

    Attributes
    ----------
    end : float
        The last rate, as a share of the optimiser's.
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "end", most=1.0)

    def after_warmup(self, done: float, step: int) -> float:
        way = 1.0 if self.warmup == 1 else (done - self.warmup) / (1 - self.warmup)
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * way))


@dataclass(frozen=True)
class OneCycle(Cosine, name="one-cycle"):
    """A cosine after a warm-up of a fifth of the run."""

    warmup: float = 0.2
    start: float = 0.04


@dataclass(frozen=True)
class Milestones(Schedule, name="milestones"):
    """Times a factor at each milestone.

    Attributes
    ----------
    at : tuple of float
        The milestones, as shares of the run. After 150 and 250 of 350 epochs by default, as Tsai et al. have it.
    gamma : float
        The factor.
    """

    at: tuple[float, ...] = (150 / 350, 250 / 350)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "at", most=1.0)
        require_number(self, "gamma")

    def after_warmup(self, done: float, step: int) -> float:
        return self.gamma ** sum(done >= share for share in self.at)


@dataclass(frozen=True)
class Exponential(Schedule, name="exponential"):
    """Times a factor again and again, at equal distances.

    Attributes
    ----------
    every : int
        Steps from one to the next.
    gamma : float
        The factor.
    stairs : bool
        Whether the rate waits for them, or falls smoothly.
    """

    every: int = 2000
    gamma: float = 0.96
    stairs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, "every", 1)
        require_number(self, "gamma")

    def after_warmup(self, done: float, step: int) -> float:
        times = step // self.every if self.stairs else step / self.every
        return float(self.gamma**times)
