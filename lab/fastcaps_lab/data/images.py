"""Labelled images as torch data sets: stored in memory as bytes, finished a batch at a time on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastcaps_lab.data.files import Images, Labels
from fastcaps_lab.data.transforms import DRAWS, Augmentation, Mixup

Indices = Sequence[int] | slice | Tensor


class BatchDataset(Dataset[tuple[Tensor, Tensor]], ABC):
    """Labelled images, built a batch at a time in two steps.

    :meth:`gather` collects a batch's bytes and random numbers; ``finish`` makes them items on their device. A trainer
    gathers on the CPU, moves the bytes and finishes on the training device; :meth:`batch` does both on the CPU.

    Images are uint8 ``[n, c, h, w]``, labels int64 ``[n]``. An item is ``(image / 255 - mean) / std``, with one value
    for all channels or one per channel. With a ``seed``, item i is the same in every batch until :meth:`set_epoch`;
    without one, every batch draws from torch's global generator.
    """

    is_random = True  # whether items take random numbers

    def __init__(
        self,
        images: Images,
        labels: Labels,
        *,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        seed: int | None = None,
    ) -> None:
        images, labels = np.asarray(images), np.asarray(labels)
        if images.ndim != 4 or images.dtype != np.uint8:
            raise ValueError(f"images must be bytes, uint8 [n, c, h, w], got {images.dtype} {list(images.shape)}")
        if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise ValueError(f"labels must be whole numbers [{len(images)}], got {labels.dtype} {list(labels.shape)}")
        self.mean, self.std = (
            torch.tensor(each, dtype=torch.float32).expand(images.shape[1]).view(1, -1, 1, 1) for each in (mean, std)
        )
        self.images = torch.tensor(images)  # a copy, as torch requires writable memory
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, so that a seed draws other random numbers in every epoch."""
        self.epoch, self._numbers = epoch, None
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._numbers = torch.rand(len(self), DRAWS, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def _gathered(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return item indices from 0 to n − 1, and random numbers for the items, ``[n, DRAWS]``."""
        items = torch.from_numpy(np.arange(len(self))[indices])
        return items, torch.rand(
            len(items), DRAWS if self.is_random else 0
        ) if self._numbers is None else self._numbers[items]

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.to(torch.float32) / 255 - self.mean.to(images.device)) / self.std.to(images.device)

    def gather(self, indices: Indices) -> tuple[Tensor, Tensor, Tensor]:
        """Return the raw data of items for :meth:`finish`: bytes ``[n, c, h, w]``, int64 ``[n]``, random numbers."""
        items, numbers = self._gathered(indices)
        return self.images[items], self.labels[items], numbers

    @abstractmethod
    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return items, float32 ``[n, c, h, w]``, and their targets, on the device of the gathered data."""

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return several items, float32 ``[n, c, h, w]``, and their targets."""
        return self.finish(self.gather(indices))

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor]:
        if isinstance(index, slice):
            return self.batch(index)
        images, labels = self.batch([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return a batch for torch's DataLoader, which calls this method if it exists."""
        return list(zip(*self.batch(indices), strict=True))


class ImageDataset(BatchDataset):
    """Labelled images, stored in memory as bytes, returned as normalised float32.

    ``augment`` changes the bytes of a batch, before normalisation (so padding is black, as in the authors' code).
    ``mixup`` comes last; targets are then float32 ``[n, classes]``. The rest is as for :class:`BatchDataset`.
    """

    def __init__(
        self,
        images: Images,
        labels: Labels,
        *,
        augment: Augmentation | None = None,
        mixup: Mixup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(images, labels, **options)
        self.augment, self.mixup = augment, mixup

    @property
    def is_random(self) -> bool:  # type: ignore[override]
        return self.augment is not None or self.mixup is not None

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, c, h, w]``, and int64 ``[n]`` or, with mixup, float32 ``[n, classes]``."""
        images, labels, numbers = gathered
        made = self._normalised(images if self.augment is None else self.augment(images, numbers))
        return (made, labels) if self.mixup is None else self.mixup(made, labels, numbers)
