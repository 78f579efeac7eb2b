"""``fastcaps train``: train a network on a data set with Lightning, with one or several seeds.

docs/training.md lists the files of a run. An interrupted run resumes from ``last.ckpt`` inside its epoch, with the same
order of images, random state, optimiser and schedule, so on the CPU it ends with the same weights as without the
interruption.
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
import tensorboard  # noqa: F401  (Lightning would notice only when a run starts that it is missing)
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from fastcaps_lab import models
from fastcaps_lab.data import DataError, Splits
from fastcaps_lab.training import folder
from fastcaps_lab.training.callbacks import Checkpoints, MetricsWriter, Report, read_metrics
from fastcaps_lab.training.config import TrainConfig, runs_of
from fastcaps_lab.training.data import ImageData, check_parts, read_data
from fastcaps_lab.training.fields import RunError
from fastcaps_lab.training.folder import in_one_line, is_finished, load_weights, prepared, versions
from fastcaps_lab.training.module import CapsuleClassifier


@dataclass(frozen=True)
class TrainResult:
    """The result of a run: of its last epoch or, with validation images, of the epoch that did best on these."""

    network: nn.Module  # trained, in evaluation mode, on the CPU
    test_accuracy: float  # over the whole test set, from 0 to 1
    test_loss: float
    history: list[dict[str, float]]  # a row per epoch, as in metrics.csv
    out: Path  # the folder of the run
    is_main: bool = True  # whether this is the first of several processes, the one that prints
    best_epoch: int | None = None  # with validation images, counted from 1


@contextmanager
def quiet() -> Iterator[None]:
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
    overrides = {**splits.sizes, "classes": len(splits.classes), **config.network.options}
    try:
        return models.create(config.network.name, **overrides)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        raise ValueError(
            f"network {config.network.name} cannot be built for {config.data.name} ({shown}): {error}"
        ) from error


def _make_trainer(config: TrainConfig, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Return Lightning's Trainer; ValueError with the settings that it refuses."""
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
            use_distributed_sampler=False,  # ShuffledBatches splits the data itself
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
    except (ImportError, MisconfigurationException, RuntimeError, TypeError, ValueError) as error:
        asked = f"accelerator {config.accelerator!r}, devices {config.devices!r}, strategy {config.strategy!r}"
        raise ValueError(f"{asked}, precision {config.precision!r}: {in_one_line(error)}") from error


