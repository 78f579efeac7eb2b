"""How a call is measured: clocks of a CPU and a GPU, calls in turns, quantiles, peak memory of a process."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]

# ---- calls in turns, on the CPU --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much of each contender is timed."""

    rounds: int = 7
    block: float = 0.08  # seconds of a contender's calls in a round, at least
    budget: float = 3.0  # seconds of a contender in all rounds; it has three calls at least, however slow it is
    warm: float = 1.5  # seconds of calls that do not count, while they do not agree; there are three at least


FULL = Plan()
QUICK = Plan(rounds=3, block=0.005, budget=0.1, warm=0.02)
LEAST = 3  # samples of every contender
AGREE = 1.1  # calls agree if the slowest took at most this many times the fastest
FAR = 3.0  # a contender this many times slower than the fastest has only its least samples
BUSY = 2.0  # a load average for each core above which a row is doubtful
WIDE = 0.3  # a range of the middle 60 % of samples, as a share of their median, above which a figure is doubtful


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Return ``median``, ``p20``, ``p80`` (by linear interpolation) and the count ``calls`` of samples in seconds."""
    p20, median, p80 = np.quantile(samples, [0.2, 0.5, 0.8]).tolist()
    return {"median": median, "p20": p20, "p80": p80, "calls": len(samples)}


def timed(call: Call) -> tuple[float, float]:
    """Return the seconds that a call took, and those of the processor's cores together."""
    start, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - processor


def _warmed(call: Call, seconds: float) -> float:
    """Call until three calls in succession agree or ``seconds`` have passed; return the median of the last three."""
    taken: list[float] = []
    while len(taken) < 3 or (max(taken[-3:]) > AGREE * min(taken[-3:]) and sum(taken) < seconds):
        taken.append(timed(call)[0])
    return quantiles(taken[-3:])["median"]


def take_turns(calls: Mapping[str, Call], plan: Plan) -> dict[str, dict[str, float]]:
    """Time calls alternately in short blocks, so that what slows the machine for a while slows all of them.

    Within a block, after a call that does not count, a contender finds its own data in the caches, as it would in a
    training loop. Returns of each the quantiles of its seconds, and the median ``processor`` seconds.
    """
    estimates = {name: _warmed(call, plan.warm) for name, call in calls.items()}
    fastest, order = min(estimates.values()), list(calls)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(max(plan.rounds, LEAST)):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            estimate, far = estimates[name], estimates[name] > FAR * fastest and len(samples[name]) >= LEAST
            count = max(1, min(40, math.ceil(plan.block / estimate)))
            spent = sum(seconds for seconds, _ in samples[name])
            if len(samples[name]) >= LEAST and (far or spent + estimate * count > plan.budget):
                continue
            if estimate < plan.budget / 10:
                calls[name]()
            samples[name] += [timed(calls[name]) for _ in range(count)]
    found = {}
    for name, pairs in samples.items():
        wall, processor = zip(*pairs, strict=True)
        found[name] = quantiles(wall) | {"processor": quantiles(processor)["median"]}
    return found


# ---- one call on a GPU -----------------------------------------------------------------------------------------------

WARM = 0.04  # seconds that a row's timed calls take together; as many again with a cold cache, and in a graph
CALLS = (3, 60)  # timed calls: at least, at most
IN_GRAPH = 8  # calls of a graph
FLUSH = 2**28  # bytes that a write between two calls leaves in the second-level cache instead of the call's inputs


class Clock:
    """Times calls on one device: between two events, or by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def _dirt(self) -> torch.Tensor:
        return torch.empty(FLUSH if self.on_gpu else 2**20, dtype=torch.int8, device=self.device)

    def samples(self, call: Call, cold: bool = False) -> list[float]:
        """Return the seconds of single calls, queued behind each other; ``cold``: each behind a write that empties the
        second-level cache. Where a call takes less than its launches, these show."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        estimate = max(time.perf_counter() - start, 1e-6)
        count = int(min(max(WARM / estimate, CALLS[0]), CALLS[1]))
        if not self.on_gpu:
            return [timed(call)[0] for _ in range(count)]
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
        for begin, end in pairs:
            if cold:
                self._dirt.zero_()
            begin.record()
            call()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def host(self, call: Call) -> float:
        """Return the median of the seconds that a call keeps the host, the device being idle before."""
        taken = []
        for _ in range(15):
            self.wait()
            taken.append(timed(call)[0])
        return quantiles(taken)["median"]

    def graph(self, call: Call) -> dict[str, Any]:
        """Return quantiles of a call's share of a CUDA graph that holds several, or why it ``failed``."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                for _ in range(IN_GRAPH):
                    call()
            return quantiles([each / IN_GRAPH for each in self.samples(graph.replay)])
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


# ---- memory of a process, on Linux -----------------------------------------------------------------------------------

# Settings of mallopt, as malloc.h numbers them. By default glibc returns every large block to the system, and each call
# pays for the first touch of its pages, which differs from call to call and on a virtual machine takes longer than the
# votes' arithmetic. And it holds ever larger blocks the longer a process runs, which would be part of a peak.
KEEPING = {-4: 0, -1: 2**31 - 1}  # no mmap, and no trim
RETURNING = {-3: 128 << 10}  # the size from which blocks are mapped


def set_allocator(settings: Mapping[int, int]) -> None:
    """Set glibc's allocator, where it is the one."""
    library = ctypes.CDLL(None)
    for name, value in settings.items() if hasattr(library, "mallopt") else ():
        library.mallopt(name, value)


def status(field: str) -> int:
    """Return a field of this process's status, in bytes; OSError except on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak_growth(call: Call) -> tuple[int, Any]:
    """Return the bytes by which a call enlarges this process at its peak, and what it returns; OSError except on Linux.

    Exact to about 1 MB, by which the system's counters may lag.
    """
    set_allocator(RETURNING)
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak to the current size
    before = status("VmRSS")
    found = call()
    return max(0, status("VmHWM") - before), found
