"""What crosses between GPUs in a turn of a routing, and how long that takes on paper: the table of docs/distributed.md.

    python tools/scaling.py

Nothing here is measured. The bandwidths are those of NVIDIA's data sheets (H100: NVLink 900 GB/s, both directions
together; ConnectX-7: 400 Gb/s); latencies and the share of the peak rate that kernels reach are assumptions.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

NODE = 8  # GPUs that NVLink joins
INSIDE, BETWEEN = 450e9, 50e9  # bytes a second and GPU, one direction
LATENCY_INSIDE, LATENCY_BETWEEN = 2e-6, 5e-6  # seconds a step, assumed
RATE = 20e12  # operations a second, assumed: 30 % of the H100's 67e12 in float32
GPUS = (1, 8, 64, 256, 1000)


class Work(NamedTuple):
    """A routing: samples, children, parents, numbers of a child's and of a parent's pose, sums over the votes, weight
    groups."""

    name: str
    batch: int
    children: int
    parents: int
    depth: int
    columns: int
    moments: int
    groups: int

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the matrices, which cross once a step."""
        return 4 * self.groups * self.parents * self.depth * self.columns

    @property
    def operations(self) -> int:
        """Of one turn: votes, agreement, sums."""
        votes = self.batch * self.children * self.parents * self.columns
        return 2 * votes * (self.depth + 1 + self.moments)

    def messages(self, cut: str) -> tuple[int, int]:
        """How many messages a forward turn has, and how many bytes they have together."""
        if cut == "parents":
            return 2, 4 * 2 * self.batch * self.children
        numbers = self.columns if self.moments == 1 else 2 * self.columns + 2
        return self.moments, 4 * self.batch * self.parents * numbers


WORKS = (
    Work("million: 10⁶ → 64 of 1×16, Heinsen", 1, 1_000_000, 64, 16, 16, 2, 1),
    Work("vocabulary: 1,024 → 30,000 of 1×16, Heinsen", 1, 1024, 30_000, 16, 16, 2, 1),
    Work("CapNet: 64 × 2,048 of 1×8 → 512 of 1×16, dynamic", 64, 2048, 512, 8, 16, 1, 32),
)


def all_reduce(messages: int, size: float, gpus: int) -> float:
    """Seconds for sums over all GPUs: scattered within a node, along one rail a GPU between nodes, gathered again."""
    inside, nodes = min(gpus, NODE), ceil(gpus / NODE)
    steps = 2 * (ceil(log2(inside)) * LATENCY_INSIDE + ceil(log2(nodes)) * LATENCY_BETWEEN)
    moved = 2 * (inside - 1) / inside * size / INSIDE + 2 * (nodes - 1) / nodes * size / inside / BETWEEN
    return messages * steps + moved


def row(name: str, cut: str, size: str, times: list[float]) -> str:
    """A line of the table, its times in microseconds."""
    cells = (f"{1e6 * time:,.1f}" if time < 1e-5 else f"{1e6 * time:,.0f}" for time in times)
    return f"| {name} | {cut} | {size} | " + " | ".join(cells) + " |"


def main() -> None:
    print("| routing | cut | bytes | " + " | ".join(f"{gpus:,}" for gpus in GPUS) + " |")
    print("| --- | --- | ---: |" + " ---: |" * len(GPUS))
    for work in WORKS:
        print(row(work.name, "arithmetic of a turn", "", [work.operations / RATE / gpus for gpus in GPUS]))
        for cut in ("children", "parents"):
            messages, size = work.messages(cut)
            print(row("", f"{cut}, a turn", f"{size:,}", [all_reduce(messages, size, gpus) for gpus in GPUS]))
        size = work.gradients
        print(row("", "batch, a step", f"{size:,}", [all_reduce(1, size, gpus) for gpus in GPUS]))


if __name__ == "__main__":
    main()
