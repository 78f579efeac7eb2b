"""``fastcaps train``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fastcaps.cli.common import Fail, Wrong, absolute, one_line_errors, read_settings, show, show_list, told_on

PATHS = {
    **{name: f"{name}.name" for name in ("network", "data", "loss", "optimizer", "schedule")},
    **{name: f"network.options.{name}" for name in ("iterations", "routing")},
    **{name: f"data.{name}" for name in ("augment", "flip", "limit", "validation")},
    **{name: f"optimizer.{name}" for name in ("lr", "weight_decay", "momentum")},
    **{name: name for name in ("epochs", "batch_size", "seed", "runs", "out", "checkpoint_every")},
    **{name: name for name in ("precision", "accelerator", "devices", "strategy", "workers")},
    "data_dir": "data.dir",
}
"""The setting that each option of ``fastcaps train`` stands for."""

WHAT, HOW, WHERE, RUN = "What to train on what", "How to train", "On which machine", "The run"
SETTING = "FIELD=VALUE"
DATA_DIR = "folder that holds the data set's files, or a folder of them; nothing is downloaded"


Text = str | None
Whole = int | None


def _text(panel: str, text: str, *names: str, default: str = "", **more: Any) -> Any:
    """An option; ``default`` is what the settings have if neither it nor a recipe gives a value."""
    return Option(*names, help=text, rich_help_panel=panel, show_default=default or True, **more)


def train(
    folder: Annotated[Text, Argument(metavar="[RUN]", help="with --resume: the run's folder, as --out")] = None,
    network: Annotated[Text, _text(WHAT, "network to train (see --list)")] = None,
    data: Annotated[Text, _text(WHAT, "mnist, cifar10, sst5, … (see --list; digits ship with scikit-learn)")] = None,
    data_dir: Annotated[Text, _text(WHAT, DATA_DIR)] = None,
    recipe: Annotated[
        Text,
        _text(WHAT, "begin from an experiment of a paper (fastcaps recipes), or from a .yaml file", metavar="NAME"),
    ] = None,
    settings: Annotated[
        list[str] | None, _text(WHAT, "any setting by its path: optimizer.lr=0.01 (repeat)", "--set", metavar=SETTING)
    ] = None,
    iterations: Annotated[Whole, _text(WHAT, "routing iterations")] = None,
    routing: Annotated[Text, _text(WHAT, "concurrent or sequential")] = None,
    augment: Annotated[
        bool | None, _text(WHAT, "pad and crop training images at random (CIFAR, smallNORB are)")
    ] = None,
    flip: Annotated[
        bool | None, _text(WHAT, "mirror half of the training images (CIFAR is; a mirrored 2 is no 2)")
    ] = None,
    limit: Annotated[Whole, _text(WHAT, "use only the first training images, for a quick try")] = None,
    validation: Annotated[
        Whole, _text(WHAT, "hold out so many training images; the best epoch by them counts", default="0")
    ] = None,
    epochs: Annotated[Whole, _text(HOW, "passes over the training images", default="2")] = None,
    batch_size: Annotated[Whole, _text(HOW, "images a step, on all devices together", default="64")] = None,
    loss: Annotated[Text, _text(HOW, "cross-entropy, bce, margin, spread or feedback", default="cross-entropy")] = None,
    optimizer: Annotated[Text, _text(HOW, "adam, adamw, radam, rmsprop or sgd", default="adam")] = None,
    lr: Annotated[float | None, _text(HOW, "highest learning rate", default="0.003")] = None,
    weight_decay: Annotated[float | None, _text(HOW, "weight decay", default="0.0")] = None,
    momentum: Annotated[float | None, _text(HOW, "momentum, for sgd and rmsprop")] = None,
    schedule: Annotated[
        Text, _text(HOW, "one-cycle, cosine, milestones, exponential or constant", default="one-cycle")
    ] = None,
    seed: Annotated[Whole, _text(HOW, "decides initial weights, order of images, augmentation", default="0")] = None,
    runs: Annotated[
        Whole, _text(HOW, "so many runs, with this seed and those after it: mean and spread", default="1")
    ] = None,
    precision: Annotated[
        Text, _text(WHERE, "32-true, bf16-mixed, 16-mixed (autocast), bf16-true or 64-true", default="32-true")
    ] = None,
    accelerator: Annotated[Text, _text(WHERE, "auto, cpu, gpu, … as Lightning has them", default="auto")] = None,
    devices: Annotated[Text, _text(WHERE, "how many devices, or which (0,1)", default="1")] = None,
    strategy: Annotated[Text, _text(WHERE, "auto, ddp, fsdp, … as Lightning has them", default="auto")] = None,
    workers: Annotated[Whole, _text(WHERE, "processes that gather what batches are made of", default="0")] = None,
    out: Annotated[Text, _text(RUN, "folder of the run (runs/RECIPE or runs/NETWORK-DATA)")] = None,
    checkpoint_every: Annotated[Whole, _text(RUN, "steps between two checkpoints", default="200")] = None,
    resume: Annotated[
        bool, _text(RUN, "go on from the last checkpoint in RUN; settings that are given must agree", "--resume")
    ] = False,
    overwrite: Annotated[bool, _text(RUN, "replace a run that --out already holds", "--overwrite")] = False,
    listed: Annotated[bool, Option("--list", help="list the networks and data sets, and stop")] = False,
    as_json: Annotated[bool, Option("--json", help="print result.json and its folder, and nothing else")] = False,
) -> int:
    """Train a network on images or texts. The sizes of its inputs and its classes follow from the data."""
    options = locals()
    if listed:
        return _list(as_json)
    from fastcaps import training
    from fastcaps.training.callbacks import Report

    if resume and overwrite:
        raise Wrong("--resume goes on with a run, --overwrite replaces it: give one of them")
    if folder is not None:
        if not resume:
            raise Wrong(f"{folder}: a folder stands after --resume alone; --network and --data say what to train")
        if out is not None:
            raise Wrong(f"--resume {folder} and --out {out} both name the run's folder: give one of them")
        options["out"] = folder
    with one_line_errors():
        changes = {path: options[name] for name, path in PATHS.items() if options[name] is not None}
        changes |= read_settings(settings or [])  # --set wins over an option of its own
        for path in ("data.dir", "data.options.transformer"):
            if isinstance(changes.get(path), str):
                changes[path] = absolute(changes[path])
        config = _kept(recipe, changes) if resume else _fresh(recipe, changes)
    report = Report(told_on(as_json))
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
    """Say how well a run, or several, ended, and where what it wrote lies."""
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
        + ("" if result.best_epoch is None else f"; the best by what was held out is epoch {result.best_epoch}")
    )
    say(f"{result.out}/: result.json, metrics.csv, last.ckpt, tensorboard")


def _list(as_json: bool) -> int:
    from fastcaps import data, models

    listed = {"networks": models.names(), "data": data.names()}
    if as_json:
        show(listed)
    else:
        show_list({f"{what}:": ", ".join(names) for what, names in listed.items()})
    return 0


def _fresh(name: str | None, changes: dict[str, Any]) -> Any:
    """The settings of a new run: the recipe's, or the defaults, with the changes."""
    from fastcaps.training.config import TrainConfig, defaults
    from fastcaps.training.fields import changed, read
    from fastcaps.training.recipes import recipe

    if name is not None:
        return recipe(name, changes).config
    settings = changed(defaults(), changes)
    missing = [f"--{name}" for name in ("network", "data") if name not in settings]
    if missing:
        raise Wrong(
            f"missing {' and '.join(missing)}, or --recipe "
            "(fastcaps train --list and fastcaps recipes show what there is)"
        )
    return read(TrainConfig, settings)


def _kept(name: str | None, changes: dict[str, Any]) -> Any:
    """The settings of a run that goes on: those it began with, but for where it runs; others must not be given."""
    from fastcaps.training.config import WHERE, check_same, kept

    folder = Path(changes["out"]) if "out" in changes else _fresh(name, changes).folder
    if not (folder / "config.json").is_file():
        raise Fail(f"{folder} holds no run to resume (no config.json); begin one without --resume")
    before = kept(folder)
    check_same(folder, before, _fresh(name, changes) if name is not None else before.changed(changes))
    where = {path: changes[path] for path in WHERE if path in changes}
    return before.changed({**where, "out": str(folder)})
