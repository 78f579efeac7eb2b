"""The map of a GPU: every workload's rows by this package alone, in four minutes; and alternatives, once per GPU.

python -m bench.gpu map                     # every row: warm, cold, in a graph; launches, host time, share of the bound
python -m bench.gpu map --library old=a.so --library new=b.so --workload tsai-c10-conv1    # builds, in turns
python -m bench.gpu map --device cpu --library old=../base --library new=.                 # checkouts, in turns
python -m bench.gpu sweep tsai-c10-conv1    # schedules of a row, in a library built with FASTCAPS_EXPERIMENTS=1
python -m bench.gpu alternatives            # what a PyTorch user would run instead, from the most important rows on
python -m bench.gpu profile tsai-c10-conv1  # one warmed training step, for ncu --profile-from-start off to look at

Rows go to one JSON file, after each. ``alternatives`` leaves out what the records have of this kind of GPU
and this torch. A row whose process dies or hangs says so, and the next one has a new process.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import record
from bench.alternatives import ALTERNATIVES, OURS, TRITON, build, is_compiled, runner, suited
from bench.figures import best
from bench.process import WorkerError
from bench.run import STARTS, Run, line
from bench.workload import PRECISIONS, Case
from bench.workloads import WORKLOADS, find

BATCHES = (128, 1, 32)  # in order of importance: time may not do for all
PATIENCE = {"map": 20.0, "sweep": 60.0, "alternatives": 90.0}  # seconds that a row may take
TOGETHER = 6  # processes that compile at once
SHARE = 0.7  # of the device's memory that may be taken by alternatives that are made at once
TURNS = 3  # of several builds
COPIES = 8  # of its votes that an alternative may hold at a time
IMPORTANT = (
    "tsai-c10-conv1", "hinton-conv", "sabour-mnist", "tsai-c10-fc", "li-capnet-dynamic", "tsai-dmm-vector-conv",
    "tsai-c100-conv1", "tsai-c10-conv2", "tsai-dr-c100", "heinsen-norb-1", "tsai-dmm-matrix-conv", "million",
)  # fmt: skip
"""What the goals are about: first in every order."""
Wanted = tuple[Case, str]


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


def keep(run: Run, case: Case, how: str, found: dict[str, Any]) -> None:
    """Keep an entry and print it."""
    print(line(run.add(case, how, found)), flush=True)


def rows_of_ours(run: Run, cases: Sequence[Case], builds: dict[str, dict[str, Any]], how: str) -> None:
    """Measure rows by this package; of several ``builds`` the least median of three turns counts. A workload that
    hangs once is left out from then on. WorkerError if calls would fall back to another backend."""
    for name, options in builds.items():
        run.remote(name, **options).begin("first_backend")  # they start side by side
    for name in builds:
        found = run.remote(name).finish(STARTS)
        if run.device == "cuda" and how == OURS and found != "cuda":
            raise WorkerError(f"{name}: the CUDA library does not serve, calls would go to {found}")
    hangs = set()
    for case in cases:
        if run.left <= 1:
            return
        if case.workload.name in hangs:
            continue
        found = {name: run.answer(name, PATIENCE["map"], "prepare", case, how) for name in builds}
        for turn, name in itertools.product(range(TURNS if len(builds) > 1 else 1), builds):
            if "failed" not in found[name] and run.left > 1:
                timed = run.answer(name, PATIENCE["map"], "time")
                if turn == 0 or (best(timed) or math.inf) < (best(found[name]) or math.inf):
                    found[name] = found[name] | timed
        for name, entry in found.items():
            if run.left <= 1 and "warm" not in entry:
                return  # it was the time that failed
            if str(entry.get("failed", "")).startswith("no answer"):
                hangs.add(case.workload.name)
            keep(run, case, how if how == TRITON else name, entry)


def schedules(run: Run, cases: Sequence[Case]) -> None:
    """Time the settings of each case's pass, the default first and again at the end, and print the fastest."""
    for case in cases:
        settings = run.answer(OURS, PATIENCE["sweep"], "variants", case)
        if isinstance(settings, dict):
            keep(run, case, "default", settings)
            continue
        tried = []
        for setting in (*settings, ""):
            if run.left <= 1:
                break
            found = run.answer(OURS, PATIENCE["map"], "setting", setting)
            keep(run, case, setting or "default", found)
            if str(found.get("failed", "")).startswith(("no answer", "the process")):
                run.answer(OURS, PATIENCE["sweep"], "variants", case)  # in a new process
            elif "warm" in found and not found["complaint"]:
                tried.append((found["warm"]["median"], setting or "default"))
        print(f"{case}:", *(f"{1e3 * took:.4f} ms {setting}" for took, setting in sorted(tried)[:8]), sep="\n  ")


