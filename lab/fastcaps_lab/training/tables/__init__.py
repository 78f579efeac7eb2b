"""The tables and figures of the papers, one YAML file per paper: the recipes to train, and the paper's values.

An entry has the fields of :class:`Table`, and may have a ``base``, as recipes may. Rows name recipes, and may change
their fields by paths, as ``--set`` does. Your own table is a file with one entry's fields.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fastcaps_lab.training import recipes
from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.settings import Options, Settings, read

ENTRIES = recipes.Entries(Path(__file__).parent, "table", "reproduce")
names = ENTRIES.names


Numbers = Annotated[tuple[float, ...], BeforeValidator(lambda got: got if isinstance(got, list | tuple) else (got,))]


class Over(Settings):
    """The setting that a table varies: each row has a run for each of its values."""

    field: str  # its path, e.g. network.options.iterations
    name: str
    values: tuple[Any, ...]


class Row(Settings):
    """A row of a table."""

    label: str  # its name in the table
    recipe: str  # the experiment, as for fastcaps_lab.training.recipe
    name: str = ""  # the folder of its run, by default the recipe's name; of a varied setting NAME-VALUE
    set: Options  # other values for fields, by their paths
    short: Options  # the same, only in the short form
    paper: Numbers = ()  # the paper's value, or one for each value of a varied setting
    spread: float | None = None  # the paper's standard deviation
    note: str = ""  # the paper's text instead of a value


@dataclass(frozen=True)
class Line:
    """A line of a table: a row, at one value of a varied setting."""

    row: Row
    measure: str
    label: str
    paper: float | None
    config: TrainConfig
    results: tuple[dict[str, Any], ...] = ()  # the result.json of each finished run

    @property
    def values(self) -> list[float]:
        """The measured value of each result, in percent."""
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


class Table(Settings):
    """A table or a figure of a paper: error or accuracy of the test images, in percent, by the recipes' metrics."""

    title: str
    source: str
    claim: str  # the paper's conclusion, in a sentence
    measure: Literal["error", "accuracy"]
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    over: Over | None = None
    set: Options  # other values for fields of all rows, by their paths
    short: Options  # the same, only in the short form
    short_note: str = ""  # a remark on the short form, shown below the table
    reading: str = ""  # our choices where the paper is silent, shown below the table

    @model_validator(mode="after")
    def _counted(self) -> Table:
        wanted = len(self.over.values) if self.over is not None else 1
        for row in self.rows:
            if len(row.paper) not in (0, wanted):
                raise ValueError(f"row {row.label!r} has {len(row.paper)} values of the paper, want {wanted} or none")
        return self

    def lines(self, out: Path, *, short: bool = False, changes: Mapping[str, Any] | None = None) -> list[Line]:
        """Return the table's lines, with the settings of their runs, without results; ValueError names a wrong row.

        ``out`` is the folder of the runs; ``changes`` are other values for fields of all rows, by their paths.
        """
        found: dict[str, Line] = {}
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
                    if not re.fullmatch(r"[\w-][\w.-]*", name) or name in found:
                        raise ValueError(f"name: got {name!r}, want letters, digits and dashes, unlike the rows above")
                    config = recipe.changed({**fields, **at, **(changes or {}), "out": str(out / name)})
                    paper = row.paper[index] if row.paper else None
                    found[name] = Line(row, self.measure, label, paper, config)
            except ValueError as error:
                raise ValueError(f"row {row.label!r}: {error}") from error
        return list(found.values())


def table(name: str) -> Table:
    """Return a table, one of :func:`names` or a file; ValueError, in one line, names the file and the field."""
    return read(Table, ENTRIES.fields(name), f"{Path(name).name}: ")
