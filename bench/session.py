"""One run of the benchmark: rows are held to the gate, timed in turns, completed and written down here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, bytes_needed, is_compiled
from bench.goals import lost
from bench.memory_probe import peak_supported
from bench.runner import PRECISIONS, Case, Remote, WorkerError
from bench.timing import FULL, Contender, Plan, quantiles, take_turns

__all__ = ["Session", "Settings"]

_MEMORY_ALTERNATIVE = "batched-matmul"
"""The alternative whose peak memory is measured beside ours, at default batches."""

_FITS, _TOGETHER = 0.6, 0.4
"""Shares of the machine's memory: what one alternative may need, and what all may need that are prepared at once."""

_PREPARE, _BLOCK = 240.0, 120.0
"""Seconds after which a process is given up: making ready, compilation included, and one block of calls."""


@dataclass(frozen=True)
class Settings:
    """What the command line asked for; see ``pytest bench --help``."""

    results: Path
    threads: int = 1
    plan: Plan = FULL
    quick: bool = False
    compiled: bool = True
    alternatives: bool = True
    memory: bool = True
    available: float = field(default_factory=record.memory)  # bytes
    device: str = "cpu"
    seconds: float = 270.0  # a GPU's run, all of it
    slice: float = 0.06  # seconds that the timed calls of one measurement on a GPU take together
    processes: int | None = None  # that compile at a time there; by default two fewer than cores, twelve at most

    @property
    def names(self) -> tuple[str, ...]:
        """The alternatives that take part."""
        return tuple(n for n in ALTERNATIVES if self.alternatives and (self.compiled or not is_compiled(n)))


