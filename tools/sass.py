"""Reading what the CUDA compiler made: resource usage, instructions, loops, and what a loop asks of each unit.

Everything here is text in, numbers out: the output of ``cuobjdump -res-usage`` and ``cuobjdump -sass``, or the messages
of ``ptxas -v``. No GPU is needed, and no toolkit but for :func:`tool` and :func:`dump`.

What a multiprocessor needs for a mix of instructions is a bound, not a simulation: each unit is busy for so many
cycles, each scheduler issues one instruction a cycle, and the slowest sets the time. Latency that too few warps leave
open, bank conflicts and replays come on top.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "CLASSES",
    "H200",
    "Chip",
    "Instruction",
    "Kernel",
    "Loop",
    "Occupancy",
    "Usage",
    "arithmetic",
    "classify",
    "demangle",
    "dump",
    "hot_loop",
    "hot_path",
    "loops",
    "macs",
    "mix",
    "parse_ptxas",
    "parse_sass",
    "parse_usage",
    "tool",
    "wavefronts",
]

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);")
_FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
_ARCH = re.compile(r"^\s*(?:arch\s*=|code for|\.target)\s*(sm_\d+[af]?)")
_USAGE = re.compile(r"^\s*REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")
_TARGET = re.compile(r"(?:^|[\s,(])0x([0-9a-f]+)\s*\)?\s*$")


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one architecture, from the compiler.

    Attributes
    ----------
    name, arch
        Mangled name, and ``sm_90`` or the like.
    registers
        A thread.
    stack
        Bytes of local memory a thread: spills, arrays that are indexed at run time, calls. 0 where all is well.
    shared
        Static shared memory in bytes, the part that the system keeps (1 KB from sm_90 on) included.
    spilled
        Bytes of spill stores and loads; None where the source does not say (``cuobjdump`` shows the stack alone).
    """

    name: str
    arch: str
    registers: int
    stack: int
    shared: int
    spilled: int | None = None

    @property
    def local(self) -> bool:
        """Whether anything of it lies in local memory."""
        return self.stack > 0 or bool(self.spilled)


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: its address, guard, opcode with modifiers, and operands."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where a direct branch goes; None for anything else."""
        if self.base != "BRA":
            return None
        found = _TARGET.search(self.operands)
        return int(found.group(1), 16) if found else None


@dataclass
class Kernel:
    """The instructions of one kernel on one architecture, in order of address."""

    name: str
    arch: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """Instructions from the target of a backward branch to that branch, loops inside included.

    Attributes
    ----------
    body
        The instructions.
    inner
        Loops that it holds, at any depth.
    """

    body: tuple[Instruction, ...]
    inner: int

    @property
    def first(self) -> int:
        """Address of its first instruction."""
        return self.body[0].address

    @property
    def last(self) -> int:
        """Address of its backward branch."""
        return self.body[-1].address


# ---- the tools -------------------------------------------------------------------------------------------------------


