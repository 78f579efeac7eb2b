"""One run of the benchmark on a GPU, in a given time: what matters most comes first, what is left out is said.

First every row runs by the package and by eager PyTorch; then, as far as the time goes, torch.compile of the
alternatives joins, a wave of rows at a time: the wave's processes compile side by side, and are timed one by one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, is_compiled
from bench.goals import device_seconds
from bench.routings import AttentionPass
from bench.runner import PRECISIONS, TRITON, Case, Remote, WorkerError
from bench.session import Session, Settings, compare
from bench.workload import Workload
from bench.workloads import WORKLOADS

__all__ = ["BATCHES", "COMPILED", "SECONDS", "DeviceSession", "LeftOut", "cases", "goal_of"]

BATCHES = (128, 1, 32)  # in order of importance
COMPILED = "torch.compile"  # the contender that stands for all alternatives that have to be compiled

_CALL_SECONDS = 60.0
"""An answer that takes longer than this is given up: a hang, or a compilation that is not worth the time."""

_DESCRIBE_SECONDS = 120.0
_EAGER_SHARE = 0.55
_MEMORY_SHARE = 0.05

SECONDS = {
    ("tsai-c10-conv1", False, "fp32"): 0.30e-3,
    ("tsai-c10-conv1", True, "fp32"): 1.5e-3,
    ("tsai-c10-conv1", False, "tf32"): 0.15e-3,
    ("tsai-c10-conv1", True, "tf32"): 0.8e-3,
    ("tsai-c10-fc", False, "fp32"): 0.03e-3,
}
"""What was aimed at on an H200, batch 128: of a workload, whether it is a training step, and the precision."""

_SPEEDUP = {False: 10.0, True: 6.0}
"""Of ``tsai-c10-conv1``, batch 128, float32, against the fastest alternative: forward, and a training step."""


class LeftOut(Exception):
    """The time is used up: this row has no figures, or none of torch.compile."""


def cases(workloads: Sequence[Workload], batches: Sequence[int] = (), precisions: Sequence[str] = ()) -> list[Case]:
    """Return the rows of a run in order of importance: the large batch in float32 first, the middle one's rest last.

    A workload whose children are copies, as it is large in itself, runs at its own batch, in the large one's place.
    """
    found = []
    for batch in batches or BATCHES:
        for precision in precisions or PRECISIONS:
            for workload in workloads:
                own = workload.copies > 1 and not batches
                if not own or batch == BATCHES[0]:
                    size = workload.batch if own else batch
                    found += [Case(workload, size, training, precision) for training in (False, True)]
    names = list(WORKLOADS)

    def importance(case: Case) -> tuple[int, int, int]:
        batch = BATCHES.index(case.batch) if case.batch in BATCHES else len(BATCHES)
        batch = 0 if case.workload.copies > 1 else batch
        precision = list(PRECISIONS).index(case.precision)
        place = names.index(case.workload.name) if case.workload.name in names else 0
        tier = precision if batch == 0 else 2 * batch + 1 + (precision > 0)
        return (0 if (batch, place) == (0, 0) else 1 + tier, precision, place)

    return sorted(found, key=importance)


def goal_of(case: Case, launches: float) -> dict[str, float]:
    """Return what a row ought to reach: ``seconds``, ``speedup``, ``latency``, ``memory_share``, or some of them.

    ``launches`` are the seconds of three of the smallest launches.
    """
    goal: dict[str, float] = {}
    workload = case.workload
    if case.batch == BATCHES[0] or workload.copies > 1:
        wanted = SECONDS.get((workload.name, case.training, case.precision))
        if isinstance(workload.routing, AttentionPass) or workload.outweighs(case.batch):
            goal["memory_share"] = _MEMORY_SHARE
        if wanted is not None:
            goal["seconds"] = wanted
        if workload.name == "tsai-c10-conv1" and case.precision == "fp32":
            goal["speedup"] = _SPEEDUP[case.training]
    elif case.batch == 1 and not case.training:
        goal = {"latency": launches}
    return goal


class DeviceSession(Session):
    """Processes, machine and rows of one run on a GPU (``device="cpu"`` tries the machinery without one)."""

    kind = "device"

    def __init__(self, settings: Settings, rows: Sequence[Case]) -> None:
        super().__init__(settings)
        self._remotes = {}
        self._start = time.monotonic()
        self._order = list(rows)
        self._main = self._remote()
        self._compilers: list[Remote] = []
        self._compiled: set[Case] = set()
        self._rows: dict[Case, dict[str, Any]] = {}
        self.document["machine"] |= self._main.call(_DESCRIBE_SECONDS, "describe", 5 * settings.slice)
        self.document["left_out"] = []

    def _remote(self) -> Remote:
        device = self.settings.device
        return Remote(self._log, 1 if device == "cuda" else 2, device, self.settings.slice)

    def _until(self, share: float = 1.0) -> float:
        return self._start + share * self.settings.seconds

    def _leave_out(self, case: Case, what: str) -> LeftOut:
        self.document["left_out"].append(f"{case}: {what}")
        self._save()
        return LeftOut(f"{what}: the time is used up")

    def _save(self) -> None:
        self.files = [record.write(self.settings.results, self.document)]

    def row(self, case: Case) -> dict[str, Any]:
        """Return what a row says before anything is timed."""
        launches = self.document["machine"]["three_launches"]["latency"]
        return super().row(case) | {"goal": goal_of(case, launches)}

    def _measure(self, case: Case) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """Check and time one row by the package, by its Triton kernels, and by eager PyTorch; write it down.

        Raises LeftOut if there is no time left.
        """
        share = _EAGER_SHARE if self.settings.compiled and self.settings.alternatives else 1.0
        if time.monotonic() > self._until(share):
            raise self._leave_out(case, "all of it")
        row = self.row(case)
        entry, row["gate"] = self._one(self._main, case, OURS)
        if "failed" in entry:
            return self._write(row | {"refused": entry["failed"]}), {}
        row["fastcaps"] = entry
        row["triton"], _ = self._one(self._main, case, TRITON)
        for name in self.names:
            if not is_compiled(name):
                row["alternatives"][name], _ = self._one(self._main, case, name)
        measured = {OURS: entry, **row["alternatives"]}
        row["memory"] = {name: one["memory"] for name, one in measured.items() if one.get("memory")}
        row["tflops"] = row["operations"] / device_seconds(entry) / 1e12
        compare(row, device_seconds)
        self._rows[case] = row
        return self._write(row), {}

    @staticmethod
    def _one(remote: Remote, case: Case, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an implementation's figures, or why it ``failed``, and the gate's verdict."""
        verdict: dict[str, Any] = {}
        try:
            verdict = remote.call(_CALL_SECONDS, "check", case, name)
            if verdict["complaint"]:
                return {"failed": verdict["complaint"]}, verdict
            return remote.call(_CALL_SECONDS, "measure", case, name), verdict
        except WorkerError as error:
            return {"failed": _brief(str(error))}, verdict

    def compile(self, case: Case) -> dict[str, Any]:
        """Add torch.compile of the alternatives to a row that :meth:`run` has made.

        Raises LeftOut if there is no time left, or the row itself has no figures.
        """
        if case not in self._rows:
            raise LeftOut("the row has no figures of its own")
        if case not in self._compiled:
            if time.monotonic() <= self._until():
                self._next_wave(case)
            if case not in self._compiled:
                raise self._leave_out(case, "torch.compile")
        return self._rows[case]

    def _next_wave(self, case: Case) -> None:
        """Compile and time this row and those after it, as many as there are processes for."""
        self._main.close()  # its memory, and its share of the device
        names = [name for name in ALTERNATIVES if is_compiled(name)]
        if not self._compilers:
            count = self.settings.processes or max(2, min(12, (os.cpu_count() or 4) - 2))
            self._compilers = [self._remote() for _ in range(max(1, count // len(names)) * len(names))]
        first = self._order.index(case)
        wave = [one for one in self._order[first:] if one in self._rows and one not in self._compiled]
        jobs = [(one, name) for one in wave[: len(self._compilers) // len(names)] for name in names]
        until = min(self._until(), time.monotonic() + _CALL_SECONDS)
        outcomes: list[str] = []
        for (one, name), remote in zip(jobs, self._compilers, strict=False):
            remote.begin("check", one, name)
        for _, remote in zip(jobs, self._compilers, strict=False):
            try:
                outcomes.append(remote.finish(until - time.monotonic())["complaint"])
            except WorkerError as error:
                outcomes.append(str(error) or "failed")
        for (one, name), remote, outcome in zip(jobs, self._compilers, outcomes, strict=False):
            entry: dict[str, Any] = {"failed": _brief(outcome)}
            if "OutOfMemory" in outcome:  # perhaps only because the others had the memory
                entry, _ = self._one(remote, one, name)
            elif not outcome:
                try:
                    entry = remote.call(_CALL_SECONDS, "measure", one, name)
                except WorkerError as error:
                    entry = {"failed": _brief(str(error))}
            with contextlib.suppress(WorkerError):
                remote.call(_CALL_SECONDS, "release")
            self._rows[one]["alternatives"][name] = entry
        for one, _ in jobs:
            self._compiled.add(one)
            compare(self._rows[one], device_seconds)
        self._save()

    def close(self) -> None:
        """End the processes."""
        for remote in (self._main, *self._compilers):
            remote.close()
        super().close()


def _brief(error: str) -> str:
    """Return an error as a table can hold it; running out of memory in three words."""
    return "out of memory" if "OutOfMemory" in error or "out of memory" in error else error[:200]
