"""What is measured on a GPU, and what was aimed at: the large batch in float32 first, as time may not do for all."""

from __future__ import annotations

from collections.abc import Sequence

from bench.routings import AttentionPass
from bench.runner import PRECISIONS, Case
from bench.workload import Workload

__all__ = ["BATCHES", "SECONDS", "cases", "goal_of"]

BATCHES = (128, 1, 32)  # in order of importance

SECONDS = {
    ("tsai-c10-conv1", False, "fp32"): 0.30e-3,
    ("tsai-c10-conv1", True, "fp32"): 1.5e-3,
    ("tsai-c10-conv1", False, "tf32"): 0.15e-3,
    ("tsai-c10-conv1", True, "tf32"): 0.8e-3,
    ("tsai-c10-fc", False, "fp32"): 0.03e-3,
}
"""What was aimed at on an H200, batch 128: of a workload, whether it is a training step, and the precision."""


def cases(workloads: Sequence[Workload], batches: Sequence[int] = (), precisions: Sequence[str] = ()) -> list[Case]:
    """Return the rows of a run in order of importance.

    A workload whose children are copies, as it is large in itself, runs at its own batch, in the large one's place.
    """
    return [
        Case(work, work.batch if work.copies > 1 and not batches else batch, training, precision)
        for batch in batches or BATCHES
        for precision in precisions or PRECISIONS
        for work in workloads
        for training in (False, True)
        if work.copies == 1 or batches or batch == BATCHES[0]
    ]


def goal_of(case: Case, launches: float) -> dict[str, float]:
    """Return what a row ought to reach: ``seconds``, ``speedup``, ``latency``, ``memory_share``, or some of them.

    ``launches`` are the seconds of three of the smallest launches.
    """
    work, goal = case.workload, {}
    if case.batch != BATCHES[0] and work.copies == 1:
        return {"latency": launches} if case.batch == 1 and not case.training else {}
    if isinstance(work.routing, AttentionPass) or work.outweighs(case.batch):
        goal["memory_share"] = 0.05
    if (work.name, case.training, case.precision) in SECONDS:
        goal["seconds"] = SECONDS[work.name, case.training, case.precision]
    if work.name == "tsai-c10-conv1" and case.precision == "fp32":
        goal["speedup"] = 6.0 if case.training else 10.0
    return goal
