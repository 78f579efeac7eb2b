"""The benchmark's records: JSON files in ``bench/results``, of which the newest entry of each call counts.

An entry is one call by one implementation (``how``): ``warm`` and other seconds, ``memory``, errors, a ``complaint`` if
the result is wrong, or why it ``failed``. A file has the machine, commit and date once, then a line for each entry.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fastcaps
from bench.alternatives import ALTERNATIVES, OURS
from bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
Entry = dict[str, Any]
Call = tuple[Any, ...]
Calls = dict[Call, dict[str, Entry]]
"""Entries by (workload, batch, mode, precision) and by implementation."""
CALL = ("workload", "batch", "mode", "precision")


def _processor() -> str:
    """Return the processor's name."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", file.read_text() if file.is_file() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def describe(threads: int) -> dict[str, Any]:
    """Return what a figure is measured on: device, versions, commit and date."""
    commit = os.environ.get("FASTCAPS_COMMIT", "")  # of a copy without its history, such as an archive
    if not commit and shutil.which("git"):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    native = {entry.name: entry for entry in fastcaps.backends.listing()}["cpu"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": _processor(),
        "cores": cores,
        "threads": threads,
        "memory": describe_memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": fastcaps.backends.forced() or ("cpu" if native.available else "reference"),
        "capability": native.detail.split()[-1] if native.available else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.removesuffix("-dirty") or "unknown",
        "modified": commit.endswith("-dirty"),
        "versions": {n.__name__: n.__version__ for n in (fastcaps, torch)} | {"python": platform.python_version()},
    }


def describe_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def write(folder: Path, machine: dict[str, Any], entries: Sequence[Entry], kind: str) -> Path:
    """Write a run's entries into a folder, under a name made of kind, machine, date and commit; return the file."""
    device = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    stamp = machine["date"][:19].replace(":", "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{device}-{machine['threads']}t-{stamp}-{machine['commit']}.json"
    part = path.with_suffix(".part")  # a run that is killed while it writes leaves the file of the row before
    lines = ",\n".join(map(json.dumps, entries))
    part.write_text(f'{{"machine": {json.dumps(machine)},\n"rows": [\n{lines}\n]}}\n')
    return part.replace(path)


def load(*places: Path, kind: str) -> list[Entry]:
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


def _entries(row: dict[str, Any]) -> Iterator[Entry]:
    """Yield a row of a file as entries: files of the CPU before December 2026 have all contenders in one row."""
    if "how" in row:
        yield row
        return
    common = {name: row[name] for name in (*CALL, "machine", "complete", "load")}
    memory = row.get("memory") or {}
    contenders = {OURS: row.get("fastcaps") or {"failed": row.get("refused", "refused")}, **row["alternatives"]}
    for name, one in ({key: {} for key in memory} | contenders).items():
        entry = {**common, "how": name, "complaint": "", "doubts": row.get("doubts", []), **one}
        if "median" in one:
            entry["warm"] = {part: one[part] for part in ("median", "p20", "p80")}
        yield entry | ({"memory": memory[name]} if name in memory else {})


def merge(rows: Iterable[dict[str, Any]]) -> dict[str, Calls]:
    """Return the newest entries of all calls, by device. Entries that failed, and runs on a CPU in which not all
    alternatives took part (``complete``), count only where there is no other. Contenders that took turns stay together.
    """
    known = (OURS, *ALTERNATIVES)
    entries = [entry for row in rows if row["machine"]["kind"] != "quick" for entry in _entries(row)]
    entries.sort(key=lambda one: (one.get("complete", "failed" not in one), one["machine"]["date"]))
    found: dict[str, Calls] = {}
    for entry in (one for one in entries if one["how"] in known and one["workload"] in WORKLOADS):
        calls, call = found.setdefault(entry["machine"]["device"], {}), tuple(entry[name] for name in CALL)
        if "complete" in entry and entry["how"] == OURS:
            calls[call] = {}
        calls.setdefault(call, {})[entry["how"]] = entry
    return found
