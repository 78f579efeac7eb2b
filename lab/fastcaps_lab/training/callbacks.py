"""Callbacks of a training run: checkpoints, a table of metrics, and progress on the terminal."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar, Timer
from rich.console import Console
from torch import Tensor

from fastcaps_lab.training.fields import RunError, flat

COLUMNS = (
    *("epoch", "step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "seconds"),
    *("validation_loss", "validation_accuracy"),  # if there are validation images
)


@contextmanager
def replacing(path: Path, first: bool = True) -> Iterator[Path]:
    """Write to a temporary file beside ``path``, which replaces it at the end of the ``with`` block.

    If the process is killed or the disk is full, the old file stays, and an OSError names the file. Only the ``first``
    of several processes writes.
    """
    fresh = path.with_name(f"{path.name}.writing")
    try:
        if first:
            fresh.unlink(missing_ok=True)  # a killed process left it, or it is a link to another file
            fresh.touch(exist_ok=False)
        yield fresh
        if first:
            os.replace(fresh, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        with suppress(OSError):  # delete the partial file, which may fill the disk
            if first:
                fresh.unlink()
        raise


class Checkpoints(Checkpoint):
    """Write ``last.ckpt`` after every ``every`` steps and every epoch, and the weights of the best epoch.

    ``best.ckpt`` is of the first epoch with the best validation accuracy. Unlike with Lightning's ModelCheckpoint, a
    run whose folder moved still knows its best epoch, and killing it during a write keeps the old file even if the
    system's temporary folder is on another disk.
    """

    def __init__(self, out: Path, every: int) -> None:
        self.out, self.every = out, every
        self.best = -math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def _write(self, trainer: pl.Trainer, name: str, weights_only: bool = False) -> None:
        with replacing(self.out / name, trainer.is_global_zero) as fresh:
            trainer.save_checkpoint(fresh, weights_only)
        trainer.strategy.barrier(name)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # after the last batch, on_train_epoch_end writes instead, after the test
        if trainer.global_step % self.every == 0 and not trainer.is_last_batch:
            self._write(trainer, "last.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        found = float(trainer.callback_metrics.get("validation_accuracy", -math.inf))
        if found > self.best:
            self.best = found
            self._write(trainer, "best.ckpt", weights_only=True)
        self._write(trainer, "last.ckpt")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a ``metrics.csv``, none if there is no such file; RunError if it is damaged."""
    if not path.is_file():
        return []
    try:
        with path.open(newline="") as file:
            return _checked_rows(csv.DictReader(file))
    except (RunError, ValueError, csv.Error) as error:
        raise RunError(f"{path} cannot be read: {error}; restart with --overwrite") from error


def _checked_rows(rows: Iterable[Any]) -> list[dict[str, float]]:
    """Return rows of metrics; RunError if one lacks a column, or has a value that is not a number."""
    checked = []
    for place, row in enumerate(rows, 1):
        try:
            if tuple(row) not in (COLUMNS, COLUMNS[:-2]):
                raise ValueError
            checked.append({name: float(value) for name, value in row.items()})
        except (TypeError, ValueError):
            raise RunError(f"row {place} is {str(row)[:80]}, want a number in every column") from None
    return checked


def check_checkpoint(checkpoint: dict[str, Any]) -> None:
    """Raise RunError for weights or moments that are not finite, and for counts of epochs and steps that disagree.

    Lightning would resume without a word: from NaN, or for an epoch more or less.
    """
    for name, value in flat({**checkpoint["state_dict"], "optimizer": checkpoint["optimizer_states"][0]}).items():
        if isinstance(value, Tensor) and not name.startswith("means.") and not value.isfinite().all():
            raise RunError(f"{name} has values that are not finite")
    loops, data, step = checkpoint["loops"]["fit_loop"], checkpoint["ImageData"], checkpoint["global_step"]
    epoch, batch = divmod(step, data["steps_per_epoch"])
    epochs, batches = (loops[name]["current"] for name in ("epoch_progress", "epoch_loop.batch_progress"))
    optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    counts = {
        "rows of metrics": (len(_checked_rows(checkpoint["callbacks"]["MetricsWriter"]["rows"])), epoch),
        "epochs of the data": (data["epoch"], epoch),
        "batches of the data": (data["start"], batch),
        "epochs of the loop": (epochs["processed"], epoch),
        "batches of the loop": (batches["ready"] % data["steps_per_epoch"], batch),
        "steps of the optimizer": (optimizer["completed"], step),
    }
    for name, (found, want) in counts.items():
        if found != want:
            raise RunError(f"got {found} {name}, want {want} after {step} steps")


class MetricsWriter(Timer):
    """Write a CSV row per epoch. The checkpoint holds the rows, so a resumed run neither loses nor repeats one.

    (Lightning's CSVLogger writes two rows per epoch, and deletes an existing table.) Columns are ``COLUMNS``;
    ``seconds`` counts training and testing of the epoch.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.rows: list[dict[str, float]] = []
        self.started = False  # whether training has started or resumed

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.rows = list(state_dict["rows"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.started = True
        self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the epoch's row."""
        # Lightning calls callbacks before the module has logged the training means
        found: dict[str, Any] = {
            **trainer.callback_metrics,
            **pl_module.figures("train"),  # type: ignore[operator]
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "seconds": self.time_elapsed() - sum(row["seconds"] for row in self.rows),
        }
        if "test_accuracy" not in found or trainer.global_step != (len(self.rows) + 1) * trainer.num_training_batches:
            raise RunError(f"{self.path.with_name('last.ckpt')} has damaged loops; restart with --overwrite")
        row = {name: float(f"{float(found[name]):.6g}") for name in COLUMNS if name in found}
        self.rows.append({"epoch": len(self.rows) + 1, "step": trainer.global_step, **row})
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            with replacing(self.path) as fresh, fresh.open("w", newline="") as file:
                names = self.rows[0] if self.rows else COLUMNS
                csv.writer(file).writerows([names, *(row.values() for row in self.rows)])


class Report(RichProgressBar):
    """Show Lightning's progress bar on a terminal, a line per epoch in a log or pipe, nothing if quiet."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console()
        self.quiet = quiet
        super().__init__(console_kwargs={"file": self.console.file})
        if quiet or not self.console.is_terminal:
            self.disable()

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics that the bar shows."""
        found = super().get_metrics(trainer, pl_module)
        return {name: found[name] for name in ("loss", "test_accuracy") if name in found}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step and trainer.is_global_zero:
            self.say(f"resumed after step {trainer.global_step}")
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self.is_disabled and trainer.is_global_zero:
            loss = float(pl_module.figures("train")["train_loss"])  # type: ignore[operator]
            accuracy = float(trainer.callback_metrics["test_accuracy"])
            done = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            self.say(f"{done}: training loss {loss:.4f}, test accuracy {100 * accuracy:.2f} %")
