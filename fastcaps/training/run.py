"""Training a network on a data set, with Lightning, once or with several seeds: what ``fastcaps train`` runs.

One call does everything::

    from fastcaps.training import TrainConfig, train

    result = train(TrainConfig.of(network="mnist", data={"name": "mnist", "dir": "path/to/data"}, out="runs/mnist"))

docs/training.md tells what a run writes into its ``out`` folder. A run that was killed goes on from ``last.ckpt`` in
the middle of its epoch, with the same order of the images, random state, optimiser and schedule. So on the CPU it ends
in the same weights as without the interruption.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import tensorboard  # noqa: F401  (Lightning misses it only when a run begins)
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from fastcaps import models
from fastcaps.data import DataError, Splits
from fastcaps.training.callbacks import Checkpoints, MetricsWriter, Report, read_metrics
from fastcaps.training.config import TrainConfig, runs_of
from fastcaps.training.data import ImageData, check_parts, read_data
from fastcaps.training.fields import RunError
from fastcaps.training.folder import (
    check_sums,
    clear,
    in_one_line,
    is_finished,
    load_weights,
    only_run,
    prepared,
    versions,
    write_json,
)
from fastcaps.training.module import CapsuleClassifier


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    The accuracy and loss are those of the last epoch, or, where training images were held out, of the epoch that did
    best on these.
    """

    network: nn.Module  # trained, in evaluation mode, on the CPU
    test_accuracy: float  # over the whole test set, a share of 1
    test_loss: float
    history: list[dict[str, float]]  # a row per epoch, as in metrics.csv
    out: Path  # the folder of the run
    is_main: bool = True  # whether this is the first of several processes: the one that should speak
    best_epoch: int | None = None  # the epoch that was chosen, from 1


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what Lightning says to its own developers, for as long as the block lasts."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def build_network(config: TrainConfig, splits: Splits) -> nn.Module:
    """The network of a configuration, sized for the data; ValueError says what of the two does not fit."""
    known = {each.name for each in fields(models.config(config.network.name))}
    if not known.issuperset(splits.sizes):
        takes, are = ("texts", "images") if "layers" in known else ("images", "texts")
        raise ValueError(f"network {config.network.name} takes {takes} and {config.data.name} are {are}")
    overrides = {**splits.sizes, "classes": len(splits.classes), **config.network.options}
    try:
        return models.create(config.network.name, **overrides)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        raise ValueError(
            f"network {config.network.name} cannot be built for {config.data.name} ({shown}): {error}"
        ) from error


def _make_trainer(config: TrainConfig, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Lightning's Trainer; what it refuses becomes a ValueError that shows what was asked for."""
    try:
        return pl.Trainer(
            accelerator=config.accelerator,
            devices=int(config.devices) if config.devices.lstrip("-").isdigit() else config.devices,
            strategy=config.strategy,
            precision=config.precision,
            max_epochs=config.epochs,
            logger=TensorBoardLogger(config.folder, name="", version="tensorboard"),
            callbacks=callbacks,
            enable_model_summary=False,
            use_distributed_sampler=False,  # ShuffledBatches knows its rank
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
    except (ImportError, MisconfigurationException, RuntimeError, TypeError, ValueError) as error:
        asked = f"accelerator {config.accelerator!r}, devices {config.devices!r}, strategy {config.strategy!r}"
        raise ValueError(f"{asked}, precision {config.precision!r}: {in_one_line(error)}") from error


@contextmanager
def _told(config: TrainConfig, metrics: MetricsWriter, checkpoint: Path | None) -> Iterator[None]:
    """Tell in one line of a batch too large, and of a file that is no checkpoint to go on from."""
    try:
        if checkpoint is not None:
            check_sums(checkpoint)
        yield
    except Exception as error:  # Lightning and torch raise whatever they meet
        if is_out_of_memory(error):
            told = f"too large for the memory here: {in_one_line(error)}"
            raise RunError(f"batch_size: got {config.batch_size}, {told}") from error
        if checkpoint is not None and not metrics.started and not isinstance(error, (DataError, ValueError)):
            raise RunError(f"{checkpoint} cannot be resumed from: {in_one_line(error, True)}") from error
        raise


@quiet()
def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
    splits: Splits | None = None,
) -> TrainResult:
    """Train a network and test it after every epoch.

    Parameters
    ----------
    config : TrainConfig
        The settings.
    resume : bool
        Go on from ``config.out``'s checkpoint, where there is one. A finished run is only reported again: its folder is
        left as it is.
    overwrite : bool
        Replace a run that ``config.out`` holds already.
    report : Report, optional
        What the person at the terminal sees; a progress bar (or plain lines where there is no terminal) by default.
    splits : Splits, optional
        The data, if they have been loaded already, or are your own: each part a data set of :mod:`fastcaps.data`, or
        any torch data set of pairs, a float image ``[c, h, w]`` and its class as an int.

    Returns
    -------
    TrainResult
        The accuracy is that of the last epoch, or of the best one by the images held out: the test set chooses nothing.

    Raises
    ------
    ValueError, DataError
        If a setting, the data, or their combination is wrong; before anything is computed.
    TypeError
        If ``splits`` holds something else.
    RunError
        If ``config.out`` holds another run, or is in use by one, or its checkpoint cannot be read.
    """
    if config.runs != 1:
        raise ValueError(f"runs: got {config.runs}, want 1 (train_seeds makes several)")
    splits = splits or read_data(config.data)
    check_parts(splits)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    network = build_network(config, splits)
    out, checkpoint = config.folder, config.folder / "last.ckpt"
    going_on = resume and checkpoint.is_file()
    if going_on and is_finished(config):
        is_main = getattr(rank_zero_only, "rank", 0) == 0  # there is no trainer yet to ask
        with only_run(out) if is_main else nullcontext():
            return _result(config, network, read_metrics(out / "metrics.csv"), load_weights(network, out), is_main)
    pixels = {name: getattr(splits.train, name, None) for name in ("mean", "std")}
    module, data = CapsuleClassifier(network, config, **pixels), ImageData(splits, config)
    metrics, report = MetricsWriter(out / "metrics.csv"), report or Report()
    trainer = _make_trainer(config, [metrics, Checkpoints(out, config.checkpoint_every), report])
    if config.batch_size % trainer.world_size:
        raise ValueError(
            f"batch_size: got {config.batch_size} for {trainer.world_size} devices together, want a multiple of them"
        )
    is_main = trainer.is_global_zero
    with prepared(config, resume, overwrite) if is_main else nullcontext():
        if is_main and config.workers > data.workers:
            report.say(f"workers: got {config.workers}, {data.workers} are started, one a core")
        began = time.perf_counter()
        with _told(config, metrics, checkpoint if going_on else None):
            trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if going_on else None, weights_only=True)
        # where Lightning spawned processes, the rows stayed with them: read the file
        history = metrics.rows or read_metrics(metrics.path)
        network = module.network.cpu()
        epoch = len(history) if data.validation is None else load_weights(network, out)
        result = _result(config, network, history, epoch, is_main)
        if is_main:
            summary: dict[str, Any] = {
                "test_accuracy": result.test_accuracy,
                "test_loss": result.test_loss,
                "seconds_per_epoch": [row["seconds"] for row in history],
                "seconds_this_call": time.perf_counter() - began,
                "parameters": sum(p.numel() for p in network.parameters()),
                "seed": config.seed,
            }
            if result.best_epoch is not None:
                accuracy = history[result.best_epoch - 1]["validation_accuracy"]
                summary |= {"best_epoch": result.best_epoch, "validation_accuracy": accuracy}
            _write_result(config, summary)
    return result


