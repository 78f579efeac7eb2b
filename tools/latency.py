"""How long a warp waits for its own results: a loop's instructions, issued in order, each when its operands are there.

A multiprocessor hides such waits behind its other warps, as far as there are any: the time of a trip is the longest of
what the trip's instructions take of a scheduler, and of the wait that is shared by the scheduler's warps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tools.sass import Instruction, classify, wavefronts

__all__ = ["CYCLES", "GLOBAL", "alone", "registers"]

CYCLES = {
    "FFMA": 4,
    "FADD/FMUL": 4,
    "IMAD": 5,
    "ALU": 5,
    "uniform": 8,
    "MUFU": 20,
    "SHFL": 24,
    "HMMA": 24,
    "LDS": 28,
    "BAR": 20,
}
"""Cycles from the issue of an instruction to that of one that takes its result, by class, on compute capability 9.0.

That of LDS is published (Luo et al., arXiv 2402.13499, and other micro-benchmarks: 28 to 29); the rest are round
numbers for what earlier architectures were found to take. Where an address has parts on the same bank, or 16 bytes a
lane, the wavefronts behind the first come on top.
"""

GLOBAL = 260
"""Cycles of a load that the second-level cache answers (published micro-benchmarks: 260; from device memory 570)."""

_NAME = re.compile(r"\b(?:UR|R|UP|P)\d+\b")
_NO_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "BSSY", "BSYNC", "NOP", "WARPSYNC", "LDGSTS", "LDGDEPBAR", "DEPBAR")


def _width(one: Instruction) -> int:
    """Return the registers of a result, or of what is stored."""
    if ".128" in one.opcode:
        return 4
    return 4 if classify(one.opcode) == "HMMA" else 2 if ".64" in one.opcode or ".WIDE" in one.opcode else 1


def _spread(name: str, width: int) -> list[str]:
    letters, number = re.fullmatch(r"([A-Z]+)(\d+)", name).groups()  # type: ignore[union-attr]
    return [f"{letters}{int(number) + k}" for k in range(width)]


@functools.cache
def registers(one: Instruction) -> tuple[set[str], set[str]]:
    """Return what an instruction writes and what it reads: registers and predicates, neighbours of wide ones too."""
    parts = [part.strip() for part in one.operands.split(",")] if one.operands else []
    names = [[name for name in _NAME.findall(part) if not name.endswith("Z")] for part in parts]
    count = 0
    if not one.base.startswith(_NO_RESULT):
        predicate = [re.fullmatch(r"U?P(\d+|T)", part) is not None for part in parts]
        if predicate and predicate[0]:
            count = 2  # two predicates, or a predicate and a register (SHFL, LOP3)
        else:
            count = 1 + (len(parts) > 1 and predicate[1])  # a carry
    wide = _width(one)
    writes = {
        each for group in names[:count] for name in group for each in _spread(name, wide if name[0] == "R" else 1)
    }
    reads = set(_NAME.findall(one.guard))
    for part, group in zip(parts[count:], names[count:], strict=True):
        for name in group:
            if classify(one.opcode) == "HMMA":
                several = 4 if part is parts[-1] else 2
            else:
                several = 2 if ".64" in part or (part.startswith("[") and "desc" in part) else 1
                several = wide if not part.startswith("[") and one.base.startswith(("ST", "RED")) else several
            reads |= set(_spread(name, several if name[0] == "R" else 1))
    return writes, reads


def _latency(one: Instruction) -> int:
    kind = classify(one.opcode)
    if kind == "LDS":
        return CYCLES["LDS"] + wavefronts(one) - 1
    if kind in ("LDG", "ATOM/RED"):
        return GLOBAL
    return CYCLES.get(kind, CYCLES["ALU"])


def alone(path: Sequence[Instruction], trips: int = 4) -> float:
    """Return the cycles that one warp by itself takes for a trip through a loop.

    The mean of the trips behind the first two, so that what one trip leaves to the next is waited for. A barrier waits
    for all loads and results before it.
    """
    known = [(registers(one), _latency(one), classify(one.opcode) == "BAR") for one in path]
    ready: dict[str, int] = {}
    now, ends = 0, []
    for _ in range(2 + trips):
        for (writes, reads), takes, barrier in known:
            waits = ready.values() if barrier else (ready[name] for name in reads if name in ready)
            now = max(now + 1, *waits, 0)
            ready.update(dict.fromkeys(writes, now + takes))
            if barrier:
                now += takes
        ends.append(now)
    return (ends[-1] - ends[1]) / trips
