"""The ``fastcaps`` command. Each subcommand imports what it needs when it runs, so that help and lists stay quick.

Exit statuses: 0; 1 for an error that the user can fix, in one line on the error stream; 2 for a wrong command line or
wrong settings; 130 if it was stopped. With ``--json`` the output is one JSON document and nothing else.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Exit, Option

app = typer.Typer(
    help="Train the capsule networks of papers, and repeat their tables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
JSON = Annotated[bool, Option("--json", help="print one JSON document, and nothing else")]
SET = Annotated[list[str] | None, Option("--set", metavar="FIELD=VALUE", help="as optimizer.lr=0.01 (repeat)")]
DATA_DIR = Annotated[str | None, Option(help="folder with the data set's files, or its parent; nothing is downloaded")]
NAMED = {name: name for name in ("epochs", "batch_size", "seed", "runs", "precision", "accelerator", "out")} | {
    "network": "network.name",
    "iterations": "network.options.iterations",
    "data": "data.name",
    "data_dir": "data.dir",
    "limit": "data.limit",
    "loss": "loss.name",
    "lr": "optimizer.lr",
}
"""The paths of the settings that have an option of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    try:
        app(arguments, prog_name="fastcaps")
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def _fail(status: int, error: object) -> NoReturn:
    print(f"fastcaps: {' '.join(str(error).split())}", file=sys.stderr)
    raise Exit(status) from None


@contextmanager
def _one_line_errors(again: str = "") -> Iterator[None]:
    """Print what a user can fix in one line, and after Ctrl-C the command ``again``, which resumes."""
    from fastcaps_lab.data import DataError
    from fastcaps_lab.training import RunError

    try:
        yield
    except (DataError, RunError, OSError) as error:
        _fail(1, error)
    except (ValueError, TypeError) as error:
        _fail(2, error)
    except (KeyboardInterrupt, SystemExit):  # Lightning raises the second for the first
        _fail(130, f"stopped; to continue: {again}" if again else "stopped")


