"""What is kept of a run: rows, each with its machine, commit and date; and the newest of each in ``bench/results``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import fastcaps
from bench.workloads import WORKLOADS

__all__ = ["RESULTS", "ROOT", "complete", "describe", "key", "load", "memory", "merge", "prune", "write"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
_ALTERNATIVES = 4
"""Of a complete row: two ways of storing votes, eager and compiled. Their names may differ from record to record."""


def _processor() -> str:
    """Return the processor's model name."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    """Return what git says about this checkout, or an empty string where there is none."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(threads: int) -> dict[str, Any]:
    """Return what a figure is measured on: device, versions, commit and date."""
    native = {entry.name: entry for entry in fastcaps.backends.listing()}["cpu"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": _processor(),
        "cores": cores,
        "threads": threads,
        "memory": memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": fastcaps.backends.forced() or ("cpu" if native.available else "reference"),
        "capability": native.detail.split()[-1] if native.available else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # a copy without its history (an archive, say) is told which commit it is
        "commit": _git("rev-parse", "--short=12", "HEAD") or os.environ.get("FASTCAPS_COMMIT") or "unknown",
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "fastcaps", "csrc", "bench")),
        "versions": {
            "fastcaps": fastcaps.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def write(folder: Path, document: dict[str, Any]) -> Path:
    """Write a run's document into a folder, under a name made of machine, date and commit; return the file."""
    about = document["machine"]
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    stamp = about["date"][:16].replace(":", "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench-{device}-{about['threads']}t-{stamp}-{about['commit']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def complete(row: dict[str, Any]) -> bool:
    """Tell whether a row has a figure and every alternative was asked for its own (one may not fit, or fail)."""
    return "fastcaps" in row and len(row["alternatives"]) >= _ALTERNATIVES


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of files, each with its run's ``machine`` (commit and date among it) and ``complete``."""
    found = []
    for path in paths:
        document = json.loads(path.read_text())
        extra = {name: document[name] for name in ("kind", "sgemm_size") if name in document}
        for row in document["rows"]:
            usual = {"default": row["batch"] != 1, "machine": document["machine"], **extra}
            found.append({**usual, **row, "complete": complete(row), "file": path.name})
    return found


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row is known by: machine, threads, workload, batch, mode and precision."""
    where = row["machine"]["device"], row["machine"]["threads"]
    return (*where, row["workload"], row["batch"], row["mode"], row.get("precision", "fp32"))


def merge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one of all rows of a key: the newest complete one or, where none is, the newest, by the date inside.

    They come in the order of the registry. Rows of quick runs are never taken: they are of other batches and shorter.
    """
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row.get("kind") == "quick":
            continue
        before = best.get(key(row))
        if before is None or _rank(row) > _rank(before):
            best[key(row)] = row
    names = list(WORKLOADS)

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        named = names.index(row["workload"]) if row["workload"] in names else len(names)
        return (row["machine"]["device"], row["machine"]["threads"], named, *key(row)[2:])

    return sorted(best.values(), key=order)


def _rank(row: dict[str, Any]) -> tuple[bool, bool, str]:
    return row["complete"], "fastcaps" in row, row["machine"]["date"]


def prune(folder: Path = RESULTS) -> list[str]:
    """Take superseded rows out of a folder's files, and files without rows away; return what was done."""
    paths = sorted(folder.glob("*.json"))
    kept = merge(load(paths))
    done = []
    for path in paths:
        document = json.loads(path.read_text())
        wanted = [key(row) for row in kept if row["file"] == path.name]
        rows = [row for row in document["rows"] if key({"machine": document["machine"], **row}) in wanted]
        if not rows:
            path.unlink()
            done.append(f"{path.name}: every row is superseded, removed")
        elif len(rows) < len(document["rows"]):
            done.append(f"{path.name}: {len(rows)} of {len(document['rows'])} rows kept")
            path.write_text(json.dumps(document | {"rows": rows}, indent=1) + "\n")
    return done
