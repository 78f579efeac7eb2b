"""Backends: which code runs a call, how to force one, and why the others do not run.

``fastcaps.backends.listing()`` returns the four backends (``cuda``, ``triton``, ``cpu``, ``reference``), each with the
reason if it cannot run here. ``backend(name)``, also ``fastcaps.backend``, forces one
inside a ``with`` block, and the environment variable ``FASTCAPS_BACKEND``, read at import, in the whole process.
``fastcaps.explain`` says what one call would run. Inside ``with fastcaps.backends.tf32x3()`` products on a GPU that may
round to TF32 keep about the precision of float32.

A forced backend never falls back: a call that it cannot take raises :class:`BackendError`. (Under every backend except
the reference, torch's own products usually compute the first iteration of inverted attention, and agreement and sum of
votes of children that share matrices or have none. Where no backend is forced, they also run attention where they are
faster than the kernels: on the CPU without matrices, on a GPU with matrices that children share.)

A ``with`` block applies to the code inside it, to asyncio tasks started there, and to the backward of every call made
there, in any thread. New threads, such as those of ``nn.DataParallel``, start without it;
``contextvars.copy_context().run`` passes it on. A generator must not yield inside a block. Recomputation by
``torch.utils.checkpoint`` uses the block in which the backward runs. In compiled code each op, forward or backward,
uses the block in which it runs. Opening other blocks recompiles; code that is not an op (the first iteration of
inverted attention) ignores in which thread they are open. Put the block around the call of a compiled function: inside,
it breaks the graph.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import libraries
from fastcaps.settings import Setting, constant_in_graphs
from fastcaps.votes import VoteInputs

__all__ = [
    "NAMES", "Backend", "BackendError", "Call", "backend", "choose", "choose_formula", "chosen", "forced",
    "is_explaining", "listing", "native_capability", "native_serves", "observer", "on_cpu", "refusal",
    "refuse_unless_reference", "settings", "tf32_allowed", "tf32x3", "tf32x3_wanted",
    "triton_kernels", "under",
]  # fmt: skip

NAMES = ("cuda", "triton", "cpu", "reference")
"""The backends in order of preference."""

# bits of ``options``
DETERMINISTIC = 1  # the same input must give the same bits
ALLOW_TF32 = 2  # float32 matrix products may round their factors to TF32
TF32X3 = 4  # only with ALLOW_TF32: three such products for each, which lose little precision

_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BackendError(RuntimeError):
    """A backend was forced and cannot take the call."""


@dataclass(frozen=True)
class Backend:
    """One backend of this process: whether it can run calls here; ``detail`` says what it is, or why it cannot."""

    name: str
    available: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name:<10} {'yes' if self.available else 'no':<4} {self.detail}"


class Call(NamedTuple):
    """The properties of a call on which the choice of a backend depends."""

    stem: str  # of a routing (fastcaps.ops.ROUTINGS), or "verbs"
    device: torch.device  # of the children, as the dtype
    dtype: torch.dtype
    pose: tuple[int, int, int]  # C, D, E: a child's pose is C x D, a parent's C x E
    parents: int
    has_weight: bool
    options: int  # the user's settings as bits; 0 on the CPU, which ignores them

    @classmethod
    def of(cls, stem: str, arguments: Sequence[Any]) -> Call:
        """Return the properties of a call from an op's arguments, of which the first six are the votes'."""
        children, weight, parents = arguments[0], arguments[1], arguments[4]
        if children.dim() not in (4, 6) or (weight is not None and weight.dim() != 4):
            raise ValueError(
                "fastcaps: children must be [B, H, W, N, C, D] or [B, I, C, D] and weight [G, M, D, E], got "
                f"{list(children.shape)} and {None if weight is None else list(weight.shape)}"
            )
        rows, depth = children.shape[-2:]
        pose = (rows, depth, depth if weight is None else weight.shape[3])
        return cls(stem, children.device, children.dtype, pose, parents, weight is not None, _options(children.device))


def _options(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    bits = DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else 0
    bits |= ALLOW_TF32 if tf32_allowed() else 0
    return bits | TF32X3 if tf32x3_wanted() else bits


# ---- settings of blocks ----------------------------------------------------------------------------------------------

_forced: Setting[str | None] = Setting("fastcaps.backend", None)
_tf32x3 = Setting("fastcaps.tf32x3", False)


def settings() -> tuple[str | None, bool]:
    """Return the settings of blocks: the forced backend or None, and whether :func:`tf32x3` is on."""
    return _forced.get(), _tf32x3.get()


_SAME: AbstractContextManager[None] = nullcontext()


def under(wanted: tuple[str | None, bool]) -> AbstractContextManager[None]:
    """Run a backward under the settings of its forward, as it may run in a thread of autograd or after their block."""
    return _SAME if torch.compiler.is_compiling() or wanted == settings() else _blocks(*wanted)


@contextmanager
def _blocks(name: str | None, three: bool) -> Iterator[None]:
    with _forced.block(name), _tf32x3.block(three):
        yield


# ---- availability ----------------------------------------------------------------------------------------------------


def native_capability() -> str | None:
    """Return the instruction set that the native library chose; None without a library or a level it can run."""
    return libraries.library("cpu").ask("fastcaps_capability")


@constant_in_graphs
def native_serves(stem: str = "attention") -> bool:
    """Return whether compiled kernels run an op on the CPU."""
    return not _cpu_problem(stem)


@cache
def _cpu_problem(stem: str = "attention") -> str:
    """Return why the native library cannot run an op's calls on the CPU, or an empty string."""
    library = libraries.library("cpu")
    if library.problem:
        return library.problem
    op = "fastcaps_cpu::vote_scores" if stem == "verbs" else f"fastcaps_cpu::{stem}_routing"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU"):
        return f"the library has no {op}: it was built from other sources than this package's; build it again"
    if native_capability() is not None:
        return ""
    wanted, built = os.environ.get("FASTCAPS_CPU_CAPABILITY", ""), library.ask("fastcaps_capabilities_built")
    if not wanted:
        return f"it was built for {built}, which this processor lacks: build it here, or with FASTCAPS_LEVELS=all"
    return f"FASTCAPS_CPU_CAPABILITY={wanted!r} is not a level that this processor has and this build holds ({built})"


