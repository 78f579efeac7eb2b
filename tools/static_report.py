"""What the compiled CUDA kernels are: registers, spills, occupancy, the mix of their inner loop; and times from it.

    python tools/static_report.py                                # the installed library
    python tools/static_report.py FILE.o ... --arch sm_90        # objects, while tuning
    python tools/static_report.py --into docs/performance/compiled.md     # the tables of the page

No GPU is needed; ``cuobjdump`` is (of a CUDA toolkit, or of Triton's package).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastcaps import libraries
from tools import sass
from tools.markdown import as_markdown, into
from tools.sass import H200, Instruction, Kernel, Loop, Occupancy, Usage

__all__ = ["ARCHITECTURES", "Compiled", "Identity", "collect", "identify", "main", "spilled"]

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
DETAILED = "sm_90"
"""The architecture whose instructions are counted: that of the H200."""


@dataclass(frozen=True)
class Identity:
    """What a kernel's name says of it.

    Attributes
    ----------
    direction
        ``forward`` or ``backward``.
    pose
        C, D, E; None for a kernel that takes any pose.
    columns, lanes, each
        Lanes that share a parent's pose, lanes that take other parents, and parents that each lane holds.
    positions
        That each lane holds.
    plain
        Whether it leaves out what few calls want: bias, padding, parents in more than one warp.
    threads, blocks
        Of its launch bounds: threads of a block, blocks that a multiprocessor must have room for.
    tensor
        How many products of tf32 the tensor cores make of one; 0: votes are not made there.
    subject
        The pass: ``attention``, ``pooling`` or ``gaussian``.
    """

    direction: str
    pose: tuple[int, int, int] | None
    columns: int
    lanes: int
    each: int
    positions: int
    plain: bool
    threads: int
    blocks: int
    tensor: int = 0
    subject: str = "attention"

    @property
    def parents(self) -> int:
        """Parents that a warp takes on."""
        return self.lanes * self.each

    @property
    def seats(self) -> int:
        """Positions that a warp takes on."""
        return self.positions * (32 // (self.columns * self.lanes)) if self.lanes else 0

    def __str__(self) -> str:
        if self.pose is None:
            what = "any pose"
        else:
            rows, inner, columns = self.pose
            made = f"{rows}×{inner}" if inner == columns else f"{rows}×{inner}→{rows}×{columns}"
            what = f"{made}, {self.parents} parents × {self.seats} positions"
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
    lanes: tuple[tuple[int, int, int] | None, int, int] = (None, 0, 0)
    each, tensor = 1, 0
    if kind == "Fixed":
        lanes = ((numbers[0], numbers[1], numbers[2]), numbers[5], numbers[6])
        each = numbers[7] if len(numbers) == 9 else 1
    elif kind != "Free":
        if (kind, size) not in _LANES:
            return None
        lanes = _LANES[kind, size]
        if kind == "Tensor":  # the last number tells the products, one before it the parents
            each, tensor = (1, *numbers)[-2:]
    bounds = (flags[0] == "true", counts[-2], counts[-1])
    return Identity(direction.lower(), *lanes, each, counts[0], *bounds, tensor, subject.lower())


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture: what it takes, and its instructions where they were read."""

    name: str
    usage: Usage
    kernel: Kernel | None = None

    @property
    def arch(self) -> str:
        """``sm_90`` or the like."""
        return self.usage.arch

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

    def occupancy(self) -> Occupancy | None:
        """Blocks that registers let a multiprocessor hold (shared memory is a launch's choice); None if unknown."""
        if self.identity is None:
            return None
        return H200.occupancy(self.identity.threads, self.usage.registers, 0)

    @cached_property
    def child_loop(self) -> Loop | None:
        """The loop over children: the innermost one that ends a softmax, or else the one that computes most."""
        if self.kernel is None:
            return None
        softmax = [loop for loop in sass.loops(self.kernel) if is_softmax(sass.hot_path(loop))]
        if softmax:
            return min(softmax, key=lambda loop: (loop.inner, len(loop.body)))
        return sass.hot_loop(self.kernel)

    @cached_property
    def trip(self) -> list[Instruction]:
        """The instructions for one child, loops inside once; see :func:`tools.sass.hot_path`."""
        return sass.hot_path(self.child_loop) if self.child_loop else []

    @cached_property
    def inner_trips(self) -> list[list[Instruction]]:
        """The instructions of one trip through each loop inside that computes on the usual way (the depth's)."""
        if self.kernel is None or self.child_loop is None:
            return []
        taken = {one.address for one in self.trip}
        outer = self.child_loop
        found = []
        for loop in sass.loops(self.kernel):
            inside = outer.first <= loop.first and loop.last <= outer.last and loop != outer
            if inside and loop.last in taken and loop.inner == 0:
                path = sass.hot_path(loop)
                if sass.arithmetic(path) > 0:
                    found.append(path)
        return found

    @cached_property
    def product(self) -> list[Instruction]:
        """The instructions of one trip of a matrix product beside the loop over children: dW by the whole block."""
        if self.kernel is None or self.child_loop is None:
            return []
        every = [loop for loop in sass.loops(self.kernel) if loop.inner == 0 and _far_from(loop, self.child_loop)]
        paths = [path for path in map(sass.hot_path, every) if sass.arithmetic(path) >= len(path) / 2]
        return max(paths, key=sass.arithmetic, default=[])


def _far_from(loop: Loop, other: Loop) -> bool:
    return loop.last < other.first or other.last < loop.first


