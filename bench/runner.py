"""Implementations run in processes of their own, and are checked there.

One that crashes, hangs or swells must not take the benchmark with it. It does happen: code that torch.compile makes may
write past its buffers; a kernel that fails on a GPU takes its process's hold of the device with it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late  # Python's own only from 3.11 on
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastcaps
from bench.alternatives import BLOCKED, FOLDED, OURS, build, eager, is_compiled, runner, swept
from bench.gate import SAME, Gate
from bench.memory_probe import keep_memory, peak_of
from bench.timing import describe, latency, measure, multiply_adds, time_calls
from bench.workload import Inputs, Workload

__all__ = ["PRECISIONS", "TRITON", "Case", "Precision", "Remote", "Runner", "WorkerError"]

TRITON = f"{OURS}-triton"  # this package by its Triton kernels, whatever else it has
_SHORT = 0.5  # seconds: a first call that took longer is not made again to see how long a call takes


class WorkerError(RuntimeError):
    """A process died, hung or raised."""


@dataclass(frozen=True)
class Precision:
    """A dtype, and what matrix products may round to."""

    dtype: torch.dtype  # of all tensors
    tf32: bool  # whether float32 matrix products may round their operands to 10 bits of mantissa
    epsilon: float  # one unit in the last place of what is multiplied

    def use(self) -> None:
        """Let matrix products and convolutions of this process run so."""
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(torch.float32, False, torch.finfo(torch.float32).eps),
    "tf32": Precision(torch.float32, True, 2.0**-10),
    "bf16": Precision(torch.bfloat16, False, torch.finfo(torch.bfloat16).eps),
}


@dataclass(frozen=True)
class Case:
    """One row: a workload at a batch, forward or a training step, in one precision."""

    workload: Workload
    batch: int
    training: bool
    precision: str = "fp32"

    @property
    def mode(self) -> str:
        """As the tables call it."""
        return "training step" if self.training else "forward"

    def __str__(self) -> str:
        precision = "" if self.precision == "fp32" else f" {self.precision}"
        return f"{self.workload.name} batch {self.batch} {self.mode}{precision}"


class Runner:
    """Runs, checks and times implementations of cases on one device, in this process.

    ``seconds`` are what the timed calls of one measurement on a GPU ought to take together, ``gates`` is a folder
    through which processes share float64 results.
    """

    def __init__(self, device: str, seconds: float = 0.06, gates: Path | None = None) -> None:
        self.device, self._seconds, self._gates = torch.device(device), seconds, gates
        self._judged: tuple[tuple[Any, ...], Gate, Inputs] | None = None  # of the last workload, batch and precision
        self._ready: Callable[[], Any] = dict

    def describe(self) -> dict[str, Any]:
        """Return the device and its own rates; see :mod:`bench.timing`."""
        return describe(self.device, 5 * self._seconds, PRECISIONS)

    def check(self, case: Case, name: str, safe: bool = False) -> dict[str, Any]:
        """Run an implementation once and hold its result to the gate: the contract for ours, sameness for others.

        Returns ``complaint``, empty if all is well, the ``errors``, what is ``allowed``, the ``seconds`` of a call, and
        the ``settings`` that serve it best, where it runs in blocks. The call is then ready for :meth:`time` or
        :meth:`measure`.
        """
        precision = PRECISIONS[case.precision]
        if is_compiled(name):
            torch._dynamo.reset()
        precision.use()
        gate, inputs = self._gate(case)
        if self.device.type == "cpu":
            keep_memory()
        run, settings = build(OURS if name == TRITON else name, case.workload, safe, case.batch), {}
        if name in (BLOCKED, FOLDED):
            settings = swept(name, case.workload, inputs, case.training, self._seconds_of)
            run = eager(name, case.workload, settings)
        call = runner(run, inputs, case.training)
        if name == TRITON:  # the whole step: the backward pass chooses for itself
            call = fastcaps.backend("triton")(call)  # type: ignore[operator]
        start = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - start
        verdict = gate.judge(found, 0.0 if name.startswith(OURS) else max(SAME, precision.epsilon))
        del found
        if is_compiled(name) or seconds < _SHORT:
            seconds = time_calls(call, 1, 0)[0]
        self._ready = call
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this process need not keep, others need
        told = {"complaint": "; ".join(verdict.complaints), "errors": verdict.errors, "allowed": verdict.allowed}
        return told | {"seconds": seconds, "settings": settings}

    def _seconds_of(self, call: Callable[[], Any]) -> float:
        """Return about how long a call takes."""
        first = latency(self.device, call, 1, 0)
        return latency(self.device, call, 3, 0) if first < _SHORT else first

    def _gate(self, case: Case) -> tuple[Gate, Inputs]:
        """Return the gate of a case, and tensors of its own for one call."""
        key, precision = (case.workload.name, case.batch, case.precision), PRECISIONS[case.precision]
        if self._judged is None or self._judged[0] != key:
            self._judged, self._ready = None, dict
            inputs = case.workload.inputs(case.batch).to(self.device).to(precision.dtype)
            shared = None if self._gates is None else self._gates / f"{'-'.join(map(str, key))}.pt"
            self._judged = key, Gate(case.workload, inputs, precision.tf32, shared), inputs
        return self._judged[1], self._judged[2].to(self.device)

    def time(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of calls of the case that was checked last."""
        return time_calls(self._ready, calls, warm)

    def time_sgemm(self, size: int, calls: int, warm: int) -> list[float]:
        """Return the seconds of a square matrix product by the library: what this machine reaches."""
        left, right, out = torch.randn(3, size, size)
        return time_calls(partial(torch.mm, left, right, out=out), calls, warm)

    def time_peak(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of multiply-adds and nothing else on all threads; see :mod:`bench.timing`."""
        return time_calls(multiply_adds(torch.get_num_threads()), calls, max(1, warm))

    def measure(self, case: Case) -> dict[str, Any]:
        """Time the call that was checked last, and count its memory; see :mod:`bench.timing`."""
        return measure(self.device, self._ready, self._seconds, alone=case.batch == 1)

    def memory(self, case: Case, name: str) -> dict[str, int]:
        """Measure the peak memory of one call on the CPU, in a process that ought to be fresh."""
        small = case.workload.miniature()
        runner(build(name, small, batch=1), small.inputs(1), case.training)()
        inputs = case.workload.inputs(case.batch)
        return peak_of(runner(build(name, case.workload), inputs, case.training), inputs, case.training)


_FULL = re.compile("OutOfMemory|out of memory|can't allocate memory|bad_alloc|MemoryError")
_SERVED: list[Any] = []
"""In a process: the one object whose methods are called."""


def _start(threads: int, memory: float | None) -> None:
    """Make a process quiet, and keep it to its threads and to so many bytes. Runs in the process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes themselves are side by side
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(threads)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))


