"""What a figure was measured on: device, versions, commit and date."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import fastcaps
from fastcaps import backends

__all__ = ["ROOT", "describe", "memory", "slug"]

ROOT = Path(__file__).resolve().parents[1]


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
    """Return the header of a results file."""
    native = backends.listing()[backends.NAMES.index("cpu")].available
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": _processor(),
        "cores": cores,
        "threads": threads,
        "memory": memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": backends.forced() or ("cpu" if native else "reference"),
        "capability": backends.native_capability() if native else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # a copy without its history (on a machine lent for a run, say) is told which commit it is
        "commit": _git("rev-parse", "--short=12", "HEAD") or os.environ.get("FASTCAPS_COMMIT") or "unknown",
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no", "--", "fastcaps", "csrc", "bench")),
        "versions": {
            "fastcaps": fastcaps.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def slug(text: str) -> str:
    """Return ``text`` as a piece of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
