"""The data sets by name: :func:`load` finds and reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcaps.checks import check_count, did_you_mean, known_arguments
from fastcaps.data.files import CorruptDataError, DataError, MissingDataError, sizes_text
from fastcaps.data.folders import class_names
from fastcaps.data.generators import AffineDigits, OverlappingDigits, ShiftedDigits
from fastcaps.data.images import ImageDataset
from fastcaps.data.sources import SOURCES, Arrays, Scale
from fastcaps.data.text import TextDataset, TextEmbedder
from fastcaps.data.transforms import RandomCropFlip
from fastcaps.data.trees import PLACE, Phrases, load_treebank

_TEST_SEED = 0  # generated test images are always the same


@dataclass(frozen=True)
class Splits:
    """A data set, as :func:`load` returns it. Only ``train`` is augmented."""

    name: str  # in the registry
    train: Any  # BatchDataset or TextDataset
    test: Any
    classes: tuple[str, ...]  # their names
    in_channels: int | None = None  # of images
    image_size: int | None = None  # height and width in pixels
    layers: int | None = None  # of texts: the transformer's layers
    embedding: int | None = None  # of texts: values in an embedding
    validation: Any = None  # for the choice of the best epoch, if the data set has such a part

    @property
    def sizes(self) -> dict[str, int]:
        """A network's arguments that follow from the data, by name."""
        found = {name: getattr(self, name) for name in ("in_channels", "image_size", "layers", "embedding")}
        return {name: size for name, size in found.items() if size is not None}


_diverse = partial(OverlappingDigits, single=1 / 6)
_GENERATED: dict[str, tuple[Any, Any, int]] = {
    "multimnist": (OverlappingDigits, OverlappingDigits, 36),
    "diverse-multimnist": (_diverse, _diverse, 36),
    "affnist": (partial(ShiftedDigits, shift=6), AffineDigits, 40),
}
"""Generators of training and test images from MNIST's training and test digits, and their size."""

_TEXTS = {"sst5": 5, "sst2": 2}
"""The Stanford Sentiment Treebank, with its number of classes."""


def names() -> list[str]:
    """Return the names that :func:`load` takes."""
    return [*SOURCES, *_GENERATED, *_TEXTS]


def _scale(images: npt.NDArray[np.uint8]) -> Scale:
    count = images.size // images.shape[1]
    sums = images.sum((0, 2, 3), dtype=np.uint64).tolist()  # Python ints, so the difference below is exact
    squares = np.einsum("nchw,nchw->c", images, images, dtype=np.uint64).tolist()
    stds = [math.sqrt(count * square - total**2) / count / 255 for total, square in zip(sums, squares, strict=True)]
    return [total / count / 255 for total in sums], [std or 1.0 for std in stds]


def _read(name: str, data_dir: str | Path | None, image_size: int | None) -> tuple[Arrays, Arrays, tuple[str, ...]]:
    """Return both parts and the classes' names; errors say which files are wanted, and how to get them."""
    source, size = SOURCES[name], {} if image_size is None else {"image_size": image_size}
    # MNIST and Fashion-MNIST have the same file names: do not read one from the other's folder
    others = {folder.split("/")[0] for other, each in SOURCES.items() if other != name for folder in each.folders}
    folder = source.folder_under(data_dir, others) if source.files else Path()
    try:
        train, test = (source.read(folder, part, **size) for part in ("train", "test"))
        if train[0].shape[1:] != test[0].shape[1:]:
            got, wanted = (sizes_text(part[0].shape[2:]) for part in (test, train))
            raise CorruptDataError(
                f"{folder}: test images of {got} pixels, want {wanted} as in train; image_size= brings all to one"
            )
        classes = source.classes or class_names(folder / "train")
    except DataError as error:
        raise type(error)(f"{error}. Wanted: {source.where}") from None
    return train, test, tuple(classes)


