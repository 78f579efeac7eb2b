#!/usr/bin/env python
"""This package at two commits, in turns on one machine: a ratio for every row, and their median.

python bench/compare.py main                          # this checkout against a commit: every workload, some 10 minutes
python bench/compare.py main --workload tiny,barham   # rows whose names hold one of these words
python bench/compare.py ../base .                     # two trees that have their libraries: nothing is built

Each side runs in a process of its own with its own library; inputs, timing and rows are this checkout's, so that only
the package differs. What is called is `fastcaps.functional`, which both sides must have. A commit is built once,
through a git worktree, and kept under `build/compare/`. The ratio is the newer side's time over the older one's: 1.03
is 3 % slower. The exit status is 1 if the median over rows is above `--limit`, or if two sides disagree in a result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES = ("forward", "graph", "training step")
"""Without gradients; with a graph for them, and no backward; with the backward."""

_AGREE = 1e-3
"""The most that the two sides' results may differ by, as a share of the largest number."""


def _serve(tree: Path, threads: int) -> int:
    """Answer requests on standard input, a line of JSON each. Runs in a side's process, with ``tree``'s package."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed meanwhile
    sys.path[:] = [str(tree), *[place for place in sys.path if Path(place or ".").resolve() != ROOT / "bench"]]
    import torch

    import fastcaps

    if not Path(fastcaps.__file__).is_relative_to(tree):
        raise SystemExit(f"compare: fastcaps came from {fastcaps.__file__}, not from {tree}")
    package = types.ModuleType("bench")
    package.__path__ = [str(ROOT / "bench")]  # rows and inputs are the same for both sides
    sys.modules["bench"] = package
    torch.set_num_threads(threads)
    call: Callable[[], Any] = dict
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "workload" in request:
                call, answer = _prepare(request)
            else:
                answer = [_timed(call) for _ in range(request["calls"])]
        except Exception as error:  # the other side goes on without this row
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _prepare(request: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a row's call, and the seconds of the second call with a few numbers of every result."""
    import torch

    from bench.alternatives import OURS, build, runner
    from bench.workloads import find

    workload = find(request["workload"])
    inputs, run = workload.inputs(request["batch"]), build(OURS, workload)
    call = runner(run, inputs, request["mode"] == "training step")
    if request["mode"] == "graph":
        inputs.require_grad()

        def call() -> Any:
            return dict(zip(inputs.grads, run(**inputs.arguments), strict=True))

    call()
    start = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        some = {
            name: [tensor.flatten()[:: 1 + tensor.numel() // 64].tolist(), tensor.abs().max().item()]
            for name, tensor in found.items()
        }
    return call, {"seconds": seconds, "some": some}


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


class Side:
    """One commit's package in a process of its own."""

    def __init__(self, tree: Path, threads: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(tree), "--threads", str(threads)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment
        )

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request; raise RuntimeError if the process has died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"a side's process has died with exit status {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


def disagreement(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return what two sides' results differ in, or an empty string."""
    if old.keys() != new.keys():
        return f"results are {sorted(old)} and {sorted(new)}"
    for name, (numbers, top) in old.items():
        others = new[name][0]
        if len(others) != len(numbers):
            return f"{name} differs in size"
        for one, other in zip(numbers, others, strict=True):
            if not abs(one - other) <= _AGREE * max(top, 1e-30):  # NaN too
                return f"{name} differs by {abs(one - other):.3g}, its largest number is {top:.3g}"
    return ""


def measure(old: Side, new: Side, row: dict[str, Any], seconds: float, rounds: int) -> dict[str, Any]:
    """Time one row in rounds of blocks, old, new, new, old; return all seconds, and each round's ratio of medians."""
    sides = (old, new)
    answers = [side.ask(**row) for side in sides]
    for answer in answers:
        if "failed" in answer:
            return row | answer
    differs = disagreement(answers[0]["some"], answers[1]["some"])
    if differs:
        return row | {"differs": differs}
    longest = max(answer["seconds"] for answer in answers)
    calls = max(1, min(2000, int(seconds / (4 * rounds * longest))))
    samples: list[list[float]] = [[], []]
    ratios: list[float] = []
    for _ in range(rounds):
        blocks: list[list[float]] = [[], []]
        for side in (0, 1, 1, 0):
            time.sleep(0.002)  # let the threads of the other process stop spinning
            warm = 1 if calls > 1 else 0
            blocks[side] += sides[side].ask(calls=calls + warm)[warm:]
        ratios.append(median(blocks[1]) / median(blocks[0]))
        samples = [before + block for before, block in zip(samples, blocks, strict=True)]
        if 4 * calls * longest * (len(ratios) + 1) > 3 * seconds and len(ratios) > 1:
            break  # calls of seconds each: two rounds say enough
    return row | {"old": samples[0], "new": samples[1], "ratios": ratios}


def combined(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row from those of every start of the processes: medians over all calls, and over all rounds."""
    for one in found:
        if "ratios" not in one:
            return one
    ratios = [ratio for one in found for ratio in one["ratios"]]
    times = {side: median([seconds for one in found for seconds in one[side]]) for side in ("old", "new")}
    return found[0] | times | {"ratio": median(ratios), "least": min(ratios), "most": max(ratios), "ratios": ratios}


def tree_of(given: str) -> Path:
    """Return a folder with the package and its library: a tree that exists, or a commit built through a worktree."""
    if (Path(given) / "fastcaps" / "__init__.py").is_file():
        return Path(given).resolve()
    name = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{given}^{{commit}}"], capture_output=True, text=True
    )
    if name.returncode:
        raise ValueError(f"{given!r} is neither a tree with fastcaps/ in it nor a commit")
    commit = name.stdout.strip()
    target = ROOT / "build" / "compare" / commit[:12]
    if (target / "fastcaps" / "__init__.py").is_file():
        return target
    with tempfile.TemporaryDirectory(prefix="fastcaps-compare-") as scratch:
        work = Path(scratch) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(work), commit], check=True)
        try:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
            environment = {"FASTCAPS_CUDA": "0", **os.environ}
            subprocess.run([*install, "--target", str(target), str(work)], check=True, env=environment)
        finally:
            subprocess.run([*git, "remove", "--force", str(work)], check=False)
    return target


def rows_of(words: Sequence[str], modes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows to measure: tiny calls in every mode, workloads at all their batches, forward and training."""
    from bench.workloads import TINY, WORKLOADS

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    tiny = [(work, 1, mode) for work in TINY.values() for mode in MODES]
    rest = [(work, batch, mode) for work in WORKLOADS.values() for batch in work.batches for mode in MODES[::2]]
    return [
        {"workload": work.name, "batch": batch, "mode": mode}
        for work, batch, mode in (*tiny, *rest)
        if wanted(work.name) and (not modes or mode in modes)
    ]


def summary(rows: Sequence[dict[str, Any]], limit: float) -> tuple[list[str], bool]:
    """Return what is to be said of all rows, and whether the newer side passes: tiny calls are counted apart."""
    lines, passed = [], True
    measured = [row for row in rows if "ratio" in row]
    for title, part in (
        ("workloads", [row for row in measured if not row["workload"].startswith("tiny")]),
        ("tiny calls", [row for row in measured if row["workload"].startswith("tiny")]),
    ):
        for mode in (None, *MODES):
            ratios = [row["ratio"] for row in part if mode in (None, row["mode"])]
            if ratios:
                what = f"{title}, {mode or 'all modes'}"
                lines.append(f"{what}: median ratio {median(ratios):.3f} over {len(ratios)} rows")
                passed &= mode is not None or median(ratios) <= 1 + limit
    slower = [row for row in measured if row["least"] > 1 + limit]
    lines += [f"slower in every round: {_place(row)}, {row['ratio']:.3f}" for row in slower]
    broken = [row for row in rows if "ratio" not in row]
    lines += [f"no ratio: {_place(row)}: {row.get('differs') or row.get('failed')}" for row in broken]
    return lines, passed and not any("differs" in row for row in rows)


def _place(row: dict[str, Any]) -> str:
    return f"{row['workload']} batch {row['batch']} {row['mode']}"


def _line(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return f"{_place(row):<52} {row.get('differs') or row.get('failed')}"
    spread = f"{row['ratio']:.3f} ({row['least']:.3f}-{row['most']:.3f})"
    return f"{_place(row):<52} {row['old'] * 1e3:10.3f} {row['new'] * 1e3:10.3f}  {spread}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Compare this package at two commits, in turns.")
    parser.add_argument("old", nargs="?", help="a commit, or a tree with its library")
    parser.add_argument("new", nargs="?", default=str(ROOT), help="likewise (default: this checkout)")
    parser.add_argument("--workload", default="", help="words, commas between: rows whose names hold one of them")
    parser.add_argument("--mode", action="append", default=[], choices=MODES, help="only these")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a row's timed calls (default 4)")
    parser.add_argument("--rounds", type=int, default=9, help="of a row (default 9)")
    parser.add_argument("--starts", type=int, default=1, help="times that both processes start afresh (default 1)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=0.03, help="how much slower the median may be (default 0.03)")
    parser.add_argument("--output", type=Path, help="a JSON file for all rows")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.serve is not None:
        return _serve(given.serve, given.threads)
    if given.old is None:
        parser.error("which commit or tree is this one compared with?")
    try:
        trees = [tree_of(given.old), tree_of(given.new)]
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(f"old {trees[0]}\nnew {trees[1]}\n{'row':<52} {'old ms':>10} {'new ms':>10}  ratio (over rounds)")
    words = [word for word in given.workload.split(",") if word]
    starts: list[list[dict[str, Any]]] = []
    for _ in range(given.starts):
        sides = [Side(tree, given.threads) for tree in trees]
        try:
            starts.append([])
            for row in rows_of(words, given.mode):
                starts[-1].append(measure(*sides, row, given.seconds, given.rounds))
                print(_line(combined(starts[-1][-1:])), flush=True)
        finally:
            for side in sides:
                side.close()
    rows = [combined(found) for found in zip(*starts, strict=True)]
    if given.starts > 1:
        print("\nover all starts\n" + "\n".join(_line(row) for row in rows))
    if given.output is not None:
        given.output.write_text(json.dumps({"old": str(trees[0]), "new": str(trees[1]), "rows": rows}, indent=1) + "\n")
    lines, passed = summary(rows, given.limit)
    print("\n" + "\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
