"""The tables, sentences and pictures of README and docs, from the records in ``bench/results`` alone.

python -m bench.report --write
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import charts, record
from bench.alternatives import ALTERNATIVES, OURS, STORED
from bench.figures import (
    MODES,
    behind,
    best,
    by_processor,
    extra_bytes,
    is_default,
    megabytes,
    milliseconds,
    number,
    place,
    ratio,
    rival,
    short,
    speedup,
)  # fmt: skip
from bench.floors import Chip, floors
from bench.markdown import as_markdown, into
from bench.record import Call, Calls, Entry
from bench.routings import AttentionPass
from bench.timing import BUSY, WIDE
from bench.workload import PRECISIONS, Case
from bench.workloads import WORKLOADS

ON_GPU = "gpu"  # the kind of files that have a GPU's entries; "bench": a CPU's
LEGENDS = {
    "bench": (
        "Times are medians, with the 20th and 80th percentile. Speed-ups are relative to the fastest alternative. "
        "Extra MB: peak memory of one call without inputs and results, and its fraction of the votes. Stored: the same "
        "for the eager batched matmul. * ran again without vectorised loop tails. ~ is doubtful: the middle 60 % of "
        f"the calls differ by more than {WIDE:.0%}, or the load average before the row was above {BUSY:g} per core."
    ),
    ON_GPU: (
        "Times: the least of the medians of calls queued behind each other, and in a replayed CUDA graph where the "
        "launches of a call take longer than its kernels. What follows the goals (of float32, TF32, bfloat16) is of "
        "float32. Bound: what multiply-adds, tensor cores (by three TF32 products), exponentials or memory alone would "
        "take (`python -m bench.floors`), as a share of the GPU's time. Host: how long a call keeps the processor, the "
        "GPU being idle. Extra MB: peak memory without inputs and results."
    ),
}
GOALS: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("tsai-c10-conv1", "forward"): (0.21, 0.17, 0.17),
    ("tsai-c10-conv1", "training step"): (1.5, 1.1, 0.8),
    ("tsai-c10-conv2", "forward"): (0.13, None, None),
    ("tsai-c100-conv1", "forward"): (0.75, 0.3, None),
    ("tsai-dmm-matrix-conv", "forward"): (0.31, 0.1, None),
    ("tsai-dmm-vector-conv", "forward"): (2.0, 0.7, None),
    ("sabour-mnist", "forward"): (0.035, None, None),
    ("tsai-dr-c100", "forward"): (0.6, 0.25, None),
    ("hinton-conv", "forward"): (1.25, 0.85, None),
    ("heinsen-norb-1", "forward"): (0.95, 0.6, None),
    ("li-capnet-dynamic", "forward"): (0.3, None, None),
    ("million", "forward"): (3.0, 1.0, None),
}
"""What is aimed at on a GPU, in ms, at batch 128 (``million``: 1), in float32, TF32 and bfloat16."""

# ---- tables ----------------------------------------------------------------------------------------------------------


def _range(entry: Entry) -> str:
    """Return the median of an entry in ms, with the 20th and 80th percentile."""
    return "{} ({}-{})".format(*(milliseconds(entry["warm"][part]) for part in ("median", "p20", "p80")))


def cells(call: Call, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return what a table of a CPU says of a call, by column."""
    entry, fastest = entries[OURS], rival(entries)
    votes, stored = WORKLOADS[call[0]].votes_bytes(call[1]), extra_bytes(entries.get(STORED))
    found = {"workload": call[0], "batch": str(call[1]), "votes, MB": megabytes(votes)}
    if best(entry) is None:
        return found | {"fastcaps, ms (p20-p80)": f"refused: {entry.get('failed') or entry['complaint']}"}
    other = entries[fastest[0]] if fastest else {}
    found["fastcaps, ms (p20-p80)"] = _range(entry)
    found["fastest alternative"] = short(fastest[0]) + "*" * ("note" in other) if fastest else "none"
    found["its ms (p20-p80)"] = _range(other) if other else ""
    found["speed-up"] = speedup(entries)
    found["by processor time"] = by_processor(entries)
    own = extra_bytes(entry)
    share = "" if own is None or own >= 0.995 * votes else f" ({own / votes:.1%})"
    return found | {"extra MB (of votes)": megabytes(own) + share, "stored, MB": megabytes(stored)}


