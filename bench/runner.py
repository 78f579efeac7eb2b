"""Implementations run in processes of their own, and are checked there.

One that crashes, hangs or swells must not take the benchmark with it. It does happen: vectorised loop tails of
torch.compile's C++ code (torch 2.13) write past their buffers on some of these shapes and the allocator aborts the
process; a kernel that fails on a GPU takes its process's hold of the device with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import fastcaps
from bench.alternatives import OURS, build, is_compiled, runner
from bench.device_timing import latency, measure_rates, peak, replayed, three_launches, timed
from bench.gate import SAME, Gate
from bench.inputs import Inputs
from bench.memory_probe import kept_by, peak_of
from bench.timing import time_calls
from bench.workload import Workload

__all__ = ["PRECISIONS", "TRITON", "Case", "Precision", "Remote", "Runner", "WorkerError"]

TRITON = f"{OURS}-triton"
"""This package by its Triton kernels, whatever else it has."""

_SMALL = 5e-4
"""Seconds below which a call on a GPU is also timed by graph replay: a launch's own time is a part of it."""


class WorkerError(RuntimeError):
    """A process died, hung or raised."""


@dataclass(frozen=True)
class Precision:
    """A dtype, and what matrix products may round to."""

    name: str
    dtype: torch.dtype  # of all tensors
    tf32: bool  # whether float32 matrix products may round their operands to 10 bits of mantissa
    epsilon: float  # one unit in the last place of what is multiplied

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let matrix products and convolutions of this process run so inside a ``with`` block."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("fp32", torch.float32, False, torch.finfo(torch.float32).eps),
    "tf32": Precision("tf32", torch.float32, True, 2.0**-10),
    "bf16": Precision("bf16", torch.bfloat16, False, torch.finfo(torch.bfloat16).eps),
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

    ``seconds`` are what the timed calls of one measurement on a GPU ought to take together, ``sgemm`` is the size of
    the square product by which a CPU is measured, ``gates`` a folder through which processes share float64 results.
    """

    def __init__(self, device: str, seconds: float = 0.06, sgemm: int = 2048, gates: Path | None = None) -> None:
        self.device = torch.device(device)
        self._seconds, self._sgemm_size, self._gates = seconds, sgemm, gates
        self._sgemm: Callable[[], Any] | None = None
        self._inputs: tuple[tuple[str, int], Inputs] | None = None
        self._gate: tuple[tuple[str, int, str], Gate] | None = None
        self._built: dict[tuple[str, Case], Callable[..., Any]] = {}
        self._ready: Callable[[], Any] = dict

    def describe(self, seconds: float) -> dict[str, Any]:
        """Return the device and its own rates; see :mod:`bench.device_timing`."""
        about: dict[str, Any] = {"device": platform.processor() or platform.machine(), "kind": self.device.type}
        if self.device.type == "cuda":
            found = torch.cuda.get_device_properties(self.device)
            about |= {"device": found.name, "multiprocessors": found.multi_processor_count, "cuda": torch.version.cuda}
            about |= {"capability": f"{found.major}.{found.minor}", "memory": found.total_memory}
        about["backends"] = {entry.name: entry.detail for entry in fastcaps.backends.listing()}
        rates = measure_rates(self.device, seconds, PRECISIONS)
        return about | {"rates": rates, "three_launches": three_launches(self.device, seconds)}

    def _inputs_of(self, case: Case) -> Inputs:
        """Return fresh tensors for a case; the numbers of the last workload and batch are kept on the device."""
        key = (case.workload.name, case.batch)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = self._gate = None
            self._inputs = (key, case.workload.inputs(case.batch).to(self.device))
        return self._inputs[1].to(PRECISIONS[case.precision].dtype)

    def _gate_of(self, case: Case) -> Gate:
        key = (case.workload.name, case.batch, case.precision)
        if self._gate is None or self._gate[0] != key:
            self._gate = None
            shared = None if self._gates is None else self._gates / f"{'-'.join(map(str, key))}.pt"
            self._gate = (key, Gate(case.workload, self._inputs_of(case), PRECISIONS[case.precision].tf32, shared))
        return self._gate[1]

    def _call(self, case: Case, name: str) -> Callable[[], Any]:
        """Return the timed call, compiled only once for a case."""
        if (name, case) not in self._built:
            self._built[name, case] = build(OURS if name == TRITON else name, case.workload)
        call = runner(self._built[name, case], self._inputs_of(case), case.training)
        # the whole step: the backward pass chooses for itself
        return fastcaps.backend("triton")(call) if name == TRITON else call  # type: ignore[operator, no-any-return]

    def check(self, case: Case, name: str) -> dict[str, Any]:
        """Run an implementation once and hold its result to the gate: the contract for ours, sameness for others.

        Returns ``complaint``, empty if all is well, the ``errors``, what is ``allowed``, and the call's ``seconds``,
        compilation included. The call is then ready for :meth:`time`.
        """
        precision = PRECISIONS[case.precision]
        self._ready = dict
        self._built.clear()
        if is_compiled(name):
            torch._dynamo.reset()
        with precision.active():
            gate = self._gate_of(case)
            call = self._call(case, name)
            start = time.perf_counter()
            found = call()
            seconds = time.perf_counter() - start
            verdict = gate.judge(found, 0.0 if name.startswith(OURS) else max(SAME, precision.epsilon))
        self._ready = call
        if self.device.type == "cuda" and is_compiled(name):  # a process among many: what it need not keep, others need
            del found, gate, call
            self._let_go()
        told = {"complaint": "; ".join(verdict.complaints), "errors": verdict.errors, "allowed": verdict.allowed}
        return told | {"seconds": seconds}

    def package(self) -> str:
        """Return the file that this process has the package from."""
        return str(fastcaps.__file__)

    def prepare(self, case: Case, graph: bool) -> dict[str, Any]:
        """Make the package's call ready for :meth:`time`, unchecked; with ``graph``, one that keeps a graph.

        Returns the ``seconds`` of its second call, and ``some`` numbers of every result with the largest of all.
        """
        inputs, run = case.workload.inputs(case.batch), build(OURS, case.workload)
        call = runner(run, inputs, case.training)
        if graph:
            given = inputs.require_grad().arguments
            call = lambda: dict(zip(inputs.grads, run(**given), strict=True))  # noqa: E731
        call()
        start = time.perf_counter()
        found = call()
        seconds = time.perf_counter() - start
        self._ready = call
        with torch.no_grad():
            some = {
                name: (tensor.flatten()[:: 1 + tensor.numel() // 64].tolist(), tensor.abs().max().item())
                for name, tensor in found.items()
            }
        return {"seconds": seconds, "some": some}

    def time(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of calls of the case that was checked or prepared last."""
        return time_calls(self._ready, calls, warm)

    def time_sgemm(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of a square matrix product by the library: what this machine reaches."""
        if self._sgemm is None:
            left, right, out = torch.randn(3, self._sgemm_size, self._sgemm_size)
            self._sgemm = partial(torch.mm, left, right, out=out)
        return time_calls(self._sgemm, calls, warm)

    def measure(self, case: Case, name: str) -> dict[str, Any]:
        """Time an implementation that :meth:`check` has seen, by the device's events, and count its memory.

        Returns quantiles as :func:`bench.timing.quantiles`, ``latency`` where the batch is 1, ``memory``, and for small
        launches ``graph``: quantiles by graph replay or why there are none.
        """
        with PRECISIONS[case.precision].active():
            call = self._call(case, name)
            found: dict[str, Any] = dict(timed(self.device, call, self._seconds))
            if case.batch == 1:
                found["latency"] = latency(self.device, call)["median"]
            found["memory"] = peak(self.device, call)
            if self.device.type == "cuda" and found["median"] < _SMALL:
                try:
                    found["graph"] = replayed(self.device, call, self._seconds)
                except RuntimeError as error:
                    found["graph"] = {"failed": _first_line(error)}
        return found

    def memory(self, case: Case, name: str) -> dict[str, int]:
        """Measure the peak memory of one call on the CPU, in a process that ought to be fresh."""
        work, training = case.workload, case.training
        small = work.miniature()
        runner(build(name, small), small.inputs(1), training)()
        inputs = work.inputs(case.batch)
        call = runner(build(name, work), inputs, training)
        if is_compiled(name):
            call()  # else what the compiler keeps would count
        return peak_of(call, inputs, training, kept_by(call))

    def release(self) -> None:
        """Let go of everything of the last case."""
        self._built.clear()
        self._let_go()

    def _let_go(self) -> None:
        self._ready, self._gate, self._inputs = dict, None, None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _serve(pipe: Connection, log: str, threads: int, safe: bool, arguments: tuple[Any, ...]) -> None:
    """Answer calls of a :class:`Runner`'s methods until the pipe closes. Runs in the process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes themselves are side by side
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    torch.set_num_threads(threads)
    if safe:
        import torch._inductor.config as inductor

        inductor.cpp.enable_loop_tail_vec = False
    try:
        served = Runner(*arguments)
    except Exception as error:  # whatever it is, the parent reports it
        pipe.recv()
        pipe.send((False, _first_line(error), True))
        return
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(served, method)(*given), False)
        except Exception as error:
            answer = (False, _first_line(error), _broken(served.device, error))
            error.__traceback__ = None  # it holds tensors
        if not answer[0] and not answer[2]:
            served.release()
        pipe.send(answer)


