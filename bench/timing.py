"""Fair timing: contenders take turns in short blocks, so that what slows the machine for a while slows all of them.

A block is a call that is not counted, then as many as fill the block's time. Within a block a contender finds its own
data in the caches, as it would in a network's training loop that it has to itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """One that is timed, and the seconds of its calls. A first call that was made anyway counts if it was slow."""

    name: str
    timer: Callable[[int, int], list[float]]  # (calls, warm): seconds of each call, after those that are not counted
    estimate: float  # seconds of a call
    budget: float  # seconds over all turns
    error: str = ""  # why it was given up

    def __post_init__(self) -> None:
        self.samples = [self.estimate] if self.estimate > self.budget / 3 else []


def take_turns(contenders: Sequence[Contender], plan: Plan) -> None:
    """Let contenders take their turns; who goes first changes from round to round."""
    for turn in range(plan.rounds):
        first = turn % len(contenders)
        for one in (*contenders[first:], *contenders[:first]):
            calls = max(1, min(40, math.ceil(plan.block / one.estimate)))
            warm = int(one.estimate < one.budget / 10)
            if one.error or (one.samples and sum(one.samples) + one.estimate * (calls + warm) > one.budget):
                continue
            time.sleep(0.002)  # let the threads of other processes stop spinning
            try:
                one.samples += one.timer(calls, warm)
            except Exception as error:  # it is one row's column that is lost, not the run
                one.error, one.samples = str(error) or type(error).__name__, []