def cells_on_gpu(calls: Calls, name: str, mode: str) -> dict[str, str]:
    """Return what a table of a GPU says of a workload, by column: its own batch in every precision, and batch 1."""
    entries = {(batch, precision): found[OURS] for (one, batch, kind, precision), found in calls.items()
               if (one, kind) == (name, mode)}  # fmt: skip
    batch = max(batch for batch, _ in entries)
    found = {"workload": name, "batch": str(batch)}
    columns = {f"{precision}, ms": (batch, precision) for precision in PRECISIONS}
    for column, key in (columns | {"batch 1, ms": (1, "fp32")} if batch > 1 else columns).items():
        entry = entries.get(key, {})
        late = " †" * bool(entry.get("complaint"))
        found[column] = "failed" if entry.get("failed") else milliseconds(best(entry)) + late if entry else ""
    goals = [number(goal) if goal else "–" for goal in GOALS.get((name, mode), ())]
    found["goals"] = ", ".join(goals)
    main = (name, batch, mode, "fp32")
    if main not in calls or best(entry := calls[main][OURS]) is None:
        return found
    bound = floors(Case(WORKLOADS[name], batch, mode != MODES[0], "fp32"), Chip.of(entry["machine"]["device"]))["bound"]
    found["of the bound"] = f"{bound / entry.get('busy', best(entry)):.0%}"
    found["launches"] = str(entry.get("launches", ""))
    found["host, us"] = number(1e6 * entry["host"]) if "host" in entry else ""
    found["extra MB"] = megabytes(extra_bytes(entry))
    if fastest := rival(calls[main]):
        found["fastest alternative"] = f"{short(fastest[0])} {milliseconds(fastest[1])} ({speedup(calls[main])})"
    return found


def table(lines: Sequence[dict[str, str]], only: Sequence[str] = ()) -> str:
    """Return cells of rows as a table of those columns that any row has something for, or of ``only`` some of them."""
    columns = [name for name in max(lines, key=len) if any(one.get(name) for one in lines)]
    columns = [name for name in columns if not only or name in only]
    return as_markdown([columns, *[[one.get(name, "") for name in columns] for one in lines]])


def about(calls: Calls) -> str:
    """Return sentences on machine, versions and commits of calls on one machine."""
    entries = [entry for found in calls.values() for entry in found.values()]
    ours = [found[OURS] for found in calls.values()]
    machine = max((one["machine"] for one in entries), key=lambda one: one["date"])
    said = machine["device"]
    if "rates" in machine:
        rates = {name: number(rate / 1e12) for name, rate in machine["rates"].items()}
        products = ", ".join(f"{name} {rates[name]} TFLOP/s" for name in PRECISIONS)
        said += f": copies {rates['copy']} TB/s, large products {products}"
    if loads := sorted(one["load"] for one in ours if "load" in one):
        said += f", {machine['threads']} threads on {machine['cores']} cores"
        said += f"; load average before a row: {loads[0]:.1f} to {loads[-1]:.1f}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    if loads:
        versions += f", backend {machine['backend']}" + (f" ({machine['capability']})" if machine["capability"] else "")
    dated = sorted((one["machine"] for one in (ours if loads else entries)), key=lambda one: one["date"])
    commits = Counter(f"{one['commit']}{' (modified)' * one['modified']} of {one['date'][:10]}" for one in dated)
    unit = "rows" if loads else "entries"
    return f"{said}. {versions}. Commits: {', '.join(f'{one}: {count} {unit}' for one, count in commits.items())}."


def ordered(calls: Calls, kind: str) -> Calls:
    """Return the calls that we have an entry of, in the order of the registry."""
    places = {name: at for at, name in enumerate(WORKLOADS)}
    way = -1 if kind == ON_GPU else 1
    order = sorted(calls, key=lambda one: (places[one[0]], way * one[1], [*PRECISIONS].index(one[3])))
    return {call: calls[call] for call in order if OURS in calls[call]}


def on_cpu(calls: Calls, only: Sequence[str] = ()) -> str:
    """Return calls of one CPU as markdown: a table of each mode, batch 1 apart where it is not the default."""
    lines = [about(calls), "", LEGENDS["bench"], ""]
    for single in (False, True):
        for mode in MODES:
            part = {one: found for one, found in calls.items()
                    if (one[1] == 1 and not is_default(one), one[2]) == (single, mode)}  # fmt: skip
            if part:
                lines += [
                    f"**{mode.capitalize()}{', batch 1' * single}**",
                    "",
                    table([cells(*row) for row in part.items()], only),
                    "",
                ]
    sentences: dict[str, list[str]] = {}
    for call, entries in calls.items():
        for name in (one for one in ALTERNATIVES if one in entries):
            entry = entries[name]
            what = "wrong result" if entry.get("complaint") else entry.get("failed") or entry.get("note")
            if what:
                what = what if not what.startswith("wrong result:") else "wrong result" + what[what.rfind(";") :]
                sentences.setdefault(f"{short(name)}: {what}", []).append(place(call))
    if sentences:
        lines += ["Alternatives without a time, and those marked *:", ""]
        lines += [f"- {what}: {'; '.join(places)}" for what, places in sentences.items()]
    return "\n".join(lines).rstrip()


