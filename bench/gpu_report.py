"""What the records of GPUs say: tables for docs/performance/gpu.md, a sentence for README.

An entry is one call by one implementation (``how``); of the same call on one kind of GPU the newest counts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.alternatives import ALTERNATIVES, OURS
from bench.floors import Chip, floors
from bench.goals import number
from bench.markdown import as_markdown
from bench.workload import PRECISIONS, Case
from bench.workloads import WORKLOADS

Entry = dict[str, Any]
KIND = "gpu"  # of the records
MODES = ("forward", "training step")
GOALS: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("tsai-c10-conv1", "forward"): (0.25, 0.13, 0.12),
    ("tsai-c10-conv1", "training step"): (1.2, 0.8, 0.6),
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
"""What is aimed at, in ms, at batch 128 (``million``: 1), in float32, TF32 and bfloat16."""

LEGEND = (
    "Call: the least of the medians of calls queued behind each other, and in a replayed CUDA graph where the launches "
    "of a call take longer than its kernels. GPU: what the kernels, copies and fills of a call take together, by "
    "torch's profiler. Bound: what multiply-adds, tensor cores (in float32 by three TF32 products), exponentials or "
    "memory alone would take (`python -m bench.floors`), as a share of the GPU's time. Host: how long a call keeps the "
    "processor, the GPU being idle. Extra MB: peak memory without inputs and results."
)


def key(entry: Entry) -> tuple[Any, ...]:
    """Return what an entry is known by, within one kind of GPU."""
    return (entry["workload"], entry["batch"], entry["mode"], entry["precision"], entry["how"])


def newest(entries: Iterable[Entry]) -> dict[str, dict[tuple[Any, ...], Entry]]:
    """Return the newest entry of each call, by kind of GPU, the one that was measured last first. Entries that failed
    count only where no other is."""
    found: dict[str, dict[tuple[Any, ...], Entry]] = {}
    by_date = sorted(entries, key=lambda one: ("failed" not in one, one["machine"]["date"]))
    for entry in by_date:
        if entry["how"] in (OURS, *ALTERNATIVES) and entry["workload"] in WORKLOADS:
            found.setdefault(entry["machine"]["device"], {})[key(entry)] = entry
    return dict(sorted(found.items(), key=lambda one: max(e["machine"]["date"] for e in one[1].values()), reverse=True))


def best(entry: Entry | None) -> float | None:
    """Return the least median of an entry, in seconds, or None."""
    kinds = ("warm", "graph") if entry and "warm" in entry else ("cold",)
    times = [entry[kind]["median"] for kind in kinds if "median" in entry.get(kind, {})] if entry else []
    return min(times, default=None)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else number(1e3 * seconds)


def _rival(calls: dict[tuple[Any, ...], Entry], call: tuple[Any, ...]) -> tuple[str, float] | None:
    """Return the fastest alternative of a call, and its seconds."""
    right = {
        name: calls[(*call, name)] for name in ALTERNATIVES if not calls.get((*call, name), {}).get("complaint", "-")
    }
    timed = {name: found for name, entry in right.items() if (found := best(entry)) is not None}
    return min(timed.items(), key=lambda one: one[1], default=None)


def cells(calls: dict[tuple[Any, ...], Entry], call: tuple[Any, ...]) -> dict[str, str]:
    """Return what a table says of one call, by column."""
    name, batch, mode, precision = call
    entry, rival = calls[(*call, OURS)], _rival(calls, call)
    found = {"workload": name, "batch": str(batch), "precision": precision}
    if "failed" in entry:
        return found | {"call, ms": f"failed: {entry['failed']}"}
    took = best(entry)
    assert took is not None
    goal = GOALS.get((name, mode), (None,) * len(PRECISIONS))[[*PRECISIONS].index(precision)]
    large = batch == 128 or WORKLOADS[name].copies > 1
    found["call, ms"] = _milliseconds(took) + " †" * bool(entry.get("complaint"))
    found["GPU, ms"] = _milliseconds(entry.get("busy"))
    found["goal, ms"] = number(goal) if goal and large else ""
    chip = Chip.of(entry["machine"]["device"])
    bound = floors(Case(WORKLOADS[name], batch, mode != MODES[0], precision), chip)["bound"]
    found["of the bound"] = f"{bound / entry.get('busy', took):.0%}"
    found["launches"] = str(entry.get("launches", ""))
    found["host, us"] = number(1e6 * entry["host"]) if "host" in entry else ""
    found["extra MB"] = number(max(entry["memory"]["beyond"], 1e4) / 1e6) if "memory" in entry else ""
    short = rival[0].replace("batched-matmul", "stored").replace("-compiled", ", compiled") if rival else ""
    found["fastest alternative, ms"] = f"{short} {_milliseconds(rival[1])}" if rival else ""
    return found | {"speed-up": f"{number(rival[1] / took)}×" if rival else ""}


def _about(entries: Sequence[Entry]) -> str:
    """Return sentences on the GPU, versions and commits of some entries."""
    machine = max((entry["machine"] for entry in entries), key=lambda one: one["date"])
    rates = {name: number(rate / 1e12) for name, rate in machine["rates"].items()}
    products = ", ".join(f"{name} {rates[name]} TFLOP/s" for name in PRECISIONS)
    commits = Counter(
        f"{one['machine']['commit']}{' (modified)' * one['machine']['modified']} of {one['machine']['date'][:10]}"
        for one in entries
    )
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    counts = ", ".join(f"{commit}: {count} entries" for commit, count in commits.items())
    return (
        f"{machine['device']}: copies {rates['copy']} TB/s, large products {products}. {versions}. Commits: {counts}."
    )


def markdown(entries: Sequence[Entry]) -> str:
    """Return tables of all GPUs: a table has one mode, and rows of workload, batch and precision."""
    lines = [LEGEND, ""]
    places = {name: place for place, name in enumerate(WORKLOADS)}
    for calls in newest(entries).values():
        lines += [_about([*calls.values()]), ""]
        ours = sorted((one[:4] for one in calls if one[4] == OURS), key=lambda one: (places[one[0]], -one[1]))
        for mode in MODES:
            made = [cells(calls, call) for call in ours if call[2] == mode]
            columns = [name for name in max(made, key=len, default={}) if any(one.get(name) for one in made)]
            if made:
                table = [columns, *[[one.get(name, "") for name in columns] for one in made]]
                lines += [f"**{mode.capitalize()}**", "", as_markdown(table), ""]
        wrong = [
            f"- {name} batch {batch} {mode} {precision}: {entry['complaint']}"
            for (name, batch, mode, precision, how), entry in calls.items()
            if how == OURS and entry.get("complaint")
        ]
        if wrong:
            lines += ["† beyond the limit for rounding errors:", "", *wrong, ""]
    return "\n".join(lines).rstrip()


def sentence(entries: Sequence[Entry]) -> str:
    """Return what README says: of the GPU measured last whose float32 rows have alternatives, a clause a layer."""
    for device, calls in newest(entries).items():
        pairs = [(call[:4], _rival(calls, call[:4])) for call in calls if call[3:] == ("fp32", OURS)]
        compared = [(call, rival) for call, rival in pairs if rival and best(calls[(*call, OURS)])]
        layers = {
            layer: sorted(some, key=lambda one: MODES.index(one[0][2]))
            for layer, some in itertools.groupby(sorted(compared), lambda one: one[0][:2])
        }
        said = []
        for (name, batch), some in layers.items():
            parts = []
            for call, (how, seconds) in some:
                entry = calls[(*call, OURS)]
                took = best(entry) or seconds
                own, other = (number(max(one["memory"]["beyond"], 1e4) / 1e6) for one in (entry, calls[(*call, how)]))
                parts.append(
                    f"{call[2]} {_milliseconds(took)} ms (**{number(seconds / took)}×**) and {own} MB of extra memory "
                    f"(the alternative: {other})"
                )
            said.append(f"`{name}` (batch {batch}): {', '.join(parts)}")
        if said:
            days = sorted({calls[(*call, OURS)]["machine"]["date"][:10] for call, _ in compared})
            most = max(sum((*call, how) in calls for how in ALTERNATIVES) for call, _ in compared)
            return (
                f"*{device}, float32, {' to '.join(dict.fromkeys((days[0], days[-1])))}, against the fastest of up to "
                f"{most} PyTorch alternatives, compiled ones included: {'; '.join(said)}.*"
            )
    return "*No alternative was measured on a GPU.*"
