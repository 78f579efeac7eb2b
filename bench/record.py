"""What is kept of a run: rows, each with its machine, commit and date; and the newest of each in ``bench/results``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpuinfo
import torch

import fastcaps
from bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def describe(threads: int) -> dict[str, Any]:
    """Return what a figure is measured on: device, versions, commit and date."""
    commit = os.environ.get("FASTCAPS_COMMIT", "")  # of a copy without its history, such as an archive
    if not commit and shutil.which("git"):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    native = {entry.name: entry for entry in fastcaps.backends.listing()}["cpu"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": cpuinfo.get_cpu_info().get("brand_raw") or platform.machine(),
        "cores": cores,
        "threads": threads,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),  # bytes
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": fastcaps.backends.forced() or ("cpu" if native.available else "reference"),
        "capability": native.detail.split()[-1] if native.available else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.removesuffix("-dirty") or "unknown",
        "modified": commit.endswith("-dirty"),
        "versions": {n.__name__: n.__version__ for n in (fastcaps, torch)} | {"python": platform.python_version()},
    }


def write(folder: Path, rows: Sequence[dict[str, Any]], kind: str = "bench") -> Path:
    """Write a run's rows, a line each, into a folder, under a name made of kind, machine, date and commit; return the
    file."""
    about = rows[0]["machine"]
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    stamp = about["date"][:19].replace(":", "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{device}-{about['threads']}t-{stamp}-{about['commit']}.json"
    bare = [{name: value for name, value in row.items() if name != "machine"} for row in rows]
    part = path.with_suffix(".part")  # a run that is killed while it writes leaves the file of the row before
    part.unlink(missing_ok=True)  # a link would lead the writing to another file
    with part.open("x") as file:
        lines = ",\n".join(map(json.dumps, bare))
        file.write(f'{{"machine": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n')
    return part.replace(path)


def load(*places: Path, kind: str = "bench") -> list[dict[str, Any]]:
    """Return the rows of files, and of a kind's files in folders, each with its ``machine`` (commit and date in it)."""
    found = []
    for path in places:
        for file in sorted(path.rglob(f"{kind}-*.json")) if path.is_dir() else [path]:
            try:
                document = json.loads(file.read_text())
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            found += [{**row, "machine": document["machine"]} for row in document["rows"]]
    return found


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row is known by: machine, threads, workload, batch, mode and precision."""
    where = row["machine"]["device"], row["machine"]["threads"]
    return (*where, row["workload"], row["batch"], row["mode"], row["precision"])


def finished(folder: Path, threads: int, quick: bool, complete: bool) -> set[tuple[Any, ...]]:
    """Return the keys, without their machine, of the rows that a folder's records have of this machine and commit.

    With ``complete`` only of those in which all alternatives took part.
    """
    here = describe(threads) | {"kind": "quick" if quick else "full"}
    found = set()
    for row in load(folder) if folder.is_dir() else []:
        machine = row["machine"]
        same = all(machine.get(field) == here[field] for field in ("device", "threads", "commit", "modified", "kind"))
        if same and "fastcaps" in row and (row["complete"] or not complete):
            found.add(key(row)[2:])
    return found


def merge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one of all rows of a key, in the order of the registry: the newest complete one or, where none is, the
    newest, by the date inside. A row is complete if it has a figure and every alternative was asked for its own (one
    may not fit, or fail). Rows of quick runs are never taken: they are of other batches and shorter."""
    full = [row for row in rows if row["machine"]["kind"] != "quick"]
    full.sort(key=lambda row: (row["complete"], "fastcaps" in row, row["machine"]["date"]))
    best = {key(row): row for row in full}  # the last of a key stays
    places = {name: place for place, name in enumerate(WORKLOADS)}
    return [best[one] for one in sorted(best, key=lambda one: (*one[:2], places.get(one[2], len(places)), *one[2:]))]
