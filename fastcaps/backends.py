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

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from fastcaps import libraries, ops

__all__ = [
    "NAMES",
    "Backend",
    "BackendError",
    "backend",
    "choose",
    "convolution_rounds",
    "default_dtypes",
    "forced",
    "listing",
    "native_capability",
    "native_serves",
    "refusal",
    "show",
    "tf32_allowed",
]

NAMES = ("cuda", "triton", "cpu", "reference")
"""The backends in order of preference."""

_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_GPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the CUDA and Triton kernels


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


_cpu = libraries.library("cpu")
_forced: str | None = None


_native = frozenset(one.stem for one in ops.PASSES if ops.has_kernel(one.name, "CPU"))
"""The passes of which the native library has kernels."""


def _load_native() -> None:
    """Have the native library serve the CPU, or the reference, which is said once."""
    global _forced
    ops.serve_the_rest("CPU")
    if not _cpu.problem:
        if native_capability() is None:
            _forced = "cpu"  # a level was asked for by name: every call says why it cannot be had
        return
    warnings.warn(
        f"fastcaps: the native library cannot serve: {_cpu.problem}; the reference serves instead. Results are the "
        "same, but votes are stored: it is slow and needs much memory. Install fastcaps without FASTCAPS_BUILD=0 for "
        "the compiled kernels.",
        RuntimeWarning,
        stacklevel=2,
    )


def native_capability() -> str | None:
    """Return the instruction set that the native library chose; None without a library or a usable level."""
    return _cpu.ask("fastcaps_capability")


def native_serves(stem: str = "attention") -> bool:
    """Return whether the compiled kernels are what runs a pass on the CPU."""
    return not _cpu_problem() and stem in _native


@lru_cache(maxsize=1)
def _cpu_problem() -> str:
    """Return why the native library cannot run calls on the CPU, or an empty string."""
    if not _cpu.problem and native_capability() is None:
        wanted = os.environ.get("FASTCAPS_CPU_CAPABILITY", "")
        built = _cpu.ask("fastcaps_capabilities_built")
        return (
            f"FASTCAPS_CPU_CAPABILITY={wanted!r} is not a level that this processor has and this build holds ({built})"
        )
    return _cpu.problem


