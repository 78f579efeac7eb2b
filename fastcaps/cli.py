"""The command line: ``fastcaps demo``, ``train``, ``recipes``, ``reproduce``, ``info``.

Each command imports what it needs when it runs, so that ``fastcaps --help`` and ``import fastcaps`` stay light.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# a module that may be missing -> the extra of the package that installs it
_EXTRAS = {
    **dict.fromkeys(("lightning", "tensorboard", "torchmetrics", "rich", "numpy", "yaml"), "train"),
    **dict.fromkeys(("sklearn", "matplotlib"), "demo"),
}
# options of `fastcaps train`: name, path of the setting, type, help
_FLAGS = (
    ("network", "network.name", str, "network to train (see --list)"),
    ("data", "data.name", str, "mnist, cifar10, smallnorb, sst5, … (see --list; digits ship with scikit-learn)"),
    ("data-dir", "data.dir", str, "folder that holds the data set's files, or a folder of them; nothing is downloaded"),
    ("epochs", "epochs", int, "passes over the training images"),
    ("batch-size", "batch_size", int, "images a step, on all devices together"),
    ("loss", "loss.name", str, "cross-entropy, bce, margin, spread or feedback"),
    ("optimizer", "optimizer.name", str, "adam, adamw, radam, rmsprop or sgd"),
    ("lr", "optimizer.lr", float, "highest learning rate"),
    ("weight-decay", "optimizer.weight_decay", float, "weight decay"),
    ("momentum", "optimizer.momentum", float, "momentum, for sgd and rmsprop"),
    ("schedule", "schedule.name", str, "one-cycle, cosine, milestones, exponential or constant"),
    ("seed", "seed", int, "decides initial weights, order of images, augmentation"),
    ("runs", "runs", int, "so many runs, with this seed and those after it: mean and spread"),
    ("precision", "precision", str, "32-true, bf16-mixed, 16-mixed (autocast), bf16-true or 64-true"),
    ("accelerator", "accelerator", str, "auto, cpu, gpu, … as Lightning has them"),
    ("devices", "devices", str, "how many devices, or which (0,1)"),
    ("strategy", "strategy", str, "auto, ddp, fsdp, … as Lightning has them"),
    ("augment", "data.augment", bool, "pad and crop training images at random (CIFAR and smallNORB are)"),
    ("flip", "data.flip", bool, "mirror half of the training images (CIFAR is; a mirrored 2 is no 2)"),
    ("limit", "data.limit", int, "use only the first training images, for a quick try"),
    (
        "validation",
        "data.validation",
        int,
        "hold out so many training images, and keep the epoch that does best by them",
    ),
    ("workers", "workers", int, "processes that gather what batches are made of"),
    ("checkpoint-every", "checkpoint_every", int, "steps between two checkpoints"),
    ("iterations", "network.options.iterations", int, "routing iterations"),
    ("routing", "network.options.routing", str, "concurrent or sequential"),
    ("out", "out", str, "folder of the run (runs/RECIPE or runs/NETWORK-DATA)"),
)


class _Fail(Exception):
    """An error that the user can mend: one line, without a traceback."""

    status = 1


class _Stopped(_Fail):
    """The command was stopped, by Ctrl-C or by a signal of the system."""

    status = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastcaps", description="Capsule networks, routed without ever storing a vote.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    demo = commands.add_parser("demo", help="train on handwritten digits, measure this machine, draw two pictures")
    demo.add_argument("--out", default="fastcaps-demo", help="folder for the pictures and figures (%(default)s)")
    demo.add_argument("--epochs", type=int, default=None, help="passes over the digits")
    demo.add_argument("--seed", type=int, default=0, help="seed of the training (%(default)s)")
    demo.add_argument("--skip-speed", action="store_true", help="leave out the measurement of speed and memory")
    demo.set_defaults(run=_demo)

    train = commands.add_parser(
        "train",
        help="train a network on images or texts",
        description="Train a network on images or texts. The sizes of its inputs and its classes follow from the data.",
        argument_default=argparse.SUPPRESS,  # only options that were given are there: --resume compares them
    )
    train.add_argument("--list", action="store_true", help="list the networks and data sets, and stop")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out, with the settings kept there; options given again must agree",
    )
    train.add_argument("--overwrite", action="store_true", help="replace a run that --out already holds")
    train.add_argument(
        "--recipe", metavar="NAME", help="begin from an experiment of a paper (fastcaps recipes), or from a .yaml file"
    )
    train.add_argument(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="any setting by its path, as in a recipe: optimizer.lr=0.01, loss=spread, network.options.iterations=3",
    )
    for name, path, kind, text in _FLAGS:
        how: dict[str, Any] = {"type": kind, "metavar": name.upper()}
        train.add_argument(
            f"--{name}", help=text, dest=path, **({"action": argparse.BooleanOptionalAction} if kind is bool else how)
        )
    train.set_defaults(run=_train)

    recipes = commands.add_parser("recipes", help="list the experiments of the papers, with their source")
    recipes.add_argument("recipe", nargs="?", metavar="NAME", help="show this one whole")
    recipes.set_defaults(run=_recipes)

    reproduce = commands.add_parser(
        "reproduce",
        help="make a table or figure of a paper, beside the paper's figures",
        description="Train what a table of a paper needs, as far as it is not finished, and show it beside the paper's "
        "figures. Without NAME, list the tables.",
        allow_abbrev=False,
    )
    reproduce.add_argument("table", nargs="?", metavar="NAME", help="one of those listed, or a .yaml file")
    reproduce.add_argument("--short", action="store_true", help="in the short form that the table declares")
    reproduce.add_argument("--data-dir", help=next(text for name, _, _, text in _FLAGS if name == "data-dir"))
    reproduce.add_argument("--row", nargs="+", metavar="LABEL", default=[], help="train only these rows")
    reproduce.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="as for train; of all rows"
    )
    reproduce.add_argument("--out", help="folder of its runs (runs/reproduce/NAME, or NAME-short)")
    reproduce.add_argument("--collect", action="store_true", help="train nothing, show what there is")
    reproduce.set_defaults(run=_reproduce)

    info = commands.add_parser("info", help="what was built, what runs here, and why")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.add_argument("--device", default="cpu", help="device of the call that is explained (%(default)s)")
    info.add_argument("--dtype", default="float32", help="its dtype (%(default)s)")
    info.set_defaults(run=_info)
    return parser


def _refuse_missing(error: ImportError) -> NoReturn:
    """Say which extra brings the missing module; anything else is a fault of ours and stays a traceback."""
    module = (error.name or "").split(".")[0]
    if module not in _EXTRAS:
        raise error
    raise _Fail(f"{module} is not installed; install it with: pip install 'fastcaps[{_EXTRAS[module]}]'") from error


def _demo(args: argparse.Namespace) -> int:
    try:
        from fastcaps.data import DataError
        from fastcaps.demo import EPOCHS, run
        from fastcaps.training import RunError
    except ImportError as error:
        _refuse_missing(error)
    epochs = EPOCHS if args.epochs is None else args.epochs
    try:
        run(Path(args.out), epochs=epochs, seed=args.seed, speed=not args.skip_speed)
    except (DataError, RunError, ValueError) as error:
        raise _Fail(str(error)) from error
    return 0


def _list() -> int:
    from fastcaps import data, models

    print("networks: " + ", ".join(models.names()))
    print("data:     " + ", ".join(data.names()))
    return 0


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that were given, by paths. ``--set`` wins over an option of its own."""
    changes = {path: given[path] for _, path, _, _ in _FLAGS if path in given}
    return changes | _set(given.get("set", ()))


