"""What the compiled CUDA kernels take, by the compiler's own word: registers and local memory. No GPU is needed.

    python -m tools.static_report              # the installed CUDA library
    python -m tools.static_report FILE.o ...   # objects, while tuning

``cuobjdump`` is needed (of a CUDA toolkit, or of Triton's package); the exit status is 1 if a kernel for one pose
spills that is not known to.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastcaps import libraries

KNOWN_SPILLS = {
    "sm_90 forward<GaussianForward, FixedPose<4, 4, 4, 4, 4, 1, 8, 1, 20>, 1, false,": 8,
    "sm_80 forward<AttentionForward, TensorPose1x64<1>, 2, false,": 8,
    "sm_80 forward<AttentionForward, TensorPose4x4<4, 3>, 1, false,": 8,
    "sm_90 forward<AttentionForward, TensorPose4x4<4, 3>, 1, false,": 16,
}
"""Bytes by how a kernel's name begins. The first is held to 128 registers, so that two blocks fit on a multiprocessor;
the others, on tensor cores with all options, have all there are."""
_LINE = re.compile(
    r"arch = (?P<arch>sm_\w+)|Function (?P<name>\S+):"
    r"|REG:(?P<reg>\d+) STACK:(?P<stack>\d+) .*LOCAL:(?P<local>\d+)"
)


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture."""

    name: str  # without namespaces and parameters
    arch: str  # sm_90 or the like
    registers: int  # a thread
    local: int  # bytes of local memory a thread: spills, arrays that are indexed at run time, calls

    def __str__(self) -> str:
        return f"{self.arch} {self.name}: {self.registers} registers, {self.local} bytes of local memory a thread"


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
    plain = [re.sub(r"\(fastcaps::\w+\)(?=\d)|\(anonymous namespace\)::|^void ", "", name)
             for name in done.stdout.splitlines()]  # fmt: skip
    return [re.sub(r"\b\w+::", "", name).partition("(")[0].replace("_kernel", "") for name in plain]


def collect(paths: Sequence[Path]) -> list[Usage]:
    """Read libraries, objects or cubins; RuntimeError if there is no such file, no cuobjdump, or it fails."""
    program = tool("cuobjdump")
    if program is None:
        raise RuntimeError("no cuobjdump: neither a CUDA toolkit with it nor Triton is installed")
    found, names = [], []
    for path in paths:
        if not path.is_file():
            raise RuntimeError(f"no {path}: the CUDA kernels are not built")
        done = subprocess.run([program, "-res-usage", str(path)], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"cuobjdump -res-usage {path.name}: {(done.stderr or done.stdout).strip()}")
        arch = name = ""
        for line in _LINE.finditer(done.stdout):
            arch, name = line["arch"] or arch, line["name"] or name
            if line["reg"]:
                names.append(name)
                found.append((arch, int(line["reg"]), int(line["stack"]) + int(line["local"])))
    return [Usage(name, *one) for name, one in zip(demangle(names), found, strict=True)]


def spilled(found: Iterable[Usage]) -> list[Usage]:
    """Return the kernels for one pose that keep more in local memory than they are known to."""
    known = {one: [most for name, most in KNOWN_SPILLS.items() if str(one).startswith(name)] for one in found}
    special = [one for one in known if "Pose" in one.name and "FreePose" not in one.name]
    return [one for one in special if one.local > max(known[one], default=0)]


def main() -> int:
    """Print what each kernel takes; return 1 if a kernel spills that is not known to, 2 without a library."""
    try:
        found = collect([*map(Path, sys.argv[1:])] or [libraries.library_path("cuda")])
    except (RuntimeError, OSError) as error:
        print(f"static_report: {error}", file=sys.stderr)
        return 2
    wrong = spilled(found)
    print(*sorted(map(str, found)), *(f"spills: {one}" for one in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
