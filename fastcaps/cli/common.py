"""What the commands share: errors of one line, JSON, a sign of life."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# a module that may be missing -> the extra of the package that installs it
EXTRAS = {
    **dict.fromkeys(("rich", "typer"), "cli"),
    **dict.fromkeys(("lightning", "tensorboard", "torchmetrics", "numpy", "pydantic", "yaml"), "train"),
    **dict.fromkeys(("sklearn", "matplotlib"), "demo"),
    "pytest_benchmark": "bench",
}


class Fail(Exception):
    """An error that the user can mend: one line, without a traceback."""

    status = 1


class Wrong(Fail):
    """An option, a name or a setting is wrong."""

    status = 2


class Stopped(Fail):
    """The command was stopped, by Ctrl-C or by a signal of the system."""

    status = 130


def missing_extra(error: ImportError) -> Fail:
    """Return an error with the extra that brings the missing module; anything else is a fault of ours, and raises."""
    module = (error.name or "").split(".")[0]
    if module not in EXTRAS:
        raise error
    return Fail(f"{module} is not installed; install it with: pip install 'fastcaps[{EXTRAS[module]}]'")


@contextmanager
def one_line_errors(again: str = "") -> Iterator[None]:
    """Turn what a user can mend into :class:`Fail`, and Ctrl-C into :class:`Stopped`, where a command goes on."""
    from fastcaps.data import DataError
    from fastcaps.training import RunError

    try:
        yield
    except (DataError, RunError) as error:
        raise Fail(str(error)) from error
    except ValueError as error:
        raise Wrong(str(error)) from error
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        if not again:
            raise
        raise Stopped(f"stopped; {again} goes on") from None


def show(result: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(result, indent=2, default=str))


def show_list(found: Mapping[str, str]) -> None:
    """Print names and what they are, wrapped by words to the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    for name, what in found.items():
        table.add_row(Text(name), Text(what))
    Console(highlight=False).print(table)


def told_on(as_json: bool) -> Console:
    """Where a command tells how far it is: beside the JSON, if that is asked for."""
    from rich.console import Console

    return Console(stderr=as_json)


def absolute(path: str) -> str:
    """A path under which a run finds its data again, whatever folder it is resumed from."""
    return str(Path(path).expanduser().resolve())


def read_settings(given: list[str]) -> dict[str, Any]:
    """The settings given by ``--set FIELD=VALUE``, by paths."""
    from fastcaps.training.files import read_yaml

    changes = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise Wrong(f"--set {text}: got no value, want FIELD=VALUE, as in optimizer.lr=0.01")
        try:
            changes[path] = read_yaml(value)
        except ValueError as error:
            raise Wrong(f"--set {text}: {error}") from error
    return changes
