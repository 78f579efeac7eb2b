"""Data sets: readers of files on disk, generators, transforms. Nothing is downloaded.

>>> from fastcaps import data
>>> splits = data.load("mnist", "path/to/data")  # doctest: +SKIP
>>> image, label = splits.train[0]  # doctest: +SKIP
"""

from fastcaps.checks import suggest
from fastcaps.data.batches import ShuffledBatches
from fastcaps.data.draws import Draws
from fastcaps.data.files import CorruptDataError, DataError, MissingDataError
from fastcaps.data.generators import AffineDigits, OverlappingDigits, ShiftedDigits
from fastcaps.data.images import BatchDataset, ImageDataset
from fastcaps.data.readers import read_cifar, read_digits, read_folder, read_idx, read_norb, read_svhn, split_digits
from fastcaps.data.registry import Splits, load, names
from fastcaps.data.text import Phrases, TextDataset, TextEmbedder, Treebank, load_treebank, read_trees
from fastcaps.data.transforms import Chain, ColorJitter, Mixup, RandomCropFlip, ResizeCrop, crops

__all__ = [
    "Splits", "load", "names", "Phrases", "TextEmbedder", "Treebank", "load_treebank", "read_cifar", "read_digits",
    "read_folder", "read_idx", "read_norb", "read_svhn", "read_trees", "split_digits", "AffineDigits",
    "BatchDataset", "ImageDataset", "OverlappingDigits", "ShiftedDigits", "ShuffledBatches", "TextDataset", "Chain",
    "ColorJitter", "Draws", "Mixup", "RandomCropFlip", "ResizeCrop", "crops", "CorruptDataError", "DataError",
    "MissingDataError",
]  # fmt: skip
suggest(__name__, ": data sets are read by load(name, data_dir), and names() lists them")
