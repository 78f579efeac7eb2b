"""``fastcaps train``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fastcaps_lab.cli.common import (
    Fail,
    Wrong,
    absolute,
    one_line_errors,
    progress_console,
    read_settings,
    show,
    show_list,
)

WHAT, HOW, WHERE, RUN = "Network and data", "Training", "Devices", "Output"
DATA_DIR = "folder with the data set's files, or its parent; nothing is downloaded"

# option, its type, the path of its setting, its panel and text in the help, the setting's default
OPTIONS: tuple[tuple[str, Any, str, str, str, str], ...] = (
    ("network", str, "network.name", WHAT, "network to train (see --list)", ""),
    ("data", str, "data.name", WHAT, "mnist, cifar10, sst5, … (see --list; digits ship with scikit-learn)", ""),
    ("data_dir", str, "data.dir", WHAT, DATA_DIR, ""),
    ("iterations", int, "network.options.iterations", WHAT, "routing iterations", ""),
    ("routing", str, "network.options.routing", WHAT, "concurrent or sequential", ""),
    ("augment", bool, "data.augment", WHAT, "pad and crop training images at random (default: CIFAR, smallNORB)", ""),
    ("flip", bool, "data.flip", WHAT, "mirror half of the training images (default: CIFAR; wrong for digits)", ""),
    ("limit", int, "data.limit", WHAT, "use only the first training images, for a quick try", ""),
    ("validation", int, "data.validation", WHAT, "hold out this many images, to choose the best epoch", "0"),
    ("epochs", int, "epochs", HOW, "passes over the training images", "2"),
    ("batch_size", int, "batch_size", HOW, "images per step, on all devices together", "64"),
    ("loss", str, "loss.name", HOW, "cross-entropy, bce, margin, spread or feedback", "cross-entropy"),
    ("optimizer", str, "optimizer.name", HOW, "adam, adamw, radam, rmsprop or sgd", "adam"),
    ("lr", float, "optimizer.lr", HOW, "highest learning rate", "0.003"),
    ("weight_decay", float, "optimizer.weight_decay", HOW, "weight decay", "0.0"),
    ("momentum", float, "optimizer.momentum", HOW, "momentum, for sgd and rmsprop", ""),
    ("schedule", str, "schedule.name", HOW, "one-cycle, cosine, milestones, exponential or constant", "one-cycle"),
    ("seed", int, "seed", HOW, "decides initial weights, order of images, augmentation", "0"),
    ("runs", int, "runs", HOW, "number of runs, with this seed and the next ones: mean and spread", "1"),
    ("precision", str, "precision", WHERE, "32-true, bf16-mixed, 16-mixed (autocast), bf16-true or 64-true", "32-true"),
    ("accelerator", str, "accelerator", WHERE, "auto, cpu, gpu, … as in Lightning", "auto"),
    ("devices", str, "devices", WHERE, "how many devices, or which (0,1)", "1"),
    ("strategy", str, "strategy", WHERE, "auto, ddp, fsdp, … as in Lightning", "auto"),
    ("workers", int, "workers", WHERE, "processes that gather batches", "0"),
    ("out", str, "out", RUN, "folder of the run (runs/RECIPE or runs/NETWORK-DATA)", ""),
    ("checkpoint_every", int, "checkpoint_every", RUN, "steps between two checkpoints", "200"),
)
"""The options, one for each setting; with a recipe, its settings are the defaults."""
PATHS = {name: path for name, _, path, *_ in OPTIONS}


def _with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command with :data:`OPTIONS` in its signature, which Typer reads; they arrive as ``**given``."""
    first, *others, _ = signature(command, eval_str=True).parameters.values()
    added = []
    for name, kind, _, panel, text, default in OPTIONS:
        option = Option(help=text, rich_help_panel=panel, show_default=default or True)
        added.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]))
    command.__signature__ = Signature([first, *added, *others])  # type: ignore[attr-defined]
    return command


