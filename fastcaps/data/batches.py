"""Shuffled batches that can resume."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


class ShuffledBatches:
    """Batches of shuffled indices, in an order set by seed and epoch only; iteration can start inside an epoch.

    Parameters
    ----------
    size, batch_size : int
        Number of images in all, and in a batch on each rank.
    seed : int
        Seed of the permutations.
    epoch, start : int
        The first epoch, and how many of its batches to skip.
    rank, world_size : int
        Each rank gets its own part. Parts are padded with the first images to equal length, since all ranks must run
        the same number of steps.
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
        """Set the next epoch; if it is not the current one, it begins at its start."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return math.ceil(math.ceil(self.size / self.world_size) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # not seed + epoch: epoch 1 of one run would equal epoch 0 of the next seed's
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator)
        share = math.ceil(self.size / self.world_size)
        positions = torch.arange(self.rank, share * self.world_size, self.world_size) % self.size
        for batch in order[positions].split(self.batch_size)[self.start :]:
            yield batch.tolist()
