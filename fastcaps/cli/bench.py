"""``fastcaps bench`` and ``fastcaps compare``: the benchmark of a source checkout, from the command line.

The benchmark is no part of the installed package: it judges results by the rule that the tests have, and compares
commits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fastcaps.cli.common import Fail, refuse_missing, show
from fastcaps.cli.info import read_device

THREADS = min(2, os.cpu_count() or 1)


def checkout() -> Path:
    """Make the checkout's benchmark importable; returns its folder."""
    import fastcaps

    root = Path(fastcaps.__file__).resolve().parent.parent
    if not (root / "bench" / "session.py").is_file():
        raise Fail(
            "the benchmark lies in the source checkout and not in the installed package; there, run "
            "pip install --no-build-isolation -e '.[bench]' and this command again"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return root


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_table(rows: Sequence[dict[str, str]]) -> None:
    """A table of rows with the same columns, or fewer; where no terminal limits it, as wide as it is."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=240)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        shown.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        shown.add_row(*[row.get(name, "") for name in columns])
    console.print(shown, highlight=False)


def bench(
    workloads: Annotated[
        list[str] | None, Argument(metavar="[WORKLOAD]...", help="these layers of the papers alone (see --list)")
    ] = None,
    full: Annotated[bool, Option("--full", help="every row, torch.compile too: some 40 minutes")] = False,
    against: Annotated[list[str] | None, Option(help="only this alternative (repeat)")] = None,
    compiled: Annotated[bool, Option(help="with --full: torch.compile too")] = True,
    batch: Annotated[list[int] | None, Option(min=1, help="instead of a workload's own (repeat)")] = None,
    threads: Annotated[int, Option(min=1, help="of every contender")] = THREADS,
    device: Annotated[str, Option(help="cpu or cuda")] = "cpu",
    precision: Annotated[list[str] | None, Option(help="cuda: only this one (repeat)")] = None,
    seconds: Annotated[float, Option(help="start no row later than this")] = float("inf"),
    results: Annotated[Path | None, Option(help="folder of the record (.cache/bench of the checkout)")] = None,
    html: Annotated[Path | None, Option(metavar="PAGE", help="write these rows as a page with charts")] = None,
    goals: Annotated[bool, Option(help="fail where a goal that was held is lost")] = True,
    listed: Annotated[bool, Option("--list", help="list the workloads and the alternatives, and stop")] = False,
    as_json: Annotated[bool, Option("--json", help="print the rows as they are recorded, and nothing else")] = False,
) -> int:
    """Measure routings against what a PyTorch user would run instead: a few rows in two minutes, or --full.

    The exit status is 1 where a result is wrong, which then has no figure, or where a goal that was held is lost.
    """
    root = checkout()
    try:
        from bench import pages, report, selection
        from bench.alternatives import ALTERNATIVES
        from bench.goals import place
        from bench.runner import PRECISIONS
        from bench.session import LeftOut, Session
        from bench.timing import FULL, QUICK
        from bench.workloads import WORKLOADS
    except ImportError as error:
        refuse_missing(error)
    if listed:
        known = {name: f"{one.source}; batch {', '.join(map(str, one.batches))}" for name, one in WORKLOADS.items()}
        if as_json:
            show({"workloads": known, "alternatives": list(ALTERNATIVES)})
            return 0
        for name, what in known.items():
            print(f"{name:<22}  {what}")
        print(f"alternatives: {', '.join(ALTERNATIVES)}")
        return 0
    wrong = set(against or ()) - set(ALTERNATIVES)
    if wrong:
        raise Fail(f"--against: got {', '.join(sorted(wrong))}, want some of {', '.join(ALTERNATIVES)}")
    if device not in ("cpu", "cuda"):
        raise Fail(f"--device: got {device}, want cpu or cuda")
    read_device(device)
    if unknown := set(precision or ()) - set(PRECISIONS):
        raise Fail(f"--precision: got {', '.join(sorted(unknown))}, want some of {', '.join(PRECISIONS)}")
    if html is not None and not html.parent.is_dir():
        raise Fail(f"--html: there is no folder {html.parent}")
    quick = device == "cpu" and not full
    names = against or selection.alternatives(eager=quick or not compiled)
    try:
        rows = selection.cases(workloads or [], quick, device, batch or [], precision or [])
    except ValueError as error:
        raise Fail(str(error)) from error
    folder = results or root / ".cache" / "bench"
    session = Session(folder, names, QUICK if quick else FULL, threads, device, device == "cpu", seconds)
    try:
        with _progress() as progress:
            task = progress.add_task("", total=len(rows))
            for case in rows:
                progress.update(task, description=str(case))
                try:
                    session.run(case)
                except LeftOut:
                    break
                progress.advance(task)
    finally:
        session.close()
    if not session.rows:
        raise Fail(f"--seconds {seconds:g}: no row was begun")
    faults = [f"{place(row)}: refused, {row['refused']}" for row in session.rows if "refused" in row]
    faults += [f"{place(row)}: {why}" for row in session.rows for why in row["lost"] if goals]
    if as_json:
        show(session.rows)
    else:
        print(report.about(session.rows))
        _print_table([{"mode": row["mode"], **report.cells(row)} for row in session.rows])
        print(f"written: {session.file}")
    if html is not None:
        html.write_text(pages.html(session.rows), encoding="utf-8")
        if not as_json:
            print(f"written: {html}")
    for fault in faults:
        print(f"fastcaps bench: {fault}", file=sys.stderr)
    return int(bool(faults))


def compare(
    old: Annotated[str, Argument(metavar="REV", help="a commit, or a tree with its library")],
    new: Annotated[str | None, Argument(help="likewise; this checkout if none is given")] = None,
    workload: Annotated[list[str] | None, Option(help="rows whose names hold this word (repeat)")] = None,
    seconds: Annotated[float, Option(help="of a row's timed calls")] = 4.0,
    rounds: Annotated[int, Option(min=2, help="of a row, old and new in turns")] = 9,
    threads: Annotated[int, Option(min=1, help="of both sides")] = THREADS,
    limit: Annotated[float, Option(help="how much slower the median may be, as a share")] = 0.03,
    as_json: Annotated[bool, Option("--json", help="print rows and verdict, and nothing else")] = False,
) -> int:
    """Measure this checkout against another commit, in turns on this machine.

    The other commit is built once, beside this checkout's own build. A row of which this checkout's result is wrong,
    or other than before, is refused: it has no ratio, however fast it is. The exit status is 1 then, and where the
    median over rows is above the limit.
    """
    root = checkout()
    try:
        from bench import compare as turns
        from bench.goals import place
    except ImportError as error:
        refuse_missing(error)
    rows: list[dict[str, Any]] = []
    wanted = turns.rows_of(workload or [""])
    if not wanted:
        raise Fail(f"--workload: no row's name holds {' or '.join(workload or [])} (fastcaps bench --list)")
    with _progress() as progress:
        task = progress.add_task(f"building {old}, where it is not built yet", total=len(wanted))
        try:
            trees = [turns.tree_of(old), turns.tree_of(new or str(root))]
        except (ValueError, subprocess.CalledProcessError) as error:
            raise Fail(str(error)) from error
        for (case, mode), row in zip(wanted, turns.compare(trees, wanted, seconds, rounds, threads), strict=True):
            rows.append(row)
            progress.update(task, advance=1, description=f"{case.workload.name} {mode}")
    lines, passed = turns.summary(rows, limit)
    if as_json:
        show({"old": str(trees[0]), "new": str(trees[1]), "passed": passed, "rows": rows})
        return int(not passed)
    print(f"old {trees[0]}\nnew {trees[1]}")
    _print_table(
        [
            {
                "row": place(row),
                "old, ms": f"{row['old'] * 1e3:.3f}" if "old" in row else "",
                "new, ms": f"{row['new'] * 1e3:.3f}" if "new" in row else "",
                "ratio (over rounds)": f"{row['ratio']:.3f} ({row['least']:.3f}-{row['most']:.3f})"
                if "ratio" in row
                else turns.without_ratio(row),
            }
            for row in rows
        ]
    )
    print("\n".join(lines))
    return int(not passed)
