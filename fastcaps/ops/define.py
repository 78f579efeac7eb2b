"""Definition of an op: its schema, from typed records, its kernels, and the declarations of native ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch._decomp import register_decomposition

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


# ---- FLOP formulas ---------------------------------------------------------------------------------------------------

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}  # by op


def _register_formulas(counter: Any) -> None:
    for op, formula in _formulas.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)


class _CounterFinder:
    """Registers the FLOP formulas whenever somebody imports PyTorch's FLOP counter.

    That module imports Triton, which takes half a second and which few processes need.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register_formulas(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _count_flops_of(op: Any, formula: Callable[..., int]) -> None:
    _formulas[op] = formula
    if _COUNTER in sys.modules:
        _register_formulas(import_module(_COUNTER))  # waits while another thread imports it


sys.meta_path.insert(0, _CounterFinder)


# ---- definition ------------------------------------------------------------------------------------------------------


def define(
    name: str,
    takes: str,
    returns: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    native: tuple[str, str],
) -> tuple[Any, dict[str, Any]]:
    """Define an op; return it, and the native libraries' ops of the same name, by backend.

    ``takes`` and ``returns`` are its schema, ``native`` that of the native ops. ``run`` is the kernel for every device,
    ``fake`` returns empty tensors, ``flops`` counts operations.
    """
    LIBRARY.define(f"{name}({takes}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastcaps::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.fastcaps, name)
    _count_flops_of(packet, flops)
    return packet.default, {backend: declare(backend, name, native) for backend in NATIVE}


def declare(backend: str, name: str, schema: tuple[str, str]) -> Any:
    """Declare an op of a native library, and return it."""
    library = NATIVE[backend]
    library.define("{}({}) -> {}".format(name, *schema).replace("SymInt", "int"))
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the op above has the derivative
    return getattr(getattr(torch.ops, f"fastcaps_{backend}"), name).default


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


def let_inductor_call(op: Any) -> None:
    """Allow Inductor, if it is compiling, to call an op.

    If the variable CI is set, Inductor refuses ops with a decomposition, which ours have for ONNX; the check is meant
    for torch's own ops.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is not None:
        lowering.FALLBACK_ALLOW_LIST.add(op.name())
