"""What the Triton kernels take, by the compiler's own word: registers, spills, shared memory. No GPU is needed.

    python tools/triton_report.py --workload tsai-c10-conv1 --precision fp32 tf32 --target sm_90

The host side of the kernels runs on tensors without data and says what it would launch; Triton's compiler makes that.
"""

from __future__ import annotations

import argparse
import sys
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
from tools.markdown import as_markdown

__all__ = ["Launch", "launches", "main", "table", "with_parents"]

EPS = 1e-5
BATCH = 128
EVERY = (1 << 9) - 1  # gradients that are asked for: as many as a routing has inputs, nine at most


@dataclass(frozen=True)
class Launch:
    """One launch that a call would make: the kernel, how many programs, its arguments."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    @property
    def walks_children(self) -> bool:
        """Whether it has a loop over children."""
        return "votes" in self.arguments


def launches(workload: Workload, batch: int, precision: str, backward: bool) -> list[Launch]:
    """Return what the Triton kernels would launch for a later turn of a workload, or for its backward.

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


def with_parents() -> list[Workload]:
    """Return the workloads that have a pass with parents."""
    return [one for one in WORKLOADS.values() if not getattr(one.routing, "uniform", False)]


def table(workloads: Sequence[Workload], precisions: Sequence[str], target: str) -> list[list[str]]:
    """Return a line for each launch with a loop over children, the head first.

    A tile is the positions, parents, rows and columns that a program has at a time.
    """
    from fastcaps.triton_kernels import static

    lines = [["workload", "precision", "kernel", "tile", "warps", "registers", "words spilled", "shared, KB"]]
    asked = [(work, precision, back) for work in workloads for precision in precisions for back in (False, True)]
    for work, precision, back in asked:
        for launch in launches(work, BATCH if work.copies == 1 else work.batch, precision, back):
            if launch.walks_children:
                made, tile = static.compiled_for(target, launch), launch.arguments["tile"]
                size = "×".join(str(number.value) for number in (tile.BL, tile.BM, tile.BC, tile.BE))
                numbers = (made.num_warps, made.n_regs, made.n_spills or "", f"{made.shared / 1024:.1f}")
                lines.append([work.name, precision, made.kernel, size, *map(str, numbers)])
    return lines


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Registers, spills and shared memory of the Triton kernels.")
    parser.add_argument("--workload", nargs="+", default=[], help="only these")
    parser.add_argument("--precision", nargs="+", default=["fp32", "tf32"], choices=tuple(PRECISIONS))
    parser.add_argument("--target", default="sm_90", help="sm_80, gfx942 and the like (default sm_90)")
    given = parser.parse_args(None if arguments is None else list(arguments))
    module, reason = libraries.triton_kernels()
    try:
        if module is None:
            raise RuntimeError(reason)
        lines = table([find(name) for name in given.workload] or with_parents(), given.precision, given.target)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"triton_report: {error}", file=sys.stderr)
        return 2
    print(f"Batch {BATCH} (of workloads large in themselves: 1), a turn with parents, {given.target}:\n")
    print(as_markdown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
