"""How time and memory grow with batch, children, parents, poses and turns, one at a time, each over three decades.

python -m bench.growth               # measures, keeps bench/growth.json, writes docs/performance/growth.md and .svg
python -m bench.growth --draw        # only writes them, from what was kept

A point is a small layer with one of its sizes 1, 10, 100 and 1000 times the least: an attention pass, or for turns all
of dynamic routing. It is held to the float64 result, and has a process of its own, in which the peak memory of one call
is measured before anything is timed. Its time is the least of some calls, as what else runs can only add to it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench import pages, record
from bench.alternatives import OURS
from bench.goals import number
from bench.report import DOCS
from bench.routings import AttentionPass, DynamicRouting
from bench.runner import Case, Remote, Runner
from bench.workload import Workload
from tools.markdown import as_markdown, into

__all__ = ["main", "measure", "points", "slopes", "table"]

Row = dict[str, Any]
KEPT = record.ROOT / "bench" / "growth.json"
_SECONDS = 300.0  # after which a process is given up
_SGEMM = 512  # size of the matrices by whose product the machine is known to be quiet
_MEASURED = 0.3  # seconds that the calls of one point ought to take


def points() -> Iterator[tuple[str, int, Workload]]:
    """Return what grows, how large it is, and the layer."""
    base = Workload("growth", "growth alone", (16,), 64, 16, 4, 4, 4, AttentionPass())
    bare: dict[str, Any] = {"batches": (64,), "routing": AttentionPass(normalize=False)}
    for times, side in zip((1, 10, 100, 1000), (1, 3, 10, 32), strict=True):
        sizes: dict[str, tuple[int, dict[str, Any]]] = {
            "batch": (times, {"batches": (times,)}),
            "children": (8 * times, {"types": 8 * times}),
            "parents": (4 * times, {"parents": 4 * times}),
            # without LayerNorm, which makes one number 0
            "pose": (side**2, dict.fromkeys(("rows", "columns_in", "columns_out"), side) | bare),
            "turns": (times, {"types": 32, "parents": 8, "routing": DynamicRouting(iterations=times)}),
        }
        for axis, (size, changes) in sizes.items():
            yield axis, size, replace(base, name=f"growth-{axis}-{size}", **changes)


def measure(axis: str, size: int, work: Workload, threads: int) -> list[Row]:
    """Return the rows of one point, forward and training step."""
    rows, remote = [], Remote(threads, Runner, "cpu")
    try:
        cases = [Case(work, work.batch, training) for training in (False, True)]
        memory = [remote.call(_SECONDS, "memory", case, OURS) for case in cases]
        for case, found in zip(cases, memory, strict=True):
            verdict = remote.call(_SECONDS, "check", case, OURS)
            if verdict["complaint"]:
                raise ValueError(f"{case}: {verdict['complaint']}")
            calls = max(3, min(50, int(_MEASURED / verdict["seconds"])))
            row = {"axis": axis, "size": size, "mode": case.mode, "votes_bytes": work.votes_bytes(work.batch)}
            row |= {"operations": work.operations(work.batch, case.training), "beyond": found["beyond"]}
            rows.append(row | {"seconds": min(remote.call(_SECONDS, "time", calls, 1))})
        rate = 2 * _SGEMM**3 / min(remote.call(_SECONDS, "time_sgemm", _SGEMM, 5, 1))
        return [row | {"sgemm_gflops": rate / 1e9} for row in rows]
    finally:
        remote.close()


def slopes(rows: Sequence[Row], field: str) -> tuple[float, float]:
    """Return by which power of the size a figure grows: over all points, by least squares, and over the last two."""
    x, y = ([math.log(row[name]) for row in rows] for name in ("size", field))
    middle = sum(x) / len(x)
    overall = sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)
    return overall, (y[-1] - y[-2]) / (x[-1] - x[-2])


def table(machine: Row, rows: Sequence[Row]) -> str:
    """Return the table of the docs, and what it was measured on."""
    rates = sorted(row["sgemm_gflops"] for row in rows)
    lines = [["what grows", "mode", "from", "to", "operations", "time", "ms", "own MB"]]
    for axis, mode in dict.fromkeys((row["axis"], row["mode"]) for row in rows):
        part = sorted((row for row in rows if (row["axis"], row["mode"]) == (axis, mode)), key=lambda row: row["size"])
        powers = ["{:.2f} ({:.2f})".format(*slopes(part, field)) for field in ("operations", "seconds")]
        ends = [f"{number(part[k]['seconds'] * 1e3)}" for k in (0, -1)]
        own = ", ".join(f"{row['beyond'] / 1e6:.1f}" for row in part)
        lines.append([axis, mode, str(part[0]["size"]), str(part[-1]["size"]), *powers, " to ".join(ends), own])
    told = f"{machine['device']}, {machine['threads']} threads, {machine['date'][:10]}, commit {machine['commit']}"
    speed = f"sgemm of {_SGEMM}³: {number(rates[0])} to {number(rates[-1])} GFLOP/s over the points"
    quiet = "" if rates[0] > 0.9 * rates[-1] else ", so the machine was **not quiet**"
    return f"{told}; {speed}{quiet}.\n\n{as_markdown(lines)}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="How time and memory grow with every size of a layer.")
    parser.add_argument("--draw", action="store_true", help="measure nothing; write table and picture anew")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if not given.draw:
        rows = []
        for axis, size, work in points():
            rows += measure(axis, size, work, given.threads)
            print(f"{axis} {size}: " + ", ".join(f"{number(row['seconds'] * 1e3)} ms" for row in rows[-2:]), flush=True)
        KEPT.write_text(json.dumps({"machine": record.describe(given.threads), "rows": rows}, indent=1) + "\n")
    kept = json.loads(KEPT.read_text())
    page = DOCS / "growth.md"
    page.write_text(into(page.read_text(), table(**kept), "growth"))
    (DOCS / "growth.svg").write_text(pages.growth_picture(kept["rows"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
