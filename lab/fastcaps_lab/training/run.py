"""``fastcaps train``: train a network on a data set with Lightning, with one or several seeds.

lab/docs/training.md lists the files of a run. An interrupted run resumes from ``last.ckpt`` inside its epoch, with the
same order of images, random state, optimiser and schedule, so on the CPU it ends with the same weights as without the
interruption.
"""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from fastcaps_lab import models
from fastcaps_lab.data import Splits
from fastcaps_lab.training.callbacks import Best, Last, Metrics, Report, WholeFiles, is_main
from fastcaps_lab.training.config import TrainConfig, check_same, kept, runs_of
from fastcaps_lab.training.data import ImageData, read_data
from fastcaps_lab.training.folder import (
    RunError,
    load_weights,
    prepared,
    read_checkpoint,
    read_metrics,
    read_result,
    versions,
    write_json,
)
from fastcaps_lab.training.module import CapsuleClassifier

__all__ = [
    "CapsuleClassifier", "ImageData", "SeedsResult", "TrainResult", "build_network", "train", "train_seeds", "versions",
]  # fmt: skip


@dataclass(frozen=True)
class TrainResult:
    """The result of a run: of its last epoch or, with validation images, of the epoch that did best on these."""

    network: nn.Module  # trained, in evaluation mode, on the CPU
    test_accuracy: float  # over the whole test set, from 0 to 1
    test_loss: float
    history: list[dict[str, float]]  # a row per epoch, as in metrics.csv
    out: Path  # the folder of the run
    best_epoch: int | None = None  # with validation images, counted from 1


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's warnings and log messages in a ``with`` block."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def build_network(config: TrainConfig, splits: Splits) -> nn.Module:
    """Return the network of a configuration, sized for the data; ValueError if the two do not fit."""
    known = {each.name for each in fields(models.config(config.network.name))}
    if not known.issuperset(splits.sizes):
        takes, are = ("texts", "images") if "layers" in known else ("images", "texts")
        raise ValueError(f"network {config.network.name} takes {takes} and {config.data.name} are {are}")
    sizes: dict[str, Any] = {**splits.sizes, "classes": len(splits.classes)}
    try:
        return models.create(config.network.name, **sizes, **config.network.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"network {config.network} cannot be built for {config.data.name}: {error}") from error


def _make_trainer(config: TrainConfig, report: Report, has_validation: bool) -> pl.Trainer:
    """Return Lightning's Trainer, with callbacks that write into the run's folder; ValueError for wrong devices."""
    out, bar = config.folder, report.console.is_terminal and not report.quiet
    callbacks = [
        Metrics(out / "metrics.csv"),
        report,
        *([RichProgressBar(console_kwargs={"stderr": report.console.stderr})] if bar else []),
        *([Best(out)] if has_validation else []),
        Last(out, config.checkpoint_every),
    ]
    try:
        trainer = pl.Trainer(
            accelerator=config.accelerator,
            devices=int(config.devices) if config.devices.lstrip("-").isdigit() else config.devices,
            strategy=config.strategy,
            precision=config.precision,
            max_epochs=config.epochs,
            logger=TensorBoardLogger(out, name="", version="tensorboard"),
            callbacks=callbacks,
            plugins=[WholeFiles()],
            enable_progress_bar=bar,
            enable_model_summary=False,
            use_distributed_sampler=False,  # ShuffledBatches splits the data itself
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"accelerator {config.accelerator}, devices {config.devices}: {error}") from error
    if config.batch_size % trainer.world_size:
        raise ValueError(f"batch_size: got {config.batch_size}, want a multiple of the {trainer.world_size} devices")
    return trainer


@_quiet()
def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
    splits: Splits | None = None,
) -> TrainResult:
    """Train a network, test it after every epoch, and return the result.

    Parameters
    ----------
    config : TrainConfig
        The settings.
    resume : bool
        Resume from the checkpoint in ``config.out``, if there is one. A finished run is only reported.
    overwrite : bool
        Replace a run in ``config.out``.
    report : Report, optional
        Output on the terminal; by default a line per epoch, and on a terminal a progress bar.
    splits : Splits, optional
        The data, if already loaded, or your own: each part a data set of :mod:`fastcaps_lab.data`, or any torch
        data set of pairs, a float image ``[c, h, w]`` and its class as an int.

    Raises
    ------
    ValueError, TypeError, DataError
        If a setting, the data, or their combination is wrong; before any computation.
    RunError
        If ``config.out`` holds another run or is in use by one, or its checkpoint cannot be read.
    """
    if config.runs != 1:
        raise ValueError(f"runs: got {config.runs}, want 1 (train_seeds trains several)")
    splits = splits or read_data(config.data)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    network = build_network(config, splits)
    out, checkpoint = config.folder, config.folder / "last.ckpt"
    going_on = resume and checkpoint.is_file()
    if going_on:
        check_same(kept(out), config)
        read_checkpoint(checkpoint)  # names a damaged file
    if going_on and read_result(out):
        return _result(network, out)
    pixels = {name: getattr(splits.train, name, None) for name in ("mean", "std")}
    module, data = CapsuleClassifier(network, config, **pixels), ImageData(splits, config)
    trainer = _make_trainer(config, report or Report(), data.validation is not None)
    with prepared(config, resume, overwrite) if is_main() else nullcontext():
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint if going_on else None, weights_only=True)
        result = _result(network.cpu(), out)
        if is_main():
            _write_result(config, result)
    return result


def _result(network: nn.Module, out: Path) -> TrainResult:
    """Return the result of a finished run, whose weights the network gets."""
    epoch, history = load_weights(network, out), read_metrics(out)
    if len(history) < epoch:
        raise RunError(f"{out / 'metrics.csv'}: got {len(history)} epochs of a finished run, want {epoch} or more")
    row, best = history[epoch - 1], epoch if "validation_loss" in history[0] else None
    return TrainResult(network.eval(), row["test_accuracy"], row["test_loss"], history, out, best)


def _write_result(config: TrainConfig, result: TrainResult) -> None:
    """Write ``result.json``."""
    found: dict[str, Any] = {"test_accuracy": result.test_accuracy, "test_loss": result.test_loss}
    if (best := result.best_epoch) is not None:
        found |= {"best_epoch": best, "validation_accuracy": result.history[best - 1]["validation_accuracy"]}
    found |= {"metric": config.metric, "epochs": config.epochs, "seed": config.seed}
    found |= {"parameters": sum(p.numel() for p in result.network.parameters()), "versions": versions()}
    write_json(config.folder / "result.json", found)


@dataclass(frozen=True)
class SeedsResult:
    """The results of several runs."""

    results: list[TrainResult]  # one per seed
    out: Path  # the folder above theirs

    @property
    def mean(self) -> float:
        """The mean of their test accuracies."""
        return statistics.mean(result.test_accuracy for result in self.results)

    @property
    def spread(self) -> float:
        """The sample standard deviation (n − 1) of their test accuracies."""
        return statistics.stdev(result.test_accuracy for result in self.results)


def train_seeds(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False, report: Report | None = None
) -> SeedsResult:
    """Train ``config.runs`` networks that differ only in their seed, one after the other; return their results.

    Each has a folder in ``config.out``, ``seed-0`` and so on. The rest is as for :func:`train`.
    """
    splits = read_data(config.data)
    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "report": report, "splits": splits}
    results = [train(one, **options) for one in runs_of(config)]
    return SeedsResult(results, config.folder)
