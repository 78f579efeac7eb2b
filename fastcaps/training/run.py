"""Training a network on a data set, with Lightning: what ``fastcaps train`` and ``fastcaps demo`` run.

One call does everything::

    from fastcaps.training import TrainConfig, train

    result = train(TrainConfig.of(network="mnist", data={"name": "mnist", "dir": "path/to/data"}, out="runs/mnist"))

A run writes into its ``out`` folder: ``config.json`` (every setting and version), ``metrics.csv`` (a row per epoch),
``tensorboard/``, ``last.ckpt`` (replaced as a whole every ``checkpoint_every`` steps and after every epoch),
``result.json`` and, where training images were held out, ``best.ckpt``. A run that was killed goes on from
``last.ckpt`` in the middle of its epoch, with the same order of the images, random state, optimiser and schedule. So on
the CPU it ends in the same weights as without the interruption.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import tensorboard  # noqa: F401  (Lightning misses it only when a run begins)
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from fastcaps import models
from fastcaps.data import DataError, OverlappingDigits, Splits
from fastcaps.training.callbacks import BestWriter, CheckpointWriter, MetricsWriter, Report, read_metrics, replacing
from fastcaps.training.config import TrainConfig
from fastcaps.training.data import ImageData, gathering, read_data
from fastcaps.training.fields import as_data
from fastcaps.training.module import CapsuleClassifier

if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes
    ----------
    network : torch.nn.Module
        The trained network, in evaluation mode, on the CPU.
    test_accuracy, test_loss : float
        Over the whole test set; the accuracy is a share of 1. Of the last epoch, or, where training images were held
        out, of the epoch that did best on these.
    history : list of dict
        A row per epoch, as in ``metrics.csv``.
    out : Path
        The folder of the run.
    is_main : bool
        Whether this is the first of several processes: the one that should speak.
    best_epoch : int, optional
        The epoch that was chosen, from 1.
    """

    network: nn.Module
    test_accuracy: float
    test_loss: float
    history: list[dict[str, float]]
    out: Path
    is_main: bool = True
    best_epoch: int | None = None


WRITTEN = ("last.ckpt", "best.ckpt", "metrics.csv", "result.json")
"""The files of a run's results."""


class RunError(RuntimeError):
    """The folder of a run cannot be used: it holds another run, is locked by one, or its checkpoint cannot be read."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what Lightning says to its own developers, for as long as the block lasts."""
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    messages = (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*ended before the epoch ended and your dataloader is not resumable.*",  # ours resumes by its own state
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*GPU available but not used.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*It is recommended to use `self.log.*sync_dist=True`.*",  # the means are synchronised before they are logged
        ".*Consider setting `persistent_workers=True`.*",
    )
    try:
        with warnings.catch_warnings():
            for message in messages:
                warnings.filterwarnings("ignore", message=message)
            for logger in levels:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """What a figure depends on: versions of everything, and the machine."""
    import lightning

    import fastcaps

    return {
        "fastcaps": getattr(fastcaps, "__version__", "unknown"),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads",
    }


def build_network(config: TrainConfig, splits: Splits) -> nn.Module:
    """The network of a configuration, sized for the data.

    Raises
    ------
    ValueError
        If the network cannot take images of this size or does not know an override; the message says which.
    """
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


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Lock a folder as long as the block lasts; RunError if another run has locked it.

    The system releases the lock when the process dies. Where there are no such locks, nobody is kept out.
    """
    if sys.platform == "win32":
        yield
        return
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"{out} is in use by a run that has not ended: wait for it, or take another") from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(folder)


@contextmanager
def prepared(out: Path, resume: bool, overwrite: bool) -> Iterator[None]:
    """Make the folder of a run, or check that an existing one may be used; and keep other runs out during the block."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"out: got {out}, which cannot be made ({error.strerror}); want a folder") from error
    for name in ("config.json", *WRITTEN):
        if (out / name).is_dir():
            raise RunError(f"{out / name}: got a folder, want a file or nothing here")
    with only_run(out):
        if not resume and (out / "config.json").exists():
            if not overwrite:
                raise RunError(
                    f"{out} holds a run already: go on with it (--resume), replace it (--overwrite) or take another"
                )
            clear(out)
        yield


def clear(out: Path) -> None:
    """Delete what a run left in its folder, but for its settings."""
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    for events in (out / "tensorboard").glob("events.out.tfevents.*"):
        events.unlink()


def is_finished(config: TrainConfig) -> bool:
    """Whether the ``result.json`` of a run tells of all its epochs."""
    try:
        return bool(json.loads((config.folder / "result.json").read_text())["epochs"] == config.epochs)
    except (OSError, RecursionError, ValueError, LookupError, TypeError):
        return False


def check_sums(path: Path) -> None:
    """Raise BadZipFile if a checkpoint's bytes are not those that were written: torch compares no checksums."""
    if not zipfile.is_zipfile(path):  # torch.load says what it is instead
        return
    try:
        with zipfile.ZipFile(path) as held:
            folders = [entry.filename for entry in held.infolist() if entry.external_attr & 16]
            damaged = held.testzip() or next(iter(folders), None)  # of a folder torch reads nothing
    except Exception as error:  # damaged entries raise whatever they look like
        raise zipfile.BadZipFile(f"damaged ({error})") from error
    if damaged is not None:
        raise zipfile.BadZipFile(f"damaged: {damaged} is not what was written")


