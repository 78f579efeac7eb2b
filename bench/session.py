"""One run of the benchmark: rows are prepared, held to the gate, timed, completed and written down here."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import machine, report
from bench.alternatives import ALTERNATIVES, OURS, build, bytes_needed, is_compiled, runner
from bench.gate import SAME, Gate, Verdict
from bench.memory_probe import measure_fresh, peak_of_pass, peak_supported
from bench.timing import Contender, Plan, Schedule, Sgemm, quantiles
from bench.worker import Worker, WorkerError
from bench.workloads import Workload

__all__ = ["Case", "Refused", "Session", "Settings"]

_MEMORY_ALTERNATIVE = "batched-matmul"
"""The alternative whose peak memory is measured beside ours, at default batches."""

_QUICK_MEMORY = ("tsai-c10-conv1",)
"""Workloads whose memory a quick run measures."""

_FITS, _TOGETHER = 0.6, 0.4
"""Shares of the machine's memory: what one alternative may need, and what all may need that are prepared at once."""


class Refused(Exception):
    """The result disagrees with the float64 reference: there is no speed figure."""


@dataclass(frozen=True)
class Settings:
    """What the command line asked for; see ``pytest bench --help``. A run has ``available`` bytes of memory."""

    results: Path
    threads: int
    plan: Plan
    quick: bool = False
    compiled: bool = True
    alternatives: bool = True
    memory: bool = True
    available: float = field(default_factory=machine.memory)


@dataclass
class Case:
    """One row on its way.

    Attributes
    ----------
    workload, batch, training
        Which row.
    call
        What is timed: the package's own call or training step.
    schedule
        Brings the alternatives in between; see :class:`bench.timing.Schedule`.
    left_out
        Alternatives that need more memory than there is, and why.
    """

    workload: Workload
    batch: int
    training: bool
    call: Callable[[], Any]
    schedule: Schedule
    verdict: Verdict
    sgemm: Contender
    contenders: list[Contender]
    failures: dict[str, str]
    left_out: dict[str, str]