def _torch_problem() -> str:
    """Return why torch cannot use a GPU here, or an empty string."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def _cuda_problem() -> str:
    """Return why the CUDA kernels cannot run here, or an empty string; loads their library if torch has CUDA."""
    if not libraries.library_path("cuda").is_file():
        why = libraries.native_build_info().get("cuda_why_not")
        return f"not built: {why or 'there is no ' + libraries.library_path('cuda').name}"
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is a ROCm build"
    return _torch_problem() or libraries.library("cuda").problem


def _triton_problem() -> str:
    """Return why the Triton kernels cannot run here, or an empty string."""
    return ("" if _interprets() else _torch_problem()) or libraries.triton_kernels("attention")[1]


def device_of(name: str) -> str:
    """Return the type of the devices that a backend with kernels runs on."""
    return "cpu" if name == "cpu" or (name == "triton" and _interprets()) else "cuda"


def _interprets() -> bool:
    """Return whether Triton's interpreter runs its kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_kernels(stem: str) -> Any:
    """Return the module of a routing's Triton kernels."""
    return libraries.triton_kernels(stem)[0]


@cache
def _device_problem(device: torch.device) -> str:
    """Return why the CUDA kernels do not run on a device, or an empty string."""
    library = libraries.library("cuda")
    toolkit = library.ask("fastcaps_cuda_toolkit") or "0"
    driver: int = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)() // 1000
    if driver and driver < int(toolkit.split(".")[0]):
        return f"it is built with CUDA {toolkit}, the driver supports CUDA {driver} at most"
    built = library.ask("fastcaps_cuda_architectures") or ""
    return libraries.architecture_problem(built, torch.cuda.get_device_capability(device))


