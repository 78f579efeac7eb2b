"""What a training run writes and says while it runs: checkpoints, a CSV table, a progress bar."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COLUMNS = ("epoch", "step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "seconds")
VALIDATION_COLUMNS = ("validation_loss", "validation_accuracy")
"""These follow where training images were held out."""


@contextmanager
def replacing(path: Path, first: bool = True) -> Iterator[Path]:
    """Write a new file beside ``path`` and put it in its place once it is whole.

    A kill, or a full disk, leaves the old file. Of several processes only the ``first`` one replaces it.
    """
    fresh = path.with_name(f"{path.name}.writing")
    try:
        yield fresh
        if first:
            os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):  # part of a file would keep a full disk full
            if first:
                fresh.unlink()
        raise


class CheckpointWriter(Checkpoint):
    """Replace one checkpoint file every so many steps and after every epoch.

    Parameters
    ----------
    path : Path
        The file.
    every : int
        Steps between two writes.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every

    def _write(self, trainer: pl.Trainer) -> None:
        with replacing(self.path, trainer.is_global_zero) as fresh:
            trainer.save_checkpoint(fresh)
        trainer.strategy.barrier("checkpoint")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # the last batch is left to the end of the epoch, when the test set has been seen as well
        if trainer.global_step % self.every == 0 and not trainer.is_last_batch:
            self._write(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.csv``."""
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


class BestWriter(Callback):
    """Keep the weights of the epoch that is best on the held-out images; of equally good ones the first.

    Parameters
    ----------
    path : Path
        The file: ``epoch``, from 1, and the network's ``state_dict``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        self.accuracy = -math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "accuracy": self.accuracy}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.accuracy = state_dict["epoch"], state_dict["accuracy"]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = trainer.callback_metrics.get("validation_accuracy")
        if found is None or not float(found) > self.accuracy:
            return
        self.epoch, self.accuracy = trainer.current_epoch + 1, float(found)
        if trainer.is_global_zero:
            network: torch.nn.Module = pl_module.network  # type: ignore[assignment]
            # given a path, torch would report a full disk by an error of its own; a file raises OSError
            with replacing(self.path) as fresh, fresh.open("wb") as file:
                torch.save({"epoch": self.epoch, "state_dict": network.state_dict()}, file)


class MetricsWriter(Callback):
    """A CSV row per epoch. The rows travel in the checkpoint, so a run that resumes neither loses nor repeats one.

    Parameters
    ----------
    path : Path
        The file; columns are ``COLUMNS``. ``seconds`` is training and testing of that epoch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, float]] = []
        self.started = False  # whether training has begun, or gone on
        self._spent = 0.0  # seconds that the current epoch took before this process took over
        self._began = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "spent": self._spent + time.perf_counter() - self._began}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])
        self._spent = state_dict["spent"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = True
        self._began = time.perf_counter()
        self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the epoch's row.

        Lightning calls callbacks before the module, which has not logged the training means yet. So they are computed
        here.
        """
        seen, train = trainer.callback_metrics, pl_module.figures("train")  # type: ignore[operator]
        row = {
            "epoch": float(len(self.rows) + 1),
            "step": float(trainer.global_step),
            "train_loss": float(train["train_loss"]),
            "train_accuracy": round(float(train["train_accuracy"]), 6),
            "test_loss": float(seen["test_loss"]),
            "test_accuracy": round(float(seen["test_accuracy"]), 6),
            "lr": float(trainer.optimizers[0].param_groups[0]["lr"]),
            "seconds": self._spent + time.perf_counter() - self._began,
        }
        if "validation_loss" in seen:
            row["validation_loss"] = float(seen["validation_loss"])
            row["validation_accuracy"] = round(float(seen["validation_accuracy"]), 6)
        self.rows.append(row)
        self._spent, self._began = 0.0, time.perf_counter()
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        with replacing(self.path) as fresh, fresh.open("w", newline="") as file:
            table = csv.writer(file)
            columns = (*COLUMNS, *(VALIDATION_COLUMNS if self.rows and VALIDATION_COLUMNS[0] in self.rows[0] else ()))
            table.writerow(columns)
            for row in self.rows:
                table.writerow([int(row[c]) if c in ("epoch", "step") else f"{row[c]:.6g}" for c in columns])


class Report(Callback):
    """One progress bar for the whole run on a terminal; elsewhere (a log, a pipe) a plain line per epoch.

    Parameters
    ----------
    console : rich.console.Console, optional
        Where to write.
    quiet : bool
        Say nothing at all.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console()
        self.quiet = quiet
        self._bar: Progress | None = None
        self._task: Any = None
        self._loss = float("nan")
        self._tested = ""

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True)

    def _text(self, trainer: pl.Trainer) -> str:
        epoch = max(1, math.ceil(trainer.global_step / trainer.num_training_batches))
        loss = "" if math.isnan(self._loss) else f"  loss {self._loss:.3f}"
        return f"epoch {epoch}/{trainer.max_epochs}{loss}{self._tested}"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.quiet or not trainer.is_global_zero:
            return
        if trainer.global_step:
            self.say(f"resumed after step {trainer.global_step}")
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            total = int(trainer.estimated_stepping_batches)
            self._task = self._bar.add_task(self._text(trainer), total=total, completed=trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None:
            return
        if trainer.global_step % 10 == 0:  # reading the loss waits for the device
            loss = float(outputs["loss"])
            self._loss = loss if math.isnan(self._loss) else 0.7 * self._loss + 0.3 * loss
        self._bar.update(self._task, completed=trainer.global_step, description=self._text(trainer))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=self._text(trainer) + "  testing")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        accuracy = float(trainer.callback_metrics["test_accuracy"])
        self._tested = f"  test {100 * accuracy:.2f} %"
        if self.quiet or not trainer.is_global_zero:
            return
        if self._bar is not None:
            self._bar.update(self._task, description=self._text(trainer))
            return
        loss = float(pl_module.figures("train")["train_loss"])  # type: ignore[operator]
        epoch = trainer.global_step // int(trainer.num_training_batches)
        line = f"epoch {epoch}/{trainer.max_epochs}: training loss {loss:.4f}, test accuracy {100 * accuracy:.2f} %"
        self.say(line)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()
