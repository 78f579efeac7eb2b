"""Implementations run on a device in processes of their own, and are checked there against the float64 reference.

A kernel that fails takes its process's hold of the device with it, and torch.compile takes long: both are reasons to
keep the session out of it. The processes that compile prepare side by side; whoever is timed has the device to itself.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import fastcaps
from bench.alternatives import OURS, build, is_compiled, runner
from bench.device_timing import Clock, latency, peak, replayed, timed
from bench.gate import SAME, Gate
from bench.inputs import Inputs
from bench.precision import PRECISIONS
from bench.roofline import measure_rates, three_launches
from bench.worker import WorkerError
from bench.workloads import Workload
from fastcaps import backends

__all__ = ["TRITON", "DeviceCase", "Remote", "Runner"]

TRITON = f"{OURS}-triton"
"""This package by its Triton kernels, whatever else it has."""

_SMALL = 5e-4
"""Seconds below which a call is also timed by graph replay: a launch's own time is a part of it."""


@dataclass(frozen=True)
class DeviceCase:
    """One row: a workload at a batch, forward or a training step, in one precision."""

    workload: Workload
    batch: int
    training: bool
    precision: str

    @property
    def mode(self) -> str:
        """As the tables call it."""
        return "training step" if self.training else "forward"

    def __str__(self) -> str:
        return f"{self.workload.name} batch {self.batch} {self.mode} {self.precision}"


