"""Readers of the data sets' files: IDX (MNIST), binary matrices (smallNORB), CIFAR, MATLAB (SVHN), digits, images.

IDX files and smallNORB's are a header and an array: the element type, the number of dimensions, their sizes, then the
elements in C order.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from fastcaps_lab.data import files
from fastcaps_lab.data.files import Arrays, CorruptDataError, Images, Labels, MissingDataError, check_labels, read_by

GZIP_MAGIC = b"\x1f\x8b"
MOST_BYTES = 2**31
"""The maximum for an array, by its header; the largest file of these data sets, smallNORB's, has 448 MB."""


class Format(NamedTuple):
    """A format of a header and an array: a magic number, the number of dimensions, their sizes, the elements."""

    kind: str  # the format's name in messages
    magic: dict[str, bytes]  # the magic numbers of the elements' dtypes
    head: str  # struct format of magic number and number of dimensions
    size: str  # struct format of a size
    fewest: int = 0  # minimum number of sizes in the file; those beyond the dimensions are ignored


def _header(stream: IO[bytes], path: Path, form: Format, dtype: str) -> tuple[int, ...]:
    begin = stream.read(struct.calcsize(form.head))
    magic, dims = struct.unpack(form.head, begin) if len(begin) == struct.calcsize(form.head) else (b"", 0)
    if magic != (wanted := form.magic[dtype]):
        raise CorruptDataError(
            f"{path}: not {form.kind}, of {dtype}; {files.first_bytes(begin)}, want {wanted.hex(' ')}"
        )
    if dims > 64:
        raise CorruptDataError(f"{path}: its header states {dims:,} dimensions, want 64 or fewer")
    header = stream.read(4 * max(dims, form.fewest))
    if len(header) < 4 * max(dims, form.fewest):
        raise CorruptDataError(f"{path}: {len(begin + header)} bytes, too short for the header of {dims} dimensions")
    return tuple(size for (size,) in struct.iter_unpack(form.size, header))[:dims]


def read_array(
    path: str | Path, form: Format, dtype: str, shape: tuple[int | None, ...] | None = None
) -> npt.NDArray[Any]:
    """Return the array of a file, plain or gzip; elements are read only after the header passed its checks.

    The first bytes decide whether a file is compressed, not its name (a browser may unpack it and keep the name).
    ``dtype`` and ``shape`` are what the caller wants, ``None`` for any size. MissingDataError if there is no such file;
    CorruptDataError if it has another format, dtype or shape, other bytes than its header says, or damaged gzip.
    """
    path = files.existing(path, f"{form.kind}, plain or gzip,")
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        try:
            with gzip.open(file) if packed else file as opened:
                stream = cast(IO[bytes], opened)
                sizes = _header(stream, path, form, dtype)
                wanted = sizes if shape is None else shape
                if len(sizes) != len(wanted) or any(w not in (None, s) for s, w in zip(sizes, wanted, strict=True)):
                    raise CorruptDataError(f"{path}: holds {files.sizes_text(sizes)}, want {files.sizes_text(wanted)}")
                count = math.prod((np.dtype(dtype).itemsize, *sizes))  # a Python int, as it may exceed 64 bits
                stated = f"its header states {files.sizes_text(sizes)} = {count:,} bytes"
                if count > MOST_BYTES:
                    raise CorruptDataError(f"{path}: too large; {stated}, want {MOST_BYTES:,} or less")
                content = stream.read(count)
                found = len(content) + len(stream.read(1))  # at the end gzip compares its checksum, too
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorruptDataError(f"{path}: gzip that ends early or is damaged ({error}); copy it again") from error
    if found != count:
        raise CorruptDataError(f"{path}: {'truncated' if found < count else 'too long'}; {stated}, found {found:,}")
    try:
        return np.frombuffer(content, dtype=dtype).reshape(sizes)
    except ValueError as error:  # for sizes such as 0 x 4294967295 x 4294967295
        raise CorruptDataError(f"{path}: {stated}, which is no array ({error})") from error


_IDX = Format("an IDX file", {"uint8": b"\0\0\x08"}, head=">3sB", size=">I")


def read_idx(path: str | Path, *, shape: tuple[int | None, ...] | None = None) -> Images:
    """Return the array of an IDX file of unsigned bytes, plain or gzip; ``shape`` has None for any size.

    MissingDataError if there is no such file; CorruptDataError if it is no IDX file, is truncated or too long, or has
    another type or shape.
    """
    return read_array(path, _IDX, "uint8", shape)


