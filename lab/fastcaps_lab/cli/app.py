"""The commands, in the order of their help."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fastcaps_lab.cli import bench, completion, demo, explain, reproduce, train

app = typer.Typer(
    name="fastcaps",
    help="Fast capsule layers for PyTorch, with memory that does not explode.",
    rich_markup_mode="markdown",  # paragraphs are wrapped to the terminal
    add_completion=False,  # Typer's would import torch at every press of the key; completion.py's does not
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def fastcaps(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    show_completion: Annotated[
        Literal["bash", "zsh"] | None, typer.Option(help="print a script for tab completion (one for both shells)")
    ] = None,
) -> int:
    """Print the version, the script for tab completion, or the help."""
    if version:
        from fastcaps import __version__

        print(f"fastcaps {__version__}")
        raise typer.Exit()
    if show_completion:
        print(completion.script(context), end="")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
    return 0


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("bench", context_settings=PASSED_ON)(bench.bench)
app.command("explain")(explain.explain)
app.command("train")(train.train)
app.command("recipes")(reproduce.recipes)
app.command("reproduce")(reproduce.reproduce)
app.command("demo")(demo.demo)
