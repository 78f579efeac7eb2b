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

from bench.routings import AttentionPass, HeinsenRouting
from bench.runner import PRECISIONS
from bench.workload import Workload
from bench.workloads import WORKLOADS, find
from fastcaps import libraries
from tools import sass
from tools.sass import H200, Instruction, Usage
from tools.static_report import as_markdown, is_softmax

__all__ = ["Launch", "Made", "launches", "main", "make", "table", "unavailable"]

EPS = 1e-5
BATCH = 128
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

        return kernel_name(self.kernel, self.arguments).strip("_").removesuffix("_kernel").replace("_", " ")


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
        depth, product = (int(self.launch.arguments[name]) for name in ("D", "BK"))
        trips = -(-depth // product) if product else depth
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
    """Return what the Triton kernels would launch on an H200 for a pass of a workload's later turns, or its backward.

    That is a pass with parents; Gaussian ones have gates, and Heinsen's betas: one for all children that share their
    matrices.
    """
    subject = workload.routing.subject
    module, reason = libraries.triton_kernels(subject)
    if module is None:
        raise RuntimeError(reason)
    dtype, tf32 = PRECISIONS[precision].dtype, PRECISIONS[precision].tf32
    rows, inner, columns, many = workload.rows, workload.columns_in, workload.columns_out, workload.parents
    grid, places = workload.grid or (1, 1), workload.output_grid or (1, 1)
    window = (1, 1, 1, 1, 0, 0, 1, 1) if workload.window is None else workload.window.spec

    def made(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    children = made(batch, *grid, workload.types, rows, inner)
    weight = made(workload.matrices, many, inner, columns) if workload.matrices else None
    parents = made(batch, *places, many, rows, columns)
    wide = made(*parents.shape, kind=torch.float32)
    each = made(*parents.shape[:4], kind=torch.float32)
    inputs: tuple[Any, ...] = (children, weight, parents, None, None)
    saved: tuple[Any, ...]
    if subject == "attention":
        normalize = isinstance(workload.routing, AttentionPass)
        norm, needs = made(rows * columns) if normalize else None, 0b1100111 if normalize else 0b111
        settings: tuple[Any, ...] = ((rows * columns) ** -0.5 if normalize else 1.0, EPS, normalize, window)
        grads: tuple[Any, ...] = (parents, None)
        inputs, saved = (*inputs, norm, norm), (*inputs, norm, wide)
    elif subject == "pooling":
        settings, grads, needs = (0.5, True, window), (parents, None), 0b111
        saved = (*inputs, parents, each)
    else:
        betas = isinstance(workload.routing, HeinsenRouting)
        beta = made(workload.children if workload.matrices > 1 else 1, many, kind=torch.float32) if betas else None
        inputs = (children, weight, wide, wide, each, None, made(*children.shape[:4]), beta, beta)
        settings, grads, needs = (EPS, window), (each, wide, wide, each if betas else None), 0b111011111
        saved = (*inputs, each, wide, wide)
    found: list[Launch] = []
    with module.watched(lambda kernel, programs, arguments: found.append(Launch(kernel, programs, arguments))):
        if backward:
            getattr(module, f"{subject}_pass_backward")(*grads, *saved, *settings, needs, allow_tf32=tf32)
        else:
            getattr(module, f"{subject}_pass")(*inputs, *settings, allow_tf32=tf32)
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
    arguments, usage = made.launch.arguments, made.usage
    tile = "×".join(str(arguments[name]) for name in ("BL", "BM", "BC", "BE") if name in arguments)
    fits = H200.occupancy(32 * made.warps, usage.registers, made.shared)
    counted = sass.mix(made.slots)
    return [
        made.launch.name,
        tile,
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
                        if "per_split" not in launch.arguments or "KW" not in launch.arguments:
                            continue
                        lines.append([workload.name, precision, *_cells(make(launch, Path(folder)))])
    return lines


def _with_parents() -> list[Workload]:
    """Return the workloads that have a pass with parents."""
    return [one for one in WORKLOADS.values() if not getattr(one.routing, "uniform", False)]


def markdown(workloads: Sequence[Workload], precisions: Sequence[str]) -> str:
    """Return the table with what it says as markdown."""
    import triton

    legend = (
        f"Triton {triton.__version__}, batch {BATCH} (vocabulary and million: 1), one pass with parents, compiled for "
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
        text = markdown([find(name) for name in given.workload] or _with_parents(), given.precision)
        if given.into is None:
            print(text)
        else:
            from bench.report import into

            given.into.write_text(into(given.into.read_text(), text, "static-triton"))
    except (ValueError, OSError) as error:
        print(f"triton_report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
