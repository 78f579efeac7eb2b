"""``fastcaps recipes`` and ``fastcaps reproduce``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from fastcaps_lab.cli.common import Wrong, absolute, one_line_errors, progress_console, read_settings, show, show_list
from fastcaps_lab.cli.train import DATA_DIR


def recipes(
    recipe: Annotated[str | None, Argument(metavar="NAME", help="show all settings of this one")] = None,
    as_json: Annotated[bool, Option("--json", help="as JSON: the source by name, or every setting of one")] = False,
) -> int:
    """List the experiments of the papers, with their source."""
    from fastcaps_lab.training import recipes
    from fastcaps_lab.training.fields import as_data

    with one_line_errors():
        if recipe is not None and as_json:
            found = recipes.recipe(recipe)
            show({"name": found.name, "source": str(found.source), "settings": as_data(found.config)})
            return 0
        if recipe is not None:
            print(recipes.as_yaml(recipe), end="")
            return 0
        sources = {name: str(recipes.recipe(name).source) for name in recipes.names()}
    (show if as_json else show_list)(sources)
    return 0


def reproduce(
    context: Context,
    name: Annotated[str | None, Argument(metavar="NAME", help="one of those listed, or a .yaml file")] = None,
    short: Annotated[bool, Option("--short", help="in the short form that the table declares")] = False,
    data_dir: Annotated[str | None, Option(help=DATA_DIR)] = None,
    row: Annotated[list[str] | None, Option(metavar="LABEL", help="train only this row (repeat)")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="FIELD=VALUE", help="as for train; of all rows (repeat)")
    ] = None,
    out: Annotated[str | None, Option(help="folder of its runs (runs/reproduce/NAME, or NAME-short)")] = None,
    collect: Annotated[bool, Option("--collect", help="train nothing, show what there is")] = False,
    as_json: Annotated[bool, Option("--json", help="print what table.json holds, and nothing else")] = False,
) -> int:
    """Make a table or figure of a paper, with the paper's values beside ours.

    Trains the unfinished runs that the table needs. Without NAME, lists the tables.
    """
    from fastcaps_lab.training import tables

    console, command = progress_console(as_json), shlex.join(["fastcaps", *context.obj])
    with one_line_errors(command):
        if name is None:
            if row or settings or out or collect:
                raise Wrong("NAME, the table or figure, is missing; `fastcaps reproduce` lists them")
            every = {name: tables.table(name) for name in tables.names()}
            (show if as_json else show_list)({name: f"{each.source}: {each.title}" for name, each in every.items()})
            return 0
        from fastcaps_lab.training import reproduce  # loads Lightning, for which a list need not wait

        table = tables.table(name)
        stem = Path(name).stem
        folder = Path(out or f"runs/reproduce/{stem}{'-short' if short else ''}")
        if folder.is_file():
            raise Wrong(f"--out {folder}: is a file, want a folder")
        changes = read_settings(settings or [])
        where = {"data.dir": absolute(data_dir)} if data_dir else {}
        lines = table.lines(table.runs_folder(folder, stem), short=short, changes={**changes, **where})
        lines = reproduce.collect(lines)  # if a run has other settings, fail before anything is trained
        if not collect and not reproduce.train_missing(lines, row or [], console):
            return 0  # one of several processes; the first one speaks
        lines = reproduce.collect(lines)
        remarks = reproduce.remarks(table, lines, short, changes)
        reproduce.write(table, lines, remarks, folder, short=short, command=command)
    if as_json:
        show(json.loads((folder / "table.json").read_text(encoding="utf-8")))
        return 0
    from rich.markdown import Markdown

    console.print(Markdown((folder / "table.md").read_text(encoding="utf-8")))
    console.print(f"{folder}/: table.md, table.json, picture.png", highlight=False, soft_wrap=True)
    return 0
