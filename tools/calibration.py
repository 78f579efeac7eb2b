"""What the estimates are worth: the model against times that others published of their own kernels.

The kernels were compiled by nvcc 13.0 outside the tree; here are the figures counted in their instructions, so that the
comparison follows whenever a constant of the model changes. Nothing here was fitted to them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tools import estimates
from tools.markdown import as_markdown, into
from tools.sass import H200

__all__ = ["KERNELS", "PROGRAMS", "Kernel", "Program", "error", "markdown", "seconds"]


class Program(NamedTuple):
    """A public program: where it is, and the device that its author timed it on.

    ``clock`` in GHz (None: not told, the model's is taken) and ``memory``, the peak of device memory in bytes a second.
    """

    address: str
    device: str
    clock: float | None
    memory: float


class Kernel(NamedTuple):
    """One timed launch.

    Attributes
    ----------
    program, name
        Key of :data:`PROGRAMS`, and the author's name.
    published
        Its time in seconds, as published or made of the published rate.
    threads, registers, shared, blocks
        Threads and bytes of shared memory of a block, registers of a thread, and blocks of the launch.
    trips
        Of all warps: through the loop over the depth, or through the whole kernel where there is none.
    slots, multiply_add, wavefronts, matrix, alone
        Of a trip: instructions, cycles of :meth:`tools.sass.Chip.cycles`, wavefronts with their bank conflicts, and
        cycles of :func:`tools.latency.alone`.
    memory, second_level
        Bytes of the launch from and to device memory, and out of the second-level cache.
    """

    program: str
    name: str
    published: float
    threads: int
    registers: int
    shared: int
    blocks: int
    trips: float
    slots: int
    multiply_add: float
    wavefronts: float
    matrix: float
    alone: float
    memory: float
    second_level: float


_GITHUB = "https://github.com"
PROGRAMS = {
    "gemm": Program(f"{_GITHUB}/yencal/gpu-gemm/blob/3121657/figures/gemm_plot_h200.png", "H200 SXM", None, 4.8e12),
    "transpose": Program(f"{_GITHUB}/yencal/gpu-matrix-transpose/tree/cab4650", "H100 80GB HBM3", None, 3.3523e12),
    "reduction": Program(f"{_GITHUB}/simveit/effective_reduction/tree/0a26e98", "H100", None, 3.3523e12),
    "study": Program(f"{_GITHUB}/ahmadsharif1/cuda_study/tree/be5cef0/matmul/results", "H100", 1.35, 2.04e12),
    "tf32": Program(f"{_GITHUB}/ahmadsharif1/cuda_study/tree/be5cef0/matmul/results", "H100", 1.24, 2.04e12),
}
"""Clocks are those of the author's profile, whose durations are those of the benchmark, as is that device's memory."""

_FLOPS, _ONCE, _COPY, _READ = 2 * 8192**3, 805e6, 8 * 2.0**30, 4 * 2.0**30
_STUDY = 4 * (4096 * 16384.0 + 16384 * 8192 + 4096 * 8192)
_TILES = 34.4e9  # what 128x128 tiles of either product ask for

KERNELS = (
    # ..., published; threads, registers, shared, blocks; trips; slots, multiply_add, wavefronts, matrix, alone; ...
    Kernel("gemm", "02", _FLOPS / 8.92e12, 1024, 32, 8192, 65536, 2.0**29, 89, 8, 52, 0, 590, _ONCE, 137e9),
    Kernel("gemm", "03", _FLOPS / 18.61e12, 64, 96, 4096, 16384, 2.0**25, 810, 137, 416, 0, 1544, _ONCE, 68.7e9),
    Kernel("gemm", "04a", _FLOPS / 32.45e12, 256, 96, 16384, 4096, 2.0**24, 1317, 258, 376, 0, 2270, _ONCE, _TILES),
    Kernel("gemm", "04b", _FLOPS / 33.85e12, 256, 96, 16384, 4096, 2.0**24, 1281, 258, 376, 0, 2397, _ONCE, _TILES),
    Kernel("gemm", "05a", _FLOPS / 41.3e12, 256, 125, 32768, 4096, 2.0**24, 1127, 256, 376, 0, 1472, _ONCE, _TILES),
    Kernel("gemm", "05b", _FLOPS / 41.56e12, 256, 127, 32768, 4096, 2.0**24, 1135, 256, 376, 0, 1413, _ONCE, _TILES),
    Kernel("gemm", "06", _FLOPS / 42.81e12, 256, 127, 32768, 4096, 2.0**24, 1138, 256, 371, 0, 1483, _ONCE, _TILES),
    Kernel("transpose", "Tiled", 8.6235e-3, 1024, 12, 4096, 2**20, 2.0**25, 40, 2, 35, 0, 380, _COPY, _READ),
    Kernel("transpose", "TiledPadded", 5.0724e-3, 1024, 12, 4224, 2**20, 2.0**25, 40, 3, 4, 0, 374, _COPY, _READ),
    Kernel("transpose", "Coarsen2", 3.6014e-3, 512, 19, 4224, 2**20, 2.0**24, 38, 2, 8, 0, 345, _COPY, _READ),
    Kernel("transpose", "Coarsen4", 3.0984e-3, 256, 28, 4224, 2**20, 2.0**23, 49, 3, 16, 0, 358, _COPY, _READ),
    Kernel("transpose", "Coarsen8", 3.0951e-3, 128, 32, 4224, 2**20, 2.0**22, 73, 5, 32, 0, 387, _COPY, _READ),
    Kernel("transpose", "Vec2_T64_Coarsen2", 2.922e-3, 512, 26, 16640, 2**18, 2.0**22, 60, 3, 48, 0, 367, _COPY, _READ),
    Kernel("reduction", "kernel_2", _READ / 882.823e9, 512, 10, 2048, 2**21, 2.0**25, 74, 3, 31, 0, 742, _READ, _READ),
    Kernel("reduction", "kernel_3", _READ / 3226.86e9, 512, 22, 2048, 174763, 2.8e6, 136, 7, 42, 0, 1082, _READ, _READ),
    Kernel("reduction", "kernel_9", _READ / 3231.54e9, 512, 18, 2048, 174763, 2.8e6, 75, 3, 26, 0, 648, _READ, _READ),
    Kernel("study", "Tiled SMEM", 176.79e-3, 1024, 32, 8192, 32768, 2.0**29, 95, 9, 52, 0, 600, _STUDY, 137e9),
    Kernel("study", "Tiled RegTile", 67.73e-3, 256, 162, 8192, 2048, 2.0**25, 622, 133, 177, 0, 1119, _STUDY, _TILES),
    Kernel("study", "Tiled VecLoad", 50.27e-3, 256, 128, 10368, 2048, 2.0**25, 575, 129, 185, 0, 1185, _STUDY, _TILES),
    Kernel("study", "Tiled DblBuf", 73.53e-3, 256, 130, 20736, 2048, 2.0**25, 584, 129, 180, 0, 1204, _STUDY, _TILES),
    Kernel("tf32", "CuTe SMEM k=8", 17.86e-3, 128, 188, 10336, 2048, 2.0**24, 157, 9, 67, 51.2, 317, _STUDY, _TILES),
    Kernel("tf32", "CuTe SMEM k=32", 11.55e-3, 128, 190, 35296, 2048, 2.0**22, 580, 33, 259, 205, 947, _STUDY, _TILES),
)  # fmt: skip
"""The rates of ``gemm`` are read off the author's figure, for 8192 x 8192 x 8192 (to 0.1 TFLOPS). ``study`` multiplies
4096 x 16384 by 16384 x 8192. Conflicts of ``study`` are its profile's, others counted by hand: 16 bytes a lane in four
parts of 8 lanes, :data:`tools.estimates.BROADCAST` where lanes share them. Accesses of lanes that are off count too."""


def units(one: Kernel) -> dict[str, float]:
    """Return the seconds that each unit is busy."""
    program = PROGRAMS[one.program]
    cycles = {"issue": one.slots / 4, "multiply-add": one.multiply_add, "shared memory": one.wavefronts}
    cycles["matrix"] = one.matrix
    cycles["latency"] = one.alone / H200.occupancy(one.threads, one.registers, one.shared).warps
    found = {name: H200.seconds(one.trips * value, program.clock) for name, value in cycles.items()}
    found["second-level cache"] = one.second_level / estimates.L2_READS
    found["device memory"] = one.memory / (program.memory * H200.bandwidth / PROGRAMS["gemm"].memory)
    return found


def seconds(one: Kernel) -> float:
    """Return the model's time."""
    return estimates.launch(units(one), estimates.fill(one.registers, one.threads, one.blocks))


def error(one: Kernel) -> float:
    """Return by which share of the published time the model's is off: above 0 where it is longer."""
    return seconds(one) / one.published - 1


def markdown() -> str:
    """Return the programs, and a line for each kernel."""
    text = []
    for name, program in PROGRAMS.items():
        clock = f"{program.clock} GHz" if program.clock else f"clock not told: {H200.sustained} GHz"
        memory = f"{program.memory / 1e12:.2f} TB/s"
        link = f"[{'/'.join(program.address.split('/')[3:])}]({program.address})"
        text.append(f"- `{name}`: {link}, {program.device}, {clock}, {memory}")
    lines = [["program", "kernel", "slots", "bound", "slots filled", "published, ms", "estimate, ms", "error"]]
    for one in KERNELS:
        busy = units(one)
        bound = max(busy, key=lambda name: busy[name] / (estimates.ISSUED if name == "issue" else 1))
        share, times = f"{busy['issue'] / one.published:.0%}", (one.published, seconds(one))
        cells = [f"`{one.program}`", one.name, str(one.slots), bound, share, *(f"{time * 1e3:.2f}" for time in times)]
        lines.append([*cells, f"{error(one):+.0%}".replace("-", "−")])
    return "\n".join(text) + "\n\n" + as_markdown(lines)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="The model against times that others published.")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table between the markers of a page")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.into is None:
        print(markdown())
    else:
        given.into.write_text(into(given.into.read_text(), markdown(), "calibration"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