def _torch_problem() -> str:
    """Return why torch reaches no GPU here, or an empty string."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def _cuda_problem() -> str:
    """Return why the CUDA kernels cannot run calls here, or an empty string. Loads their library, if torch has CUDA."""
    if not libraries.library_path("cuda").is_file():
        why = libraries.native_build_info().get("cuda_why_not") or "the package was installed without native libraries"
        return f"not built: {why}"
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is a ROCm build"
    return _torch_problem() or libraries.library("cuda").problem


def _triton_problem() -> str:
    """Return why the Triton kernels cannot run calls here, or an empty string."""
    return _torch_problem() or libraries.triton_kernels()[1]


@cache
def _device_problem(device: torch.device) -> str:
    """Return why the CUDA kernels do not run on a device, or an empty string."""
    library = libraries.library("cuda")
    toolkit = library.ask("fastcaps_cuda_toolkit") or "0"
    driver: int = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)() // 1000
    if driver and driver < int(toolkit.split(".")[0]):
        return f"it is built with CUDA {toolkit}, the driver serves CUDA {driver} at most"
    built = library.ask("fastcaps_cuda_architectures") or ""
    return libraries.architecture_problem(built, torch.cuda.get_device_capability(device))


def _built_for() -> str:
    library = libraries.library("cuda")
    built = libraries.architecture_names(library.ask("fastcaps_cuda_architectures") or "")
    return f"compiled kernels, CUDA {library.ask('fastcaps_cuda_toolkit')}, for compute capability {built}"


def listing() -> tuple[Backend, ...]:
    """Return all backends, in order of preference, with whether and why each runs here."""
    cuda, triton, cpu = _cuda_problem(), _triton_problem(), _cpu_problem()
    return (
        Backend("cuda", not cuda, cuda or _built_for()),
        Backend("triton", not triton, triton or "kernels that Triton compiles when they are first called"),
        Backend("cpu", not cpu, cpu or f"compiled kernels, instruction set {native_capability()}"),
        Backend("reference", True, "plain PyTorch, any device; stores the votes"),
    )


def show() -> None:
    """Print the backends, one a line."""
    for entry in listing():
        print(entry)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return ", ".join(names[:-1]) + " and " + names[-1]


def _no_kernels(name: str, stem: str) -> str:
    """Return that a backend which runs here has no kernels of a pass, or an empty string."""
    if name == "triton":
        return libraries.triton_kernels(stem)[1]
    has = stem in _native if name == "cpu" else stem == "attention" or hasattr(torch.ops.fastcaps_cuda, f"{stem}_pass")
    return "" if has else f"it has no kernels of the {stem} pass"


@torch.compiler.assume_constant_result
def refusal(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    pose: tuple[int, int, int] | None = None,
    parents: int | None = None,
    stem: str = "attention",
) -> str | None:
    """Return why a backend cannot take a call, or None if it can.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`.
    device, dtype
        Of the children (under autocast, the dtype that they are cast to).
    pose : (C, D, E), optional
        A child's pose is C x D numbers, a parent's C x E. Without it, limits of poses are not looked at.
    parents : int, optional
        M; likewise.
    stem : str
        The pass: ``"attention"``, ``"pooling"`` or ``"gaussian"``.
    """
    if name == "reference":
        return None if dtype.is_floating_point else f"it takes floating-point tensors, got {dtype}"
    if name == "cuda":
        problem = _cuda_problem()
    else:
        problem = _triton_problem() if name == "triton" else _cpu_problem()
    problem = problem or _no_kernels(name, stem)
    if problem:
        return problem
    wanted, dtypes = ("cpu", _CPU_DTYPES) if name == "cpu" else ("cuda", _KERNEL_DTYPES)
    if device.type != wanted:
        where = "the CPU" if name == "cpu" else "a GPU"
        return f"it runs on {where} only, the tensors are on {device}"
    if dtype not in dtypes:
        return f"it takes {_names(dtypes)}, got {str(dtype).removeprefix('torch.')}"
    if name == "cuda" and _device_problem(device):
        return _device_problem(device)
    if name == "cpu" or pose is None or parents is None:
        return None
    if name == "cuda":
        library = libraries.library("cuda")
        answer = None if stem == "attention" else library.ask(f"fastcaps_cuda_{stem}_refusal", *pose)
        return (library.ask("fastcaps_cuda_refusal", *pose) if answer is None else answer) or None
    kernels: Any = libraries.triton_kernels(stem)[0]
    return kernels.refusal(device, dtype, pose, parents)


@cache
def _chosen(
    name: str | None, device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int, stem: str
) -> str:
    if name is None:
        return next(n for n in NAMES if refusal(n, device, dtype, pose, parents, stem) is None)
    reason = refusal(name, device, dtype, pose, parents, stem)
    if reason is not None:
        raise BackendError(f"backend {name!r} is forced and cannot take this call: {reason}")
    return name


@torch.compiler.assume_constant_result
def convolution_rounds() -> bool:
    """Return whether float32 convolutions on a GPU round to TF32, as torch has it, while matrix products may not."""
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv.fp32_precision == "tf32" and not tf32_allowed()


@torch.compiler.assume_constant_result
def choose(
    device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int, stem: str = "attention"
) -> str:
    """Return the name of the backend that runs a call: the forced one, else the first that can take it.

    Parameters
    ----------
    device, dtype, pose, parents, stem
        As in :func:`refusal`.

    Raises
    ------
    BackendError
        If a backend is forced and cannot take the call.
    """
    return _chosen(_forced, device, dtype, pose, parents, stem)


def tf32_allowed() -> bool:
    """Return whether the user lets float32 matrix products on a GPU round their factors to TF32.

    That is ``torch.backends.cuda.matmul.fp32_precision``, which ``torch.set_float32_matmul_precision`` and the older
    ``allow_tf32`` set too.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


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
