"""Shuffled batches that can resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch


@dataclass(eq=False)
class ShuffledBatches:
    """Batches of shuffled indices, in an order set by seed and epoch only; iteration can start inside an epoch."""

    size: int  # number of images in all
    batch_size: int  # number of images in a batch on each rank
    seed: int  # of the permutations
    _: KW_ONLY
    epoch: int = 0  # the first epoch, and
    start: int = 0  # how many of its batches to skip
    rank: int = 0  # each has its own part, padded with the first images, so that all run as many steps
    world_size: int = 1
    source: Any = None  # a data set whose images change with its epoch (``set_epoch``)

    @property
    def sampler(self) -> ShuffledBatches:
        """Itself: Lightning calls ``set_epoch`` of a loader's ``batch_sampler.sampler`` before every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch; if it is not the current one, it begins at its start."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return math.ceil(self.size / self.world_size / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # now, not with the first batch, since workers copy the data set in between
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(self.epoch)
        # not seed + epoch: epoch 1 of one run would equal epoch 0 of the next seed's
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator)
        share = math.ceil(self.size / self.world_size)
        positions = torch.arange(self.rank, share * self.world_size, self.world_size) % self.size
        return (batch.tolist() for batch in order[positions].split(self.batch_size)[self.start :])
