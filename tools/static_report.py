"""What the compiled kernels take: registers, local memory, shared memory. No GPU is needed.

    python -m tools.static_report [FILE.o ...]                         # the installed CUDA library, or objects
    PYTHONPATH=tests python -m tools.static_report --triton sm_90      # or gfx942 and the like: the Triton kernels

The first needs ``cuobjdump``, of a CUDA toolkit or of Triton's package; the exit status is 1 if a kernel for one pose
spills that is not known to. For the second, the host side of the kernels runs on tensors without data, of the papers'
layers among the tests' cases, and Triton compiles what it would launch.
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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from fastcaps import libraries, ops

KNOWN_SPILLS = {
    "backward<GaussianBackward, Turned<": 256,  # in one kernel with all options
    "backward<AttentionBackward, TensorPose<4, 4, 1, false>, 1, true,": 16,
    "backward<AttentionBackward, TensorPose<8, 1, 1, false>, 1, true,": 112,  # some sums, read and written once a child
    "backward<AttentionBackward, FixedPose<8, 8, 8, 4, 4, 2, 16, 1, 72, false>, 1, true,": 16,
    "backward<AttentionBackward, FixedPose<1, 16, 16, 8, 4, 2, 16, 1, 264, false>, 4, true,": 8,  # a word a child
}
"""Bytes by how a lean backward's name begins: kept once a stage. Kernels with all options may keep more then."""
WITH_OPTIONS = 256
IN_FORWARD = WITH_OPTIONS + 512
"""That, and a lane's poses between two iterations. In the loop of a lean walk nothing may be kept: see `lean_loops`."""
LEAN = re.compile(r"MNMX\S*\.U32")
"""The instruction that every lean loop has, and no other: the worst of all totals, as unsigned numbers."""
USAGE = re.compile(r"arch = (sm_\w+)|Function (\S+):|REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Usage(NamedTuple):
    """What one kernel takes on one architecture."""

    name: str  # without namespaces and parameters
    arch: str  # sm_90 or the like
    registers: int  # a thread
    local: int  # bytes of local memory a thread: spills, arrays that are indexed at run time, calls
    shared: int  # static shared memory in bytes, the part that the system keeps (1 KB from sm_90 on) included

    def __str__(self) -> str:
        local = f" + {self.local} B local" if self.local else ""
        return f"{self.arch} {self.name}: {self.registers}{local}{f' + {self.shared} B shared' * (self.shared > 1024)}"


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
    done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = re.sub(r"\(fastcaps::\w+\)(?=\d)|\(anonymous namespace\)::|^void ", "", done.stdout, flags=re.MULTILINE)
    return [re.sub(r"\b\w+::", "", name).partition("(")[0].replace("_kernel", "") for name in plain.splitlines()]


def dump(option: str, path: Path) -> str:
    """Return what ``cuobjdump`` says; RuntimeError if there is no such file, no cuobjdump, or it fails."""
    program = tool("cuobjdump")
    if program is None:
        raise RuntimeError("no cuobjdump: neither a CUDA toolkit with it nor Triton is installed")
    done = subprocess.run([program, option, str(path)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump {option} {path}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def lean_loops(path: Path) -> list[tuple[str, int, int]]:
    """Return the loops of lean forward walks: the kernel, instructions, and how many of them use local memory.

    Loops in machine code are what jumps backwards; of those with `LEAN`, the ones that have no other in them.
    """
    found = []
    for text in dump("-sass", path).split("Function : ")[1:]:
        if "forward_kernel" not in text.split(maxsplit=1)[0]:
            continue
        code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", text)]
        places = {at: k for k, (at, _) in enumerate(code)}
        jumps = [(places.get(int(to[1], 16), k), k) for k, (_, what) in enumerate(code)
                 if (to := re.search(r"BRA.*?\b(0x[0-9a-f]+)", what))]  # fmt: skip
        loops = [(a, b) for a, b in jumps if a < b and any(LEAN.search(what) for _, what in code[a : b + 1])]
        for a, b in loops:
            if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops):
                local = sum(re.search(r"\b(STL|LDL)\b", what) is not None for _, what in code[a : b + 1])
                found.append((text.split(maxsplit=1)[0], b - a + 1, local))
    return [(name, *rest) for name, (_, *rest) in zip(demangle([name for name, *_ in found]), found, strict=True)]


def collect(paths: Sequence[Path]) -> list[Usage]:
    """Read libraries, objects or cubins; RuntimeError as of `dump`."""
    found, arch, name = [], "", ""
    for path in paths:
        for match in USAGE.finditer(dump("-res-usage", path)):
            arch, name = match[1] or arch, match[2] or name
            if match[3]:
                registers, stack, shared, local = (int(number) for number in match.groups()[2:])
                found.append(Usage(name, arch, registers, stack + local, shared))
    return [one._replace(name=name) for one, name in zip(found, demangle([one.name for one in found]), strict=True)]


def spilled(found: Iterable[Usage]) -> list[Usage]:
    """Return the kernels for one pose that keep more in local memory than they may."""

    def most(one: Usage) -> int:
        if one.name.startswith("forward"):
            return IN_FORWARD
        known = max((most for name, most in KNOWN_SPILLS.items() if one.name.startswith(name)), default=0)
        return known if re.search(r", true, \d+, \d+>", one.name) else WITH_OPTIONS

    return [one for one in found if "Pose" in one.name and "FreePose" not in one.name and one.local > most(one)]


def triton_lines(target: str) -> Iterable[str]:
    """Yield a line for each Triton kernel with a loop over children that a call of the papers' layers would launch.

    A tile is the positions, parents, rows and columns that a program has at a time.
    """
    from registry import ROUTINGS  # of tests/

    from fastcaps.triton_kernels import call, static

    for routing in ROUTINGS:
        (module, _), border = libraries.triton_kernels(routing.stem), getattr(ops, routing.name)
        for case in map(routing.case, ("conv", "pose-4x4-10", "pose-1x8", "pose-1x16")):
            large = replace(case, batch=128, iterations=1, dtype=torch.float32)
            with torch.device("meta"), call.watched() as launches:
                getattr(module, routing.name)(*border.given([*routing.call(large).given.values()]), 0)
                given = border.given_backward([*routing.backward_call(large).given.values()])
                getattr(module, f"{routing.name}_backward")(*given, 0)
            for launch in (one for one in launches if "votes" in one.arguments):
                made, tile = static.compiled_for(target, launch), launch.arguments["tile"]
                size = "×".join(str(number.value) for number in (tile.BL, tile.BM, tile.BC, tile.BE))
                yield (f"{case.name} {made.kernel}: tile {size}, {made.num_warps} warps, {made.n_regs} registers, "
                       f"{made.n_spills} words spilled, {made.shared / 1024:.1f} KB shared")  # fmt: skip


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 if a kernel spills that is not known to."""
    parser = argparse.ArgumentParser(description="Registers a thread, local and static shared memory of the kernels.")
    parser.add_argument("files", nargs="*", type=Path, help="libraries, objects, cubins (the installed CUDA library)")
    parser.add_argument("--triton", metavar="TARGET", help="the Triton kernels for sm_80, gfx942 and the like")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.triton:
        for line in triton_lines(given.triton):
            print(line, flush=True)
        return 0
    found = collect(given.files or [libraries.library_path("cuda")])
    print(*sorted(found), sep="\n")
    wrong = spilled(found)
    for one in wrong:
        print(f"spills: {one}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
