"""What entries say: times, the fastest alternative, speed-up, memory; and how a figure is written."""

from __future__ import annotations

from collections.abc import Mapping

from bench.alternatives import ALTERNATIVES, OURS
from bench.record import Call, Calls, Entry
from bench.workloads import WORKLOADS

MODES = ("forward", "training step")


def number(value: float) -> str:
    """Return a number that is not negative with three significant digits, without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else number(1e3 * seconds)


def extra_bytes(entry: Entry | None) -> float | None:
    """Return what a call needed beside its inputs and results."""
    return (entry or {}).get("memory", {}).get("beyond")


def megabytes(count: float | None) -> str:
    return "" if count is None else number(max(count, 1e4) / 1e6)


def best(entry: Entry | None) -> float | None:
    """Return the least median of an entry, in seconds, or None."""
    kinds = ("warm", "graph") if entry and "warm" in entry else ("cold",)
    times = [entry[kind]["median"] for kind in kinds if "median" in entry.get(kind, {})] if entry else []
    return min(times, default=None)


def rival(entries: Mapping[str, Entry]) -> tuple[str, float] | None:
    """Return the fastest alternative of a call whose result is right, and its seconds."""
    right = {name: entries.get(name, {}) for name in ALTERNATIVES}
    timed = {name: found for name, one in right.items()
             if not one.get("complaint") and (found := best(one)) is not None}  # fmt: skip
    return min(timed.items(), key=lambda one: one[1], default=None)


def ratio(entries: Mapping[str, Entry]) -> float | None:
    """Return how many times as fast as the fastest alternative our call is."""
    found, took = rival(entries), best(entries.get(OURS))
    return found[1] / took if found and took else None


def speedup(entries: Mapping[str, Entry]) -> str:
    found = ratio(entries)
    return f"{'~' * bool(entries[OURS].get('doubts'))}{number(found)}×" if found else ""


def by_processor(entries: Mapping[str, Entry]) -> str:
    """Return the speed-up of processor time, of all threads together, on which other programs have less effect."""
    names = (rival(entries) or (OURS, 0.0))[0], OURS
    theirs, ours = (entries[name].get("warm", {}).get("processor") for name in names)
    return f"{number(theirs / ours)}×" if theirs and ours and names[0] != OURS else ""


def short(name: str) -> str:
    return name.replace("batched-matmul", "stored").replace("-matmul", "").replace("-compiled", ", compiled")


def place(call: Call) -> str:
    """Return which row it is."""
    workload, batch, mode, precision = call
    return f"{workload} batch {batch} {mode}" + ("" if precision == "fp32" else f" {precision}")


def is_default(call: Call) -> bool:
    return call[1] == WORKLOADS[call[0]].batch


def behind(calls: Calls) -> list[Call]:
    """Return the calls in which an alternative is faster, also after rounding (below 0.995), the worst first."""
    ratios = {call: found for call, entries in calls.items() if (found := ratio(entries)) and found < 0.995}
    return sorted(ratios, key=lambda call: ratios[call])
