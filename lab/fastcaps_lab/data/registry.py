"""The data sets by name: their files, where to find them, and :func:`load`, which reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.data import files, readers
from fastcaps_lab.data.files import Arrays, CorruptDataError, DataError, MissingDataError, Place, find
from fastcaps_lab.data.generators import AffineDigits, OverlappingDigits, ShiftedDigits
from fastcaps_lab.data.images import ImageDataset
from fastcaps_lab.data.text import CLASSES, FILES, PLACE, TextDataset, TextEmbedder, read_trees
from fastcaps_lab.data.transforms import RandomCropFlip

Scale = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel's pixels, scaled to 0..1."""


@dataclass(frozen=True)
class Source(Place):
    """How to find and read one data set."""

    read: Callable[..., Arrays]  # of a folder and a part, "train" or "test"; for folders of images also an image_size
    classes: Sequence[str] | None  # their names; None: those of the folders of training images
    scale: Scale | None = None  # None: computed from the training images
    padding: int = 0  # training images are shifted by at most so many pixels by default
    flip: bool = False  # whether they are then mirrored, too


def _read_mnist(folder: Path, part: str) -> Arrays:
    stem = {"train": "train", "test": "t10k"}[part]
    return readers.read_idx(find(folder, f"{stem}-images-idx3-ubyte"), find(folder, f"{stem}-labels-idx1-ubyte"))


def _read_cifar(folder: Path, part: str, *, classes: int) -> Arrays:
    names = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}[part]
    read = [readers.read_cifar(folder / n, classes=classes) for n in (names if classes == 10 else [f"{part}.bin"])]
    images, labels = zip(*read, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_digits(_: Path, part: str) -> Arrays:
    images, labels = readers.read_digits()
    chosen = readers.split_digits(labels)[part == "test"]
    return images[chosen], labels[chosen]


def _read_folder(folder: Path, part: str, image_size: int | None = None) -> Arrays:
    names = ("train",) if part == "train" else ("test", "val", "validation")
    here = next((folder / name for name in names if (folder / name).is_dir()), folder / part)
    return readers.read_folder(here, classes=readers.class_names(folder / "train"), image_size=image_size)


_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_IDX_FILES = "the four IDX files of {}, plain or .gz; torchvision.datasets.{}(data_dir, download=True) fetches them"
_CIFAR_FILES = "the archive 'CIFAR-{} binary version (suitable for C programs)' of Krizhevsky's CIFAR page, unpacked"
_CIFAR: dict[str, Any] = {"padding": 4, "flip": True}  # Tsai et al. (2020), A.2
_DIGITS = "0123456789"
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SOURCES = {
    "mnist": Source(
        "MNIST", ("mnist", "MNIST/raw", "MNIST"), _IDX, _IDX_FILES.format("LeCun's MNIST", "MNIST"),
        _read_mnist, _DIGITS, ([0.1307], [0.3081])),
    "fashion-mnist": Source(
        "Fashion-MNIST", ("fashion-mnist", "FashionMNIST/raw", "fashion"), _IDX,
        _IDX_FILES.format("Zalando Research's Fashion-MNIST", "FashionMNIST"), _read_mnist, _CLOTHES,
        ([0.2860], [0.3530])),
    "cifar10": Source(
        "CIFAR-10 (binary version)", ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
        ("data_batch_1.bin", "test_batch.bin"), _CIFAR_FILES.format(10), partial(_read_cifar, classes=10), _THINGS,
        ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]), **_CIFAR),
    "cifar100": Source(
        "CIFAR-100 (binary version)", ("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100"),
        ("train.bin", "test.bin"), _CIFAR_FILES.format(100), partial(_read_cifar, classes=100),
        [str(label) for label in range(100)], ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]), **_CIFAR),
    "digits": Source("scikit-learn's digits", (), (), "", _read_digits, _DIGITS, ([0.3053], [0.3760])),
    "smallnorb": Source(
        "smallNORB", ("smallnorb", "norb"), tuple(f"{stem}-dat.mat" for stem in readers.STEMS.values()),
        "the files -dat and -cat of 'The small NORB dataset, v1.0' (LeCun, Huang, Bottou), plain or .gz",
        readers.read_norb, ("animal", "human", "airplane", "truck", "car"), padding=16),  # Heinsen (2019), 3.2
    "svhn": Source(
        "SVHN (cropped digits)", ("svhn", "SVHN"), ("train_32x32.mat", "test_32x32.mat"),
        "train_32x32.mat and test_32x32.mat ('Format 2: Cropped Digits') of the Street View House Numbers page",
        lambda folder, part: readers.read_svhn(folder / f"{part}_32x32.mat"), _DIGITS),
    "folder": Source(
        "A folder of images", (), ("train",),
        "folders train and test (or val), each with a folder of images for each class", _read_folder, None),
}  # fmt: skip


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

