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

import torch

__all__ = ["Contender", "Plan", "Schedule", "Sgemm", "quantiles"]

Timer = Callable[[int, int], list[float]]
"""``timer(calls, warm)`` returns the seconds of each of ``calls`` calls, after ``warm`` that are not counted."""


@dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes
    ----------
    rounds
        Turns that each contender takes at most.
    block
        Seconds that a turn ought to take at least.
    budget
        Seconds that one alternative may take over all its turns; it has at least one turn, however slow it is.
    own
        Seconds that the subject may take over all its turns; it has at least two.
    sgemm
        Size of the square matrices by which the machine is measured.
    """

    rounds: int = 7
    block: float = 0.08
    budget: float = 3.0
    own: float = 12.0
    sgemm: int = 2048

    def calls(self, seconds: float) -> int:
        """Return how many calls of this length make a block."""
        return max(1, min(40, math.ceil(self.block / max(seconds, 1e-9))))


FULL = Plan()
QUICK = Plan(rounds=3, block=0.02, budget=0.5, own=1.0, sgemm=1024)


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Return ``median``, ``p20``, ``p80`` (by linear interpolation) and the count ``calls`` of samples in seconds."""
    values = torch.tensor(sorted(samples), dtype=torch.float64)
    p20, median, p80 = torch.quantile(values, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return {"median": median, "p20": p20, "p80": p80, "calls": len(samples)}


@dataclass
class Contender:
    """One that is timed, and what was measured of it.

    Attributes
    ----------
    name
        What it is called.
    timer
        How it is timed.
    samples
        Seconds of its calls so far.
    error
        Why it was given up, or an empty string.
    """

    name: str
    timer: Timer
    samples: list[float] = field(default_factory=list)
    error: str = ""
    estimate: float = 0.0
    spent: float = 0.0

    def turn(self, plan: Plan) -> None:
        """Run one block, unless the contender's budget is used up or it has failed."""
        if self.error:
            return
        start = time.perf_counter()
        try:
            if not self.estimate:
                first = self.timer(1, 0)
                self.estimate = first[0]
                if self.estimate > plan.budget / 3:
                    self.samples += first  # too slow to throw a call away
                    return
            calls = plan.calls(self.estimate)
            warm = 1 if self.estimate < plan.budget / 10 else 0
            if not self.samples or self.spent + self.estimate * (calls + warm) <= plan.budget:
                self.samples += self.timer(calls, warm)
        except Exception as error:  # it is one row's column that is lost, not the run
            self.error = str(error) or type(error).__name__
            self.samples.clear()
        finally:
            self.spent += time.perf_counter() - start


class Sgemm:
    """A square float32 matrix product by the library: the rate that this machine reaches, as a :class:`Contender`."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size = size
        self._left = torch.randn(size, size, generator=generator)
        self._right = torch.randn(size, size, generator=generator)
        self._out = torch.empty(size, size)

    def timer(self, calls: int, warm: int) -> list[float]:
        """Time the product; see :data:`Timer`."""
        seconds = []
        for index in range(warm + calls):
            start = time.perf_counter()
            torch.mm(self._left, self._right, out=self._out)
            if index >= warm:
                seconds.append(time.perf_counter() - start)
        return seconds

    def rate(self, seconds: float) -> float:
        """Return operations a second."""
        return 2 * self.size**3 / seconds


class Schedule:
    """Turns of all contenders around those of the subject, whose calls somebody else makes and times.

    Call :meth:`before` ahead of every timed call of the subject: at the start of a round it lets the others have their
    turns, then warms the subject up.

    Parameters
    ----------
    subject : callable
        The call that the benchmark times.
    others : sequence of Contender
    plan : Plan
    """

    def __init__(self, subject: Callable[[], Any], others: Sequence[Contender], plan: Plan) -> None:
        self._subject, self._others, self._plan = subject, list(others), plan
        start = time.perf_counter()
        subject()
        self._estimate = time.perf_counter() - start
        if self._estimate < plan.own / 12:
            start = time.perf_counter()
            subject()
            self._estimate = min(self._estimate, time.perf_counter() - start)
        self.calls_per_round = plan.calls(self._estimate)
        a_round = (self.calls_per_round + 1) * self._estimate
        self.rounds = max(2, min(plan.rounds, int(plan.own / max(a_round, 1e-9))))
        self._count = 0

    @property
    def total(self) -> int:
        """Timed calls of the subject in all rounds."""
        return self.rounds * self.calls_per_round

    def before(self) -> None:
        """Prepare the next call of the subject."""
        if self._count % self.calls_per_round == 0:
            turn = self._count // self.calls_per_round
            start = turn % max(1, len(self._others))
            for other in self._others[start:] + self._others[:start]:
                other.turn(self._plan)
            time.sleep(0.002)  # let the threads of other processes stop spinning
            until = time.perf_counter() + min(0.01, self._plan.block / 4)
            self._subject()
            while time.perf_counter() < until:
                self._subject()
        self._count += 1
