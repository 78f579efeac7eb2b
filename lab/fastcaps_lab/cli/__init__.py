"""The command line. Each command imports what it needs when it runs, so that ``import fastcaps_lab.cli`` stays light.

Exit statuses: 0; 1 for an error that the user can fix, reported in one line on the error stream, or for a check that
failed; 2 for a wrong command line or wrong settings; 130 if it was stopped. With ``--json`` the output is one JSON
document and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper

from fastcaps_lab.cli.common import Fail

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status. SystemExit of status 2 for a wrong command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that lacks a sign is no reason to lose all others
            stream.reconfigure(errors="replace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = " ".join(["fastcaps", *[word for word in given if not word.startswith("-")][:1]])

    def say(error: BaseException | str) -> None:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)

    try:
        import typer

        from fastcaps_lab.cli.app import app

        status = app(given, prog_name="fastcaps", standalone_mode=False, obj=given)
    except (Fail, OSError) as error:  # OSError: a full disk, a folder that may not be written
        say(error)
        return getattr(error, "status", 1)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        say(f"{error.format_message()} ({context.command_path if context else name} --help)")
        raise SystemExit(error.exit_code) from None
    if status == 130:  # what Typer makes of Ctrl-C
        say("stopped")
    return status or 0
