"""What a row ought to reach, what falls short of it, and what was held once and is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.routings import AttentionPass
from bench.workload import Case
from bench.workloads import BATCHES

NOISE = 0.1  # a goal that was held is lost if missed by more than this share; two runs differ so much

SECONDS = {
    ("tsai-c10-conv1", False, "fp32"): 0.30e-3,
    ("tsai-c10-conv1", True, "fp32"): 1.5e-3,
    ("tsai-c10-conv1", False, "tf32"): 0.15e-3,
    ("tsai-c10-conv1", True, "tf32"): 0.8e-3,
    ("tsai-c10-fc", False, "fp32"): 0.03e-3,
}
"""What was aimed at on an H200, batch 128: of a workload, whether it is a training step, and the precision."""


def number(value: float) -> str:
    """Return a number that is not negative with three significant digits, without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def place(row: dict[str, Any]) -> str:
    """Return which row it is."""
    precision = row.get("precision", "fp32")  # a comparison of two commits names none
    return f"{row['workload']} batch {row['batch']} {row['mode']}" + ("" if precision == "fp32" else f" {precision}")


def device_seconds(entry: dict[str, Any]) -> float:
    """Return a call's own time: by graph replay where launches on a GPU are small, else the median."""
    return float(entry.get("graph", {}).get("median", entry["median"]))


def goal_of(case: Case, launches: float | None = None) -> dict[str, float]:
    """Return what a row ought to reach: ``seconds``, ``speedup``, ``latency``, ``memory_share``, or some of them.

    On a CPU it is to be no slower than any alternative, and its memory little beside the votes'. ``launches`` are the
    seconds of three of a GPU's smallest launches.
    """
    work = case.workload
    if launches is None:
        return {"speedup": 1.0} | ({"memory_share": 0.05} if work.outweighs(case.batch) else {})
    if case.batch != BATCHES[0] and work.copies == 1:
        return {"latency": launches} if case.batch == 1 and not case.training else {}
    goal = {}
    if isinstance(work.routing, AttentionPass) or work.outweighs(case.batch):
        goal["memory_share"] = 0.05
    if (work.name, case.training, case.precision) in SECONDS:
        goal["seconds"] = SECONDS[work.name, case.training, case.precision]
    if work.name == "tsai-c10-conv1" and case.precision == "fp32":
        goal["speedup"] = 6.0 if case.training else 10.0
    return goal


def missed(row: dict[str, Any], noise: float = 0.0) -> dict[str, str]:
    """Return the goals of a row that it misses by more than a share ``noise``, each with a sentence."""
    goal = row.get("goal") or {}
    if "refused" in row:
        return dict.fromkeys(goal, f"refused, {row['refused']}")
    own, entry = (row.get("memory") or {}).get("fastcaps", {}), row["fastcaps"]
    share = own["beyond"] / row["votes_bytes"] if "beyond" in own else None
    found = {}
    for name, value, factor, said in (
        ("speedup", row["speedup"], 1.0, "speed-up {}×, goal {}×"),
        ("seconds", device_seconds(entry), 1e3, "{} ms, goal {} ms"),
        ("latency", entry.get("latency"), 1e6, "{} us to the end, three smallest launches take {} us"),
        ("memory_share", share, 100.0, "extra memory is {} % of the votes, goal {} %"),
    ):
        if value is None or name not in goal:
            continue
        wanted = goal[name]
        if value < (1 - noise) * wanted if name == "speedup" else value > (1 + noise) * wanted:
            found[name] = said.format(number(factor * value), number(factor * wanted))
    return found


def lost(row: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """Return a sentence for every goal that is missed, and that the newest record of the row on this machine held."""
    held = (before.get("goal") or {}).keys() - missed(before).keys() if before else ()
    return [why for name, why in missed(row, NOISE).items() if name in held]


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for every figure that misses its goal, and for every row that was refused."""
    said = [(row, [f"refused, {row['refused']}"] if "refused" in row else missed(row).values()) for row in rows]
    return [f"{place(row)}: {why}" for row, reasons in said for why in reasons]
