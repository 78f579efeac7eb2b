"""Alternatives run in processes of their own: one that crashes, hangs or swells must not take the benchmark with it.

It does happen: vectorised loop tails of torch.compile's C++ code (torch 2.13) write past their buffers on some of these
shapes and the allocator aborts the process. Such a worker is started again with that one optimisation off, and the row
says so.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.alternatives import build, is_compiled, runner
from bench.workloads import find

__all__ = ["Worker", "WorkerError"]

_PREPARE_SECONDS = 240.0
_BLOCK_SECONDS = 120.0


class WorkerError(RuntimeError):
    """A worker died, hung or raised."""


def time_calls(call: Any, calls: int, warm: int) -> list[float]:
    """Return the seconds that each of ``calls`` calls took, after ``warm`` that are not counted."""
    for _ in range(warm):
        call()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result  # as the next call may need its memory
    return seconds


def _serve(pipe: Connection, name: str, threads: int, safe: bool, log: str) -> None:
    """Answer requests until the pipe closes. Runs in the worker's process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # two workers compile side by side as it is
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    torch.set_num_threads(threads)
    if safe:
        import torch._inductor.config as inductor

        inductor.cpp.enable_loop_tail_vec = False
    call: Any = None
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if request == "prepare":
                workload, batch, training = arguments
                call = None
                if is_compiled(name):
                    torch._dynamo.reset()
                work = find(workload)
                call = runner(build(name, work), work.inputs(batch), training)
                start = time.perf_counter()
                results = call()
                seconds = time.perf_counter() - start
                answer: Any = seconds, {key: tensor.detach().numpy() for key, tensor in results.items()}
                del results
            else:
                answer = time_calls(call, *arguments)
        except Exception as error:  # whatever it is, the parent reports it
            pipe.send((False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
        else:
            pipe.send((True, answer))


class Worker:
    """A process that runs one alternative, prepared for one workload after another.

    Parameters
    ----------
    name : str
        The alternative.
    threads : int
        Threads it may use.
    log : Path
        Where its messages go.

    Attributes
    ----------
    note
        Why it was started again for this case, if it was.
    first
        Seconds of the call by which the case was prepared, compilation included.
    """

    def __init__(self, name: str, threads: int, log: Path) -> None:
        self.name, self.threads, self.log = name, threads, log
        self.note = ""
        self.first = 0.0
        self._case: tuple[str, int, bool] | None = None
        self._deadline = 0.0
        self._process: Any = None
        self._pipe: Any = None

    def _start(self, safe: bool) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self.name, self.threads, safe, str(self.log))
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def _send(self, request: str, arguments: tuple[Any, ...], seconds: float) -> None:
        try:
            self._pipe.send((request, arguments))
        except (BrokenPipeError, ConnectionResetError) as error:
            self.close()
            raise WorkerError("the process has died") from error
        self._deadline = time.monotonic() + seconds

    def _receive(self) -> Any:
        try:
            if not self._pipe.poll(max(0.0, self._deadline - time.monotonic())):
                self.close()
                raise WorkerError("no answer in time")
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            code = self._process.exitcode
            self.close()
            raise WorkerError(f"the process died (exit code {code})") from None
        if not good:
            raise WorkerError(answer)
        return answer

    def begin(self, workload: str, batch: int, training: bool) -> None:
        """Send a case off to be prepared: inputs made, compiled where asked, run once. Workers do so side by side."""
        self.end()
        self._case = (workload, batch, training)
        self.note = ""
        if self._process is None:
            self._start(safe=False)
        self._send("prepare", self._case, _PREPARE_SECONDS)

    def ready(self) -> dict[str, Tensor]:
        """Wait for the case and return its result.

        Raises
        ------
        WorkerError
            If it cannot be run.
        """
        try:
            answer = self._receive()
        except WorkerError as error:
            if self._process is not None or not is_compiled(self.name):
                raise
            return self.again(str(error))
        return self._results(answer)

    def _results(self, answer: tuple[float, dict[str, Any]]) -> dict[str, Tensor]:
        self.first, found = answer
        return {key: torch.from_numpy(array) for key, array in found.items()}

    def again(self, reason: str) -> dict[str, Tensor]:
        """Start again, for this case only, without vectorised loop tails, and return the result.

        Raises
        ------
        WorkerError
            If the case cannot be run so either.
        """
        self.note = f"{reason}; run again without vectorised loop tails"
        self._start(safe=True)
        self._send("prepare", self._case or (), _PREPARE_SECONDS)
        return self._results(self._receive())

    def time(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of ``calls`` calls of the prepared case, timed by the worker itself.

        A compiled worker that dies here is started once more as above.
        """
        try:
            self._send("time", (calls, warm), _BLOCK_SECONDS)
            return self._receive()
        except WorkerError as error:
            if self._process is not None or not is_compiled(self.name) or self.note:
                raise
            self.again(str(error))
            self._send("time", (calls, warm), _BLOCK_SECONDS)
            return self._receive()

    def end(self) -> None:
        """Finish the case: a worker that had to be restarted for it is not kept for the next."""
        if self.note:
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.join(5)  # it ends by itself when the pipe closes
            if self._process.is_alive():
                self._process.kill()
                self._process.join(10)
        self._process = self._pipe = None
