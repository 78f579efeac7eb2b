"""This package at two commits, in turns on one machine: a ratio for every row, and their median.

python -m bench.compare main                               # this checkout against a commit: all rows, 10 minutes
python -m bench.compare main --workload tiny --workload barham  # rows whose names hold one of these words
python -m bench.compare ../base .                          # two trees that have their libraries: nothing is built

Each side runs in a process of its own with its own library; inputs, timing and rows are this checkout's, so that only
the package differs. What is called is `fastcaps.functional`, which both sides must have. A commit is built once and
kept under `build/compare/`. The ratio is the newer side's time over the older one's: 1.03 is 3 % slower. A row of which
the newer side's result breaks the rule of :mod:`bench.gate`, or differs from the older one's, has no ratio. The exit
status is 1 if there is such a row, or if the median over rows is above `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fastcaps
from bench.alternatives import OURS, build, runner
from bench.goals import place
from bench.process import Remote, WorkerError
from bench.record import ROOT
from bench.timing import Contender, Plan, quantiles, take_turns, time_calls
from bench.workload import Case
from bench.workloads import TINY, WORKLOADS

_SECONDS = 300.0  # after which a process is given up
_AGREE = 1e-3  # the most that results may differ by, as a share of the largest number


class Side:
    """One of the two packages, in a process of its own. The older one may be any that has ``fastcaps.functional``."""

    def __init__(self) -> None:
        self._ready: Callable[[], Any] = dict

    def package(self) -> Path:
        return Path(fastcaps.__file__)

    def check(self, case: Case) -> str:
        """Return what is wrong with this package's result, or an empty string."""
        from bench.runner import Runner  # here: the rule for results, which an older package may lack

        return str(Runner("cpu").check(case, OURS)["complaint"])

    def prepare(self, case: Case) -> dict[str, Any]:
        """Make a call ready for :meth:`time`; return some numbers of every result."""
        self._ready = runner(build(OURS, case.workload), case.workload.inputs(case.batch), case.training)
        found = {name: tensor.detach().flatten() for name, tensor in self._ready().items()}
        return {name: tensor[:: 1 + tensor.numel() // 64].numpy() for name, tensor in found.items()}

    def time(self, calls: int, warm: int) -> list[float]:
        """Return the seconds of calls of what was prepared last."""
        return time_calls(self._ready, calls, warm)


@contextmanager
def sides(trees: Sequence[Path], threads: int) -> Iterator[list[Remote]]:
    """Start a process for each tree's package; rows and inputs are this checkout's for all of them."""
    with tempfile.TemporaryDirectory(prefix="fastcaps-compare-") as scratch:
        (Path(scratch) / "bench").symlink_to(ROOT / "bench")
        found = [Remote(threads, Side) for _ in trees]
        before = sys.path[:]
        try:
            for tree, side in zip(trees, found, strict=True):
                sys.path[:] = [scratch, str(tree), *before]  # what a process starts with
                came = side.call(_SECONDS, "package")
                if not came.is_relative_to(tree):
                    raise RuntimeError(f"fastcaps came from {came}, not from {tree}")
            sys.path[:] = before
            yield found
        finally:
            sys.path[:] = before
            for side in found:
                side.close()


def disagreement(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return what two sides' results differ in, or an empty string."""
    if old.keys() != new.keys():
        return f"results are {sorted(old)} and {sorted(new)}"
    for name, numbers in old.items():
        far = np.abs(new[name] - numbers).max() if new[name].shape == numbers.shape else np.inf
        if not far <= _AGREE * np.abs(numbers).max():  # NaN too
            return f"{name} differs by {far:.3g}, its largest number is {np.abs(numbers).max():.3g}"
    return ""


def measure(pair: Sequence[Remote], case: Case, plan: Plan) -> dict[str, Any]:
    """Time one row, old and new in turns; return both medians and their ratio, and the least and most that it may be.

    Those are the ratios of the 20th and 80th percentiles. Of a row whose newer result is wrong, or other than the older
    one, no time is taken: it is ``refused``.
    """
    row: dict[str, Any] = {"workload": case.workload.name, "batch": case.batch, "mode": case.mode}
    try:
        wrong = pair[1].call(_SECONDS, "check", case)
        wrong = wrong or disagreement(*(side.call(_SECONDS, "prepare", case) for side in pair))
        if wrong:
            return row | {"refused": wrong}
        timers = {name: partial(side.call, _SECONDS, "time") for name, side in zip(("old", "new"), pair, strict=True)}
        contenders = [Contender(name, timer, timer(1, 1)[0]) for name, timer in timers.items()]
        take_turns(contenders, plan)
        if failed := "".join(one.error for one in contenders):
            raise WorkerError(failed)
    except WorkerError as error:
        return row | {"failed": str(error)}
    old, new = (quantiles(one.samples) for one in contenders)
    spread = {"least": new["p20"] / old["p80"], "most": new["p80"] / old["p20"]}
    return row | {"old": old["median"], "new": new["median"], "ratio": new["median"] / old["median"]} | spread


def tree_of(given: str) -> Path:
    """Return a folder with the package and its library: a tree that exists, or a commit that is built."""
    if (Path(given) / "fastcaps" / "__init__.py").is_file():
        return Path(given).resolve()
    git = ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{given}^{{commit}}"]
    named = subprocess.run(git, capture_output=True, text=True)
    if named.returncode:
        raise ValueError(f"{given!r} is neither a tree with fastcaps/ in it nor a commit")
    commit = named.stdout.strip()
    target = ROOT / "build" / "compare" / commit[:12]
    if not (target / "fastcaps" / "__init__.py").is_file():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
        command = [*install, str(target), f"git+file://{ROOT}@{commit}"]
        subprocess.run(command, check=True, env={"FASTCAPS_CUDA": "0", **os.environ})
    return target


def rows_of(words: Sequence[str]) -> list[Case]:
    """Return the rows to measure: tiny calls and workloads at all their batches, forward and training."""
    works = [work for work in (*TINY.values(), *WORKLOADS.values()) if any(word in work.name for word in words)]
    return [Case(work, batch, training) for work in works for batch in work.batches for training in (False, True)]


def line(row: dict[str, Any]) -> str:
    """Return a row in one line: milliseconds of both sides, ratio and its spread; or why it has no ratio."""
    if "ratio" not in row:
        told = f"refused: {row['refused']}" if "refused" in row else row["failed"]
        return f"{place(row):<52} {told}"
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
    """Run the command line; return its exit status."""
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
    if not (wanted := rows_of(given.workload or [""])):
        words = " or ".join(given.workload)
        parser.exit(1, f"fastcaps compare: --workload: no row's name holds {words} (fastcaps bench --list)\n")
    try:
        trees = [tree_of(given.old), tree_of(given.new)]
    except (ValueError, subprocess.CalledProcessError) as error:
        parser.exit(1, f"fastcaps compare: {error}\n")
    said = (lambda *_, **__: None) if given.json else print
    said(f"old {trees[0]}\nnew {trees[1]}\n{'':<52}    old, ms    new, ms  ratio (20th to 80th percentile)", flush=True)
    plan = Plan(given.rounds, given.seconds / (2 * given.rounds), given.seconds / 2)
    rows = []
    with sides(trees, given.threads) as pair:
        for case in wanted:
            rows.append(measure(pair, case, plan))
            said(line(rows[-1]), flush=True)
    lines, passed = summary(rows, given.limit)
    told = {"old": str(trees[0]), "new": str(trees[1]), "passed": passed, "rows": rows}
    print(json.dumps(told, indent=2) if given.json else "\n".join(lines))
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
