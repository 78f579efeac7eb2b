"""What a row ought to reach, what falls short of it, and what was held once and is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.workload import Case

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


def goal_of(case: Case) -> dict[str, float]:
    """Return what a row ought to reach: ``speedup`` and, where its votes are large beside all else, ``memory_share``.

    It is to be no slower than any alternative, and its memory little beside the votes'.
    """
    return {"speedup": 1.0} | ({"memory_share": 0.05} if case.workload.outweighs(case.batch) else {})


def missed(row: dict[str, Any], noise: float = 0.0) -> dict[str, str]:
    """Return the goals of a row that it misses by more than a share ``noise``, each with a sentence."""
    goal = row.get("goal") or {}
    if "refused" in row:
        return dict.fromkeys(goal, f"refused, {row['refused']}")
    own = (row.get("memory") or {}).get("fastcaps", {})
    share = own["beyond"] / row["votes_bytes"] if "beyond" in own else None
    found = {}
    for name, value, factor, said in (
        ("speedup", row["speedup"], 1.0, "speed-up {}×, goal {}×"),
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
