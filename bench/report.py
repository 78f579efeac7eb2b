"""Tables and pages from the records in ``bench/results``: the newest complete row of each, by the date inside.

python -m bench.report                       # what there is, as tables
python -m bench.report --write               # every figure of README and docs, and the pictures
python -m bench.report --html page.html      # one page with pictures, for a browser
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from bench import charts, gpu_report, record
from bench.alternatives import OURS, STORED
from bench.goals import number, place, shortfalls
from bench.markdown import as_markdown, into
from bench.routings import AttentionPass
from bench.timing import BUSY, WIDE
from bench.workloads import WORKLOADS

Row = dict[str, Any]
_EXTRA = ("extra memory of a step, MB", "with stored votes, MB")
LEGEND = (
    "Times are medians, with the 20th and 80th percentile. Speed-ups are relative to the fastest alternative. GFLOP/s "
    "counts useful operations; a training step counts as three forward passes. Extra MB: peak memory of one call "
    "without inputs and results, and its fraction of the votes. Stored: the same for the eager batched matmul. All "
    "tensors: with inputs, parameters, results and gradients. * ran again without vectorised loop tails. ~ is "
    f"doubtful: the middle 60 % of the calls differ by more than {WIDE:.0%}, the rate is above the machine's peak, or "
    f"the load average before the row was above {BUSY:g} per core."
)

PEAK_LEGEND = " Of peak: relative to a loop of multiply-adds only, timed alternately with the row."
SHORT = ("workload", "batch", "fastcaps, ms (p20-p80)", "fastest alternative", "speed-up", "extra MB (of votes)")


def _short(name: str) -> str:
    return name.replace("batched-matmul", "stored").replace("-matmul", "").replace("-compiled", ", compiled")


def _speedup(row: Row) -> str:
    return f"{'~' * bool(row.get('doubts'))}{number(row['speedup'])}×" if row["speedup"] else ""


def _milliseconds(entry: Row | None) -> str:
    return "{} ({}-{})".format(*(number(entry[key] * 1e3) for key in ("median", "p20", "p80"))) if entry else ""


def _megabytes(count: float | None) -> str:
    return "" if count is None else number(max(count, 1e4) / 1e6)


def cells(row: Row) -> dict[str, str]:
    """Return what a table says of a row, by column."""
    found = {"workload": row["workload"], "batch": str(row["batch"]), "votes, MB": _megabytes(row["votes_bytes"])}
    if "refused" in row:
        return found | {"fastcaps, ms (p20-p80)": f"refused: {row['refused']}"}
    entry, rival = row["fastcaps"], row["alternatives"].get(row["fastest"])
    found |= {
        "fastcaps, ms (p20-p80)": _milliseconds(entry),
        "fastest alternative": _short(row["fastest"]) + ("*" if "note" in rival else "") if rival else "none",
        "its ms (p20-p80)": _milliseconds(rival),
        "speed-up": _speedup(row),
    }
    found |= {"GFLOP/s": number(row["gflops"]), "of sgemm": f"{row['sgemm_share']:.0%}"}
    if "peak_share" in row:
        found["of peak"] = f"{row['peak_share']:.0%}"
    votes, (own, stored) = row["votes_bytes"], (charts.own_bytes(row, name) for name in (OURS, STORED))
    share = "" if own is None or own >= 0.995 * votes else f" ({own / votes:.1%})"
    found |= {"extra MB (of votes)": _megabytes(own) + share, "stored, MB": _megabytes(stored)}
    return found | {"all tensors, MB": _megabytes((row.get("memory") or {}).get(OURS, {}).get("total"))}


def about(rows: Sequence[Row]) -> str:
    """Return sentences on machine, versions, commits and dates of rows of one machine."""
    found = max(rows, key=_date)["machine"]
    machines = [row["machine"] for row in sorted(rows, key=_date)]
    commits = Counter(f"{one['commit']}{' (modified)' * one['modified']} of {one['date'][:10]}" for one in machines)
    speed = f", {found['threads']} threads on {found['cores']} cores"
    measured = {"sgemm_gflops": f"sgemm of {found['sgemm_size']}³", "peak_gflops": "multiply-adds alone"}
    for field, what in measured.items():
        rates = sorted(row[field] for row in rows if field in row)
        if rates:  # a wide spread says that something else ran meanwhile
            middle, least, most = (number(rate) for rate in (rates[len(rates) // 2], rates[0], rates[-1]))
            speed += f"; {what}: {middle} GFLOP/s ({least} to {most} over the rows)"
    loads = sorted(row["load"] for row in rows)
    speed += f"; load average before a row: {loads[0]:.1f} to {loads[-1]:.1f}"
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    backend = found["backend"] + (f" ({found['capability']})" if found["capability"] else "")
    counts = ", ".join(f"{commit}: {count} rows" for commit, count in commits.items())
    return f"{found['device']}{speed}. {versions}, backend {backend}. Commits: {counts}."


def tables(rows: Sequence[Row], short: bool = False) -> list[tuple[str, list[list[str]]]]:
    """Return (title, lines, the first being the head) of rows of one machine; ``short`` fits a terminal.

    A table has one precision and mode; batch 1 is apart where it is not the default.
    """
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    found = []
    for precision, single, mode in itertools.product(precisions, (False, True), charts.MODES):
        title = f"{mode.capitalize()}{', batch 1' * single}{f', {precision}' * (len(precisions) > 1)}"
        wanted = precision, single, mode
        part = [r for r in rows if (r["precision"], r["batch"] == 1 and not r["default"], r["mode"]) == wanted]
        if made := [cells(row) for row in part]:
            columns = [name for name in max(made, key=len) if not short or name in SHORT]
            found.append((title, [columns, *[[one.get(name, "") for name in columns] for one in made]]))
    return found


def _legend(rows: Sequence[Row]) -> str:
    return LEGEND + PEAK_LEGEND * any("peak_share" in row for row in rows)


def _without_figures(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each way in which an alternative gave no figure, or gave one only after a crash."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, entry in row["alternatives"].items():
            if what := entry.get("failed") or entry.get("note"):
                what = re.sub("wrong result: [^;]*", "wrong result", what)  # how wrong, the record says
                found.setdefault(f"{_short(name)}: {what}", []).append(place(row))
    return [f"{what}: {'; '.join(places)}" for what, places in found.items()]


def markdown(rows: Sequence[Row], short: bool = False) -> str:
    """Return rows of one machine as markdown: what was measured on, tables, and what there is to say."""
    lines = [about(rows), "", _legend(rows), ""]
    for title, made in tables(rows, short):
        lines += [f"**{title}**", "", as_markdown(made), ""]
    for title, sentences in (
        ("Targets missed:", shortfalls(rows)),
        ("Doubtful:", [f"{place(row)}: {'; '.join(row['doubts'])}" for row in rows if row.get("doubts")]),
        ("Alternatives without a time, and those marked *:", _without_figures(rows)),
    ):
        if sentences:
            lines += [title, "", *[f"- {sentence}" for sentence in sentences], ""]
    return "\n".join(lines).rstrip()


def _date(row: Row) -> str:
    return row["machine"]["date"]


def _dates(rows: Iterable[Row]) -> str:
    """Return the day on which rows were measured, or the first and the last."""
    days = sorted({_date(row)[:10] for row in rows})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def _by_device(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each machine, the machine measured last first."""
    found = [[*some] for _, some in itertools.groupby(rows, lambda row: row["machine"]["device"])]  # they are sorted
    return sorted(found, key=lambda some: max(map(_date, some)), reverse=True)