class Session:
    """Workers, machine and rows of one run.

    Attributes
    ----------
    document
        What is written as JSON: the machine, and a row for each case.
    files
        What was written.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.set_num_threads(settings.threads)
        self.document: dict[str, Any] = {
            "format": 1,
            "kind": "quick" if settings.quick else "full",
            "machine": machine.describe(settings.threads),
            "sgemm_size": settings.plan.sgemm,
            "rows": [],
        }
        self.files: list[Path] = []
        self._sgemm = Sgemm(settings.plan.sgemm)
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcaps-bench-")
        log = Path(self._scratch.name) / "workers.log"
        names = [n for n in ALTERNATIVES if settings.alternatives and (settings.compiled or not is_compiled(n))]
        self._workers = {name: Worker(name, settings.threads, log) for name in names}
        self._gate: tuple[tuple[str, int], Gate] | None = None
        self._no_memory = "left out" if not settings.memory else peak_supported()

    def _gate_of(self, workload: Workload, batch: int) -> Gate:
        """Return the gate of a workload at a batch; the last one is kept, as forward and training step share it."""
        key = (workload.name, batch)
        if self._gate is None or self._gate[0] != key:
            self._gate = None
            self._gate = (key, Gate(workload, workload.inputs(batch)))
        return self._gate[1]

    def prepare(self, workload: Workload, batch: int, training: bool) -> Case:
        """Bring one row to where it can be timed: results of everyone computed, and held to the gate.

        Raises
        ------
        Refused
            If the package's own result disagrees with the float64 reference.
        """
        left_out = self._left_out(workload, batch, training)
        taking_part = {name: worker for name, worker in self._workers.items() if name not in left_out}
        needed = sum(bytes_needed(name, workload, batch, training) for name in taking_part)
        at_once = needed < _TOGETHER * self.settings.available
        failures: dict[str, str] = {}

        def begin(name: str) -> None:
            try:
                taking_part[name].begin(workload.name, batch, training)
            except WorkerError as error:
                failures[name] = str(error)

        for name in taking_part if at_once else ():
            begin(name)
        gate = self._gate_of(workload, batch)
        call = runner(build(OURS, workload), workload.inputs(batch), training)
        verdict = gate.judge(call())

        contenders: list[Contender] = []
        for name, worker in taking_part.items():
            if not at_once:
                begin(name)
            if name not in failures:
                failure = self._check(worker, gate)
                if failure:
                    failures[name] = failure
                else:
                    contenders.append(self._contender(worker))
        if not verdict.passed:
            self._record(self._row(workload, batch, training) | {"refused": verdict.complaint})
            raise Refused(verdict.complaint)
        sgemm = Contender("sgemm", self._sgemm.timer)
        schedule = Schedule(call, [sgemm, *contenders], self.settings.plan)
        return Case(workload, batch, training, call, schedule, verdict, sgemm, contenders, failures, left_out)

    def _contender(self, worker: Worker) -> Contender:
        """Return a worker as one that takes turns; a call that used up its time already is not made again."""
        if is_compiled(worker.name) or worker.first <= self.settings.plan.budget:
            return Contender(worker.name, worker.time)
        return Contender(worker.name, worker.time, [worker.first], estimate=worker.first, spent=worker.first)

    def _left_out(self, workload: Workload, batch: int, training: bool) -> dict[str, str]:
        """Return the alternatives that do not fit into memory, with the reason."""
        found = {}
        for name in self._workers:
            needed = bytes_needed(name, workload, batch, training)
            if needed > _FITS * self.settings.available:
                found[name] = (
                    f"would need {needed / 1e9:.0f} GB, {needed / workload.votes_bytes(batch):.0f} times the votes, of "
                    f"{self.settings.available / 1e9:.0f} GB that the machine has"
                )
        return found

    @staticmethod
    def _check(worker: Worker, gate: Gate) -> str:
        """Wait for a worker's result and return why it cannot take part, or an empty string.

        A compiled result that is wrong has the same cause as a crash, and the same second chance.
        """
        try:
            verdict = gate.judge(worker.ready(), SAME)
            if not verdict.passed and is_compiled(worker.name) and not worker.note:
                verdict = gate.judge(worker.again(f"wrong result: {verdict.complaint}"), SAME)
        except WorkerError as error:
            return str(error)
        return "" if verdict.passed else f"disagrees with the reference: {verdict.complaint}"

    def _row(self, workload: Workload, batch: int, training: bool) -> dict[str, Any]:
        """Return what a row says before anything is timed."""
        return {
            "workload": workload.name,
            "source": workload.source,
            "batch": batch,
            "default": batch == workload.batch,
            "mode": "training step" if training else "forward",
            "dtype": "float32",
            "votes_bytes": workload.votes_bytes(batch),
            "operations": workload.operations(batch, training),
            "inputs_bytes": workload.inputs_bytes(batch),
            "goal": None if self.settings.quick else workload.goal_at(batch, training),
        }

    def finish(self, case: Case, samples: list[float]) -> dict[str, Any]:
        """Complete a timed row, write it down, and return it."""
        row = self._row(case.workload, case.batch, case.training)
        mine = quantiles(samples)
        sgemm = self._sgemm.rate(quantiles(case.sgemm.samples)["median"])
        measured = {contender.name: contender for contender in case.contenders}
        alternatives: dict[str, Any] = {}
        for name, worker in self._workers.items():
            if name in case.left_out:
                alternatives[name] = {"left_out": case.left_out[name]}
                continue
            contender = measured.get(name)
            failure = case.failures[name] if contender is None else contender.error
            alternatives[name] = {"failed": failure} if contender is None or failure else quantiles(contender.samples)
            if worker.note:
                alternatives[name]["note"] = worker.note
            worker.end()
        timed = {name: entry["median"] for name, entry in alternatives.items() if "median" in entry}
        fastest = min(timed, key=lambda name: timed[name]) if timed else None
        rate = row["operations"] / mine["median"]
        row |= {
            "gate": {"errors": case.verdict.errors, "allowed": case.verdict.allowed},
            "fastcaps": mine,
            "alternatives": alternatives,
            "fastest": fastest,
            "speedup": timed[fastest] / mine["median"] if fastest else None,
            "gflops": rate / 1e9,
            "sgemm_gflops": sgemm / 1e9,
            "sgemm_share": rate / sgemm,
            "memory": self._memory(case),
        }
        self._record(row)
        return row

    def _memory(self, case: Case) -> dict[str, Any]:
        """Measure the row's peak memory, ours and (at the default batch) one alternative's, each in a fresh process."""
        if self._no_memory:
            return {"left_out": self._no_memory}
        if self.settings.quick and case.workload.name not in _QUICK_MEMORY:
            return {"left_out": "quick run"}
        names = [OURS]
        usual = case.batch == case.workload.batch or self.settings.quick
        if usual and _MEMORY_ALTERNATIVE in self._workers and _MEMORY_ALTERNATIVE not in case.left_out:
            names.append(_MEMORY_ALTERNATIVE)
        found: dict[str, Any] = {}
        for name in names:
            try:
                peak = measure_fresh(
                    peak_of_pass, name, case.workload, case.batch, case.training, self.settings.threads
                )
            except RuntimeError as error:
                found[name] = {"failed": str(error)}
            else:
                found[name] = peak.entry()
        return found

    def _record(self, row: dict[str, Any]) -> None:
        """Add a row and write everything so far: a run that is stopped leaves what it has."""
        self.document["rows"].append(row)
        about = self.document["machine"]
        stamp = about["date"][:16].replace(":", "")
        name = f"bench-{machine.slug(about['device'])}-{about['threads']}t-{stamp}-{about['commit']}"
        folder = self.settings.results
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"{name}.json", folder / f"{name}.md"]
        self.files[0].write_text(json.dumps(self.document, indent=1) + "\n")
        self.files[1].write_text(report.markdown(self.document))

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            worker.close()
        self._scratch.cleanup()
