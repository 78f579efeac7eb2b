"""What the compiled CUDA kernels take, by the compiler's own word: registers, local memory, static shared memory.

    python tools/static_report.py                           # the installed library
    python tools/static_report.py FILE.o ...                # objects, while tuning

No GPU is needed; ``cuobjdump`` is (of a CUDA toolkit, or of Triton's package). The exit status is 1 if a kernel for one
pose spills that is not known to. ``tools/triton_report.py`` does the same for the Triton kernels.
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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastcaps import libraries
from tools.markdown import as_markdown

__all__ = ["Compiled", "Identity", "Usage", "collect", "identify", "main", "spilled", "unexpected"]

_THREE = "tensor cores, 3 products, all options"
KNOWN_SPILLS = {
    "sm_90 gaussian forward 4×4, 8 parents × 4 positions, all options: 8 bytes of local memory a thread",
    f"sm_80 forward 1×64, 1 parents × 16 positions, {_THREE}: 8 bytes of local memory a thread",
    f"sm_80 forward 4×4, 32 parents × 4 positions, {_THREE}: 8 bytes of local memory a thread",
    f"sm_90 forward 4×4, 32 parents × 4 positions, {_THREE}: 16 bytes of local memory a thread",
}
"""The first is held to 128 registers, so that two blocks fit on a multiprocessor; the others have all there are."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture.

    Attributes
    ----------
    name, arch
        Mangled name, and ``sm_90`` or the like.
    registers
        A thread.
    local
        Bytes of local memory a thread: spills, arrays that are indexed at run time, calls. 0 where all is well.
    shared
        Static shared memory in bytes, the part that the system keeps (1 KB from sm_90 on) included.
    """

    name: str
    arch: str
    registers: int
    local: int
    shared: int


# ---- cuobjdump -------------------------------------------------------------------------------------------------------

_ARCH = re.compile(r"^\s*arch\s*=\s*(sm_\d+[af]?)")
_USAGE = re.compile(r"^\s*REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


def tool(name: str) -> str | None:
    """Return the path of a program such as ``cuobjdump``; None where there is none.

    Looked for in ``$CUDA_HOME/bin``, on the path, in the default place of a toolkit, and in Triton's package.
    """
    places = [os.path.join(os.environ[key], "bin") for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    places += [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which(name, path=os.pathsep.join(place for place in places if place))


def dump(path: Path) -> str:
    """Return what ``cuobjdump -res-usage`` prints about a library, object or cubin.

    Raises
    ------
    RuntimeError
        If there is no cuobjdump or it fails.
    """
    program = tool("cuobjdump")
    if program is None:
        raise RuntimeError("no cuobjdump: neither a CUDA toolkit with it nor Triton is installed")
    done = subprocess.run([program, "-res-usage", str(path)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump -res-usage {path.name}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def demangle(names: Sequence[str]) -> dict[str, str]:
    """Return readable names by mangled ones: template arguments kept, parameters and return types dropped."""
    program = shutil.which("c++filt")
    plain = list(names)
    if program is not None and plain:
        done = subprocess.run([program, "-p"], input="\n".join(plain), capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and len(done.stdout.splitlines()) == len(plain):
            plain = done.stdout.splitlines()
    tidied = (re.sub(r"^void |\(anonymous namespace\)::", "", name) for name in plain)
    return dict(zip(names, tidied, strict=True))


def parse_usage(text: str) -> list[Usage]:
    """Return the kernels in the output of ``cuobjdump -res-usage``."""
    found, arch, name = [], "", ""
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch = match.group(1)
        elif match := re.match(r"^\s*Function\s+(\S+):\s*$", line):
            name = match.group(1)
        elif (match := _USAGE.match(line)) and name:
            registers, stack, shared, local = (int(number) for number in match.groups())
            found.append(Usage(name, arch, registers, stack + local, shared))
            name = ""
    return found


# ---- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """What a kernel's name says of it.

    Attributes
    ----------
    subject, direction
        The pass, ``attention``, ``pooling`` or ``gaussian``; ``forward`` or ``backward``.
    pose
        C, D, E; None for a kernel that takes any pose.
    parents, positions
        How many a warp takes; 0 for a kernel that takes any pose.
    plain
        Whether it leaves out what few calls want: bias, padding, parents in more than one warp.
    threads
        Of a block, by its launch bounds.
    tensor
        How many products of tf32 the tensor cores make of one; 0: votes are not made there.
    """

    subject: str
    direction: str
    pose: tuple[int, int, int] | None
    parents: int
    positions: int
    plain: bool
    threads: int
    tensor: int = 0

    def __str__(self) -> str:
        what = "any pose"
        if self.pose is not None:
            rows, inner, columns = self.pose
            made = f"{rows}×{inner}" if inner == columns else f"{rows}×{inner}→{rows}×{columns}"
            what = f"{made}, {self.parents} parents × {self.positions} positions"
        cores = {0: "", 1: ", tensor cores", 3: ", tensor cores, 3 products"}[self.tensor]
        which = "" if self.subject == "attention" else f"{self.subject} "
        return f"{which}{self.direction} {what}{cores}{'' if self.plain else ', all options'}"


_NAME = re.compile(
    r"\b(?:forward|backward)_kernel<(?:[\w:]*::)?(Attention|Pooling|Gaussian)(Forward|Backward)\s*,\s*"
    r"(?:[\w:]*::)?(\w+)Pose(\w*)(?:<([\d, ]+)>)?\s*,\s*(.*)>$"
)

_LANES = {
    ("Tensor", "4x4"): ((4, 4, 4), 1, 8),
    ("Tensor", "1x64"): ((1, 64, 64), 4, 1),
    ("Single", "1x16"): ((1, 16, 16), 1, 1),
}
"""Poses whose names do not say it all: C, D, E; lanes that share a parent's pose; lanes that take other parents."""


