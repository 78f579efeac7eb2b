"""What falls short of its goal, and what was held once and is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.workloads import QUICK

__all__ = ["device_seconds", "lost", "missed", "number", "place", "shortfalls"]

NOISE = 0.1  # a goal that was held is lost if missed by more than this share; two runs differ so much


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


_SAID: dict[str, Callable[[float, float], str]] = {
    "speedup": lambda is_, goal: f"{number(is_)}× of the fastest alternative, goal {number(goal)}×",
    "seconds": lambda is_, goal: f"{number(is_ * 1e3)} ms, goal {number(goal * 1e3)} ms",
    "latency": lambda is_, goal: f"{is_ * 1e6:.0f} us to the end, three smallest launches take {goal * 1e6:.0f} us",
    "memory_share": lambda is_, goal: f"{is_:.1%} of the votes' bytes beside the results, goal {goal:.0%}",
}


def missed(row: dict[str, Any], noise: float = 0.0) -> dict[str, str]:
    """Return the goals of a row that it misses by more than a share ``noise``, each with a sentence."""
    goal = row.get("goal") or {}
    if "refused" in row:
        return dict.fromkeys(goal, f"refused, {row['refused']}")
    own = (row.get("memory") or {}).get("fastcaps", {})
    reached = {
        "speedup": row["speedup"],
        "seconds": device_seconds(row["fastcaps"]),
        "latency": row["fastcaps"].get("latency"),
        "memory_share": own["beyond"] / row["votes_bytes"] if "beyond" in own else None,
    }
    found = {}
    for name, say in _SAID.items():
        value, wanted = reached[name], goal.get(name)
        if value is None or wanted is None:
            continue
        if value < (1 - noise) * wanted if name == "speedup" else value > (1 + noise) * wanted:
            found[name] = say(value, wanted)
    return found


def lost(row: dict[str, Any], before: dict[str, Any] | None, quick: bool) -> list[str]:
    """Return a sentence for every goal that was held and is not held any more.

    Of a full row: held by the newest record of it on this machine. Of a quick row: the speed-ups in
    :data:`bench.workloads.QUICK`, which were held when they were written there.
    """
    if quick:
        floors = QUICK.get(row["workload"])
        if floors is None or floors[0] != row["batch"]:
            return []
        row = row | {"goal": {"speedup": floors[1 + (row["mode"] != "forward")]}}
        return list(missed(row).values())
    if before is None:
        return []
    held = (before.get("goal") or {}).keys() - missed(before).keys()
    return [why for name, why in missed(row, NOISE).items() if name in held]


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for every figure that misses its goal, and for every row that was refused."""
    found = []
    for row in rows:
        if "refused" in row:
            found.append(f"{place(row)}: refused, {row['refused']}")
        else:
            found += [f"{place(row)}: {why}" for why in missed(row).values()]
    return found
