"""The data sets by name: their files, where to find them, and :func:`load`, which reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastcaps_lab.checks import check_count, did_you_mean
from fastcaps_lab.data import files, readers
from fastcaps_lab.data.files import Arrays, CorruptDataError, DataError, MissingDataError, Place, check_labels, find
from fastcaps_lab.data.generators import AffineDigits, OverlappingDigits, ShiftedDigits
from fastcaps_lab.data.images import ImageDataset
from fastcaps_lab.data.text import PLACE, Phrases, TextDataset, TextEmbedder, load_treebank
from fastcaps_lab.data.transforms import RandomCropFlip

_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

Scale = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel's pixels, scaled to 0..1."""


@dataclass(frozen=True)
class Source(Place):
    """How to find and read one data set."""

    read: Callable[..., Arrays]  # of a folder and a part, "train" or "test"; for folders of images also an image_size
    classes: Sequence[str] | None  # their names; None: those of the folders of training images
    scale: Scale | None = None  # None: computed from the training images
    augment: bool = False  # whether training images are shifted by default
    padding: int = 4  # by at most how many pixels
    flip: bool = False  # whether they are then mirrored, too


def _read_mnist(folder: Path, part: str) -> Arrays:
    stem = {"train": "train", "test": "t10k"}[part]
    image_file, label_file = find(folder, f"{stem}-images-idx3-ubyte"), find(folder, f"{stem}-labels-idx1-ubyte")
    images = readers.read_idx(image_file, shape=(None, 28, 28))
    labels = readers.read_idx(label_file, shape=(None,))
    if len(images) != len(labels):
        raise CorruptDataError(
            f"{image_file} holds {len(images):,} images and {label_file} {len(labels):,} labels; want as many of each"
        )
    check_labels(label_file, labels, 0, 9)
    return images[:, None], labels.astype(np.int64)


def _read_cifar(folder: Path, part: str, *, classes: int, label_bytes: int) -> Arrays:
    names = [f"{part}.bin" if classes == 100 else "test_batch.bin"]
    if classes == 10 and part == "train":
        names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    records = {"train": 50_000, "test": 10_000}[part] // len(names)
    parts = [
        readers.read_cifar(folder / name, label_bytes=label_bytes, classes=classes, records=records) for name in names
    ]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_digits(_: Path, part: str) -> Arrays:
    images, labels = readers.read_digits()
    chosen = readers.split_digits(labels)[part == "test"]
    return images[chosen], labels[chosen]


def _read_folder(folder: Path, part: str, image_size: int | None = None) -> Arrays:
    names = ("train",) if part == "train" else ("test", "val", "validation")
    here = next((folder / name for name in names if (folder / name).is_dir()), None)
    if here is None:
        raise MissingDataError(f"{folder / part}: no such folder, nor val, nor validation")
    return readers.read_folder(here, classes=readers.class_names(folder / "train"), image_size=image_size)


def _mnist(title: str, folders: tuple[str, ...], maker: str, name: str, classes: Sequence[str], scale: Scale) -> Source:
    where = (
        f"the four IDX files of {maker}, plain or .gz; torchvision.datasets.{name}(data_dir, download=True) puts them "
        f"in {name}/raw, which is found too"
    )
    files = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    return Source(title, folders, files, where, _read_mnist, classes, scale)


def _cifar(folder: str, files: tuple[str, ...], label_bytes: int, classes: Sequence[str], scale: Scale) -> Source:
    count = len(classes)
    where = (
        f"the archive 'CIFAR-{count} binary version (suitable for C programs)' from Alex Krizhevsky's CIFAR page, "
        f"unpacked; its folder is {folder}"
    )
    folders = (folder, f"cifar{count}/{folder}", f"cifar{count}")
    read = partial(_read_cifar, classes=count, label_bytes=label_bytes)
    # a mirrored image has the same class
    return Source(
        f"CIFAR-{count} (binary version)", folders, files, where, read, classes, scale, augment=True, flip=True
    )


_MNIST = "'The MNIST database of handwritten digits' (LeCun, Cortes, Burges)"
_DIGITS = "0123456789"
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_NUMBERS = [str(label) for label in range(100)]
_SCALE_10 = ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
_SCALE_100 = ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])

SOURCES = {
    "mnist": _mnist("MNIST", ("mnist", "MNIST/raw", "MNIST"), _MNIST, "MNIST", _DIGITS, ([0.1307], [0.3081])),
    "fashion-mnist": _mnist(
        "Fashion-MNIST",
        ("fashion-mnist", "FashionMNIST/raw", "fashion"),
        "Zalando Research's Fashion-MNIST",
        "FashionMNIST",
        _CLOTHES,
        ([0.2860], [0.3530]),
    ),
    "cifar10": _cifar("cifar-10-batches-bin", ("data_batch_1.bin", "test_batch.bin"), 1, _THINGS, _SCALE_10),
    "cifar100": _cifar("cifar-100-binary", ("train.bin", "test.bin"), 2, _NUMBERS, _SCALE_100),
    "digits": Source(
        "scikit-learn's digits",
        folders=(),
        files=(),
        where="they come with scikit-learn",
        read=_read_digits,
        classes="0123456789",
        scale=([0.3053], [0.3760]),
    ),
    "smallnorb": Source(
        "smallNORB",
        folders=("smallnorb", "norb"),
        files=tuple(f"{stem}-dat.mat" for stem in readers.STEMS.values()),
        where="the six files 'The small NORB dataset, v1.0' (LeCun, Huang, Bottou), -dat, -cat and -info of training "
        "and testing, plain or .gz",
        read=lambda folder, part: readers.read_norb(folder, train=part == "train")[:2],
        classes=("animal", "human", "airplane", "truck", "car"),
        augment=True,
        padding=16,  # Heinsen (2019), section 3.2
    ),
    "svhn": Source(
        "SVHN (cropped digits)",
        folders=("svhn", "SVHN"),
        files=("train_32x32.mat", "test_32x32.mat"),
        where="train_32x32.mat and test_32x32.mat ('Format 2: Cropped Digits') of the Street View House Numbers page; "
        "torchvision.datasets.SVHN(data_dir, download=True) fetches them too",
        read=lambda folder, part: readers.read_svhn(folder / f"{part}_32x32.mat"),
        classes="0123456789",
    ),
    "folder": Source(
        "A folder of images",
        folders=(),
        files=("train",),
        where="folders train and test (or val), each with a folder of images for each class",
        read=_read_folder,
        classes=None,
    ),
}


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


def _scale(images: files.Images) -> Scale:
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
            got, wanted = (files.sizes_text(part[0].shape[2:]) for part in (test, train))
            raise CorruptDataError(
                f"{folder}: test images of {got} pixels, want {wanted} as in train; image_size= brings all to one"
            )
        classes = source.classes or readers.class_names(folder / "train")
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
    """Return a data set read from disk, with the sizes that a network needs. Nothing is downloaded.

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
        return Splits(name, made, make_test(*test, seed=0), classes, 1, size)  # the same test images in every run
    source = SOURCES[name]
    train, test, classes = _read(name, data_dir, image_size)
    mean, std = source.scale or _scale(train[0])
    augment = source.augment if augment is None else augment
    flip = source.flip and augment if flip is None else flip
    augmentation = RandomCropFlip(source.padding if augment else 0, flip=flip) if augment or flip else None
    made = ImageDataset(train[0][:limit], train[1][:limit], mean=mean, std=std, augment=augmentation)
    tested = ImageDataset(*test, mean=mean, std=std)
    return Splits(name, made, tested, classes, in_channels=made.images.shape[1], image_size=made.images.shape[2])