def identify(name: str) -> Identity | None:
    """Read a readable kernel name; None if it is not one of a pass's."""
    found = _NAME.search(name)
    if found is None:
        return None
    subject, direction, kind, size, pose, rest = found.groups()
    numbers = [int(number) for number in pose.split(",")] if pose else []
    words = [word.strip() for word in rest.split(",")]
    flags = [word for word in words if word in ("true", "false")]
    counts = [int(word) for word in words if word.isdigit()]
    if len(counts) < 3 or not flags:
        return None
    pose_of: tuple[int, int, int] | None = None
    # lanes that share a parent's pose, lanes of other parents, parents of each
    columns, lanes, each, tensor = 32, 0, 1, 0
    if kind == "Fixed":
        pose_of, columns, lanes = (numbers[0], numbers[1], numbers[2]), numbers[5], numbers[6]
        each = numbers[7] if len(numbers) == 9 else 1
    elif kind != "Free":
        if (kind, size) not in _LANES:
            return None
        pose_of, columns, lanes = _LANES[kind, size]
        if kind == "Tensor":  # the last number tells the products, one before it the parents
            each, tensor = (1, *numbers)[-2:]
    positions = counts[0] * (32 // (columns * lanes)) if lanes else 0
    plain, threads = flags[0] == "true", counts[-2]  # the last is how many blocks a multiprocessor has room for
    return Identity(subject.lower(), direction.lower(), pose_of, lanes * each, positions, plain, threads, tensor)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture: its readable name, and what it takes."""

    name: str
    usage: Usage

    @cached_property
    def identity(self) -> Identity | None:
        """What its name says."""
        return identify(self.name)

    @property
    def specialised(self) -> bool:
        """Whether it is compiled for one pose."""
        return self.identity is not None and self.identity.pose is not None

    @property
    def title(self) -> str:
        """Its name for people."""
        if self.identity is not None:
            return str(self.identity)
        return re.sub(r"\b\w+::", "", self.name).partition("(")[0].replace("_kernel", "").replace("_", " ")


def collect(paths: Sequence[Path]) -> list[Compiled]:
    """Read libraries, objects or cubins.

    Raises
    ------
    RuntimeError
        If there is no cuobjdump, or it fails.
    """
    found = []
    for path in paths:
        usages = parse_usage(dump(path))
        names = demangle([usage.name for usage in usages])
        for usage in usages:
            name = re.sub(r"\(fastcaps::\w+\)(?=\d)", "", names[usage.name])  # an enum among template arguments
            found.append(Compiled(name.partition("(")[0], usage))
    return found


def spilled(found: Iterable[Compiled]) -> list[str]:
    """Return a sentence for every specialised kernel that keeps anything in local memory."""
    return [
        f"{one.usage.arch} {one.title}: {one.usage.local} bytes of local memory a thread"
        for one in found
        if one.specialised and one.usage.local
    ]


def unexpected(found: Iterable[Compiled]) -> list[str]:
    """Return the sentences of :func:`spilled` that are not among the known ones."""
    return [sentence for sentence in spilled(found) if sentence not in KNOWN_SPILLS]


def _order(one: Compiled) -> tuple[object, ...]:
    named = one.identity
    if named is None:
        return (2, one.name)
    where = (0 if named.pose else 1, named.direction == "backward", named.pose or ())
    return (*where, named.tensor, named.parents, not named.plain)


def table(found: Sequence[Compiled]) -> list[list[str]]:
    """Return a line for each kernel: threads of a block, and what it takes on each architecture."""
    architectures = sorted({one.usage.arch for one in found}, key=lambda arch: int(re.sub(r"\D", "", arch)))
    by_name: dict[str, dict[str, Usage]] = {}
    for one in sorted(found, key=_order):
        by_name.setdefault(one.name, {})[one.usage.arch] = one.usage
    lines = [["kernel", "threads", *architectures]]
    for name, usages in by_name.items():
        one = Compiled(name, next(iter(usages.values())))
        cells = []
        for usage in map(usages.get, architectures):
            local = f" + {usage.local} B local" if usage and usage.local else ""
            shared = f" + {usage.shared} B shared" if usage and usage.shared > 1024 else ""
            cells.append(f"{usage.registers}{local}{shared}" if usage else "")
        lines.append([one.title, str(one.identity.threads) if one.identity else "", *cells])
    return lines


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 if a kernel spills that is not known to, 2 without a library."""
    parser = argparse.ArgumentParser(description="Registers, local and static shared memory of the CUDA kernels.")
    parser.add_argument(
        "files", nargs="*", type=Path, help="libraries, objects, cubins (default: the installed library)"
    )
    given = parser.parse_args(None if arguments is None else list(arguments))
    files = given.files or [libraries.library_path("cuda")]
    try:
        for path in files:
            if not path.is_file():
                raise RuntimeError(f"no {path}: the CUDA kernels are not built")
        found = collect(files)
    except (RuntimeError, OSError) as error:
        print(f"static_report: {error}", file=sys.stderr)
        return 2
    print(f"Registers a thread (and bytes of local and static shared memory):\n\n{as_markdown(table(found))}")
    for complaint in spilled(found):
        print(f"spills: {complaint}", file=sys.stderr)
    return 1 if unexpected(found) else 0


if __name__ == "__main__":
    sys.exit(main())
