"""What the compiled kernels take, by the compiler's own word: registers, local memory, shared memory. No GPU is needed.

    python -m tools.static_report                           # the installed CUDA library
    python -m tools.static_report FILE.o ...                # objects, while tuning
    PYTHONPATH=tests python -m tools.static_report --triton sm_90      # or gfx942 and the like: the Triton kernels

For the first, ``cuobjdump`` is needed (of a CUDA toolkit, or of Triton's package); the exit status is 1 if a kernel for
one pose spills that is not known to. For the last, the host side of the kernels runs on tensors without data, of the
papers' layers among the tests' cases, and Triton's compiler makes what it would launch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.markdown import as_markdown
from fastcaps import libraries, ops

KNOWN_SPILLS = {
    "sm_90 forward<GaussianForward, FixedPose<4, 4, 4, 4, 4, 1, 8, 1, 20>, 1, false,": 8,
    "sm_80 forward<AttentionForward, TensorPose1x64<1>, 2, false,": 8,
    "sm_80 forward<AttentionForward, TensorPose4x4<4, 3>, 1, false,": 8,
    "sm_90 forward<AttentionForward, TensorPose4x4<4, 3>, 1, false,": 16,
}
"""Bytes by how a kernel's name begins. The first is held to 128 registers, so that two blocks fit on a multiprocessor;
the others, on tensor cores with all options, have all there are."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture."""

    name: str  # without namespaces and parameters
    arch: str  # sm_90 or the like
    registers: int  # a thread
    local: int  # bytes of local memory a thread: spills, arrays that are indexed at run time, calls
    shared: int  # static shared memory in bytes, the part that the system keeps (1 KB from sm_90 on) included

    @property
    def specialised(self) -> bool:
        """Whether it is compiled for one pose."""
        return "Pose" in self.name and "FreePose" not in self.name

    def __str__(self) -> str:
        return f"{self.arch} {self.name}: {self.local} bytes of local memory a thread"


# ---- CUDA ------------------------------------------------------------------------------------------------------------