def read_checkpoint(path: Path) -> Any:
    """What is in a checkpoint, on the CPU; RunError if it cannot be read."""
    try:
        check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever it meets
        what = " ".join(str(error).split())
        raise RunError(f"{path} cannot be read: {type(error).__name__}: {what}; train anew with --overwrite") from error


def _make_trainer(config: TrainConfig, callbacks: list[pl.Callback], events: Path | None) -> pl.Trainer:
    """Lightning's Trainer; what it refuses becomes a ValueError that shows what was asked for."""
    try:
        return pl.Trainer(
            accelerator=config.accelerator,
            devices=int(config.devices) if config.devices.lstrip("-").isdigit() else config.devices,
            strategy=config.strategy,
            precision=config.precision,
            max_epochs=config.epochs,
            logger=events is not None and TensorBoardLogger(events.parent, name="", version=events.name),
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # ShuffledBatches knows its rank
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
    except (ImportError, MisconfigurationException, RuntimeError, TypeError, ValueError) as error:
        asked = f"accelerator {config.accelerator!r}, devices {config.devices!r}, strategy {config.strategy!r}"
        raise ValueError(f"{asked}, precision {config.precision!r}: {' '.join(str(error).split())}") from error


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
    splits = gathering(splits or read_data(config.data))
    pl.seed_everything(config.seed, workers=True, verbose=False)
    network = build_network(config, splits)
    out = config.folder
    checkpoint = out / "last.ckpt"
    mean, std = getattr(splits.train, "mean", None), getattr(splits.train, "std", None)
    module = CapsuleClassifier(network, config, classes=len(splits.classes), mean=mean, std=std)
    data = make_data(config, splits)
    metrics, best = MetricsWriter(out / "metrics.csv"), BestWriter(out / "best.ckpt")
    report = report or Report()
    callbacks = [metrics, best, CheckpointWriter(checkpoint, config.checkpoint_every), report]
    going_on = resume and checkpoint.is_file()
    only_report = going_on and is_finished(config)  # nothing is computed, and nothing written
    trainer = _make_trainer(config, callbacks, None if only_report else out / "tensorboard")
    if config.batch_size % trainer.world_size:
        raise ValueError(
            f"batch_size: got {config.batch_size} for {trainer.world_size} devices together, want a multiple of them"
        )
    is_main = trainer.is_global_zero
    with prepared(out, resume, overwrite) if is_main else nullcontext():
        if is_main and not only_report:
            write_settings(config, out)
            if config.workers > data.workers:
                report.say(f"workers: got {config.workers}, {data.workers} are started, one a core")
        began = time.perf_counter()
        try:
            if going_on:
                check_sums(checkpoint)
            trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if going_on else None, weights_only=True)
        # Lightning and torch raise whatever they meet in a file that is no checkpoint of ours
        except Exception as error:
            if is_out_of_memory(error):
                what = " ".join(str(error).split())
                raise RunError(f"batch_size: got {config.batch_size}, too large for the memory here: {what}") from error
            if going_on and not metrics.started and not isinstance(error, (DataError, ValueError)):
                what = " ".join(str(error).split())
                raise RunError(f"{checkpoint} cannot be resumed from: {type(error).__name__}: {what}") from error
            raise
        # where Lightning spawned processes, the rows stayed with them: read the file
        history = metrics.rows or read_metrics(metrics.path)
        network = module.network.cpu().eval()
        chosen = history[-1]
        if data.validation is not None:
            saved = read_checkpoint(best.path)
            network.load_state_dict(saved["state_dict"])
            chosen = history[saved["epoch"] - 1]
        result = TrainResult(
            network,
            chosen["test_accuracy"],
            chosen["test_loss"],
            history,
            out,
            is_main,
            best_epoch=int(chosen["epoch"]) if data.validation is not None else None,
        )
        if is_main and (metrics.started or not only_report):
            _write_result(config, result, time.perf_counter() - began)
    return result


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch has an error of its own for that on a GPU alone."""
    own = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    texts = ("can't allocate memory", "not enough memory", "no memory for", "Storage size calculation overflowed")
    return own or any(text in str(error) for text in texts)


def make_data(config: TrainConfig, splits: Splits) -> ImageData:
    """The data of a run, split and in batches."""
    parts = isinstance(splits.train, OverlappingDigits) and getattr(config.loss, "reconstruction", 0) > 0
    size, held_out = config.batch_size, config.data.validation
    workers = min(config.workers, cores())
    return ImageData(splits, size, seed=config.seed, workers=workers, validation=held_out, parts=parts)


def write_settings(config: TrainConfig, out: Path) -> None:
    """Write ``config.json``."""
    settings = {**as_data(config), "versions": versions()}
    write_whole(out / "config.json", json.dumps(settings, indent=2, default=repr) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that takes the old one's place when it is whole."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def _write_result(config: TrainConfig, result: TrainResult, seconds: float) -> None:
    """Write ``result.json``."""
    summary: dict[str, Any] = {
        "test_accuracy": result.test_accuracy,
        "test_loss": result.test_loss,
        "metric": config.metric,
        "epochs": len(result.history),
        "seconds_per_epoch": [row["seconds"] for row in result.history],
        "seconds_this_call": seconds,
        "parameters": sum(p.numel() for p in result.network.parameters()),
        "seed": config.seed,
        "versions": versions(),
    }
    if result.best_epoch is not None:
        row = result.history[result.best_epoch - 1]
        summary |= {"best_epoch": result.best_epoch, "validation_accuracy": row["validation_accuracy"]}
    write_whole(result.out / "result.json", json.dumps(summary, indent=2) + "\n")
