"""One run of the benchmark: rows are held to the gate, timed in turns, completed and written down here."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, is_compiled
from bench.device import goal_of
from bench.goals import device_seconds, lost
from bench.runner import PRECISIONS, TRITON, Case, Remote, Runner, WorkerError
from bench.timing import FULL, Contender, Plan, quantiles, take_turns

__all__ = ["LeftOut", "Session", "Settings"]

_MEMORY_ALTERNATIVE = "batched-matmul"
"""The alternative whose peak memory is measured beside ours, at default batches."""

_FITS, _TOGETHER = 0.6, 0.01
"""Shares of the machine's memory: what a process may use, and the votes of rows whose alternatives start at once."""

_PATIENCE = 240.0
"""Seconds after which a process is given up; a quarter of them on a GPU, where time is dear."""


class LeftOut(Exception):
    """The time is used up: this row has no figures."""


@dataclass(frozen=True)
class Settings:
    """What the command line asked for; see ``pytest bench --help``."""

    results: Path
    threads: int = 1
    plan: Plan = FULL
    quick: bool = False
    compiled: bool = True
    memory: float = field(default_factory=record.memory)  # bytes that there are
    device: str = "cpu"
    clock: bool = True  # whether a row is timed in turns by the host's clock, as on a CPU
    seconds: float = float("inf")  # for the whole run
    slice: float = 0.06  # seconds that the timed calls of one measurement on a GPU take together

    @property
    def names(self) -> tuple[str, ...]:
        """The alternatives that take part."""
        return tuple(name for name in ALTERNATIVES if self.compiled or not is_compiled(name))


