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

import contextlib
import gc
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.timing import quantiles, time_calls

__all__ = ["Clock", "Memory", "latency", "measure_rates", "peak", "replayed", "three_launches", "timed"]

Call = Callable[[], Any]
Memory = dict[str, int]

_FEWEST, _MOST = 5, 60
_SIZES = {"cuda": (2**30, 8192), "cpu": (2**22, 256)}
"""Bytes of the copied tensor, and the matrices' size."""


class Clock:
    """Times calls on one device; those of one measurement ought to take ``seconds`` together."""

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
            return time_calls(call, calls, 0)
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

    Raises RuntimeError if the device has no graphs, or the call cannot be captured.
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


def measure_rates(clock: Clock, precisions: dict[str, Any]) -> dict[str, float]:
    """Return ``copy`` in bytes a second (read and written), and the operations a second of a product by precision.

    Random numbers, never zeros: the device's clock depends on them.
    """
    device = clock.device
    count, size = _SIZES[device.type]
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    rates = {"copy": 2 * count / timed(clock, partial(target.copy_, source))["median"]}
    del source, target
    for name, precision in precisions.items():
        left, right = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
        out = torch.empty_like(left)
        with precision.active():
            rates[name] = 2 * size**3 / timed(clock, partial(torch.mm, left, right, out=out))["median"]
    return rates


def three_launches(clock: Clock) -> dict[str, float]:
    """Return what three of the smallest launches take in a row: until the device is done, and in a graph's replay."""
    x = torch.zeros(32, device=clock.device)

    def launches() -> dict[str, torch.Tensor]:
        x.add_(1)
        x.add_(1)
        return {"x": x.add_(1)}

    found = {"latency": latency(clock, launches)["median"]}
    with contextlib.suppress(RuntimeError):  # no graphs here
        found["graph"] = replayed(clock, launches)["median"]
    return found