STEMS = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training", "test": "smallnorb-5x01235x9x18x6x2x96x96-testing"}
"""The first parts of the names of smallNORB's files."""
NORB = Format(
    "a binary matrix of smallNORB (MATLAB's are others)",
    {"uint8": bytes.fromhex("554c3d1e"), "int32": bytes.fromhex("544c3d1e")},
    head="<4sI",
    size="<I",
    fewest=3,
)


def read_norb(folder: str | Path, *, train: bool) -> tuple[Images, Labels, Labels]:
    """Return one half of smallNORB: pairs of images, their categories, and how each toy was photographed.

    uint8 ``[n, 2, 96, 96]`` (left and right camera); int64 ``[n]``, 0 to 4; int64 ``[n, 4]``: the toy's number, its
    elevation (0 to 8), azimuth (0 to 34, even) and lighting (0 to 5). MissingDataError or CorruptDataError if one of
    the three files is missing or wrong, or they do not match.
    """
    stem = STEMS["train" if train else "test"]
    images, categories, info = (files.find(Path(folder), f"{stem}-{kind}.mat") for kind in ("dat", "cat", "info"))
    # the small files first, to refuse files that do not match before unpacking 448 MB
    labels = read_array(categories, NORB, "int32", (None,)).astype(np.int64)
    check_labels(categories, labels, 0, 4)
    count = len(labels)
    rest = read_array(info, NORB, "int32", (count, 4)).astype(np.int64)
    return read_array(images, NORB, "uint8", (count, 2, 96, 96)), labels, rest


_HINTS = {
    GZIP_MAGIC: " (it looks like a gzip archive; unpack it first)",
    b"\x80\x02": " (it looks like the Python version of CIFAR; the binary version is wanted)",
}


