"""What the commands share: errors of one line, JSON, settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Fail(Exception):
    """An error that the user can fix: one line, without a traceback."""

    status = 1


class Wrong(Fail):
    """An option, a name or a setting is wrong."""

    status = 2


class Stopped(Fail):
    """The command was stopped, by Ctrl-C or by a signal of the system."""

    status = 130


@contextmanager
def one_line_errors(again: str = "") -> Iterator[None]:
    """Raise what a user can fix as :class:`Fail`, and Ctrl-C as :class:`Stopped` if the command ``again`` resumes."""
    from fastcaps_lab.data import DataError
    from fastcaps_lab.training import RunError

    try:
        yield
    except (DataError, RunError) as error:
        raise Fail(str(error)) from error
    except ValueError as error:
        raise Wrong(str(error)) from error
    except (KeyboardInterrupt, SystemExit):  # Lightning raises the second for the first
        if not again:
            raise
        raise Stopped(f"stopped; to continue: {again}") from None


def show(result: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(result, indent=2, default=str))


def show_list(found: Mapping[str, str]) -> None:
    """Print names with their descriptions, wrapped to the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    for name, what in found.items():
        table.add_row(Text(name), Text(what))
    Console(highlight=False).print(table)


def progress_console(as_json: bool) -> Console:
    """Return the console for a command's progress: standard error if standard output is JSON."""
    from rich.console import Console

    return Console(stderr=as_json)


def absolute(path: str) -> str:
    """Return an absolute path, so that a run finds its data when it is resumed from another folder."""
    return str(Path(path).expanduser().resolve())


def read_settings(given: list[str]) -> dict[str, Any]:
    """Return the settings of ``--set FIELD=VALUE``, by paths."""
    from fastcaps_lab.training.files import read_yaml

    changes = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise Wrong(f"--set {text}: got no value, want FIELD=VALUE, as in optimizer.lr=0.01")
        try:
            changes[path] = read_yaml(value)
        except ValueError as error:
            raise Wrong(f"--set {text if len(text) <= 80 else text[:77] + '...'}: {error}") from error
    return changes
