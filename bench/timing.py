"""Fair timing: contenders take turns in short blocks, so that what slows the machine for a while slows all of them.

A block is a call that is not counted, then as many as fill the block's time. Within a block a contender finds its own
data in the caches, as it would in a network's training loop that it has to itself.

A GPU is measured by :func:`measure`: each call alone, with a cold cache; short ones by graph replay too. On the CPU
that goes by the clock, so that it can be tested there.
"""

from __future__ import annotations

import gc
import math
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import fastcaps
from bench.workload import size_of

__all__ = [
    "FULL",
    "MULTIPLY_ADDS",
    "QUICK",
    "Contender",
    "Plan",
    "describe",
    "measure",
    "multiply_adds",
    "quantiles",
    "take_turns",
    "time_calls",
]

Call = Callable[[], Any]


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


MULTIPLY_ADDS = 2**29  # operations of a thread, two for each multiply-add: some milliseconds


def multiply_adds(threads: int) -> Call:
    """Return a call that runs so many operations on each of some threads, multiply-adds and nothing else.

    No matrix product by a library will do for the peak: it stays a tenth below, and more where it is small.
    """
    from fastcaps._C import multiply_adds as run  # not there in an install without native code

    rounds = round(MULTIPLY_ADDS / run(1))
    pool = ThreadPoolExecutor(threads)
    return lambda: [*pool.map(run, [rounds] * threads)]


_SIZES = {"cuda": (2**30, 8192), "cpu": (2**22, 256)}  # bytes of the copied tensor, and the matrices' size
_SMALL = 5e-4  # seconds below which a call on a GPU is also timed by graph replay: without the host


def timed(device: torch.device, call: Call, seconds: float) -> dict[str, float]:
    """Return quantiles of single calls, which ought to take so many seconds together: on a GPU each between two events,
    behind a write that pushes its inputs out of the second-level cache."""
    if device.type != "cuda":
        estimate = time_calls(call, 1, 1)[0]
        return quantiles(time_calls(call, max(5, min(60, int(seconds / estimate))), 0))
    from triton.testing import do_bench

    milliseconds = do_bench(call, warmup=max(1, int(250 * seconds)), rep=max(5, int(1e3 * seconds)), return_mode="all")
    return quantiles([one / 1e3 for one in milliseconds])


def replayed(call: Call, seconds: float) -> dict[str, Any]:
    """Return quantiles of a call's share of a CUDA graph that holds several, or why it ``failed`` to be captured: what
    small launches take without the host, with warm caches."""
    from triton.testing import do_bench_cudagraph

    try:
        milliseconds = do_bench_cudagraph(call, rep=max(1, int(100 * seconds)), return_mode="all")
    except RuntimeError as error:
        return {"failed": str(error).partition("\n")[0][:300]}
    return quantiles([one / 1e3 for one in milliseconds])


def latency(device: torch.device, call: Call, calls: int = 20, warm: int = 3) -> float:
    """Return the median of the seconds from a call to the end of the device's work, one call at a time."""

    def waited() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return quantiles(time_calls(waited, calls, warm))["median"]


def peak(device: torch.device, call: Call) -> dict[str, int]:
    """Return what one call takes of a GPU's memory beside its inputs, in bytes: ``beyond`` does not count results."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = size_of(call().values())
    torch.cuda.synchronize(device)
    growth = torch.cuda.max_memory_allocated(device) - before
    return {"peak": growth, "results": results, "beyond": max(0, growth - results)}


def measure(device: torch.device, call: Call, seconds: float, alone: bool) -> dict[str, Any]:
    """Return a call's quantiles; for one sample ``alone`` its ``latency``; on a GPU its ``memory`` and, if it is short,
    ``graph``: quantiles by graph replay."""
    found: dict[str, Any] = dict(timed(device, call, seconds))
    if alone:
        found["latency"] = latency(device, call)
    if device.type == "cuda":
        found["memory"] = peak(device, call)
        if found["median"] < _SMALL:
            found["graph"] = replayed(call, seconds)
    return found


def describe(device: torch.device, seconds: float, precisions: dict[str, Any]) -> dict[str, Any]:
    """Return the device, its ``rates``, and the latency of ``three_launches`` of the smallest kernels.

    Rates are ``copy`` in bytes a second (read and written), and the operations a second of a product by precision. They
    are measured with random numbers, never zeros: the device's clock depends on them.
    """
    about: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        about = {"device": found.name, "multiprocessors": found.multi_processor_count, "cuda": torch.version.cuda}
        about |= {"capability": f"{found.major}.{found.minor}", "memory": found.total_memory}
    about["backends"] = {entry.name: entry.detail for entry in fastcaps.backends.listing()}
    count, size = _SIZES[device.type]
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    rates = {"copy": 2 * count / timed(device, partial(target.copy_, source), seconds)["median"]}
    del source, target
    for name, precision in precisions.items():
        left, right = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
        precision.use()
        took = timed(device, partial(torch.mm, left, right, out=torch.empty_like(left)), seconds)
        rates[name] = 2 * size**3 / took["median"]
    x = torch.zeros(32, device=device)
    return about | {"rates": rates, "three_launches": latency(device, lambda: x.add_(1).add_(1).add_(1))}
