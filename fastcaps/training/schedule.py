"""How the learning rate changes in a run: schedules by name, as factors for torch's ``LambdaLR``.

Times are shares of the run (0.1, or ``150/350`` for 150 of 350 epochs), counted from its beginning. Torch's own
schedulers count steps, and begin anew after a warm-up.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from fastcaps.training.fields import CHOICE, SHORT, STRICT, Count, Flag, NotNegative, Settings, Share


@dataclass(frozen=True, config=STRICT)
class Schedule(Settings):
    """The base of schedules."""

    warmup: Share = 0.0  # the share of the run over which the rate grows in a straight line
    start: Share = 0.0  # the first rate of the warm-up, as a share of the optimiser's
    by: Literal["step", "epoch"] = "step"  # whether the rate changes with every step, or stays for an epoch

    def after_warmup(self, done: float, step: int) -> float:
        """The factor when this share of the run is done, so many steps, and the warm-up over."""
        return 1.0

    def factor(self, step: int, total: int, steps_per_epoch: int = 1) -> float:
        """The learning rate at a step of ``total``, as a share of the optimiser's."""
        if self.by == "epoch":
            step = step // steps_per_epoch * steps_per_epoch
        done = min(step / max(total, 1), 1.0)
        if done < self.warmup:
            return self.start + (1 - self.start) * done / self.warmup
        return self.after_warmup(done, step)


@dataclass(frozen=True, config=STRICT)
class Constant(Schedule):
    """The optimiser's rate, once warmed up."""

    name: Literal["constant"] = "constant"


@dataclass(frozen=True, config=STRICT)
class Cosine(Schedule):
    """Down along half a cosine, from the end of the warm-up to ``end``, a share of the optimiser's rate."""

    end: Share = 0.0
    name: Literal["cosine"] = "cosine"

    def after_warmup(self, done: float, step: int) -> float:
        way = 1.0 if self.warmup == 1 else (done - self.warmup) / (1 - self.warmup)
        return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * way))


@dataclass(frozen=True, config=STRICT)
class OneCycle(Cosine):
    """A cosine after a warm-up of a fifth of the run."""

    warmup: Share = 0.2
    start: Share = 0.04
    name: Literal["one-cycle"] = "one-cycle"  # type: ignore[assignment]


@dataclass(frozen=True, config=STRICT)
class Milestones(Schedule):
    """Times ``gamma`` at each milestone, a share of the run. By default those of Tsai et al., 150 and 250 of 350."""

    at: tuple[Share, ...] = (150 / 350, 250 / 350)
    gamma: NotNegative = 0.1
    name: Literal["milestones"] = "milestones"

    def after_warmup(self, done: float, step: int) -> float:
        return self.gamma ** sum(done >= share for share in self.at)


@dataclass(frozen=True, config=STRICT)
class Exponential(Schedule):
    """Times ``gamma`` after ``every`` so many steps; without ``stairs`` the rate falls smoothly in between."""

    every: Count = 2000
    gamma: NotNegative = 0.96
    stairs: Flag = True
    name: Literal["exponential"] = "exponential"

    def after_warmup(self, done: float, step: int) -> float:
        return float(self.gamma ** (step // self.every if self.stairs else step / self.every))


AnySchedule = Annotated[Constant | Cosine | OneCycle | Milestones | Exponential, CHOICE, SHORT]
