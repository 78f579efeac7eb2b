"""One run of the benchmark: rows are held to the gate, timed in turns, completed and written down here."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, STORED, is_compiled, suited
from bench.goals import device_seconds, goal_of, lost
from bench.process import Remote, WorkerError
from bench.runner import TRITON, Runner
from bench.timing import FULL, MULTIPLY_ADDS, QUICK, Contender, Plan, doubts, quantiles, take_turns
from bench.workload import PRECISIONS, Case

_FITS, _TOGETHER = 0.6, 0.01
"""Shares of the machine's memory: what a process may use, and the votes of rows whose alternatives start at once."""

_PATIENCE = 240.0
"""Seconds after which a process is given up; a quarter of them on a GPU, where time is dear."""


class LeftOut(Exception):
    """The time is used up: this row has no figures."""


class Session:
    """Processes, machine and rows of one run. ``rows`` are what is written as JSON, to ``file``.

    ``names`` are the alternatives that take part. With ``clock`` contenders are timed in turns by the host's clock, as
    on a CPU, else one by one by the device's events, in ``slice`` seconds each. No row starts after ``seconds``. The
    plan ``QUICK`` measures no memory, and has goals of its own.
    """

    def __init__(
        self,
        results: Path,
        names: Sequence[str] = ALTERNATIVES,
        plan: Plan = FULL,
        threads: int = 1,
        device: str = "cpu",
        clock: bool = True,
        seconds: float = math.inf,
        slice: float = 0.06,
    ) -> None:
        self.results, self.names, self.plan, self.clock, self.quick = results, names, plan, clock, plan is QUICK
        self.rows: list[dict[str, Any]] = []
        self.file: Path | None = None
        self._until, self._patience = time.monotonic() + seconds, _PATIENCE if clock else _PATIENCE / 4
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcaps-bench-")
        self._gates = Path(self._scratch.name)
        self.machine = record.describe(threads) | {"kind": "quick" if self.quick else "full"}
        limit = _FITS * self.machine["memory"] if clock else None
        self._remote = partial(Remote, threads, Runner, device, slice, self._gates, memory=limit)
        self._remotes = {name: self._remote() for name in (OURS, *[TRITON] * (not clock), *names)}
        if clock:
            self.machine["sgemm_size"] = plan.sgemm
        else:
            self.machine |= self._remotes[OURS].call(self._patience, "describe")
        self._before = {record.key(row): row for row in record.merge(record.load(record.RESULTS))}
        self._last: tuple[Case, dict[str, Any], dict[str, list[float]]] | None = None

    def run(self, case: Case) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Check, time and write down one row; return it, and the seconds of every contender's calls.

        A row whose own result disagrees with the float64 reference is ``refused`` and has no figures. The last row is
        kept: asking for it again costs nothing. Raises LeftOut if the time of the run is used up.
        """
        if self._last is None or self._last[0] != case:
            if time.monotonic() > self._until:
                raise LeftOut(f"{case}: the time is used up")
            row, samples = self._measure(case)
            before = self._before.get(record.key(row))
            row["lost"] = lost(row, before, quick=self.quick)
            self.rows.append(row)
            self.file = record.write(self.results, self.rows)  # a run that is stopped leaves what it has
            self._last = case, row, samples
        return self._last[1:]

    def row(self, case: Case) -> dict[str, Any]:
        """Return what a row says before anything is timed."""
        work = case.workload
        return {
            "machine": self.machine,
            "workload": work.name,
            "source": work.source,
            "batch": case.batch,
            "default": case.batch == work.batch,
            "mode": case.mode,
            "precision": case.precision,
            "complete": False,
            "votes_bytes": work.votes_bytes(case.batch, PRECISIONS[case.precision].dtype.itemsize),
            "operations": work.operations(case.batch, case.training),
            "goal": None if self.quick else goal_of(case, self.machine.get("three_launches")),
            "load": os.getloadavg()[0],
            "alternatives": {},
        }

    def _measure(self, case: Case) -> tuple[dict[str, Any], dict[str, list[float]]]:
        row, entries = self.row(case), {}
        ready = self._check(case, entries)
        if OURS not in ready:
            return row | {"refused": entries[OURS]["failed"]}, {}
        row["gate"] = {name: ready[OURS][name] for name in ("errors", "allowed")}
        samples: dict[str, list[float]] = {}
        most = None
        if self.clock:
            samples = self._turns({name: verdict["seconds"] for name, verdict in ready.items()}, entries)
            rate = 2 * self.plan.sgemm**3 / quantiles(samples.pop("sgemm"))["median"]
            if "peak" in samples:
                most = self.machine["threads"] * MULTIPLY_ADDS / quantiles(samples.pop("peak"))["median"]
            memory = self._memory(case)
        else:
            for name in ready:
                try:
                    entries[name] = entries.get(name, {}) | self._remotes[name].call(self._patience, "measure", case)
                except WorkerError as error:
                    entries[name] = {"failed": str(error)}
            rate = self.machine["rates"][case.precision]
            memory = {name: entry["memory"] for name, entry in entries.items() if "memory" in entry}
            row["triton"] = entries[TRITON]
        if "median" not in entries[OURS]:
            return row | {"refused": entries[OURS]["failed"]}, {}
        row["fastcaps"] = entries[OURS]
        row["alternatives"] = {name: entries[name] for name in self.names if name in entries}
        timed = {name: device_seconds(one) for name, one in row["alternatives"].items() if "median" in one}
        own, fastest = device_seconds(row["fastcaps"]), min(timed, key=lambda name: timed[name], default=None)
        reached = row["operations"] / own
        row |= {"fastest": fastest, "speedup": timed[fastest] / own if fastest else None}
        row |= {"gflops": reached / 1e9, "sgemm_gflops": rate / 1e9, "sgemm_share": reached / rate}
        if most:
            row |= {"peak_gflops": most / 1e9, "peak_share": reached / most}
        row["doubts"] = doubts(row)
        return row | {"complete": tuple(self.names) == ALTERNATIVES, "memory": memory}, samples

    def _check(self, case: Case, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Bring all to where they can be timed; return their verdicts, and add to ``entries`` those that failed."""
        for stale in self._gates.glob("*.pt"):
            if not stale.name.startswith(f"{case.workload.name}-{case.batch}-"):
                stale.unlink()
        others = [TRITON] * (TRITON in self._remotes) + suited(
            self.names, case.workload, case.batch, "cpu" if self.clock else "cuda"
        )
        votes = case.workload.votes_bytes(case.batch)
        together = others if votes < _TOGETHER * self.machine["memory"] else []
        ready = {}
        for name in (OURS, *others):
            if name not in together:
                self._remotes[name].begin("check", case, name)
            verdict, complaint = self._verdict(name)
            if complaint and is_compiled(name) and self.clock:  # a second chance
                self._remotes[name].begin("check", case, name, True)
                note = f"{complaint}; run again without vectorised loop tails"
                verdict, complaint = self._verdict(name)
                entries[name] = {"note": note}
            if complaint:
                entries[name] = entries.get(name, {}) | {"failed": complaint}
            else:
                ready[name] = verdict
                if verdict.get("settings"):
                    entries[name] = {"settings": verdict["settings"]}
            if name == OURS:
                if complaint:
                    break
                for one in together:  # they find the float64 result that has been made
                    self._remotes[one].begin("check", case, one)
        return ready

    def _verdict(self, name: str) -> tuple[dict[str, Any], str]:
        """Wait for a process to check a case; return what it says, and what is wrong."""
        try:
            verdict = self._remotes[name].finish(self._patience)
        except WorkerError as error:
            return {}, str(error)
        wrong = verdict["complaint"]
        return verdict, f"wrong result: {wrong}" if wrong and name in ALTERNATIVES else wrong

    def _turns(self, seconds: dict[str, float], entries: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """Time all in turns, and with them a large matrix product and, where there is native code, the machine's peak;
        return the seconds of their calls."""
        contenders = []
        yardsticks: dict[str, tuple[Any, ...]] = {"sgemm": ("time_sgemm", self.plan.sgemm)}
        if self.machine["capability"]:
            yardsticks["peak"] = ("time_peak",)
        for name, asked in yardsticks.items():
            timer = partial(self._remotes[OURS].call, self._patience, *asked)
            contenders.append(Contender(name, timer, timer(1, 1)[0], rival=False))
        for name, took in seconds.items():
            timer = partial(self._remotes[name].call, self._patience, "time")
            contenders.append(Contender(name, timer, took, rival=name != OURS))
        take_turns(contenders, self.plan)
        for one in contenders:
            found = quantiles(one.samples) if one.samples else {"failed": one.error}
            entries[one.name] = entries.get(one.name, {}) | found
        return {one.name: one.samples for one in contenders if one.samples}

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
            finally:
                remote.close()
        return found

    def close(self) -> None:
        """End the processes."""
        for remote in self._remotes.values():
            remote.close()
        self._scratch.cleanup()
