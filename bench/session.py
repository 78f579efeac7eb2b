"""One run of the benchmark: rows are checked by the gate, timed alternately, completed and written down here."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, STORED, is_compiled, suited
from bench.goals import goal_of, lost
from bench.process import Remote, WorkerError
from bench.runner import Runner
from bench.timing import FULL, MULTIPLY_ADDS, QUICK, Contender, Plan, doubts, quantiles, take_turns
from bench.workload import Case

_FITS, _TOGETHER = 0.6, 0.01
"""Shares of the machine's memory: what a process may use, and the votes of rows whose alternatives start at once."""
_PATIENCE = 240.0  # seconds after which a process is given up


class LeftOut(BaseException):  # no Exception, which would be an alternative's failure
    """The time is used up: this row has no figures."""


class Session:
    """Processes, machine and rows of one run. ``rows`` are what is written as JSON, to ``file``.

    ``names`` are the alternatives that take part. A row that is not finished after ``seconds`` is given up. A quick run
    measures no memory, and has no goals. ``folders`` are where the processes of some contenders look for this package.
    """

    def __init__(
        self, results: Path, names: Sequence[str] = ALTERNATIVES, quick: bool = False, threads: int = 1,
        seconds: float = math.inf, plan: Plan | None = None, folders: Mapping[str, Path] = {},
    ) -> None:  # fmt: skip
        self.results, self.names, self.quick = results, names, quick
        self.plan = plan or (QUICK if quick else FULL)
        self.rows: list[dict[str, Any]] = []
        self.file: Path | None = None
        self.samples: dict[str, list[float]] = {}  # seconds of every contender's calls, of the last row
        self._case: Case | None = None
        self._until = time.monotonic() + seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcaps-bench-")
        self._gates = Path(self._scratch.name)
        self.machine = record.describe(threads) | {"kind": "quick" if quick else "full"}
        self._remote = partial(Remote, threads, Runner, self._gates, memory=_FITS * self.machine["memory"])
        self._remotes = {name: self._remote(folder=folders.get(name)) for name in (OURS, *names)}
        self.machine["sgemm_size"] = self.plan.sgemm
        self._before = {record.key(row): row for row in record.merge(record.load(record.RESULTS))}

    def run(self, case: Case) -> dict[str, Any]:
        """Check, time and write down one row, and return it; asking for the last one again costs nothing.

        A row whose own result disagrees with the float64 reference is ``refused`` and has no figures. Raises LeftOut if
        the time of the run is used up.
        """
        if self._case == case:
            return self.rows[-1]
        self.samples = {}
        row = self._measure(case)
        assert self._patience  # else an answer may be missing for lack of time
        row["lost"] = lost(row, self._before.get(record.key(row)))
        self.rows.append(row)
        self.file = record.write(self.results, self.rows)  # a run that is stopped leaves what it has
        self._case = case
        return row

    @property
    def _patience(self) -> float:
        """The seconds that a process's answer may take; LeftOut if the time of the run is used up."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise LeftOut("the time is used up")
        return min(left, _PATIENCE)

    def _measure(self, case: Case) -> dict[str, Any]:
        work = case.workload
        row: dict[str, Any] = {
            "machine": self.machine,
            **dict(zip(("workload", "batch", "mode", "precision"), case.key, strict=True)),
            "source": work.source,
            "default": case.batch == work.batch,
            "complete": False,
            "votes_bytes": work.votes_bytes(case.batch),
            "operations": work.operations(case.batch, case.training),
            "goal": {} if self.quick else goal_of(case),
            "load": os.getloadavg()[0],
            "alternatives": {},
        }
        entries: dict[str, dict[str, Any]] = {}
        ready = self._check(case, entries)
        if OURS not in ready:
            return row | {"refused": entries[OURS]["failed"]}
        row["gate"] = {name: ready[OURS][name] for name in ("errors", "allowed")}
        yardsticks = self._turns({name: verdict["seconds"] for name, verdict in ready.items()}, entries)
        rate = 2 * self.plan.sgemm**3 / yardsticks["sgemm"]
        memory = self._memory(case)
        if "median" not in entries[OURS]:
            return row | {"refused": entries[OURS]["failed"]}
        row["fastcaps"] = entries[OURS]
        row["alternatives"] = {name: entries[name] for name in self.names if name in entries}
        timed = {name: one["median"] for name, one in row["alternatives"].items() if "median" in one}
        own, fastest = row["fastcaps"]["median"], min(timed, key=lambda name: timed[name], default=None)
        reached = row["operations"] / own
        row |= {"fastest": fastest, "speedup": timed[fastest] / own if fastest else None}
        row |= {"gflops": reached / 1e9, "sgemm_gflops": rate / 1e9, "sgemm_share": reached / rate}
        if "peak" in yardsticks:
            most = self.machine["threads"] * MULTIPLY_ADDS / yardsticks["peak"]
            row |= {"peak_gflops": most / 1e9, "peak_share": reached / most}
        row["doubts"] = doubts(row)
        return row | {"complete": tuple(self.names) == ALTERNATIVES, "memory": memory}

    def _check(self, case: Case, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Bring all to where they can be timed; return the verdicts on those that are, and add to ``entries``."""
        for stale in self._gates.glob("*.pt"):
            if not stale.name.startswith(f"{case.workload.name}-{case.batch}-"):
                stale.unlink()
        others = suited(self.names, case.workload, case.batch)
        together = case.workload.votes_bytes(case.batch) < _TOGETHER * self.machine["memory"]
        ready: dict[str, dict[str, Any]] = {}
        for some in [OURS], *([others] if together else [[name] for name in others]):
            if not ready.get(OURS, True):
                break  # those after it find the float64 result that it has made
            for name in some:
                self._remotes[name].begin("check", case, name)
            for name in some:
                entries[name] = {}
                ready[name] = self._verdict(case, name, entries[name])
        return {name: verdict for name, verdict in ready.items() if verdict}

    def _verdict(self, case: Case, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        """Wait for a process to check a case; return what it says, nothing if that is wrong, and add to ``entry``."""
        chances = 1 + is_compiled(name)
        for chance in range(chances):
            try:
                verdict: dict[str, Any] = self._remotes[name].finish(self._patience)
                complaint = verdict["complaint"]
                if complaint and name in self.names:
                    complaint = f"wrong result: {complaint}"
            except WorkerError as error:
                complaint = str(error)
            if not complaint:
                return verdict
            if chance + 1 < chances:
                entry["note"] = f"{complaint}; run again without vectorised loop tails"
                self._remotes[name].begin("check", case, name, True)
        entry["failed"] = complaint
        return {}

    def _turns(self, seconds: dict[str, float], entries: dict[str, dict[str, Any]]) -> dict[str, float]:
        """Time all alternately, and with them a large matrix product and, with native code, the machine's peak; add to
        ``entries``, and return the median seconds of those two."""
        asked: dict[str, tuple[Any, ...]] = {"sgemm": ("time_sgemm", self.plan.sgemm)}
        if self.machine["capability"]:
            asked["peak"] = ("time_peak",)
        contenders = []
        for name in (*asked, *seconds):
            owner, what = (OURS, asked[name]) if name in asked else (name, ("time",))
            timer = partial(self._timed, owner, *what)
            took = seconds[name] if name in seconds else timer(1, 1)[0]
            contenders.append(Contender(name, timer, took, rival=name not in (*asked, OURS)))
        take_turns(contenders, self.plan)
        self.samples = {one.name: one.samples for one in contenders if one.name in seconds and one.samples}
        found = {one.name: quantiles(one.samples) if one.samples else {"failed": one.error} for one in contenders}
        for name in seconds:
            entries[name] |= found[name]
        return {name: found[name]["median"] for name in asked}

    def _timed(self, owner: str, *what: Any) -> list[float]:
        """Return the seconds of calls that a process times."""
        return self._remotes[owner].call(self._patience, *what)  # type: ignore[no-any-return]

    def _memory(self, case: Case) -> dict[str, Any]:
        """Measure a row's peak memory at the default batch and where votes are large, ours and that of stored votes,
        each in a fresh process; nothing where these would not fit or are small."""
        large = case.workload.votes_bytes(case.batch) >= 2**30
        if self.quick or not (large or case.batch == case.workload.batch):
            return {}
        found: dict[str, Any] = {}
        fresh = {name: self._remote() for name in (OURS, *[STORED] * (not large))}
        for name, remote in fresh.items():
            remote.begin("memory", case, name)
        for name, remote in fresh.items():
            try:
                found[name] = remote.finish(self._patience)
            except WorkerError as error:
                found[name] = {"failed": str(error)}
            remote.close()
        return found

    def close(self) -> None:
        for remote in self._remotes.values():
            remote.close()
        self._scratch.cleanup()