def _set(given: Sequence[str]) -> dict[str, Any]:
    """The settings given by ``--set FIELD=VALUE``, by paths."""
    from fastcaps.training.recipes import read_yaml

    changes = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise _Fail(f"--set {text}: got no value, want FIELD=VALUE, as in optimizer.lr=0.01")
        try:
            changes[path] = read_yaml(value)
        except ValueError as error:
            raise _Fail(f"--set {text}: {error}") from error
    return changes


def _absolute(path: str) -> str:
    """A path under which a run finds its data again, whatever folder it is resumed from."""
    return str(Path(path).expanduser().resolve())


def _fresh(given: dict[str, Any], changes: dict[str, Any]) -> Any:
    """The settings of a new run: the recipe's, or the defaults, with the changes."""
    from fastcaps.training.config import TrainConfig, defaults
    from fastcaps.training.fields import changed, read
    from fastcaps.training.recipes import recipe

    if "recipe" in given:
        return recipe(given["recipe"], changes).config
    settings = changed(defaults(), changes)
    missing = [f"--{name}" for name in ("network", "data") if name not in settings]
    if missing:
        raise _Fail(
            f"missing {' and '.join(missing)}, or --recipe "
            "(fastcaps train --list and fastcaps recipes show what there is)"
        )
    return read(TrainConfig, settings)