def _result(
    config: TrainConfig, network: nn.Module, history: list[dict[str, float]], epoch: int, is_main: bool
) -> TrainResult:
    """The result of a run that chose the weights of an epoch."""
    if len(history) < epoch:
        rows = config.folder / "metrics.csv"
        raise RunError(f"{rows}: got {len(history)} epochs of a run that has ended, want {epoch} or more")
    row, best = history[epoch - 1], epoch if "validation_loss" in history[0] else None
    return TrainResult(network.eval(), row["test_accuracy"], row["test_loss"], history, config.folder, is_main, best)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch has an error of its own for that on a GPU alone."""
    own = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    texts = ("can't allocate memory", "not enough memory", "no memory for", "Storage size calculation overflowed")
    return own or any(text in str(error) for text in texts)


def _write_result(config: TrainConfig, summary: dict[str, Any]) -> None:
    """Write ``result.json``."""
    about = {"metric": config.metric, "epochs": config.epochs, "versions": versions()}
    write_json(config.folder / "result.json", {**summary, **about})


@dataclass(frozen=True)
class SeedsResult:
    """The results of several runs."""

    results: list[TrainResult]  # one a seed
    mean: float  # of their test accuracies
    spread: float  # their standard deviation, that of a sample (n − 1)
    out: Path  # the folder that holds theirs

    @property
    def is_main(self) -> bool:
        """Whether this process should speak."""
        return self.results[0].is_main


def train_seeds(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
) -> SeedsResult:
    """Train ``config.runs`` networks, which differ in their seed alone, one after the other.

    Each has a folder of its own in ``config.out``, ``seed-0`` and so on; ``result.json`` beside them has the figures of
    all. Settings and errors are those of :func:`fastcaps.training.train`. With ``resume``, a killed run goes on, and a
    finished one is only reported again.
    """
    if config.runs < 2:
        raise ValueError(f"runs: got {config.runs}, want 2 or more (train makes one)")
    splits, out = read_data(config.data), config.folder
    every = runs_of(config)
    # Lightning starts this very command once more for every further device
    is_main = getattr(rank_zero_only, "rank", 0) == 0
    finished = resume and all(is_finished(one) for one in (config, *every))
    with prepared(config, resume, overwrite) if is_main else nullcontext():
        # all at once: if this is killed and resumed, no old result must pass for a new one
        for one in every if is_main and overwrite else ():
            clear(one.folder)
        options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "splits": splits}
        results = [train(one, report=report or Report(), **options) for one in every]
        accuracies = [result.test_accuracy for result in results]
        mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
        if is_main and not finished:
            both, seeds = {"mean": mean, "spread": spread}, [one.seed for one in every]
            _write_result(config, {"test_accuracy": both, "test_accuracies": accuracies, "seeds": seeds})
    return SeedsResult(results, mean, spread, out)