_TEXTS = {"sst5": 5, "sst2": 2}  # the Stanford Sentiment Treebank, with its number of classes


def names() -> list[str]:
    """Return the names that :func:`load` takes."""
    return [*SOURCES, *_GENERATED, *_TEXTS]


def _scale(images: files.Images) -> Scale:
    levels, means, stds = np.arange(256) / 255, [], []
    for channel in images.swapaxes(0, 1):
        shares = np.histogram(channel, 256, (0, 256))[0] / channel.size
        means.append(float(shares @ levels))
        stds.append(float(np.sqrt(shares @ (levels - means[-1]) ** 2)) or 1.0)
    return means, stds


def _read(name: str, data_dir: str | Path | None, image_size: int | None) -> tuple[Arrays, Arrays, tuple[str, ...]]:
    """Return both parts and the classes' names; errors say which files are wanted, and how to get them."""
    source, size = SOURCES[name], {} if image_size is None else {"image_size": image_size}
    # MNIST and Fashion-MNIST have the same file names: do not read one from the other's folder
    others = {folder.split("/")[0] for other, each in SOURCES.items() if other != name for folder in each.folders}
    folder = source.folder_under(data_dir, others) if source.files else Path()
    try:
        train, test = (source.read(folder, part, **size) for part in ("train", "test"))
        classes = source.classes or readers.class_names(folder / "train")
        if train[0].shape[1:] != test[0].shape[1:]:
            got, wanted = (" x ".join(map(str, part[0].shape[2:])) for part in (test, train))
            raise CorruptDataError(
                f"{folder}: test images of {got} pixels, want {wanted} as in train; image_size= helps"
            )
    except DataError as error:
        raise type(error)(f"{error}. Wanted: {source.where}") from None
    return train, test, tuple(classes)


def _load_texts(name: str, data_dir: str | Path | None, transformer: str | Path | None, limit: int | None) -> Splits:
    folder = PLACE.folder_under(data_dir)
    if transformer is None:
        raise MissingDataError(
            f"{name} needs transformer=path (--set data.options.transformer=path): the folder of a transformer and its "
            "tokenizer, as save_pretrained writes it"
        )
    count = _TEXTS[name]
    parts = {part: read_trees(folder / file, phrases=part == "train", classes=count) for part, file in FILES.items()}
    parts["train"] = parts["train"][:limit]
    embed = TextEmbedder(transformer)
    layers, embedding = embed.sizes
    made: dict[str, Any] = {part: TextDataset(phrases, embed) for part, phrases in parts.items()}
    return Splits(name, **made, classes=CLASSES[count], layers=layers, embedding=embedding)


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

    ValueError if the name is unknown, or the data set does not take the option. MissingDataError or CorruptDataError if
    a file is missing, truncated or wrong; the message says what was found, what is wanted, and how to get it.

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
    """
    if name not in names():
        raise ValueError(f"data: got {name!r}{did_you_mean(name, names())}, want one of {', '.join(names())}")
    for option, value, fits in (
        ("image_size", image_size, name == "folder"),
        ("transformer", transformer, name in _TEXTS),
        ("augment", augment or None, name in SOURCES),
        ("flip", flip or None, name in SOURCES),
    ):
        if value is not None and not fits:
            raise ValueError(f"{option}: got {value} for {name}, which does not take it; want none")
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
    augment = source.padding > 0 if augment is None else augment
    flip = source.flip and augment if flip is None else flip
    augmentation = RandomCropFlip((source.padding or 4) * augment, flip) if augment or flip else None
    made = ImageDataset(train[0][:limit], train[1][:limit], mean=mean, std=std, augment=augmentation)
    tested = ImageDataset(*test, mean=mean, std=std)
    return Splits(name, made, tested, classes, in_channels=made.images.shape[1], image_size=made.images.shape[2])