def _answer(served: Callable[..., Any], arguments: tuple[Any, ...], method: str, given: tuple[Any, ...]) -> Any:
    """Call a method of the served object, which is made first where there is none. Runs in the process."""
    try:
        if not _SERVED:
            _SERVED.append(served(*arguments))
        return getattr(_SERVED[0], method)(*given)
    except Exception as error:  # as words: not every exception travels, and each one holds tensors
        said = f"{type(error).__name__}: {str(error).strip()}"
        raise WorkerError("out of memory" if _FULL.search(said) else said.partition("\n")[0][:300]) from None


class Remote:
    """An object in a process of its own, started when first needed and again after it died or an error ended it.

    ``memory`` are the bytes that the process may use.
    """

    def __init__(self, threads: int, served: Callable[..., Any], *arguments: Any, memory: float | None = None) -> None:
        self._start, self._made = (threads, memory), (served, arguments)
        self._pool: ProcessPoolExecutor | None = None
        self._answer: Future[Any] = Future()

    def begin(self, method: str, *given: Any) -> None:
        """Send a call off; :meth:`finish` waits for it."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=self._start)
        try:
            self._answer = self._pool.submit(_answer, *self._made, method, given)
        except BrokenProcessPool as error:
            self._answer = Future()
            self._answer.set_exception(error)

    def finish(self, seconds: float) -> Any:
        """Wait at most so many seconds for the answer. Raises WorkerError if there is none; the process then ends."""
        try:
            return self._answer.result(seconds)
        except BrokenProcessPool:
            reason = "the process died"
        except WorkerError as error:
            reason = str(error)
        except Late:
            reason = "no answer in time"
        self.close()
        raise WorkerError(reason)

    def call(self, seconds: float, method: str, *given: Any) -> Any:
        """Send a call off and wait at most so many seconds for the answer; see :meth:`finish`."""
        self.begin(method, *given)
        return self.finish(seconds)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