def _broken(device: torch.device, error: BaseException) -> bool:
    """Tell whether the process can do no more: after a fault in a kernel every later call fails."""
    if device.type != "cuda" or isinstance(error, torch.OutOfMemoryError):
        return False
    try:
        torch.cuda.synchronize(device)
        return torch.ones(1, device=device).item() != 1.0
    except (RuntimeError, AssertionError):  # the latter from a torch without CUDA
        return True


class Remote:
    """A :class:`Runner` in a process of its own, started when first needed and again after it died."""

    def __init__(self, log: Path, threads: int, *arguments: Any) -> None:
        self.safe = False  # whether a process leaves out the one optimisation of torch.compile that crashes
        self._log, self._threads, self._arguments = log, threads, arguments
        self._process: Any = None
        self._pipe: Any = None

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    def begin(self, method: str, *arguments: Any) -> None:
        """Send a call off; :meth:`finish` waits for it."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            given = (theirs, str(self._log), self._threads, self.safe, self._arguments)
            self._process = context.Process(target=_serve, args=given, daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((method, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self.close()
            raise WorkerError("the process has died") from None

    def finish(self, seconds: float) -> Any:
        """Wait at most so many seconds for the answer.

        Raises WorkerError if the call raised, the process died (a new one serves the next call), or none came in time.
        """
        try:
            if not self._pipe.poll(max(0.0, seconds)):
                self.close()
                raise WorkerError("no answer in time")
            good, answer, broken = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            code = self._process.exitcode
            self.close()
            raise WorkerError(f"the process died (exit code {code})") from None
        if broken:
            self.close()
        if not good:
            raise WorkerError(answer)
        return answer

    def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        """Send a call off and wait at most so many seconds for the answer; see :meth:`finish`."""
        self.begin(method, *arguments)
        return self.finish(seconds)

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(1)  # it ends by itself when the pipe closes
            if self._process.is_alive():
                self._process.kill()
                self._process.join(10)
        self._process = self._pipe = None
