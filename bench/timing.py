"""Peak memory, and fair timing.

Contenders alternate in short blocks, so that what slows the machine for a while slows all of them. Each is called until
three calls in succession agree, or a limit is reached; none of these calls counts. Then all alternate, in three rounds
at least. Within a block, after a call that does not count, a contender finds its own data in the caches, as it would in
a network's training loop that it has to itself.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: int = 7  # in which a contender is timed, at most
    block: float = 0.08  # seconds that a contender's part of a round ought to take at least
    budget: float = 3.0  # seconds of a contender in all rounds; it has three calls at least, however slow it is
    warm: float = 1.5  # seconds of calls that do not count, while they do not agree; there is one at least
    sgemm: int = 2048  # size of the square matrices by which the machine is measured


FULL = Plan()
QUICK = Plan(rounds=3, block=0.005, budget=0.1, warm=0.02, sgemm=512)
LEAST = 3  # samples of every contender
AGREE = 1.1  # calls agree if the slowest took at most so many times the fastest
FAR = 3.0  # a contender so many times slower than the fastest has no more than its least samples
BUSY = 2.0  # a load average for each core above which a row is doubtful; the row's own processes make part of it
WIDE = 0.3  # a range of the middle 60 % of samples, as a share of their median, above which a figure is doubtful


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Return ``median``, ``p20``, ``p80`` (by linear interpolation) and the count ``calls`` of samples in seconds."""
    p20, median, p80 = np.quantile(samples, [0.2, 0.5, 0.8]).tolist()
    return {"median": median, "p20": p20, "p80": p80, "calls": len(samples)}


def status(field: str) -> int:
    """Return a field of this process's status, in bytes; OSError except on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def give_back() -> None:
    """Return to the system the free memory that Python and the C library hold for reuse."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def peak_growth(run: Call) -> int:
    """Return the bytes by which resident memory grows at the peak of ``run``, including its result; OSError except on
    Linux, whose record of the peak is reset first."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before, kept = status("VmRSS"), run()
    highest = status("VmHWM")
    del kept
    return max(0, highest - before)


def time_calls(call: Call, calls: int, warm: int) -> list[float]:
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
    """One that is timed, and the seconds of its calls."""

    name: str
    timer: Callable[[int, int], list[float]]  # (calls, warm): seconds of each call, after those that are not counted
    estimate: float  # seconds of a call
    rival: bool = True  # an alternative: if it is slow, few samples will do
    error: str = ""  # why it was given up
    samples: list[float] = field(default_factory=list)

    def run(self, calls: int, warm: int = 0) -> list[float]:
        """Return the seconds of some calls; of one that fails none, now and later."""
        if self.error:
            return []
        time.sleep(0.002)  # let the threads of other processes stop spinning
        try:
            return self.timer(calls, warm)
        except Exception as error:  # it is one row's column that is lost, not the run
            self.error, self.samples = str(error) or type(error).__name__, []
            return []

    def warm_up(self, seconds: float) -> None:
        """Call until three calls agree, or have taken so many seconds; what the last ones took is the estimate."""
        taken: list[float] = []
        while not self.error and (len(taken) < 3 or max(taken[-3:]) > AGREE * min(taken[-3:])):
            taken += self.run(1)
            if sum(taken) > seconds:
                break
        if taken and not self.error:
            self.estimate = quantiles(taken[-3:])["median"]


def take_turns(contenders: Sequence[Contender], plan: Plan) -> None:
    """Warm contenders up and time them alternately; the first one changes from round to round."""
    for one in contenders:
        one.warm_up(plan.warm)
    fastest = min((one.estimate for one in contenders if one.rival and not one.error), default=math.inf)
    for turn in range(max(plan.rounds, LEAST)):
        first = turn % len(contenders)
        for one in (*contenders[first:], *contenders[:first]):
            far = one.rival and one.estimate > FAR * fastest
            calls = 1 if far else max(1, min(40, math.ceil(plan.block / one.estimate)))
            warm = int(one.estimate < plan.budget / 10)
            more = turn < plan.rounds and not far and sum(one.samples) + one.estimate * (calls + warm) <= plan.budget
            if len(one.samples) < LEAST or more:
                one.samples += one.run(calls, warm)


def doubts(row: dict[str, Any]) -> list[str]:
    """Return why a row's figures are doubtful: what else ran beside it shows in them."""
    found = []
    for name, entry in (("fastcaps", row["fastcaps"]), (row["fastest"], row["alternatives"].get(row["fastest"]))):
        spread = (entry["p80"] - entry["p20"]) / entry["median"] if entry else 0.0
        if spread > WIDE:
            found.append(f"the middle 60 % of {name}'s calls lie {spread:.0%} apart")
    share, load, cores = row.get("peak_share", 0.0), row.get("load", 0.0), row["machine"].get("cores", 1)
    if load > BUSY * cores:  # which slows every call of two threads alike, and so shows in no spread
        found.append(f"the load average was {load:.1f} on {cores} cores")
    return found + [f"{share:.0%} of the machine's peak"] * (share > 1)


MULTIPLY_ADDS = 2**29  # operations of a thread, two for each multiply-add: some milliseconds


@cache
def _peak_loop() -> Any:
    """Compile and load ``bench/peak.cpp``, whose function runs without the GIL."""
    source = Path(__file__).with_name("peak.cpp")
    flags = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-DFASTCAPS_ISA=native"]
    compiler = [*shlex.split(os.environ.get("CXX") or "c++"), *flags, f"-I{source.parents[1] / 'csrc'}"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*compiler, str(source), "-o", f"{folder}/peak.so"], check=True)
        run: Any = ctypes.CDLL(f"{folder}/peak.so").fastcaps_multiply_adds
    run.argtypes, run.restype = [ctypes.c_int64], ctypes.c_double
    return run


def multiply_adds(threads: int) -> Call:
    """Return a call that runs so many operations on each of some threads, multiply-adds and nothing else: a matrix
    product by a library stays a tenth below the peak, and more where it is small."""
    run = _peak_loop()
    rounds = round(MULTIPLY_ADDS / run(1))
    pool = ThreadPoolExecutor(threads)
    return lambda: [*pool.map(run, [rounds] * threads)]
