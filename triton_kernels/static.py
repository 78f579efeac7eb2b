"""The resources of compiled kernels, without a GPU: registers, spills, shared memory.

Triton's launcher compiles for the target that its driver names. The driver here names any target, so
``compiled_for("sm_90", ...)`` works on any machine with Triton. Not under TRITON_INTERPRET=1, where kernels are Python
functions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from .call import Launch


@dataclass(frozen=True)
class Compiled:
    """The resources of one kernel, specialised for a launch."""

    kernel: str
    num_warps: int
    n_regs: int  # of a thread
    n_spills: int  # words of a thread's local memory: almost only spilled registers
    shared: int  # bytes of a program


def target_of(name: str) -> GPUTarget:
    """Return Triton's target for ``"sm_90"`` or an AMD name such as ``"gfx942"``."""
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


class _Driver:
    """The part of a driver that Triton uses before a launch. Triton caches compiled kernels by the device's name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return target_of(self.target)


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


class _Translated(Exception):
    """No error: ends a compilation once Triton has read the kernel's Python."""


def translate(target: str, launch: Launch) -> None:
    """Have Triton read the kernel of a launch, in a hundredth of a second: what it refuses, it refuses here.

    The steps behind, which make code of the target, know no Python; they are not taken.
    """
    kind = type(make_backend(target_of(target)))
    add_stages = kind.add_stages

    def stop(*arguments: Any) -> None:
        raise _Translated

    def add_first(self: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        stages[next(iter(stages))] = stop

    kind.add_stages = add_first
    try:
        build(target, launch)
    except _Translated:
        pass
    finally:
        kind.add_stages = add_stages


def build(target: str, launch: Launch) -> Any:
    """Return Triton's compiled kernel of a launch for a target; its code is in ``asm``. No GPU is needed."""
    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError("kernels are interpreted (TRITON_INTERPRET=1) and cannot be compiled")
    arguments, driver = dict(launch.arguments), triton.runtime.driver
    if target_of(target).backend == "hip":  # as Call.precision is if torch is built for ROCm
        arguments["tile"] = arguments["tile"]._replace(PRECISION=tl.constexpr("ieee"))
    before, driver._active = driver._active, _Driver(target)  # reset_active() would look for a device
    try:
        return launch.kernel.warmup(grid=(launch.programs,), **arguments)
    finally:
        driver._active = before


def compiled_for(target: str, launch: Launch) -> Compiled:
    """Compile the kernel of a launch for ``"sm_80"``, ``"sm_90"``, ``"gfx942"`` and the like; return its resources."""
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