@_with_options
def train(
    folder: Annotated[str | None, Argument(metavar="[RUN]", help="with --resume: the run's folder, as --out")] = None,
    *,
    recipe: Annotated[
        str | None,
        Option(metavar="NAME", help="begin from a paper's experiment (recipes), or a .yaml file", rich_help_panel=WHAT),
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option(
            "--set", metavar="FIELD=VALUE", help="any setting, as in optimizer.lr=0.01 (repeat)", rich_help_panel=WHAT
        ),
    ] = None,
    resume: Annotated[
        bool,
        Option("--resume", help="continue from RUN's last checkpoint; settings must agree", rich_help_panel=RUN),
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="replace a run that --out already holds", rich_help_panel=RUN)
    ] = False,
    listed: Annotated[bool, Option("--list", help="list the networks and data sets, and stop")] = False,
    as_json: Annotated[bool, Option("--json", help="print result.json and its folder, and nothing else")] = False,
    **given: Any,
) -> int:
    """Train a network on images or texts. The sizes of its inputs and its classes follow from the data."""
    if listed:
        from fastcaps_lab import data, models

        names = {"networks": models.names(), "data": data.names()}
        show(names) if as_json else show_list({f"{what}:": ", ".join(found) for what, found in names.items()})
        return 0
    if resume and overwrite:
        raise Wrong("--resume continues a run, --overwrite replaces it: give one of them")
    if folder is not None:
        if not resume:
            raise Wrong(f"{folder}: a folder is for --resume only; --network and --data say what to train")
        if given["out"] is not None:
            raise Wrong(f"--resume {folder} and --out {given['out']} both name the run's folder: give one of them")
        given["out"] = folder
    with one_line_errors():
        changes = {path: given[name] for name, path in PATHS.items() if given[name] is not None}
        changes |= read_settings(settings or [])  # --set wins over the setting's option
        for path in ("data.dir", "data.options.transformer"):
            if isinstance(changes.get(path), str):
                changes[path] = absolute(changes[path])
        if resume and not (recipe or changes):
            raise Wrong("--resume needs the run's folder: fastcaps train --resume RUN")
        config = _kept(recipe, changes) if resume else _fresh(recipe, changes)
    from fastcaps_lab import training  # loads Lightning, for which a wrong setting need not wait
    from fastcaps_lab.training.callbacks import Report

    report = Report(progress_console(as_json))
    with one_line_errors(f"fastcaps train --resume {shlex.quote(str(config.folder))}"):
        work = training.train if config.runs == 1 else training.train_seeds
        result: Any = work(config, resume=resume, overwrite=overwrite, report=report)
    if not result.is_main:
        return 0  # one of several processes; the first one speaks
    if as_json:
        show({"out": str(result.out), **json.loads((result.out / "result.json").read_text(encoding="utf-8"))})
    else:
        _tell(result, config.runs, report.say)
    return 0


def _tell(result: Any, runs: int, say: Callable[[str], None]) -> None:
    """Print the accuracy of a run, or of several, and where its files are."""
    if runs > 1:
        say(
            f"test accuracy {100 * result.mean:.2f} ± {100 * result.spread:.2f} % "
            f"(mean and standard deviation of {runs} runs)"
        )
        say(f"{result.out}/: result.json, a folder for each run")
        return
    seconds = [row["seconds"] for row in result.history]
    say(
        f"test accuracy {100 * result.test_accuracy:.2f} % after {len(seconds)} "
        f"epoch{'s' if len(seconds) > 1 else ''} of {sum(seconds) / len(seconds):.1f} s"
        + ("" if result.best_epoch is None else f"; the best epoch on held-out data is {result.best_epoch}")
    )
    say(f"{result.out}/: result.json, metrics.csv, last.ckpt, tensorboard")


def _fresh(name: str | None, changes: dict[str, Any]) -> Any:
    """Return the settings of a new run: the recipe's, or the defaults, with the changes."""
    from fastcaps_lab.training.config import TrainConfig, defaults
    from fastcaps_lab.training.fields import changed, read
    from fastcaps_lab.training.recipes import recipe

    if name is not None:
        return recipe(name, changes).config
    settings = changed(defaults(), changes)
    missing = [name for name in ("network", "data") if name not in settings]
    config = read(TrainConfig, {**settings, **dict.fromkeys(missing, "digits")})  # names a wrong setting first
    if missing:
        raise Wrong(
            f"missing {' and '.join(f'--{name}' for name in missing)}, or --recipe "
            "(fastcaps train --list and fastcaps recipes show what there is)"
        )
    return config


def _kept(name: str | None, changes: dict[str, Any]) -> Any:
    """Return the settings of a resumed run: the stored ones, of which only those of where it runs may change."""
    from fastcaps_lab.training import config

    folder = Path(changes["out"]) if "out" in changes else _fresh(name, changes).folder
    if not (folder / "config.json").is_file():
        raise Fail(f"{folder} holds no run to resume (no config.json); begin one without --resume")
    before = config.kept(folder)
    config.check_same(folder, before, _fresh(name, changes) if name is not None else before.changed(changes))
    where = {path: changes[path] for path in config.WHERE if path in changes}
    return before.changed({**where, "out": str(folder)})
