"""How long a checkout takes: the import, the build, the two commands of README and CI, for the figures in docs.

    python -m tools.minutes FOLDER   # clones the last commit into an empty folder, runs all there, and records it
    python -m tools.minutes --write  # writes the newest record's figures into README and docs/building.md

Nothing else should run meanwhile. Seconds are wall time; seconds of processors count all cores together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "results"
STEP = re.compile(r"^fastcaps: (\w+): ([\d.]+) s, processors ([\d.]+) \+ ([\d.]+) s$", re.MULTILINE)
IMPORT = "import time, torch; begin = time.perf_counter(); import fastcaps; print(time.perf_counter() - begin)"


def _run(command: str, folder: Path) -> dict[str, Any]:
    """Run a shell command; return its seconds, those of processors, and what it printed."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(command, f"{time.monotonic() - begin:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(done.stdout[-5000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return {"seconds": time.monotonic() - begin, "processors": processors, "text": done.stdout}


def measured(folder: Path) -> dict[str, Any]:
    """Return the record of a clone of the last commit in an empty folder, which stays there."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    commit = _run("git rev-parse --short=12 HEAD", folder)["text"].strip()
    found = {"demo": _run("make demo", folder)}
    shutil.rmtree(next((folder / "build").glob("cmake-*")))
    found["build"] = _run(".venv/bin/python setup.py -q build_ext --inplace", folder)
    size = next((folder / "fastcaps" / "lib").glob("libfastcaps_cpu.*")).stat().st_size
    imports = [float(_run(f".venv/bin/python -c '{IMPORT}'", folder)["text"].split()[-1]) for _ in range(7)]
    for name in (".venv", "build", ".cache", "fastcaps/lib"):
        shutil.rmtree(folder / name)
    found["ci"] = _run("bash .ci/run", folder)
    for name, *seconds in STEP.findall(found["ci"]["text"]):
        found[name] = {"seconds": float(seconds[0]), "processors": float(seconds[1]) + float(seconds[2])}
    from bench import record

    steps = {name: {key: one[key] for key in ("seconds", "processors")} for name, one in found.items()}
    return {
        "kind": "minutes",
        "machine": record.describe(os.cpu_count() or 1) | {"commit": commit, "modified": False},
        "import": statistics.median(imports),
        "library": size,
        "steps": steps,
    }


def newest() -> dict[str, Any]:
    """Return the newest record."""
    found: dict[str, Any] = json.loads(max(RECORDS.glob("minutes-*.json")).read_text())
    return found


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def texts(kept: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the figures as Markdown, by file: the name of the marked place, and its content."""
    steps, machine = kept["steps"], kept["machine"]
    where = f"{machine['device']}, {machine['cores']} cores, {machine['date'][:10]}"
    readme = (
        f"Both `make` commands work in a fresh checkout and create `.venv`. The first took "
        f"{_minutes(steps['demo']['seconds'])} minutes, downloads and compiling included, and the second "
        f"{_minutes(steps['test']['seconds'])} more ({where})."
    )
    names = {
        "CPU kernels for this machine": "build",
        "`make demo` in an empty clone": "demo",
        "`make test`, all built": "test",
        "`make test-slow`": "slow",
        "`.ci/run` in an empty clone": "ci",
    }
    rows = [("`import fastcaps` after torch", f"{kept['import']:.2f} s", "")]
    rows += [(name, *(_minutes(steps[one][k]) for k in ("seconds", "processors"))) for name, one in names.items()]
    table = ["| | minutes | of processors |", "| --- | ---: | ---: |", *(f"| {' | '.join(row)} |" for row in rows)]
    building = [f"{where}; the library has {kept['library'] / 1e6:.1f} MB.", "", *table]
    return {"README.md": ("minutes", readme), "docs/building.md": ("minutes", "\n".join(building))}


def written(text: str, name: str, found: str) -> str:
    """Return a page with a marked place's new content."""
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    return text[: text.index(begin) + len(begin)] + found + text[text.index(end) :]


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How long a checkout takes.")
    parser.add_argument("folder", type=Path, nargs="?", help="a folder that does not exist yet")
    parser.add_argument("--write", action="store_true", help="write the newest record's figures into README and docs")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if not (given.folder or given.write):
        parser.error("needs FOLDER or --write")
    if given.folder:
        found = measured(given.folder.resolve())
        (RECORDS / f"minutes-{found['machine']['date'][:10]}.json").write_text(json.dumps(found, indent=1) + "\n")
    for path, place in texts(newest()).items() if given.write else ():
        (ROOT / path).write_text(written((ROOT / path).read_text(), *place))


if __name__ == "__main__":
    sys.exit(main())
