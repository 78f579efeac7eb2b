"""Readers of the data sets' files: IDX (MNIST), binary matrices (smallNORB), CIFAR, MATLAB (SVHN), digits, images."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcaps_lab.data.files import Arrays, CorruptDataError, Images, Labels, MissingDataError, check_labels, find

NORB = {"uint8": bytes.fromhex("554c3d1e"), "int32": bytes.fromhex("544c3d1e")}
"""The first bytes of smallNORB's files, by the elements' dtype."""
STEMS = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training", "test": "smallnorb-5x01235x9x18x6x2x96x96-testing"}
"""The first parts of the names of smallNORB's files."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow reads more formats, whatever a file's name; PostScript would run in Ghostscript."""


def _content(path: Path) -> bytes:
    """Return a file's bytes, unpacked if they are gzip, whatever its name (a browser may unpack it and keep it)."""
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    content = path.read_bytes()
    try:
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorruptDataError(f"{path}: gzip that ends early or is damaged ({error}); copy it again") from error


def read_array(path: str | Path, shape: Sequence[int | None], *, norb: str = "") -> npt.NDArray[Any]:
    """Return the array of a file: a header with the sizes, and the elements in C order, plain or gzip.

    It is an IDX file of bytes, or, with a dtype of :data:`NORB`, one of smallNORB's. ``shape`` has None for any size.
    MissingDataError if there is no such file; CorruptDataError if it has another format, dtype or shape, other bytes
    than its header says, or damaged gzip.
    """
    path = Path(path)
    content, wanted = _content(path), " x ".join("any" if size is None else str(size) for size in shape)
    kind, magic = (f"a binary matrix of {norb}", NORB[norb]) if norb else ("an IDX file of uint8", b"\0\0\x08")
    # IDX counts its sizes in one byte, smallNORB in four, and has at least three of them
    start, sizes = (8, max(3, len(shape))) if norb else (4, len(shape))
    dims = int.from_bytes(content[4:8] if norb else content[3:4], "little")
    if not content.startswith(magic) or len(content) < start + 4 * sizes or dims != len(shape):
        raise CorruptDataError(
            f"{path}: want {kind}, {wanted}; it has {len(content):,} bytes and begins with {content[:4].hex(' ')}"
        )
    found = np.frombuffer(content, "<u4" if norb else ">u4", dims, start).tolist()
    if any(size not in (None, other) for size, other in zip(shape, found, strict=True)):
        raise CorruptDataError(f"{path}: holds {' x '.join(map(str, found))}, want {wanted}")
    dtype, start = np.dtype(norb or "uint8"), start + 4 * sizes
    if len(content) - start != math.prod(found) * dtype.itemsize:
        stated = math.prod(found) * dtype.itemsize
        raise CorruptDataError(
            f"{path}: truncated or too long; its header states {stated:,} bytes, found {len(content) - start:,}"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(found)


def read_idx(images: str | Path, labels: str | Path) -> Arrays:
    """Return images uint8 ``[n, 1, 28, 28]`` and labels int64 ``[n]``, 0 to 9, of two IDX files of MNIST's format."""
    pixels = read_array(images, (None, 28, 28))
    given = read_array(labels, (len(pixels),))
    check_labels(Path(labels), given, 10)
    return pixels[:, None], given.astype(np.int64)


def read_norb(folder: str | Path, part: str) -> Arrays:
    """Return "train" or "test" of smallNORB: pairs of images, uint8 ``[n, 2, 96, 96]``, and categories, int64 ``[n]``.

    The two channels are the left and the right camera; categories are 0 to 4. MissingDataError or CorruptDataError if
    a file is missing or wrong, or the two do not match.
    """
    images, categories = (find(folder, f"{STEMS[part]}-{kind}.mat") for kind in ("dat", "cat"))
    labels = read_array(categories, (None,), norb="int32").astype(np.int64)
    check_labels(categories, labels, 5)
    return read_array(images, (len(labels), 2, 96, 96), norb="uint8"), labels


def read_cifar(path: str | Path, *, classes: int) -> Arrays:
    """Return images uint8 ``[n, 3, 32, 32]`` and labels int64 ``[n]`` of a binary file of CIFAR-10 or CIFAR-100.

    A record is the label (CIFAR-100: the coarse class, then the label), then 3,072 bytes of image, red, green, blue,
    row by row. MissingDataError if there is no such file, CorruptDataError for a wrong size or label.
    """
    path, first = Path(path), 1 + (classes == 100)
    content = _content(path)
    if not content or len(content) % (first + 3072):
        raise CorruptDataError(
            f"{path}: truncated, or not the binary version: {len(content):,} bytes, want a multiple of {first + 3072:,}"
        )
    table = np.frombuffer(content, np.uint8).reshape(-1, first + 3072)
    labels = table[:, first - 1].astype(np.int64)
    check_labels(path, labels, classes)
    return table[:, first:].reshape(-1, 3, 32, 32), labels


def read_svhn(path: str | Path) -> Arrays:
    """Return uint8 ``[n, 3, 32, 32]`` and int64 ``[n]`` of a file of cropped digits, e.g. ``train_32x32.mat``.

    The file's label 10 is the digit 0. MissingDataError if there is no such file; CorruptDataError if it is damaged, or
    not a MATLAB file of the right arrays.
    """
    from scipy.io import loadmat

    path = find(Path(path).parent, Path(path).name)
    try:
        held = loadmat(path, variable_names=["X", "y"])
        images, labels = held["X"], held["y"][:, 0].astype(np.int64)
    except Exception as error:  # SciPy raises what its decoders raise
        raise CorruptDataError(
            f"{path}: SciPy cannot read X and y of SVHN's MATLAB files in it ({type(error).__name__}: {error})"
        ) from error
    if images.shape != (32, 32, 3, len(labels)) or images.dtype != np.uint8 or (labels != held["y"][:, 0]).any():
        raise CorruptDataError(
            f"{path}: holds {images.dtype} {images.shape} and {held['y'].dtype} {held['y'].shape}, want X, uint8 "
            "[32, 32, 3, n], and y, whole numbers [n, 1]"
        )
    check_labels(path, labels, 10, first=1)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels % 10


def read_digits() -> Arrays:
    """Return scikit-learn's handwritten digits, real data that need no download.

    uint8 ``[1797, 1, 8, 8]`` from 0 to 255 (the package stores 0 to 16), and int64 ``[1797]``.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def split_digits(labels: Labels) -> tuple[Labels, Labels]:
    """Return the fixed stratified split: indices for training and for testing, a fifth of every class.

    NumPy's legacy generator is frozen, so the split is the same in every version. Both parts contain digits of the same
    writers.
    """
    random = np.random.RandomState(0)
    members = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    held_out = np.sort(np.concatenate([each[: round(len(each) / 5)] for each in members]))
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


def class_names(folder: str | Path) -> tuple[str, ...]:
    """Return the names of a folder's folders, sorted: class k is the k-th. MissingDataError if there are none."""
    found = sorted(path.name for path in Path(folder).glob("[!.]*") if path.is_dir())
    if not found:
        raise MissingDataError(f"{folder}: no such folder with a folder of images for each class")
    return tuple(found)


def read_folder(folder: str | Path, *, classes: Sequence[str] | None = None, image_size: int | None = None) -> Arrays:
    """Return all images of a folder of classes, uint8 ``[n, 3, size, size]``, and their labels, int64 ``[n]``.

    ``folder`` holds a folder for each class; ``classes`` are their names, by default :func:`class_names`, so that a
    test set can use the training set's labels. With ``image_size`` the shorter side is resized to it, and the middle is
    cropped; without it all images must be squares of one size.

    MissingDataError if a folder is missing or empty; CorruptDataError if a file is damaged or not an image, has
    channels of more than 8 bits, or another size than the first.
    """
    folder, names = Path(folder), class_names(folder)
    classes = names if classes is None else tuple(classes)
    if names != classes:
        raise CorruptDataError(f"{folder}: holds folders for {', '.join(names)}, want {', '.join(classes)}")
    found = [sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES) for name in classes]
    for name, paths in zip(classes, found, strict=True):
        if not paths:
            raise MissingDataError(f"{folder / name}: holds no image; want files named {', '.join(SUFFIXES)}")
    first = _read_image(found[0][0], image_size)
    images = np.empty((sum(map(len, found)), *first.shape), np.uint8)  # np.stack of a list would take twice the memory
    for index, path in enumerate(path for paths in found for path in paths):
        pixels = _read_image(path, image_size)
        if pixels.shape != first.shape or pixels.shape[1] != pixels.shape[2]:
            raise CorruptDataError(
                f"{path}: {pixels.shape[2]} x {pixels.shape[1]} pixels, want squares of the first image's size, "
                f"{first.shape[2]} x {first.shape[1]}; image_size= brings all to one"
            )
        images[index] = pixels
    return images, np.repeat(np.arange(len(classes)), [len(paths) for paths in found])


def _read_image(path: Path, size: int | None) -> Images:
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=FORMATS) as opened:
            if opened.mode in ("I", "F") or opened.mode.startswith("I;"):  # Pillow would cut them at 255
                raise ValueError(f"pixels of more than 8 bits, mode {opened.mode}")
            image = opened.convert("RGB")
            if size is not None:
                image = ImageOps.fit(image, (size, size), method=Image.Resampling.BILINEAR)
            return np.asarray(image).transpose(2, 0, 1)
    except Exception as error:  # Pillow raises what its decoders raise
        raise CorruptDataError(
            f"{path}: Pillow cannot read an image of {', '.join(FORMATS)} in it ({type(error).__name__}: {error})"
        ) from error
