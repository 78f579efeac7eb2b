"""Reader of images in folders, one per class, by Pillow: resized to one size, in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import CorruptDataError, MissingDataError, read_by

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


def read_folder(
    folder: str | Path, *, classes: Sequence[str] | None = None, image_size: int | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return all images of a folder of classes, in the order of their names.

    Parameters
    ----------
    folder : str or Path
        Holds a folder for each class.
    classes : sequence of str, optional
        The classes' folders, so that a test set uses the training set's labels; by default :func:`class_names`.
    image_size : int, optional
        Height and width: the shorter side is resized to it, and the middle is cropped. Without it all images must be
        squares of one size.

    Returns
    -------
    images, labels : numpy.ndarray
        uint8 ``[n, 3, size, size]`` and int64 ``[n]``. MissingDataError if a folder or Pillow is missing, or a folder
        is empty; CorruptDataError if a file is damaged or not an image, or has more than 2²⁶ pixels by its header,
        channels of more than 8 bits, or another size than the first.
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


def _read_image(path: Path, size: int | None) -> npt.NDArray[np.uint8]:
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
