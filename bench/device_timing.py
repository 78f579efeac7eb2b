"""Times, memory and rates of calls on a device; on the CPU by the clock, so that this can be tested there.

``timed``
    Each call alone, between two events, behind a write that pushes its inputs out of the second-level cache.
``replayed``
    Calls in a row in a CUDA graph, replayed: what small launches take without the host. Caches are warm.
``latency``
    From the call to the end of the device's work, as one sees it who waits: host included.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.timing import quantiles, time_calls

__all__ = ["latency", "measure_rates", "peak", "replayed", "three_launches", "timed"]

Call = Callable[[], Any]

_SIZES = {"cuda": (2**30, 8192), "cpu": (2**22, 256)}
"""Bytes of the copied tensor, and the matrices' size."""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, call: Call, seconds: float) -> dict[str, float]:
    """Return quantiles of single calls with a cold cache, which ought to take so many seconds together."""
    if device.type != "cuda":
        estimate = time_calls(call, 1, 1)[0]
        return quantiles(time_calls(call, max(5, min(60, int(seconds / estimate))), 0))
    from triton.testing import do_bench

    milliseconds = do_bench(call, warmup=max(1, int(250 * seconds)), rep=max(5, int(1e3 * seconds)), return_mode="all")
    return quantiles([one / 1e3 for one in milliseconds])


def replayed(device: torch.device, call: Call, seconds: float) -> dict[str, float]:
    """Return quantiles of a call's share of a CUDA graph that holds several.

    Raises RuntimeError if the device has no graphs, or the call cannot be captured.
    """
    if device.type != "cuda":
        raise RuntimeError("no graphs on this device")
    from triton.testing import do_bench_cudagraph

    milliseconds = do_bench_cudagraph(call, rep=max(1, int(100 * seconds)), return_mode="all")
    return quantiles([one / 1e3 for one in milliseconds])


def latency(device: torch.device, call: Call, calls: int = 20) -> dict[str, float]:
    """Return quantiles of the time from a call to the end of the device's work, one call at a time."""
    seconds = []
    for index in range(calls + 3):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        if index >= 3:
            seconds.append(time.perf_counter() - start)
    return quantiles(seconds)


def peak(device: torch.device, call: Call) -> dict[str, int] | None:
    """Return what one call takes of the device's memory beside its inputs, in bytes; None where it is not counted.

    ``peak`` counts the results, ``beyond`` does not.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    found = call()
    torch.cuda.synchronize(device)
    growth = torch.cuda.max_memory_allocated(device) - before
    results = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    return {"peak": growth, "results": results, "beyond": max(0, growth - results)}


def measure_rates(device: torch.device, seconds: float, precisions: dict[str, Any]) -> dict[str, float]:
    """Return ``copy`` in bytes a second (read and written), and the operations a second of a product by precision.

    Random numbers, never zeros: the device's clock depends on them.
    """
    count, size = _SIZES[device.type]
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    rates = {"copy": 2 * count / timed(device, partial(target.copy_, source), seconds)["median"]}
    del source, target
    for name, precision in precisions.items():
        left, right = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
        with precision.active():
            took = timed(device, partial(torch.mm, left, right, out=torch.empty_like(left)), seconds)
        rates[name] = 2 * size**3 / took["median"]
    return rates


def three_launches(device: torch.device, seconds: float) -> dict[str, float]:
    """Return what three of the smallest launches take in a row: until the device is done, and in a graph's replay."""
    x = torch.zeros(32, device=device)

    def launches() -> torch.Tensor:
        return x.add_(1).add_(1).add_(1)

    found = {"latency": latency(device, launches)["median"]}
    with contextlib.suppress(RuntimeError):  # no graphs here
        found["graph"] = replayed(device, launches, seconds)["median"]
    return found