class Session:
    """Processes, machine and rows of one run. ``rows`` are what is written as JSON, to ``file``."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.names = settings, settings.names
        self.rows: list[dict[str, Any]] = []
        self.file: Path | None = None
        self._patience = _PATIENCE if settings.clock else _PATIENCE / 4
        self._until = time.monotonic() + settings.seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcaps-bench-")
        self._gates = Path(self._scratch.name)
        ours = (OURS,) if settings.clock else (OURS, TRITON)
        self._remotes = {name: self._remote() for name in (*ours, *self.names)}
        self.machine = record.describe(settings.threads) | {"kind": "quick" if settings.quick else "full"}
        if settings.clock:
            self.machine["sgemm_size"] = settings.plan.sgemm
        else:
            self.machine |= self._remotes[OURS].call(self._patience, "describe")
        self._before = {record.key(row): row for row in record.merge(record.load(record.RESULTS))}
        self._last: tuple[Case, dict[str, Any], dict[str, list[float]]] | None = None

    def _remote(self) -> Remote:
        limit = _FITS * self.settings.memory if self.settings.clock else None
        made = Runner, self.settings.device, self.settings.slice, self._gates
        return Remote(self.settings.threads, *made, memory=limit)

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
            row["lost"] = lost(row, before, quick=self.settings.quick)
            self.rows.append(row)
            self.file = record.write(self.settings.results, self.rows)  # a run that is stopped leaves what it has
            self._last = case, row, samples
        return self._last[1:]

    def row(self, case: Case) -> dict[str, Any]:
        """Return what a row says before anything is timed."""
        work = case.workload
        goal = None if self.settings.quick else work.goal_at(case.batch, case.training)
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
            "goal": goal if self.settings.clock else goal_of(case, self.machine["three_launches"]),
            "alternatives": {},
        }

    def _measure(self, case: Case) -> tuple[dict[str, Any], dict[str, list[float]]]:
        row, entries = self.row(case), {}
        ready = self._check(case, entries)
        if OURS not in ready:
            return row | {"refused": entries[OURS]["failed"]}, {}
        row["gate"] = {name: ready[OURS][name] for name in ("errors", "allowed")}
        samples: dict[str, list[float]] = {}
        if self.settings.clock:
            samples = self._turns({name: verdict["seconds"] for name, verdict in ready.items()}, entries)
            rate = 2 * self.settings.plan.sgemm**3 / quantiles(samples.pop("sgemm"))["median"]
            memory = self._memory(case, entries)
        else:
            for name in ready:
                entries[name] = self._told(name, "measure", case)
            rate = self.machine["rates"][case.precision]
            memory = {name: entry["memory"] for name, entry in entries.items() if "memory" in entry}
            row["triton"] = entries[TRITON]
        if "median" not in entries[OURS]:
            return row | {"refused": entries[OURS]["failed"]}, {}
        row["fastcaps"] = entries[OURS]
        row["alternatives"] = {name: entries[name] for name in self.names}
        timed = {name: device_seconds(one) for name, one in row["alternatives"].items() if "median" in one}
        own, fastest = device_seconds(row["fastcaps"]), min(timed, key=lambda name: timed[name], default=None)
        reached = row["operations"] / own
        row |= {"fastest": fastest, "speedup": timed[fastest] / own if fastest else None}
        row |= {"gflops": reached / 1e9, "sgemm_gflops": rate / 1e9, "sgemm_share": reached / rate}
        return row | {"complete": self.names == ALTERNATIVES, "memory": memory}, samples

    def _check(self, case: Case, entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Bring all to where they can be timed; return their verdicts, and add to ``entries`` those that failed."""
        for stale in self._gates.glob("*.pt"):
            if not stale.name.startswith(f"{case.workload.name}-{case.batch}-"):
                stale.unlink()
        others = [name for name in self._remotes if name != OURS]
        votes = case.workload.votes_bytes(case.batch)
        together = others if votes < _TOGETHER * self.machine["memory"] else []
        ready = {}
        for name in (OURS, *others):
            if name not in together:
                self._remotes[name].begin("check", case, name)
            verdict, complaint = self._verdict(name)
            if complaint and is_compiled(name) and self.settings.clock:  # a second chance
                self._remotes[name].begin("check", case, name, True)
                note = f"{complaint}; run again without vectorised loop tails"
                verdict, complaint = self._verdict(name)
                entries[name] = {"note": note}
            if complaint:
                entries[name] = entries.get(name, {}) | {"failed": complaint}
            else:
                ready[name] = verdict
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
        """Time all in turns, and a large matrix product with them; return the seconds of their calls."""
        plan = self.settings.plan
        sgemm = partial(self._remotes[OURS].call, self._patience, "time_sgemm", plan.sgemm)
        contenders = [Contender("sgemm", sgemm, sgemm(1, 1)[0], plan.budget)]
        for name, took in seconds.items():
            timer = partial(self._remotes[name].call, self._patience, "time")
            contenders.append(Contender(name, timer, took, plan.own if name == OURS else plan.budget))
        take_turns(contenders, plan)
        for one in contenders:
            found = quantiles(one.samples) if one.samples else {"failed": one.error}
            entries[one.name] = entries.get(one.name, {}) | found
        return {one.name: one.samples for one in contenders if one.samples}

    def _told(self, name: str, method: str, *given: Any) -> dict[str, Any]:
        """Return what a process says, or why it failed."""
        try:
            told: dict[str, Any] = self._remotes[name].call(self._patience, method, *given)
        except WorkerError as error:
            return {"failed": str(error)}
        return told

    def _memory(self, case: Case, entries: dict[str, Any]) -> dict[str, Any]:
        """Measure the row's peak memory, ours and (at the default batch) one alternative's, each in a fresh process."""
        if self.settings.quick:
            return {}
        found: dict[str, Any] = {}
        also = case.batch == case.workload.batch and "median" in entries[_MEMORY_ALTERNATIVE]
        for name in (OURS, *[_MEMORY_ALTERNATIVE] * also):
            fresh = self._remote()
            try:
                found[name] = fresh.call(self._patience, "memory", case, name)
            except WorkerError as error:
                found[name] = {"failed": str(error)}
            finally:
                fresh.close()
        return found

    def close(self) -> None:
        """End the processes."""
        for remote in self._remotes.values():
            remote.close()
        self._scratch.cleanup()
