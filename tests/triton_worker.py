"""Runs the Triton kernels without a GPU: a process of its own, in which Triton interprets them.

Triton decides when it is first imported whether to compile kernels or to interpret them, so a test process that has
compiled one cannot interpret another. Calls therefore go to a child, as tensors with their strides.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch


class Interpreter:
    """The child; it starts with the first call and ends with the process. Who interprets kernels himself needs none."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a function by name: ``"fastcaps.triton_kernels.attention.attention_routing"``."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            return _run(function, arguments, options)
        if self._child is None:
            environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
            self._child = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            atexit.register(self.close)
        assert self._child.stdin is not None and self._child.stdout is not None
        _send(self._child.stdin, (function, arguments, options))
        try:
            kind, answer = _receive(self._child.stdout)
        except EOFError:
            self._child = None  # it died; the next call starts another
            raise
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._child.wait(timeout=10)
            self._child = None


def _send(stream: BinaryIO, message: Any) -> None:
    memory = io.BytesIO()
    torch.save(message, memory)
    stream.write(struct.pack("<q", memory.tell()) + memory.getvalue())
    stream.flush()


def _receive(stream: BinaryIO) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the process that interprets kernels ended; its last words are above")
    return torch.load(io.BytesIO(stream.read(struct.unpack("<q", head)[0])), weights_only=False)


def _run(function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from fastcaps.triton_kernels.schedule import Limits

    limits = options.pop("limits", None)
    if limits is not None:
        options["limits"] = Limits(**limits)
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _serve() -> None:
    """Answer calls until the parent closes the pipe; whatever is printed goes to stderr."""
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: what no kernel writes shows
    while True:
        try:
            function, arguments, options = _receive(calls)
        except EOFError:
            return
        try:
            answer = ("result", _run(function, arguments, options))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        _send(answers, answer)


if __name__ == "__main__":
    _serve()
