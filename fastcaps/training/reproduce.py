"""A table or figure of a paper, trained and collected: what ``fastcaps reproduce`` does.

The runs of a table lie in one folder: each row has a folder of its name there, and several seeds have ``seed-0`` and so
on within it, as :func:`fastcaps.training.train_seeds` makes them. A finished run is not trained again, and a killed one
goes on. If a folder holds a run with other settings, nothing is trained at all.
"""

from __future__ import annotations

import functools
import json
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastcaps import viz
from fastcaps.training import cost, figures
from fastcaps.training.callbacks import Report
from fastcaps.training.config import WHERE, TrainConfig, differences, kept, one_run
from fastcaps.training.fields import as_data, flat
from fastcaps.training.run import RunError, train, versions, write_settings, write_whole
from fastcaps.training.seeds import train_seeds
from fastcaps.training.tables import Entry, Table

MEASURES = {
    "error": "Test error in %",
    "accuracy": "Test accuracy in %",
    "memory": "Memory of a training step in MB",
    "time": "Time of a training step in ms",
}
COSTS = ("memory", "time")
"""Measures of a training step; nothing is trained for them."""
HEADER = ("", "ours", "paper", "difference", "epochs × images", "parameters")


def runs_of(config: TrainConfig) -> list[TrainConfig]:
    """The runs that a configuration stands for: one a seed."""
    return [config] if config.runs == 1 else [one_run(config, index) for index in range(config.runs)]


def has_run(config: TrainConfig) -> bool:
    """Whether the folder of a configuration holds a run, which must have the same settings.

    Raises
    ------
    RunError
        If it holds one with other settings.
    """
    folder = config.folder
    if not (folder / "config.json").is_file():
        return False
    differ = differences(kept(folder), config)
    if differ:
        name, (there, wanted) = next(iter(differ.items()))
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise RunError(
            f"{folder} holds a run with other settings: {name} is {there} there and {wanted} here{more}; "
            "take another --out"
        )
    return True


def read_result(config: TrainConfig) -> dict[str, Any] | None:
    """The ``result.json`` of a configuration's run, or None if there is none yet.

    Raises
    ------
    RunError
        If its folder holds a run with other settings, or what cannot be read.
    """
    path = config.folder / "result.json"
    if not has_run(config) or not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not isinstance(result, dict):
        raise RunError(f"{path} cannot be read: it holds no mapping; delete it, and the run is finished anew")
    measured = COSTS if "memory" in result else ("test_accuracy",)
    kinds: dict[str, Any] = {
        **dict.fromkeys(measured, (int, float)),
        "seed": int,
        "parameters": int,
        "versions": dict,
    }
    for name, kind in kinds.items():
        if not isinstance(result.get(name), kind):
            got = result.get(name)
            raise RunError(f"{path} cannot be read: {name} is {got!r}; delete it, and the run is finished anew")
    return result


@dataclass(frozen=True)
class Line:
    """A line of a table: an entry, and the results of its runs.

    Attributes
    ----------
    entry : Entry
    results : list of dict
        The ``result.json`` of each run that is finished.
    values : list of float
        The number of each that the table measures.
    """

    entry: Entry
    results: list[dict[str, Any]]
    values: list[float]

    @property
    def mean(self) -> float | None:
        """Of the values; None if there is none."""
        return statistics.mean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Their standard deviation (n − 1); None if there are fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.entry.paper is None else self.mean - self.entry.paper

    def cells(self) -> tuple[str, ...]:
        """What is printed: a cell for each column of ``HEADER``."""
        config, paper = self.entry.config, self.entry.paper
        limit = config.data.limit
        is_cost = bool(self.results) and "memory" in self.results[0]
        images = "all" if limit is None else f"{limit - config.data.validation:,}"
        missing = config.runs - len(self.results)
        ours = _number(self.mean, self.spread) + (f" ({len(self.results)} of {config.runs} seeds)" if missing else "")
        return (
            self.entry.label,
            ours if self.values else "not run",
            self.entry.row.note if paper is None else _number(paper, self.entry.row.spread),
            "" if self.difference is None else f"{self.difference:+.2f}",
            f"batch of {config.batch_size}" if is_cost else f"{config.epochs:,} × {images}",
            f"{self.results[0]['parameters']:,}" if self.results else "",
        )


def _value(measure: str, result: Mapping[str, Any]) -> float:
    """The number of a run that a table measures."""
    if measure in COSTS:
        return float(result[measure])
    share = float(result["test_accuracy"])
    return 100 * (1 - share if measure == "error" else share)


