"""One run of the benchmark on a device, in a given time: what matters most comes first, what is left out is said.

First every row runs by the package and by eager PyTorch; then, as far as the time goes, torch.compile of the
alternatives joins, a wave of rows at a time: the wave's processes compile side by side, and are timed one by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import device_report, machine
from bench.alternatives import ALTERNATIVES, OURS, is_compiled
from bench.device_report import device_seconds
from bench.device_worker import TRITON, DeviceCase, Remote
from bench.precision import PRECISIONS
from bench.routings import AttentionPass
from bench.worker import WorkerError
from bench.workloads import WORKLOADS, Workload

__all__ = ["BATCHES", "DeviceSession", "DeviceSettings", "LeftOut", "cases", "goal_of"]

BATCHES = (128, 1, 32)
"""In order of importance."""

_CALL_SECONDS = 60.0
"""An answer that takes longer than this is given up: a hang, or a compilation that is not worth the time."""

_DESCRIBE_SECONDS = 120.0
_EAGER_SHARE = 0.55
_MEMORY_SHARE = 0.05

_SECONDS = {
    ("tsai-c10-conv1", False, "fp32"): 0.30e-3,
    ("tsai-c10-conv1", True, "fp32"): 1.5e-3,
    ("tsai-c10-conv1", False, "tf32"): 0.15e-3,
    ("tsai-c10-conv1", True, "tf32"): 0.8e-3,
    ("tsai-c10-fc", False, "fp32"): 0.03e-3,
}
"""What was aimed at on an H200, batch 128."""

_SPEEDUP = {False: 10.0, True: 6.0}
"""Of ``tsai-c10-conv1``, batch 128, float32, against the fastest alternative: forward, and a training step."""


class LeftOut(Exception):
    """The time is used up: this row has no figures, or none of torch.compile."""


@dataclass(frozen=True)
class DeviceSettings:
    """What a run is asked for.

    Attributes
    ----------
    results
        Folder for the JSON and the table.
    device
        ``cuda``, or ``cpu`` to try the machinery without one.
    seconds
        For everything.
    slice
        Seconds that the timed calls of one measurement take together.
    alternatives, compiled
        Whether PyTorch is timed too, and whether compiled.
    processes
        How many compile at a time; by default two fewer than there are cores, twelve at most.
    """

    results: Path
    device: str = "cuda"
    seconds: float = 270.0
    slice: float = 0.06
    alternatives: bool = True
    compiled: bool = True
    processes: int | None = None


def cases(
    workloads: Sequence[Workload], batches: Sequence[int] = (), precisions: Sequence[str] = ()
) -> list[DeviceCase]:
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
                    found += [DeviceCase(workload, size, training, precision) for training in (False, True)]
    names = list(WORKLOADS)

    def importance(case: DeviceCase) -> tuple[int, int, int]:
        batch = BATCHES.index(case.batch) if case.batch in BATCHES else len(BATCHES)
        batch = 0 if case.workload.copies > 1 else batch
        precision = list(PRECISIONS).index(case.precision)
        place = names.index(case.workload.name) if case.workload.name in names else 0
        tier = precision if batch == 0 else 2 * batch + 1 + (precision > 0)
        return (0 if (batch, place) == (0, 0) else 1 + tier, precision, place)

    return sorted(found, key=importance)


def goal_of(case: DeviceCase) -> dict[str, float]:
    """Return what a row ought to reach: ``seconds``, ``speedup``, ``launches``, ``memory_share``, or some of them."""
    goal: dict[str, float] = {}
    workload = case.workload
    if case.batch == BATCHES[0] or workload.copies > 1:
        wanted = _SECONDS.get((workload.name, case.training, case.precision))
        if isinstance(workload.routing, AttentionPass) or workload.outweighs(case.batch):
            goal["memory_share"] = _MEMORY_SHARE
        if wanted is not None:
            goal["seconds"] = wanted
        if workload.name == "tsai-c10-conv1" and case.precision == "fp32":
            goal["speedup"] = _SPEEDUP[case.training]
    elif case.batch == 1 and not case.training:
        goal = {"launches": 3.0}
    return goal


class DeviceSession:
    """Processes, machine and rows of one run.

    Attributes
    ----------
    document
        What is written as JSON.
    files
        What was written.
    """

    def __init__(self, settings: DeviceSettings, rows: Sequence[DeviceCase]) -> None:
        self.settings = settings
        self._start = time.monotonic()
        self._order = list(rows)
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcaps-bench-")
        self._log = Path(self._scratch.name) / "processes.log"
        self._main = Remote(settings.device, settings.slice, self._log)
        self._compilers: list[Remote] = []
        self._compiled: set[DeviceCase] = set()
        self._rows: dict[DeviceCase, dict[str, Any]] = {}
        self.files: list[Path] = []
        about = machine.describe(1)
        about |= self._main.call(_DESCRIBE_SECONDS, "describe", 5 * settings.slice)
        self.document: dict[str, Any] = {"format": 1, "kind": "device", "machine": about, "rows": [], "left_out": []}

    def _until(self, share: float = 1.0) -> float:
        return self._start + share * self.settings.seconds

    def _leave_out(self, case: DeviceCase, what: str) -> LeftOut:
        self.document["left_out"].append(f"{case}: {what}")
        self._write()
        return LeftOut(f"{what}: the time is used up")

    def run(self, case: DeviceCase) -> dict[str, Any]:
        """Check and time one row by the package, by its Triton kernels, and by eager PyTorch; write it down.

        A row whose own result is wrong is ``refused`` and has no figures.

        Raises
        ------
        LeftOut
            If there is no time left.
        """
        share = _EAGER_SHARE if self.settings.compiled and self.settings.alternatives else 1.0
        if time.monotonic() > self._until(share):
            raise self._leave_out(case, "all of it")
        row = self._row(case)
        names = [OURS, TRITON] + [n for n in ALTERNATIVES if self.settings.alternatives and not is_compiled(n)]
        for name in names:
            entry, verdict = self._one(self._main, case, name)
            if name == OURS:
                row["gate"] = verdict
                if "failed" in entry:
                    row["refused"] = entry["failed"]
                    break
                row["fastcaps"] = entry
                row["runs"] = self._main.call(_CALL_SECONDS, "chosen", case)
            elif name == TRITON:
                row["triton"] = entry
            else:
                row["alternatives"][name] = entry
        self._rows[case] = row
        self.document["rows"].append(row)
        self._compare(row)
        self._write()
        return row

    @staticmethod
    def _one(remote: Remote, case: DeviceCase, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an implementation's figures, or why it ``failed``, and the gate's verdict."""
        verdict: dict[str, Any] = {}
        try:
            verdict = remote.call(_CALL_SECONDS, "check", case, name)
            if verdict["complaint"]:
                return {"failed": verdict["complaint"]}, verdict
            return remote.call(_CALL_SECONDS, "measure", case, name), verdict
        except WorkerError as error:
            return {"failed": _brief(str(error))}, verdict

    def _row(self, case: DeviceCase) -> dict[str, Any]:
        """Return what a row says before anything is timed."""
        work = case.workload
        return {
            "workload": work.name,
            "source": work.source,
            "batch": case.batch,
            "mode": case.mode,
            "precision": case.precision,
            "votes_bytes": work.votes_bytes(case.batch, PRECISIONS[case.precision].dtype.itemsize),
            "operations": work.operations(case.batch, case.training),
            "goal": goal_of(case),
            "alternatives": {},
        }

    @staticmethod
    def _compare(row: dict[str, Any]) -> None:
        """Name the fastest alternative so far, and how much faster the package is."""
        timed = {name: entry for name, entry in row["alternatives"].items() if "median" in entry}
        mine = row.get("fastcaps")
        row["fastest"] = row["speedup"] = None
        if mine is None:
            return
        row["tflops"] = row["operations"] / device_seconds(mine) / 1e12
        if timed:
            row["fastest"] = min(timed, key=lambda name: device_seconds(timed[name]))
            row["speedup"] = device_seconds(timed[row["fastest"]]) / device_seconds(mine)

    def compile(self, case: DeviceCase) -> dict[str, Any]:
        """Add torch.compile of the alternatives to a row that :meth:`run` has made.

        Raises
        ------
        LeftOut
            If there is no time left, or the row itself has no figures.
        """
        if case not in self._rows or "fastcaps" not in self._rows[case]:
            raise LeftOut("the row has no figures of its own")
        if case not in self._compiled:
            if time.monotonic() > self._until():
                raise self._leave_out(case, "torch.compile")
            self._next_wave(case)
        if case not in self._compiled:
            raise self._leave_out(case, "torch.compile")
        return self._rows[case]

    def _next_wave(self, case: DeviceCase) -> None:
        """Compile and time this row and those after it, as many as there are processes for."""
        self._main.close()  # its memory, and its share of the device
        names = [name for name in ALTERNATIVES if is_compiled(name)]
        count = self.settings.processes or max(2, min(12, (os.cpu_count() or 4) - 2))
        if not self._compilers:
            every = range(max(1, count // len(names)) * len(names))
            self._compilers = [Remote(self.settings.device, self.settings.slice, self._log) for _ in every]
        first = self._order.index(case)
        wave = [
            one for one in self._order[first:] if "fastcaps" in self._rows.get(one, {}) and one not in self._compiled
        ]
        jobs = [(one, name) for one in wave[: len(self._compilers) // len(names)] for name in names]
        until = min(self._until(), time.monotonic() + _CALL_SECONDS)
        outcomes: list[str] = []
        for (one, name), remote in zip(jobs, self._compilers, strict=False):
            remote.begin("check", one, name)
        for _, remote in zip(jobs, self._compilers, strict=False):
            try:
                outcomes.append(remote.finish(until)["complaint"])
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
            self._compare(self._rows[one])
        self._write()

    def _write(self) -> None:
        """Write everything so far: a run that is stopped leaves what it has."""
        about = self.document["machine"]
        stamp = about["date"][:16].replace(":", "")
        name = f"bench-{machine.slug(about['device'])}-{stamp}-{about['commit']}"
        self.settings.results.mkdir(parents=True, exist_ok=True)
        self.files = [self.settings.results / f"{name}.json", self.settings.results / f"{name}.md"]
        self.files[0].write_text(json.dumps(self.document, indent=1) + "\n")
        self.files[1].write_text(device_report.markdown(self.document))

    def close(self) -> None:
        """End the processes."""
        for remote in (self._main, *self._compilers):
            remote.close()
        self._scratch.cleanup()


def _brief(error: str) -> str:
    """Return an error as a table can hold it; running out of memory in three words."""
    return "out of memory" if "OutOfMemory" in error or "out of memory" in error else error[:200]
