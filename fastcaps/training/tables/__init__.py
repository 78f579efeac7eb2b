"""The tables and figures of the papers, a YAML file a paper: the recipes to train, and the paper's numbers.

An entry has the fields of :class:`Table`, and may have a ``base``: another table, whose fields it has where it names
none of its own; of mappings (``source``, ``set``, ``short``) this holds key by key. Rows name recipes, and may change
their fields by paths, as ``--set`` does. A table of your own is a file with one entry's fields.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from fastcaps.training import recipes
from fastcaps.training.config import TrainConfig
from fastcaps.training.fields import STRICT, Flag, Number, SettingError, read, wrong
from fastcaps.training.files import Shelf
from fastcaps.training.recipes import Source


def _on_base(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a table's fields on those of its base."""
    both = [key for key in base if isinstance(base[key], dict) and isinstance(given.get(key), dict)]
    return {**base, **given, **{key: {**base[key], **given[key]} for key in both}}


SHELF = Shelf(Path(__file__).parent, "table", "reproduce", _on_base)
COSTS = ("memory", "time")
"""Measures of a training step; nothing is trained for them."""


@dataclass(frozen=True, config=STRICT)
class Over:
    """The setting that a figure varies.

    Attributes
    ----------
    field : str
        Its path, e.g. ``network.options.iterations``.
    name : str
        A word for it, below the axis.
    values : tuple
        Its values: each row has a run for each of them.
    """

    field: str
    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, config=STRICT)
class Row:
    """A row of a table, or a line of a figure.

    Attributes
    ----------
    label : str
        Its name in the table.
    recipe : str
        The experiment, as :func:`fastcaps.training.recipe` takes it.
    name : str
        The folder of its run; the recipe's name by default. Where a setting is varied, its value follows: ``NAME-3``.
    set, short : mapping
        Other values for fields, by their paths; ``short`` in the short form only.
    paper : tuple of float
        The paper's number: one, or one for each value that is varied. May be left out.
    spread : float, optional
        The paper's standard deviation.
    note : str
        What the paper has in the place of a number.
    eager : bool
        Whether memory and time are measured in plain PyTorch, whose autograd keeps the votes.
    """

    label: str
    recipe: str
    name: str = ""
    set: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    paper: Annotated[
        tuple[Number, ...], BeforeValidator(lambda got: got if isinstance(got, list | tuple) else (got,))
    ] = ()
    spread: Number | None = None
    note: str = ""
    eager: Flag = False


@dataclass(frozen=True, config=STRICT)
class Line:
    """A line of a table: a row, at one value of the setting that is varied.

    Attributes
    ----------
    row : Row
    measure : str
        What the table measures.
    label, name : str
        Its name in the table, and its folder.
    at : Any
        The value that is varied; None where none is.
    paper : float, optional
        The paper's number.
    config : TrainConfig
        The settings of its runs.
    results : tuple of dict
        The ``result.json`` of each run that is finished.
    """

    row: Row
    measure: str
    label: str
    name: str
    at: Any
    paper: float | None
    config: TrainConfig
    results: tuple[dict[str, Any], ...] = ()

    @property
    def values(self) -> list[float]:
        """The number of each result that the table measures."""
        if self.measure in COSTS:
            return [float(result[self.measure]) for result in self.results]
        shares = [float(result["test_accuracy"]) for result in self.results]
        return [100 * (1 - share if self.measure == "error" else share) for share in shares]

    @property
    def mean(self) -> float | None:
        """Of the values; None if there is none."""
        return statistics.mean(self.values) if self.results else None

    @property
    def spread(self) -> float | None:
        """Their standard deviation (n − 1); None if there are fewer than two."""
        return statistics.stdev(self.values) if len(self.results) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True, config=STRICT)
class Table:
    """A table or a figure of a paper.

    Attributes
    ----------
    title : str
    source : Source
    claim : str
        What the paper says of it, in a sentence.
    measure : str
        ``error`` or ``accuracy``: of the test images, in percent, by the recipes' metrics. ``memory`` in MB or ``time``
        in ms of a training step of freshly drawn networks, of which nothing is trained.
    rows : tuple of Row
    draw : str
        ``bars``, ``lines`` over what is varied, or one of :data:`fastcaps.training.figures.FIGURES`: a figure of the
        trained networks.
    beside : str
        Another table, whose runs it uses, in that one's folder.
    over : Over, optional
        What is varied; with ``lines``.
    set, short : mapping
        Other values for fields of all rows, by their paths; ``short`` in the short form only.
    short_note : str
        A remark on the short form, shown below the table.
    reading : str
        What we chose where the paper is silent, shown below the table.
    """

    title: str
    source: Source
    claim: str
    measure: Literal["error", "accuracy", "memory", "time"]
    rows: tuple[Row, ...]
    draw: Literal["bars", "lines", "perturbations", "agreement", "poses", "changes"] = "bars"
    beside: str = ""
    over: Over | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    short_note: str = ""
    reading: str = ""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows: got none, want one or more")
        if (self.draw == "lines") != (self.over is not None):
            raise ValueError(f"over: got {self.over} with draw {self.draw!r}, want it with lines, and with them only")
        wanted = len(self.over.values) if self.over is not None else 1
        for index, row in enumerate(self.rows):
            if len(row.paper) not in (0, wanted):
                raise ValueError(f"rows[{index}].paper: got {len(row.paper)} numbers, want {wanted} or none")

    def runs_folder(self, out: Path, name: str) -> Path:
        """The folder of the runs: ``out``; with ``beside``, the table's ``name`` in it is replaced by that one's."""
        return out.with_name(out.name.replace(name, self.beside)) if self.beside else out

    def lines(self, out: Path, *, short: bool = False, changes: Mapping[str, Any] | None = None) -> list[Line]:
        """The lines of the table, with the settings of their runs and no results yet.

        Parameters
        ----------
        out : Path
            The folder that holds the runs.
        short : bool
            In the short form.
        changes : mapping
            Other values for fields of all rows, by their paths.

        Raises
        ------
        SettingError
            If a row is wrong: its label, the field, what came and what is wanted.
        """
        found: list[Line] = []
        values = self.over.values if self.over is not None else (None,)
        for row in self.rows:
            own = {**self.set, **row.set, **({**self.short, **row.short} if short else {})}
            try:
                recipe = recipes.recipe(row.recipe).config
                for index, value in enumerate(values):
                    name, label, at = row.name or Path(row.recipe).stem, row.label, {}
                    if self.over is not None:
                        name, label = f"{name}-{value}", f"{label}, {self.over.name} {value}"
                        at = {self.over.field: value}
                    if not re.fullmatch(r"[\w-][\w.-]*", name) or name in [line.name for line in found]:
                        raise wrong("name", name, "letters, digits, dots and dashes, and another than the rows above")
                    config = recipe.changed({**own, **at, **(changes or {}), "out": str(out / name)})
                    paper = row.paper[index] if row.paper else None
                    found.append(Line(row, self.measure, label, name, value, paper, config))
            except ValueError as error:
                raise SettingError(f"row {row.label!r}: {error}") from error
        return found


def names() -> list[str]:
    """The tables that there are."""
    return sorted(SHELF.entries)


def table(name: str) -> Table:
    """Read a table.

    Parameters
    ----------
    name : str
        One of :func:`names`, or the path of a file.

    Raises
    ------
    ValueError
        One line: the file, the field, what came and what is wanted.
    """
    given = SHELF.fields(name)
    try:
        return read(Table, given)
    except SettingError as error:
        raise SettingError(f"{Path(name).name}: {error}") from error