class Runner:
    """Runs, checks and times implementations of cases on one device, in this process.

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``.
    seconds : float
        What the timed calls of one measurement ought to take together.
    """

    def __init__(self, device: str, seconds: float) -> None:
        self.device = torch.device(device)
        self.clock = Clock(self.device, seconds)
        self._inputs: tuple[tuple[str, int], Inputs] | None = None
        self._gate: tuple[tuple[str, int, str], Gate] | None = None
        self._compiled: dict[tuple[str, DeviceCase], Callable[..., Any]] = {}

    def describe(self, seconds: float) -> dict[str, Any]:
        """Return the device, its versions, and its own rates; see :func:`bench.roofline.measure_rates`."""
        about: dict[str, Any] = {"device": platform.processor() or platform.machine(), "kind": self.device.type}
        if self.device.type == "cuda":
            found = torch.cuda.get_device_properties(self.device)
            about |= {
                "device": found.name,
                "capability": f"{found.major}.{found.minor}",
                "multiprocessors": found.multi_processor_count,
                "memory": found.total_memory,
                "cuda": torch.version.cuda,
            }
        about["backends"] = {entry.name: entry.detail for entry in backends.listing()}
        about["backend"] = backends.forced()
        about["versions"] = {
            "fastcaps": fastcaps.__version__,
            "torch": torch.__version__,
            "triton": _version("triton"),
            "python": platform.python_version(),
        }
        about["rates"] = measure_rates(self.clock, seconds)
        about["three_launches"] = three_launches(self.clock)
        return about

    def _inputs_of(self, case: DeviceCase) -> Inputs:
        """Return fresh tensors for a case; the numbers of the last workload and batch are kept on the device."""
        key = (case.workload.name, case.batch)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = self._gate = None
            self._inputs = (key, case.workload.inputs(case.batch).on(self.device))
        return self._inputs[1].to(PRECISIONS[case.precision].dtype)

    def _gate_of(self, case: DeviceCase, inputs: Inputs) -> Gate:
        key = (case.workload.name, case.batch, case.precision)
        if self._gate is None or self._gate[0] != key:
            self._gate = None
            self._gate = (key, Gate(case.workload, inputs, PRECISIONS[case.precision].epsilon))
        return self._gate[1]

    def _call(self, case: DeviceCase, name: str) -> Callable[[], Any]:
        """Return the timed call, compiled only once for a case."""
        key = (name, case)
        if key not in self._compiled:
            self._compiled[key] = build(OURS if name == TRITON else name, case.workload)
        call = runner(self._compiled[key], self._inputs_of(case), case.training)
        if name != TRITON:
            return call

        def by_triton() -> Any:
            with backends.backend("triton"):  # the whole step: the backward pass chooses for itself
                return call()

        return by_triton

    def check(self, case: DeviceCase, name: str) -> dict[str, Any]:
        """Run an implementation once and hold its result to the gate: the contract for ours, sameness for others.

        Returns ``complaint``, empty if all is well, and the ``errors`` and what is ``allowed``.
        """
        precision = PRECISIONS[case.precision]
        if is_compiled(name):
            torch._dynamo.reset()
            self._compiled.clear()
        with precision.active():
            gate = self._gate_of(case, self._inputs_of(case))
            found = self._call(case, name)()
            verdict = gate.judge(found, 0.0 if name.startswith(OURS) else max(SAME, precision.epsilon))
        if is_compiled(name):  # a process among many: what it need not keep, others need
            del found, gate
            self._gate = self._inputs = None
            self._empty()
        return {"complaint": verdict.complaint, "errors": verdict.errors, "allowed": verdict.allowed}

    def measure(self, case: DeviceCase, name: str) -> dict[str, Any]:
        """Time an implementation that :meth:`check` has seen, and count its memory.

        Returns quantiles as :func:`bench.timing.quantiles`, ``latency`` where the batch is 1, ``memory``, and for small
        launches ``graph``: quantiles by graph replay or why there are none.
        """
        with PRECISIONS[case.precision].active():
            call = self._call(case, name)
            found: dict[str, Any] = dict(timed(self.clock, call))
            if case.batch == 1:
                found["latency"] = latency(self.clock, call)["median"]
            found["memory"] = peak(self.clock, call)
            if self.device.type == "cuda" and found["median"] < _SMALL:
                try:
                    found["graph"] = replayed(self.clock, call)
                except RuntimeError as error:
                    found["graph"] = {"failed": _first_line(error)}
        return found

    def chosen(self, case: DeviceCase) -> str:
        """Return which backend serves the package's own call, in the words of ``fastcaps.explain``."""
        with PRECISIONS[case.precision].active():
            return case.workload.routing.explain(case.workload, self._inputs_of(case).arguments)

    def release(self) -> None:
        """Let go of everything of the last case."""
        self._inputs = self._gate = None
        self._compiled.clear()
        self._empty()

    def _empty(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _version(name: str) -> str | None:
    try:
        return str(__import__(name).__version__)
    except ImportError:
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _serve(pipe: Connection, device: str, seconds: float, log: str) -> None:
    """Answer calls of a :class:`Runner`'s methods until the pipe closes. Runs in the process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes themselves are side by side
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    torch.set_num_threads(1 if device == "cuda" else 2)
    try:
        served = Runner(device, seconds)
    except Exception as error:  # whatever it is, the parent reports it
        pipe.recv()
        pipe.send((False, _first_line(error), True))
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(served, method)(*arguments), False)
        except Exception as error:
            answer = (False, _first_line(error), _broken(served.device, error))
            error.__traceback__ = None  # it holds tensors
            del error
            if not answer[2]:
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
    """A :class:`Runner` in a process of its own, started when first needed and again after it died.

    Parameters
    ----------
    device : str
    seconds : float
        As of :class:`Runner`.
    log : Path
        Where its messages go.
    """

    def __init__(self, device: str, seconds: float, log: Path) -> None:
        self._arguments = (device, seconds, str(log))
        self._process: Any = None
        self._pipe: Any = None

    def begin(self, method: str, *arguments: Any) -> None:
        """Send a call off."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((method, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self.close()
            raise WorkerError("the process has died") from None

    def finish(self, until: float) -> Any:
        """Wait for the answer until the clock (``time.monotonic``) says ``until``.

        Raises
        ------
        WorkerError
            If the call raised, the process died (a new one serves the next call), or no answer came in time.
        """
        try:
            if not self._pipe.poll(max(0.0, until - time.monotonic())):
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
        return self.finish(time.monotonic() + seconds)

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