def listing() -> tuple[Backend, ...]:
    """Return all backends in order of preference, each with whether it runs here, or why not."""
    cuda, triton, cpu = _cuda_problem(), _triton_problem(), _cpu_problem()
    ask = libraries.library("cuda").ask
    built = libraries.architecture_names(ask("fastcaps_cuda_architectures") or "")
    works = f"compiled kernels, CUDA {ask('fastcaps_cuda_toolkit')}, for compute capability {built}"
    kernels = (
        "kernels in Triton's interpreter"
        if _interprets()
        else "kernels that Triton compiles when they are first called"
    )
    return (
        Backend("cuda", not cuda, cuda or works),
        Backend("triton", not triton, triton or kernels),
        Backend("cpu", not cpu, cpu or f"compiled kernels, instruction set {native_capability()}"),
        Backend("reference", True, "plain PyTorch, any device; computes a block of votes at a time"),
    )


# ---- choice ----------------------------------------------------------------------------------------------------------


def refusal(name: str, call: Call) -> str | None:
    """Return why a backend, one of :data:`NAMES`, cannot take a call, or None if it can."""
    if name == "reference":
        return None if call.dtype.is_floating_point else f"it takes floating-point tensors, got {call.dtype}"
    problem = _cuda_problem() if name == "cuda" else _triton_problem() if name == "triton" else _cpu_problem(call.stem)
    if problem:
        return problem
    wanted = device_of(name)
    if call.device.type != wanted:
        where = "the CPU" if wanted == "cpu" else "a GPU"
        return f"it runs on {where} only, the tensors are on {call.device}"
    taken = _CPU_DTYPES if name == "cpu" else _GPU_DTYPES
    if call.dtype not in taken:
        *names, last, got = (str(one).removeprefix("torch.") for one in (*taken, call.dtype))
        return f"it takes {', '.join(names)} and {last}, got {got}"
    answer: str | None = None
    if name == "triton":
        kernels, answer = libraries.triton_kernels(call.stem)
        if kernels is not None:
            answer = kernels.refusal(call.device, call.dtype, call.pose, call.parents, call.has_weight)
    elif name == "cuda" and call.stem == "verbs":
        answer = "it has no kernels of the verbs"
    elif name == "cuda":
        ask = libraries.library("cuda").ask
        answer = _device_problem(call.device) or ask("fastcaps_cuda_refusal", call.stem, *call.pose, call.has_weight)
    return answer or None


def _warn_without_kernels(call: Call) -> None:
    """Warn if this installation has no kernels for a GPU at all: a user would only see that calls are slow."""
    cuda = _cuda_problem() or _device_problem(call.device) if call.stem != "verbs" else "no kernels of the verbs"
    triton = _triton_problem()
    if cuda and triton and not _torch_problem():
        warnings.warn(
            f"fastcaps: no kernels run on {call.device}; calls fall back to plain PyTorch, which is slower and needs "
            f"more memory (cuda: {cuda}; triton: {triton})",
            RuntimeWarning,
            stacklevel=2,
        )


@lru_cache(maxsize=4096)
def chosen(name: str | None, call: Call) -> str:
    """Return the backend of a call if ``name`` is the forced one, or None."""
    if name is not None:
        reason = refusal(name, call)
        if reason is not None:
            raise BackendError(f"backend {name!r} is forced and cannot take this call: {reason}")
        return name
    if call.device.type == "cpu" and os.environ.get("FASTCAPS_CPU_CAPABILITY") and _cpu_problem():
        raise BackendError(_cpu_problem())  # the user asked for a level
    for one in NAMES:
        if not (one == "triton" and _interprets()) and refusal(one, call) is None:  # the interpreter is too slow
            if one == "reference" and call.device.type == "cuda":
                _warn_without_kernels(call)
            return one
    raise TypeError(f"children must be a floating-point tensor, got {call.dtype}")


def choose(stem: str, arguments: Sequence[Any]) -> tuple[str, int]:
    """Return the backend of a call and the options of its kernels, from an op's arguments.

    It is the forced backend (BackendError if it cannot), else the first that can take the call.
    """
    if on_cpu(stem, arguments[0]):  # as below, in a fraction of the time
        return "cpu", 0
    call = Call.of(stem, arguments)
    return chosen(_forced.get(), call), call.options


