"""Labelled images as torch data sets: stored in memory as bytes, finished a batch at a time on any device."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastcaps_lab.data.draws import Draws
from fastcaps_lab.data.files import Images, Labels
from fastcaps_lab.data.transforms import Augmentation, Mixup

Self = TypeVar("Self", bound="BatchDataset")


class BatchDataset(Dataset[tuple[Tensor, Tensor]], ABC):
    """Labelled images, built a batch at a time in two steps.

    :meth:`gather` collects a batch's raw data, mostly bytes; ``finish`` makes them items on their device. A
    trainer gathers on the CPU, moves the bytes and finishes on the training device; :meth:`batch` does both on the
    images' device. The results are equal.

    Images are uint8 ``[n, c, h, w]``, labels int64 ``[n]``. An item is ``(image / 255 - mean) / std``, with one value
    for all channels or one per channel. With a ``seed``, item i is the same in every batch until :meth:`set_epoch`;
    without one, every batch draws from torch's global generator.
    """

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
        self.images = torch.from_numpy(np.array(images))  # a copy, as torch requires writable memory
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64))
        self.seed, self.epoch = seed, 0

    def to(self: Self, device: torch.device | str) -> Self:
        """Move all tensors to a device, in place, so that batches are built there; return self."""
        device = torch.device(device)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, so that a seed draws other random numbers in every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} images, bytes {list(self.images.shape[1:])})"

    def _items(self, indices: Sequence[int] | slice | Tensor) -> Tensor:
        """Return item indices from 0 to n − 1, on the images' device."""
        if isinstance(indices, slice):
            return torch.tensor(range(len(self))[indices], dtype=torch.int64, device=self.images.device)
        every = range(len(self))  # takes negative indices
        given = torch.as_tensor(indices)
        if given.dtype == torch.bool:
            raise TypeError("indices must be whole numbers, got a mask: mask.nonzero().flatten() has its indices")
        if given.dim() != 1 or (given.is_floating_point() and given.numel()):
            raise TypeError(f"indices must be a list of whole numbers or a slice, got {type(indices).__name__}")
        try:
            numbers = [every[index] for index in given.tolist()]
        except IndexError:
            raise IndexError(f"an index is out of range: there are {len(self)} images") from None
        return torch.tensor(numbers, dtype=torch.int64, device=self.images.device)

    def _draws(self, items: Tensor) -> Draws:
        if self.seed is None:
            return Draws.fresh(len(items), items.device)
        return Draws(self.seed * 1_000_003 + self.epoch, items)

    @property
    def is_random(self) -> bool:
        """Whether items depend on random numbers."""
        return True

    def _normalised(self, images: Tensor) -> Tensor:
        mean, std = self.mean.to(images.device), self.std.to(images.device)
        return (images.to(torch.float32) / 255 - mean) / std

    def gather(self, indices: Sequence[int] | slice | Tensor) -> tuple[Tensor, ...]:
        """Return the raw data of items for :meth:`finish`, on the images' device.

        Bytes ``[n, c, h, w]``, int64 ``[n]`` and, if :attr:`is_random`, the states of draws.
        """
        items = self._items(indices)
        gathered = self.images[items], self.labels[items]
        return (*gathered, self._draws(items).states) if self.is_random else gathered

    @abstractmethod
    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return items, float32 ``[n, c, h, w]``, and their targets, on the device of the gathered data."""

    def batch(self, indices: Sequence[int] | slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return several items, float32 ``[n, c, h, w]``, and their targets."""
        return self.finish(self.gather(indices))

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor]:
        if isinstance(index, slice):
            return self.batch(index)
        try:
            operator.index(index)
        except TypeError:
            raise TypeError(f"index must be an int or a slice, got {index!r}; .batch takes lists") from None
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
    def is_random(self) -> bool:
        return self.augment is not None or self.mixup is not None

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return float32 ``[n, c, h, w]``, and int64 ``[n]`` or, with mixup, float32 ``[n, classes]``."""
        images, labels, *states = gathered
        draws: Any = Draws.going_on(*states) if states else None
        if self.augment is not None:
            images = self.augment(images, draws)
        made = self._normalised(images)
        return (made, labels) if self.mixup is None else self.mixup(made, labels, draws)
