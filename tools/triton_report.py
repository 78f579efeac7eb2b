"""What the Triton kernels are compiled to for an H200, on a machine without one: registers, spills, shared memory.

    python tools/triton_report.py --precision fp32 tf32
    python tools/triton_report.py --into docs/performance/compiled.md

The host side of the kernels runs on tensors without data and says what it would launch; Triton's compiler makes that
for compute capability 9.0, and ``cuobjdump`` reads it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.routings import HeinsenRouting
from bench.runner import PRECISIONS
from bench.workload import Workload
from bench.workloads import WORKLOADS, find
from fastcaps import libraries
from fastcaps.backends import ALLOW_TF32
from fastcaps.rules import Rule
from tools import sass
from tools.markdown import as_markdown, into
from tools.sass import H200, Instruction, Usage
from tools.static_report import is_softmax

__all__ = ["Launch", "Made", "launches", "main", "make", "table", "unavailable", "with_parents"]

EPS = 1e-5
BATCH = 128
EVERY = (1 << 9) - 1  # gradients that are asked for: as many as a routing has inputs, nine at most
CAPABILITY = 90


@dataclass(frozen=True)
class Launch:
    """One launch that a call would make: the kernel, how many programs, its arguments."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name for people."""
        from fastcaps.triton_kernels.call import kernel_name

        return kernel_name(self.kernel, self.arguments).removesuffix("_kernel").replace("_", " ")

    @property
    def tile(self) -> Any:
        """The numbers of its tile, by the names of ``tiles.Tile``."""
        tile = self.arguments["tile"]
        return type(tile)(*(number.value for number in tile))

    @property
    def walks_children(self) -> bool:
        """Whether it has a loop over children."""
        return "votes" in self.arguments


