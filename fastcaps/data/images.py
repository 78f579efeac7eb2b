"""Labelled images as torch data sets: kept in memory as bytes, made a batch at a time on whatever device is wished."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastcaps.data.draws import Draws
from fastcaps.data.transforms import Augmentation, Mixup

Self = TypeVar("Self", bound="BatchDataset")


class BatchDataset(Dataset[tuple[Tensor, Tensor]], ABC):
    """Labelled images that are made a batch at a time, in two steps.

    :meth:`gather` takes out of memory what a batch is made of, bytes for the most part; :meth:`finish` makes it, on the
    device where these lie. A trainer gathers on the CPU, moves bytes and finishes on the device that trains;
    :meth:`batch` does both where the images lie. The numbers are the same.

    Parameters
    ----------
    images : numpy.ndarray
        uint8 ``[n, c, h, w]``.
    labels : numpy.ndarray
        int64 ``[n]``.
    mean, std : float or sequence of float
        One for all channels or one per channel, of pixel values scaled to 0..1; an item is
        ``(image / 255 - mean) / std``.
    seed : int, optional
        Item i is always the same, whatever batch it is in, and another one only after :meth:`set_epoch`. Without a seed
        torch's global generator decides anew for every batch.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        *,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        seed: int | None = None,
    ) -> None:
        images, labels = np.asarray(images), np.asarray(labels)
        if images.ndim != 4 or labels.shape != images.shape[:1]:
            raise ValueError(f"images {images.shape} and labels {labels.shape}: want [n, c, h, w] and [n]")
        if images.dtype != np.uint8:
            raise ValueError(f"images must be bytes, uint8 of 0 to 255, which are normalised later; got {images.dtype}")
        if labels.dtype.kind not in "iub":
            raise ValueError(f"labels: got {labels.dtype}, want whole numbers, the classes")
        scale = {"mean": torch.tensor(mean, dtype=torch.float32), "std": torch.tensor(std, dtype=torch.float32)}
        for name, numbers in scale.items():
            if numbers.dim() and numbers.shape != images.shape[1:2]:
                raise ValueError(f"{name}: got {numbers.numel()} numbers for {images.shape[1]} channels")
        if not bool((scale["std"] > 0).all()):
            raise ValueError(f"std: got {std}, want numbers above 0")
        self.mean, self.std = (numbers.expand(images.shape[1]).view(1, -1, 1, 1) for numbers in scale.values())
        self.images = torch.from_numpy(np.array(images))  # a copy: torch wants memory that it may write to
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64))
        self.seed = seed
        self.epoch = 0

    def to(self: Self, device: torch.device | str) -> Self:
        """Move everything to a device, in place: batches are then made there."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let a seed stand for other random numbers in every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def _items(self, indices: Sequence[int] | slice | Tensor) -> Tensor:
        """The numbers of the items, 0 to n − 1, on the device of the images."""
        if isinstance(indices, slice):
            return torch.arange(len(self), device=self.images.device)[indices]
        every = range(len(self))  # which counts from its end too, and raises IndexError
        numbers = [every[index] for index in torch.as_tensor(indices).tolist()]
        return torch.tensor(numbers, dtype=torch.int64, device=self.images.device)

    def _draws(self, items: Tensor) -> Draws:
        if self.seed is None:
            return Draws.fresh(len(items), items.device)
        return Draws(self.seed * 1_000_003 + self.epoch, items)

    @property
    def is_random(self) -> bool:
        """Whether items are made by random numbers."""
        return True

    def _normalised(self, images: Tensor) -> Tensor:
        mean, std = self.mean.to(images.device), self.std.to(images.device)
        return (images.to(torch.float32) / 255 - mean) / std

    def gather(self, indices: Sequence[int] | slice | Tensor) -> tuple[Tensor, ...]:
        """What the items are made of, where the images lie, for :meth:`finish`.

        Bytes ``[n, c, h, w]``, int64 ``[n]`` and, where something is random, the states of draws.
        """
        items = self._items(indices)
        gathered = self.images[items], self.labels[items]
        return (*gathered, self._draws(items).states) if self.is_random else gathered

    @abstractmethod
    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Make the items, on the device of what was gathered: float32 ``[n, c, h, w]`` and their targets."""

    def batch(self, indices: Sequence[int] | slice | Tensor) -> tuple[Tensor, Tensor]:
        """Several items at once: float32 ``[n, c, h, w]`` and their targets."""
        return self.finish(self.gather(indices))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """A batch for torch's DataLoader, which looks for this name: one augmentation and normalisation for all."""
        return list(zip(*self.batch(indices), strict=True))


class ImageDataset(BatchDataset):
    """Labelled images held in memory as bytes, handed out as normalised float32.

    Parameters
    ----------
    images, labels, **options
        As :class:`BatchDataset` takes them.
    augment : callable, optional
        Applied to the bytes of a whole batch, before normalisation (so that padding is black, as in the authors' code).
    mixup : Mixup, optional
        Applied last; targets are then float32 ``[n, classes]``.
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        *,
        augment: Augmentation | None = None,
        mixup: Mixup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(images, labels, **options)
        self.augment, self.mixup = augment, mixup

    @property
    def is_random(self) -> bool:
        return self.augment is not None or self.mixup is not None

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Float32 ``[n, c, h, w]``, and int64 ``[n]`` or, mixed up, float32 ``[n, classes]``."""
        images, labels, *states = gathered
        draws: Any = Draws.going_on(*states) if states else None
        if self.augment is not None:
            images = self.augment(images, draws)
        made = self._normalised(images)
        return (made, labels) if self.mixup is None else self.mixup(made, labels, draws)
