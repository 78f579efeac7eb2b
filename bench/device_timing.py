"""Times, memory and rates of calls on a device; on the CPU by the clock, so that this can be tested there.

``timed``
    Each call alone, between two events, behind a write that pushes its inputs out of the second-level cache.
``replayed``
    Calls in a row in a CUDA graph, replayed: what small launches take without the host. Caches are warm.
``latency``
    From the call to the end of the device's work, as one sees it who waits: host included.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import fastcaps
from bench.inputs import size_of
from bench.timing import quantiles, time_calls

__all__ = ["describe", "latency", "measure", "peak", "replayed", "timed"]

Call = Callable[[], Any]

_SIZES = {"cuda": (2**30, 8192), "cpu": (2**22, 256)}
"""Bytes of the copied tensor, and the matrices' size."""

_SMALL = 5e-4
"""Seconds below which a call on a GPU is also timed by graph replay: a launch's own time is a part of it."""


def timed(device: torch.device, call: Call, seconds: float) -> dict[str, float]:
    """Return quantiles of single calls with a cold cache, which ought to take so many seconds together."""
    if device.type != "cuda":
        estimate = time_calls(call, 1, 1)[0]
        return quantiles(time_calls(call, max(5, min(60, int(seconds / estimate))), 0))
    from triton.testing import do_bench

    milliseconds = do_bench(call, warmup=max(1, int(250 * seconds)), rep=max(5, int(1e3 * seconds)), return_mode="all")
    return quantiles([one / 1e3 for one in milliseconds])


def replayed(call: Call, seconds: float) -> dict[str, Any]:
    """Return quantiles of a call's share of a CUDA graph that holds several, or why it ``failed`` to be captured."""
    from triton.testing import do_bench_cudagraph

    try:
        milliseconds = do_bench_cudagraph(call, rep=max(1, int(100 * seconds)), return_mode="all")
    except RuntimeError as error:
        return {"failed": str(error).partition("\n")[0][:300]}
    return quantiles([one / 1e3 for one in milliseconds])


def latency(device: torch.device, call: Call, calls: int = 20) -> float:
    """Return the median of the seconds from a call to the end of the device's work, one call at a time."""

    def waited() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return quantiles(time_calls(waited, calls, 3))["median"]


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
        with precision.active():
            took = timed(device, partial(torch.mm, left, right, out=torch.empty_like(left)), seconds)
        rates[name] = 2 * size**3 / took["median"]
    x = torch.zeros(32, device=device)
    return about | {"rates": rates, "three_launches": latency(device, lambda: x.add_(1).add_(1).add_(1))}
