"""Tables from results: for the terminal, for docs/performance.md, and what falls short of its goal.

python bench/report.py                                   # the newest results, as a readable table
python bench/report.py FILE ... --markdown               # several files: later rows replace earlier ones
python bench/report.py --into docs/performance.md  # between its markers
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import device_report
from bench.device_report import SHORT, number
from bench.routings import AttentionPass
from bench.workloads import WORKLOADS

__all__ = ["BEGIN", "END", "into", "markdown", "means", "merge", "print_document", "shortfalls", "tables"]

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
ROUTINGS = "<!-- routings:begin -->", "<!-- routings:end -->"
"""What a page's tables of whole routings stand between; :data:`BEGIN` and :data:`END` hold all others."""
RESULTS = Path(__file__).resolve().parent / "results"

COLUMNS = (
    "workload",
    "batch",
    "votes",
    "fastcaps ms (p20-p80)",
    "fastest alternative",
    "ms (p20-p80)",
    "speed-up",
    "GFLOP/s",
    "of sgemm",
    "peak MB (own; of votes)",
    "bmm's",
)

WHOLE_COLUMNS = (
    "workload",
    "batch",
    "votes",
    "fastcaps ms (p20-p80)",
    "inputs and parameters MB",
    "results and gradients MB",
    "for a time MB",
    "all tensors MB",
    "process MB",
)

LEGEND = (
    "Times are the median (20th-80th percentile) of calls in turns; GFLOP/s counts useful operations, recomputation "
    "left out (a training step: three times the forward pass). Peak MB: growth of a fresh process during one call, in "
    "brackets without the results that it returns, and that as a share of the votes; bmm's is the eager batched-matmul "
    "alternative's. * after a restart, see below."
)

WHOLE_LEGEND = (
    "Training steps for which no alternative fits into memory, or whose memory as a whole was promised: inputs (with "
    "the cotangent) and parameters, results and gradients, what is needed for a time, and their sum; last the whole "
    "process at its peak, Python and torch included."
)


def _milliseconds(entry: dict[str, Any]) -> str:
    median, p20, p80 = (number(entry[key] * 1e3) for key in ("median", "p20", "p80"))
    return f"{median} ({p20}-{p80})"


def _bytes(count: float) -> str:
    return f"{number(max(count, 1e4) / 1e6)} MB"


def _peak(memory: dict[str, Any], name: str, votes: float | None = None) -> str:
    entry = memory.get(name)
    if entry is None:
        return ""
    if "failed" in entry:
        return "failed"
    peak, own = (number(max(entry[key], 1e4) / 1e6) for key in ("peak", "beyond"))
    share = "" if votes is None else f"; {_share(entry['beyond'] / votes)}"
    return f"{peak} ({own}{share})"


def _share(value: float) -> str:
    """Return a share in percent; what is above the whole is not worth a number."""
    return f"{value:.1%}" if value < 0.995 else "all"


def _cells(row: dict[str, Any]) -> list[str]:
    """Return one table line, in the order of ``COLUMNS``."""
    head = [row["workload"], str(row["batch"]), _bytes(row["votes_bytes"])]
    if "refused" in row:
        return [*head, f"refused: {row['refused']}", *[""] * (len(COLUMNS) - 4)]
    fastest = row["fastest"]
    other = ["none", "", ""]
    if fastest is not None:
        note = "*" if "note" in row["alternatives"][fastest] else ""
        name = SHORT.get(fastest, fastest) + note
        other = [name, _milliseconds(row["alternatives"][fastest]), f"{number(row['speedup'])}×"]
    memory = row["memory"]
    others = [_peak(memory, name) for name in memory if name not in ("fastcaps", "left_out")]
    return [
        *head,
        _milliseconds(row["fastcaps"]),
        *other,
        number(row["gflops"]),
        f"{row['sgemm_share']:.0%}",
        _peak(memory, "fastcaps", row["votes_bytes"]),
        others[0] if others else "",
    ]


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return (title, lines with the head first): for each mode, batches set beside batch 1, then whole layers."""
    found = []
    for single in (False, True):
        for mode in ("forward", "training step"):
            rows = [row for row in document["rows"] if row["mode"] == mode and _is_extra(row) == single]
            if rows:
                title = f"{mode.capitalize()}, batch 1" if single else mode.capitalize()
                found.append((title, [list(COLUMNS), *(_cells(row) for row in rows)]))
    whole = [row for row in document["rows"] if _is_whole(row)]
    if whole:
        found.append(("Memory of whole layers", [list(WHOLE_COLUMNS), *(_whole_cells(row) for row in whole)]))
    return found


def _is_extra(row: dict[str, Any]) -> bool:
    """Tell whether a row is one of batch 1 beside the workload's default batch."""
    return row["batch"] == 1 and not row.get("default", False)


