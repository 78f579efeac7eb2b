"""Where the files of each data set lie, what they hold, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import CorruptDataError, MissingDataError, check_labels, find
from fastcaps.data.folders import class_names, read_folder
from fastcaps.data.readers import STEMS, read_cifar, read_digits, read_idx, read_norb, read_svhn, split_digits

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_DIGIT_CLASSES = list("0123456789")
_TOYS = ("animal", "human", "airplane", "truck", "car")


@dataclass(frozen=True)
class Source:
    """How one data set is found and read."""

    title: str  # its name in messages
    folders: tuple[str, ...]  # looked for under the data directory, in this order, before it itself
    files: tuple[str, ...]  # what is in them
    read: Callable[[Path, str, int | None], Arrays]  # a part, "train" or "test", of the folder; at a size of images
    classes: Sequence[str] | Callable[[Path], Sequence[str]]  # their names, or what finds them in the folder
    where: str  # how the files are had
    mean: tuple[float, ...] | None = None  # a channel; those of the training images if not given
    std: tuple[float, ...] | None = None
    augment: bool = False  # whether training images are shifted by default,
    padding: int = 4  # by how much,
    flip: bool = False  # and whether they are then mirrored too


def _read_mnist(folder: Path, part: str, _: int | None) -> Arrays:
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


def _read_cifar10(folder: Path, part: str, _: int | None) -> Arrays:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if part == "train" else ["test_batch.bin"]
    parts = [read_cifar(folder / name, label_bytes=1, classes=10, records=10_000) for name in names]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_cifar100(folder: Path, part: str, _: int | None) -> Arrays:
    records = {"train": 50_000, "test": 10_000}[part]
    return read_cifar(folder / f"{part}.bin", label_bytes=2, classes=100, records=records)


def _read_digits(_: Path, part: str, __: int | None) -> Arrays:
    images, labels = read_digits()
    chosen = split_digits(labels)[part == "test"]
    return images[chosen], labels[chosen]


def _read_folder(folder: Path, part: str, image_size: int | None) -> Arrays:
    names = ("train",) if part == "train" else ("test", "val", "validation")
    here = next((folder / name for name in names if (folder / name).is_dir()), None)
    if here is None:
        raise MissingDataError(f"{folder / part}: no such folder, nor val, nor validation")
    return read_folder(here, classes=class_names(folder / "train"), image_size=image_size)


def _idx(title: str, maker: str, folders: tuple[str, ...], **own: Any) -> Source:
    """A data set of MNIST's kind; torchvision's folder comes second."""
    named = folders[1].removesuffix("/raw")
    return Source(
        title=title,
        folders=folders,
        files=tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")),
        read=_read_mnist,
        where=f"the four IDX files of {maker}, plain or .gz; torchvision.datasets.{named}(data_dir, download=True) "
        f"puts them in {named}/raw, which is found too",
        **own,
    )


def _cifar(classes: Sequence[str], folder: str, **own: Any) -> Source:
    """CIFAR-10 or CIFAR-100."""
    count = len(classes)
    return Source(
        title=f"CIFAR-{count} (binary version)",
        folders=(folder, f"cifar{count}/{folder}", f"cifar{count}"),
        classes=classes,
        where=f"the archive 'CIFAR-{count} binary version (suitable for C programs)' from Alex Krizhevsky's CIFAR "
        f"page, unpacked; its folder is {folder}",
        augment=True,
        flip=True,  # nothing tells a horse from its mirror image
        **own,
    )


SOURCES = {
    "mnist": _idx(
        "MNIST",
        "'The MNIST database of handwritten digits' (LeCun, Cortes, Burges)",
        ("mnist", "MNIST/raw", "MNIST"),
        classes=_DIGIT_CLASSES,
        mean=(0.1307,),
        std=(0.3081,),
    ),
    "fashion-mnist": _idx(
        "Fashion-MNIST",
        "Zalando Research's Fashion-MNIST",
        ("fashion-mnist", "FashionMNIST/raw", "fashion"),
        classes=_CLOTHES,
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "cifar10": _cifar(
        _CIFAR10_CLASSES,
        "cifar-10-batches-bin",
        files=("data_batch_1.bin", "test_batch.bin"),
        read=_read_cifar10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _cifar(
        [str(label) for label in range(100)],
        "cifar-100-binary",
        files=("train.bin", "test.bin"),
        read=_read_cifar100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
    "digits": Source(
        title="scikit-learn's digits",
        folders=(),
        files=(),
        read=_read_digits,
        classes=_DIGIT_CLASSES,
        mean=(0.3053,),
        std=(0.3760,),
        where="they come with scikit-learn",
    ),
    "smallnorb": Source(
        title="smallNORB",
        folders=("smallnorb", "norb"),
        files=tuple(f"{stem}-dat.mat" for stem in STEMS.values()),
        read=lambda folder, part, _: read_norb(folder, train=part == "train")[:2],
        classes=_TOYS,
        where="the six files 'The small NORB dataset, v1.0' (LeCun, Huang, Bottou), -dat, -cat and -info of training "
        "and testing, plain or .gz",
        augment=True,
        padding=16,  # Heinsen (2019), section 3.2
    ),
    "svhn": Source(
        title="SVHN (cropped digits)",
        folders=("svhn", "SVHN"),
        files=("train_32x32.mat", "test_32x32.mat"),
        read=lambda folder, part, _: read_svhn(folder / f"{part}_32x32.mat"),
        classes=_DIGIT_CLASSES,
        where="train_32x32.mat and test_32x32.mat ('Format 2: Cropped Digits') of the Street View House Numbers page; "
        "torchvision.datasets.SVHN(data_dir, download=True) fetches them too",
    ),
    "folder": Source(
        title="A folder of images",
        folders=(),
        files=("train",),
        read=_read_folder,
        classes=lambda folder: class_names(folder / "train"),
        where="folders train and test (or val), each with a folder of images for each class",
    ),
}