def tool(name: str) -> str | None:
    """Return the path of ``cuobjdump``, ``nvdisasm`` or ``ptxas``; None where there is none.

    Looked for beside ``$CUDA_HOME/bin``, on the path, in the default place of a toolkit, and in Triton's package, which
    carries all three.
    """
    places = [os.path.join(os.environ[key], "bin") for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    places += [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which(name, path=os.pathsep.join(place for place in places if place))


def dump(path: Path, *options: str, seconds: float = 300.0) -> str:
    """Return what ``cuobjdump`` prints about a library, object or cubin.

    Raises
    ------
    RuntimeError
        If there is no cuobjdump or it fails.
    """
    program = tool("cuobjdump")
    if program is None:
        raise RuntimeError("no cuobjdump: neither a CUDA toolkit with it nor Triton is installed")
    done = subprocess.run([program, *options, str(path)], capture_output=True, text=True, timeout=seconds)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump {' '.join(options)} {path.name}: {(done.stderr or done.stdout).strip()}")
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


# ---- parsing ---------------------------------------------------------------------------------------------------------


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


def parse_ptxas(text: str) -> list[Usage]:
    """Return the kernels in the messages of ``nvcc -Xptxas -v``."""
    found, name, arch = [], "", ""
    stack = spilled = 0
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(sm_\w+)'", line):
            name, arch, stack, spilled = *match.groups(), 0, 0
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = (int(number) for number in match.groups())
            spilled = stores + loads
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(Usage(name, arch, int(match.group(1)), stack, int(shared.group(1)) if shared else 0, spilled))
            name, stack, spilled = "", 0, 0
    return found


def parse_sass(text: str) -> list[Kernel]:
    """Return the kernels in the output of ``cuobjdump -sass``."""
    found: list[Kernel] = []
    arch = ""
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            if found:
                made = Instruction(int(address, 16), guard or "", opcode, operands.strip())
                found[-1].instructions.append(made)
        elif match := _FUNCTION.match(line):
            found.append(Kernel(match.group(1), arch))
        elif match := _ARCH.match(line):
            arch = match.group(1)
    return found


# ---- loops -----------------------------------------------------------------------------------------------------------


def loops(kernel: Kernel) -> list[Loop]:
    """Return the loops of a kernel, outer before inner.

    A loop is what lies between a backward branch and its target. Several backward branches to one target (a
    ``continue``) are one loop. A branch to itself, the padding at a kernel's end, is none.
    """
    ends: dict[int, int] = {}
    for made in kernel.instructions:
        target = made.target
        if target is not None and target < made.address:
            ends[target] = max(ends.get(target, 0), made.address)
    spans = sorted(ends.items(), key=lambda span: (span[0], -span[1]))
    found = []
    for first, last in spans:
        inner = sum(1 for a, b in spans if (a, b) != (first, last) and first <= a and b <= last)
        body = tuple(made for made in kernel.instructions if first <= made.address <= last)
        if body:
            found.append(Loop(body, inner))
    return found


CLASSES: tuple[tuple[str, str], ...] = (
    ("FFMA", r"FFMA2?"),
    ("FADD/FMUL", r"(FADD|FMUL|FSWZADD)(2|32I)?"),
    ("HMMA", r"(HMMA|HGMMA|IMMA|DMMA|QGMMA|UTC\w*MMA)"),
    ("MUFU", r"(MUFU|F2F|F2I|I2F|F2FP|FRND|I2FP)"),
    ("LDS", r"(LDS|LDSM|LDS_\w+)"),
    ("STS", r"(STS|STSM)"),
    ("SHFL", r"(SHFL|REDUX|VOTE|MATCH)"),
    ("LDGSTS", r"(LDGSTS|UBLKCP|UTMALDG\w*|UTMASTG\w*)"),
    ("LDG", r"(LDG|LD)"),
    ("STG", r"(STG|ST)"),
    ("LDL/STL", r"(LDL|STL)"),
    ("ATOM/RED", r"(ATOM|ATOMG|ATOMS|RED|REDG|REDAS)"),
    ("BAR", r"(BAR|WARPSYNC|DEPBAR|LDGDEPBAR|SYNCS|ARRIVES|MEMBAR|FENCE|ERRBAR|CCTL)"),
    ("IMAD", r"(IMAD|IDP|HFMA2|HADD2|HMUL2)"),
    ("uniform", r"(U[A-Z]\w*|R2UR|S2UR|LDC|LDCU|VOTEU)"),
    ("branch", r"(BRA|BRX|BRXU|BSSY|BSYNC|BREAK|CALL|RET|EXIT|JMP|YIELD|NANOSLEEP|BMOV|WARPGROUP)"),
    ("ALU", r"\w+"),
)
"""Classes of instructions and the opcodes in each; the first that matches counts, what is left goes to the ALU.

``IMAD`` holds what runs on the slower half of the multiply-add units; compilers also use it, and ``HFMA2``, to move
constants and registers. ``MUFU`` holds the conversions, which run at its rate or twice it.
"""

_COMPILED = tuple((name, re.compile(f"{pattern}$")) for name, pattern in CLASSES)


def classify(opcode: str) -> str:
    """Return the class of an opcode; see :data:`CLASSES`."""
    base = opcode.partition(".")[0]
    if base == "NOP":
        return "ALU"
    return next(name for name, pattern in _COMPILED if pattern.match(base))


def mix(instructions: Iterable[Instruction]) -> Counter[str]:
    """Count instructions by class."""
    return Counter(classify(made.opcode) for made in instructions)


def arithmetic(instructions: Iterable[Instruction]) -> int:
    """Count multiply-adds and matrix instructions; a matrix instruction counts as eight."""
    counted = mix(instructions)
    return counted["FFMA"] + 8 * counted["HMMA"]


def hot_path(loop: Loop) -> list[Instruction]:
    """Return the instructions of one trip as the usual call takes it: loops inside once, rare branches not at all.

    A loop's body also holds what few calls want (a bias, statistics of a softmax in parts). Which way the usual call
    goes is guessed from the code itself: of all ways through the body, the one with the most multiply-adds for its
    length, a multiply-add weighing as much as four instructions, and the one reciprocal of a softmax as sixteen.
    """
    blocks = _blocks(loop)
    last = loop.body[-1].address
    best: dict[int, tuple[int, int | None]] = {loop.first: (0, None)}
    for start, (block, following) in blocks.items():
        if start not in best:
            continue
        reciprocals = sum(made.opcode.startswith("MUFU.RCP") for made in block)
        value = best[start][0] + 4 * arithmetic(block) + 16 * reciprocals - len(block)
        for next_start in following:
            if next_start in blocks and (next_start not in best or best[next_start][0] < value):
                best[next_start] = (value, start)
    ends = [start for start, (block, _) in blocks.items() if block[-1].address == last and start in best]
    if not ends:  # the last branch is reached only from outside the body: take it all
        return list(loop.body)
    path: list[Instruction] = []
    place: int | None = ends[0]
    while place is not None:
        path[:0] = blocks[place][0]
        place = best[place][1]
    return path


def _blocks(loop: Loop) -> dict[int, tuple[list[Instruction], list[int]]]:
    """Return the basic blocks of a loop by address, in order, each with the blocks that may follow further down."""
    targets = {made.target for made in loop.body} | {loop.first}
    blocks: dict[int, tuple[list[Instruction], list[int]]] = {}
    block: list[Instruction] = []
    for made, after in zip(loop.body, (*loop.body[1:], None), strict=True):
        block.append(made)
        ends = made.base in ("BRA", "BRX", "EXIT", "RET") or after is None or after.address in targets
        if not ends:
            continue
        following = []
        if made.target is not None and made.target > made.address:
            following.append(made.target)
        # without a condition, a branch is always taken
        if after is not None and (made.base not in ("BRA", "BRX", "EXIT", "RET") or _conditional(made)):
            following.append(after.address)
        blocks[block[0].address] = (block, following)
        block = []
    return blocks


def _conditional(made: Instruction) -> bool:
    return bool(made.guard) or bool(re.match(r"!?U?P\d", made.operands)) or ".DIV" in made.opcode


def hot_loop(kernel: Kernel) -> Loop | None:
    """Return the loop that a kernel's time goes to, or None if it has none that computes.

    That is the innermost loop whose trip holds at least half of the multiply-adds that any loop's trip holds.
    """
    found = [(loop, arithmetic(hot_path(loop))) for loop in loops(kernel)]
    most = max((count for _, count in found), default=0)
    fitting = [(loop, count) for loop, count in found if count > 0 and 2 * count >= most]
    return min(fitting, key=lambda pair: (pair[0].inner, len(pair[0].body)))[0] if fitting else None


# ---- the chip --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that fit on one multiprocessor, and what runs out first."""

    blocks: int
    warps: int
    limit: str


@dataclass(frozen=True)
class Chip:
    """One GPU.

    Attributes
    ----------
    name, multiprocessors
        Which, and how many it has.
    boost, sustained
        Clock in GHz: the highest, and what is assumed under a load of multiply-adds.
    bandwidth
        Of device memory, in bytes a second, by a copy (bytes read and written).
    registers, warps, blocks, shared
        Of a multiprocessor: 32-bit registers, resident warps and blocks, bytes of shared memory.
    reserved
        Bytes of shared memory that the system keeps of every block.
    matrix
        Multiply-adds a cycle and multiprocessor by ``mma.sync`` with tf32 operands; half operands run at twice that.
    """

    name: str
    multiprocessors: int
    boost: float
    sustained: float
    bandwidth: float
    registers: int = 65536
    warps: int = 64
    blocks: int = 32
    shared: int = 228 * 1024
    reserved: int = 1024
    matrix: float = 512.0

    def occupancy(self, threads: int, registers: int, shared: int) -> Occupancy:
        """Return how many blocks of ``threads`` threads fit, with ``shared`` bytes each (the system's part aside)."""
        warps = math.ceil(threads / 32)
        per_warp = math.ceil(registers * 32 / 256) * 256
        limits = {
            "warps": self.warps // warps,
            "blocks": self.blocks,
            "registers": self.registers // 4 // per_warp * 4 // warps,
            "shared memory": self.shared // (math.ceil((shared + self.reserved) / 128) * 128),
        }
        limit = min(limits, key=lambda name: limits[name])
        return Occupancy(limits[limit], limits[limit] * warps, limit)

    def cycles(self, instructions: Iterable[Instruction]) -> dict[str, float]:
        """Return for each unit the cycles that one warp's instructions keep a whole multiprocessor's share of it busy.

        The largest is the bound: a multiprocessor whose warps run nothing else finishes one such run every so many
        cycles. ``issue`` is the four schedulers.
        """
        made = list(instructions)
        counted: Counter[str] = mix(made)
        memory = sum(wavefronts(one) for one in made)
        simple = counted["ALU"] + counted["branch"]
        found = {
            "issue": len(made) / 4,
            "multiply-add": (counted["FFMA"] + counted["FADD/FMUL"]) / 4 + counted["IMAD"] / 4,
            "integer": simple / 2,
            "special": counted["MUFU"] * 2.0,
            "shared memory": float(memory),
            "matrix": sum(macs(one) / self.rate(one) for one in made if classify(one.opcode) == "HMMA"),
        }
        return {name: value for name, value in found.items() if value}

    def rate(self, one: Instruction) -> float:
        """Return the multiply-adds a cycle and multiprocessor at which a matrix instruction runs."""
        return self.matrix if "TF32" in one.opcode else 2 * self.matrix

    def seconds(self, cycles: float, clock: float | None = None) -> float:
        """Return the time of ``cycles`` cycles on one multiprocessor's share of work spread evenly over all."""
        return cycles / self.multiprocessors / ((clock or self.sustained) * 1e9)


def macs(one: Instruction) -> int:
    """Return the multiply-adds of a warp's matrix instruction, from its shape (``HMMA.1688`` is 16 x 8 x 8)."""
    for part in one.opcode.split("."):
        if part.isdigit() and len(part) in (3, 4, 5) and part.startswith("16"):
            return 16 * int(part[2]) * int(part[3:] or 1)
    return 16 * 8 * 8


def wavefronts(one: Instruction) -> int:
    """Return the cycles that shared memory and its neighbours (shuffles, global accesses) need for an instruction.

    By width, as if every lane had an address of its own: a broadcast takes less.
    """
    kind = classify(one.opcode)
    if kind == "SHFL":
        return 1
    if kind not in ("LDS", "STS", "LDGSTS", "LDG", "STG", "LDL/STL", "ATOM/RED"):
        return 0
    parts = one.opcode.split(".")
    if "128" in parts or parts[-1] == "4":
        return 4
    return 2 if "64" in parts or parts[-1] == "2" else 1


H200 = Chip("NVIDIA H200", multiprocessors=132, boost=1.98, sustained=1.755, bandwidth=4.3e12, matrix=640.0)