def read_cifar(path: str | Path, *, label_bytes: int, classes: int, records: int | None = None) -> Arrays:
    """Return images uint8 ``[n, 3, 32, 32]`` and labels int64 ``[n]`` of a binary CIFAR file.

    A record is ``label_bytes`` (CIFAR-100: the coarse class, then the fine one), the last of which is the label, below
    ``classes``; then 3,072 bytes of image, red, green, blue, row by row. ``records`` is how many the file must hold,
    None for any number. MissingDataError if there is no such file, CorruptDataError for a wrong size or label.
    """
    path = files.existing(path, "a binary CIFAR file")
    size, record = path.stat().st_size, label_bytes + 3 * 32 * 32
    if size == 0 or size % record or records not in (None, size // record):
        with path.open("rb") as file:
            hint = _HINTS.get(file.read(2), "")
        wanted = "a multiple of" if records is None else f"{records:,} records of"
        raise CorruptDataError(f"{path}: truncated or wrong file: {size:,} bytes, want {wanted} {record:,}{hint}")
    table = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
    labels = table[:, label_bytes - 1].astype(np.int64)
    check_labels(path, labels, 0, classes - 1)
    return table[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def read_svhn(path: str | Path) -> Arrays:
    """Return uint8 ``[n, 3, 32, 32]`` and int64 ``[n]`` of a file of cropped digits, e.g. ``train_32x32.mat``.

    The file's label 10 is the digit 0. MissingDataError if the file or SciPy is missing; CorruptDataError if it is
    damaged, or not a MATLAB file of the right arrays. Sizes are checked first.
    """
    path = files.existing(path, "a MATLAB file of SVHN's cropped digits")
    with read_by("SciPy", path, "a MATLAB file"):
        from scipy.io import loadmat, whosmat

        held: dict[str, tuple[tuple[int, ...], str]] = {name: (sizes, kind) for name, sizes, kind in whosmat(path)}
    sizes, kind = held.get("X", ((), "absent"))
    count = sizes[3] if len(sizes) == 4 else 0
    of_labels, plain = held.get("y", ((), ""))
    if kind != "uint8" or sizes != (32, 32, 3, count) or count == 0 or of_labels != (count, 1) or plain == "cell":
        found = (
            ", ".join(f"{name} ({kind} {files.sizes_text(sizes)})" for name, (sizes, kind) in held.items()) or "nothing"
        )
        raise CorruptDataError(
            f"{path}: truncated or wrong file: holds {found}; want X (uint8 32 x 32 x 3 x n) and y (n x 1)"
        )
    with read_by("SciPy", path, "a MATLAB file"), np.errstate(invalid="ignore"):  # a NaN raises below
        arrays: dict[str, Any] = loadmat(path, variable_names=["X", "y"])
        images, given = arrays["X"], arrays["y"][:, 0]
        labels = given.astype(np.int64)
    if not (same := labels == given).all():  # MATLAB keeps whole numbers as doubles, too
        raise CorruptDataError(f"{path}: holds the label {given[same.argmin()]}, want whole numbers from 1 to 10")
    check_labels(path, labels, 1, 10)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels % 10


def read_digits() -> Arrays:
    """Return scikit-learn's handwritten digits, real data that need no download.

    uint8 ``[1797, 1, 8, 8]`` from 0 to 255 (the package stores 0 to 16), and int64 ``[1797]``.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # from 0..16 to 0..255, as in the other data sets
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return images, bunch.target.astype(np.int64)


def split_digits(labels: Labels) -> tuple[Labels, Labels]:
    """Return the fixed stratified split: indices for training and for testing, a fifth of every class.

    NumPy's legacy generator is frozen, so the split is the same in every version. Both parts contain digits of the same
    writers.
    """
    random = np.random.RandomState(0)
    test = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(len(members) / 5)])
    held_out = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow reads more formats, whatever a file's name; PostScript would run in Ghostscript."""
MOST_PIXELS = 2**26
"""The maximum for an image, by its header: 8,192 x 8,192."""


def class_names(folder: str | Path) -> tuple[str, ...]:
    """Return the names of a folder's folders, sorted: class k is the k-th. MissingDataError if there are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingDataError(f"{folder}: no such folder; it should hold a folder of images for each class")
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise MissingDataError(f"{folder}: holds no folder; want one for each class, with its images")
    return tuple(found)


def read_folder(folder: str | Path, *, classes: Sequence[str] | None = None, image_size: int | None = None) -> Arrays:
    """Return all images of a folder of classes, uint8 ``[n, 3, size, size]``, and their labels, int64 ``[n]``.

    ``folder`` holds a folder for each class; ``classes`` are their names, by default :func:`class_names`, so that a
    test set can use the training set's labels. With ``image_size`` the shorter side is resized to it, and the middle is
    cropped; without it all images must be squares of one size.

    MissingDataError if a folder or Pillow is missing, or a folder is empty; CorruptDataError if a file is damaged or
    not an image, or has more than 2²⁶ pixels by its header, channels of more than 8 bits, or another size than the
    first.
    """
    folder = Path(folder)
    if image_size is not None and not 1 <= image_size**2 <= MOST_PIXELS:
        raise ValueError(f"image_size: got {image_size}, want 1 to {math.isqrt(MOST_PIXELS)}")
    names = class_names(folder)
    classes = names if classes is None else tuple(classes)
    if unknown := sorted(set(names) - set(classes)):
        raise CorruptDataError(f"{folder / unknown[0]}: not one of the classes {', '.join(classes)}")
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not found:
            raise MissingDataError(f"{folder / name}: holds no image; want files named {', '.join(SUFFIXES)}")
        paths += found
        labels += [label] * len(found)
    shape = _read_image(paths[0], image_size).shape
    images = np.empty((len(paths), *shape), np.uint8)  # np.stack of a list would take twice the memory
    for index, path in enumerate(paths):
        pixels = _read_image(path, image_size)
        if pixels.shape != shape or shape[1] != shape[2]:
            raise CorruptDataError(
                f"{path}: {pixels.shape[2]} x {pixels.shape[1]} pixels, want squares of one size (the first image, "
                f"{paths[0]}, has {shape[2]} x {shape[1]}); image_size= brings all to one"
            )
        images[index] = pixels
    return images, np.array(labels, dtype=np.int64)


def _read_image(path: Path, size: int | None) -> Images:
    with read_by("Pillow", path, f"an image of {', '.join(FORMATS)}"):
        from PIL import Image, ImageOps

        with Image.open(path, formats=FORMATS) as opened:  # reads the header only
            width, height = opened.size
            if width * height > MOST_PIXELS:
                raise CorruptDataError(
                    f"{path}: its header states {width:,} x {height:,} pixels, want {MOST_PIXELS:,} or fewer"
                )
            if opened.mode in ("I", "F") or opened.mode.startswith("I;"):  # Pillow would cut them at 255
                raise CorruptDataError(f"{path}: pixels of more than 8 bits (Pillow's mode {opened.mode}), want bytes")
            if size is None:
                image = opened.convert("RGB")
            else:
                opened.draft("RGB", (size, size))  # a JPEG may be decoded at a fraction of its size
                image = ImageOps.fit(opened.convert("RGB"), (size, size), method=Image.Resampling.BILINEAR)
            return np.asarray(image).transpose(2, 0, 1)
