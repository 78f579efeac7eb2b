"""The LightningModule: loss, accuracy, optimiser, schedule."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.loss import Batch, right

STAGES = ("train", "test", "validation")


class CapsuleClassifier(pl.LightningModule):
    """A network of class logits, with its loss and accuracy over whole epochs.

    ``mean`` and ``std`` are those of the images' normalisation, ``[1, channels, 1, 1]``, for a loss of pixels.
    """

    means: Any
    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self, network: nn.Module, config: TrainConfig, *, mean: Tensor | None = None, std: Tensor | None = None
    ) -> None:
        super().__init__()
        self.network = network
        self.config = config
        names = [f"{stage}_{what}" for stage in STAGES for what in ("loss", "accuracy")]
        self.means = nn.ModuleDict({name: MeanMetric() for name in names})
        # in the checkpoint, so that a resumed epoch reports the means over all of it
        for name in ("train_loss", "train_accuracy"):
            self.means[name].persistent(True)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logits ``[B, classes]`` of images ``[B, channels, height, width]``."""
        return self.network(*inputs)

    def batch(self, given: Any) -> Batch:
        """Return a loader's batch, with floating-point inputs in the weights' dtype."""
        inputs, target, *parts = given
        several = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        cast = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in several)
        mean, std = (None if each is None else each.to(self.dtype) for each in (self.mean, self.std))
        if parts:
            parts = [parts[0].to(self.dtype), *parts[1:]]
        return Batch(cast, target, mean, std, *parts)

    def _step(self, given: Any, stage: str) -> Tensor:
        batch, steps = self.batch(given), max(int(self.trainer.estimated_stepping_batches), 1)
        loss, logits = self.config.loss(self.network, batch, min(self.trainer.global_step / steps, 1.0))
        self.means[f"{stage}_loss"].update(loss.detach(), len(batch.target))
        hits = right(self.config.metric, logits.detach(), batch.target, self.config.loss.threshold)
        self.means[f"{stage}_accuracy"].update(hits.float())
        return loss

    def training_step(self, given: Any, _: int) -> Tensor:
        loss = self._step(given, "train")
        self.log("step/train_loss", loss.detach())
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        return loss

    def validation_step(self, given: Any, _: int, dataloader_idx: int = 0) -> None:
        self._step(given, STAGES[1 + dataloader_idx])

    def figures(self, stage: str) -> dict[str, Tensor]:
        """Return loss and accuracy of a stage's epoch so far."""
        return {name: self.means[name].compute() for name in (f"{stage}_loss", f"{stage}_accuracy")}

    def _finish(self, stage: str) -> None:
        figures = self.figures(stage)
        self.log_dict(figures, prog_bar=True)
        for name in figures:
            self.means[name].reset()

    def on_validation_epoch_end(self) -> None:
        self._finish("test")
        if self.trainer.datamodule.validation is not None:  # type: ignore[attr-defined]
            self._finish("validation")

    def on_train_epoch_end(self) -> None:
        self._finish("train")

    def configure_optimizers(self) -> Any:
        optimizer = self.config.optimizer.build(self.network.parameters())
        total = int(self.trainer.estimated_stepping_batches)
        steps_per_epoch = max(total // self.config.epochs, 1)
        rate = self.config.schedule.factor
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, total, steps_per_epoch))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random_state"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # the checkpoint has the first rank's state, with which all ranks would draw the same augmentation
        if self.trainer.world_size == 1:
            torch.set_rng_state(checkpoint["random_state"].cpu())
