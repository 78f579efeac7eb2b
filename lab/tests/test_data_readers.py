"""Readers, on small files written here."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fastcaps_lab import data
from fastcaps_lab.data import CorruptDataError, MissingDataError
from fastcaps_lab.data.readers import STEMS, read_array, split_digits

MAGIC = {"int32": 0x1E3D4C54, "uint8": 0x1E3D4C55}
TREES = "(3 (2 (2 A) (3 (4 fine) (2 film))) (2 .))\n(1 (0 dull) (2 (1 film) (2 -LRB-)))\n\n"


def noise(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)


def write(folder: Path, files: dict[str, bytes], packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)


def idx_bytes(array: np.ndarray) -> bytes:
    """An IDX file, written from the format's description."""
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 30, test: int = 10, *, packed: bool = False) -> dict[str, np.ndarray]:
    """Four small files under MNIST's names; returns what they hold."""
    held = {}
    for stem, count in (("train", train), ("t10k", test)):
        held[f"{stem}-images-idx3-ubyte"] = noise(count, 28, 28)
        held[f"{stem}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    write(folder, {name: idx_bytes(array) for name, array in held.items()}, packed)
    return held


def cifar_bytes(records: int, classes: int) -> bytes:
    """A binary CIFAR file: the last label of record k is k."""
    labels = np.arange(records, dtype=np.uint8)[:, None].repeat(1 + (classes == 100), 1)
    return np.concatenate([labels, noise(records, 3072)], 1).tobytes()


def norb_bytes(array: np.ndarray) -> bytes:
    """A binary matrix, written from the format's description: at least three sizes."""
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return struct.pack(f"<II{len(sizes)}I", MAGIC[array.dtype.name], array.ndim, *sizes) + array.tobytes()


def write_norb(folder: Path, *, packed: bool = False) -> None:
    for stem, count in zip(STEMS.values(), (6, 4), strict=True):
        held = {"dat": noise(count, 2, 96, 96), "cat": (np.arange(count) % 5).astype(np.int32)}
        write(folder, {f"{stem}-{kind}.mat": norb_bytes(array) for kind, array in held.items()}, packed)


def write_svhn(path: Path, count: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": noise(32, 32, 3, count), "y": (np.arange(count) % 10 + 1)[:, None]}, do_compression=True)


def write_folder(folder: Path, sizes: tuple[tuple[int, int], ...] = ((8, 8), (8, 8))) -> dict[str, np.ndarray]:
    held = {}
    for name in ("bee", "ant"):
        (folder / name).mkdir(parents=True)
        for k, (height, width) in enumerate(sizes):
            held[f"{name}/{k}.png"] = noise(height, width, 3) + np.uint8(len(held))
            Image.fromarray(held[f"{name}/{k}.png"]).save(folder / name / f"{k}.png")
    (folder / "ant" / "notes.txt").write_text("no image")
    return held


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_arrays_of_every_format_come_back(tmp_path: Path, packed: bool) -> None:
    write_mnist(tmp_path, 4, packed=packed)
    write_norb(tmp_path / "smallnorb", packed=packed)
    end = ".gz" * packed
    images, labels = data.read_idx(
        tmp_path / f"train-images-idx3-ubyte{end}", tmp_path / f"train-labels-idx1-ubyte{end}"
    )
    assert np.array_equal(images, noise(4, 1, 28, 28)) and labels.dtype == np.int64 and labels.tolist() == [0, 1, 2, 3]
    images, labels = data.read_norb(tmp_path / "smallnorb", "test")
    assert np.array_equal(images, noise(4, 2, 96, 96)) and labels.tolist() == [0, 1, 2, 3]
    splits = data.load("smallnorb", tmp_path)
    assert (len(splits.train), len(splits.test), splits.in_channels, splits.image_size) == (6, 4, 2, 96)
    assert (splits.train.augment.padding, splits.train.augment.flip) == (16, False)
    pixels = noise(6, 2, 96, 96) / 255
    np.testing.assert_allclose(splits.train.mean.flatten(), pixels.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(splits.test.std.flatten(), pixels.std((0, 2, 3)), rtol=1e-5)
    for classes in (10, 100):
        write(tmp_path, {"x.bin": cifar_bytes(7, classes)})
        images, labels = data.read_cifar(tmp_path / "x.bin", classes=classes)
        assert np.array_equal(images, noise(7, 3072).reshape(7, 3, 32, 32)) and labels.tolist() == list(range(7))
    write_svhn(tmp_path / "svhn" / "train_32x32.mat", 11)
    write_svhn(tmp_path / "svhn" / "test_32x32.mat", 3)
    images, labels = data.read_svhn(tmp_path / "svhn" / "train_32x32.mat")
    assert images.dtype == np.uint8 and np.array_equal(images, noise(32, 32, 3, 11).transpose(3, 2, 0, 1))
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]  # 10 means the digit 0
    assert len(data.load("svhn", tmp_path).test) == 3


def test_digits_split_is_fixed_and_stratified() -> None:
    images, labels = data.read_digits()
    assert (images.shape, images.dtype, images.min(), images.max()) == ((1797, 1, 8, 8), np.uint8, 0, 255)
    train, test = split_digits(labels)
    assert sorted([*train, *test]) == list(range(1797))
    # another split would make every stated accuracy another figure
    assert len(test) == 359 and test[:6].tolist() == [3, 7, 13, 19, 36, 38]
    made, _ = data.load("digits").train.batch(slice(None))
    assert abs(float(made.mean())) < 0.02 and abs(float(made.std()) - 1) < 0.02


def test_folders_come_back(tmp_path: Path) -> None:
    held = write_folder(tmp_path / "train")
    write_folder(tmp_path / "val")
    splits = data.load("folder", tmp_path)
    assert splits.classes == ("ant", "bee") and (splits.in_channels, splits.image_size) == (3, 8)
    assert splits.train.labels.tolist() == splits.test.labels.tolist() == [0, 0, 1, 1]
    for k, name in enumerate(("ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png")):
        np.testing.assert_array_equal(splits.train.images[k], held[name].transpose(2, 0, 1))
    held = write_folder(tmp_path / "sizes", ((6, 14), (20, 6)))
    images, _ = data.read_folder(tmp_path / "sizes", image_size=6)
    np.testing.assert_array_equal(images[0], held["ant/0.png"][:, 4:10].transpose(2, 0, 1))
    np.testing.assert_array_equal(images[3], held["bee/1.png"][7:13].transpose(2, 0, 1))


def test_trees_give_every_unique_phrase(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TREES.encode())  # as some editors begin a file
    found = data.read_trees(path, phrases=True)
    assert dict(found) == {
        "A": 2, "fine": 4, "film": 2, "fine film": 3, "A fine film": 2, ".": 2, "A fine film .": 3,
        "dull": 0, "(": 2, "film (": 2, "dull film (": 1,
    }  # fmt: skip
    assert data.read_trees(path, phrases=False) == [("A fine film .", 3), ("dull film (", 1)]
    found = data.read_trees(path, phrases=True, classes=2)
    assert set(found) == {
        ("fine", 1), ("fine film", 1), ("A fine film .", 1), ("dull", 0), ("dull film (", 0),
    }  # fmt: skip


# --- damaged, wrong and missing files --------------------------------------------------------------------------------

DIGITS, CIFAR = idx_bytes(np.zeros((3, 28, 28), np.uint8)), cifar_bytes(3, 10)
FOUR, ONES = np.zeros((32, 32, 3, 4), np.uint8), np.ones((4, 1))
WRONG: dict[str, tuple[str, Callable[[Path], Any], list[tuple[Any, str]]]] = {
    "idx": ("train-images", lambda path: read_array(path, (None, 28, 28)), [
        (b"", "want an IDX file of uint8, any x 28 x 28; it has 0 bytes"),
        (b"\0\0\x0d\x01\0\0\0\0", "want an IDX file of uint8, .* begins with 00 00 0d 01"),
        (DIGITS[:-1], "truncated or too long; its header states 2,352 bytes, found 2,351"),
        (idx_bytes(np.zeros((3, 28, 27), np.uint8)), "holds 3 x 28 x 27, want any x 28 x 28"),
        (gzip.compress(DIGITS)[:-9], "gzip that ends early or is damaged"),
    ]),
    "norb": (f"{STEMS['train']}-dat.mat", lambda path: data.read_norb(path.parent, "train"), [
        (norb_bytes(noise(6, 2, 96, 96))[:-1], "header states 110,592 bytes, found 110,591"),
        (norb_bytes(np.zeros((5, 2, 96, 96), np.uint8)), "holds 5 x 2 x 96 x 96, want 6 x 2 x 96 x 96"),
    ]),
    "norb's labels": (f"{STEMS['train']}-cat.mat", lambda path: data.read_norb(path.parent, "train"), [
        (norb_bytes(np.full(6, 5, np.int32)), "holds the labels 5 to 5, want labels from 0 to 4"),
    ]),
    "cifar": ("x.bin", lambda path: data.read_cifar(path, classes=10), [
        (CIFAR[:-1], "truncated, or not the binary version: 9,218 bytes, want a multiple of 3,073"),
        (b"\x0b" + CIFAR[1:], "holds the labels 1 to 11, want labels from 0 to 9"),
    ]),
    "svhn": ("train_32x32.mat", data.read_svhn, [
        (lambda content: content[:9000] + bytes(50) + content[9050:], "SciPy cannot read X and y"),
        ({"X": FOUR}, "SciPy cannot read X and y .*KeyError: 'y'"),
        ({"X": FOUR[:, :31], "y": ONES}, r"holds uint8 \(32, 31, 3, 4\) and"),
        ({"X": FOUR, "y": ONES * 0}, "holds the labels 0 to 0, want labels from 1 to 10"),
        ({"X": FOUR, "y": ONES * 1.5}, "want X, .* y, whole numbers"),
    ]),
    "folder": ("train/bee/1.png", lambda path: data.read_folder(path.parents[1]), [
        (lambda content: content[:100], r"Pillow cannot read an image of PNG, .*\(OSError: .*trunc"),
        # which Pillow would hand to Ghostscript
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "Pillow cannot read an image of PNG"),
        (np.full((8, 8), 1000, np.uint16), "pixels of more than 8 bits, mode I"),
        (np.zeros((7, 7), np.uint8), "1.png: 7 x 7 pixels, want squares of the first image's size, 8 x 8"),
    ]),
    "trees": ("train.txt", lambda path: data.read_trees(path, phrases=True), [
        (b"(2 (2 A) (2 b)\n", "line 1: ends early; 1 brackets are not closed"),
        (b"(2 a)\n(5 b)\n", "line 2: .* starts no node with a label from 0 to 4"),
        (b"(2 a) b\n", "line 1: 'b' is outside of the tree"),
        (b"\n\n", "holds no tree, want one a line"),
        (b"(2 \xff\xfe)", "line 1: 'utf-8' codec can't decode"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_files_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    name, read, rows = WRONG[kind]
    path = tmp_path / name
    write_norb(tmp_path)
    write_folder(tmp_path / "train")
    if kind == "svhn":
        write_svhn(path)
    content = path.read_bytes() if path.exists() else b""
    for wrong, message in rows:
        if isinstance(wrong, np.ndarray):
            Image.fromarray(wrong).save(path)
        elif isinstance(wrong, dict):
            savemat(path, wrong)
        else:
            path.write_bytes(wrong(content) if callable(wrong) else wrong)
        with pytest.raises(CorruptDataError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    folder, sizes, half = tmp_path / "train", tmp_path / "sizes", tmp_path / "half"
    for where, *options in ((folder,), (half / "train",), (sizes / "train",), (sizes / "test", ((9, 9),))):
        write_folder(where, *options)
    write_norb(tmp_path)
    (tmp_path / f"{STEMS['train']}-cat.mat").unlink()
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    path = tmp_path / "train_32x32.mat"
    for call, error, message in (
        (lambda: data.read_folder(folder, classes=["ant"]), CorruptDataError, "holds folders for ant, bee, want ant"),
        (lambda: data.read_folder(tmp_path / "empty"), MissingDataError, "cat: holds no image"),
        (lambda: data.load("folder", sizes), CorruptDataError, "test images of 9 x 9 pixels, want 8 x 8 as in train"),
        (lambda: data.load("folder", half), MissingDataError, "half/test: no such folder with .* Wanted: folders"),
        (lambda: data.read_norb(tmp_path, "train"), MissingDataError, "training-cat.mat: no such file"),
        (lambda: data.read_svhn(path), MissingDataError, "x32.mat: no such file"),
        (lambda: data.read_trees(path, phrases=True), MissingDataError, "no such file; a file of the treebank's"),
    ):
        with pytest.raises(error, match=message):
            call()