def _load_texts(name: str, data_dir: str | Path | None, transformer: str | Path | None, limit: int | None) -> Splits:
    folder = PLACE.folder_under(data_dir)
    if transformer is None:
        raise MissingDataError(
            f"{name} needs transformer=path (--set data.options.transformer=path): the local folder of a transformer "
            "and its tokenizer, as save_pretrained writes it, whose embeddings the network takes"
        )
    bank = load_treebank(folder, classes=_TEXTS[name])
    embed = TextEmbedder(transformer)
    layers, embedding = embed.sizes
    train = Phrases(bank.train.texts[:limit], bank.train.labels[:limit])
    parts = {"train": train, "test": bank.test, "validation": bank.validation}
    made: dict[str, Any] = {part: TextDataset(phrases, embed) for part, phrases in parts.items()}
    return Splits(name, **made, classes=bank.classes, layers=layers, embedding=embedding)


@known_arguments
def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    augment: bool | None = None,
    flip: bool | None = None,
    limit: int | None = None,
    image_size: int | None = None,
    transformer: str | Path | None = None,
) -> Splits:
    """Return a data set read from disk. Nothing is downloaded.

    Parameters
    ----------
    name : str
        One of :func:`names`: mnist, fashion-mnist, cifar10, cifar100, digits, smallnorb, svhn, folder; multimnist,
        diverse-multimnist, affnist, which are generated from MNIST's digits; sst5, sst2, which are phrases.
    data_dir : str or Path, optional
        The folder of the files, or one above it: ``data_dir/mnist``, ``data_dir/MNIST/raw`` and ``data_dir`` are tried.
        Not needed for ``digits``, which come with scikit-learn.
    augment : bool, optional
        Whether to pad and randomly crop training images: by four pixels, as in the paper (A.2), smallNORB by 16, as in
        Heinsen (2019). By default only for CIFAR and smallNORB.
    flip : bool, optional
        Whether to mirror half of the training images, left to right. By default only for CIFAR with ``augment``.
    limit : int, optional
        Use only the first ``limit`` training images, for a quick try.
    image_size : int, optional
        Height and width to which images of ``folder`` are resized; without it they must be squares of one size.
    transformer : str or Path, optional
        The folder of the transformer that embeds the phrases of ``sst5`` and ``sst2``, as for :class:`TextEmbedder`.

    Returns
    -------
    Splits
        The parts, and the sizes that a network needs.

    Raises
    ------
    ValueError
        If the name is unknown, ``limit`` is below 1, or the data set cannot be augmented or resized.
    MissingDataError, CorruptDataError
        If files are missing, truncated or wrong; the message names the file, what was found, what is wanted and how to
        get it.
    """
    if name not in names():
        raise ValueError(f"data: got {name!r}{did_you_mean(name, names())}, want one of {', '.join(names())}")
    if limit is not None:
        check_count("limit", limit)
    if image_size is not None and name != "folder":
        raise ValueError(f"image_size: got {image_size} for {name}, whose images have one size; want none")
    if transformer is not None and name not in _TEXTS:
        raise ValueError(f"transformer: got {str(transformer)!r} for {name}, which are images; want none")
    if (augment or flip) and name not in SOURCES:
        why = "which are texts" if name in _TEXTS else "which is drawn at random as it is"
        raise ValueError(f"augment, flip: got {augment}, {flip} for {name}, {why}; want none")
    if name in _TEXTS:
        return _load_texts(name, data_dir, transformer, limit)
    if name in _GENERATED:
        train, test, classes = _read("mnist", data_dir, None)
        make_train, make_test, size = _GENERATED[name]
        made = make_train(train[0][:limit], train[1][:limit])
        return Splits(name, made, make_test(*test, seed=_TEST_SEED), classes, 1, size)
    source = SOURCES[name]
    train, test, classes = _read(name, data_dir, image_size)
    mean, std = source.scale or _scale(train[0])
    augment = source.augment if augment is None else augment
    flip = source.flip and augment if flip is None else flip
    augmentation = RandomCropFlip(source.padding if augment else 0, flip=flip) if augment or flip else None
    return Splits(
        name=name,
        train=ImageDataset(train[0][:limit], train[1][:limit], mean=mean, std=std, augment=augmentation),
        test=ImageDataset(*test, mean=mean, std=std),
        classes=classes,
        in_channels=train[0].shape[1],
        image_size=train[0].shape[2],
    )
