"""``fastcaps reproduce``: train the runs of a paper's table or figure, and collect their results.

Each row of a table has a folder of its name in the table's folder, with folders ``seed-0`` and so on for several seeds,
as :func:`fastcaps_lab.training.train_seeds` creates them. Finished runs are not trained again, and interrupted ones
resume. If a folder holds a run with other settings, nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
from rich.console import Console

from fastcaps_lab import viz
from fastcaps_lab.measure import apart
from fastcaps_lab.training import figures
from fastcaps_lab.training.callbacks import Report
from fastcaps_lab.training.config import WHERE, TrainConfig, check_same, differences, kept, runs_of
from fastcaps_lab.training.fields import Index, NotNegative, RunError, Share, as_data, flat, read
from fastcaps_lab.training.folder import prepared, versions, write_json, write_whole
from fastcaps_lab.training.run import train, train_seeds
from fastcaps_lab.training.tables import COSTS, Line, Table

MEASURES = {
    "error": "Test error in %",
    "accuracy": "Test accuracy in %",
    "memory": "Memory of a training step in MB",
    "time": "Time of a training step in ms",
}
HEADER = ("", "ours", "paper", "difference", "epochs × images", "parameters")


def has_run(config: TrainConfig) -> bool:
    """Return whether a configuration's folder holds a run; RunError if that has other settings."""
    if not (config.folder / "config.json").is_file():
        return False
    check_same(config.folder, kept(config.folder), config)
    return True


class _Result(pydantic.BaseModel):
    """The fields read of a ``result.json``: the accuracy of a run, or the cost of a step."""

    seed: Index
    parameters: Index
    versions: dict[str, str]
    test_accuracy: Share = 0.0
    memory: NotNegative = 0.0
    time: NotNegative = 0.0


def read_result(config: TrainConfig) -> dict[str, Any] | None:
    """Return the ``result.json`` of a run, or None; RunError for other settings, or a file that cannot be read."""
    path = config.folder / "result.json"
    if not has_run(config) or not path.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        read(_Result, result)
        if not {"test_accuracy", "memory"} & result.keys():
            raise ValueError("it has no accuracy")
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}; delete it to finish the run again") from error
    return result


def cells(line: Line) -> tuple[str, ...]:
    """Return the printed cells of a line, one per column of ``HEADER``."""
    config, limit, done = line.config, line.config.data.limit, len(line.results)
    images = "all" if limit is None else f"{limit - config.data.validation:,}"
    seeds = f" ({done} of {config.runs} seeds)" if done < config.runs else ""
    return (
        line.label,
        _number(line.mean, line.spread) + seeds if done else "not run",
        line.row.note if line.paper is None else _number(line.paper, line.row.spread),
        "" if line.difference is None else f"{line.difference:+.2f}",
        f"batch of {config.batch_size}" if done and line.measure in COSTS else f"{config.epochs:,} × {images}",
        f"{line.results[0]['parameters']:,}" if done else "",
    )


def _measure_cost(line: Line, console: Console) -> None:
    folder = line.config.folder
    with prepared(line.config, resume=True, overwrite=False):
        try:
            found = apart("fastcaps_lab.training.cost", str(folder), *(["eager"] if line.row.eager else []))
        except RuntimeError as error:
            raise RunError(str(error)) from error
    console.print(f"{found['memory']:.1f} MB, {found['time']:.1f} ms a step", highlight=False)
    write_json(folder / "result.json", {**found, "versions": versions()})


def _number(value: float | None, spread: float | None) -> str:
    return "" if value is None else f"{value:.2f}" + (f" ± {spread:.2g}" if spread is not None else "")


