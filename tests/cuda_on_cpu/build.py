"""Build the CUDA sources for the CPU and load them, once a session; what has not changed is not compiled again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tools import native

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "cuda_on_cpu"
KERNELS = "fastcaps_cuda_on_cpu"
"""The kernels of few poses, which reach every path; those of all poses are compiled for slow tests alone."""
ALL_POSES = "fastcaps_cuda_all_poses"
SAMPLES = "fastcaps_cuda_on_cpu_samples"


def _tool(name: str) -> str:
    return native.tool(name) or pytest.skip(f"the CUDA sources are not run on the CPU: no {name}")


def make(source: Path, folder: Path, target: str, **definitions: str | Path) -> Path:
    """Build a target of the CMake project in ``source`` and return the library; skip where there is no compiler.

    Raises
    ------
    RuntimeError
        If the sources do not compile, with the compiler's words.
    """
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        pytest.skip(f"{source.name} is not built: no C++ compiler")
    configure = [_tool("cmake"), "-S", str(source), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DFASTCAPS_TORCH_DIR={Path(torch.__file__).parent}"]
    configure += [f"-D{name}={value}" for name, value in definitions.items()]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # the test processes that run side by side build it once
        for command in (configure, [_tool("cmake"), "--build", str(folder), "--target", target]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = (done.stdout + done.stderr)[-8000:]
                raise RuntimeError(f"{source.name} does not build:\n{said}")
    return next(path for suffix in ("so", "dylib") if (path := folder / f"lib{target}.{suffix}").is_file())


@functools.cache
def library(target: str) -> ctypes.CDLL:
    """Build the CUDA sources for the CPU, load a target's ops into torch and return the library.

    ``FASTCAPS_CUDA_ON_CPU`` names another build of the kernels, for sanitizers and planted faults.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the CUDA sources are not run on the CPU: fibers are written for x86-64")
    other = os.environ.get("FASTCAPS_CUDA_ON_CPU") if target == KERNELS else None
    path = Path(other) if other else make(HERE, BUILD, target)
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


ORDERS = {"forward": 0, "backward": 1, "shuffled": 2, "mixed": -1}
"""Orders in which blocks and threads may come; "mixed" alternates the others."""


def set_order(target: str, order: str) -> None:
    """Choose the order for all launches to come."""
    library(target).cuda_on_cpu_order(ORDERS[order])


@contextlib.contextmanager
def guarded(target: str) -> Iterator[None]:
    """Give every tensor on the CPU separate memory, after which (and far before which) nothing can be accessed."""
    library(target).cuda_on_cpu_guard(True)
    try:
        yield
    finally:
        library(target).cuda_on_cpu_guard(False)
