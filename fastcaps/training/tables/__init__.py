"""The tables and figures of the papers as YAML files, one each: the recipes to train, and the paper's numbers.

A file has the fields of :class:`Table`. Its rows name recipes, and may change their fields by paths, as ``--set`` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastcaps.training import recipes
from fastcaps.training.config import TrainConfig
from fastcaps.training.fields import SettingError, read, wrong
from fastcaps.training.recipes import Source, read_yaml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    paper: tuple[float, ...] = ()
    spread: float | None = None
    note: str = ""
    eager: bool = False


@dataclass(frozen=True)
class Entry:
    """One line of a table: a row, at one value of the setting that is varied.

    Attributes
    ----------
    row : Row
    label, name : str
        Its name in the table, and its folder.
    at : Any
        The value that is varied; None where none is.
    paper : float, optional
        The paper's number.
    config : TrainConfig
        The settings of its runs.
    """

    row: Row
    label: str
    name: str
    at: Any
    paper: float | None
    config: TrainConfig


@dataclass(frozen=True)
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

    def changes(self, row: Row, short: bool) -> dict[str, Any]:
        """The settings that a row changes, by paths, without the one that is varied."""
        return {**self.set, **row.set, **({**self.short, **row.short} if short else {})}

    def runs_folder(self, out: Path, name: str) -> Path:
        """The folder of the runs: ``out``; with ``beside``, the table's ``name`` in it is replaced by that one's."""
        return out.with_name(out.name.replace(name, self.beside)) if self.beside else out

    def entries(self, out: Path, *, short: bool = False, changes: Mapping[str, Any] | None = None) -> list[Entry]:
        """The lines of the table, with the settings of their runs.

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
        found: list[Entry] = []
        values = self.over.values if self.over is not None else (None,)
        for row in self.rows:
            try:
                recipe = recipes.recipe(row.recipe).config
                for index, value in enumerate(values):
                    name, label, at = row.name or Path(row.recipe).stem, row.label, {}
                    if self.over is not None:
                        name, label = f"{name}-{value}", f"{label}, {self.over.name} {value}"
                        at = {self.over.field: value}
                    if not re.fullmatch(r"[\w-][\w.-]*", name) or name in [entry.name for entry in found]:
                        raise wrong("name", name, "letters, digits, dots and dashes, and another than the rows above")
                    given = {**self.changes(row, short), **at, **(changes or {}), "out": str(out / name)}
                    number = row.paper[index] if row.paper else None
                    found.append(Entry(row, label, name, value, number, recipe.changed(given)))
            except ValueError as error:
                raise SettingError(f"row {row.label!r}: {error}") from error
        return found


def names() -> list[str]:
    """The tables that there are."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


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
    path = recipes.own_file(name, "table", names(), "reproduce") or FOLDER / f"{name}.yaml"
    try:
        given = read_yaml(path.read_text(encoding="utf-8"))
        rows = given.get("rows") if isinstance(given, dict) else None
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, dict) and not isinstance(row.get("paper", []), list):
                row["paper"] = [row["paper"]]  # one number may stand without brackets
        return read(Table, given)
    except (SettingError, UnicodeDecodeError) as error:
        raise SettingError(f"{path.name}: {error}") from error
