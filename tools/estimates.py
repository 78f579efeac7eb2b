"""Times of the workloads on an H200 from the instructions that the kernels were compiled to: estimates.

A warp's trip through the loop over children covers so many positions and parents; the trips of a call, spread over the
multiprocessors, keep each of their units busy for a time, and the longest is the bound. The memory's share is counted
in bytes: from device memory each tensor once (results that a later step reads again: twice), through the second-level
cache what every block asks for. A warp's wait for its own results is shared by the warps that fit on a multiprocessor.
Small calls are bound by the host, whose time was measured.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.device import SECONDS
from bench.routings import AttentionPass
from bench.workload import Workload
from bench.workloads import WORKLOADS, find
from fastcaps import libraries
from fastcaps.backends import ALLOW_TF32
from tools import latency, sass
from tools.markdown import as_markdown
from tools.sass import H200, macs, wavefronts
from tools.static_report import Compiled, Identity

__all__ = ["Estimate", "choose", "estimate", "fill", "launch", "markdown", "supported", "training"]

L2_READS, L2_ADDS = 5.5e12, 2.0e12
"""Bytes a second that the second-level cache is assumed to hand out, and to take in as sums (atomics)."""

ISSUED = 0.69
"""Share of the issue slots that a kernel bound by them fills: the mean of four public kernels on an H100, whose shares
were 0.64 to 0.73 (docs/performance/compiled.md)."""

BROADCAST = 2
"""Wavefronts of a load of 16 bytes a lane whose lanes all want the same: what fits two public kernels best."""

HOST = {"forward": 16e-6, "backward": 40e-6}
"""Seconds of the host for a call: its code as measured over a runtime without a GPU, and some 2.5 us for each of two to
five launches, which is assumed."""

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
        Seconds that each unit is busy, at the sustained clock; ``issue`` the schedulers, ``latency`` the wait of the
        warps that fit on a multiprocessor for their own results.
    tail
        Share of the multiprocessors' room that the launch's blocks fill on average.
    host
        Seconds of the host for the call.
    passes
        How many passes the call makes, each counted as one with parents; all else here is of one.
    """

    kernel: Compiled
    slots: float
    units: dict[str, float]
    tail: float
    host: float = 0.0
    passes: int = 1

    @property
    def bound(self) -> tuple[str, float]:
        """The unit that is busy longest, and for how long."""
        name = max(self.units, key=lambda unit: self.units[unit])
        return name, self.units[name]

    @property
    def seconds(self) -> float:
        """The time: of schedulers that fill :data:`ISSUED` of their slots, of another unit or the host if longer."""
        return max(self.passes * launch(self.units, self.tail), self.host)


def launch(units: Mapping[str, float], tail: float) -> float:
    """Return the seconds of a launch: of its busiest unit, the schedulers filling :data:`ISSUED` of their slots."""
    return max(*units.values(), units["issue"] / ISSUED) / tail + LAUNCH


def choose(found: Sequence[Compiled], workload: Workload, direction: str, tensor: bool) -> Compiled | None:
    """Return the kernel that serves a workload, as the library chooses.

    That of its pass and its pose, on the tensor cores where that is allowed and there is one; of these the fewest
    parents that suffice. More parents than any takes are shared by several warps of a block, or, where weights are
    large, by blocks, which the plain kernels leave out.
    """
    pose = (workload.rows, workload.columns_in, workload.columns_out)
    if not workload.matrices:  # what a kernel does with matrices, this call leaves out
        return None
    fitting: list[tuple[Identity, Compiled]] = []
    for one in found:
        named = one.identity
        if named is None or not one.trip or named.subject != workload.routing.subject:
            continue
        if (named.direction, named.pose) == (direction, pose):
            fitting.append((named, one))
    wanted = tensor and any(named.tensor for named, _ in fitting)
    fitting = [pair for pair in fitting if pair[0].tensor == wanted]
    has_plain = any(named.plain for named, _ in fitting)
    enough = [pair for pair in fitting if pair[0].parents >= workload.parents and pair[0].plain == has_plain]
    if enough:
        return min(enough, key=lambda pair: pair[0].parents)[1]
    many = [pair for pair in fitting if pair[0].plain == (has_plain and pose != (1, 64, 64))]
    return max(many, key=lambda pair: pair[0].parents)[1] if many else None


def whole_child(kernel: Compiled) -> list[sass.Instruction]:
    """Return all instructions of a warp for one child, every loop as often as it runs.

    The loops over the depth are known by their multiply-adds. The first makes the votes of a warp's positions and
    parents; the second, backward, takes as many for dP and, unless the block does that together, as many for dW.
    """
    body, named = list(kernel.trip), kernel.identity
    if named is None or named.pose is None:
        return body
    votes = named.seats * named.parents * named.pose[0] * named.pose[1] * named.pose[2]
    for k, path in enumerate(kernel.inner_trips):
        needed = votes * (2 if k > 0 and not kernel.product else 1)
        body += path * (max(1, round(needed / _multiply_adds(path))) - 1)
    if kernel.product and named.direction == "backward":
        body += kernel.product * max(1, round(votes / _multiply_adds(kernel.product)))
    return body


