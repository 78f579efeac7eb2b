"""Times of the workloads on an H200 from the instructions that the kernels were compiled to: estimates.

A warp's trip through the loop over children covers so many positions and parents; the trips of a call, spread over the
multiprocessors, keep each of their units busy for a time, and the longest is the bound. The memory's share is counted
in bytes: from device memory each tensor once (results that a later step reads again: twice), through the second-level
cache what every block asks for. Small calls are bound by the latency of a chain of steps, and are not estimated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench import sass
from bench.chip import H200, wavefronts
from bench.static_report import Compiled, Identity, as_markdown
from bench.workloads import WORKLOADS, Workload, find
from fastcaps import libraries

__all__ = ["TARGETS", "Estimate", "choose", "estimate", "markdown", "supported", "training"]

L2_READS, L2_ADDS = 5.5e12, 2.0e12
"""Bytes a second that the second-level cache is assumed to hand out, and to take in as sums (atomics)."""

ISSUED = 0.85
"""Share of the issue slots that a kernel with eight to twelve warps a multiprocessor is assumed to fill."""

LAUNCH = 4e-6
"""Seconds that a launch's start and end are assumed to add: filling the pipeline, and the LayerNorm that follows."""

BATCH = 128
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Estimate:
    """One call of one kernel.

    Attributes
    ----------
    kernel
        Which one.
    slots
        Issue slots for one child at a warp's positions and parents.
    units
        Seconds that each unit is busy, at the sustained clock; ``issue`` the schedulers.
    tail
        Share of the multiprocessors' room that the launch's blocks fill on average.
    """

    kernel: Compiled
    slots: float
    units: dict[str, float]
    tail: float

    @property
    def bound(self) -> tuple[str, float]:
        """The unit that is busy longest, and for how long."""
        name = max(self.units, key=lambda unit: self.units[unit])
        return name, self.units[name]

    @property
    def seconds(self) -> float:
        """The time: of the schedulers if they fill :data:`ISSUED` of their slots, of another unit if that is longer."""
        return max(self.bound[1], self.units["issue"] / ISSUED) / self.tail + LAUNCH


def choose(found: Sequence[Compiled], workload: Workload, direction: str) -> Compiled | None:
    """Return the kernel that serves a workload, as the library chooses: its pose, the fewest parents that suffice."""
    pose = (workload.rows, workload.columns_in, workload.columns_out)
    fitting: list[tuple[Identity, Compiled]] = []
    for one in found:
        named = one.identity
        if named is not None and one.trip and (named.direction, named.pose) == (direction, pose) and not named.rest:
            fitting.append((named, one))
    enough = [pair for pair in fitting if pair[0].parents >= workload.parents and pair[0].plain]
    if enough:
        return min(enough, key=lambda pair: pair[0].parents)[1]
    many = [pair for pair in fitting if not pair[0].plain]
    return max(many, key=lambda pair: pair[0].parents)[1] if many else None


def depth_trips(kernel: Compiled, depth: int) -> list[int]:
    """Return how often each loop over the depth runs for one child.

    Outside of these loops every number of a vote takes two multiply-adds forward (the dot with the query, the sum) and
    four backward; in the first loop one for each column of a child's row, in the second (dP and dW) two.
    """
    inner = [sass.mix(path)["FFMA"] for path in kernel.inner_trips]
    assert kernel.identity is not None
    outer = sass.mix(kernel.trip)["FFMA"] - sum(inner)
    numbers = outer / (2 if kernel.identity.direction == "forward" else 4)
    return [max(1, round(depth * numbers * (1 + index) / count)) for index, count in enumerate(inner)]


def _plan(workload: Workload, batch: int, backward: bool) -> tuple[int, int, int] | None:
    """Ask the library how it would cut a call on an H200: positions and threads of a block, and blocks."""
    import ctypes

    height, width = workload.grid or (1, 1)
    out_height, out_width = workload.output_grid or (1, 1)
    size, stride = workload.kernel_size, workload.stride
    numbers = (batch, height, width, workload.types, workload.rows, workload.columns_in, out_height, out_width)
    numbers += (workload.parents, workload.columns_out, workload.children, size, size, stride, stride, 0, 0, 1, 1)
    geometry = (ctypes.c_int64 * len(numbers))(*numbers)
    library = libraries.library("cuda")
    told = library.ask("fastcaps_cuda_plan", geometry, int(backward), 0, H200.multiprocessors, SHARED_LIMIT) or ""
    found = re.search(r"(\d+) positions x \d+ parents a block of (\d+) threads.*?(\d+) blocks", told)
    return (int(found.group(1)), int(found.group(2)), int(found.group(3))) if found else None


