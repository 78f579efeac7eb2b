"""``fastcaps reproduce``: train the runs of a paper's table, and collect their results.

Each row of a table has a folder of its name in the table's folder, with folders ``seed-0`` and so on for several seeds.
Finished runs are not trained again, and interrupted ones resume. If a folder holds a run with other settings, nothing
is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fastcaps_lab.training.callbacks import Report, is_main
from fastcaps_lab.training.config import TrainConfig, check_same, kept, runs_of
from fastcaps_lab.training.folder import read_result, versions, write_json, write_text
from fastcaps_lab.training.run import train
from fastcaps_lab.training.tables import Line, Table

__all__ = ["as_markdown", "collect", "is_main", "train_missing", "write"]
HEADER = ("", "ours", "paper", "difference", "epochs × images", "parameters")


def _result(config: TrainConfig) -> dict[str, Any] | None:
    """Return the ``result.json`` of a run, or None; RunError if the folder holds a run with other settings."""
    if not (config.folder / "config.json").is_file():
        return None
    check_same(kept(config.folder), config)
    return read_result(config.folder)


def collect(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of a table with the results of finished runs; RunError if one has other settings."""
    return [replace(line, results=tuple(filter(None, map(_result, runs_of(line.config))))) for line in lines]


def train_missing(lines: Sequence[Line], chosen: Sequence[str], console: Console) -> None:
    """Train the lines with unfinished runs, one after the other; ``chosen`` are labels of rows, none for all."""
    for text in chosen:
        if text not in (labels := {line.row.label: None for line in lines}):
            raise ValueError(f"--row: got {text!r}, want one of {'; '.join(labels)}")
    wanted = [line for line in lines if not chosen or line.row.label in chosen]
    unfinished = [line for line in wanted if len(line.results) < line.config.runs]
    for index, line in enumerate(unfinished):
        report = Report(console)
        report.say(f"{index + 1} of {len(unfinished)}: {line.label} ({line.config.folder})")
        for one in runs_of(line.config):
            train(one, resume=True, report=report)


def _number(value: float | None, spread: float | None) -> str:
    return "" if value is None else f"{value:.2f}" + (f" ± {spread:.2g}" if spread is not None else "")


def cells(line: Line) -> tuple[str, ...]:
    """Return the printed cells of a line, one per column of ``HEADER``."""
    config, limit, done = line.config, line.config.data.limit, len(line.results)
    images = "all" if limit is None else f"{limit - config.data.validation:,}"
    seeds = f" ({done} of {config.runs} seeds)" if done < config.runs else ""
    return (
        line.label,
        _number(line.mean, line.spread) + seeds if done else "not run",
        line.row.note if line.paper is None else _number(line.paper, line.row.spread),
        "" if line.mean is None or line.paper is None else f"{line.mean - line.paper:+.2f}",
        f"{config.epochs:,} × {images}",
        f"{line.results[0]['parameters']:,}" if done else "",
    )


def as_markdown(table: Table, lines: Sequence[Line], short: bool, changes: Mapping[str, Any]) -> str:
    """Return the table as Markdown, with remarks below."""
    several = any(len(line.results) > 1 for line in lines)
    remarks = [f"Test {table.measure} in %, {'higher' if table.measure == 'accuracy' else 'lower'} is better."]
    remarks += ["± is the standard deviation (n − 1) of the seeds."] * several
    if table.reading:
        remarks.append(f"Our reading: {table.reading}")
    if short:
        less = {**table.short, **{path: value for row in table.rows for path, value in row.short.items()}}
        remarks.append(f"Shortened: {', '.join(f'{path} {value}' for path, value in less.items())}. {table.short_note}")
    if changes:
        remarks.append("Changed: " + ", ".join(f"{path} {value}" for path, value in changes.items()) + ".")
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1)), *map(cells, lines)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    return f"**{table.title}** ({table.source})\n\nThe claim: {table.claim}\n\n{text}\n\n" + "\n".join(remarks) + "\n"


def write(table: Table, lines: Sequence[Line], text: str, out: Path, command: str) -> None:
    """Write ``table.md``, and ``table.json`` with all values and their settings."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            **{name: getattr(line, name) for name in ("label", "paper", "results", "values", "mean", "spread")},
            "shown": dict(zip(HEADER, cells(line), strict=True)),
            "settings": line.config.model_dump(),
        }
        for line in lines
    ]
    about = table.model_dump(include={"title", "source", "claim", "measure"})
    write_json(out / "table.json", {"command": command, **about, "rows": rows, "versions": versions()})
    write_text(out / "table.md", text)