observer: ContextVar[Any] = ContextVar("fastcaps_observer", default=None)
"""What :func:`choose_formula` calls with ``name``, ``votes`` and ``runs`` while :func:`fastcaps.explain` runs."""


def is_explaining() -> bool:
    """Return whether :func:`fastcaps.explain` makes this call, with tensors that have no values."""
    return not torch.compiler.is_compiling() and observer.get() is not None


def choose_formula(name: str, stem: str, votes: VoteInputs, runs: tuple[str, str]) -> None:
    """Choose plain PyTorch for a call that no op makes; raise BackendError if a forced backend could not take the call.

    ``runs``: what runs the call, and why.
    """
    if torch.compiler.is_compiling():
        return
    if (observed := observer.get()) is not None:
        observed(name, votes, runs)
    elif _forced.get() is not None:
        choose(stem, votes)


def refuse_unless_reference(stem: str) -> None:
    """Raise BackendError if another backend is forced, in calls that only the reference can run."""
    if forced() not in (None, "reference"):
        raise BackendError(
            f"backend {forced()!r} is forced and cannot take this call: torch.func transforms, forward-mode "
            f"derivatives and votes in blocks run on the reference ({stem})"
        )


def on_cpu(stem: str, children: Tensor) -> bool:
    """Return whether the CPU's compiled kernels run a routing's call, as :func:`choose` would decide.

    They run all iterations in one call, forward and backward. Sizes may be symbols.
    """
    return children.is_cpu and children.dtype in _CPU_DTYPES and _forced.get() in (None, "cpu") and native_serves(stem)


def tf32_allowed() -> bool:
    """Return whether the user lets float32 matrix products on a GPU round to TF32, by any of torch's settings."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def tf32x3_wanted() -> bool:
    """Return whether to use three TF32 products for each float32 product that may round: see :func:`tf32x3`."""
    return _tf32x3.get() and tf32_allowed()


# ---- forcing one -----------------------------------------------------------------------------------------------------


def forced() -> str | None:
    """Return the name of the forced backend, or None."""
    return _forced.get()


def _known(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} must be one of {', '.join(NAMES)}, got {name!r}")
    return name


def backend(name: str) -> AbstractContextManager[None]:
    """Force a backend inside a ``with`` block.

    Parameters
    ----------
    name : str
        ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises
    ------
    ValueError
        If no backend has that name.
    BackendError
        In a call inside the block that the backend cannot take.
    """
    return _forced.block(_known(name, "backend: name"))


def tf32x3(wanted: bool = True) -> AbstractContextManager[None]:
    """Compute each float32 product that may round to TF32 by three TF32 products, inside a ``with`` block.

    TF32 has 11 bits of precision, float32 24. With ``torch.set_float32_matmul_precision("high")`` routings on a GPU
    round to TF32, as torch does. In the block they split each factor into two TF32 values and compute three products,
    still on tensor cores, with an error near that of float32. Nothing changes on the CPU, in half precision, or if TF32
    is not allowed. Torch's own products do not change either, so a kernel runs the first iteration of inverted
    attention, too. A backward uses the block of its forward.

    Parameters
    ----------
    wanted : bool
        ``False`` returns to one product inside another such block.

    Raises
    ------
    TypeError
        If ``wanted`` is not a bool.
    """
    if not isinstance(wanted, bool):
        raise TypeError(f"wanted must be a bool, got {type(wanted).__name__} (a decorator is written @tf32x3())")
    return _tf32x3.block(wanted)


if (_why := _cpu_problem()) and not os.environ.get("FASTCAPS_CPU_CAPABILITY"):  # a forced level is refused in calls
    _cure = " In a checkout run make build; elsewhere install without FASTCAPS_BUILD=0." if "not built" in _why else ""
    warnings.warn(
        f"fastcaps: the native library cannot run: {_why}; calls fall back to the reference, which is slower and needs "
        f"more memory.{_cure}",
        RuntimeWarning,
        stacklevel=2,
    )
if os.environ.get("FASTCAPS_BACKEND"):
    _forced.default = _known(os.environ["FASTCAPS_BACKEND"], "FASTCAPS_BACKEND")
