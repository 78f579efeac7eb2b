"""The tables and figures of the papers, one YAML file per paper: the recipes to train, and the paper's values.

An entry has the fields of :class:`Table`, and may have a ``base``, as recipes may. Rows name recipes, and may change
their fields by paths, as ``--set`` does. Your own table is a file with one entry's fields.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from fastcaps_lab.training import recipes
from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.fields import Flag, Number, SettingError, Settings, read, wrong
from fastcaps_lab.training.files import Shelf
from fastcaps_lab.training.recipes import Source

SHELF = Shelf(Path(__file__).parent, "table", "reproduce")
COSTS = ("memory", "time")
"""Measures of a training step, which need no training."""


class Over(Settings):
    """The setting that a figure varies: each row has a run for each of its values."""

    field: str  # its path, e.g. network.options.iterations
    name: str  # its name below the axis
    values: tuple[Any, ...]


Numbers = Annotated[tuple[Number, ...], BeforeValidator(lambda got: got if isinstance(got, list | tuple) else (got,))]


class Row(Settings):
    """A row of a table, or a line of a figure."""

    label: str  # its name in the table
    recipe: str  # the experiment, as for fastcaps_lab.training.recipe
    name: str = ""  # the folder of its run, by default the recipe's name; of a varied setting NAME-VALUE
    set: Mapping[str, Any] = field(default_factory=dict)  # other values for fields, by their paths
    short: Mapping[str, Any] = field(default_factory=dict)  # the same, only in the short form
    paper: Numbers = ()  # the paper's value, or one for each value of a varied setting
    spread: Number | None = None  # the paper's standard deviation
    note: str = ""  # the paper's text instead of a value
    eager: Flag = False  # whether memory and time are measured in plain PyTorch, whose autograd stores the votes


class Line(Settings):
    """A line of a table: a row, at one value of a varied setting."""

    row: Row
    measure: str
    label: str
    name: str  # its folder
    at: Any  # the value of the varied setting, or None
    paper: float | None
    config: TrainConfig
    results: tuple[dict[str, Any], ...] = ()  # the result.json of each finished run

    @property
    def values(self) -> list[float]:
        """The measured value of each result."""
        if self.measure in COSTS:
            return [float(result[self.measure]) for result in self.results]
        shares = [float(result["test_accuracy"]) for result in self.results]
        return [100 * (1 - share if self.measure == "error" else share) for share in shares]

    @property
    def mean(self) -> float | None:
        """The mean of the values, or None."""
        return statistics.mean(self.values) if self.results else None

    @property
    def spread(self) -> float | None:
        """Their standard deviation (n − 1); None if there are fewer than two."""
        return statistics.stdev(self.values) if len(self.results) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


class Table(Settings):
    """A table or a figure of a paper.

    ``error`` and ``accuracy`` are those of the test images, in percent, by the recipes' metrics; ``memory`` in MB and
    ``time`` in ms are those of a training step of a new network, without training.
    """

    title: str
    source: Source
    claim: str  # the paper's conclusion, in a sentence
    measure: Literal["error", "accuracy", "memory", "time"]
    rows: tuple[Row, ...]
    draw: Literal["bars", "lines", "perturbations", "agreement", "poses", "changes"] = "bars"  # lines: with over
    beside: str = ""  # another table, whose runs and folder it uses
    over: Over | None = None
    set: Mapping[str, Any] = field(default_factory=dict)  # other values for fields of all rows, by their paths
    short: Mapping[str, Any] = field(default_factory=dict)  # the same, only in the short form
    short_note: str = ""  # a remark on the short form, shown below the table
    reading: str = ""  # our choices where the paper is silent, shown below the table

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows: got none, want one or more")
        if (self.draw == "lines") != (self.over is not None):
            raise ValueError(f"over: got {self.over} with draw {self.draw!r}, want it for lines, and only for them")
        wanted = len(self.over.values) if self.over is not None else 1
        for index, row in enumerate(self.rows):
            if len(row.paper) not in (0, wanted):
                raise ValueError(f"rows[{index}].paper: got {len(row.paper)} numbers, want {wanted} or none")

    def runs_folder(self, out: Path, name: str) -> Path:
        """Return the folder of the runs: ``out``, with ``beside`` instead of the table's ``name`` if it is set."""
        return out.with_name(out.name.replace(name, self.beside)) if self.beside else out

    def lines(self, out: Path, *, short: bool = False, changes: Mapping[str, Any] | None = None) -> list[Line]:
        """Return the table's lines, with the settings of their runs, without results; SettingError names a wrong row.

        ``out`` is the folder of the runs; ``changes`` are other values for fields of all rows, by their paths.
        """
        found: list[Line] = []
        values = self.over.values if self.over is not None else (None,)
        for row in self.rows:
            fields = {**self.set, **row.set, **({**self.short, **row.short} if short else {})}
            try:
                recipe = recipes.recipe(row.recipe).config
                for index, value in enumerate(values):
                    name, label, at = row.name or Path(row.recipe).stem, row.label, {}
                    if self.over is not None:
                        name, label = f"{name}-{value}", f"{label}, {self.over.name} {value}"
                        at = {self.over.field: value}
                    if not re.fullmatch(r"[\w-][\w.-]*", name) or name in [line.name for line in found]:
                        raise wrong("name", name, "letters, digits, dots and dashes, and another than the rows above")
                    config = recipe.changed({**fields, **at, **(changes or {}), "out": str(out / name)})
                    paper = row.paper[index] if row.paper else None
                    found.append(Line(row, self.measure, label, name, value, paper, config))
            except ValueError as error:
                raise SettingError(f"row {row.label!r}: {error}") from error
        return found


names = SHELF.names


def table(name: str) -> Table:
    """Return a table, one of :func:`names` or a file; ValueError, in one line, names the file and the field."""
    given = SHELF.fields(name)
    try:
        return read(Table, given)
    except SettingError as error:
        raise SettingError(f"{Path(name).name}: {error}") from error