@dataclass(frozen=True)
class Made:
    """A launch's kernel as compiled.

    Attributes
    ----------
    launch, usage, shared
        Of which launch; registers and local memory; bytes of shared memory.
    trip, inner
        The instructions of a warp for one child, and those of its loops over the depth, which `trip` holds once.
    """

    launch: Launch
    usage: Usage
    shared: int
    trip: list[Instruction]
    inner: list[list[Instruction]]

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return int(self.launch.arguments["num_warps"])

    @property
    def slots(self) -> list[Instruction]:
        """Every instruction of a warp for one child: a loop over the depth takes one column, or one product, a trip."""
        tile = self.launch.tile
        trips = -(-tile.D // tile.BK) if tile.BK else tile.D
        return self.trip + [one for path in self.inner for one in path] * (trips - 1)

    @property
    def seconds(self) -> float:
        """The schedulers' time on an H200 for the loop over children."""
        arguments = self.launch.arguments
        children = arguments["per_split"] * arguments.get("group_children", 1)  # or as many positions of each
        return H200.seconds(self.launch.programs * children * self.warps * len(self.slots) / 4)


def unavailable() -> str:
    """Return why there can be no report here, or an empty string."""
    module, reason = libraries.triton_kernels()
    if module is None:
        return reason
    return "" if sass.tool("cuobjdump") else "no cuobjdump: neither a CUDA toolkit that has it nor Triton's package"


def launches(workload: Workload, batch: int, precision: str, backward: bool) -> list[Launch]:
    """Return what the Triton kernels would launch on an H200 for a later turn of a workload, or for its backward.

    A later turn starts from parents. Gaussian ones have gates, and Heinsen's have betas: one for all children that
    share their matrices. Backward makes every gradient that there is.
    """
    subject, options = workload.routing.subject, ALLOW_TF32 * PRECISIONS[precision].tf32
    module, reason = libraries.triton_kernels(subject)
    if module is None:
        raise RuntimeError(reason)
    forward, back = (getattr(module, f"{subject}_routing{way}") for way in ("", "_backward"))
    rows, inner, columns, many = workload.rows, workload.columns_in, workload.columns_out, workload.parents
    window = (1, 1, 1, 1, 0, 0, 1, 1) if workload.window is None else workload.window.spec

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    own = PRECISIONS[precision].dtype
    types = (batch, *(workload.grid or (1, 1)), workload.types)
    each = (batch, *(workload.output_grid or (1, 1)), many)
    children, pose = made(*types, rows, inner, dtype=own), made(*each, rows, columns, dtype=own)
    weight = made(workload.matrices, many, inner, columns, dtype=own) if workload.matrices else None
    gate = made(*types, dtype=own) if subject == "gaussian" else None
    votes = (children, weight, None, gate, many, window)
    found: list[Launch] = []
    with module.watched(lambda kernel, programs, arguments: found.append(Launch(kernel, programs, arguments))):
        if subject == "attention":
            normalize = getattr(workload.routing, "normalize", False)
            rule, scale = (Rule.LAYER_NORM, (rows * columns) ** -0.5) if normalize else (Rule.SQUASH, 1.0)
            norm = made(rows * columns, dtype=own) if normalize else None
            if backward:
                sums = made(1, *each, rows, columns) if normalize else None
                back(pose[None], *votes, pose[None], norm, sums, scale, EPS, EVERY, options)
            else:
                forward(*votes, pose, norm, norm, scale, EPS, rule, 1, options)
        elif subject == "pooling":
            if backward:
                back(pose[None], *votes, pose[None], pose[None], made(1, *each), 0.5, True, EVERY, options)
            else:
                forward(*votes, pose, 0.5, True, Rule.UNIT, 1, options)
        else:
            heinsen = isinstance(workload.routing, HeinsenRouting)
            beta = made(workload.matrices if heinsen and workload.matrices > 1 else 1, many)
            mean, score = made(1, *each, rows, columns), made(1, *each)
            if backward:
                betas, evidence = ((beta, beta), score) if heinsen else ((None, None), None)
                kept, state = (score, mean, mean), (mean, mean, score)
                back(*kept, evidence, *votes, *state, *betas, *kept, EPS, EVERY, options)
            else:
                rule = Rule.HEINSEN if heinsen else Rule.EM
                forward(*votes, mean[0], mean[0], score[0], beta, beta, [1.0], rule, EPS, options)
    return found


def make(launch: Launch, folder: Path) -> Made:
    """Compile the kernel of a launch for compute capability 9.0 and read it."""
    from fastcaps.triton_kernels import static

    compiled = static.build(f"sm_{CAPABILITY}", launch)
    path = folder / f"{launch.kernel.__name__}.cubin"
    path.write_bytes(compiled.asm["cubin"])
    (usage,) = sass.parse_usage(sass.dump(path, "-res-usage"))
    (kernel,) = sass.parse_sass(sass.dump(path, "-sass"))
    every = sass.loops(kernel)
    over_children = [loop for loop in every if is_softmax(sass.hot_path(loop))]
    loop = min(over_children, key=lambda one: (one.inner, len(one.body)), default=None) or sass.hot_loop(kernel)
    trip = sass.hot_path(loop) if loop else []
    taken = {one.address for one in trip}
    paths = [sass.hot_path(one) for one in every if one.inner == 0 and one != loop and one.last in taken]
    inner = [path for path in paths if sass.arithmetic(path) > 0]
    return Made(launch, usage, int(compiled.metadata.shared), trip, inner)


HEAD = (
    "workload", "precision", "kernel", "tile", "warps", "registers", "spills", "shared KB", "warps a multiprocessor",
    "slots", "FFMA", "HMMA", "issue-bound, ms",
)  # fmt: skip


def _cells(made: Made) -> list[str]:
    usage = made.usage
    tile = made.launch.tile
    fits = H200.occupancy(32 * made.warps, usage.registers, made.shared)
    counted = sass.mix(made.slots)
    return [
        made.launch.name,
        f"{tile.BL}×{tile.BM}×{tile.BC}×{tile.BE}",
        str(made.warps),
        str(usage.registers),
        f"{usage.stack} B" if usage.local else "",
        f"{made.shared / 1024:.1f}",
        str(fits.warps),
        str(len(made.slots)),
        str(counted["FFMA"] or ""),
        str(counted["HMMA"] or ""),
        f"{made.seconds * 1e3:.3f}",
    ]


def table(workloads: Sequence[Workload], precisions: Sequence[str], batch: int = BATCH) -> list[list[str]]:
    """Return a line for each launch with a loop over children, the head first."""
    lines = [list(HEAD)]
    with tempfile.TemporaryDirectory(prefix="fastcaps-triton-") as folder:
        for workload in workloads:
            for precision in precisions:
                for backward in (False, True):
                    size = batch if workload.copies == 1 else workload.batch
                    for launch in launches(workload, size, precision, backward):
                        if launch.walks_children:
                            lines.append([workload.name, precision, *_cells(make(launch, Path(folder)))])
    return lines


def with_parents() -> list[Workload]:
    """Return the workloads that have a pass with parents."""
    return [one for one in WORKLOADS.values() if not getattr(one.routing, "uniform", False)]


def markdown(workloads: Sequence[Workload], precisions: Sequence[str]) -> str:
    """Return the table with what it says as markdown."""
    import triton

    legend = (
        f"Triton {triton.__version__}, batch {BATCH} (vocabulary and million: 1), one turn with parents, compiled for "
        f"compute capability {CAPABILITY / 10:.1f}. *Tile*: "
        "positions × parents × rows × columns of a program. *Slots*: of a warp for one child. "
        "*Issue-bound*: all programs' trips at one instruction a cycle and "
        f"scheduler, {H200.sustained} GHz; an estimate, and other units or latency may take longer."
    )
    return f"{legend}\n\n{as_markdown(table(workloads, precisions))}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Static report of the Triton kernels, for an H200.")
    parser.add_argument("--workload", nargs="+", default=[], help="only these")
    parser.add_argument("--precision", nargs="+", default=["fp32", "tf32"], choices=tuple(PRECISIONS))
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table between the markers of a page")
    given = parser.parse_args(None if arguments is None else list(arguments))
    reason = unavailable()
    if reason:
        print(f"triton_report: {reason}", file=sys.stderr)
        return 2
    try:
        text = markdown([find(name) for name in given.workload] or with_parents(), given.precision)
        if given.into is None:
            print(text)
        else:
            given.into.write_text(into(given.into.read_text(), text, "static-triton"))
    except (ValueError, OSError) as error:
        print(f"triton_report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
