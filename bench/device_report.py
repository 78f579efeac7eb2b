"""Tables from the results of a device, for the terminal and docs/performance.md, and what falls short of its goal."""

from __future__ import annotations

from typing import Any

__all__ = ["BEGIN", "END", "SHORT", "about", "device_seconds", "markdown", "number", "shortfalls", "tables"]

BEGIN, END = "<!-- bench-device:begin -->", "<!-- bench-device:end -->"

COLUMNS = (
    "workload",
    "batch",
    "votes",
    "fastcaps ms (p20-p80)",
    "graph ms",
    "Triton ms",
    "fastest alternative",
    "its ms",
    "speed-up",
    "TFLOP/s",
    "of product",
    "own MB (of votes)",
    "bmm's own MB",
)

LEGEND = (
    "Times are the median (20th-80th percentile) between two events around a call with a cold second-level cache. "
    "Graph ms: a call's share of a replayed CUDA graph, where a call takes less than 0.5 ms. The fastest alternative "
    "and the speed-up go by the graph's time where both have one. TFLOP/s counts useful operations, recomputation left "
    "out (a training step: three times the forward pass); of product: against this device's own large matrix product "
    "in the same precision. Own MB: peak of the device's memory during one call, without inputs and results; bmm's is "
    "the eager batched-matmul alternative's."
)

SHORT = {
    "reference": "reference",
    "batched-matmul": "bmm",
    "reference-compiled": "reference, compiled",
    "batched-matmul-compiled": "bmm, compiled",
}


def number(value: float) -> str:
    """Return a number that is not negative with three significant digits, without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.995 else f"{value:.3f}"


def _megabytes(count: float) -> str:
    return number(count / 1e6)


def _own(entry: dict[str, Any] | None, votes: float | None = None) -> str:
    memory = (entry or {}).get("memory")
    if memory is None:
        return (entry or {}).get("failed", "")
    share = "" if votes is None else f" ({memory['beyond'] / votes:.1%})"
    return _megabytes(memory["beyond"]) + share


def device_seconds(entry: dict[str, Any]) -> float:
    """Return the device's own time of a call: by graph replay where launches are small, else by events."""
    return float(entry.get("graph", {}).get("median", entry["median"]))


def _milliseconds(entry: dict[str, Any] | None) -> str:
    if not entry:
        return ""
    return "failed" if "failed" in entry else number(device_seconds(entry) * 1e3)


def _cells(row: dict[str, Any], rates: dict[str, float]) -> list[str]:
    """Return one table line, in the order of ``COLUMNS``."""
    head = [row["workload"], str(row["batch"]), f"{_megabytes(row['votes_bytes'])} MB"]
    if "refused" in row:
        return [*head, f"refused: {row['refused']}", *[""] * (len(COLUMNS) - 4)]
    mine, fastest = row["fastcaps"], row["fastest"]
    median, p20, p80 = (number(mine[key] * 1e3) for key in ("median", "p20", "p80"))
    graph = mine.get("graph", {})
    other = ["none", "", ""]
    if fastest is not None:
        other = [SHORT.get(fastest, fastest), _milliseconds(row["alternatives"][fastest])]
        other.append(f"{number(row['speedup'])}×")
    return [
        *head,
        f"{median} ({p20}-{p80})",
        number(graph["median"] * 1e3) if "median" in graph else "failed" if graph else "",
        _milliseconds(row.get("triton")),
        *other,
        number(row["tflops"]),
        f"{row['tflops'] * 1e12 / rates[row['precision']]:.0%}",
        _own(mine, row["votes_bytes"]),
        _own(row["alternatives"].get("batched-matmul")),
    ]


