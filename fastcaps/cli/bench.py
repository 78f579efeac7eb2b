"""``fastcaps bench`` and ``fastcaps compare``: the benchmark of a source checkout, run there as a process.

The benchmark is no part of the installed package: it judges results by the rule that the tests have, and compares
commits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from fastcaps.cli.common import Fail, refuse_missing


def _start(module: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a module in the checkout that this package lies in, and return how it ended."""
    import fastcaps

    root = Path(fastcaps.__file__).resolve().parent.parent
    if not (root / "bench" / "conftest.py").is_file():
        raise Fail(
            "the benchmark lies in the source checkout and not in the installed package; there, run "
            "pip install --no-build-isolation -e '.[bench]' and this command again"
        )
    if find_spec("pytest_benchmark") is None:
        refuse_missing(ImportError(name="pytest_benchmark"))
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=root, text=True, check=False, **options)


def bench(
    workloads: Annotated[
        list[str] | None, Argument(metavar="[WORKLOAD]...", help="these layers of the papers alone (see --list)")
    ] = None,
    full: Annotated[bool, Option("--full", help="every row, torch.compile too: some 40 minutes")] = False,
    against: Annotated[list[str] | None, Option(help="only this alternative (repeat)")] = None,
    compiled: Annotated[bool, Option(help="with --full: torch.compile too")] = True,
    batch: Annotated[list[int] | None, Option(min=1, help="instead of a workload's own (repeat)")] = None,
    threads: Annotated[int | None, Option(min=1, help="of every contender (2)")] = None,
    device: Annotated[str, Option(help="cpu or cuda")] = "cpu",
    precision: Annotated[list[str] | None, Option(help="cuda: only this one (repeat)")] = None,
    seconds: Annotated[float | None, Option(help="start no row later than this")] = None,
    results: Annotated[Path | None, Option(help="folder of the record (.cache/bench of the checkout)")] = None,
    html: Annotated[Path | None, Option(metavar="PAGE", help="write these rows as a page with charts")] = None,
    goals: Annotated[bool, Option(help="fail where a goal that was held is lost")] = True,
    listed: Annotated[bool, Option("--list", help="list the workloads and the alternatives, and stop")] = False,
    as_json: Annotated[bool, Option("--json", help="print the rows as they are recorded, and nothing else")] = False,
) -> int:
    """Measure routings against what a PyTorch user would run instead: a few rows in two minutes, or --full.

    It is ``python -m pytest bench`` of the checkout, with its options. The exit status is 1 where a result is wrong,
    which then has no figure, or where a goal that was held is lost.
    """
    if listed:
        return _start("bench.alternatives", *["--json"] * as_json).returncode
    if html is not None and not html.parent.is_dir():
        raise Fail(f"--html: there is no folder {html.parent}")
    places = {"results": results and results.resolve(), "html": html and html.resolve()}
    given = [
        *[(name, value) for name, value in {"threads": threads, "seconds": seconds, **places}.items() if value],
        *[("workload", name) for name in workloads or ()],
        *[("against", name) for name in against or ()],
        *[("batch", size) for size in batch or ()],
        *[("precision", name) for name in precision or ()],
    ]
    flags = {"--full": full, "--no-compile": not compiled, "--no-goals": not goals}
    options = [f"--device={device}", *[f"--{name}={value}" for name, value in given]]
    options += [flag for flag, wanted in flags.items() if wanted]
    out = subprocess.PIPE if as_json else None
    done = _start("pytest", "bench", "-q", *options, stdout=out, stderr=subprocess.PIPE)
    if done.returncode == 4:  # pytest's for a wrong option: one line
        raise Fail(done.stderr.strip().removeprefix("ERROR: "))
    print(done.stderr, end="", file=sys.stderr)
    if as_json:
        lines = done.stdout.splitlines()
        print(*[line for line in lines if line.startswith(("FAILED", "ERROR"))], sep="\n", end="", file=sys.stderr)
        written = [line.removeprefix("written: ") for line in lines if line.startswith("written: ")]
        if not written:
            raise Fail("no row was measured")
        root = Path(__file__).resolve().parents[2]
        document = json.loads((root / written[-1]).read_text(encoding="utf-8"))
        print(json.dumps([{**row, "machine": document["machine"]} for row in document["rows"]], indent=2))
    return int(done.returncode != 0)


def compare(context: Context) -> int:
    """Measure this checkout against another commit (REV, or a tree with its library), in turns on this machine.

    ``fastcaps compare REV [NEW] [--workload WORD]... [--seconds S] [--rounds N] [--threads N] [--limit SHARE]
    [--json]``: rows whose names hold a word; seconds of a row's timed calls; how much slower the median may be. NEW
    is this checkout if none is given. The other commit is built once, beside this checkout's own build. A row of which
    this checkout's result is wrong, or other than before, is refused: it has no ratio, however fast it is. The exit
    status is 1 then, and where the median over rows is above the limit.
    """
    arguments = [str(Path(word).resolve()) if Path(word).is_dir() else word for word in context.args]
    return _start("bench.compare", *arguments).returncode