def on_gpus(devices: Mapping[str, Calls]) -> str:
    """Return tables of all GPUs as markdown, the one that was measured last first."""
    lines = [LEGENDS[ON_GPU], ""]
    for calls in devices.values():
        lines += [about(calls), ""]
        for mode in MODES:
            if names := dict.fromkeys(call[0] for call in calls if call[2] == mode):
                rows = [cells_on_gpu(calls, name, mode) for name in names]
                lines += [f"**{mode.capitalize()}**", "", table(rows), ""]
        late = {call: entries[OURS] for call, entries in calls.items() if entries[OURS].get("complaint")}
        wrong = ["- {} batch {} {} {}: ".format(*call) + entry["complaint"] for call, entry in late.items()]
        if wrong:
            lines += ["† beyond the limit for rounding errors:", "", *wrong, ""]
    return "\n".join(lines).rstrip()


# ---- sentences -------------------------------------------------------------------------------------------------------


def dates(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the day on which entries were measured, or the first and the last."""
    days = sorted({one["machine"]["date"][:10] for one in entries})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def summary(calls: Calls) -> str:
    """Return what docs/performance.md opens with: where an alternative is faster, and a table."""
    slower = [f"- `{call[0]}` batch {call[1]}, {call[2]}: {speedup(calls[call])} of {short(rival(calls[call])[0])}"
              for call in behind(calls)]  # fmt: skip
    equal = sum(0.995 <= (ratio(entries) or 0.0) < 1.005 for entries in calls.values())
    doubtful = sum("~" in speedup(entries) for entries in calls.values())
    said = f"Rows marked ~ ({doubtful}) are doubtful. An alternative is faster in {len(slower)} of {len(calls)} rows"
    said += f" (and equally fast in {equal})" * bool(equal) + (":" if slower else ".")
    extra = ("extra memory of a step, MB", "with stored votes, MB")
    lines = [["layer (batch)", *[name for mode in MODES for name in (f"{mode}, ms", "speed-up")], *extra]]
    for name in charts.CHOSEN:
        both = [calls.get((name, WORKLOADS[name].batch, mode, "fp32"), {}) for mode in MODES]
        times = [cell for one in both for cell in (milliseconds(best(one.get(OURS))), speedup(one) if one else "")]
        memory = [megabytes(extra_bytes(both[1].get(how))) for how in (OURS, STORED)]
        lines.append([f"`{name}` ({WORKLOADS[name].batch})", *times, *memory])
    return "\n\n".join([said, *["\n".join(slower)] * bool(slower), as_markdown(lines), about(calls)])


def first(calls: Calls) -> str:
    """Return the sentences below the README's picture."""
    ours = [entries[OURS] for entries in calls.values()]
    machine = max((one["machine"] for one in ours), key=lambda one: one["date"])
    most = max(sum(best(entries.get(name)) is not None for name in ALTERNATIVES) for entries in calls.values())
    return (
        f"*{machine['device']}, {machine['threads']} threads, float32, {dates(ours)}: layers of the papers "
        "(inverted attention: one iteration after the first) against the fastest of up to "
        f"{most} PyTorch alternatives, compiled ones included. In "
        f"{len(behind(calls))} of {len(calls)} rows of the whole table an alternative is faster "
        "([all rows](docs/performance.md)). ~: doubtful, as the machine was busy. Extra memory is what a training step "
        "needs beside its inputs and results, compared with stored votes.*"
    )


def start(calls: Calls) -> str:
    """Return the figures of the documentation's first page: what two layers gain in a training step."""
    layers = {"tsai-c10-conv1": "A capsule convolution for CIFAR-10 (Tsai et al.), one iteration",
              "sabour-mnist": "The class capsules of Sabour et al.'s network for MNIST"}  # fmt: skip
    lines = []
    for name, layer in layers.items():
        entries = calls[name, WORKLOADS[name].batch, MODES[1], "fp32"]
        own, stored = (megabytes(extra_bytes(entries.get(how))) for how in (OURS, STORED))
        lines.append(
            f"- {layer}: a training step is **{speedup(entries)}** as fast as the fastest of several "
            f"PyTorch alternatives, and needs **{own} MB** of extra memory where stored votes need {stored} MB."
        )
    ours = [entries[OURS] for entries in calls.values()]
    machine = ours[0]["machine"]
    key = " ~: doubtful ([why](performance.md#alternatives))." * any("**~" in line for line in lines)
    return "\n".join([*lines, "", f"*{machine['device']}, {machine['threads']} threads, {dates(ours)}.{key}*"])


def sentence(devices: Mapping[str, Calls]) -> str:
    """Return what README says: of the GPU measured last whose float32 rows have alternatives, a clause a layer."""
    for device, calls in devices.items():
        compared = {call: entries for call, entries in calls.items() if call[3] == "fp32" and ratio(entries)}
        said: dict[str, list[str]] = {}
        for call in sorted(compared, key=lambda one: (*one[:2], MODES.index(one[2]))):
            entries, (how, _) = compared[call], rival(compared[call])
            own, other = (megabytes(extra_bytes(entries[name])) for name in (OURS, how))
            said.setdefault(f"`{call[0]}` (batch {call[1]})", []).append(
                f"{call[2]} {milliseconds(best(entries[OURS]))} ms (**{speedup(entries)}**) and {own} MB of extra "
                f"memory (the alternative: {other})"
            )
        if said:
            clauses = "; ".join(f"{layer}: {', '.join(parts)}" for layer, parts in said.items())
            most = max(sum(name in entries for name in ALTERNATIVES) for entries in compared.values())
            return (
                f"*{device}, float32, {dates(entries[OURS] for entries in compared.values())}, against the fastest of "
                f"up to {most} PyTorch alternatives, compiled ones included: {clauses}.*"
            )
    return "*No alternative was measured on a GPU.*"


def public(rows: Sequence[dict[str, Any]], full: bool = True) -> str:
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
        other = milliseconds(compiled["median"]) if "median" in compiled else compiled.get("failed", "")
        lines.append([*line, f"{row['equal']['float64']:.0e}", other])
    machine, loads = rows[0]["machine"], sorted(row["load"] for row in rows)
    text = (
        "A training step (forward and backward) of layers as published → with ours. Peak memory includes gradients. "
        f"Largest difference: of results and gradients, in float64. {machine['device']}, "
        f"{machine['threads']} threads, {dates(rows)}."
    )
    text += full * (
        f" torch {machine['versions']['torch']}, float32, commit {machine['commit']}"
        f"{' (modified)' * machine['modified']}, load average before a row {loads[0]:.1f} to {loads[-1]:.1f}. "
        "Times are medians of alternate steps, in one process. Memory is what a step adds at its peak. "
        "Differences are relative to the tensor's largest value; in float32 our error is at most three times "
        "theirs, or 1e-5."
    )
    return f"{text}\n\n{as_markdown(lines)}"


# ---- pages -----------------------------------------------------------------------------------------------------------


def newest(devices: Mapping[str, Calls], kind: str) -> dict[str, Calls]:
    """Return the calls of each device, ordered, the device that was measured last first."""
    last = {name: max(one["machine"]["date"] for entries in calls.values() for one in entries.values())
            for name, calls in devices.items()}  # fmt: skip
    return {name: ordered(devices[name], kind) for name in sorted(last, key=lambda name: last[name], reverse=True)}


def write(places: Sequence[Path], root: Path = record.ROOT) -> list[Path]:
    """Put the figures and pictures of all records into README and docs; return the files that were written.

    A page shows one CPU: that of the most rows, of two with as many the one that was measured last."""
    cpus, gpus = (newest(record.merge(record.load(*places, kind=kind)), kind) for kind in ("bench", ON_GPU))
    calls = max(cpus.values(), key=len, default={})
    calls = {call: entries for call, entries in calls.items() if call[1] in WORKLOADS[call[0]].batches}
    programs = record.load(*places, kind="public")
    programs = [row for row in programs if row["machine"]["date"] == max(one["machine"]["date"] for one in programs)]
    passes = {call: found for call, found in calls.items()
              if isinstance(WORKLOADS[call[0]].routing, AttentionPass)}  # fmt: skip
    others = {call: found for call, found in calls.items() if call not in passes}
    wanted: dict[Path, str] = {}
    for path, name, part, make in (
        ("README.md", "figures", calls, first),
        ("README.md", "public", programs, partial(public, full=False)),
        ("docs/relation.md", "public", programs, public),
        ("docs/index.md", "start", calls, start),
        ("docs/performance.md", "summary", calls, summary),
        ("docs/performance/attention.md", "attention", passes, on_cpu),
        ("docs/performance/routings.md", "routings", others, on_cpu),
        ("README.md", "device", gpus, sentence),
        ("docs/performance/gpu.md", "device", gpus, on_gpus),
    ):
        if part:
            page = root / path
            wanted[page] = into(wanted.get(page) or page.read_text(), make(part), name)
    if calls:
        for file, names, panel in (("speedup", charts.CHOSEN, "speed-up"), ("first", charts.FIRST, "speed-up"),
                                   ("memory", charts.FIRST, "memory")):  # fmt: skip
            wanted[root / f"docs/performance/{file}.svg"] = charts.picture(calls, names, panel)
    for path, text in wanted.items():  # only once all of them could be made
        path.write_text(text)
    return list(wanted)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the figures of README and docs from the benchmark's records.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.parse_args(None if arguments is None else list(arguments))
    try:
        print("\n".join(f"written: {path}" for path in write([record.RESULTS])))
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
