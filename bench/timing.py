"""Fair timing: contenders take turns in short blocks, so that what slows the machine for a while slows all of them.

A block is a call that is not counted, then as many as fill the block's time. Within a block a contender finds its own
data in the caches, as it would in a network's training loop that it has to itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["FULL", "QUICK", "Contender", "Plan", "quantiles", "take_turns", "time_calls"]


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: int = 7  # turns that each contender takes at most
    block: float = 0.08  # seconds that a turn ought to take at least
    budget: float = 3.0  # seconds of an alternative over all its turns; it has one call at least, however slow it is
    own: float = 20.0  # seconds of the package over all its turns
    sgemm: int = 2048  # size of the square matrices by which the machine is measured


FULL = Plan()
QUICK = Plan(rounds=3, block=0.02, budget=0.5, own=1.0, sgemm=1024)


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Return ``median``, ``p20``, ``p80`` (by linear interpolation) and the count ``calls`` of samples in seconds."""
    p20, median, p80 = np.quantile(samples, [0.2, 0.5, 0.8]).tolist()
    return {"median": median, "p20": p20, "p80": p80, "calls": len(samples)}


def time_calls(call: Callable[[], Any], calls: int, warm: int) -> list[float]:
    """Return the seconds that each of ``calls`` calls took, after ``warm`` that are not counted."""
    for _ in range(warm):
        call()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result  # as the next call may need its memory
    return seconds


@dataclass
class Contender:
    """One that is timed, and the seconds of its calls: at first of one call that was made anyway."""

    name: str
    timer: Callable[[int, int], list[float]]  # (calls, warm): seconds of each call, after those that are not counted
    samples: list[float]
    budget: float  # seconds over all turns; a first call that takes more is the only one
    spent: float = 0.0
    error: str = ""  # why it was given up
    estimate: float = field(init=False)

    def __post_init__(self) -> None:
        self.estimate = self.samples[0]
        if self.estimate > self.budget / 3:  # too slow to throw a call away
            self.spent = self.estimate
        else:
            self.samples = []

    def turn(self, plan: Plan) -> None:
        """Run one block, unless the budget is used up or a call has failed."""
        calls = max(1, min(40, math.ceil(plan.block / self.estimate)))
        warm = int(self.estimate < self.budget / 10)
        if self.error or (self.samples and self.spent + self.estimate * (calls + warm) > self.budget):
            return
        start = time.perf_counter()
        try:
            self.samples += self.timer(calls, warm)
        except Exception as error:  # it is one row's column that is lost, not the run
            self.error = str(error) or type(error).__name__
            self.samples = []
        self.spent += time.perf_counter() - start


def take_turns(contenders: Sequence[Contender], plan: Plan) -> None:
    """Let contenders take their turns; who goes first changes from round to round."""
    for turn in range(plan.rounds):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            time.sleep(0.002)  # let the threads of other processes stop spinning
            contender.turn(plan)
