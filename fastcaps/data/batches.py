"""Batches in an order that can be taken up again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


class ShuffledBatches:
    """Batches of shuffled indices whose order follows from seed and epoch alone, and that can begin in the middle.

    Parameters
    ----------
    size, batch_size : int
        Number of images, and how many of them make a batch (on each rank).
    seed : int
        Seed of the permutations.
    epoch, start : int
        The epoch that comes first, and how many of its batches are already done.
    rank, world_size : int
        Each rank gets its own part; parts are filled up from the start to equal length, as every rank must take as many
        steps.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        *,
        epoch: int = 0,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.epoch, self.start = epoch, start
        self.rank, self.world_size = rank, world_size

    @property
    def sampler(self) -> ShuffledBatches:
        """Itself: Lightning calls ``set_epoch`` of a loader's ``batch_sampler.sampler`` before every epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; another one than the last begins at its start."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return math.ceil(math.ceil(self.size / self.world_size) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # seeds of different runs must not meet in different epochs, hence not seed + epoch
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator)
        share = math.ceil(self.size / self.world_size)
        positions = torch.arange(self.rank, share * self.world_size, self.world_size) % self.size
        for batch in order[positions].split(self.batch_size)[self.start :]:
            yield batch.tolist()