def _is_whole(row: dict[str, Any]) -> bool:
    """Tell whether a row's memory as a whole is shown: a training step without alternatives, or with a goal for it."""
    if row["mode"] != "training step" or "total" not in row.get("memory", {}).get("fastcaps", {}):
        return False
    alternatives = row["alternatives"].values()
    none_fits = bool(alternatives) and all("left_out" in entry for entry in alternatives)
    return none_fits or "total" in (row["goal"] or {})


def _whole_cells(row: dict[str, Any]) -> list[str]:
    """Return one table line, in the order of ``WHOLE_COLUMNS``."""
    memory = row["memory"]["fastcaps"]
    sizes = [number(max(memory[key], 1e4) / 1e6) for key in ("inputs", "results", "beyond", "total", "resident")]
    head = [row["workload"], str(row["batch"]), _bytes(row["votes_bytes"])]
    return [*head, _milliseconds(row["fastcaps"]), *sizes]


def means(document: dict[str, Any]) -> list[tuple[str, float, int, float]]:
    """Return for each mode (mode, geometric mean of the speed-ups, rows, goal) over the rows that have such a goal."""
    found = []
    for mode in ("forward", "training step"):
        rows = [row for row in document["rows"] if row["mode"] == mode and "mean" in (row.get("goal") or {})]
        speedups = [row["speedup"] for row in rows if row.get("speedup")]
        if speedups:
            middle = math.exp(sum(map(math.log, speedups)) / len(speedups))
            found.append((mode, middle, len(speedups), rows[0]["goal"]["mean"]))
    return found


def _means(document: dict[str, Any]) -> list[str]:
    """Return a sentence for each mode's geometric mean."""
    return [
        f"{mode}: {number(middle)}×, over {count} rows of whole routings (goal {number(goal)}×)"
        for mode, middle, count, goal in means(document)
    ]


def shortfalls(document: dict[str, Any]) -> list[str]:
    """Return a sentence for every figure that misses its goal."""
    missed = []
    for row in document["rows"]:
        goal, place = row.get("goal"), f"{row['workload']} batch {row['batch']} {row['mode']}"
        if "refused" in row:
            missed.append(f"{place}: refused, {row['refused']}")
            continue
        if not goal:
            continue
        wanted = goal.get("speedup")
        if wanted is not None and row["speedup"] is not None and row["speedup"] < wanted:
            missed.append(f"{place}: {number(row['speedup'])}× of the fastest alternative, goal {number(wanted)}×")
        share = goal.get("sgemm_share")
        if share is not None and row["sgemm_share"] < share:
            missed.append(f"{place}: {row['sgemm_share']:.0%} of sgemm, goal {share:.0%}")
        missed += [f"{place}: {what}" for what in _too_much_memory(row)]
    for mode, middle, count, wanted in means(document):
        if middle < wanted:
            missed.append(f"{mode}, geometric mean of {count} rows: {number(middle)}×, goal {number(wanted)}×")
    return missed


def _too_much_memory(row: dict[str, Any]) -> list[str]:
    """Return what a row says of memory that misses its goal."""
    memory, goal, found = row.get("memory", {}).get("fastcaps", {}), row["goal"], []
    if "memory_share" in goal and memory.get("beyond", 0) > goal["memory_share"] * row["votes_bytes"]:
        share = memory["beyond"] / row["votes_bytes"]
        found.append(f"{share:.1%} of the votes' bytes beside the results, goal {goal['memory_share']:.0%}")
    if memory.get("total", 0) > goal.get("total", math.inf):
        found.append(f"{number(memory['total'] / 1e6)} MB in all tensors, goal {number(goal['total'] / 1e6)} MB")
    return found


