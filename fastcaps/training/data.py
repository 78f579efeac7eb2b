"""The data of a run as Lightning wants them: in an order that can be taken up again, on any number of devices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

import fastcaps.data
from fastcaps.data import MissingDataError, RandomCropFlip, ShuffledBatches, Splits, load
from fastcaps.training.config import Data

SPLIT_SEED = 0
"""Of the images that are held out: the same ones in every run, whatever its own seed."""


def _transform(name: str, option: str) -> Any:
    """A transform of :mod:`fastcaps.data` that a recipe asks for."""
    found = getattr(fastcaps.data, name, None)
    if found is None:
        raise MissingDataError(f"data.{option}: this fastcaps has no {name} yet; leave it out")
    return found


class CentreCrop:
    """Resize images, and cut out their middle: bytes ``[n, c, h, w]``."""

    def __init__(self, resize: int, size: int) -> None:
        self.resize, self.size = resize, size

    def __call__(self, images: Tensor, *_: Any) -> Tensor:
        shape = (self.resize, self.resize)
        pixels = F.interpolate(images.float(), shape, mode="bilinear", antialias=True, align_corners=False)
        first = (self.resize - self.size) // 2
        middle = slice(first, first + self.size)
        return pixels[..., middle, middle].round().clamp(0, 255).to(torch.uint8)


def read_data(data: Data) -> Splits:
    """Read the data set and set up what is done to its images.

    Raises
    ------
    DataError, ValueError
        If it is missing or wrong, or a setting does not fit it.
    """
    if data.name not in fastcaps.data.names():
        raise MissingDataError(
            f"data: the data set {data.name!r} is not in this fastcaps; there are {', '.join(fastcaps.data.names())}"
        )
    own = data.pad is not None or data.resize is not None
    # what is padded or resized here is not augmented there
    given: dict[str, Any] = {"augment": False, "flip": None} if own else {"augment": data.augment, "flip": data.flip}
    splits = load(data.name, data.dir, **given, limit=data.limit, **data.options)
    return prepare(splits, data)


def prepare(splits: Splits, data: Data) -> Splits:
    """Set up what is done to the images of a data set."""
    train: Any = splits.train
    transforms: list[Any] = []
    if data.pad is not None:
        transforms.append(RandomCropFlip(data.pad, flip=bool(data.flip)))
    elif data.resize is not None:
        size = data.crop or splits.image_size
        transforms.append(_transform("ResizeCrop", "resize")(data.resize, size, flip=bool(data.flip)))
        if data.crop is not None:
            test: Any = splits.test
            test.augment = CentreCrop(data.resize, size)
            splits = replace(splits, image_size=size)
    elif data.jitter and train.augment is not None:
        transforms.append(train.augment)
    if data.jitter:
        transforms.append(_transform("ColorJitter", "jitter")())
    if transforms:
        train.augment = transforms[0] if len(transforms) == 1 else _transform("Chain", "jitter")(*transforms)
    if data.mixup:
        train.mixup = _transform("Mixup", "mixup")(len(splits.classes), data.mixup)
    return splits


def hold_out(train: Any, count: int, plain_augment: Any = None) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """Split training images: those to train with, and ``count`` others, which are treated as test images are.

    Raises
    ------
    ValueError
        If none would remain.
    """
    if not count:
        return train, None
    if count >= len(train):
        raise ValueError(f"data.validation: got {count} of {len(train)} training images, want fewer")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    plain = copy.copy(train)
    for name, value in (("augment", plain_augment), ("mixup", None)):
        if hasattr(plain, name):
            setattr(plain, name, value)
    return Subset(train, sorted(order[count:])), Subset(plain, sorted(order[:count]))


class WithParts(Dataset[Any]):
    """Images made of several, with the parts that they are made of (``dataset.layers``): for their reconstruction.

    The data set must have a ``seed``, so that an image and its parts, which are drawn apart, belong together.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        images, targets = self.dataset.batch(indices)
        parts, labels = self.dataset.layers(indices)
        return list(zip(images, targets, parts.float() / 255, labels, strict=True))


class EpochBatches(ShuffledBatches):
    """Batches that let a data set whose images are made as they are asked for make others in every epoch."""

    def __init__(self, source: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.source = source

    def __iter__(self) -> Iterator[list[int]]:
        if hasattr(self.source, "set_epoch"):  # at once, and not with the first batch: workers are started in between
            self.source.set_epoch(self.epoch)
        return super().__iter__()


class ImageData(pl.LightningDataModule):
    """Lightning's view of a data set; remembers how far its epoch had come.

    Parameters
    ----------
    splits : Splits
    batch_size : int
        Images a step, on all devices together.
    seed : int
        Of the order of the training images.
    workers : int
        Processes that prepare batches.
    validation : int
        How many training images are held out; a data set that has some of its own needs none.
    parts : bool
        Whether batches hold the parts that images are made of.
    """

    def __init__(
        self,
        splits: Splits,
        batch_size: int,
        *,
        seed: int = 0,
        workers: int = 0,
        validation: int = 0,
        parts: bool = False,
    ) -> None:
        super().__init__()
        train: Any = WithParts(splits.train) if parts else splits.train
        self.train, self.validation = hold_out(train, validation, getattr(splits.test, "augment", None))
        if self.validation is None:
            self.validation = getattr(splits, "validation", None)
        self.test: Any = splits.test
        if parts:
            self.test = WithParts(splits.test)
            drawn: Any
            for drawn in (splits.train, splits.test):
                if drawn.seed is None:
                    drawn.seed = seed
        self.source = splits.train
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self._epoch = self._start = 0

    def _loader(self, dataset: Any, batches: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            # workers that stay would not hear of the next epoch
            persistent_workers=self.workers > 0 and getattr(self.source, "seed", None) is None,
            # its own generator: a loader takes a seed when iteration begins, and a run that resumes begins once more
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _batches(self) -> EpochBatches:
        """The order of the training images on this rank."""
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        size: int = len(self.train)  # type: ignore[arg-type]
        share = self.batch_size // world_size
        where: dict[str, Any] = {"epoch": self._epoch, "start": self._start, "rank": rank, "world_size": world_size}
        return EpochBatches(self.source, size, share, self.seed, **where)

    def steps_per_epoch(self) -> int:
        """Training batches of each rank in one epoch."""
        return len(self._batches())

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, self._batches())

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """The test images, and those that were held out."""
        assert self.trainer is not None
        loaders, size = [], max(self.batch_size // self.trainer.world_size, 128)
        dataset: Any
        for dataset in (self.test, self.validation):
            if dataset is not None:
                mine = range(self.trainer.global_rank, len(dataset), self.trainer.world_size)
                loaders.append(self._loader(dataset, [list(mine[i : i + size]) for i in range(0, len(mine), size)]))
        return loaders

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        epoch, start = divmod(self.trainer.global_step, self.steps_per_epoch())
        return {"epoch": epoch, "start": start, "steps_per_epoch": self.steps_per_epoch()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["steps_per_epoch"] != self.steps_per_epoch():
            raise ValueError(
                f"the checkpoint has {state_dict['steps_per_epoch']} steps an epoch and this run "
                f"{self.steps_per_epoch()}; "
                "resume with the data, batch size and number of devices that the run began with"
            )
        self._epoch, self._start = state_dict["epoch"], state_dict["start"]
