"""Build the CUDA sources for the CPU and load them, once a session; what has not changed is not compiled again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "cuda_on_cpu"
KERNELS = "fastcaps_cuda_on_cpu"
SAMPLES = "fastcaps_cuda_on_cpu_samples"
DEVICES = "fastcaps_cuda_on_cpu_devices"


def _tool(name: str) -> str:
    """Return the path of a build tool; the one of this environment comes first."""
    try:
        package = __import__(name)
        own = Path(package.BIN_DIR if hasattr(package, "BIN_DIR") else package.CMAKE_BIN_DIR) / name
        if own.is_file():
            return str(own)
    except (ImportError, AttributeError):
        pass
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"the CUDA sources are not run on the CPU: no {name}")
    return found


@functools.cache
def library(target: str) -> ctypes.CDLL:
    """Build a target, load its ops into torch and return the library; skip where there is no compiler.

    Raises
    ------
    RuntimeError
        If the sources do not compile, with the compiler's words.
    """
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        pytest.skip("the CUDA sources are not run on the CPU: no C++ compiler")
    configure = [_tool("cmake"), "-S", str(HERE), "-B", str(BUILD), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DFASTCAPS_TORCH_DIR={Path(torch.__file__).parent}"]
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD / ".lock"):  # the test processes that run side by side build it once
        for command in (configure, [_tool("cmake"), "--build", str(BUILD), "--target", target]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stdout + done.stderr)[-8000:]
                raise RuntimeError(f"the CUDA sources do not build for the CPU:\n{said}")
    path = next(path for suffix in ("so", "dylib") if (path := BUILD / f"lib{target}.{suffix}").is_file())
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


ORDERS = {"forward": 0, "backward": 1, "shuffled": 2, "mixed": -1}
"""Orders in which blocks and threads may come; "mixed" takes the others by turns."""


def set_order(target: str, order: str) -> None:
    """Choose the order for all launches to come."""
    library(target).cuda_on_cpu_order(ORDERS[order])


@contextlib.contextmanager
def guarded(target: str) -> Iterator[None]:
    """Give every tensor on the CPU memory of its own, behind which (and far before which) nothing can be accessed."""
    library(target).cuda_on_cpu_guard(True)
    try:
        yield
    finally:
        library(target).cuda_on_cpu_guard(False)