class Session:
    """Processes, machine and rows of one run. ``document`` is what is written as JSON, ``files`` what was written."""

    kind = "full"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcaps-bench-")
        folder = Path(self._scratch.name)
        self._log, self._gates = folder / "processes.log", folder
        self.document: dict[str, Any] = {
            "format": 2,
            "kind": "quick" if settings.quick else self.kind,
            "machine": record.describe(settings.threads),
            "sgemm_size": settings.plan.sgemm,
            "rows": [],
        }
        self.files: list[Path] = []
        self.names = settings.names
        self._remotes = {name: self._remote() for name in (OURS, *self.names)} if settings.device == "cpu" else {}
        self._before = {record.key(row): row for row in record.merge(record.load(record.RESULTS.glob("*.json")))}
        self._last: tuple[Case, dict[str, Any], dict[str, list[float]]] | None = None

    def _remote(self) -> Remote:
        return Remote(self._log, self.settings.threads, "cpu", 0.0, self.settings.plan.sgemm, self._gates)

    def run(self, case: Case) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Check, time and write down one row; return it, and the seconds of every contender's calls.

        A row whose own result disagrees with the float64 reference is ``refused`` and has no figures. The last row is
        kept: asking for it again costs nothing.
        """
        if self._last is None or self._last[0] != case:
            self._last = (case, *self._measure(case))
        return self._last[1:]

    def row(self, case: Case) -> dict[str, Any]:
        """Return what a row says before anything is timed."""
        work = case.workload
        return {
            "workload": work.name,
            "source": work.source,
            "batch": case.batch,
            "default": case.batch == work.batch,
            "mode": case.mode,
            "precision": case.precision,
            "votes_bytes": work.votes_bytes(case.batch, PRECISIONS[case.precision].dtype.itemsize),
            "inputs_bytes": work.inputs_bytes(case.batch),
            "operations": work.operations(case.batch, case.training),
            "goal": None if self.settings.quick else work.goal_at(case.batch, case.training),
            "alternatives": {},
        }

    def _measure(self, case: Case) -> tuple[dict[str, Any], dict[str, list[float]]]:
        row = self.row(case)
        failures = self._left_out(case)
        ours = self._remotes[OURS]
        for stale in self._gates.glob("*.pt"):
            if not stale.name.startswith(f"{case.workload.name}-{case.batch}-"):
                stale.unlink()
        try:
            verdict = ours.call(_PREPARE, "check", case, OURS)
        except WorkerError as error:
            verdict = {"complaint": str(error), "errors": {}, "allowed": {}}
        row["gate"] = {name: verdict[name] for name in ("errors", "allowed")}
        if verdict["complaint"]:
            return self._write(row | {"refused": verdict["complaint"]}), {}
        notes, contenders = self._prepare(case, failures)
        subject = Contender(OURS, partial(self._time, ours), self.settings.plan.own, fewest=2)
        sgemm = Contender("sgemm", partial(self._time, ours, method="time_sgemm"), self.settings.plan.budget)
        take_turns([subject, sgemm, *contenders], self.settings.plan)
        samples = {contender.name: contender.samples for contender in (subject, *contenders) if contender.samples}
        if subject.error or not samples.get(OURS):
            return self._write(row | {"refused": subject.error or "no calls were timed"}), {}
        errors = {contender.name: {"failed": contender.error} for contender in contenders if contender.error}
        for name in self.names:
            entry = failures.get(name) or errors.get(name) or quantiles(samples[name])
            row["alternatives"][name] = entry | ({"note": notes[name]} if name in notes else {})
            if name in notes:  # a process that had to be restarted for a case is not kept for the next
                self._remotes[name].safe = False
                self._remotes[name].close()
        row["fastcaps"] = quantiles(samples[OURS])
        sgemm_rate = 2 * self.settings.plan.sgemm**3 / quantiles(sgemm.samples)["median"]
        rate = row["operations"] / row["fastcaps"]["median"]
        row |= {"gflops": rate / 1e9, "sgemm_gflops": sgemm_rate / 1e9, "sgemm_share": rate / sgemm_rate}
        compare(row, lambda entry: entry["median"])
        row["memory"] = self._memory(case, failures)
        return self._write(row), samples

    def _prepare(self, case: Case, failures: dict[str, dict[str, str]]) -> tuple[dict[str, str], list[Contender]]:
        """Bring the alternatives to where they can be timed, and add to ``failures``; return notes and contenders."""
        taking_part = [name for name in self.names if name not in failures]
        needed = sum(bytes_needed(name, case.workload, case.batch, case.training) for name in taking_part)
        at_once = needed < _TOGETHER * self.settings.available
        notes: dict[str, str] = {}
        contenders = []
        for name in taking_part if at_once else ():
            self._remotes[name].begin("check", case, name)
        for name in taking_part:
            remote = self._remotes[name]
            try:
                if not at_once:
                    remote.begin("check", case, name)
                verdict = self._again(case, name, notes, lambda remote=remote: remote.finish(_PREPARE))
            except WorkerError as error:
                failures[name] = {"failed": str(error)}
                continue
            if verdict["complaint"]:
                failures[name] = {"failed": f"disagrees with the reference: {verdict['complaint']}"}
                continue
            contender = Contender(name, partial(self._time, remote), self.settings.plan.budget)
            if not is_compiled(name) and verdict["seconds"] > contender.budget:
                # a call that used up its time already is not made again
                contender.samples, contender.spent, contender.turns = [verdict["seconds"]], verdict["seconds"], 1
                contender.estimate = verdict["seconds"]
            contenders.append(contender)
        return notes, contenders

    def _again(self, case: Case, name: str, notes: dict[str, str], answer: Callable[[], Any]) -> dict[str, Any]:
        """Return a verdict; a compiled process that dies or errs has a second chance without vectorised loop tails."""
        remote = self._remotes[name]
        try:
            verdict: dict[str, Any] = answer()
            reason = f"wrong result: {verdict['complaint']}" if verdict["complaint"] else ""
        except WorkerError as error:
            if remote.alive or not is_compiled(name):
                raise
            reason = str(error)
        if not reason or not is_compiled(name):
            return verdict
        notes[name] = f"{reason}; run again without vectorised loop tails"
        remote.close()
        remote.safe = True
        return remote.call(_PREPARE, "check", case, name)

    @staticmethod
    def _time(remote: Remote, calls: int, warm: int, method: str = "time") -> list[float]:
        return remote.call(_BLOCK, method, calls, warm)

    def _left_out(self, case: Case) -> dict[str, dict[str, str]]:
        """Return the alternatives that do not fit into memory, with the reason."""
        found = {}
        for name in self.names:
            needed = bytes_needed(name, case.workload, case.batch, case.training)
            if needed > _FITS * self.settings.available:
                times = needed / case.workload.votes_bytes(case.batch)
                machine = self.settings.available / 1e9
                found[name] = {
                    "left_out": f"would need {needed / 1e9:.0f} GB, {times:.0f} times the votes, of {machine:.0f} GB"
                }
        return found

    def _memory(self, case: Case, left_out: dict[str, Any]) -> dict[str, Any]:
        """Measure the row's peak memory, ours and (at the default batch) one alternative's, each in a fresh process."""
        why_not = "not asked for" if not self.settings.memory else peak_supported()
        if why_not:
            return {"left_out": why_not}
        names = [OURS]
        if case.batch == case.workload.batch and _MEMORY_ALTERNATIVE in self.names:
            names += [] if _MEMORY_ALTERNATIVE in left_out else [_MEMORY_ALTERNATIVE]
        found: dict[str, Any] = {}
        for name in names:
            fresh = self._remote()
            try:
                found[name] = fresh.call(_PREPARE, "memory", case, name)
            except WorkerError as error:
                found[name] = {"failed": str(error)}
            finally:
                fresh.close()
        return found

    def _write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row, with what it lost, and write everything so far: a run that is stopped leaves what it has."""
        before = self._before.get(record.key({"machine": self.document["machine"], **row}))
        row["lost"] = lost(row, before, quick=self.settings.quick)
        self.document["rows"].append(row)
        self.files = [record.write(self.settings.results, self.document)]
        return row

    def close(self) -> None:
        """End the processes."""
        for remote in self._remotes.values():
            remote.close()
        self._scratch.cleanup()


def compare(row: dict[str, Any], seconds: Callable[[dict[str, Any]], float]) -> None:
    """Name the fastest alternative of a row so far, and how much faster the package is."""
    timed = {name: seconds(entry) for name, entry in row["alternatives"].items() if "median" in entry}
    row["fastest"] = min(timed, key=lambda name: timed[name]) if timed else None
    row["speedup"] = timed[row["fastest"]] / seconds(row["fastcaps"]) if timed else None
