"""What a multiprocessor can do in a cycle: occupancy, and the least time that a mix of instructions takes.

A bound, not a simulation: each unit is busy for so many cycles, each scheduler issues one instruction a cycle, and the
slowest of them sets the time. Latency that too few warps leave open, bank conflicts and replays come on top.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bench.sass import Instruction, classify, mix

__all__ = ["H200", "Chip", "Occupancy", "wavefronts"]


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
