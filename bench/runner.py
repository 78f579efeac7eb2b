"""What a process of the benchmark does: it makes a call ready, holds its result to the gate, times and measures it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.alternatives import BEFORE, OURS, build, is_compiled, runner
from bench.gate import SAME, Gate
from bench.timing import give_back, multiply_adds, peak_growth, status, time_calls
from bench.workload import PRECISIONS, Case, size_of

_SHORT = 0.5  # seconds: a first call that took longer is not made again to see how long a call takes
# Settings of mallopt, as malloc.h numbers them. By default glibc returns every large block to the system, and each call
# pays for the first touch of its pages: on a virtual machine that took longer than the votes' arithmetic, and differed
# from call to call. And it holds ever larger blocks the longer a process runs: the peak would be of its habits.
KEEPING = {-4: 0, -1: 2**31 - 1}  # no mmap, and no trim
RETURNING = {-3: 128 << 10}  # the size from which blocks are mapped


def set_allocator(settings: dict[int, int]) -> None:
    """Give back to the system what is free, and set glibc's allocator, where it is the one."""
    give_back()
    library = ctypes.CDLL(None)
    for name, value in settings.items() if hasattr(library, "mallopt") else ():
        library.mallopt(name, value)


class Runner:
    """Runs, checks and times implementations of cases in this process.

    ``gates`` is a folder through which processes share float64 results.
    """

    def __init__(self, gates: Path | None = None) -> None:
        self._gates = gates
        self._ready: Callable[[], Any] = dict

    def check(self, case: Case, name: str, safe: bool = False) -> dict[str, Any]:
        """Run an implementation once and hold its result to the gate: the contract for ours, sameness for others.

        Returns ``complaint``, empty if all is well, the ``errors``, what is ``allowed``, and the ``seconds`` of a call.
        The call is then ready for :meth:`time`.
        """
        precision = PRECISIONS[case.precision]
        if is_compiled(name):
            torch._dynamo.reset()
        precision.use()
        self._ready = dict  # what the last call keeps may be large
        inputs = case.workload.inputs(case.batch).to(precision.dtype)
        shared = self._gates and self._gates / f"{case.workload.name}-{case.batch}-{case.precision}.pt"
        gate, inputs = Gate(case.workload, inputs, precision.tf32, shared), inputs.to(precision.dtype)  # other tensors
        set_allocator(KEEPING)
        call = runner(build(OURS if name == BEFORE else name, case.workload, safe, case.batch), inputs, case.training)
        start = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - start
        verdict = gate.judge(found, 0.0 if name.startswith(OURS) else max(SAME, precision.epsilon))
        del found
        if is_compiled(name) or seconds < _SHORT:
            seconds = time_calls(call, 1, 0)[0]
        self._ready = call
        return verdict._asdict() | {"seconds": seconds, "complaint": "; ".join(verdict.complaints)}

    def time(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of calls of the case that was checked last."""
        return time_calls(self._ready, calls, warm)

    def time_sgemm(self, size: int, calls: int, warm: int) -> list[float]:
        left, right, out = torch.randn(3, size, size)
        return time_calls(partial(torch.mm, left, right, out=out), calls, warm)

    def time_peak(self, calls: int, warm: int) -> list[float]:
        return time_calls(multiply_adds(torch.get_num_threads()), calls, max(1, warm))

    def memory(self, case: Case, name: str) -> dict[str, int]:
        """Return the bytes of one call on the CPU, in a process that ought to be fresh, by the operating system's count
        of resident memory.

        ``peak`` is the growth, ``results`` its part that the call returned, ``beyond`` the rest. ``inputs`` lay in
        memory before; ``total`` counts all tensors of the layer.
        """
        work = case.workload
        size = {"grid": work.grid and (work.kernel_size, work.kernel_size), "groups": work.groups and 1, "copies": 1}
        small = replace(work, batches=(1,), types=1, parents=min(2, work.parents), **size)
        runner(build(name, small, batch=1), small.inputs(1), case.training)()  # has code loaded, and threads started
        inputs = work.inputs(case.batch)
        growth, results = grown(runner(build(name, work), inputs, case.training))
        returned = size_of(results.values())
        given = size_of([*inputs.arguments.values(), *(inputs.grads.values() if case.training else ())])
        parts = {"results": returned, "beyond": max(0, growth - returned), "inputs": given}
        return {"peak": growth, **parts, "total": given + growth}


def kept_by(call: Callable[[], Any]) -> int:
    """Return by how many bytes a call leaves the process larger, code not counted."""
    give_back()
    before = status("RssAnon")
    call()
    give_back()
    return max(0, status("RssAnon") - before)


def grown(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the bytes by which a call, the second, enlarges the process at its peak, with what the first call keeps
    for good, and its results. It is exact to about 1 MB, by which the system's counters may lag."""
    set_allocator(RETURNING)
    kept = kept_by(call)
    results: list[Any] = []
    return round(peak_growth(lambda: results.append(call()))) + kept, results[0]