def _kept(given: dict[str, Any], changes: dict[str, Any]) -> Any:
    """The settings of a run that goes on: those it began with, but for where it runs; others must not be given."""
    from fastcaps.training.config import WHERE, differences, kept

    folder = Path(changes["out"]) if "out" in changes else _fresh(given, changes).folder
    if not (folder / "config.json").is_file():
        raise _Fail(f"{folder} holds no run to resume (no config.json); begin one without --resume")
    before = kept(folder)
    fresh = _fresh(given, changes) if "recipe" in given else before.changed(changes)
    options = {path: f"--{name}" for name, path, _, _ in _FLAGS}
    differ = differences(before, fresh)
    if differ:
        name = next((name for name in differ if name in changes), next(iter(differ)))  # one that was given, if any was
        old, new = differ[name]
        option = options.get(name, f"--set {name}")
        raise _Fail(f"{option} {new} does not agree with the run in {folder}, which began with {old}")
    where = {name: changes[name] for name in WHERE if name in changes}
    return before.changed({**where, "out": str(folder)})


def _recipes(args: argparse.Namespace) -> int:
    try:
        from fastcaps.training import recipes
    except ImportError as error:
        _refuse_missing(error)
    try:
        if args.recipe is not None:
            print(recipes.find(args.recipe).read_text(encoding="utf-8"), end="")
            return 0
        every = [recipes.recipe(name) for name in recipes.names()]
    except ValueError as error:
        raise _Fail(str(error)) from error
    width = max(len(each.name) for each in every)
    for each in every:
        print(f"{each.name:<{width}}  {each.source}")
    return 0


def _list_tables() -> int:
    from fastcaps.training import tables

    every = {name: tables.table(name) for name in tables.names()}
    width = max(map(len, every))
    for name, table in every.items():
        print(f"{name:<{width}}  {table.source}: {table.title}")
    return 0


def _reproduce(args: argparse.Namespace) -> int:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        from fastcaps.data import DataError
        from fastcaps.training import RunError, reproduce, tables
    except ImportError as error:
        _refuse_missing(error)
    console = Console()
    try:
        if args.table is None:
            return _list_tables()
        table = tables.table(args.table)
        stem = Path(args.table).stem
        out = Path(args.out or f"runs/reproduce/{stem}{'-short' if args.short else ''}")
        given = _set(args.set)
        where = {"data.dir": _absolute(args.data_dir)} if args.data_dir else {}
        runs = table.runs_folder(out, stem)
        entries = table.entries(runs, short=args.short, changes={**given, **where})
        reproduce.collect(table, entries)  # if a run has other settings, fail before anything is trained
        if not args.collect and not reproduce.train_missing(table, entries, args.row, console):
            return 0  # one of several processes; the first one speaks
        lines = reproduce.collect(table, entries)
        remarks = reproduce.remarks(table, lines, args.short, given)
        reproduce.write(table, lines, remarks, out, short=args.short, command=_command(args))
    except (DataError, RunError, ValueError) as error:
        raise _Fail(str(error)) from error
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        raise _Stopped(f"stopped; {_command(args)} goes on") from None
    shown = Table(title=f"{table.title} ({table.source})", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in reproduce.HEADER:
        shown.add_column(name, justify="right" if name else "left", overflow="fold", min_width=None if name else 14)
    for line in lines:
        shown.add_row(*line.cells())
    console.print(shown)
    for text in (*remarks, f"{out}/: table.md, table.json, picture.png"):
        console.print(text, highlight=False, soft_wrap=True)
    return 0


def _command(args: argparse.Namespace) -> str:
    """The command line of ``fastcaps reproduce``, to be given again."""
    words = ["fastcaps", "reproduce", args.table]
    words += [f"--{name}" for name in ("short", "collect") if getattr(args, name)]
    for name in ("data_dir", "out"):
        if getattr(args, name):
            words += [f"--{name.replace('_', '-')}", getattr(args, name)]
    words += ["--row", *args.row] if args.row else []
    words += [word for text in args.set for word in ("--set", text)]
    return shlex.join(words)


def _train(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "version")}
    if given.pop("list", False):
        return _list()
    try:
        from rich.console import Console

        from fastcaps import training
        from fastcaps.data import DataError
        from fastcaps.training import RunError
    except ImportError as error:
        _refuse_missing(error)
    resume, overwrite = given.pop("resume", False), given.pop("overwrite", False)
    if resume and overwrite:
        raise _Fail("--resume goes on with a run, --overwrite replaces it: give one of them")
    try:
        changes = _changes(given)
        for path in ("data.dir", "data.options.transformer"):
            if isinstance(changes.get(path), str):
                changes[path] = _absolute(changes[path])
        config = _kept(given, changes) if resume else _fresh(given, changes)
    except ValueError as error:
        raise _Fail(str(error)) from error
    say = functools.partial(Console().print, highlight=False, soft_wrap=True)
    try:
        if config.runs > 1:
            several = training.train_seeds(config, resume=resume, overwrite=overwrite)
            if several.is_main:
                say(
                    f"test accuracy {100 * several.mean:.2f} ± {100 * several.spread:.2f} % "
                    f"(mean and standard deviation of {config.runs} runs)"
                )
                say(f"{several.out}/: result.json, a folder for each run")
            return 0
        result = training.train(config, resume=resume, overwrite=overwrite)
    except (DataError, RunError, ValueError) as error:
        raise _Fail(str(error)) from error
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        raise _Stopped(f"stopped; fastcaps train --resume --out {shlex.quote(str(config.folder))} goes on") from None
    if not result.is_main:
        return 0  # one of several processes; the first one speaks
    seconds = [row["seconds"] for row in result.history]
    say(
        f"test accuracy {100 * result.test_accuracy:.2f} % after {len(seconds)} "
        f"epoch{'s' if len(seconds) > 1 else ''} of {sum(seconds) / len(seconds):.1f} s"
        + ("" if result.best_epoch is None else f"; the best by what was held out is epoch {result.best_epoch}")
    )
    say(f"{result.out}/: result.json, metrics.csv, last.ckpt, tensorboard")
    return 0


