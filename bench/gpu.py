"""The map of a GPU: every workload's rows by this package alone, in four minutes; and alternatives, once per GPU.

python -m bench.gpu map                     # every row: warm, cold, in a graph; launches, host time, share of the bound
python -m bench.gpu map --library old=a.so --library new=b.so --workload tsai-c10-conv1    # builds, in turns
python -m bench.gpu sweep tsai-c10-conv1    # schedules of a row, in a library built with FASTCAPS_EXPERIMENTS=1
python -m bench.gpu alternatives            # what a PyTorch user would run instead, from the most important rows on

Rows go to one JSON file, after each. ``alternatives`` leaves out what the records have of this kind of GPU
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

import torch

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
    large, *small = list(dict.fromkeys(batches)) or BATCHES
    first, *others = list(dict.fromkeys(precisions)) or PRECISIONS
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
        self.file = Path()
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
        """Keep an entry, print it, and write all of them."""
        row = dict(zip(("workload", "batch", "mode", "precision"), case.key, strict=True)) | {"how": how, **found}
        self.rows.append(row)
        print(line(row), flush=True)
        about = [{"machine": self.machine, **row} for row in self.rows]
        self.file = record.write(self.given.results, about, KIND)

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
        have = {key(row) for row in self.rows} | known(self.machine, self.given.results)
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
        for remote in self.remotes.values():
            remote.close()


def known(machine: dict[str, Any], folder: Path) -> set[tuple[Any, ...]]:
    """Return the keys of the figures that the records, and those in a folder, have of a kind of GPU and a torch."""
    same = machine["device"], machine["versions"]["torch"]
    rows = record.load(*{record.RESULTS, folder}, kind=KIND)
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


def parsed(arguments: Iterable[str] | None) -> argparse.Namespace:
    """Return the options of a run, all of them checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("map", "sweep", "alternatives"))
    parser.add_argument("row", nargs="?", help="sweep: the workload")
    parser.add_argument("--results", type=Path, help="folder ($OUT, or bench/results; of a CPU .cache/bench)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (240)")
    parser.add_argument("--workload", action="append", default=[], help="only these (repeat)")
    parser.add_argument("--batch", action="append", default=[], type=int, help="only these (repeat)")
    parser.add_argument("--precision", action="append", default=[], choices=[*PRECISIONS], help="only these (repeat)")
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH", help="map: compare builds")
    parser.add_argument("--against", action="append", default=[], choices=ALTERNATIVES, help="only these alternatives")
    parser.add_argument("--triton", action="store_true", help="map: measure the Triton kernels instead")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it out")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(None if arguments is None else list(arguments))
    if (given.what == "sweep") != (given.row is not None):
        parser.error("sweep wants a workload, map and alternatives take --workload")
    for name, used in (("library", "map"), ("triton", "map"), ("against", "alternatives")):
        if getattr(given, name) and given.what != used:
            parser.error(f"--{name}: only {used} takes it")
    given.names = [given.row] if given.row else list(dict.fromkeys(given.workload))
    try:
        [*map(find, given.names)]
    except ValueError as error:
        parser.error(str(error))
    if not given.seconds > 0:
        parser.error(f"--seconds: got {given.seconds:g}, want more than 0")
    for name, numbers in (("batch", given.batch), ("threads", [given.threads])):
        if any(number < 1 for number in numbers):
            parser.error(f"--{name}: got {min(numbers)}, want 1 or more")
    libraries = dict(one.partition("=")[::2] for one in given.library)
    for name, path in libraries.items():
        if not Path(path).is_file() or name in ("", OURS, TRITON, *ALTERNATIVES):
            parser.error(f"--library: got {name}={path}, want NAME=PATH of a file, with a name of its own")
    if len(libraries) < len(given.library):
        parser.error("--library: two builds have one name")
    given.library = libraries
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no GPU here (--device cpu tries the map out)")
    home = record.RESULTS if given.device == "cuda" else record.ROOT / ".cache" / "bench"
    given.results = given.results or Path(os.environ.get("OUT") or home)
    try:
        given.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--results: {error}")
    return given


def main(arguments: Iterable[str] | None = None) -> int:
    """Run; the exit status is 1 if nothing was measured."""
    given = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.what == "alternatives":
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    try:
        measured = Map(given)
    except WorkerError as error:
        print(f"no GPU was measured: {error}", file=sys.stderr)
        return 1
    try:
        if given.row:
            cases = order(given.names, given.batch or BATCHES[:1], given.precision or ["fp32"])
        else:
            cases = order(given.names, given.batch, given.precision)
        if given.what == "map":
            measured.rows_of_ours(cases, given.library)
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
    written = f": {measured.file}" if measured.rows else "; nothing was written"
    print(f"{len(measured.rows)} entries of {len(cases)} rows, {len(wrong)} failed or wrong{written}")
    had = given.what == "alternatives" and not measured.rows and measured.left > 5  # all of them are known
    return 0 if had or any("failed" not in row for row in measured.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