def html(rows: Sequence[Row]) -> str:
    """Return one page with the charts and tables of every machine, for a browser or a phone."""
    parts = []
    for some in _by_device(rows):
        timed = [row for row in some if "fastcaps" in row]
        parts += [f"<h1>{escape(some[0]['machine']['device'])}</h1><p>{escape(about(some))}</p>"]
        drawn = charts.picture(timed)
        parts += [f"<p>{escape(_legend(some))}</p>", f"<div>{drawn[drawn.index('<svg') :]}</div>"]
        for title, (head, *lines) in tables(some):
            cut = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in (head, *lines)]
            parts.append(f"<h2>{title}</h2><div><table>{''.join(cut)}</table></div>")
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>fastcaps: measured</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>'
        ":root{color-scheme:light dark} body{font:16px/1.5 system-ui,sans-serif;margin:1rem}"
        "svg{max-width:100%;min-width:50rem;height:auto} div{overflow-x:auto}"
        "table{border-collapse:collapse;font-size:.8rem;white-space:nowrap}"
        "td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #8886} tr:first-child{font-weight:bold}"
        f"</style>{''.join(parts)}</html>\n"
    )


def _chosen(rows: Sequence[Row]) -> str:
    """Return a table of the layers in the picture at their default batches, both modes."""
    by_name = charts.by_layer(row for row in rows if row["default"] and "fastcaps" in row)
    lines = [["layer (batch)", *[name for mode in charts.MODES for name in (f"{mode}, ms", "speed-up")], *_EXTRA]]
    for name in charts.CHOSEN:
        both = by_name.get(name, {})
        line = [f"`{name}` ({WORKLOADS[name].batch})"]
        for row in map(both.get, charts.MODES):
            line += [number(row["fastcaps"]["median"] * 1e3), _speedup(row)] if row else ["", ""]
        step = both.get("training step", {})
        lines.append([*line, *(_megabytes(charts.own_bytes(step, way)) for way in (OURS, STORED))])
    return as_markdown(lines)