def tables(document: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return (title, lines) for each precision and mode; in each the rows in the order of their batches."""
    found = []
    for precision in dict.fromkeys(row["precision"] for row in document["rows"]):
        for mode in ("forward", "training step"):
            rows = [row for row in document["rows"] if (row["precision"], row["mode"]) == (precision, mode)]
            rows.sort(key=lambda row: -row["batch"])
            if rows:
                lines = [_cells(row, document["machine"]["rates"]) for row in rows]
                found.append((f"{mode.capitalize()}, {precision}", lines))
    return found


def shortfalls(document: dict[str, Any]) -> list[str]:
    """Return a sentence for every figure that misses its goal."""
    missed = []
    launches = document["machine"]["three_launches"]["latency"]
    for row in document["rows"]:
        place, goal = f"{row['workload']} batch {row['batch']} {row['mode']} {row['precision']}", row["goal"]
        if "refused" in row:
            missed.append(f"{place}: refused, {row['refused']}")
            continue
        mine = row["fastcaps"]
        if "seconds" in goal and device_seconds(mine) > goal["seconds"]:
            missed.append(f"{place}: {number(device_seconds(mine) * 1e3)} ms, goal {number(goal['seconds'] * 1e3)} ms")
        if "speedup" in goal and row["speedup"] is not None and row["speedup"] < goal["speedup"]:
            missed.append(f"{place}: {number(row['speedup'])}×, goal {number(goal['speedup'])}×")
        if "launches" in goal and mine["latency"] > launches:
            missed.append(
                f"{place}: {mine['latency'] * 1e6:.0f} us to the end, three of the smallest launches take "
                f"{launches * 1e6:.0f} us"
            )
        memory = mine["memory"]
        if memory and "memory_share" in goal and memory["beyond"] > goal["memory_share"] * row["votes_bytes"]:
            missed.append(
                f"{place}: {_megabytes(memory['beyond'])} MB of its own, "
                f"{memory['beyond'] / row['votes_bytes']:.1%} of the votes, goal {goal['memory_share']:.0%}"
            )
    return missed


def about(document: dict[str, Any]) -> str:
    """Return a sentence on device, its own rates, versions, commit and date."""
    found = document["machine"]
    rates, versions = found["rates"], found["versions"]
    products = ", ".join(
        f"{name} {number(rates[name] / 1e12)} TFLOP/s" for name in ("fp32", "tf32", "bf16") if name in rates
    )
    cuda = f", CUDA {found['cuda']}" if found.get("cuda") else ""
    commit = found["commit"] + (" (modified)" if found["modified"] else "")
    return (
        f"{found['device']}: copies {number(rates['copy'] / 1e12)} TB/s (read and written); large products "
        f"{products}; three of the smallest launches {found['three_launches']['latency'] * 1e6:.0f} us. fastcaps "
        f"{versions['fastcaps']}; torch {versions['torch']}{cuda}, Triton {versions['triton'] or 'none'}, Python "
        f"{versions['python']}. Commit {commit}, {found['date'][:16].replace('T', ' ')} UTC."
    )


def _failures(document: dict[str, Any]) -> list[str]:
    """Return a sentence for each way in which an implementation gave no figure."""
    found: dict[str, list[str]] = {}
    for row in document["rows"]:
        place = f"{row['workload']} batch {row['batch']} {row['mode']} {row['precision']}"
        ours = {"fastcaps": row.get("fastcaps", {}), "fastcaps by Triton": row.get("triton", {})}
        for name, entry in {**row["alternatives"], **ours}.items():
            if "failed" in entry:
                found.setdefault(f"{SHORT.get(name, name)}: {entry['failed']}", []).append(place)
            if "failed" in entry.get("graph", {}):
                what = f"{SHORT.get(name, name)}, not captured in a graph: {entry['graph']['failed']}"
                found.setdefault(what, []).append(place)
    return [f"{what} — on {'; '.join(places)}" for what, places in found.items()]


def markdown(document: dict[str, Any]) -> str:
    """Return the document as markdown: the device, a table for each precision and mode, and what there is to say."""
    lines = [about(document), "", LEGEND, ""]
    for title, cells in tables(document):
        right = ["---"] + ["---:"] * (len(COLUMNS) - 1)
        lines += [f"**{title}**", ""]
        lines += [f"| {' | '.join(line)} |" for line in [list(COLUMNS), right, *cells]]
        lines.append("")
    served = dict.fromkeys(row["runs"] for row in document["rows"] if "runs" in row)
    for title, sentences in (
        ("What served the package's calls:", list(served)),
        ("Below the goal:", shortfalls(document)),
        ("Without a figure:", _failures(document)),
        ("Left out, as the time was used up:", _folded(document["left_out"])),
    ):
        if sentences:
            lines += [title, "", *[f"- {sentence}" for sentence in sentences], ""]
    return "\n".join(lines)


def _folded(left_out: list[str]) -> list[str]:
    """Return one sentence for each thing that was left out, with its rows behind it."""
    found: dict[str, list[str]] = {}
    for sentence in left_out:
        place, _, what = sentence.rpartition(": ")
        found.setdefault(what, []).append(place)
    return [f"{what} of {len(places)} rows: {'; '.join(places)}" for what, places in found.items()]
