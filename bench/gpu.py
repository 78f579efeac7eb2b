"""The map of a GPU: every workload's rows by this package alone, in four minutes; and alternatives, once per GPU.

python -m bench.gpu map                     # every row: warm, cold, in a graph; launches, host time, share of the bound
python -m bench.gpu map --library old=a.so --library new=b.so --workload tsai-c10-conv1    # builds, in turns
python -m bench.gpu sweep tsai-c10-conv1    # schedules of a row, in a library built with FASTCAPS_EXPERIMENTS=1
python -m bench.gpu alternatives            # what a PyTorch user would run instead, from the most important rows on

Rows go to one JSON file, in a moment after each. ``alternatives`` leaves out what the records have of this kind of GPU
and this torch. A row whose process dies or hangs says so, and the next one has a new process.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, is_compiled, suited
from bench.goals import number
from bench.gpu_report import KIND, key
from bench.probe import TRITON, Probe
from bench.process import Remote, WorkerError
from bench.workload import PRECISIONS, Case
from bench.workloads import WORKLOADS, find

BATCHES = (128, 1, 32)  # in order of importance: time may not do for all
PATIENCE = {"map": 20.0, "alternatives": 90.0}  # seconds that a row may take
TOGETHER = 6  # processes that compile at once
SHARE = 0.7  # of the device's memory that may be taken by alternatives that are made at once
COPIES = 8  # of its votes that an alternative may hold at a time
IMPORTANT = (
    "tsai-c10-conv1", "hinton-conv", "sabour-mnist", "tsai-c10-fc", "li-capnet-dynamic", "tsai-dmm-vector-conv",
    "tsai-c100-conv1", "tsai-c10-conv2", "tsai-dr-c100", "heinsen-norb-1", "tsai-dmm-matrix-conv", "million",
)  # fmt: skip
"""What the goals are about: first in every order."""


def order(names: Sequence[str], batches: Sequence[int], precisions: Sequence[str]) -> list[Case]:
    """Return the rows, the most important first: float32 at the first batch, its other precisions, other batches.

    A workload whose children are copies, as it is large in itself, runs only at its own batch."""
    places = {name: place for place, name in enumerate(IMPORTANT)}
    works = sorted(map(find, names or WORKLOADS), key=lambda work: places.get(work.name, len(places)))
    large, *small = batches or BATCHES
    first, *others = precisions or PRECISIONS
    return [
        Case(work, work.batch if work.copies > 1 else batch, training, precision)
        for some, part in (([large], [first]), ([large], others), (small, [first]), (small, others))
        for work, precision, batch, training in itertools.product(works, part, some, (True, False))
        if work.copies == 1 or batch == large
    ]


class Map:
    """One run: its processes, its entries and the file that they go to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.until = given, time.monotonic() + given.seconds
        self.rows: list[dict[str, Any]] = []
        self.written, self.file = 0.0, Path()
        self.remotes: dict[str, Remote] = {}
        about = self.remote(OURS).call(120.0, "describe")
        self.machine = record.describe(given.threads) | {"kind": "full"} | about
        rates = (f"{name} {rate:.3g}" for name, rate in self.machine["rates"].items())
        print(f"{self.machine['device']}, torch {self.machine['versions']['torch']}:", *rates, flush=True)

    def remote(self, name: str, library: str = "") -> Remote:
        """Return a process by its name, that of the CUDA ``library`` if it has one of its own."""
        if name not in self.remotes:
            environment = {"FASTCAPS_CUDA_LIBRARY": library} if library else {}
            how = self.given.threads, Probe, self.given.device, (self.given.batch or BATCHES)[0]
            self.remotes[name] = Remote(*how, environment=environment)
        return self.remotes[name]

    def require(self, name: str) -> None:
        """Refuse to measure a process whose calls would fall back to another backend."""
        wanted = "cuda" if self.given.device == "cuda" and not self.given.triton else ""
        found = self.remote(name).call(120.0, "first_backend")
        if wanted and found != wanted:
            raise WorkerError(f"{name}: the CUDA library does not serve, calls would go to {found}")

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def add(self, case: Case, how: str, found: dict[str, Any]) -> None:
        """Keep an entry and print it; write all of them if the last time was a second ago."""
        row = dict(zip(("workload", "batch", "mode", "precision"), case.key, strict=True)) | {"how": how, **found}
        self.rows.append(row)
        print(line(row), flush=True)
        if time.monotonic() - self.written > 1.0:
            self.write()

    def write(self) -> None:
        if self.rows:
            self.file = record.write(self.given.results, [{"machine": self.machine, **row} for row in self.rows], KIND)
            self.written = time.monotonic()

    def answer(self, name: str, seconds: float, *what: Any) -> Any:
        """Return a process's answer, or why it ``failed``."""
        try:
            return self.remote(name).call(min(seconds, max(1.0, self.left)), *what)
        except WorkerError as error:
            return {"failed": str(error)}

    def rows_of_ours(self, cases: Sequence[Case], libraries: dict[str, str]) -> None:
        """Measure rows by this package; with ``libraries``, builds of the CUDA kernels by name, by each in turns. A
        workload that hangs once is left out from then on."""
        for name, path in libraries.items():
            self.remote(name, path).begin("clean")  # they start side by side
        for name in libraries:
            self.remote(name).finish(120.0)
        hangs = set()
        for name in libraries or [OURS]:
            self.require(name)
        for case in cases:
            for name in libraries or [TRITON if self.given.triton else OURS]:
                if self.left <= 1:
                    return
                if case.workload.name in hangs:
                    continue
                how = TRITON if name == TRITON else OURS
                asked = (case.workload.name, case.batch, case.training, case.precision, how)
                found = self.answer(OURS if name == TRITON else name, PATIENCE["map"], "row", *asked)
                if "failed" in found and self.left <= 1:
                    return  # it was the time that failed
                if str(found.get("failed", "")).startswith("no answer"):
                    hangs.add(case.workload.name)
                self.add(case, name, found)

    def schedules(self, cases: Sequence[Case]) -> None:
        """Time the settings of each case's pass, the default first and again at the end, and print the fastest."""
        self.require(OURS)
        for case in cases:
            asked = (case.workload.name, case.batch, case.training, case.precision)
            settings = self.answer(OURS, 60.0, "variants", *asked)
            if isinstance(settings, dict):
                self.add(case, "default", settings)
                continue
            tried = []
            for setting in (*settings, ""):
                if self.left <= 1:
                    break
                found = self.answer(OURS, 10.0, "setting", setting)
                self.add(case, setting or "default", found)
                if "warm" not in found:
                    if found["failed"].startswith(("no answer", "the process")):
                        self.answer(OURS, 60.0, "variants", *asked)  # in a new process
                elif not found["complaint"]:
                    tried.append((found["warm"]["median"], setting or "default"))
            print(f"{case}:", *(f"{1e3 * took:.4f} ms {setting}" for took, setting in sorted(tried)[:8]), sep="\n  ")

    def rows_of_others(self, cases: Sequence[Case], names: Sequence[str]) -> None:
        """Measure alternatives: several processes compile side by side, then each times its own alone."""
        have = {key(row) for row in self.rows} | known(self.machine)
        wanted = [(case, name) for case in cases for name in suited(names, case.workload, case.batch, False)]
        wanted = [one for one in wanted if (*one[0].key, one[1]) not in have]
        for group in self._groups(wanted):
            if self.left <= 5:
                return
            for slot, (case, name) in enumerate(group):
                asked = (case.workload.name, case.batch, case.training, case.precision, name)
                self.remote(f"slot {slot}").begin("prepare", *asked)
            ready = []
            for slot, (case, name) in enumerate(group):
                try:
                    patience = min(PATIENCE["alternatives"], max(1.0, self.left))
                    ready.append((slot, case, name, self.remote(f"slot {slot}").finish(patience)))
                except WorkerError as error:
                    if self.left > 1:  # else it is not the alternative's fault
                        self.add(case, name, {"failed": str(error)})
            for slot, case, name, verdict in ready:
                if self.left > 1:
                    self.add(case, name, verdict | self.answer(f"slot {slot}", PATIENCE["map"], "time"))

    def _groups(self, wanted: list[tuple[Case, str]]) -> Iterator[list[tuple[Case, str]]]:
        """Yield some at a time, as many as may run together: those that need no compiler one by one."""
        group: list[tuple[Case, str]] = []
        bytes_taken, most = 0, SHARE * self.machine["memory"]
        for case, name in wanted:
            size = COPIES * case.workload.votes_bytes(case.batch)
            if group and (len(group) == TOGETHER or bytes_taken + size > most or not is_compiled(name)):
                yield group
                group, bytes_taken = [], 0
            group.append((case, name))
            bytes_taken += size
            if not is_compiled(name):
                yield group
                group, bytes_taken = [], 0
        if group:
            yield group

    def close(self) -> None:
        self.write()
        for remote in self.remotes.values():
            remote.close()