def rows_of_others(run: Run, cases: Sequence[Case], names: Sequence[str]) -> None:
    """Measure alternatives that no record has: processes compile side by side, then each times its own alone."""
    have = known(run.machine, run.results)
    wanted = [(case, name) for case in cases for name in suited(names, case.workload, case.batch, False)]
    for group in groups([one for one in wanted if (*one[0].key, one[1]) not in have], run.machine["memory"]):
        if run.left <= 5:
            return
        for slot, (case, name) in enumerate(group):
            run.remote(f"slot {slot}").begin("prepare", case, name)
        ready = []
        for slot, (case, name) in enumerate(group):
            try:
                verdict = run.remote(f"slot {slot}").finish(min(PATIENCE["alternatives"], max(1.0, run.left)))
                ready.append((slot, case, name, verdict))
            except WorkerError as error:
                if run.left > 1:  # else it is not the alternative's fault
                    keep(run, case, name, {"failed": str(error)})
        for slot, case, name, verdict in ready:
            if run.left > 1:
                keep(run, case, name, verdict | run.answer(f"slot {slot}", PATIENCE["map"], "time"))


def groups(wanted: Sequence[Wanted], memory: float) -> Iterator[list[Wanted]]:
    """Yield some at a time, as many as may run together: those that need no compiler one by one."""
    group: list[Wanted] = []
    for one in wanted:
        taken = sum(COPIES * case.workload.votes_bytes(case.batch) for case, _ in [*group, one])
        if group and (len(group) == TOGETHER or taken > SHARE * memory or not is_compiled(one[1])):
            yield group
            group = []
        group.append(one)
        if not is_compiled(one[1]):
            yield group
            group = []
    if group:
        yield group


def known(machine: dict[str, Any], folder: Path) -> set[tuple[Any, ...]]:
    """Return the keys of the figures that the records, and those in a folder, have of a kind of GPU and a torch."""
    same = machine["device"], machine["versions"]["torch"]
    rows = [row for row in record.load(*{record.RESULTS, folder}, kind="gpu") if "failed" not in row]
    rows = [row for row in rows if (row["machine"]["device"], row["machine"]["versions"]["torch"]) == same]
    return {tuple(row[name] for name in (*record.CALL, "how")) for row in rows}


def profiled(case: Case, device: str) -> None:
    """Run a warmed training step with the profiler on; the times of its kernels are in the map."""
    step = runner(build(OURS, case.workload), case.workload.inputs(case.batch).to(torch.device(device)), True)
    for _ in range(3):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def builds(given: dict[str, str], device: str, scratch: Path) -> dict[str, dict[str, Any]]:
    """Return how the process of each build is started: with a library, or with a checkout's package."""
    found: dict[str, dict[str, Any]] = {}
    for name, path in given.items():
        place, variable = Path(path).resolve(), f"FASTCAPS_{'CPU' if device == 'cpu' else 'CUDA'}_LIBRARY"
        if place.is_dir():  # its package, with its library, and our benchmark
            (scratch / name).mkdir()
            (scratch / name / "bench").symlink_to(record.ROOT / "bench")
            (scratch / name / "fastcaps").symlink_to(place / "fastcaps")
            library = place / "fastcaps" / "lib" / f"libfastcaps_{device}.so"
            found[name] = {"folder": scratch / name, "environment": {variable: str(library)}}
        else:
            found[name] = {"environment": {variable: str(place)}}
    return found or {OURS: {}}


