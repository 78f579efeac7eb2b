"""An object in a separate process: one that crashes, hangs or takes too much memory ends no run.

Code that torch.compile makes may write past its buffers; a kernel that fails on a GPU ends its process's hold of it.
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
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_FULL = re.compile("OutOfMemory|out of memory|can't allocate memory|bad_alloc|MemoryError")


class WorkerError(RuntimeError):
    """A process died, hung or raised."""


def words(error: Exception) -> str:
    """Return an exception in one line: out of memory has many forms."""
    said = f"{type(error).__name__}: {str(error).strip()}"
    return "out of memory" if _FULL.search(said) else said.partition("\n")[0][:300]


def _serve(pipe: Connection, threads: int, memory: float | None, made: Callable[..., Any], given: Any) -> None:
    """Make an object and answer calls of its methods. Runs in the process, silently."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if sys.platform == "linux":  # end with the parent, even one that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    torch.set_num_threads(threads)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    served = None
    while True:
        method, arguments = pipe.recv()
        try:
            served = served or made(*given)
            pipe.send((getattr(served, method)(*arguments), ""))
        except Exception as error:  # as words: not every exception travels, and each one holds tensors
            pipe.send((None, words(error)))


class Remote:
    """An object ``served(*arguments)`` in a process, which starts when first needed and again after an error.

    ``memory`` are the bytes that the process may use, ``folder`` is where it looks for modules first, ``environment``
    has variables beside this process's.
    """

    def __init__(
        self, threads: int, served: Callable[..., Any], *arguments: Any, memory: float | None = None,
        folder: Path | None = None, environment: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        self._given = threads, memory, served, arguments
        self._path, self._environment = [str(folder)] * bool(folder), dict(environment)
        self._process: Any = None

    def begin(self, method: str, *given: Any) -> None:
        """Send a call off; :meth:`finish` waits for it."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, far = context.Pipe()
            self._process = context.Process(target=_serve, args=(far, *self._given))
            # a process starts with its parent's path and environment
            with patch.object(sys, "path", self._path + sys.path), patch.dict(os.environ, self._environment):
                self._process.start()
            far.close()
        with suppress(OSError):  # of a process that died: finish says so
            self._pipe.send((method, given))

    def finish(self, seconds: float) -> Any:
        """Wait at most ``seconds`` for the answer. Raises WorkerError if there is none; the process then ends."""
        try:
            answer, reason = self._pipe.recv() if self._pipe.poll(seconds) else (None, f"no answer in {seconds:.0f} s")
        except (EOFError, OSError):
            answer, reason = None, "the process died"
        if reason:
            self.close()
            raise WorkerError(reason)
        return answer

    def call(self, seconds: float, method: str, *given: Any) -> Any:
        self.begin(method, *given)
        return self.finish(seconds)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None