def _multiply_adds(path: Sequence[sass.Instruction]) -> int:
    matrix = sum(macs(one) for one in path if sass.classify(one.opcode) == "HMMA")
    return 32 * sass.mix(path)["FFMA"] + matrix


def _schedule(workload: Workload, batch: int, backward: bool, tensor: bool) -> tuple[int, int, int] | None:
    """Ask the library how it would cut a pass up on an H200: positions and threads of a block, and blocks."""
    size, stride = workload.kernel_size, workload.stride
    sizes = [batch, *(workload.grid or (1, 1)), workload.types, workload.rows, workload.columns_in]
    sizes += [*(workload.output_grid or (1, 1)), workload.parents, workload.columns_out, workload.matrices]
    sizes += [size, size, stride, stride, 0, 0, 1, 1]
    # float32, no bias, parents from the start, one turn
    facts = (int(backward), 0, 0, 1, 1, ALLOW_TF32 if tensor else 0, H200.multiprocessors, SHARED_LIMIT)
    in_c = [(ctypes.c_int64 * len(numbers))(*numbers) for numbers in (sizes, facts)]
    told = libraries.library("cuda").ask("fastcaps_cuda_schedule", workload.routing.subject, *in_c) or ""
    found = dict(field.split("=", 1) for field in told.split(";") if "=" in field)
    return (int(found["positions"]), int(found["threads"]), int(found["blocks"])) if "kernel" in found else None


