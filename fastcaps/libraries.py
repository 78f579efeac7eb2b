"""The native libraries and the Triton kernels: loading, and questions to them.

Each is loaded at most once. A library that is missing or does not load is no error here; :mod:`fastcaps.backends` shows
the reason.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def library_path(name: str) -> Path:
    """Return the path of the library ``"cpu"`` or ``"cuda"``.

    ``FASTCAPS_CPU_LIBRARY`` and ``FASTCAPS_CUDA_LIBRARY`` name another build, for sanitizers and planted faults.
    """
    if other := os.environ.get(f"FASTCAPS_{name.upper()}_LIBRARY"):
        return Path(other)
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(__file__).with_name("lib") / f"libfastcaps_{name}.{suffix}"


def _to_c(argument: Any) -> Any:
    """Return an int or text as its C type, anything else as it is."""
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


class Library:
    """One native library, loaded with its ops registered; or ``problem``, the reason why not (else empty)."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        self.handle: ctypes.CDLL | None = None
        if not path.is_file():
            self.problem = "it is not built"
            return
        try:
            torch.ops.load_library(str(path))
            self.handle = ctypes.CDLL(str(path))
        except OSError as error:
            self.problem = f"it does not load ({error})"

    def ask(self, function: str, *arguments: int | str | ctypes.Array[ctypes.c_int64]) -> str | None:
        """Return the text that a C function returns; None without the library, the function or a result."""
        called = getattr(self.handle, function, None)
        if called is None:
            return None
        called.restype = ctypes.c_char_p
        answer = called(*(_to_c(argument) for argument in arguments))
        return None if answer is None else answer.decode()


@cache
def library(name: str) -> Library:
    """Load the library ``"cpu"`` or ``"cuda"``, once."""
    return Library(library_path(name))


def native_build_info() -> dict[str, Any]:
    """Return how the native libraries were built; empty if the package has none.

    ``version``, ``compiler``, ``torch_version`` (of the headers), ``stable_abi_target`` (the oldest torch that can load
    them), ``flags``, ``level_flags`` of each instruction set; ``cuda`` (toolkit, architectures, flags), or None and
    ``cuda_why_not``.
    """
    found: dict[str, Any] = json.loads(library("cpu").ask("fastcaps_build_info") or "{}")
    return found


_ARCHITECTURE = re.compile(r"(\d+)(\d)([af]?)(-real|-virtual)?(?:,|$)")  # major, minor, suffix letter, form


def architecture_names(architectures: str) -> str:
    """Write architectures as torch does: ``"80-real,90"`` as ``"8.0, 9.0+PTX"``."""
    found = _ARCHITECTURE.findall(architectures)
    return ", ".join(f"{major}.{minor}{kind}{'+PTX' * (form != '-real')}" for major, minor, kind, form in found)


def architecture_problem(architectures: str, capability: tuple[int, int]) -> str:
    """Return why code for ``architectures`` does not run on a device of that compute capability, or an empty string.

    Architectures are separated by commas, as CMake writes them: ``90-real`` is code for 9.0, which runs on 9.x from 9.0
    on; ``90`` and ``90-virtual`` hold PTX too, which runs on anything newer. ``90a`` runs on 9.0 only; ``100f`` on its
    family.
    """
    for major, minor, kind, form in _ARCHITECTURE.findall(architectures):
        own = int(major), int(minor)
        code = form != "-virtual" and kind != "a" and own[0] == capability[0] and own[1] <= capability[1]
        ptx = form != "-real" and not kind and own <= capability
        if capability == own or code or ptx:
            return ""
    names, (major, minor) = architecture_names(architectures), capability
    return f"it is built for compute capability {names}, the device has {major}.{minor}"


@cache
def triton_kernels(stem: str = "attention") -> tuple[ModuleType | None, str]:
    """Return the module of a pass's Triton kernels, such as ``"attention"``, and ""; or None and why not."""
    if importlib.util.find_spec("triton") is None:
        return None, "triton is not installed (pip install triton)"
    name = f"{__package__}.triton_kernels.{stem}"
    if importlib.util.find_spec(name) is None:
        return None, f"it has no kernels of the {stem} pass"
    try:
        version = importlib.import_module("triton").__version__
        found = re.match(r"(\d+)\.(\d+)", version)
        if found and (int(found[1]), int(found[2])) < (3, 6):
            return None, f"it needs Triton 3.6 or later (torch 2.10 brings it), got {version}"
        return importlib.import_module(name), ""
    except Exception as error:  # a broken installation of Triton may raise anything
        return None, f"triton does not load ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
