"""Data sets: readers of files on disk, generators, transforms. Nothing is downloaded.

>>> from fastcaps_lab import data
>>> splits = data.load("mnist", "path/to/data")  # doctest: +SKIP
>>> image, label = splits.train[0]  # doctest: +SKIP
"""

from fastcaps_lab.data.batches import ShuffledBatches
from fastcaps_lab.data.files import CorruptDataError, DataError, MissingDataError
from fastcaps_lab.data.generators import AffineDigits, OverlappingDigits, ShiftedDigits
from fastcaps_lab.data.images import BatchDataset, ImageDataset
from fastcaps_lab.data.readers import read_cifar, read_digits, read_folder, read_idx, read_norb, read_svhn
from fastcaps_lab.data.registry import Splits, load, names
from fastcaps_lab.data.text import TextDataset, TextEmbedder, read_trees
from fastcaps_lab.data.transforms import Mixup, RandomCropFlip, ResizeCrop

__all__ = [
    "Splits", "load", "names", "TextEmbedder", "read_cifar", "read_digits", "read_folder", "read_idx",
    "read_norb", "read_svhn", "read_trees", "AffineDigits", "BatchDataset", "ImageDataset", "OverlappingDigits",
    "ShiftedDigits", "ShuffledBatches", "TextDataset", "Mixup", "RandomCropFlip", "ResizeCrop", "CorruptDataError",
    "DataError", "MissingDataError",
]  # fmt: skip
