"""Image data from disk: IDX and binary CIFAR files, and the digits that ship with scikit-learn. Nothing is downloaded.

>>> from fastcaps import data
>>> splits = data.load("mnist", "path/to/data")  # doctest: +SKIP
>>> image, label = splits.train[0]  # doctest: +SKIP
"""

from fastcaps.data.batches import ShuffledBatches
from fastcaps.data.cifar import read_cifar
from fastcaps.data.digits import read_digits, split_digits
from fastcaps.data.errors import CorruptDataError, DataError, MissingDataError
from fastcaps.data.idx import read_idx
from fastcaps.data.images import ImageDataset, RandomCropFlip
from fastcaps.data.registry import Splits, load, names

__all__ = [
    "CorruptDataError",
    "DataError",
    "ImageDataset",
    "MissingDataError",
    "RandomCropFlip",
    "ShuffledBatches",
    "Splits",
    "load",
    "names",
    "read_cifar",
    "read_digits",
    "read_idx",
    "split_digits",
]