def estimate(
    found: Sequence[Compiled], workload: Workload, batch: int, direction: str, tensor: bool = False
) -> Estimate | None:
    """Estimate the call of one workload by the kernel that serves it; None if no compiled kernel does.

    With ``tensor``, products may be rounded to tf32.
    """
    kernel = choose(found, workload, direction, tensor)
    if kernel is None or kernel.identity is None:
        return None
    named, backward = kernel.identity, direction == "backward"
    positions = batch * workload.positions
    warps_parents = math.ceil(workload.parents / named.parents)
    schedule = _schedule(workload, batch, backward, tensor)
    tile, threads, blocks = schedule or (named.seats * max(1, named.threads // 32 // warps_parents), named.threads, 0)
    tiles = math.ceil(positions / tile)
    trips = tiles * tile / named.seats * workload.children * warps_parents
    body = whole_child(kernel)
    cycles = H200.cycles(body)
    cycles["shared memory"] = _shared_cycles(named, workload, body, backward)
    cycles["latency"] = latency.alone(body) / max(1, H200.occupancy(threads, kernel.usage.registers, 0).warps)
    units = {name: H200.seconds(trips * value) for name, value in cycles.items() if value}

    weight = 4 * workload.matrices * workload.parents * workload.columns_in * workload.columns_out
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
    tail = fill(kernel.usage.registers, threads, blocks)
    return Estimate(kernel, len(body), units, tail, HOST[direction], workload.routing.passes)


def _shared_cycles(named: Identity, workload: Workload, body: Sequence[sass.Instruction], backward: bool) -> float:
    """Return the cycles of shared memory: weights by their bytes, children (all lanes read the same few) by load."""
    loads = sum(1 for one in body if sass.classify(one.opcode) == "LDS")
    rest = sum(wavefronts(one) for one in body if sass.classify(one.opcode) != "LDS")
    numbers = named.parents * workload.columns_in * workload.columns_out * (2 if backward else 1)
    wide = [one for one in body if one.opcode.startswith("LDS.128")]
    each_load = 128 if 4 * len(wide) > loads else 32  # numbers that the 32 lanes of one load of weights read
    weights = min(loads, numbers / each_load)
    return rest + (loads - weights) * (BROADCAST if each_load == 128 else 1) + numbers / 32


def fill(registers: int, threads: int, blocks: int) -> float:
    """Return the share of the schedulers' rounds that a launch's warps fill; 1 where the blocks are not known.

    A multiprocessor has as many blocks at a time as its registers allow, and its schedulers share their warps as evenly
    as they go: six warps keep two of four schedulers waiting for the other two.
    """
    if not blocks:
        return 1.0
    warps = threads // 32
    room = max(1, H200.occupancy(threads, registers, 0).blocks)
    each = math.ceil(blocks / H200.multiprocessors)
    rounds = each // room * math.ceil(room * warps / 4) + math.ceil(each % room * warps / 4)
    return blocks * warps / (4 * H200.multiprocessors * rounds)


def training(found: Sequence[Compiled], workload: Workload, batch: int, tensor: bool = False) -> float | None:
    """Return the seconds of a training step: forward and backward."""
    both = [estimate(found, workload, batch, direction, tensor) for direction in ("forward", "backward")]
    return None if None in both else sum(one.seconds for one in both if one is not None)


def supported(found: Sequence[Compiled]) -> list[list[str]]:
    """Return a line for each target: what is estimated, and whether that supports it."""
    lines = [["target, H200", "ms", "estimate, ms", "supported"]]
    for (name, trains, precision), wanted in SECONDS.items():
        mode, tensor = "training step" if trains else "forward", precision == "tf32"
        head = [f"`{name}`, batch {BATCH}, {precision}, {mode}", f"{wanted * 1e3:.2f}"]
        one = estimate(found, find(name), BATCH, "forward", tensor)
        seconds = None if one is None else one.seconds
        if trains:
            seconds = training(found, find(name), BATCH, tensor)
        if seconds is None:
            lines.append([*head, "", "no: no kernel"])
        else:
            lines.append([*head, f"{seconds * 1e3:.3f}", "yes" if seconds <= wanted else "no"])
    return lines


def table(found: Sequence[Compiled], workloads: Sequence[Workload]) -> list[list[str]]:
    """Return a line for each workload and direction, twice where tensor cores make a difference, the head first."""
    several = any(workload.routing.passes > 1 for workload in workloads)
    head = [
        "workload",
        "direction",
        "kernel",
        "slots",
        "issue",
        "multiply-add",
        "matrix",
        "shared",
        "latency",
        "L2",
        "HBM",
    ]
    lines = [[*head, "fills", *(["passes"] if several else []), "estimate, ms"]]
    names = ("issue", "multiply-add", "matrix", "shared memory", "latency", "second-level cache", "device memory")
    for workload in workloads:
        for direction in ("forward", "backward"):
            for tensor in (False, True):
                one = estimate(found, workload, BATCH if workload.copies == 1 else workload.batch, direction, tensor)
                if one is None or (tensor and not (one.kernel.identity and one.kernel.identity.tensor)):
                    continue
                units = [f"{one.units[name] * 1e3:.3f}" if name in one.units else "" for name in names]
                what = one.kernel.title.partition(f"{direction} ")[2]
                cells = [workload.name, direction, what, f"{one.slots:.0f}", *units, f"{one.tail:.0%}"]
                lines.append([*cells, *([str(one.passes)] if several else []), f"{one.seconds * 1e3:.3f}"])
    return lines


def _whole(found: Sequence[Compiled]) -> list[str]:
    """Return what is said of whole routings: nothing if no kernel serves any."""
    workloads = [work for work in WORKLOADS.values() if work.routing.passes > 1]
    lines = table(found, workloads)
    if len(lines) == 1:
        return []
    missing = [work.name for work in workloads if not any(line[0] == work.name for line in lines[1:])]
    text = (
        "Whole routings, likewise (`vocabulary` and `million` at batch 1): the units of one pass with parents, and all "
        "passes' time, the first, uniform one counted like the others. What comes between passes is left out."
    )
    if missing:
        missed = ", ".join(missing)
        text += f" Not estimated, for want of a kernel for their poses alone, or for votes without matrices: {missed}."
    return [text, as_markdown(lines)]


def markdown(found: Sequence[Compiled]) -> str:
    """Return assumptions, estimates and targets as markdown."""
    assumed = (
        "**Estimates** (none of these times was measured): milliseconds that each unit of an H200 is busy at batch "
        f"{BATCH}, if its {H200.multiprocessors} multiprocessors hold {H200.sustained} GHz (the boost clock is "
        f"{H200.boost}). One instruction a cycle and scheduler; a cycle and multiprocessor do 128 multiply-adds (the "
        f"tensor cores {H200.matrix:.0f} in tf32) and "
        f"one access of 128 bytes to shared memory; {L2_READS / 1e12:.1f} TB/s come out of the second-level cache and "
        f"{L2_ADDS / 1e12:.1f} TB/s of sums go into it; device memory moves {H200.bandwidth / 1e12:.1f} TB/s. "
        f"A load of 16 bytes that lanes share counts {BROADCAST}. *Latency*: of the warps that registers leave room "
        "for, each waiting for its own results. *Slots*: of a warp for one child at its positions and parents. "
        "*Fills*: how full the rounds of blocks leave "
        f"the device. The estimate is the longest of these, the schedulers filling {ISSUED:.0%} of their slots, and "
        f"{LAUNCH * 1e6:.0f} us for a launch's ends; the host's time, {HOST['forward'] * 1e6:.0f} us forward and "
        f"{HOST['backward'] * 1e6:.0f} backward, where that is longer."
    )
    passes = [work for work in WORKLOADS.values() if work.routing == AttentionPass()]  # with parents and LayerNorm
    parts = [assumed, as_markdown(table(found, passes)), as_markdown(supported(found)), *_whole(found)]
    return "\n\n".join(parts)
