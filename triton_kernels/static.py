"""What the kernels are compiled to, for a GPU that need not be there: registers, spills, shared memory.

Triton's compiler takes its target as an argument, so that ``compiled_for("sm_90", ...)`` works on any machine with
Triton. Not under TRITON_INTERPRET=1, where kernels are Python functions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .call import Launch

_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True)
class Compiled:
    """What one kernel, specialised for a launch, takes of a GPU.

    Attributes
    ----------
    kernel, num_warps
        Which kernel, and how it is started.
    n_regs
        Registers of a thread.
    n_spills
        Words of memory of a thread's own: registers that were spilled, and little else.
    shared
        Bytes of shared memory of a program.
    """

    kernel: str
    num_warps: int
    n_regs: int
    n_spills: int
    shared: int


def target_of(name: str) -> GPUTarget:
    """Return Triton's target for ``"sm_90"`` or an AMD name such as ``"gfx942"``."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def source_of(launch: Launch, precision: str | None = None) -> ASTSource:
    """Return the kernel with the types, constants and alignments that Triton would find at this launch."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    alignments: dict[tuple[int, ...], list[list[Any]]] = {}

    def typed(value: Any, place: tuple[int, ...], constant: bool, specialised: bool) -> Any:
        if isinstance(value, tuple):
            found = [typed(one, (*place, j), constant, True) for j, one in enumerate(value)]
            return type(value)(*found) if hasattr(value, "_fields") else tuple(found)
        compiled = isinstance(value, (tl.constexpr, triton.JITFunction))
        if constant or compiled or value is None or (specialised and isinstance(value, int) and value == 1):
            constants[place] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (specialised and isinstance(value, int) and value % 16 == 0):
            alignments[place] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return _POINTERS[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"

    for k, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.name == "tile" and precision is not None:
            value = value._replace(PRECISION=tl.constexpr(precision))
        signature[parameter.name] = typed(value, (k,), parameter.is_constexpr, not parameter.do_not_specialize)
    return ASTSource(launch.kernel, signature, constants, alignments)


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers, and registers that were spilled, from the compiled code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"\bREG:(\d+)", text), re.search(r"\bSTACK:(\d+)", text)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump did not say what the kernel uses: {text!r}")
    return int(registers[1]), int(stack[1]) // 4


def build(target: str, launch: Launch) -> Any:
    """Return Triton's compiled kernel of a launch for a target; its code is in ``asm``. No GPU is needed."""
    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError("kernels are interpreted (TRITON_INTERPRET=1) and cannot be compiled")
    chosen = target_of(target)
    options = {name: launch.arguments[name] for name in ("num_warps", "num_stages") if name in launch.arguments}
    source = source_of(launch, "ieee" if chosen.backend == "hip" else None)
    return triton.compile(source, target=chosen, options=options)


def compiled_for(target: str, launch: Launch) -> Compiled:
    """Compile the kernel of a launch for ``"sm_80"``, ``"sm_90"``, ``"gfx942"`` and the like, and say what it takes."""
    built = build(target, launch)
    if "cubin" in built.asm:
        registers, spills = _nvidia_resources(built.asm["cubin"])
    else:
        found = re.findall(r"\.(vgpr_(?:spill_)?count):\s*(\d+)", built.asm["amdgcn"])
        used = {name: int(number) for name, number in found}
        registers, spills = used["vgpr_count"], used["vgpr_spill_count"]
    return Compiled(
        kernel=launch.name,
        num_warps=int(built.metadata.num_warps),
        n_regs=registers,
        n_spills=spills,
        shared=int(built.metadata.shared),
    )
