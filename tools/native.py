"""Other builds of the native sources, each in a separate folder: for sanitizers, planted faults and guard pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ("default", "avx2", "avx512")
"""Instruction sets that the CPU library can hold kernels for, as ``FASTCAPS_CPU_CAPABILITY`` names them."""
LEVEL_FLAGS = {"default": "", "avx2": "-mavx2 -mfma -mf16c"}
"""What compiles the CPU kernels once, as they are at this level; the library then calls its level "default"."""
_PROJECTS = {"fastcaps_cpu": ".", "fastcaps_cuda_on_cpu": "tests/cuda_on_cpu", "fastcaps_native": "tests/native"}


def tool(name: str) -> str | None:
    """Return the path of a program; the one of this environment comes first."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def _tool(name: str) -> str:
    if found := tool(name):
        return found
    raise SystemExit(f"fastcaps: needs {name} (pip install '.[test]')")


def call(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout and return what it said, both streams together."""
    return subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


def build(folder: Path, target: str, flags: str, source: Path = ROOT, *definitions: str) -> Path:
    """Build ``fastcaps_cpu`` for one instruction set, or a library of the tests, with compiler flags alone, of what has
    changed; RuntimeError with the compiler's words if it does not compile."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    configure = [_tool("cmake"), "-S", str(source / _PROJECTS[target]), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DFASTCAPS_TORCH_DIR={Path(torch.__file__).parent}", "-DCMAKE_BUILD_TYPE=Other"]
    configure += ["-DFASTCAPS_LEVELS=default", f"-DCMAKE_CXX_FLAGS={flags}", *(f"-D{one}" for one in definitions)]
    make = [_tool("cmake"), "--build", str(folder), "--target", target]
    make += ["-j", os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)), "--", "-k", "0"]
    for command in (configure, make):
        done = call(command, env={**os.environ, "FASTCAPS_CUDA": "0"})
        if done.returncode:
            raise RuntimeError(done.stdout)
    return folder / f"lib{target}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def module_headers() -> str:
    """Return the folders of headers that the Python module of ``tests/native`` includes, as CMake takes a list."""
    import pybind11

    return f"{pybind11.get_include()};{sysconfig.get_path('include')}"


def environment(library: Path, **more: str) -> dict[str, str]:
    """Return the environment in which Python uses that build of a library."""
    found = {name: value for name, value in os.environ.items() if name != "FASTCAPS_CPU_CAPABILITY"}
    names = {"libfastcaps_cuda_on_cpu": "FASTCAPS_CUDA_ON_CPU", "libfastcaps_native": "FASTCAPS_NATIVE"}
    name = names.get(library.stem, "FASTCAPS_CPU_LIBRARY")
    return {**found, name: str(library), "PYTHONPATH": str(ROOT), **more}


def guarded_library(folder: Path, level: str = "default") -> Path:
    """Build the CPU library whose scratch memory ends at guard pages, for an instruction set."""
    return build(folder, "fastcaps_cpu", f"-O1 -w {LEVEL_FLAGS[level]}".strip(), ROOT, "FASTCAPS_GUARDS=ON")


def guarded(folder: Path) -> dict[str, str]:
    """Build the library of ``tests/guard_pages.c`` in a folder; return the environment that uses it, empty on a system
    other than Linux and without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return {}
    folder.mkdir(exist_ok=True)
    library, source = folder / "guard.so", ROOT / "tests" / "guard_pages.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return {"LD_PRELOAD": str(library)}