def behind(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in which an alternative is faster, also after rounding (below 0.995), the worst first."""
    return sorted((row for row in rows if (row.get("speedup") or 1.0) < 0.995), key=lambda row: row["speedup"])


def summary(rows: Sequence[Row]) -> str:
    """Return what docs/performance.md opens with: where an alternative is faster, and a table."""
    slower = [f"- `{row['workload']}` batch {row['batch']}, {row['mode']}: {_speedup(row)} of {_short(row['fastest'])}"
              for row in behind(rows)]  # fmt: skip
    equal = sum(0.995 <= (row.get("speedup") or 0.0) < 1.005 for row in rows)
    said = f"Rows marked ~ ({sum('~' in _speedup(row) for row in rows)}) are doubtful. "
    said += f"An alternative is faster in {len(slower)} of {len(rows)} rows"
    said += f" (and equally fast in {equal})" * bool(equal) + (":" if slower else ".")
    return "\n\n".join([said, *["\n".join(slower)] * bool(slower), _chosen(rows), about(rows)])


def first(rows: Sequence[Row]) -> str:
    """Return the sentences below the README's picture."""
    machine = max(rows, key=_date)["machine"]
    return (
        f"*{machine['device']}, {machine['threads']} threads, float32, {_dates(rows)}: layers of the papers "
        "(inverted attention: one iteration after the first) against the fastest of up to "
        f"{max(len(row['alternatives']) for row in rows)} PyTorch alternatives, compiled ones included. In "
        f"{len(behind(rows))} of {len(rows)} rows of the whole table an alternative is faster "
        "([all rows](docs/performance.md)). ~: doubtful, as the machine was busy. Extra memory is what a training step "
        "needs beside its inputs and results, compared with stored votes.*"
    )


def start(rows: Sequence[Row]) -> str:
    """Return the figures of the documentation's first page: what two layers gain in a training step."""
    layers = {"tsai-c10-conv1": "A capsule convolution for CIFAR-10 (Tsai et al.), one iteration",
              "sabour-mnist": "The class capsules of Sabour et al.'s network for MNIST"}  # fmt: skip
    lines = []
    for step in (row for row in rows if row["default"] and row["mode"] == charts.MODES[1] and "fastcaps" in row):
        if step["workload"] not in layers:
            continue
        own, stored = (_megabytes(charts.own_bytes(step, way)) for way in (OURS, STORED))
        lines.append(
            f"- {layers[step['workload']]}: a training step is **{_speedup(step)}** as fast as the fastest of several "
            f"PyTorch alternatives, and needs **{own} MB** of extra memory where stored votes need {stored} MB."
        )
    machine = max(rows, key=_date)["machine"]
    key = " ~: doubtful ([why](performance.md#alternatives))." * any("**~" in line for line in lines)
    return "\n".join([*lines, "", f"*{machine['device']}, {machine['threads']} threads, {_dates(rows)}.{key}*"])


def public(rows: Sequence[Row], full: bool = True) -> str:
    """Return a table of public programs, published and with our layers; without ``full`` of layers alone, in short."""
    lines = [["program", "layer, or network (batch)" if full else "layer (batch)", "step, ms: theirs → ours",
              "peak memory, MB: theirs → ours", "largest difference", "theirs under torch.compile, ms"]]  # fmt: skip
    for row in rows if full else [row for row in rows if not row["network"]]:
        link = f"[{row['repository']}](https://github.com/{row['repository']}/tree/{row['commit']})"
        line = [link + f" {row['commit'][:7]}" * full, f"{row['what']} ({row['batch']})"]
        if "refused" in row:
            lines.append([*line, f"refused: {row['refused']}", *[""] * (len(lines[0]) - 3)])
            continue
        for factor, way in ((1e3, lambda name: row[name]["median"]), (1e-6, row["memory"].get)):  # noqa: B023
            theirs, ours = (factor * way(name) for name in ("theirs", "ours"))
            line.append(f"{number(theirs)} → {number(ours)} (**{number(theirs / ours)}×**)")
        compiled = row.get("compiled", {})
        other = number(compiled["median"] * 1e3) if "median" in compiled else compiled.get("failed", "")
        lines.append([*line, f"{row['equal']['float64']:.0e}", other])
    machine, loads = rows[0]["machine"], sorted(row["load"] for row in rows)
    text = (
        "A training step (forward and backward) of layers as published → with ours. Peak memory includes gradients. "
        f"Largest difference: of results and gradients, in float64. {machine['device']}, "
        f"{machine['threads']} threads, {_dates(rows)}."
    )
    text += full * (
        f" torch {machine['versions']['torch']}, float32, commit {machine['commit']}"
        f"{' (modified)' * machine['modified']}, load average before a row {loads[0]:.1f} to {loads[-1]:.1f}. "
        "Times are medians of alternate steps, in one process. Memory is what a step adds at its peak. "
        "Differences are relative to the tensor's largest value; in float32 our error is at most three times "
        "theirs, or 1e-5."
    )
    return f"{text}\n\n{as_markdown(lines)}"


def write(
    rows: Sequence[Row], programs: Sequence[Row], gpu: Sequence[Row], root: Path = record.ROOT
) -> list[Path]:  # fmt: skip
    """Put the figures and the pictures of all rows, of the newest record of public programs and of GPUs into README and
    docs; return the files that were written."""
    passes = {name for name, work in WORKLOADS.items() if isinstance(work.routing, AttentionPass)}
    on_cpu = [row for row in rows if row["batch"] in WORKLOADS[row["workload"]].batches]
    # a page shows one machine: that of the most rows, of two as many the one that was measured last
    on_cpu = max(_by_device(on_cpu), key=lambda part: (len(part), max(map(_date, part))), default=[])
    newest = max(map(_date, programs), default="")
    programs = [row for row in programs if _date(row) == newest]
    wanted: dict[Path, str] = {}
    for path, name, part, make in (
        ("README.md", "figures", on_cpu, first),
        ("README.md", "public", programs, partial(public, full=False)),
        ("docs/relation.md", "public", programs, public),
        ("docs/index.md", "start", on_cpu, start),
        ("docs/performance.md", "summary", on_cpu, summary),
        ("docs/performance/attention.md", "attention", [r for r in on_cpu if r["workload"] in passes], markdown),
        ("docs/performance/routings.md", "routings", [r for r in on_cpu if r["workload"] not in passes], markdown),
        ("README.md", "device", gpu, gpu_report.sentence),
        ("docs/performance/gpu.md", "device", gpu, gpu_report.markdown),
    ):
        if part:
            page = root / path
            wanted[page] = into(wanted.get(page) or page.read_text(), make(part), name)
    if on_cpu:
        wanted[root / "docs/performance/speedup.svg"] = charts.picture(on_cpu, charts.CHOSEN, ["speedup"])
        wanted[root / "docs/performance/first.svg"] = charts.picture(on_cpu, charts.FIRST, ["speedup"])
        wanted[root / "docs/performance/memory.svg"] = charts.picture(on_cpu, charts.FIRST, ["memory"])
    for path, text in wanted.items():  # only once all of them could be made
        path.write_text(text)
    return list(wanted)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables and pages from benchmark records.")
    parser.add_argument("files", nargs="*", type=Path, default=[record.RESULTS], help="JSON files, folders")
    parser.add_argument("--write", action="store_true", help="write the figures of README and docs")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write one page with pictures")
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        named = [file for file in given.files if not file.name.startswith(f"{gpu_report.KIND}-")]  # or a folder
        rows, gpu = record.merge(record.load(*named)), record.load(*given.files, kind=gpu_report.KIND)
        gpu = [row for row in gpu if "how" in row]
        if not rows and not gpu:
            raise ValueError("no results to report")
        if given.write:
            programs = record.load(*given.files, kind="public")
            written = write(rows, programs, gpu)
            print("\n".join(f"written: {path}" for path in written))
        if given.html is not None:
            given.html.write_text(html(rows), encoding="utf-8")
            print(f"written: {given.html}")
        if not given.write and given.html is None:
            print(*map(markdown, _by_device(rows)), *[gpu_report.markdown(gpu)] * bool(gpu), sep="\n")
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