def _about(document: dict[str, Any]) -> str:
    """Return a sentence on machine, versions, commit and date."""
    about = document["machine"]
    versions = about["versions"]
    capability = f" ({about['capability']})" if about["capability"] else ""
    rates = sorted(row["sgemm_gflops"] for row in document["rows"] if "sgemm_gflops" in row)
    size = document["sgemm_size"]
    sgemm = ""
    if rates:  # a wide spread says that something else ran meanwhile
        middle, least, most = (number(rate) for rate in (rates[len(rates) // 2], rates[0], rates[-1]))
        sgemm = f"; sgemm of {size}³: {middle} GFLOP/s ({least} to {most} over the rows)"
    commit = about["commit"] + (" (modified)" if about["modified"] else "")
    return (
        f"{about['device']}, {about['threads']} threads on {about['cores']} cores{sgemm}. fastcaps "
        f"{versions['fastcaps']}, backend {about['backend']}{capability}; torch {versions['torch']}, Python "
        f"{versions['python']}. Commit {commit}, {about['date'][:16].replace('T', ' ')} UTC, {document['kind']} run."
    )


def _failures(document: dict[str, Any]) -> list[str]:
    """Return a sentence for each alternative that gave no figure, or gave one only after a crash."""
    found: dict[str, list[str]] = {}
    for row in document["rows"]:
        for name, entry in row.get("alternatives", {}).items():
            what = entry.get("failed") or entry.get("note") or entry.get("left_out")
            if what:
                place = f"{row['workload']} batch {row['batch']} {row['mode']}"
                found.setdefault(f"{SHORT.get(name, name)}: {what}", []).append(place)
    return [f"{what} — on {'; '.join(places)}" for what, places in found.items()]


def markdown(document: dict[str, Any]) -> str:
    """Return the document as markdown: what was measured on, a table for each mode, and what there is to say."""
    lines = [_about(document), "", LEGEND, ""]
    for title, (head, *cells) in tables(document):
        right = ["---"] + ["---:"] * (len(head) - 1)
        lines += [f"**{title}**", ""]
        if head == list(WHOLE_COLUMNS):
            lines += [WHOLE_LEGEND, ""]
        lines += [f"| {' | '.join(line)} |" for line in [head, right, *cells]]
        lines.append("")
    for title, sentences in (
        ("Geometric means of the speed-ups:", _means(document)),
        ("Below the goal:", shortfalls(document)),
        ("Alternatives without a figure, and those marked *:", _failures(document)),
    ):
        if sentences:
            lines += [title, "", *[f"- {sentence}" for sentence in sentences], ""]
    return "\n".join(lines)


def print_document(document: dict[str, Any]) -> None:
    """Print the document as tables for a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    # no terminal (CI, a file): wide enough that no cell is broken
    if not console.is_terminal or console.width < 150:
        console.width = 170
    console.print(_about(document), markup=False)
    console.print(LEGEND, markup=False)
    for title, (head, *cells) in tables(document):
        table = Table(title=title, title_justify="left", pad_edge=False)
        for index, column in enumerate(head):
            table.add_column(column, justify="left" if index in (0, 4) else "right", overflow="fold")
        for line in cells:
            table.add_row(*line)
        console.print(table)
    for title, sentences in (
        ("Geometric means:", _means(document)),
        ("Below the goal:", shortfalls(document)),
        ("Alternatives:", _failures(document)),
    ):
        if sentences:
            console.print(title, markup=False)
            for sentence in sentences:
                console.print(f"  {sentence}", markup=False)


def merge(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one document with the rows of all; a later row replaces an earlier one of the same name, batch and mode.

    Raises
    ------
    ValueError
        If there is none, or they are from different devices.
    """
    if not documents:
        raise ValueError("no results to report")
    if len({document["kind"] == "device" for document in documents}) > 1:
        raise ValueError("results of the CPU and of a device have tables of their own: give the one or the other")
    devices = {document["machine"]["device"] for document in documents}
    if len(devices) > 1:
        raise ValueError(f"results are from different devices: {', '.join(sorted(devices))}")
    keys = ("workload", "batch", "mode", "precision")
    rows = {tuple(row.get(key) for key in keys): row for document in documents for row in document["rows"]}
    return documents[-1] | {"rows": list(rows.values())}


def into(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """Return ``page`` with ``table`` between its markers.

    Raises
    ------
    ValueError
        If the page does not have each marker once, in order.
    """
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs one {begin} and, after it, one {end}")
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n{table.strip()}\n{end}{after}"


def sections(document: dict[str, Any]) -> list[tuple[dict[str, Any], tuple[str, str]]]:
    """Return the parts of a document that a page has separately, each with its markers."""
    if document["kind"] == "device":
        return [(document, (device_report.BEGIN, device_report.END))]
    whole = {work.name for work in WORKLOADS.values() if not isinstance(work.routing, AttentionPass)}
    split = [
        ([row for row in document["rows"] if (row["workload"] in whole) == routings], markers)
        for routings, markers in ((False, (BEGIN, END)), (True, ROUTINGS))
    ]
    return [(document | {"rows": rows}, markers) for rows, markers in split if rows]


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Tables from benchmark results.")
    parser.add_argument("files", nargs="*", type=Path, help="JSON files (default: the newest in bench/results)")
    parser.add_argument("--markdown", action="store_true", help="print markdown")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the markdown between the markers of a page")
    given = parser.parse_args(None if arguments is None else list(arguments))
    files = given.files or sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)[-1:]
    try:
        document = merge([json.loads(path.read_text()) for path in files])
        on_device = document["kind"] == "device"
        as_text = device_report.markdown if on_device else markdown
        if given.into is not None:
            page = given.into.read_text()
            for part, markers in sections(document):
                page = into(page, as_text(part), *markers)
            given.into.write_text(page)
        elif given.markdown or on_device:
            print(as_text(document))
        else:
            print_document(document)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
