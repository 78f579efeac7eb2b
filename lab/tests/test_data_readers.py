"""Readers, on small files written here."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fastcaps_lab import data
from fastcaps_lab.data import CorruptDataError, MissingDataError
from fastcaps_lab.data.readers import STEMS

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


def cifar_bytes(records: int, label_bytes: int, classes: int) -> bytes:
    """A binary CIFAR file: the last label of record k is k modulo the classes."""
    labels = np.arange(records)[:, None].repeat(label_bytes, 1) % classes
    return np.concatenate([labels.astype(np.uint8), noise(records, 3072)], 1).tobytes()


def norb_bytes(array: np.ndarray) -> bytes:
    """A binary matrix, written from the format's description: at least three sizes."""
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return struct.pack(f"<II{len(sizes)}I", MAGIC[array.dtype.name], array.ndim, *sizes) + array.tobytes()


def write_norb(folder: Path, *, packed: bool = False) -> dict[str, np.ndarray]:
    held: dict[str, np.ndarray] = {}
    for stem, count in zip(STEMS.values(), (6, 4), strict=True):
        held[f"{stem}-dat.mat"] = noise(count, 2, 96, 96)
        held[f"{stem}-cat.mat"] = (np.arange(count) % 5).astype(np.int32)
        held[f"{stem}-info.mat"] = noise(count, 4).astype(np.int32)
    write(folder, {name: norb_bytes(array) for name, array in held.items()}, packed)
    return held


def write_svhn(path: Path, count: int = 7) -> np.ndarray:
    images = noise(32, 32, 3, count)
    labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images, "y": labels}, do_compression=True)
    return images


def write_folder(folder: Path, sizes: tuple[tuple[int, int], ...] = ((8, 8), (8, 8))) -> dict[str, np.ndarray]:
    held = {}
    for name in ("bee", "ant"):
        (folder / name).mkdir(parents=True)
        for k, (height, width) in enumerate(sizes):
            held[f"{name}/{k}.png"] = noise(height, width, 3) + np.uint8(len(held))
            Image.fromarray(held[f"{name}/{k}.png"]).save(folder / name / f"{k}.png")
    (folder / "ant" / "notes.txt").write_text("no image")
    return held


def write_trees(folder: Path) -> None:
    dev = b"(2 (3 nice) (2 film))\n(4 (3 very) (3 nice))\n"
    write(folder, {"train.txt": TREES.encode(), "dev.txt": dev, "test.txt": b"(0 bad)\n"})


