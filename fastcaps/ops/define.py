"""Definition of an op: its schema, from typed records, its kernels, and the declarations of native ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import register_decomposition
from torch.utils.flop_counter import register_flop_formula

from fastcaps import libraries

LIBRARY = torch.library.Library("fastcaps", "DEF")
NATIVE = {name: torch.library.Library(f"fastcaps_{name}", "FRAGMENT") for name in ("cpu", "cuda")}
"""The libraries of the native ops' declarations, by backend."""

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[float]": "float[]",
    "Sequence[int]": "SymInt[]",
    "bool": "bool",
    "float": "float",
    "int": "SymInt",
}


def _kind(annotation: Any) -> str:
    return _TYPES[getattr(annotation, "__forward_arg__", annotation)]


def written(fields: Mapping[str, Any]) -> str:
    """Return a schema's arguments from the names and types of a typed record."""
    return ", ".join(f"{_kind(annotation)} {name}" for name, annotation in fields.items())


def tensor_names(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of a record's tensors."""
    return [name for name, annotation in fields.items() if _kind(annotation).startswith("Tensor")]


def define(
    name: str,
    takes: str,
    returns: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    native: tuple[str, str] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Define an op; return it, and the native libraries' ops of the same name, by backend.

    ``takes`` and ``returns`` are its schema, ``native`` that of the native ops if it differs. ``run`` is the kernel for
    every device, ``fake`` returns empty tensors, ``flops`` counts operations.
    """
    LIBRARY.define(f"{name}({takes}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcaps::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.fastcaps, name)
    register_flop_formula(packet)(flops)
    takes, returns = native or (takes, returns)
    below = {}
    for backend, library in NATIVE.items():
        library.define(f"{name}({takes}) -> {returns}".replace("SymInt", "int"))
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the op above has the derivative
        below[backend] = getattr(getattr(torch.ops, f"fastcaps_{backend}"), name).default
    return packet.default, below


def make_differentiable(
    op: Any,
    backward: Callable[..., Any],
    save: Callable[..., None],
    formula: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Register an op's backward, and its formula in plain PyTorch, which an ONNX export uses."""
    torch.library.register_autograd(op.name(), backward, setup_context=save, lib=LIBRARY)
    register_decomposition(op)(formula)
    register_decomposition(op, type="meta")(fake)  # else fakes of free sizes would run the formulas


def interruptibly(kernel: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a kernel of the CPU library, which a signal may stop; then raise the exception of the signal's handler."""
    try:
        return kernel(*arguments)
    except RuntimeError:
        libraries.library("cpu").raise_signal()
        raise


def let_inductor_call(op: Any) -> None:
    """Allow Inductor, if it is compiling, to call an op.

    If the variable CI is set, Inductor refuses ops with a decomposition, which ours have for ONNX; the check is meant
    for torch's own ops.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is not None:
        lowering.FALLBACK_ALLOW_LIST.add(op.name())
