"""Peak memory of one call, really measured: in a process of its own, by the operating system's count.

What is counted is resident memory (RSS). The baseline is taken when the inputs lie in memory, and a miniature of the
layer and then the call itself have run once, so that code is loaded and threads are up; what they left to the allocator
was given back. The peak is the highest RSS that the kernel saw during the second call; what the first one keeps for
good, by the count of memory without a file behind it, is added. Results and gradients are part of the growth;
``beyond`` is the growth without them: what the call needed for itself. Either is exact to about 1 MB, by which the
system's counters may lag.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bench.inputs import Inputs, size_of

__all__ = ["Peak", "kept_by", "measure", "peak_of", "peak_supported"]

_STATUS = "/proc/self/status"
_RESET = "/proc/self/clear_refs"
_MMAP_THRESHOLD = -3  # of mallopt, in malloc.h


@dataclass(frozen=True)
class Peak:
    """Growth of a process during one call, in bytes."""

    growth: int  # peak minus baseline
    results: int  # of what the call returned
    inputs: int = 0  # of the arguments and the results' cotangents, which lay in memory before
    resident: int = 0  # the whole process at the peak: what a machine must have

    @property
    def beyond(self) -> int:
        """Growth without the results; never below 0."""
        return max(0, self.growth - self.results)

    @property
    def total(self) -> int:
        """All tensors of the layer: inputs, parameters, results, gradients, and what was needed for a time."""
        return self.inputs + self.growth

    def entry(self) -> dict[str, int]:
        """Return what is written down."""
        sizes = {"peak": self.growth, "results": self.results, "beyond": self.beyond}
        return sizes | {"inputs": self.inputs, "total": self.total, "resident": self.resident}


def _status(field: str) -> int:
    with open(_STATUS) as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")


def peak_supported() -> str:
    """Return an empty string if this system can measure a peak, or why it cannot."""
    if not os.path.exists(_STATUS):
        return f"no {_STATUS} on {sys.platform}"
    try:
        with open(_RESET, "w") as reset:
            reset.write("5")
    except OSError as error:
        return f"{_RESET}: {error}"
    return ""


def _give_back() -> None:
    """Return to the system what the allocator holds for reuse; from now on, large blocks as soon as they are free.

    By default glibc holds ever larger blocks the longer a process runs, and the peak would be of its habits.
    """
    gc.collect()
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
            library.mallopt(_MMAP_THRESHOLD, 128 << 10)
            library.malloc_trim(0)


def kept_by(call: Callable[[], Any]) -> int:
    """Return by how many bytes a call leaves the process larger, code not counted."""
    _give_back()
    before = _status("RssAnon")
    call()
    _give_back()
    return max(0, _status("RssAnon") - before)


def measure(call: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of this process grows at its peak during ``call()``.

    Memory that the allocator holds for reuse is given back first, so that using it again counts.
    """
    _give_back()
    with open(_RESET, "w") as reset:
        reset.write("5")  # the peak so far becomes the present size
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    return max(0, peak - before)


def peak_of(call: Callable[[], dict[str, Tensor]], inputs: Inputs, training: bool, kept: int = 0) -> Peak:
    """Measure one call, of which it is known what it keeps for good, in this process."""
    results = 0

    def counted() -> Any:
        nonlocal results
        found = call()
        results = size_of(found.values())
        return found

    growth = measure(counted) + kept
    given = inputs.nbytes + (size_of(inputs.grads.values()) if training else 0)
    return Peak(growth, results, given, _status("VmHWM"))