def estimate(found: Sequence[Compiled], workload: Workload, batch: int, direction: str) -> Estimate | None:
    """Estimate the call of one workload by the kernel that serves it; None if no compiled kernel does."""
    kernel = choose(found, workload, direction)
    if kernel is None or kernel.identity is None:
        return None
    named, backward = kernel.identity, direction == "backward"
    positions = batch * workload.positions
    warps_parents = math.ceil(workload.parents / named.parents)
    plan = _plan(workload, batch, backward)
    tile, threads, blocks = plan or (named.seats * max(1, named.threads // 32 // warps_parents), named.threads, 0)
    tiles = math.ceil(positions / tile)
    trips = tiles * tile / named.seats * workload.children * warps_parents
    counts = depth_trips(kernel, workload.columns_in)
    body = list(kernel.trip)
    for path, count in zip(kernel.inner_trips, counts, strict=True):
        body += list(path) * (count - 1)
    cycles = H200.cycles(body)
    cycles["shared memory"] = _shared_cycles(named, workload, body, backward)
    units = {name: H200.seconds(trips * value) for name, value in cycles.items() if value}

    weight = 4 * workload.children * workload.parents * workload.columns_in * workload.columns_out
    pose = workload.rows * workload.columns_in
    children = 4 * batch * workload.types * math.prod(workload.grid or (1,)) * pose
    parents = 4 * positions * workload.parents * workload.rows * workload.columns_out
    seen = 4 * positions * workload.children * pose
    if backward:
        units["device memory"] = (3 * children + 3 * weight + 7 * parents) / H200.bandwidth
        units["second-level cache"] = (seen + tiles * weight) * (1 / L2_READS + 1 / L2_ADDS)
    else:
        units["device memory"] = (children + weight + 4 * parents) / H200.bandwidth
        units["second-level cache"] = (seen + tiles * weight) / L2_READS
    return Estimate(kernel, len(body), units, _tail(kernel, threads, blocks))


def _shared_cycles(named: Identity, workload: Workload, body: Sequence[sass.Instruction], backward: bool) -> float:
    """Return the cycles of shared memory: weights by their bytes, children (all lanes read the same few) one a load."""
    loads = sum(1 for one in body if sass.classify(one.opcode) == "LDS")
    rest = sum(wavefronts(one) for one in body if sass.classify(one.opcode) != "LDS")
    numbers = named.parents * workload.columns_in * workload.columns_out * (2 if backward else 1)
    wide = [one for one in body if one.opcode.startswith("LDS.128")]
    each_load = 128 if 4 * len(wide) > loads else 32  # numbers that the 32 lanes of one load of weights read
    weights = min(loads, numbers / each_load)
    return rest + (loads - weights) + numbers / 32


def _tail(kernel: Compiled, threads: int, blocks: int) -> float:
    """Return the share of a launch's rounds that its blocks fill; 1 where their number is not known."""
    if not blocks:
        return 1.0
    room = H200.occupancy(threads, kernel.usage.registers, 0).blocks * H200.multiprocessors
    return blocks / (math.ceil(blocks / room) * room) if blocks > room else 1.0


def training(found: Sequence[Compiled], workload: Workload, batch: int) -> float | None:
    """Return the seconds of a training step: forward and backward."""
    both = [estimate(found, workload, batch, direction) for direction in ("forward", "backward")]
    return None if None in both else sum(one.seconds for one in both if one is not None)


TARGETS = (
    ("tsai-c10-conv1", 128, "fp32", "forward", 0.30e-3),
    ("tsai-c10-conv1", 128, "fp32", "training step", 1.5e-3),
    ("tsai-c10-conv1", 128, "tf32", "forward", 0.15e-3),
    ("tsai-c10-conv1", 128, "tf32", "training step", 0.8e-3),
    ("tsai-c10-fc", 128, "fp32", "forward", 0.03e-3),
)
"""Workload, batch, precision, mode, seconds."""


def supported(found: Sequence[Compiled]) -> list[list[str]]:
    """Return a line for each target: what is estimated, and whether that supports it."""
    lines = [["target, H200", "ms", "estimate, ms", "supported"]]
    for name, batch, precision, mode, wanted in TARGETS:
        head = [f"`{name}`, batch {batch}, {precision}, {mode}", f"{wanted * 1e3:.2f}"]
        if precision != "fp32":
            lines.append([*head, "", "no: the kernels use no tensor cores"])
            continue
        one = estimate(found, find(name), batch, "forward")
        seconds = training(found, find(name), batch) if mode == "training step" else one.seconds if one else None
        if seconds is None:
            lines.append([*head, "", "no: no kernel"])
        else:
            lines.append([*head, f"{seconds * 1e3:.3f}", "yes" if seconds <= wanted else "no"])
    return lines


def table(found: Sequence[Compiled]) -> list[list[str]]:
    """Return a line for each workload with parents and each direction."""
    head = ["workload", "direction", "kernel", "slots", "issue", "multiply-add", "shared", "L2", "HBM"]
    lines = [[*head, "fills", "estimate, ms"]]
    for workload in WORKLOADS.values():
        if workload.uniform:
            continue
        for direction in ("forward", "backward"):
            one = estimate(found, workload, BATCH, direction)
            if one is None:
                continue
            names = ("issue", "multiply-add", "shared memory", "second-level cache", "device memory")
            units = [f"{one.units.get(name, 0) * 1e3:.3f}" for name in names]
            what = one.kernel.title.partition(" ")[2]
            cells = [workload.name, direction, what, f"{one.slots:.0f}", *units, f"{one.tail:.0%}"]
            lines.append([*cells, f"{one.seconds * 1e3:.3f}"])
    return lines


def markdown(found: Sequence[Compiled]) -> str:
    """Return assumptions, estimates and targets as markdown."""
    assumed = (
        "**Estimates** (nothing here was measured): milliseconds that each unit of an H200 is busy at batch "
        f"{BATCH}, if its {H200.multiprocessors} multiprocessors hold {H200.sustained} GHz (the boost clock is "
        f"{H200.boost}). One instruction a cycle and scheduler; a cycle and multiprocessor do 128 multiply-adds and "
        f"one access of 128 bytes to shared memory; {L2_READS / 1e12:.1f} TB/s come out of the second-level cache and "
        f"{L2_ADDS / 1e12:.1f} TB/s of sums go into it; device memory moves {H200.bandwidth / 1e12:.1f} TB/s. "
        "*Slots*: of a warp for one child at its positions and parents. *Fills*: how full the rounds of blocks leave "
        f"the device. The estimate is the longest of these, the schedulers filling {ISSUED:.0%} of their slots, and "
        f"{LAUNCH * 1e6:.0f} us for a launch's ends."
    )
    return "\n\n".join([assumed, as_markdown(table(found)), as_markdown(supported(found))])
