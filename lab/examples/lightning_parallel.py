"""The training of data_parallel.py with Lightning, which starts the processes.

    python lab/examples/lightning_parallel.py --devices 2

``fastcaps train`` can do the same:

    fastcaps train --network digits --data digits --set devices=2 --set strategy=ddp
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from fastcaps_lab import data, models


class Digits(pl.LightningModule):
    """A capsule network, its loss and its optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.network = models.create("digits")

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images per step, for all processes together")
    parser.add_argument("--images", type=int, default=None, help="train only on the first images")
    options = parser.parse_args()
    pl.seed_everything(0)
    splits = data.load("digits")
    images = Subset(splits.train, range(options.images or len(splits.train)))
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        strategy="ddp",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(images, options.batch // options.devices, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss_epoch'].item():.4f}")


if __name__ == "__main__":
    main()