def _joined(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _info(args: argparse.Namespace) -> int:
    import torch

    import fastcaps

    try:
        from fastcaps import _C

        build: dict[str, Any] = {**_C.build_info(), "levels built": _C.capabilities_built()}
        try:
            build["level chosen"] = _C.capability()
        except ValueError as error:
            build["level chosen"] = str(error)
    except ImportError:
        build = {}
    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise _Fail(f"--dtype {args.dtype}: not a dtype of torch (float32, float64, bfloat16, float16)")
    try:
        children = torch.empty(1, 8, 4, 4, dtype=dtype, device=args.device)
        weight = torch.empty(8, 10, 4, 4, dtype=dtype, device=args.device)
        parents = torch.empty(1, 10, 4, 4, dtype=dtype, device=args.device)
        explanation = str(fastcaps.explain(children, weight, parents))
    except (RuntimeError, AssertionError, TypeError) as error:
        explanation = f"no such call: {str(error).splitlines()[0]}"
    listing = fastcaps.backends.listing()
    if args.json:
        backends = {entry.name: {"available": entry.available, "detail": entry.detail} for entry in listing}
        versions = {"fastcaps": fastcaps.__version__, "torch": torch.__version__}
        print(json.dumps({**versions, "build": build, "backends": backends, "explain": explanation}, indent=2))
        return 0
    print(f"fastcaps {fastcaps.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("build" if build else "build: no native library (FASTCAPS_BUILD=0); the reference serves")
    why_not = build.pop("cuda_why_not", "")
    if why_not:
        build["cuda"] = f"none: {why_not}"
    for name, value in build.items():
        if isinstance(value, dict):
            value = "; ".join(f"{key}: {_joined(part)}" for key, part in value.items())
        print(f"  {name.replace('_', ' '):<20}{_joined(value)}")
    print("\nbackends")
    for entry in listing:
        print(f"  {entry}")
    print(f"\na routing pass with parents, {args.dtype} on {args.device}, runs on")
    print("  " + explanation.replace("\n", "\n  "))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0; 1 for an error of the user's, 2 for a wrong command line, 130 if it was stopped.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.version:
        import fastcaps

        print(f"fastcaps {fastcaps.__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except _Fail as error:
        print(f"fastcaps {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.status
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"fastcaps {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"fastcaps {args.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
