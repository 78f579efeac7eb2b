"""Callbacks of a training run: checkpoints, a table of metrics, and lines on the terminal."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from fastcaps_lab.training.folder import replace, write_text

COLUMNS = (
    *("epoch", "step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr", "seconds"),
    *("validation_loss", "validation_accuracy"),  # if there are validation images
)


def is_main() -> bool:
    """Return whether this is the first of several processes, which alone prints and writes."""
    return getattr(rank_zero_only, "rank", 0) == 0


class WholeFiles(TorchCheckpointIO):
    """Replace a checkpoint when the new one is complete, so that a killed process leaves a whole file.

    (Lightning writes to the system's temporary folder first, and copies from there if that is on another disk.)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        with replace(Path(path)) as fresh:
            super().save_checkpoint(checkpoint, fresh, storage_options)


class Last(Checkpoint):
    """Write ``last.ckpt`` after every ``every`` steps and every epoch, with which a run resumes."""

    def __init__(self, out: Path, every: int) -> None:
        self.path, self.every = out / "last.ckpt", every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # after the last batch, on_train_epoch_end writes instead, after the test
        if trainer.global_step % self.every == 0 and not trainer.is_last_batch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


class Best(ModelCheckpoint):
    """Keep the weights of the first epoch with the best validation accuracy in ``best.ckpt``."""

    def __init__(self, out: Path) -> None:
        only = {"save_weights_only": True, "save_on_train_epoch_end": True, "enable_version_counter": False}
        super().__init__(out, "best", monitor="validation_accuracy", mode="max", **only)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "dirpath": self.dirpath})  # also if the run's folder was moved


class Metrics(Callback):
    """Write a CSV row per epoch. The checkpoint holds the rows, so a resumed run neither loses nor repeats one.

    (Lightning's CSVLogger deletes an existing table.) Columns are ``COLUMNS``; ``seconds`` counts training and testing
    of the epoch, from where the run resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])

    def on_train_start(self, *_: Any) -> None:
        self.began = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning calls callbacks before the module has logged the training means
        found: dict[str, Any] = {
            **trainer.callback_metrics,
            **pl_module.figures("train"),  # type: ignore[operator]
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "seconds": time.monotonic() - self.began,
        }
        row = {name: float(f"{float(found[name]):.6g}") for name in COLUMNS if name in found}
        self.rows.append({"epoch": len(self.rows) + 1, "step": trainer.global_step, **row})
        self.began = time.monotonic()
        if is_main():
            text = io.StringIO()
            csv.writer(text).writerows([self.rows[0], *(row.values() for row in self.rows)])
            write_text(self.path, text.getvalue())


class Report(Callback):
    """Print a line per epoch, unless ``quiet``; on a terminal Lightning's progress bar shows the steps."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console()
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Print a line in the first process, unless quiet."""
        if not self.quiet and is_main():
            self.console.print(text, highlight=False, soft_wrap=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step:
            self.say(f"resumed after step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss = float(pl_module.figures("train")["train_loss"])  # type: ignore[operator]
        accuracy = float(trainer.callback_metrics["test_accuracy"])
        done = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        self.say(f"{done}: training loss {loss:.4f}, test accuracy {100 * accuracy:.2f} %")
