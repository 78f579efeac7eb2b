"""How long a checkout takes, for the figures in README and docs/building.md.

    python -m tools.minutes FOLDER   # clones the last commit into an empty folder, runs all there, and records it
    python -m tools.minutes --write  # writes the newest record's figures into the pages

Nothing else should run meanwhile. Seconds are wall time; seconds of processors count all cores together.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastcaps._testing.markdown import as_markdown, into

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "results"
IMPORT = "import time, torch; begin = time.perf_counter(); import fastcaps; print(time.perf_counter() - begin)"
STEP = re.compile(r"^fastcaps: (\w+): ([\d.]+) s, processors ([\d.]+) \+ ([\d.]+) s$", re.MULTILINE)
COMMANDS = f"""step() {{ local TIMEFORMAT="fastcaps: $1: %R s, processors %U + %S s"; shift; time "$@"; }}
step demo make demo
rm -r build/cmake-*
step build .venv/bin/python setup.py -q build_ext --inplace
du -b fastcaps/lib/libfastcaps_cpu.so | sed 's/^/library /'
.venv/bin/python -c '{IMPORT}' | sed 's/^/import /'
rm -r .venv build .cache fastcaps/lib
step ci bash .ci/run"""
NAMES = {
    "build": "CPU kernels for this machine", "demo": "`make demo` in an empty clone", "test": "`make test`, all built",
    "slow": "`make test-slow`", "ci": "`.ci/run` in an empty clone",
}  # fmt: skip


def measured(folder: Path) -> dict[str, Any]:
    """Return the record of a clone of the last commit in an empty folder, which stays there."""
    from bench import record

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    command = ["bash", "-ec", COMMANDS]
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(done.stdout[-5000:])
    steps = {name: {"seconds": float(wall), "processors": float(user) + float(system)}
             for name, wall, user, system in STEP.findall(done.stdout)}  # fmt: skip
    values = dict(re.findall(r"^(import|library) ([\d.]+)", done.stdout, re.MULTILINE))
    found = {"machine": record.describe(os.cpu_count() or 1), "steps": steps}
    return found | {"import": float(values["import"]), "library": int(values["library"])}


def texts() -> dict[str, str]:
    """Return the newest record's figures as Markdown, by page."""
    kept = json.loads(max(RECORDS.glob("minutes-*.json")).read_text())
    steps, machine = kept["steps"], kept["machine"]
    times = {name: [f"{int(step[key]) // 60}:{int(step[key]) % 60:02}" for key in ("seconds", "processors")]
             for name, step in steps.items()}  # fmt: skip
    where = f"{machine['device']}, {machine['cores']} cores, {machine['date'][:10]}"
    readme = (
        f"Both `make` commands work in a fresh checkout and create `.venv`. The first took {times['demo'][0]} minutes, "
        f"downloads and compiling included, and the second {times['test'][0]} more ({where})."
    )
    rows = [["", "minutes", "of processors"], ["`import fastcaps` after torch", f"{kept['import']:.2f} s", ""]]
    rows += [[NAMES[name], *times[name]] for name in NAMES]
    library = f"{where}; the library has {kept['library'] / 1e6:.1f} MB."
    return {"README.md": readme, "docs/building.md": f"{library}\n\n{as_markdown(rows)}"}


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        for path, text in texts().items():
            (ROOT / path).write_text(into((ROOT / path).read_text(), text, "minutes"))
    elif len(sys.argv) == 2:
        found = measured(Path(sys.argv[1]).resolve())
        (RECORDS / f"minutes-{found['machine']['date'][:10]}.json").write_text(json.dumps(found, indent=1) + "\n")
    else:
        raise SystemExit("usage: python -m tools.minutes FOLDER | --write")


if __name__ == "__main__":
    main()