def parsed(arguments: Iterable[str] | None) -> argparse.Namespace:
    """Return the options of a run, all of them checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("map", "sweep", "alternatives", "profile"))
    parser.add_argument("row", nargs="?", help="sweep, profile: the workload")
    parser.add_argument("--results", type=Path, help="folder ($OUT, or bench/results; of a CPU .cache/bench)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything (240)")
    parser.add_argument("--workload", action="append", default=[], help="only these (repeat)")
    parser.add_argument("--batch", action="append", default=[], type=int, help="only these (repeat)")
    parser.add_argument("--precision", action="append", default=[], choices=[*PRECISIONS], help="only these (repeat)")
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH",
                        help="map: compare these builds: native libraries, or checkouts with theirs")  # fmt: skip
    parser.add_argument("--against", action="append", default=[], choices=ALTERNATIVES, help="only these alternatives")
    parser.add_argument("--triton", action="store_true", help="map: measure the Triton kernels instead")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try it out")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(None if arguments is None else list(arguments))
    if (given.what in ("sweep", "profile")) != (given.row is not None):
        parser.error("sweep and profile want a workload, map and alternatives take --workload")
    given.names = [given.row] if given.row else list(dict.fromkeys(given.workload))
    try:
        [*map(find, given.names)]
    except ValueError as error:
        parser.error(str(error))
    libraries = dict(one.partition("=")[::2] for one in given.library)
    for name, path in libraries.items():
        if not path or not Path(path).exists() or name in ("", OURS, TRITON, *ALTERNATIVES):
            parser.error(f"--library: got {name}={path}, want NAME=PATH of a file or folder, and a name of its own")
    if len(libraries) < len(given.library):
        parser.error("--library: two builds have one name")
    given.library = libraries
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no GPU here (--device cpu tries the map out)")
    home = record.RESULTS if given.device == "cuda" else record.ROOT / ".cache" / "bench"
    given.results = given.results or Path(os.environ.get("OUT") or home)
    return given


def main(arguments: Iterable[str] | None = None) -> int:
    """Run; the exit status is 1 if nothing was measured."""
    given = parsed(arguments)
    one = given.what in ("sweep", "profile")
    cases = order(given.names, given.batch or BATCHES[:one], given.precision or [*PRECISIONS][: 1 if one else None])
    if given.what == "profile":
        profiled(cases[0], given.device)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if given.what == "alternatives":
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    most = (given.batch or BATCHES)[0]
    try:
        run = Run(given.results, "gpu", given.device, given.threads, given.seconds, most)
    except WorkerError as error:
        print(f"no GPU was measured: {error}", file=sys.stderr)
        return 1
    rates = (f"{name} {rate:.3g}" for name, rate in run.machine.get("rates", {}).items())
    print(f"{run.machine['device']}, torch {run.machine['versions']['torch']}:", *rates, flush=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if given.what == "map":
                made = builds(given.library, given.device, Path(scratch))
                rows_of_ours(run, cases, made, TRITON if given.triton else OURS)
            elif given.what == "sweep":
                schedules(run, cases)
            else:
                rows_of_others(run, cases, given.against or ALTERNATIVES)
    except WorkerError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    finally:
        run.close()
    wrong = [entry for entry in run.entries if entry.get("complaint") or "failed" in entry]
    written = f": {run.file}" if run.file else "; nothing was written"
    print(f"{len(run.entries)} entries of {len(cases)} rows, {len(wrong)} failed or wrong{written}")
    had = given.what == "alternatives" and not run.entries and run.left > 5  # all of them are known
    return 0 if had or any("failed" not in entry for entry in run.entries) else 1


if __name__ == "__main__":
    sys.exit(main())