def _measure_cost(entry: Entry, console: Console) -> None:
    """Measure memory and time, and leave settings and result as a run does."""
    folder = entry.config.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(entry.config, folder)
    result = {**cost.measure_apart(folder, eager=entry.row.eager), "versions": versions()}
    console.print(f"{result['memory']:.1f} MB, {result['time']:.1f} ms a step", highlight=False)
    write_whole(folder / "result.json", json.dumps(result, indent=2) + "\n")


def _number(value: float | None, spread: float | None) -> str:
    return "" if value is None else f"{value:.2f}" + (f" ± {spread:.2g}" if spread is not None else "")


def collect(table: Table, entries: Sequence[Entry]) -> list[Line]:
    """The lines of a table, with the results of the runs that are finished.

    Raises
    ------
    RunError
        If a folder holds a run with other settings.
    """
    lines = []
    for entry in entries:
        has_run(entry.config)  # of several seeds the folder above theirs has settings too: they must agree
        results = [result for one in runs_of(entry.config) if (result := read_result(one)) is not None]
        lines.append(Line(entry, results, [_value(table.measure, result) for result in results]))
    return lines


def train_missing(table: Table, entries: Sequence[Entry], chosen: Sequence[str], console: Console) -> bool:
    """Train (or measure) the entries that are not finished, one after the other.

    Parameters
    ----------
    table : Table
    entries : sequence of Entry
    chosen : sequence of str
        Labels or names of those to train; none for all.
    console : Console
        Where it says which row it is at.

    Returns
    -------
    bool
        Whether this process should speak.

    Raises
    ------
    ValueError, DataError, RunError
        As training raises them; and if a label is unknown.
    """
    known = {text for entry in entries for text in (entry.label, entry.row.label, entry.name)}
    for text in chosen:
        if text not in known:
            labels = dict.fromkeys(entry.row.label for entry in entries)
            raise ValueError(f"--row: got {text!r}, want one of {'; '.join(labels)}")
    unfinished = []
    for entry in entries:
        wanted = not chosen or {entry.label, entry.row.label, entry.name} & {*chosen}
        if wanted and any(read_result(one) is None for one in runs_of(entry.config)):
            unfinished.append(entry)
    main = True
    for index, entry in enumerate(unfinished):
        text = f"{index + 1} of {len(unfinished)}: {entry.label} ({entry.config.folder})"
        console.print(text, highlight=False, soft_wrap=True, style="bold")
        if table.measure in COSTS:
            _measure_cost(entry, console)
            continue
        work = train if entry.config.runs == 1 else train_seeds
        main = work(entry.config, resume=True, report=Report(console)).is_main
    return main


def short_settings(table: Table, entries: Sequence[Entry]) -> dict[str, tuple[Any, Any]]:
    """The settings in which the short form differs, by paths: their value in the short form, and in full.

    Those that the table names come first; another data set or optimiser, say, changes settings beside its name. The
    latter value is None where rows differ in it.
    """
    full = {entry.name: entry.config for entry in table.entries(Path())}
    changed, beside = [], []
    for entry in entries:
        whole = full[entry.name]
        changed.append(differences(whole, entry.config))
        both = flat(as_data(whole)).keys() & flat(as_data(entry.config)).keys()  # what only one has, its name tells
        beside += [path for path in changed[-1] if path in both]
    named = [path for entry in entries for path in {**table.short, **entry.row.short}]
    found = {}
    for path in dict.fromkeys([*named, *beside]):
        values = [each[path] for each in changed if path in each]
        if values:
            before, now = values[0]
            found[path] = (now, before if all(value[0] == before for value in values) else None)
    return found


def measure_text(table: Table) -> str:
    """What a table measures, and which way is better."""
    return f"{MEASURES[table.measure]}, {'higher' if table.measure == 'accuracy' else 'lower'} is better"