def refused(call: Callable[[], Any], path: Path, message: str, most_bytes: int = 4_000_000) -> None:
    """A call refuses a file by name, and without holding more memory than it needs."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError, match=message) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and isinstance(caught.value, ValueError)


# --- files of arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_arrays_behind_a_header_round_trip(tmp_path: Path, packed: bool) -> None:
    for shape in ((0, 28, 28), (2, 3, 5, 7)):
        array, path = noise(*shape), tmp_path / "file"  # whose name does not say what it is
        path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
        read = data.read_idx(path, shape=(None, *shape[1:]))
        assert read.dtype == np.uint8 and np.array_equal(read, array)
    held = write_norb(tmp_path / "smallnorb", packed=packed)
    found = data.read_norb(tmp_path / "smallnorb", train=False)
    for kind, array, dtype in zip(("dat", "cat", "info"), found, (np.uint8, np.int64, np.int64), strict=True):
        assert array.dtype == dtype and np.array_equal(array, held[f"{STEMS['test']}-{kind}.mat"])
    splits = data.load("smallnorb", tmp_path)
    assert (len(splits.train), len(splits.test), splits.in_channels, splits.image_size) == (6, 4, 2, 96)
    made = splits.train.augment
    assert (made.padding, made.flip) == (16, False)
    pixels = held[f"{STEMS['train']}-dat.mat"] / 255
    np.testing.assert_allclose(splits.train.mean.flatten(), pixels.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(splits.test.std.flatten(), pixels.std((0, 2, 3)), rtol=1e-5)


def test_cifar_and_svhn_round_trip(tmp_path: Path) -> None:
    for label_bytes, classes in ((1, 10), (2, 100)):
        (tmp_path / "x.bin").write_bytes(cifar_bytes(7, label_bytes, classes))
        images, labels = data.read_cifar(tmp_path / "x.bin", label_bytes=label_bytes, classes=classes, records=7)
        assert np.array_equal(images, noise(7, 3072).reshape(7, 3, 32, 32))
        assert labels.tolist() == list(range(7)) and labels.dtype == np.int64
    held = write_svhn(tmp_path / "svhn" / "train_32x32.mat", 11)
    write_svhn(tmp_path / "svhn" / "test_32x32.mat", 3)
    images, labels = data.read_svhn(tmp_path / "svhn" / "train_32x32.mat")
    assert images.dtype == np.uint8 and np.array_equal(images, held.transpose(3, 2, 0, 1))
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]  # 10 means the digit 0
    splits = data.load("svhn", tmp_path)
    assert (len(splits.train), len(splits.test), splits.in_channels, splits.image_size) == (11, 3, 3, 32)


DIGITS, CIFAR = idx_bytes(np.zeros((3, 28, 28), np.uint8)), cifar_bytes(3, 1, 10)
FOUR, ONES = np.zeros((32, 32, 3, 4), np.uint8), np.ones((4, 1))
CELLS = np.array([[np.zeros(80_000)], *[[0]] * 3], object)


def header(*sizes: int) -> bytes:
    """An IDX file that ends where its array would begin."""
    return bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes)


def before_zeros(content: bytes) -> bytes:
    """A file that is small when packed only."""
    return gzip.compress(content + bytes(64_000_000), 1)


Read = Callable[[Path], Any]
WRONG: dict[str, tuple[str, Read, list[tuple[Any, str]]]] = {
    "idx": ("train-images", lambda path: data.read_idx(path, shape=(None, 28, 28)), [
        (b"", r"not an IDX file, of uint8; it begins with the bytes \(none\)"),
        (b"\0\0\x0d\x01\0\0\0\0", "not an IDX file, of uint8; it begins with the bytes 00 00 0d 01, want 00 00 08"),
        (b"\0\0\x08\x03\0\0", "6 bytes, too short for the header of 3 dimensions"),
        (DIGITS[:-1], "truncated; its header states 3 x 28 x 28 = 2,352 bytes, found 2,351"),
        (DIGITS + b"x", "too long; .* found 2,353"),
        (idx_bytes(np.zeros((3, 28, 27), np.uint8)), "holds 3 x 28 x 27, want any x 28 x 28"),
        (gzip.compress(DIGITS, mtime=0)[:-9], "gzip that ends early or is damaged"),
        (gzip.compress(b"", mtime=0)[:10] + b"\xff" * 40, "gzip that ends early or is damaged .*invalid block type"),
        (before_zeros(header(2**31, 28, 28)), "too large; its header .* want 2,147,483,648 or less"),
        (before_zeros(header(10, 28, 28)), "too long; its header .* = 7,840 bytes, found 7,841"),
    ]),
    "idx of any shape": ("train-images", data.read_idx, [
        (header(0, 2**32 - 1, 2**32 - 1), r"header states .* which is no array \("),
        (header(*[1] * 65) + b"x", "header states 65 dimensions"),
        (header(2**31, 2**31, 2, 2) + b"x", "header states .* = 18,446,744,073"),
    ]),
    "norb": (f"{STEMS['train']}-dat.mat", lambda path: data.read_norb(path.parent, train=True), [
        (norb_bytes(noise(6, 2, 96, 96))[:-1], "truncated; .* 96 = 110,592 bytes, found 110,591"),
        (b"MATLAB 5.0 MAT-file", "not a binary matrix of smallNORB .* begins with the bytes 4d 41 54 4c"),
        (norb_bytes(np.zeros((6, 2), np.int32)), "of uint8; it begins with the bytes 54 4c 3d 1e, want 55 4c 3d 1e"),
        (norb_bytes(np.zeros((5, 2, 96, 96), np.uint8)), "holds 5 x 2 x 96 x 96, want 6 x 2 x 96 x 96"),
        (struct.pack("<II", MAGIC["uint8"], 2**31), "its header states 2,147,483,648 dimensions, want 64"),
    ]),
    "norb's labels": (f"{STEMS['train']}-cat.mat", lambda path: data.read_norb(path.parent, train=True), [
        (norb_bytes(np.full(6, 5, np.int32)), "holds the labels 5 to 5, want 0 to 4"),
    ]),
    "cifar": ("x.bin", lambda path: data.read_cifar(path, label_bytes=1, classes=10), [
        (CIFAR[:-1], "truncated or wrong file: 9,218 bytes, want a multiple of 3,073"),
        (b"", "file: 0 bytes, want a multiple"),
        (b"\x80\x02" + CIFAR, "Python version of CIFAR"),
        (b"\x1f\x8b" + CIFAR, "gzip archive; unpack it first"),
        (b"\x0b" + CIFAR[1:], "holds the labels 1 to 11, want 0 to 9"),
    ]),
    "cifar of so many": ("x.bin", lambda path: data.read_cifar(path, label_bytes=1, classes=10, records=4), [
        (CIFAR, "9,219 bytes, want 4 records of 3,073"),
        (2**33, "8,589,934,592 bytes, want"),
    ]),
    "svhn": ("train_32x32.mat", data.read_svhn, [
        (lambda whole: whole[: len(whole) // 2], r"wrong file: holds X \(uint8 32 x 32 x 3 x 7\); want X .* and y"),
        (lambda whole: whole[:140], "140 bytes that SciPy cannot read as a MATLAB file"),
        (lambda whole: whole[:9000] + bytes(50) + whole[9050:], "bytes that SciPy cannot read as a MATLAB file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(600), "SciPy cannot read"),
        ({"X": FOUR[:, :31], "y": ONES}, "holds X .uint8 32 x 31 x 3 x 4., y"),
        ({"X": FOUR.astype(float), "y": ONES}, r"holds X \(double"),
        ({"X": FOUR, "y": ONES[:3]}, r"y \(double 3 x 1\); want"),
        ({"X": FOUR, "y": ONES * 0}, "holds the labels 0 to 0, want 1 to 10"),
        ({"X": FOUR, "y": ONES * 1.5}, "holds the label 1.5, want whole"),
        ({"X": FOUR, "y": CELLS}, r"y \(cell 4 x 1\); want X"),
        # sizes are read before 12 MB are
        ({"X": noise(32, 32, 3, 4000), "y": ONES}, r"X \(uint8 32 x 32 x 3 x 4000\)"),
    ]),
    "folder": ("train/bee/1.png", lambda path: data.read_folder(path.parents[1]), [
        (lambda whole: whole[:100], r"100 bytes that Pillow cannot read as an image of PNG, .*\(OSError: .*trunc"),
        (b"GIF of old", "cannot read as an image of PNG, .*; it begins with the bytes 47 49 46 20"),
        # which Pillow would hand to Ghostscript
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "begins with the bytes 25 21 50 53"),
        (np.zeros((9000, 9000), np.uint8), "states 9,000 x 9,000 pixels, want 67,10"),
        (np.full((8, 8), 1000, np.uint16), r"1.png: pixels of more than 8 bits .Pillow's mode I.*want bytes"),
        (np.zeros((7, 7), np.uint8), r"1.png: 7 x 7 pixels, want squares of one size .* has 8 x 8"),
    ]),
    "trees": ("train.txt", lambda path: data.read_trees(path, phrases=True), [
        (b"(2 (2 A) (2 b)\n", "line 1: ends early; 1 brackets are not closed"),
        (b"(2 a)\n(5 b)\n", "line 2: a node has the label '5', want 0 to 4"),
        (b"(2 a) b\n", "line 1: 'b' is outside of the tree"),
        (b"(2 (3 ) a)\n", "line 1: a node holds no word"),
        (b"(", "line 1: a node has the label ''"),
        (b"\n\n", "holds no tree, want one a line"),
        (b"(2 \xff\xfe)", "line 1: no UTF-8 text"),
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
    whole = path.read_bytes() if path.exists() else b""
    for content, message in rows:
        if isinstance(content, np.ndarray):
            Image.fromarray(content).save(path)
        elif isinstance(content, dict):
            savemat(path, content, do_compression=True)
        elif isinstance(content, int):
            with path.open("wb") as file:
                file.truncate(content)  # takes no room on disk
        else:
            path.write_bytes(content(whole) if callable(content) else content)
        refused(lambda: read(path), path, message)


# --- digits and folders ----------------------------------------------------------------------------------------------


def test_digits_split_is_fixed_and_stratified() -> None:
    images, labels = data.read_digits()
    assert (images.shape, images.dtype, images.min(), images.max()) == ((1797, 1, 8, 8), np.uint8, 0, 255)
    train, test = data.split_digits(labels)
    assert sorted([*train, *test]) == list(range(1797))
    # another split would make every stated accuracy another figure
    assert len(test) == 359 and test[:6].tolist() == [3, 7, 13, 19, 36, 38]
    for digit in range(10):
        assert abs((labels[test] == digit).sum() - (labels == digit).sum() / 5) <= 0.5
    made, _ = data.load("digits").train.batch(slice(None))
    assert abs(float(made.mean())) < 0.02 and abs(float(made.std()) - 1) < 0.02


def test_folders_round_trip(tmp_path: Path) -> None:
    held = write_folder(tmp_path / "train")
    write_folder(tmp_path / "val")
    images, labels = data.read_folder(tmp_path / "train")
    assert labels.tolist() == [0, 0, 1, 1]
    for k, name in enumerate(("ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png")):
        np.testing.assert_array_equal(images[k], held[name].transpose(2, 0, 1))
    splits = data.load("folder", tmp_path)
    assert splits.classes == ("ant", "bee") and (splits.in_channels, splits.image_size) == (3, 8)
    assert torch.equal(splits.test.labels, torch.tensor([0, 0, 1, 1]))
    held = write_folder(tmp_path / "sizes", ((6, 14), (20, 6)))
    images, _ = data.read_folder(tmp_path / "sizes", image_size=6)
    np.testing.assert_array_equal(images[0], held["ant/0.png"][:, 4:10].transpose(2, 0, 1))
    np.testing.assert_array_equal(images[3], held["bee/1.png"][7:13].transpose(2, 0, 1))
    with pytest.raises(CorruptDataError, match=r"0.png: 14 x 6 pixels, want squares of one size .* image_size="):
        data.read_folder(tmp_path / "sizes")


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sizes, half = tmp_path / "train", tmp_path / "sizes", tmp_path / "half"
    for where, *options in ((folder,), (half / "train",), (sizes / "train",), (sizes / "test", ((9, 9),))):
        write_folder(where, *options)
    write_norb(tmp_path)
    (tmp_path / f"{STEMS['train']}-info.mat").unlink()
    write(tmp_path, {"train.txt": b"(2 a)"})
    other = "test images of 9 x 9 pixels, want 8 x 8 as in train; image_size= brings all to one"
    svhn = tmp_path / "train_32x32.mat"
    for call, error, message in (
        (lambda: data.read_folder(folder, classes=["ant"]), CorruptDataError, "bee: not one of the classes ant"),
        (lambda: data.read_folder(folder, classes=["ant", "bee", "cat"]), MissingDataError, "cat: holds no image"),
        (lambda: data.load("folder", sizes), CorruptDataError, other),
        (lambda: data.load("folder", half), MissingDataError, "test: no such folder, nor val"),
        (lambda: data.read_folder(folder / "ant"), MissingDataError, "ant: holds no folder; want one for each class"),
        (lambda: data.read_folder(folder, image_size=10**8), ValueError, "image_size: got 100000000, want 1 to 8192"),
        (lambda: data.load("mnist", tmp_path, image_size=8), ValueError, "image_size: got 8 for mnist"),
        (lambda: data.read_norb(tmp_path, train=True), MissingDataError, r"training-info.mat: no such file, nor .*gz"),
        (lambda: data.read_cifar(svhn, label_bytes=1, classes=10), MissingDataError, "no such file; a binary CIFAR"),
        (lambda: data.read_svhn(svhn), MissingDataError, r"x32.mat: no such file; a MATLAB file"),
        (lambda: data.load_treebank(tmp_path), MissingDataError, r"dev.txt: no such file; a file of the treebank's"),
        (lambda: data.load_treebank(half), MissingDataError, r"looked for train.txt in .*_PTB.zip"),
        (lambda: data.load_treebank(tmp_path, classes=3), ValueError, "classes: got 3, want 5 or 2"),
    ):
        with pytest.raises(error, match=message):
            call()


# --- the Sentiment Treebank ------------------------------------------------------------------------------------------


def test_trees_give_every_unique_phrase(tmp_path: Path) -> None:
    write_trees(tmp_path / "trees")
    marked = tmp_path / "trees" / "train.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + marked.read_bytes())  # as some editors begin a file
    bank = data.load_treebank(tmp_path)
    assert dict(zip(bank.train.texts, bank.train.labels, strict=True)) == {
        "A": 2, "fine": 4, "film": 2, "fine film": 3, "A fine film": 2, ".": 2, "A fine film .": 3,
        "dull": 0, "(": 2, "film (": 2, "dull film (": 1,
    }  # fmt: skip
    assert (bank.validation.texts, bank.validation.labels) == (("nice film", "very nice"), (2, 4))
    assert (bank.test.texts, bank.classes[4], len(bank.classes)) == (("bad",), "very positive", 5)
    two = data.load_treebank(tmp_path, classes=2)
    assert set(zip(two.train.texts, two.train.labels, strict=True)) == {
        ("fine", 1), ("fine film", 1), ("A fine film .", 1), ("dull", 0), ("dull film (", 0),
    }  # fmt: skip
    assert (two.validation.labels, two.test.labels, two.classes) == ((1,), (0,), ("negative", "positive"))
    marked.write_text("(2 " * 3000 + "a" + ")" * 3000)
    assert data.read_trees(marked, phrases=True).texts == ("a",)
