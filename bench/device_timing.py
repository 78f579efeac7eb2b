"""Times and memory of calls on a device, by its own events; on the CPU by the clock, so that this can be tested there.

``timed``
    Each call alone, between two events, after a write that pushes its inputs out of the second-level cache. While the
    device writes, the host runs ahead: what is measured is the device's time, as long as the host keeps up.
``replayed``
    Calls in a row in a CUDA graph, replayed: what small launches take without the host. Caches are warm.
``latency``
    From the call to the end of the device's work, as one sees it who waits: host included.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.timing import quantiles

__all__ = ["Clock", "Memory", "latency", "peak", "replayed", "timed"]

Call = Callable[[], Any]
Memory = dict[str, int]

_FEWEST, _MOST = 5, 60


class Clock:
    """Times calls on one device.

    Parameters
    ----------
    device : torch.device
    seconds : float
        What the timed calls of one measurement ought to take together.
    """

    def __init__(self, device: torch.device, seconds: float = 0.08) -> None:
        self.device, self.seconds = device, seconds
        self._flush: torch.Tensor | None = None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def flush(self) -> None:
        """Write four times the second-level cache."""
        if self._flush is None:
            size = torch.cuda.get_device_properties(self.device).L2_cache_size
            self._flush = torch.empty(4 * max(size, 2**24) // 4, dtype=torch.int32, device=self.device)
        self._flush.zero_()

    def spans(self, call: Call, calls: int, cold: bool) -> list[float]:
        """Return the seconds of each of ``calls`` calls, behind a flush of the cache where ``cold``."""
        if self.device.type != "cuda":
            seconds = []
            for _ in range(calls):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            return seconds
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for before, after in events:
            if cold:
                self.flush()
            before.record()
            call()
            after.record()
        self.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in events]

    def count(self, estimate: float) -> int:
        """Return how many calls of this length to time."""
        return max(_FEWEST, min(_MOST, math.ceil(self.seconds / max(estimate, 1e-9))))


def timed(clock: Clock, call: Call) -> dict[str, float]:
    """Return quantiles of single calls with a cold cache; see :func:`bench.timing.quantiles`."""
    call()
    estimate = sorted(clock.spans(call, 3, cold=True))[1]
    return quantiles(clock.spans(call, clock.count(estimate), cold=True))


def latency(clock: Clock, call: Call, calls: int = 20) -> dict[str, float]:
    """Return quantiles of the time from a call to the end of the device's work, one call at a time."""
    seconds = []
    for index in range(calls + 3):
        clock.synchronize()
        start = time.perf_counter()
        call()
        clock.synchronize()
        if index >= 3:
            seconds.append(time.perf_counter() - start)
    return quantiles(seconds)


def replayed(clock: Clock, call: Call, together: int = 10) -> dict[str, float]:
    """Return quantiles of a call's share of a CUDA graph that holds ``together`` of them.

    Raises
    ------
    RuntimeError
        If the device has no graphs, or the call cannot be captured.
    """
    if clock.device.type != "cuda":
        raise RuntimeError("no graphs on this device")
    stream = torch.cuda.Stream(clock.device)
    stream.wait_stream(torch.cuda.current_stream(clock.device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream(clock.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(together):
            call()
    graph.replay()
    estimate = sorted(clock.spans(graph.replay, 3, cold=False))[1]
    spans = clock.spans(graph.replay, clock.count(estimate), cold=False)
    del graph
    return quantiles([seconds / together for seconds in spans])


def peak(clock: Clock, call: Call) -> Memory | None:
    """Return what one call takes of the device's memory beside its inputs, in bytes; None where it is not counted.

    ``peak`` counts the results, ``beyond`` does not.
    """
    if clock.device.type != "cuda":
        return None
    gc.collect()
    clock.synchronize()
    torch.cuda.reset_peak_memory_stats(clock.device)
    before = torch.cuda.memory_allocated(clock.device)
    found = call()
    clock.synchronize()
    growth = torch.cuda.max_memory_allocated(clock.device) - before
    results = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    return {"peak": growth, "results": results, "beyond": max(0, growth - results)}