def remarks(table: Table, lines: Sequence[Line], short: bool, changes: Mapping[str, Any]) -> list[str]:
    """The remarks below a table, a sentence or two a line."""
    several = any(line.spread is not None for line in lines)
    found = [measure_text(table) + ("; mean and standard deviation (n − 1) of the seeds." if several else ".")]
    if table.reading:
        found.append(f"Our reading: {table.reading}")
    if short:
        parts = [
            (f"no {path}" if now is None else f"{path} {now}") + ("" if full is None else f" (in full {full})")
            for path, (now, full) in short_settings(table, [line.entry for line in lines]).items()
        ]
        found.append(f"Shortened: {', '.join(parts)}." + (f" {table.short_note}" if table.short_note else ""))
    if changes:
        found.append("Changed: " + ", ".join(f"{path} {value}" for path, value in changes.items()) + ".")
    compared = [line for line in lines if line.difference is not None]
    if len(compared) > 1:
        sign = -1 if table.measure == "accuracy" else 1
        ours = [line.entry.label for line in sorted(compared, key=lambda line: sign * (line.mean or 0))]
        paper = [line.entry.label for line in sorted(compared, key=lambda line: sign * (line.entry.paper or 0))]
        if ours == paper:
            found.append(f"Best first, ours and the paper's: {'; '.join(ours)}.")
        else:
            found.append(f"Best first, ours: {'; '.join(ours)}. The paper's: {'; '.join(paper)}.")
    seeds = sorted({result["seed"] for line in lines for result in line.results})
    if seeds:
        machines = dict.fromkeys(
            ", ".join(f"{name} {version}" if name != "machine" else version for name, version in used.items())
            for used in (result["versions"] for line in lines for result in line.results)
        )
        word = "Seed" if len(seeds) == 1 else "Seeds"
        found.append(f"{word} {', '.join(map(str, seeds))}; {'; '.join(machines)}.")
    return found


def as_markdown(table: Table, lines: Sequence[Line], remarks: Sequence[str]) -> str:
    """The table as Markdown, with its remarks below."""
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *(line.cells() for line in lines)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    return f"**{table.title}** ({table.source})\n\nThe claim: {table.claim}\n\n{text}\n\n" + "\n".join(remarks) + "\n"


def as_record(table: Table, lines: Sequence[Line], remarks: Sequence[str]) -> dict[str, Any]:
    """Everything that is shown, and what it comes from, for ``table.json``."""
    rows = []
    for line in lines:
        settings = as_data(line.entry.config)
        for path in WHERE:
            *above, last = path.split(".")
            functools.reduce(operator.getitem, above, settings).pop(last, None)
        rows.append(
            {
                "label": line.entry.label,
                "name": line.entry.name,
                "at": line.entry.at,
                "ours": {"mean": line.mean, "spread": line.spread, "values": line.values},
                "paper": {"value": line.entry.paper, "spread": line.entry.row.spread, "note": line.entry.row.note},
                "difference": line.difference,
                "shown": dict(zip(HEADER, line.cells(), strict=True)),
                "recipe": line.entry.row.recipe,
                "settings": settings,
                "results": line.results,
            }
        )
    return {
        "title": table.title,
        "source": str(table.source),
        "claim": table.claim,
        "measure": table.measure,
        "remarks": list(remarks),
        "rows": rows,
        "versions": versions(),
    }


def draw(table: Table, lines: Sequence[Line], path: Path, *, short: bool) -> None:
    """Draw a table's picture: its numbers beside the paper's, or a figure of its trained networks.

    Of several seeds, that figure shows the first one that is finished.

    Raises
    ------
    RunError
        If no run is finished yet.
    """
    title = f"{table.title}{' (shortened)' if short else ''}\n{table.source}"
    if table.draw in figures.FIGURES:
        trained = []
        for line in lines:
            finished = next((one for one in runs_of(line.entry.config) if read_result(one)), None)
            if finished is not None:
                trained.append(figures.load(finished, line.entry.label))
        if not trained:
            raise RunError(f"{table.title}: nothing to draw yet, no run is finished")
        figures.FIGURES[table.draw](trained, path, title)
        return
    axis = measure_text(table)
    ours = [None if line.mean is None else (line.mean, line.spread) for line in lines]
    paper = [None if line.entry.paper is None else (line.entry.paper, line.entry.row.spread) for line in lines]
    if table.over is None:
        viz.bars([line.entry.label for line in lines], ours, paper, path, title=title, axis=axis)
        return
    size, labels = len(table.over.values), [row.label for row in table.rows]
    parts = [slice(index * size, (index + 1) * size) for index in range(len(labels))]  # a row's lines follow each other
    drawn = {label: (ours[part], paper[part]) for label, part in zip(labels, parts, strict=True)}
    viz.lines(table.over.values, drawn, path, title=title, over=table.over.name, axis=axis)


def write(table: Table, lines: Sequence[Line], remarks: Sequence[str], out: Path, *, short: bool, command: str) -> None:
    """Write ``table.md``, ``table.json`` and ``picture.png``, each as a whole."""
    out.mkdir(parents=True, exist_ok=True)
    record = {"command": command, "short": short, **as_record(table, lines, remarks)}
    texts = {"table.md": as_markdown(table, lines, remarks), "table.json": json.dumps(record, indent=2) + "\n"}
    for name, text in texts.items():
        write_whole(out / name, text)
    draw(table, lines, out / "picture.png", short=short)