def _show(found: Any, as_json: bool = True) -> None:
    """Print JSON, or names with their descriptions, wrapped to the terminal."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, what in found.items():
        table.add_row(name, what)
    Console(highlight=False, markup=False).print(table)


def _changes(named: Mapping[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """Return the settings of options and of ``--set FIELD=VALUE``, which wins, by paths; folders become absolute."""
    from fastcaps_lab.training.recipes import read_yaml

    changes = {NAMED[name]: value for name, value in named.items() if value is not None}
    for text in settings or ():
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ValueError(f"--set {text}: got no value, want FIELD=VALUE, as in optimizer.lr=0.01")
        changes[path] = read_yaml(value, f"--set {text[:80]}: ")
    for path in ("data.dir", "data.options.transformer"):  # a run may be resumed from another folder
        if path in changes:
            changes[path] = str(Path(changes[path]).expanduser().resolve())
    return changes


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, Option("--version", help="print the version")] = False) -> None:
    if show:
        from fastcaps import __version__

        print(f"fastcaps {__version__}")
        raise Exit


@app.command()
def explain(
    network: Annotated[str, Argument(metavar="NETWORK", help="a name that fastcaps train --list shows")],
    batch: Annotated[int, Option(min=1, help="images or texts")] = 1,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="OPTION=VALUE", help="of the network, as iterations=3 (repeat)")
    ] = None,
    device: Annotated[str, Option(help="of weights and inputs")] = "cpu",
    backend: Annotated[str | None, Option(help="force one: cuda, triton, cpu or reference")] = None,
    as_json: JSON = False,
) -> None:
    """Show on which kernel every routing call of a network runs, and why not on the others."""
    import torch

    import fastcaps
    from fastcaps.functional import Explanation
    from fastcaps_lab import models

    with _one_line_errors(), nullcontext() if backend is None else fastcaps.backend(backend):
        net: Any = models.create(network, device=device, **_changes({}, settings))
        # texts have 32 tokens
        size = (32, net.layers, net.embedding) if hasattr(net, "embedding") else (net.in_channels, *net.image_size)
        found = fastcaps.explain(net, torch.zeros(batch, *size, device=device))
    calls = [found] if isinstance(found, Explanation) else list(found)
    if as_json:
        _show({"network": network, "batch": batch, "calls": [asdict(call) for call in calls]})
    else:
        print(f"{network}, batch {batch} on {device}: {len(calls)} routing calls\n\n{found}")
    raise Exit(int(any(call.backend is None for call in calls)))


@app.command()
def train(
    run: Annotated[Path | None, Argument(metavar="[RUN]", help="with --resume: the run's folder")] = None,
    *,
    recipe: Annotated[
        str | None, Option(metavar="NAME", help="a paper's experiment (recipes), or a .yaml file")
    ] = None,
    network: Annotated[str | None, Option(help="network to train (see --list)")] = None,
    data: Annotated[str | None, Option(help="mnist, cifar10, … (see --list; digits ship with scikit-learn)")] = None,
    data_dir: DATA_DIR = None,
    limit: Annotated[int | None, Option(help="use only the first training images, for a quick try")] = None,
    iterations: Annotated[int | None, Option(help="routing iterations")] = None,
    loss: Annotated[str | None, Option(help="cross-entropy (default), bce, margin, spread or feedback")] = None,
    lr: Annotated[float | None, Option(help="highest learning rate")] = None,
    epochs: Annotated[int | None, Option(help="passes over the training images (default: 2)")] = None,
    batch_size: Annotated[int | None, Option(help="images per step, on all devices together (default: 64)")] = None,
    seed: Annotated[int | None, Option(help="of initial weights, order of images, augmentation (default: 0)")] = None,
    runs: Annotated[int | None, Option(help="number of runs, with this seed and the next ones (default: 1)")] = None,
    precision: Annotated[str | None, Option(help="32-true (default), bf16-mixed, 16-mixed, bf16-true, 64-true")] = None,
    accelerator: Annotated[str | None, Option(help="auto (default), cpu, gpu, … as in Lightning")] = None,
    out: Annotated[str | None, Option(help="folder of the run (default: runs/RECIPE or runs/NETWORK-DATA)")] = None,
    settings: SET = None,
    resume: Annotated[bool, Option("--resume", help="continue from RUN's last checkpoint")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="replace a run that --out already holds")] = False,
    listed: Annotated[bool, Option("--list", help="list the networks and data sets, and stop")] = False,
    as_json: JSON = False,
) -> None:
    """Train a network on images or texts. The sizes of its inputs and its classes follow from the data."""
    named = {name: value for name, value in locals().items() if name in NAMED}
    if listed:
        from fastcaps_lab import data as sets
        from fastcaps_lab import models

        _show({"networks": ", ".join(models.names()), "data": ", ".join(sets.names())}, as_json)
        return
    with _one_line_errors():
        if (run is not None) != resume:
            raise ValueError("--resume needs the folder of a run, and only --resume: fastcaps train --resume RUN")
        config = _config(run, recipe, _changes(named, settings))
    from fastcaps_lab import training  # loads Lightning, for which a wrong setting need not wait
    from fastcaps_lab.training.callbacks import Report, is_main

    report = Report(Console(stderr=as_json))
    with _one_line_errors(f"fastcaps train --resume {shlex.quote(str(config.folder))}"):
        work: Any = training.train if config.runs == 1 else training.train_seeds
        result = work(config, resume=resume, overwrite=overwrite, report=report)
    runs_done = [result] if config.runs == 1 else result.results
    if as_json and is_main():
        _show([{"out": str(one.out), **json.loads((one.out / "result.json").read_text())} for one in runs_done])
    elif config.runs == 1:
        best = "" if result.best_epoch is None else f"; the best epoch on held-out data is {result.best_epoch}"
        report.say(f"test accuracy {100 * result.test_accuracy:.2f} % after {len(result.history)} epochs{best}")
        report.say(f"{result.out}/: result.json, metrics.csv, last.ckpt, tensorboard")
    else:
        report.say(f"test accuracy {100 * result.mean:.2f} ± {100 * result.spread:.2f} % of {config.runs} runs")
        report.say(f"{result.out}/: a folder for each run")


def _config(run: Path | None, recipe: str | None, changes: dict[str, Any]) -> Any:
    """Return the settings of a run to resume, of a recipe, or of the defaults, with changes."""
    from fastcaps_lab import training
    from fastcaps_lab.training.config import kept
    from fastcaps_lab.training.settings import changed

    if run is not None:
        before = kept(run)
        return (before if recipe is None else training.recipe(recipe).config).changed({**changes, "out": str(run)})
    if recipe is not None:
        return training.recipe(recipe, changes).config
    missing = [f"--{name}" for name in ("network", "data") if f"{name}.name" not in changes and name not in changes]
    if missing:
        raise ValueError(f"missing {' and '.join(missing)}, or --recipe (fastcaps train --list, fastcaps recipes)")
    return training.TrainConfig.of(**changed({"optimizer": {"lr": 3e-3}}, changes))


@app.command()
def recipes(
    name: Annotated[str | None, Argument(metavar="NAME", help="show all settings of this one")] = None,
    as_json: JSON = False,
) -> None:
    """List the experiments of the papers, with their source."""
    from fastcaps_lab.training import recipes

    with _one_line_errors():
        if name is None:
            _show({each: recipes.recipe(each).source for each in recipes.names()}, as_json)
        elif as_json:
            _show(recipes.recipe(name).model_dump())
        else:
            import yaml

            fields = recipes.fields_of(name)
            print(yaml.safe_dump(fields, sort_keys=False, default_flow_style=None, allow_unicode=True), end="")


@app.command()
def reproduce(
    name: Annotated[str | None, Argument(metavar="NAME", help="one of those listed, or a .yaml file")] = None,
    short: Annotated[bool, Option("--short", help="in the short form that the table declares")] = False,
    data_dir: DATA_DIR = None,
    row: Annotated[list[str] | None, Option(metavar="LABEL", help="train only this row (repeat)")] = None,
    settings: SET = None,
    out: Annotated[Path | None, Option(help="folder of its runs (default: runs/reproduce/NAME, or NAME-short)")] = None,
    collect: Annotated[bool, Option("--collect", help="train nothing, show what there is")] = False,
    as_json: JSON = False,
) -> None:
    """Make a table of a paper, with the paper's values beside ours. Without NAME, list the tables."""
    from fastcaps_lab.training import tables

    console = Console(stderr=as_json)
    words = [name or "", *(["--short"] if short else []), *(["--data-dir", data_dir] if data_dir else [])]
    words += [word for text in row or () for word in ("--row", text)]
    words += [word for text in settings or () for word in ("--set", text)]
    command = shlex.join(["fastcaps", "reproduce", *words, *(["--out", str(out)] if out else [])])
    with _one_line_errors(command):
        if name is None:
            found = {each: tables.table(each) for each in tables.names()}
            _show({each: f"{table.source}: {table.title}" for each, table in found.items()}, as_json)
            return
        from fastcaps_lab.training import reproduce  # loads Lightning, for which a list need not wait

        table, folder = tables.table(name), out or Path(f"runs/reproduce/{Path(name).stem}{'-short' if short else ''}")
        changes = _changes({"data_dir": data_dir}, settings)
        # if a run has other settings, fail before anything is trained
        lines = reproduce.collect(table.lines(folder, short=short, changes=changes))
        if not collect:
            reproduce.train_missing(lines, row or [], console)
            if not reproduce.is_main():
                return
            lines = reproduce.collect(lines)
        shown = {path: value for path, value in changes.items() if path != "data.dir"}
        text = reproduce.as_markdown(table, lines, short, shown)
        reproduce.write(table, lines, text, folder, command)
    if as_json:
        _show(json.loads((folder / "table.json").read_text(encoding="utf-8")))
        return
    from rich.markdown import Markdown

    console.print(Markdown(text))
    console.print(f"{folder}/: table.md, table.json", highlight=False, soft_wrap=True)


@app.command()
def demo(
    out: Annotated[Path, Option(help="folder for the pictures and figures")] = Path("fastcaps-demo"),
    epochs: Annotated[int, Option(help="passes over the digits")] = 10,
    seed: Annotated[int, Option(help="seed of the training")] = 0,
    skip_speed: Annotated[bool, Option("--skip-speed", help="leave out the measurement of speed and memory")] = False,
    as_json: JSON = False,
) -> None:
    """Train on handwritten digits, measure this machine, draw two pictures."""
    from fastcaps_lab.demo import run

    with _one_line_errors():
        summary = run(out, epochs=epochs, seed=seed, speed=not skip_speed, console=Console(stderr=as_json))
    if as_json:
        _show(summary)


if __name__ == "__main__":
    sys.exit(main())