def known(machine: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Return the keys of the figures that the records have of a kind of GPU and a torch."""
    same = machine["device"], machine["versions"]["torch"]
    rows = record.load(record.RESULTS, kind=KIND)
    rows = [row for row in rows if "failed" not in row]
    return {key(row) for row in rows if (row["machine"]["device"], row["machine"]["versions"]["torch"]) == same}


def line(row: dict[str, Any]) -> str:
    """Return an entry in one line."""
    place = f"{row['workload']:<21} {row['batch']:>4} {row['mode'][:7]:<8}{row['precision']:<5}{row['how']:<22}"
    if "failed" in row:
        return f"{place} failed: {row['failed']}"
    times = {name: row[name].get("median") for name in ("warm", "cold", "graph") if name in row}
    said = " ".join(f"{name} {number(1e3 * one)}" if one else f"{name} failed" for name, one in times.items())
    said += " ms"
    if "launches" in row:
        said += f", {1e3 * row['busy']:.3f} ms of {row['launches']} launches, host {1e6 * row['host']:.0f} us"
    return f"{place} {said}{', WRONG: ' * bool(row['complaint'])}{row['complaint']}"


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Figures of a GPU.")
    parser.add_argument("what", choices=("map", "sweep", "alternatives"))
    parser.add_argument("row", nargs="?", help="sweep: the workload")
    results = Path(os.environ.get("OUT") or record.RESULTS)
    parser.add_argument("--results", type=Path, default=results, help="folder (default: $OUT, or bench/results)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (240)")
    parser.add_argument("--workload", action="append", default=[], help="only these (repeat)")
    parser.add_argument("--batch", action="append", default=[], type=int, help="only these (repeat)")
    parser.add_argument("--precision", action="append", default=[], choices=[*PRECISIONS], help="only these (repeat)")
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH", help="compare builds (repeat)")
    parser.add_argument("--against", action="append", default=[], choices=ALTERNATIVES, help="only these alternatives")
    parser.add_argument("--triton", action="store_true", help="measure the Triton kernels instead")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it out")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(None if arguments is None else list(arguments))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.what == "alternatives":
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    if (given.what == "sweep") != (given.row is not None):
        parser.error("sweep wants a workload, map and alternatives take --workload")
    libraries = dict(one.partition("=")[::2] for one in given.library)
    for name, path in libraries.items():
        if not Path(path).is_file() or name in ("", OURS, TRITON, *ALTERNATIVES):
            parser.error(f"--library: got {name}={path}, want NAME=PATH of a file, with a name of its own")
    names = [given.row] if given.row else given.workload
    for name in names:
        try:
            find(name)
        except ValueError as error:
            parser.error(str(error))
    try:
        measured = Map(given)
    except WorkerError as error:
        print(f"no GPU was measured: {error}", file=sys.stderr)
        return 1
    try:
        if given.row:
            cases = order(names, given.batch or BATCHES[:1], given.precision or ["fp32"])
        else:
            cases = order(names, given.batch, given.precision)
        if given.what == "map":
            measured.rows_of_ours(cases, libraries)
        elif given.what == "sweep":
            measured.schedules(cases)
        else:
            measured.rows_of_others(cases, given.against or ALTERNATIVES)
    except WorkerError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    finally:
        measured.close()
    wrong = [row for row in measured.rows if row.get("complaint") or "failed" in row]
    print(f"{len(measured.rows)} entries of {len(cases)} rows, {len(wrong)} failed or wrong: {measured.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
