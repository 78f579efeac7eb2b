"""The data sets by name: where their files lie, what they hold, how they are normalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.cifar import read_cifar
from fastcaps.data.digits import read_digits, split_digits
from fastcaps.data.errors import CorruptDataError, MissingDataError
from fastcaps.data.idx import read_idx
from fastcaps.data.images import ImageDataset, RandomCropFlip

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_DIGIT_CLASSES = list("0123456789")


@dataclass(frozen=True)
class _Source:
    """How one data set is found and read."""

    title: str
    folders: tuple[str, ...]  # looked for under data_dir, in this order, before data_dir itself
    files: tuple[str, ...]
    read: Callable[[Path], tuple[Arrays, Arrays]]
    classes: Sequence[str]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    where: str
    augment: bool = False  # by default, and then with flips: nothing tells a horse from its mirror image


@dataclass(frozen=True)
class Splits:
    """A data set, read: what :func:`load` returns.

    Attributes
    ----------
    name : str
        Its name in the registry.
    train, test : ImageDataset
        The two parts. Only ``train`` is ever augmented.
    classes : tuple of str
        Class names; their number is the number of classes.
    in_channels, image_size : int
        Channels, and height and width in pixels (all of these data sets are square).
    """

    name: str
    train: ImageDataset
    test: ImageDataset
    classes: tuple[str, ...]
    in_channels: int
    image_size: int


def _find(folder: Path, name: str) -> Path:
    """An IDX file under any of its customary spellings."""
    spellings = [name + end for stem in (name, name.replace("-idx", ".idx")) for end in ("", ".gz") for name in (stem,)]
    for spelling in spellings:
        if (folder / spelling).is_file():
            return folder / spelling
    raise MissingDataError(f"{folder / name}: no such file, nor {name}.gz")


def _read_mnist(folder: Path) -> tuple[Arrays, Arrays]:
    parts: list[Arrays] = []
    for stem in ("train", "t10k"):
        image_file, label_file = _find(folder, f"{stem}-images-idx3-ubyte"), _find(folder, f"{stem}-labels-idx1-ubyte")
        images = read_idx(image_file, shape=(None, 28, 28))
        labels = read_idx(label_file, shape=(None,))
        if len(images) != len(labels):
            raise CorruptDataError(
                f"{image_file} holds {len(images):,} images and {label_file} {len(labels):,} labels; "
                "want as many of each"
            )
        if len(images) == 0:
            raise CorruptDataError(f"{image_file}: holds no image")
        if labels.max() > 9:
            raise CorruptDataError(f"{label_file}: holds the label {labels.max()}, want 0 to 9")
        parts.append((images[:, None], labels.astype(np.int64)))
    return parts[0], parts[1]


def _read_cifar10(folder: Path) -> tuple[Arrays, Arrays]:
    batches = [
        read_cifar(folder / f"data_batch_{i}.bin", label_bytes=1, classes=10, records=10_000) for i in range(1, 6)
    ]
    train = np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])
    return train, read_cifar(folder / "test_batch.bin", label_bytes=1, classes=10, records=10_000)


def _read_cifar100(folder: Path) -> tuple[Arrays, Arrays]:
    return (
        read_cifar(folder / "train.bin", label_bytes=2, classes=100, records=50_000),
        read_cifar(folder / "test.bin", label_bytes=2, classes=100, records=10_000),
    )


def _read_digits(_: Path) -> tuple[Arrays, Arrays]:
    images, labels = read_digits()
    train, test = split_digits(labels)
    return (images[train], labels[train]), (images[test], labels[test])


_IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

_SOURCES = {
    "mnist": _Source(
        title="MNIST",
        folders=("mnist", "MNIST/raw", "MNIST"),
        files=_IDX_FILES,
        read=_read_mnist,
        classes=_DIGIT_CLASSES,
        channels=1,
        image_size=28,
        mean=(0.1307,),
        std=(0.3081,),
        where="the four IDX files of 'The MNIST database of handwritten digits' (LeCun, Cortes, Burges), plain or .gz; "
        "torchvision.datasets.MNIST(data_dir, download=True) puts them in MNIST/raw, which is found too",
    ),
    "fashion-mnist": _Source(
        title="Fashion-MNIST",
        folders=("fashion-mnist", "FashionMNIST/raw", "fashion"),
        files=_IDX_FILES,
        read=_read_mnist,
        classes=_CLOTHES,
        channels=1,
        image_size=28,
        mean=(0.2860,),
        std=(0.3530,),
        where="the four IDX files of Zalando Research's Fashion-MNIST, plain or .gz; "
        "torchvision.datasets.FashionMNIST(data_dir, download=True) puts them in FashionMNIST/raw, which is found too",
    ),
    "cifar10": _Source(
        title="CIFAR-10 (binary version)",
        folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
        files=("data_batch_1.bin", "test_batch.bin"),
        read=_read_cifar10,
        classes=_CIFAR10_CLASSES,
        channels=3,
        image_size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        where="the archive 'CIFAR-10 binary version (suitable for C programs)' from Alex Krizhevsky's CIFAR page, "
        "unpacked; its folder is cifar-10-batches-bin",
        augment=True,
    ),
    "cifar100": _Source(
        title="CIFAR-100 (binary version)",
        folders=("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100"),
        files=("train.bin", "test.bin"),
        read=_read_cifar100,
        classes=[str(label) for label in range(100)],
        channels=3,
        image_size=32,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        where="the archive 'CIFAR-100 binary version (suitable for C programs)' from Alex Krizhevsky's CIFAR page, "
        "unpacked; its folder is cifar-100-binary",
        augment=True,
    ),
    "digits": _Source(
        title="scikit-learn's digits",
        folders=(),
        files=(),
        read=_read_digits,
        classes=_DIGIT_CLASSES,
        channels=1,
        image_size=8,
        mean=(0.3053,),
        std=(0.3760,),
        where="they come with scikit-learn",
    ),
}


def names() -> list[str]:
    """The names that :func:`load` knows."""
    return list(_SOURCES)


def _is_here(folder: Path, files: tuple[str, ...]) -> bool:
    """Whether any of the files, in any spelling, lies in the folder (the reader then says which one is missing)."""
    spellings = {s for f in files for s in (f, f + ".gz", f.replace("-idx", ".idx"), f.replace("-idx", ".idx") + ".gz")}
    return any((folder / spelling).is_file() for spelling in spellings)


def _locate(name: str, source: _Source, data_dir: str | Path | None) -> Path:
    if not source.files:
        return Path()
    if data_dir is None:
        raise MissingDataError(f"{source.title} needs a data directory (--data-dir, data_dir=…) with {source.where}")
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise MissingDataError(f"{root}: no such folder; it should hold {source.where}")
    # MNIST and Fashion-MNIST have the same file names: a folder named for the other one must not pass for this one
    others = {f.split("/")[0] for other, s in _SOURCES.items() if other != name for f in s.folders}
    candidates = [root / folder for folder in source.folders]
    if root.resolve().name not in others - {f.split("/")[0] for f in source.folders}:
        candidates.append(root)
    for candidate in candidates:
        if _is_here(candidate, source.files):
            return candidate
    tried = ", ".join(str(candidate) for candidate in candidates)
    held = sorted(entry.name for entry in root.iterdir())
    found = ", ".join(held[:8]) + (", …" if len(held) > 8 else "") if held else "nothing"
    raise MissingDataError(
        f"{source.title} not found under {root} (it holds: {found}); looked for {source.files[0]} in {tried}. "
        f"Wanted: {source.where}"
    )


def load(
    name: str,
    data_dir: str | Path | None = None,
    *,
    augment: bool | None = None,
    flip: bool | None = None,
    limit: int | None = None,
) -> Splits:
    """Read a data set from disk. Nothing is ever downloaded.

    Parameters
    ----------
    name : str
        One of :func:`names`: mnist, fashion-mnist, cifar10, cifar100, digits.
    data_dir : str or Path, optional
        The folder of the files, or one above it: ``data_dir/mnist``, ``data_dir/MNIST/raw`` and ``data_dir`` are tried.
        Not needed for ``digits``, which come with scikit-learn.
    augment : bool, optional
        Whether training images are padded by four pixels and cropped at random, as in the paper (A.2). By default CIFAR
        is and the digits and clothes are not.
    flip : bool, optional
        Whether half of the training images are mirrored, left to right. By default those of CIFAR are, where they are
        augmented at all; digits and clothes never are unless this asks for it.
    limit : int, optional
        Keep the first ``limit`` training images only, for a quick try.

    Returns
    -------
    Splits
        Both parts, and what a network has to know of them.

    Raises
    ------
    ValueError
        If the name is unknown or ``limit`` is below 1.
    MissingDataError, CorruptDataError
        If files are missing, truncated or wrong; the message names the file, what was found, what is wanted and where
        it can be had.
    """
    if name not in _SOURCES:
        raise ValueError(f"data: got {name!r}, want one of {', '.join(names())}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: got {limit}, want 1 or more training images")
    source = _SOURCES[name]
    folder = _locate(name, source, data_dir)
    try:
        train, test = source.read(folder)
    except MissingDataError as error:
        raise MissingDataError(f"{error}. Wanted: {source.where}") from None
    except CorruptDataError as error:
        raise CorruptDataError(f"{error}. Wanted: {source.where}") from None
    augment = source.augment if augment is None else augment
    flip = source.augment and augment if flip is None else flip
    augmentation = RandomCropFlip(4 if augment else 0, flip=flip) if augment or flip else None
    return Splits(
        name=name,
        train=ImageDataset(train[0][:limit], train[1][:limit], mean=source.mean, std=source.std, augment=augmentation),
        test=ImageDataset(*test, mean=source.mean, std=source.std),
        classes=tuple(source.classes),
        in_channels=source.channels,
        image_size=source.image_size,
    )
