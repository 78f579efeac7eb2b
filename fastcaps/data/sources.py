"""The files of each data set: where to find them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import CorruptDataError, MissingDataError, Place, check_labels, find
from fastcaps.data.folders import class_names, read_folder
from fastcaps.data.readers import STEMS, read_cifar, read_digits, read_idx, read_norb, read_svhn, split_digits

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_DIGIT_CLASSES = list("0123456789")
_TOYS = ("animal", "human", "airplane", "truck", "car")


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
    images = read_idx(image_file, shape=(None, 28, 28))
    labels = read_idx(label_file, shape=(None,))
    if len(images) != len(labels):
        raise CorruptDataError(
            f"{image_file} holds {len(images):,} images and {label_file} {len(labels):,} labels; want as many of each"
        )
    check_labels(label_file, labels, 0, 9)
    return images[:, None], labels.astype(np.int64)


_CIFAR_FILES = {
    10: {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]},
    100: {"train": ["train.bin"], "test": ["test.bin"]},
}


def _read_cifar(folder: Path, part: str, *, classes: int, label_bytes: int) -> Arrays:
    names = _CIFAR_FILES[classes][part]
    records = {"train": 50_000, "test": 10_000}[part] // len(names)
    parts = [read_cifar(folder / name, label_bytes=label_bytes, classes=classes, records=records) for name in names]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_digits(_: Path, part: str) -> Arrays:
    images, labels = read_digits()
    chosen = split_digits(labels)[part == "test"]
    return images[chosen], labels[chosen]


def _read_folder(folder: Path, part: str, image_size: int | None = None) -> Arrays:
    names = ("train",) if part == "train" else ("test", "val", "validation")
    here = next((folder / name for name in names if (folder / name).is_dir()), None)
    if here is None:
        raise MissingDataError(f"{folder / part}: no such folder, nor val, nor validation")
    return read_folder(here, classes=class_names(folder / "train"), image_size=image_size)


_IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_IDX_WHERE = (
    "the four IDX files of {maker}, plain or .gz; torchvision.datasets.{name}(data_dir, download=True) puts them in "
    "{name}/raw, which is found too"
)
_CIFAR_WHERE = (
    "the archive 'CIFAR-{classes} binary version (suitable for C programs)' from Alex Krizhevsky's CIFAR page, "
    "unpacked; its folder is {folder}"
)

SOURCES = {
    "mnist": Source(
        "MNIST",
        folders=("mnist", "MNIST/raw", "MNIST"),
        files=_IDX_FILES,
        where=_IDX_WHERE.format(
            maker="'The MNIST database of handwritten digits' (LeCun, Cortes, Burges)", name="MNIST"
        ),
        read=_read_mnist,
        classes=_DIGIT_CLASSES,
        scale=([0.1307], [0.3081]),
    ),
    "fashion-mnist": Source(
        "Fashion-MNIST",
        folders=("fashion-mnist", "FashionMNIST/raw", "fashion"),
        files=_IDX_FILES,
        where=_IDX_WHERE.format(maker="Zalando Research's Fashion-MNIST", name="FashionMNIST"),
        read=_read_mnist,
        classes=_CLOTHES,
        scale=([0.2860], [0.3530]),
    ),
    "cifar10": Source(
        "CIFAR-10 (binary version)",
        folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
        files=("data_batch_1.bin", "test_batch.bin"),
        where=_CIFAR_WHERE.format(classes=10, folder="cifar-10-batches-bin"),
        read=partial(_read_cifar, classes=10, label_bytes=1),
        classes=_CIFAR10_CLASSES,
        scale=([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        augment=True,
        flip=True,  # a mirrored image has the same class
    ),
    "cifar100": Source(
        "CIFAR-100 (binary version)",
        folders=("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100"),
        files=("train.bin", "test.bin"),
        where=_CIFAR_WHERE.format(classes=100, folder="cifar-100-binary"),
        read=partial(_read_cifar, classes=100, label_bytes=2),
        classes=[str(label) for label in range(100)],
        scale=([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
        augment=True,
        flip=True,
    ),
    "digits": Source(
        "scikit-learn's digits",
        folders=(),
        files=(),
        where="they come with scikit-learn",
        read=_read_digits,
        classes=_DIGIT_CLASSES,
        scale=([0.3053], [0.3760]),
    ),
    "smallnorb": Source(
        "smallNORB",
        folders=("smallnorb", "norb"),
        files=tuple(f"{stem}-dat.mat" for stem in STEMS.values()),
        where="the six files 'The small NORB dataset, v1.0' (LeCun, Huang, Bottou), -dat, -cat and -info of training "
        "and testing, plain or .gz",
        read=lambda folder, part: read_norb(folder, train=part == "train")[:2],
        classes=_TOYS,
        augment=True,
        padding=16,  # Heinsen (2019), section 3.2
    ),
    "svhn": Source(
        "SVHN (cropped digits)",
        folders=("svhn", "SVHN"),
        files=("train_32x32.mat", "test_32x32.mat"),
        where="train_32x32.mat and test_32x32.mat ('Format 2: Cropped Digits') of the Street View House Numbers page; "
        "torchvision.datasets.SVHN(data_dir, download=True) fetches them too",
        read=lambda folder, part: read_svhn(folder / f"{part}_32x32.mat"),
        classes=_DIGIT_CLASSES,
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
