"""Bounds: no kernel of the kinds that we know can take less than these seconds on a GPU of the Hopper generation.

python -m bench.floors [--batch 128]

Each counts one resource alone, as if all else were free: multiply-adds, matrix products on tensor cores (``mma.sync``),
exponentials, bytes of the tensors, each moved once. A training step counts forward and backward, votes made again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import prod

from bench.markdown import as_markdown
from bench.routings import AttentionPass, DynamicRouting, InterestRouting
from bench.workload import PRECISIONS, Case, Workload
from bench.workloads import WORKLOADS, find


@dataclass(frozen=True)
class Chip:
    """Rates of a GPU, in operations or bytes a second. The defaults are an H100's or H200's, of the data sheet."""

    multiply_adds: float = 67e12  # float32 on the ordinary lanes, two operations each
    tf32: float = 0.62 * 494e12  # what mma.sync reaches of the data sheet's rate
    bf16: float = 0.62 * 989e12
    exponentials: float = 132 * 16 * 1.755e9
    memory: float = 3.35e12  # an H200's is 4.8e12

    @classmethod
    def of(cls, device: str) -> Chip:
        """Return a device's by its name."""
        return cls(memory=4.8e12) if "H200" in device else cls()


def _compared(work: Workload) -> int:
    """Count the iterations that have a softmax."""
    routing = work.routing
    if isinstance(routing, AttentionPass):
        return 0 if routing.uniform else 1
    return routing.iterations - 1 if isinstance(routing, (DynamicRouting, InterestRouting)) else routing.iterations


def _filled(depth: int) -> float:
    """Return the share of a tensor core's step along a matrix's rows that is used."""
    step = 4 if depth <= 4 else 8
    return depth / (-(-depth // step) * step)


def floors(case: Case, chip: Chip) -> dict[str, float]:
    """Return the seconds that each resource alone takes, and ``bound``, the least time by the best way known.

    With shared matrices the best way makes no votes: agreement is a product with ``Q W^T``, and sums over children come
    before matrices. It is counted where it saves operations, for all but Gaussians, whose squares need votes.
    """
    work, batch, training = case.workload, case.batch, case.training
    routing, votes, compared = work.routing, work.votes(batch), _compared(work)
    pose, depth = work.pose, 0 if work.groups == 0 else work.columns_in
    gaussian = routing.subject == "gaussian"
    rest = 6 if gaussian else 2  # multiply-adds for each number of a vote, beside making it
    # multiply-adds a number of a vote: of products that tensor cores can make, and of all else
    products = depth * compared + (depth if compared < routing.iterations else 0)  # the first sum is one plain product
    others = rest * compared
    if training:
        products += depth * (3 * routing.iterations if compared else 2)
        others += (15 if gaussian else 5) * routing.iterations if compared else 0
    each = 2.0 * votes * pose
    rate = (chip.bf16 if case.precision == "bf16" else chip.tf32) * _filled(max(depth, 1))
    seconds = {"multiply_adds": each * (products + others) / chip.multiply_adds}
    seconds |= {"products": each * products / rate, "others": each * others / chip.multiply_adds}
    seconds["exponentials"] = votes * compared * (2 if training else 1) / chip.exponentials
    size = PRECISIONS[case.precision].dtype.itemsize
    children = batch * prod(work.grid or (1,)) * work.types * work.rows * work.columns_in
    parents = batch * work.positions * work.parents * pose
    weights = work.matrices * work.parents * work.columns_in * work.columns_out
    moved = children + weights + 2 * parents
    seconds["memory"] = (moved * size + ((moved * size + weights * 4) if training else 0)) / chip.memory
    if 0 < work.matrices < work.children and not gaussian:
        small = 2 * 2.0 * batch * work.positions * work.matrices * work.parents * pose * depth
        folded = (4.0 * votes * work.rows * depth + small) * (compared + 3 * training * routing.iterations)
        seconds["multiply_adds"] = min(seconds["multiply_adds"], folded / chip.multiply_adds)
        seconds["products"] = min(seconds["products"], folded / rate)
        seconds["others"] = 6.0 * votes * compared / chip.multiply_adds
    arithmetic = seconds["multiply_adds"]
    if depth:  # float32 may be three TF32 products each
        on_cores = max(seconds["products"] * (3 if case.precision == "fp32" else 1), seconds["others"])
        arithmetic = min(arithmetic, on_cores) if case.precision == "fp32" else on_cores
    seconds["bound"] = max(arithmetic, seconds["exponentials"], seconds["memory"])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Bounds of the workloads on a GPU, in ms.")
    parser.add_argument("workload", nargs="*", default=[*WORKLOADS])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="H100", choices=("H100", "H200"))
    given = parser.parse_args()
    lines: list[list[str]] = []
    for name in given.workload:
        work = find(name)
        for training in (False, True):
            for precision in PRECISIONS:
                case = Case(work, work.batch if work.copies > 1 else given.batch, training, precision)
                found = floors(case, Chip.of(given.device))
                lines = lines or [["row", *found]]
                lines.append([str(case), *(f"{1e3 * one:.4f}" for one in found.values())])
    print(as_markdown(lines))


if __name__ == "__main__":
    main()
