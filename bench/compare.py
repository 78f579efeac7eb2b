"""This package at two commits, alternately on one machine: a ratio for every row, and their median.

python -m bench.compare main                               # this checkout against a commit: all rows, 10 minutes
python -m bench.compare main --workload tiny --workload barham  # rows whose names hold one of these words
python -m bench.compare ../base .                          # two trees that have their libraries: nothing is built

The older side is one more contender of a session: it runs in a separate process with its own library; inputs, timing,
rows and the rule for results are this checkout's, so that only the package differs. A commit is built once and kept
under `build/compare/`. The ratio is the newer side's time over the older one's: 1.03 is 3 % slower. A row of which a
side's result is wrong has no ratio. The exit status is 1 if there is such a row, or if the median over rows is above
`--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.alternatives import BEFORE, OURS
from bench.goals import place
from bench.record import ROOT
from bench.session import Session
from bench.timing import Plan
from bench.workloads import TINY, WORKLOADS, cases
from fastcaps import libraries


def tree_of(given: str) -> Path:
    """Return a folder with the package and its library: a tree that exists, or a commit that is built."""
    if (Path(given) / "fastcaps" / "__init__.py").is_file():
        return Path(given).resolve()
    git = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{given}^{{commit}}"]
    named = subprocess.run(git, capture_output=True, text=True)
    if named.returncode:
        raise ValueError(f"{given!r} is neither a tree with fastcaps/ in it nor a commit")
    commit = named.stdout.strip()
    levels = libraries.library("cpu").ask("fastcaps_capabilities_built") or "all"  # the same kernels for both
    target = ROOT / "build" / "compare" / f"{commit[:12]}-{levels.replace(',', '-')}"
    if not (target / "fastcaps" / "__init__.py").is_file():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
        command = [*install, str(target), f"git+file://{ROOT}@{commit}"]
        subprocess.run(command, check=True, env={"FASTCAPS_CUDA": "0", "FASTCAPS_LEVELS": levels, **os.environ})
    return target


def linked(tree: Path, folder: Path) -> Path:
    """Fill a folder with links to a tree's package and this checkout's benchmark, and return it."""
    (folder / "fastcaps").mkdir(parents=True)
    (folder / "bench").symlink_to(ROOT / "bench")
    for name in os.listdir(tree / "fastcaps"):
        (folder / "fastcaps" / name).symlink_to(tree / "fastcaps" / name)
    return folder


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """Return of a session's row both medians, their ratio, and that of their 20th and 80th percentiles as the least
    and most that it may be; or why it is ``refused``, if a result was wrong, or ``failed``."""
    found = {name: row[name] for name in ("workload", "batch", "mode")}
    old, new = row["alternatives"].get(BEFORE, {}), row.get("fastcaps", {})
    if "refused" in row:
        return found | {"refused": row["refused"]}
    if why := old.get("failed"):
        return found | {"refused" if why.startswith("wrong") else "failed": f"the older side: {why}"}
    spread = {"least": new["p20"] / old["p80"], "most": new["p80"] / old["p20"]}
    return found | {"old": old["median"], "new": new["median"], "ratio": new["median"] / old["median"]} | spread


def line(row: dict[str, Any]) -> str:
    """Return a row in one line: milliseconds of both sides, ratio and its spread; or why it has no ratio."""
    if "ratio" not in row:
        return f"{place(row):<52} {row.get('failed') or 'refused: ' + row['refused']}"
    spread = f"{row['ratio']:.3f} ({row['least']:.3f}-{row['most']:.3f})"
    return f"{place(row):<52} {row['old'] * 1e3:10.3f} {row['new'] * 1e3:10.3f}  {spread}"


def summary(rows: Sequence[dict[str, Any]], limit: float) -> tuple[list[str], bool]:
    """Return what is to be said of all rows, and whether the newer side passes: tiny calls are counted apart."""
    lines, passed = [], not any("refused" in row for row in rows)
    for title, tiny in (("workloads", False), ("tiny calls", True)):
        ratios = [row["ratio"] for row in rows if "ratio" in row and row["workload"].startswith("tiny") == tiny]
        if ratios:
            lines.append(f"{title}: median ratio {median(ratios):.3f} over {len(ratios)} rows")
            passed &= median(ratios) <= 1 + limit
    lines += [f"slower: {line(row)}" for row in rows if row.get("least", 0.0) > 1 + limit]
    return lines + [f"no ratio: {line(row)}" for row in rows if "ratio" not in row], passed


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare", description="This checkout against another commit, in turns.")
    parser.add_argument("old", metavar="REV", help="a commit, or a tree with its library")
    parser.add_argument("new", nargs="?", default=str(ROOT), help="likewise; this checkout if none is given")
    parser.add_argument("--workload", action="append", help="rows whose names hold this word (repeat)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a row's timed calls")
    parser.add_argument("--rounds", type=int, default=9, help="of a row, old and new in turns")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of both sides")
    parser.add_argument("--limit", type=float, default=0.03, help="how much slower the median may be, as a share")
    parser.add_argument("--json", action="store_true", help="print rows and verdict, and nothing else")
    given = parser.parse_args(None if arguments is None else list(arguments))
    words = given.workload or [""]
    names = [name for name in (*TINY, *WORKLOADS) if any(word in name for word in words)]
    if not names:
        message = f"no row's name holds {' or '.join(words)} (fastcaps bench --list)"
        parser.exit(2, f"fastcaps compare: --workload: {message}\n")
    try:
        trees = [tree_of(given.old), tree_of(given.new)]
    except (ValueError, subprocess.CalledProcessError) as error:
        parser.exit(1, f"fastcaps compare: {error}\n")
    said = (lambda *_, **__: None) if given.json else print
    said(f"old {trees[0]}\nnew {trees[1]}\n{'':<52}    old, ms    new, ms  ratio (20th to 80th percentile)", flush=True)
    plan = Plan(given.rounds, given.seconds / (2 * given.rounds), given.seconds / 2, sgemm=256)
    rows = []
    with tempfile.TemporaryDirectory(prefix="fastcaps-compare-") as scratch:
        sides = zip((BEFORE, OURS), trees, strict=True)
        folders = {side: linked(tree, Path(scratch, side)) for side, tree in sides}
        session = Session(Path(scratch), [BEFORE], True, given.threads, plan=plan, folders=folders)
        try:
            for case in cases(names, quick=False):
                rows.append(compared(session.run(case)))
                said(line(rows[-1]), flush=True)
        finally:
            session.close()
    lines, passed = summary(rows, given.limit)
    document = {"old": str(trees[0]), "new": str(trees[1]), "passed": passed, "rows": rows}
    print(json.dumps(document, indent=2) if given.json else "\n".join(lines))
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
