"""``fastcaps bench``: the benchmark of a source checkout, run there as a process.

The benchmark is not part of the installed package: it judges results by the tests' rule.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.cli.common import Fail, Wrong


def _root() -> Path:
    """Return the folder that fastcaps lies in: a checkout, if the benchmark is there."""
    import fastcaps

    return Path(fastcaps.__file__).resolve().parent.parent


def _start(module: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a module in the checkout that this package lies in, and return how it ended."""
    root = _root()
    if not (root / "bench" / "conftest.py").is_file():
        raise Fail(
            "the benchmark is only in a source checkout: there, run "
            "pip install --no-build-isolation -e '.[bench]' and this command again"
        )
    if find_spec("matplotlib") is None:
        raise Fail("matplotlib is not installed; in the checkout run: pip install '.[bench]'")
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=root, text=True, check=False, **options)


def _absolute(words: list[str]) -> list[str]:
    """Return the words of a command line with absolute paths, as the checkout is another folder."""
    pairs = zip(["", *words], words, strict=False)
    return [str(Path(word).resolve()) if before == "--results" else word for before, word in pairs]


def bench(
    context: Context,
    listed: Annotated[bool, Option("--list", help="list the workloads and the alternatives, and stop")] = False,
    as_json: Annotated[bool, Option("--json", help="print the rows as they are recorded, and nothing else")] = False,
) -> int:
    """Measure routings against what a PyTorch user would run instead: a few rows in a minute, or --full.

    ``fastcaps bench [WORKLOAD]... [--full] [--against NAME]... [--threads N] [--seconds S] [--results FOLDER]``: this
    runs ``python -m pytest bench`` in the checkout, with its options, on the CPU; a GPU is measured by
    ``bench/gpu.sh``. S is the budget of the whole run, checks and compilation included: a row that is not finished then
    is left out of the report. The exit status is 1 if a result is wrong (its row has no time), or if S was too short
    for any row.
    """
    if listed:
        return _start("bench.alternatives", *["--json"] * as_json).returncode
    workloads = list(takewhile(lambda word: not word.startswith("-"), context.args))
    options = [*(f"--workload={name}" for name in workloads), *_absolute(context.args[len(workloads) :])]
    out = subprocess.PIPE if as_json else None
    done = _start("pytest", "bench", "-q", *options, stdout=out, stderr=subprocess.PIPE)
    if done.returncode == 4:  # pytest's for a wrong option: one line
        if unknown := re.search(r"unrecognized arguments: (--\S+)", done.stderr):
            options = re.findall(r"\[(--[a-z-]+)", bench.__doc__ or "")
            raise Wrong(f"No such option: {unknown[1]}{did_you_mean(unknown[1], options)} (fastcaps bench --help)")
        raise Wrong(re.sub(r"(?s)^usage:.*?error: |\s+inifile:.*", "", done.stderr.strip().removeprefix("ERROR: ")))
    print(done.stderr, end="", file=sys.stderr)
    if as_json:
        lines = done.stdout.splitlines()
        print(*[line for line in lines if line.startswith(("FAILED", "ERROR"))], sep="\n", end="", file=sys.stderr)
        written = [line.removeprefix("written: ") for line in lines if line.startswith("written: ")]
        if not written:
            raise Fail("no row was measured")
        document = json.loads((_root() / written[-1]).read_text(encoding="utf-8"))
        print(json.dumps([{**row, "machine": document["machine"]} for row in document["rows"]], indent=2))
    return int(done.returncode != 0)
