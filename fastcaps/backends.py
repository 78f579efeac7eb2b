"""Which code runs a call: the list of backends, how to force one, and why the others do not run.

This is a module of functions, not an object: ``fastcaps.backends.listing()`` returns the four backends (``cuda``,
``triton``, ``cpu``, ``reference``) with what stands in the way of each, ``fastcaps.backends.show()`` prints them,
``fastcaps.backends.backend(name)`` (also ``fastcaps.backend``) forces one inside a ``with`` block, and
``fastcaps.functional.explain`` (also ``fastcaps.explain``) says what one call would do. The environment variable
``FASTCAPS_BACKEND``, read once at import, forces one for the whole process.

A forced backend never falls back: a call that it cannot take raises :class:`BackendError`.

The choice is one global of the process, like the flags of :mod:`torch.backends`: set it before threads start.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fastcaps import ops

__all__ = [
    "NAMES",
    "Backend",
    "BackendError",
    "backend",
    "default_dtypes",
    "forced",
    "listing",
    "native_capability",
    "native_serves",
    "refusal",
    "show",
]

NAMES = ("cuda", "triton", "cpu", "reference")
"""The backends in order of preference."""

_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_GPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class BackendError(RuntimeError):
    """A backend was asked for by name and cannot take the call."""


@dataclass(frozen=True)
class Backend:
    """One backend of this process.

    Attributes
    ----------
    name
        ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    available
        Whether it can run calls here.
    detail
        What it is and, for one that is not available, why not.
    """

    name: str
    available: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name:<10} {'yes' if self.available else 'no':<4} {self.detail}"


_library: ctypes.CDLL | None = None
_library_problem = ""
_native_ready = False
_forced: str | None = None


def _library_path() -> Path:
    """Return where an installation keeps the native CPU library."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(__file__).with_name("lib") / f"libfastcaps_cpu.{suffix}"


def _load_native() -> None:
    """Load the native CPU library, or have the reference serve the CPU and say so, once."""
    global _library, _library_problem, _native_ready, _forced
    path = _library_path()
    if not path.is_file():
        _library_problem = "the native library is not built"
    else:
        try:
            torch.ops.load_library(str(path))
            _library = ctypes.CDLL(str(path))
            _library.fastcaps_capability.restype = ctypes.c_char_p
            _library.fastcaps_capabilities_built.restype = ctypes.c_char_p
            _native_ready = native_capability() is not None
            if not _native_ready:
                _forced = "cpu"  # a level was asked for by name: every call says why it cannot be had
        except OSError as error:
            _library_problem = f"the native library does not load ({error})"
    if _library_problem:
        ops.serve_by_reference("CPU")
        warnings.warn(
            f"fastcaps: {_library_problem}; the reference serves instead. Results are the same, but votes are stored: "
            "it is slow and needs much memory. Install fastcaps without FASTCAPS_BUILD=0 for the compiled kernels.",
            RuntimeWarning,
            stacklevel=2,
        )
    ops.serve_by_reference("CUDA")


def native_capability() -> str | None:
    """Return the instruction set that the native library chose; None without a library or a usable level."""
    if _library is None:
        return None
    level: bytes | None = _library.fastcaps_capability()
    return None if level is None else level.decode()


def native_serves() -> bool:
    """Return whether the compiled kernels are what runs on the CPU."""
    return _native_ready


def _native_problem() -> str:
    """Return why the native library cannot run calls, or an empty string."""
    if _library is not None and native_capability() is None:
        wanted = os.environ.get("FASTCAPS_CPU_CAPABILITY", "")
        built = _library.fastcaps_capabilities_built().decode()
        return (
            f"FASTCAPS_CPU_CAPABILITY={wanted!r} is not a level that this processor has and this build holds ({built})"
        )
    return _library_problem


def listing() -> tuple[Backend, ...]:
    """Return all backends, in order of preference, with whether and why each runs here."""
    problem = _native_problem()
    return (
        Backend("cuda", False, "not built: this version has no CUDA kernels"),
        Backend("triton", False, "not built: this version has no Triton kernels"),
        Backend("cpu", not problem, problem or f"compiled kernels, instruction set {native_capability()}"),
        Backend("reference", True, "plain PyTorch, any device; stores the votes"),
    )


def show() -> None:
    """Print the backends, one a line."""
    for entry in listing():
        print(entry)


def refusal(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why backend ``name`` cannot take tensors of this device and dtype, or None if it can."""
    if name == "reference":
        return None if dtype.is_floating_point else f"the reference takes floating-point tensors, got {dtype}"
    entry = listing()[NAMES.index(name)]
    if not entry.available:
        return entry.detail
    if device.type != "cpu":
        return f"it runs on the CPU only, the tensors are on {device}"
    if dtype not in _CPU_DTYPES:
        return f"it takes float32, float64 and bfloat16, got {dtype}"
    return None


def default_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a call may have on a device type when no backend is forced."""
    return _CPU_DTYPES if device_type == "cpu" else _GPU_DTYPES


def forced() -> str | None:
    """Return the name of the backend that is forced now, or None."""
    return _forced


def _known(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")
    return name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force a backend inside a ``with`` block.

    Parameters
    ----------
    name : str
        ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises
    ------
    ValueError
        If there is no backend of that name.
    BackendError
        From a call inside the block that the backend cannot take.
    """
    global _forced
    before, _forced = _forced, _known(name, "backend: name")
    try:
        yield
    finally:
        _forced = before


_load_native()
if os.environ.get("FASTCAPS_BACKEND"):
    _forced = _known(os.environ["FASTCAPS_BACKEND"], "FASTCAPS_BACKEND")
