"""Work in separate processes: one that crashes, hangs or swells must not take the benchmark with it.

It does happen: code that torch.compile makes may write past its buffers; a kernel that fails on a GPU takes its
process's hold of the device with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late  # Python's own only from 3.11 on
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_FULL = re.compile("OutOfMemory|out of memory|can't allocate memory|bad_alloc|MemoryError")
_SERVED: list[Any] = []
"""In a process: the one object whose methods are called."""


class WorkerError(RuntimeError):
    """A process died, hung or raised."""


def _start(threads: int, memory: float | None) -> None:
    """Make a process quiet, and keep it to its threads and to so many bytes. Runs in the process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes themselves are side by side
    if sys.platform == "linux":  # end with the parent, even one that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
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
    """An object ``served(*arguments)`` in a process, started when first needed and after it died or an error ended it.

    ``memory`` are the bytes that the process may use, ``folder`` is where it looks for modules first, ``environment``
    has variables beside this process's.
    """

    def __init__(
        self,
        threads: int,
        served: Callable[..., Any],
        *arguments: Any,
        memory: float | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] = {},
    ) -> None:
        self._environment = dict(environment)
        self._start, self._made, self._folders = (threads, memory), (served, arguments), [str(folder)] * bool(folder)
        self._pool: ProcessPoolExecutor | None = None
        self._answer: Future[Any] = Future()

    def begin(self, method: str, *given: Any) -> None:
        """Send a call off; :meth:`finish` waits for it."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=self._start)
        try:
            # a process starts with its parent's path and environment
            with patch.object(sys, "path", self._folders + sys.path), patch.dict(os.environ, self._environment):
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
            reason = f"no answer in {seconds:.0f} s"
        self.close()
        raise WorkerError(reason)

    def call(self, seconds: float, method: str, *given: Any) -> Any:
        self.begin(method, *given)
        return self.finish(seconds)

    def close(self) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