def collect(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of a table with the results of finished runs; RunError if one has other settings."""
    for line in lines:
        has_run(line.config)  # checks the settings in the folder above those of several seeds
    return [replace(line, results=tuple(filter(None, map(read_result, runs_of(line.config))))) for line in lines]


def train_missing(lines: Sequence[Line], chosen: Sequence[str], console: Console) -> bool:
    """Train (or measure) the lines with unfinished runs, one after the other; return whether this process prints.

    ``chosen`` are labels or names of the lines to train, none for all.
    """
    named = {line.name: {line.label, line.row.label, line.name} for line in lines}
    for text in chosen:
        if not any(text in names for names in named.values()):
            raise ValueError(f"--row: got {text!r}, want one of {'; '.join(dict.fromkeys(a.row.label for a in lines))}")
    wanted = [line for line in lines if not chosen or named[line.name] & {*chosen}]
    unfinished = [line for line in wanted if len(line.results) < line.config.runs]
    main = True
    for index, line in enumerate(unfinished):
        text = f"{index + 1} of {len(unfinished)}: {line.label} ({line.config.folder})"
        console.print(text, highlight=False, soft_wrap=True, style="bold")
        if line.measure in COSTS:
            _measure_cost(line, console)
            continue
        work = train if line.config.runs == 1 else train_seeds
        main = work(line.config, resume=True, report=Report(console)).is_main
    return main


def short_settings(table: Table, lines: Sequence[Line]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ in the short form, by paths: their value in the short form, and in full.

    Those in the table come first; others follow from them, for example from another data set or optimiser. The full
    value is None if rows differ in it.
    """
    named = [path for line in lines for path in {**table.short, **line.row.short}]
    found: dict[str, list[tuple[Any, Any]]] = {path: [] for path in named}
    for whole, line in zip(table.lines(Path()), lines, strict=True):
        both = flat(as_data(whole.config)).keys() & flat(as_data(line.config)).keys()  # names imply fields of one alone
        for path, values in differences(whole.config, line.config).items():
            if path in named or path in both:
                found.setdefault(path, []).append(values)
    return {
        path: (values[0][1], values[0][0] if all(full == values[0][0] for full, _ in values) else None)
        for path, values in found.items()
        if values
    }


def measure_text(table: Table) -> str:
    """Return what a table measures, and which direction is better, as text."""
    return f"{MEASURES[table.measure]}, {'higher' if table.measure == 'accuracy' else 'lower'} is better"


def remarks(table: Table, lines: Sequence[Line], short: bool, changes: Mapping[str, Any]) -> list[str]:
    """Return the remarks below a table, one or two sentences each."""
    several = any(line.spread is not None for line in lines)
    found = [measure_text(table) + ("; mean and standard deviation (n − 1) of the seeds." if several else ".")]
    if table.reading:
        found.append(f"Our reading: {table.reading}")
    if short:
        parts = [
            (f"no {path}" if now is None else f"{path} {now}") + ("" if full is None else f" (in full {full})")
            for path, (now, full) in short_settings(table, lines).items()
        ]
        found.append(f"Shortened: {', '.join(parts)}." + (f" {table.short_note}" if table.short_note else ""))
    if changes:
        found.append("Changed: " + ", ".join(f"{path} {value}" for path, value in changes.items()) + ".")
    compared = [line for line in lines if line.difference is not None]
    if len(compared) > 1:
        sign = -1 if table.measure == "accuracy" else 1
        ranks = (lambda line: sign * (line.mean or 0), lambda line: sign * (line.paper or 0))
        ours, paper = ("; ".join(line.label for line in sorted(compared, key=rank)) for rank in ranks)
        both = f" and the paper's: {ours}." if ours == paper else f": {ours}. The paper's: {paper}."
        found.append(f"Best first, ours{both}")
    seeds = sorted({result["seed"] for line in lines for result in line.results})
    if seeds:
        machines = dict.fromkeys(
            ", ".join(f"{name} {version}" if name != "machine" else version for name, version in used.items())
            for used in (result["versions"] for line in lines for result in line.results)
        )
        found.append(f"Seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}; {'; '.join(machines)}.")
    return found


def as_markdown(table: Table, lines: Sequence[Line], remarks: Sequence[str]) -> str:
    """Return the table as Markdown, with its remarks below."""
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *map(cells, lines)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    return f"**{table.title}** ({table.source})\n\nThe claim: {table.claim}\n\n{text}\n\n" + "\n".join(remarks) + "\n"


def draw(table: Table, lines: Sequence[Line], path: Path, *, short: bool) -> None:
    """Draw a table's picture: its values beside the paper's, or a figure of its first seed's networks."""
    kind = " (small batch)" if table.measure in COSTS else " (short runs)"
    title = f"{table.title}{kind if short else ''}\n{table.source}"
    if table.draw in figures.FIGURES:
        finished = [(line.label, next(filter(read_result, runs_of(line.config)), None)) for line in lines]
        trained = [figures.load(config, label) for label, config in finished if config is not None]
        if not trained:
            raise RunError(f"{table.title}: nothing to draw, as no run is finished")
        figures.FIGURES[table.draw](trained, path, title)
        return
    axis = measure_text(table)
    ours = [None if line.mean is None else (line.mean, line.spread) for line in lines]
    paper = [None if line.paper is None else (line.paper, line.row.spread) for line in lines]
    names = [line.label for line in lines]
    if short:  # beside a whole training's values they would look like the same thing
        for index, line in enumerate(lines):
            if line.paper is not None:
                names[index] += f"\n(paper, in full: {_number(line.paper, line.row.spread)})"
        paper = [None] * len(lines)
    if table.over is None:
        viz.bars(names, ours, paper, path, title=title, axis=axis)
        return
    size, labels = len(table.over.values), [row.label for row in table.rows]
    parts = [slice(index * size, (index + 1) * size) for index in range(len(labels))]  # of each row
    drawn = {label: (ours[part], paper[part]) for label, part in zip(labels, parts, strict=True)}
    viz.lines(table.over.values, drawn, path, title=title, over=table.over.name, axis=axis)


def write(table: Table, lines: Sequence[Line], remarks: Sequence[str], out: Path, *, short: bool, command: str) -> None:
    """Write ``table.md``, ``table.json`` (all values, with their settings) and ``picture.png``."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            **{key: value for key, value in as_data(line).items() if key != "config"},
            **{key: getattr(line, key) for key in ("values", "mean", "spread", "difference")},
            "shown": dict(zip(HEADER, cells(line), strict=True)),
            "settings": {path: value for path, value in flat(as_data(line.config)).items() if path not in WHERE},
        }
        for line in lines
    ]
    about = {"title": table.title, "source": str(table.source), "claim": table.claim, "measure": table.measure}
    record = {"command": command, "short": short, **about, "remarks": remarks, "rows": rows, "versions": versions()}
    write_json(out / "table.json", record)
    write_whole(out / "table.md", as_markdown(table, lines, remarks))
    draw(table, lines, out / "picture.png", short=short)