def is_softmax(path: Sequence[Instruction]) -> bool:
    """Tell whether instructions hold exponentials and a reciprocal (which alone may be a division of integers)."""
    return all(any(one.opcode.startswith(f"MUFU.{name}") for one in path) for name in ("EX2", "RCP"))


def collect(paths: Sequence[Path], detailed: str | None = DETAILED) -> list[Compiled]:
    """Read libraries, objects or cubins; with the instructions for one architecture, or for none.

    Raises
    ------
    RuntimeError
        If there is no cuobjdump, or it fails.
    """
    found = []
    for path in paths:
        usages = sass.parse_usage(sass.dump(path, "-res-usage"))
        kernels = {}
        if detailed is not None and any(usage.arch == detailed for usage in usages):
            kernels = {kernel.name: kernel for kernel in sass.parse_sass(sass.dump(path, "-sass", "-arch", detailed))}
        names = sass.demangle([usage.name for usage in usages])
        for usage in usages:
            kernel = kernels.get(usage.name) if usage.arch == detailed else None
            name = re.sub(r"\(fastcaps::\w+\)(?=\d)", "", names[usage.name])  # an enum among template arguments
            found.append(Compiled(name.partition("(")[0], usage, kernel))
    return found


def spilled(found: Iterable[Compiled]) -> list[str]:
    """Return a sentence for every specialised kernel that keeps anything in local memory."""
    return [
        f"{one.arch} {one.title}: {one.usage.stack} bytes of local memory a thread"
        for one in found
        if one.specialised and one.usage.local
    ]


def _sorted(found: Iterable[Compiled]) -> list[Compiled]:
    def key(one: Compiled) -> tuple[object, ...]:
        named = one.identity
        if named is None:
            return (2, one.name)
        where = (0 if named.pose else 1, named.direction == "backward", named.pose or ())
        return (*where, named.tensor, named.parents, not named.plain)

    return sorted(found, key=key)


def resource_table(found: Sequence[Compiled]) -> list[list[str]]:
    """Return a line for each kernel: registers and bytes of local memory by architecture, and what fits on the H200."""
    architectures = [arch for arch in ARCHITECTURES if any(one.arch == arch for one in found)]
    by_name: dict[str, dict[str, Compiled]] = {}
    for one in _sorted(found):
        by_name.setdefault(one.name, {})[one.arch] = one
    lines = [["kernel", "threads", *architectures, "warps a multiprocessor, sm_90"]]
    for versions in by_name.values():
        any_one = next(iter(versions.values()))
        here = versions.get(DETAILED)
        fits = here.occupancy() if here else None
        cells = []
        for arch in architectures:
            usage = versions[arch].usage if arch in versions else None
            local = f" + {usage.stack} B local" if usage and usage.local else ""
            cells.append(f"{usage.registers}{local}" if usage else "")
        threads = str(any_one.identity.threads) if any_one.identity else ""
        lines.append([any_one.title, threads, *cells, str(fits.warps) if fits else ""])
    return lines


MIX = ("FFMA", "HMMA", "FADD/FMUL", "LDS", "STS", "SHFL", "MUFU", "ALU", "IMAD", "uniform", "branch")


def loop_table(found: Sequence[Compiled]) -> list[list[str]]:
    """Return a line for each kernel whose instructions were read: the mix of a trip through its loop over children."""
    rest = "rest"
    lines = [["kernel", "slots", *MIX, rest]]
    for one in _sorted(found):
        if not one.trip or one.identity is None:
            continue
        counted = sass.mix(one.trip)
        other = sum(count for name, count in counted.items() if name not in MIX)
        inner = "".join(f" (of them {len(path)} again and again)" for path in one.inner_trips[:1])
        lines.append([one.title, f"{len(one.trip)}{inner}", *(str(counted[name] or "") for name in MIX), str(other)])
    return lines


def markdown(found: Sequence[Compiled]) -> str:
    """Return everything as markdown."""
    from tools import estimates

    parts = ["**Registers a thread** (and local memory, where there is any)", as_markdown(resource_table(found))]
    if any(one.kernel is not None for one in found):
        plain = [one for one in found if one.identity is None or one.identity.plain]
        parts += [
            f"**A trip through the loop over children**, in issue slots (warp instructions), {DETAILED}",
            as_markdown(loop_table(plain)),
            estimates.markdown(found),
        ]
    return "\n\n".join(parts)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 if a specialised kernel spills."""
    parser = argparse.ArgumentParser(description="Static report of the compiled CUDA kernels.")
    parser.add_argument(
        "files", nargs="*", type=Path, help="libraries, objects, cubins (default: the installed library)"
    )
    parser.add_argument("--arch", default=DETAILED, help=f"whose instructions to count (default {DETAILED})")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the tables between the markers of a page")
    given = parser.parse_args(None if arguments is None else list(arguments))
    files = given.files or [libraries.library_path("cuda")]
    try:
        for path in files:
            if not path.is_file():
                raise RuntimeError(f"no {path}: the CUDA kernels are not built")
        found = collect(files, given.arch)
        text = markdown(found)
        if given.into is None:
            print(text)
        else:
            given.into.write_text(into(given.into.read_text(), text, "static"))
    except (RuntimeError, ValueError, OSError) as error:
        print(f"static_report: {error}", file=sys.stderr)
        return 2
    complaints = spilled(found)
    for complaint in complaints:
        print(f"spills: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