_ARCH = re.compile(r"^\s*arch\s*=\s*(sm_\d+[af]?)")
_FUNCTION = re.compile(r"^\s*Function\s+(\S+):\s*$")
_USAGE = re.compile(r"^\s*REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


def tool(name: str) -> str | None:
    """Return the path of a program such as ``cuobjdump``, of a toolkit or in Triton's package; None without one."""
    places = [os.path.join(os.environ[key], "bin") for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    places += ["/usr/local/cuda/bin", *os.environ.get("PATH", "").split(os.pathsep)]  # PATH may hold a mere wrapper
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which(name, path=os.pathsep.join(place for place in places if place))


def demangle(names: Sequence[str]) -> list[str]:
    """Return readable names: template arguments kept; namespaces, parameters and return types dropped."""
    program = shutil.which("c++filt")
    plain = list(names)
    if program is not None and plain:
        done = subprocess.run([program, "-p"], input="\n".join(plain), capture_output=True, text=True, check=True)
        plain = done.stdout.splitlines()
    plain = [re.sub(r"\(fastcaps::\w+\)(?=\d)|\(anonymous namespace\)::|^void ", "", name) for name in plain]
    return [re.sub(r"\b\w+::", "", name).partition("(")[0].replace("_kernel", "") for name in plain]


def parse_usage(text: str) -> list[Usage]:
    """Return the kernels in the output of ``cuobjdump -res-usage``, by their mangled names."""
    found, arch, name = [], "", ""
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch = match.group(1)
        elif match := _FUNCTION.match(line):
            name = match.group(1)
        elif (match := _USAGE.match(line)) and name:
            registers, stack, shared, local = (int(number) for number in match.groups())
            found.append(Usage(name, arch, registers, stack + local, shared))
            name = ""
    return found


def collect(paths: Sequence[Path]) -> list[Usage]:
    """Read libraries, objects or cubins; RuntimeError if there is no such file, no cuobjdump, or it fails."""
    program, found = tool("cuobjdump"), []
    if program is None:
        raise RuntimeError("no cuobjdump: neither a CUDA toolkit with it nor Triton is installed")
    for path in paths:
        if not path.is_file():
            raise RuntimeError(f"no {path}: the CUDA kernels are not built")
        done = subprocess.run([program, "-res-usage", str(path)], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"cuobjdump -res-usage {path.name}: {(done.stderr or done.stdout).strip()}")
        usages = parse_usage(done.stdout)
        names = demangle([usage.name for usage in usages])
        found += [replace(usage, name=name) for usage, name in zip(usages, names, strict=True)]
    return found


def spilled(found: Iterable[Usage]) -> list[Usage]:
    """Return the kernels for one pose that keep more in local memory than they are known to."""
    known = {one: [most for name, most in KNOWN_SPILLS.items() if str(one).startswith(name)] for one in found}
    return [one for one, most in known.items() if one.specialised and one.local > max(most, default=0)]


def table(found: Sequence[Usage]) -> list[list[str]]:
    """Return a line for each kernel: what it takes on each architecture."""
    architectures = sorted({one.arch for one in found}, key=lambda arch: int(re.sub(r"\D", "", arch)))
    by_name: dict[str, dict[str, str]] = {}
    for one in sorted(found, key=lambda one: (not one.specialised, one.name)):
        local = f" + {one.local} B local" if one.local else ""
        shared = f" + {one.shared} B shared" if one.shared > 1024 else ""
        by_name.setdefault(one.name, {})[one.arch] = f"{one.registers}{local}{shared}"
    lines = [[f"`{name}`", *(cells.get(arch, "") for arch in architectures)] for name, cells in by_name.items()]
    return [["kernel", *architectures], *lines]


# ---- Triton ----------------------------------------------------------------------------------------------------------

LAYERS = ("conv", "pose-4x4-10", "pose-1x8", "pose-1x16")  # cases of tests/ that are as the papers' layers


def triton_table(target: str, options: int = 0) -> list[list[str]]:
    """Return a line for each Triton kernel with a loop over children that a call of the papers' layers would launch.

    A tile is the positions, parents, rows and columns that a program has at a time.
    """
    from registry import ROUTINGS  # of tests/

    from fastcaps.triton_kernels import call as started
    from fastcaps.triton_kernels import static

    def run(function: Any, arguments: Any) -> list[Any]:
        with started.watched() as found:
            function(*arguments, options)
        return [one for one in found if "votes" in one.arguments]

    lines = [["layer", "kernel", "tile", "warps", "registers", "words spilled", "shared, KB"]]
    for routing in ROUTINGS:
        module, _ = libraries.triton_kernels(routing.stem)
        for case in map(routing.case, LAYERS):
            large = replace(case, batch=128, iterations=1, dtype=torch.float32)
            with torch.device("meta"):
                forward, back = routing.call(large).given.values(), routing.backward_call(large).given.values()
            border = getattr(ops, routing.name)
            launches = run(getattr(module, routing.name), border.given([*forward]))
            launches += run(getattr(module, f"{routing.name}_backward"), border.given_backward([*back]))
            for launch in launches:
                made, tile = static.compiled_for(target, launch), launch.arguments["tile"]
                size = "×".join(str(number.value) for number in (tile.BL, tile.BM, tile.BC, tile.BE))
                numbers = (made.num_warps, made.n_regs, made.n_spills or "", f"{made.shared / 1024:.1f}")
                lines.append([case.name, made.kernel, size, *map(str, numbers)])
    return lines


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 if a kernel spills that is not known to, 2 without a library."""
    parser = argparse.ArgumentParser(description="Registers, local and shared memory of the kernels.")
    parser.add_argument("files", nargs="*", type=Path, help="libraries, objects, cubins (the installed CUDA library)")
    parser.add_argument("--triton", metavar="TARGET", help="the Triton kernels for sm_80, gfx942 and the like")
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        if given.triton:
            _, reason = libraries.triton_kernels()
            if reason:
                raise RuntimeError(reason)
            print(as_markdown(triton_table(given.triton)))
            return 0
        found = collect(given.files or [libraries.library_path("cuda")])
    except (RuntimeError, OSError) as error:
        print(f"static_report: {error}", file=sys.stderr)
        return 2
    print(f"Registers a thread (and bytes of local and static shared memory):\n\n{as_markdown(table(found))}")
    wrong = spilled(found)
    for one in wrong:
        print(f"spills: {one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
