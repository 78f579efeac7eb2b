"""The built CUDA library over a runtime without a GPU: what its host code asks of a device, call by call."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import build
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHARED = (227 << 10, 99 << 10)
"""The largest shared memory of a block, on either device of runtime.cpp."""
STREAMS = (0x1000, 0x2000)


@dataclass(frozen=True)
class Launch:
    """One launch: on which device and stream, of what kernel, and how large."""

    kernel: str
    device: int
    x: int
    y: int
    z: int
    threads: int
    shared: int
    stream: int
    captured: bool

    @property
    def name(self) -> str:
        """The kernel without its namespace, template arguments and parameters; torch's begin with "torch"."""
        return re.sub(r"<.*|void |\w+::", "", re.sub(r"\(anonymous namespace\)::", "", self.kernel)).partition("(")[0]

    @property
    def bounds(self) -> int:
        """The threads of a block that the kernel is compiled for."""
        found = re.search(r", (\d+), \d+>\(", self.kernel)
        return int(found[1]) if found else 256


@functools.cache
def _library(nvcc: Path) -> ctypes.CDLL:
    if torch.version.cuda is not None:
        pytest.skip("torch has CUDA: its own memory and streams are in use")
    objects = sorted((ROOT / "build").glob("cmake-*/CMakeFiles/fastcaps_cuda.dir"))
    if not objects:
        pytest.skip("needs the objects of the CUDA library, which is not built in this checkout")
    path = build.make(
        HERE,
        ROOT / "build" / "cuda_stub",
        "fastcaps_cuda_over_stub",
        FASTCAPS_CUDA_INCLUDE=nvcc.resolve().parents[1] / "include",
        FASTCAPS_CUDA_OBJECTS=objects[0],
    )
    ctypes.CDLL(str(path))
    stub = ctypes.CDLL(str(path.with_name("libcuda.so.1")))
    stub.stub_launch.restype = ctypes.c_char_p
    stub.stub_launches.restype = stub.stub_calls.restype = ctypes.c_int64
    return stub


@functools.cache
def _plain(name: str) -> str:
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()


class Host:
    """The library's ops, and what they did since ``begin``."""

    def __init__(self, nvcc: Path) -> None:
        self.stub = _library(nvcc)

    def begin(self, context: int = -1, captured: bool = False) -> None:
        """Forget all but what kernels are allowed, and give this thread the context of a device; -1: none."""
        self.stub.stub_begin(context, ctypes.c_int64(STREAMS[0]), ctypes.c_int64(STREAMS[1]), int(captured))

    def forget(self) -> None:
        """Forget calls and launches, but no attributes."""
        self.stub.stub_forget()

    def fail(self, function: str, error: int) -> None:
        """Let a function of the runtime fail from now on."""
        self.stub.stub_fail(function.encode(), error)

    def calls(self, function: str) -> int:
        count: int = self.stub.stub_calls(function.encode())
        return count

    @property
    def context(self) -> int:
        """The device whose context the thread has; -1: none."""
        context: int = self.stub.stub_context()
        return context

    @property
    def contexts(self) -> int:
        """The devices whose contexts are open, as bits."""
        opened: int = self.stub.stub_open()
        return opened

    def launches(self) -> list[Launch]:
        found = []
        for k in range(self.stub.stub_launches()):
            facts = (ctypes.c_int64 * 8)()
            kernel = _plain(self.stub.stub_launch(ctypes.c_int64(k), facts).decode())
            found.append(Launch(kernel, *facts[:7], bool(facts[7])))
        return found

    @staticmethod
    def moved(given: Any, device: int) -> Any:
        """Return what looks like a tensor, or those of a list, on a device; its numbers mean nothing."""
        if isinstance(given, Tensor):
            return torch.ops.fastcaps_cuda_stub.on_gpu(given, device)
        return [Host.moved(one, device) for one in given] if isinstance(given, list) else given
