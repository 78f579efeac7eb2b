"""The LightningDataModule of a run: batches in an order that can resume, on any number of devices."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from fastcaps_lab.data import ImageDataset, OverlappingDigits, ShuffledBatches, Splits, TextDataset, load, transforms
from fastcaps_lab.training.config import Data, TrainConfig


def middle(data: Data, size: int, images: Tensor, *_: Any) -> Tensor:
    """Return the middle of resized test images, ``[n, c, size, size]``."""
    assert data.resize is not None
    edge = (data.resize - size) // 2
    return transforms.resized(images, data.resize)[..., edge : edge + size, edge : edge + size]


def read_data(data: Data) -> Splits:
    """Return a data set with its augmentation; DataError or ValueError if it is missing, wrong, or does not fit."""
    custom = data.pad is not None or data.resize is not None  # then load() must not augment
    given: dict[str, Any] = {"augment": False, "flip": None} if custom else {"augment": data.augment, "flip": data.flip}
    try:
        splits = load(data.name, data.dir, **given, limit=data.limit, **data.options)
    except TypeError as error:  # an unknown option
        raise ValueError(f"data.options: got {dict(data.options)}: {error}") from error
    train = splits.train
    if not isinstance(train, ImageDataset):
        # phrases are blended, images that are drawn at random are not
        for option in ("pad", "resize", *(() if isinstance(train, TextDataset) else ("mixup",))):
            if (got := getattr(data, option)) not in (None, 0):
                raise ValueError(f"data.{option}: got {got} for {data.name}, whose samples it does not fit; want none")
    if data.pad is not None:
        train.augment = transforms.RandomCropFlip(data.pad, flip=bool(data.flip))
    elif data.resize is not None:
        assert splits.image_size is not None
        size = data.crop or splits.image_size
        train.augment = transforms.ResizeCrop(data.resize, size, flip=bool(data.flip))
        if data.crop is not None:
            splits.test.augment = functools.partial(middle, data, size)
            splits = replace(splits, image_size=size)
    if data.mixup:
        train.mixup = transforms.Mixup(len(splits.classes), data.mixup)
    return splits


class Subset(Dataset[Any]):
    """A data set, or its items at some indices. A loader gathers, the training device finishes.

    A torch data set of pairs, an image and its class, has nothing to finish. With ``parts``, batches of overlapping
    digits also hold the single digits, for the reconstruction loss.
    """

    def __init__(self, dataset: Any, indices: Sequence[int] | None = None, *, parts: bool = False) -> None:
        self.dataset, self.parts = dataset, parts
        self.indices = range(len(dataset)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitems__(self, numbers: list[int]) -> tuple[Tensor, ...]:
        indices = [self.indices[number] for number in numbers]
        if hasattr(self.dataset, "gather"):
            return self.dataset.gather(indices)
        return tuple(default_collate([self.dataset[index] for index in indices]))

    def finish(self, gathered: tuple[Tensor, ...]) -> Any:
        """Return a gathered batch, finished on its device; parts are pixels in [0, 1], ``[n, 2, h, w]``, and labels."""
        made = self.dataset.finish(gathered) if hasattr(self.dataset, "finish") else gathered
        if not self.parts:
            return made
        digits, labels, states = gathered
        return *made, self.dataset.apart(digits, states).float() / 255, labels


def hold_out(train: Any, count: int, tested_as: Any = None, *, parts: bool = False) -> tuple[Subset, Subset | None]:
    """Split training images into training and validation images, equally for every seed.

    Validation images get the transform of test images, if any, instead of augmentation and mixup.
    """
    if not count:
        return Subset(train, parts=parts), None
    if count >= len(train):
        raise ValueError(f"data.validation: got {count} of {len(train)} training images, want fewer")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    plain = copy.copy(train)
    for name, value in (("augment", tested_as), ("mixup", None)):
        if hasattr(plain, name):
            setattr(plain, name, value)
    return Subset(train, sorted(order[count:]), parts=parts), Subset(plain, sorted(order[:count]), parts=parts)


class ImageData(pl.LightningDataModule):
    """A LightningDataModule that can resume inside an epoch.

    Batches move to the training device as bytes or tokens, and are finished there. ``validation`` images are held out,
    unless the data set has a validation part. Batches of overlapping digits may also hold the single digits.
    """

    def __init__(self, splits: Splits, config: TrainConfig) -> None:
        super().__init__()
        # the reconstruction loss needs the single digits of an image
        parts = isinstance(splits.train, OverlappingDigits) and getattr(config.loss, "reconstruction", 0) > 0
        tested_as = getattr(splits.test, "augment", None)
        self.train, self.validation = hold_out(splits.train, config.data.validation, tested_as, parts=parts)
        if self.validation is None and splits.validation is not None:
            self.validation = Subset(splits.validation)
        self.test = Subset(splits.test, parts=parts)
        self.source = splits.train
        self.batch_size, self.seed = config.batch_size, config.seed
        self.workers = min(config.workers, os.cpu_count() or 1)
        self._epoch = self._start = 0

    def _loader(self, dataset: Any, batches: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=default_convert,  # batches are gathered whole, with nothing to collate
            num_workers=self.workers,
            # persistent workers would miss set_epoch, which a data set with a seed needs
            persistent_workers=self.workers > 0 and getattr(self.source, "seed", None) is None,
            # not the run's generator, from which a loader would draw once more in a resumed run
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _batches(self) -> ShuffledBatches:
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        where: dict[str, Any] = {"epoch": self._epoch, "start": self._start, "rank": rank, "world_size": world_size}
        return ShuffledBatches(len(self.train), self.batch_size // world_size, self.seed, **where, source=self.source)

    def steps_per_epoch(self) -> int:
        """Return the number of training batches per rank and epoch."""
        return len(self._batches())

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, self._batches())

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """Return loaders of the test images and the validation images."""
        assert self.trainer is not None
        loaders, size = [], max(self.batch_size // self.trainer.world_size, 128)
        for dataset in (self.test, self.validation):
            if dataset is not None:
                mine = range(self.trainer.global_rank, len(dataset), self.trainer.world_size)
                loaders.append(self._loader(dataset, [list(mine[i : i + size]) for i in range(0, len(mine), size)]))
        return loaders

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch finished on the training device."""
        assert self.trainer is not None
        source: Any = self.train if self.trainer.training else (self.test, self.validation)[dataloader_idx]
        return source.finish(batch)

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        epoch, start = divmod(self.trainer.global_step, self.steps_per_epoch())
        return {"epoch": epoch, "start": start, "steps_per_epoch": self.steps_per_epoch()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["steps_per_epoch"] != self.steps_per_epoch():
            raise ValueError(
                f"the checkpoint has {state_dict['steps_per_epoch']} steps per epoch and this run "
                f"{self.steps_per_epoch()}; resume with the same data, batch size and number of devices"
            )
        self._epoch, self._start = state_dict["epoch"], state_dict["start"]
