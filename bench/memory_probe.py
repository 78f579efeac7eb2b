"""Peak memory of one call, really measured: in a process of its own, by the operating system's count.

What is counted is resident memory (RSS). The baseline is taken when the inputs lie in memory, and a miniature of the
layer and then the call itself have run once, so that code is loaded and threads are up. The peak is the highest RSS
that the kernel saw during the second call; what the first one keeps for good is added. Either is exact to about 1 MB,
by which the system's counters may lag.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.workload import Inputs, size_of

__all__ = ["keep_memory", "kept_by", "measure", "peak_of"]

_STATUS, _RESET = "/proc/self/status", "/proc/self/clear_refs"
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt, in malloc.h


def _status(field: str) -> int:
    with open(_STATUS) as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _give_back() -> None:
    """Return to the system what the allocator holds for reuse; from now on, large blocks as soon as they are free.

    By default glibc holds ever larger blocks the longer a process runs, and the peak would be of its habits.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, 128 << 10)
        library.malloc_trim(0)


def keep_memory() -> None:
    """Give back what is free now; from now on, let this process keep what it frees, as other allocators do.

    By default glibc returns every large block to the system, and each call pays for the first touch of its pages: on a
    virtual machine that took longer than the votes' arithmetic, and differed from call to call.
    """
    _give_back()
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def measure(call: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of this process grows at its peak during ``call()``."""
    _give_back()
    with open(_RESET, "w") as reset:
        reset.write("5")  # the present size is the peak so far
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    return max(0, peak - before)


def kept_by(call: Callable[[], Any]) -> int:
    """Return by how many bytes a call leaves the process larger, code not counted."""
    _give_back()
    before = _status("RssAnon")
    call()
    _give_back()
    return max(0, _status("RssAnon") - before)


def peak_of(call: Callable[[], dict[str, Tensor]], inputs: Inputs, training: bool) -> dict[str, int]:
    """Return the bytes of one call, the second.

    ``peak`` is the growth, ``results`` its part that the call returned, ``beyond`` the rest: what the call needed for
    itself. ``inputs`` lay in memory before; ``total`` counts all tensors of the layer, ``resident`` the whole process.
    """
    kept = kept_by(call)
    results: list[int] = []

    def counted() -> Any:
        found = call()
        results.append(size_of(found.values()))
        return found

    growth = measure(counted) + kept
    given = size_of([*inputs.arguments.values(), *(inputs.grads.values() if training else ())])
    found = {"peak": growth, "results": results[0], "beyond": max(0, growth - results[0])}
    return found | {"inputs": given, "total": given + growth, "resident": _status("VmHWM")}