@contextmanager
def _errors_in_one_line(config: TrainConfig, metrics: MetricsWriter, checkpoint: Path | None) -> Iterator[None]:
    """Raise RunError with one line if a batch is too large, or a checkpoint cannot be resumed from."""
    try:
        if checkpoint is not None:
            folder.check_sums(checkpoint)
        yield
    except Exception as error:  # Lightning and torch may raise anything
        if is_out_of_memory(error):
            why = f"too large for the memory here: {in_one_line(error)}"
            raise RunError(f"batch_size: got {config.batch_size}, {why}") from error
        if checkpoint is not None and not metrics.started and not isinstance(error, (DataError, ValueError)):
            why = in_one_line(error, named=not isinstance(error, RunError))
            raise RunError(f"{checkpoint} cannot be resumed from: {why}") from error
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
    """Train a network, test it after every epoch, and return the result.

    Parameters
    ----------
    config : TrainConfig
        The settings.
    resume : bool
        Resume from the checkpoint in ``config.out``, if there is one. A finished run is only reported; its folder does
        not change.
    overwrite : bool
        Replace a run in ``config.out``.
    report : Report, optional
        Output on the terminal; by default a progress bar, or lines if there is no terminal.
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
    if not isinstance(config, TrainConfig):
        raise TypeError(f"config must be a TrainConfig, such as recipe(name).config, got {config!r}")
    if config.runs != 1:
        raise ValueError(f"runs: got {config.runs}, want 1 (train_seeds trains several)")
    splits = splits or read_data(config.data)
    check_parts(splits)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    network = build_network(config, splits)
    out, checkpoint = config.folder, config.folder / "last.ckpt"
    going_on = resume and checkpoint.is_file()
    if going_on and is_finished(config):
        is_main = getattr(rank_zero_only, "rank", 0) == 0  # there is no trainer yet
        with folder.only_run(out) if is_main else nullcontext():
            return _result(config, network, read_metrics(out / "metrics.csv"), load_weights(network, out), is_main)
    pixels = {name: getattr(splits.train, name, None) for name in ("mean", "std")}
    module, data = CapsuleClassifier(network, config, **pixels), ImageData(splits, config)
    metrics, report = MetricsWriter(out / "metrics.csv"), report or Report()
    trainer = _make_trainer(config, [metrics, Checkpoints(out, config.checkpoint_every), report])
    if config.batch_size % trainer.world_size:
        raise ValueError(
            f"batch_size: got {config.batch_size} on {trainer.world_size} devices, want a multiple of their number"
        )
    is_main = trainer.is_global_zero
    with prepared(config, resume, overwrite) if is_main else nullcontext():
        if is_main and config.workers > data.workers:
            report.say(f"workers: got {config.workers}, {data.workers} are started, one per core")
        began = time.perf_counter()
        with _errors_in_one_line(config, metrics, checkpoint if going_on else None):
            trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if going_on else None, weights_only=True)
        # processes that Lightning spawned do not return their rows: read the file
        history = metrics.rows or read_metrics(metrics.path)
        if len(history) != config.epochs:
            why = "its loops are damaged, or it is of a longer run; restart with --overwrite"
            raise RunError(f"{checkpoint} led to {len(history)} epochs, want {config.epochs}: {why}")
        network = module.network.cpu()
        epoch = len(history) if data.validation is None else load_weights(network, out)
        result = _result(config, network, history, epoch, is_main)
        if is_main:
            accuracy = history[epoch - 1].get("validation_accuracy")  # if images were held out
            _write_result(
                config,
                test_accuracy=result.test_accuracy,
                test_loss=result.test_loss,
                seconds_per_epoch=[row["seconds"] for row in history],
                seconds_this_call=time.perf_counter() - began,
                parameters=sum(p.numel() for p in network.parameters()),
                seed=config.seed,
                **({} if accuracy is None else {"best_epoch": epoch, "validation_accuracy": accuracy}),
            )
    return result


def _result(
    config: TrainConfig, network: nn.Module, history: list[dict[str, float]], epoch: int, is_main: bool
) -> TrainResult:
    """Return the result of a run with the weights of an epoch."""
    if len(history) < epoch:
        rows = config.folder / "metrics.csv"
        raise RunError(f"{rows}: got {len(history)} epochs of a finished run, want {epoch} or more")
    row, best = history[epoch - 1], epoch if "validation_loss" in history[0] else None
    return TrainResult(network.eval(), row["test_accuracy"], row["test_loss"], history, config.folder, is_main, best)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed; torch has its own error for that only on a GPU."""
    is_memory_error = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    texts = ("can't allocate memory", "not enough memory", "no memory for", "Storage size calculation overflowed")
    return is_memory_error or any(text in str(error) for text in texts)


def _write_result(config: TrainConfig, **summary: Any) -> None:
    about = {"metric": config.metric, "epochs": config.epochs, "versions": versions()}
    folder.write_json(config.folder / "result.json", {**summary, **about})


@dataclass(frozen=True)
class SeedsResult:
    """The results of several runs."""

    results: list[TrainResult]  # one per seed
    mean: float  # of their test accuracies
    spread: float  # sample standard deviation (n − 1)
    out: Path  # the folder above theirs
    is_main: bool = True  # whether this process prints


def train_seeds(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False, report: Report | None = None
) -> SeedsResult:
    """Train ``config.runs`` networks that differ only in their seed, one after the other; return their results.

    Each has a folder in ``config.out``, ``seed-0`` and so on, beside a ``result.json`` of all. The rest is as for
    :func:`train`.
    """
    if config.runs < 2:
        raise ValueError(f"runs: got {config.runs}, want 2 or more (train trains one)")
    splits, every = read_data(config.data), runs_of(config)
    is_main = getattr(rank_zero_only, "rank", 0) == 0  # Lightning starts this command again for every other device
    finished = resume and all(is_finished(one) for one in (config, *every))
    with prepared(config, resume, overwrite) if is_main else nullcontext():
        # clear all before the first run: a resumed command must not take an old result for a new one
        for one in every if is_main and overwrite else ():
            folder.clear(one.folder)
        report = report or Report()
        results = [train(one, resume=resume, overwrite=overwrite, report=report, splits=splits) for one in every]
        accuracies = [result.test_accuracy for result in results]
        mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
        if is_main and not finished:
            both, seeds = {"mean": mean, "spread": spread}, [one.seed for one in every]
            _write_result(config, test_accuracy=both, test_accuracies=accuracies, seeds=seeds)
    return SeedsResult(results, mean, spread, config.folder, results[0].is_main)
