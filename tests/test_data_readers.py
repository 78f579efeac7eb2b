"""Readers of smallNORB, SVHN, folders of images and the Sentiment Treebank, on small files written here."""

from __future__ import annotations

import builtins
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
from stand_ins import fake_transformers

from fastcaps import data
from fastcaps.data import CorruptDataError, Draws, MissingDataError, Mixup, Phrases, TextDataset, TextEmbedder
from fastcaps.data.norb import TEST_STEM, TRAIN_STEM, read_norb_matrix

MAGIC = {"float32": 0x1E3D4C51, "int32": 0x1E3D4C54, "uint8": 0x1E3D4C55}


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As if a package were not installed."""
    whole = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == module:
            raise ImportError(f"No module named {module!r}", name=module)
        return whole(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def peak_of(call: Callable[[], Any], message: str) -> int:
    """The most bytes that Python held while a file was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError, match=message):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- a header that lies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack(">4sIII", b"\0\0\x08\x03", 2**31, 28, 28), "too large; its header .* want 2,147,483,648 or less"),
        (struct.pack(">4sIII", b"\0\0\x08\x03", 60_000, 280, 28), "holds 60000 x 280 x 28, want any x 28 x 28"),
        (struct.pack(">4sIII", b"\0\0\x08\x03", 10, 28, 28), "too long; its header .* = 7,840 bytes, found more"),
        (b"\x89PNG" + bytes(12), "not an IDX file; it begins with the bytes 89 50 4e 47"),
    ],
)
def test_packed_zeros_are_refused_by_their_header(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(header + bytes(64_000_000), 1))
    assert peak_of(lambda: data.read_idx(path, shape=(None, 28, 28)), message) < 4_000_000


@pytest.mark.parametrize("sizes", [(0, 2**32 - 1, 2**32 - 1), (1,) * 65, (2**31, 2**31, 2, 2)])
def test_sizes_that_make_no_array_are_told(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes) + bytes(0 not in sizes))
    with pytest.raises(CorruptDataError, match=r"file: .*header states .*(which is no array \(|= 18,446,744,073)"):
        data.read_idx(path)


def test_a_large_file_that_is_no_cifar_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with path.open("wb") as file:
        file.truncate(2**33)  # takes no room on disk
    assert peak_of(lambda: data.read_cifar(path, label_bytes=1, classes=10), "8,589,934,592 bytes, want") < 100_000


# --- smallNORB -------------------------------------------------------------------------------------------------------


def norb_bytes(array: np.ndarray) -> bytes:
    """A binary matrix, written from the format's description: at least three sizes."""
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return struct.pack(f"<II{len(sizes)}I", MAGIC[array.dtype.name], array.ndim, *sizes) + array.tobytes()


def write_norb(folder: Path, train: int = 6, test: int = 4, *, packed: bool = False) -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    held: dict[str, np.ndarray] = {}
    for stem, count in ((TRAIN_STEM, train), (TEST_STEM, test)):
        held[f"{stem}-dat.mat"] = random.randint(0, 256, (count, 2, 96, 96)).astype(np.uint8)
        held[f"{stem}-cat.mat"] = (np.arange(count) % 5).astype(np.int32)
        held[f"{stem}-info.mat"] = random.randint(0, 9, (count, 4)).astype(np.int32)
    for name, array in held.items():
        content = norb_bytes(array)
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return held


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_norb_round_trip(tmp_path: Path, packed: bool) -> None:
    held = write_norb(tmp_path / "smallnorb", packed=packed)
    images, labels, info = data.read_norb(tmp_path / "smallnorb", train=False)
    np.testing.assert_array_equal(images, held[f"{TEST_STEM}-dat.mat"])
    np.testing.assert_array_equal(labels, held[f"{TEST_STEM}-cat.mat"])
    np.testing.assert_array_equal(info, held[f"{TEST_STEM}-info.mat"])
    assert (images.dtype, labels.dtype, info.dtype) == (np.uint8, np.int64, np.int64)
    splits = data.load("smallnorb", tmp_path)
    assert (len(splits.train), len(splits.test), splits.in_channels, splits.image_size) == (6, 4, 2, 96)
    assert splits.classes == ("animal", "human", "airplane", "truck", "car")
    made = splits.train.augment  # type: ignore[attr-defined]
    assert (made.padding, made.flip) == (16, False)
    pixels = held[f"{TRAIN_STEM}-dat.mat"] / 255
    np.testing.assert_allclose(splits.train.mean.flatten(), pixels.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(splits.test.std.flatten(), pixels.std((0, 2, 3)), rtol=1e-5)


def test_norb_refuses_wrong_files(tmp_path: Path) -> None:
    write_norb(tmp_path)
    images = tmp_path / f"{TRAIN_STEM}-dat.mat"
    whole = images.read_bytes()
    for content, message in (
        (whole[:-1], "truncated; its header states 6 x 2 x 96 x 96 = 110,592 bytes, found 110,591"),
        (whole + b"x", "too long; .* found 110,593"),
        (gzip.compress(whole)[:-20], "gzip that end early or are damaged"),
        (b"", r"not a binary matrix of NORB; it begins with the bytes \(none\)"),
        (b"MATLAB 5.0 MAT-file", r"begins with the bytes 4d 41 54 4c.* looks like one of MATLAB's"),
        (norb_bytes(np.zeros((6, 2), np.int32)), "elements of type int32, want uint8"),
        (norb_bytes(np.zeros((5, 2, 96, 96), np.uint8)), "holds 5 x 2 x 96 x 96, want 6 x 2 x 96 x 96"),
        (whole[:10], "10 bytes, too short for the header of 4 dimensions"),
        (struct.pack("<II", MAGIC["uint8"], 2**31), "its header states 2,147,483,648 dimensions, want 8 or fewer"),
    ):
        images.write_bytes(content)
        with pytest.raises(CorruptDataError, match=message) as caught:
            data.read_norb(tmp_path, train=True)
        assert str(images) in str(caught.value)
    (tmp_path / f"{TRAIN_STEM}-cat.mat").write_bytes(norb_bytes(np.full(6, 5, np.int32)))
    with pytest.raises(CorruptDataError, match=r"cat.mat: holds the categories 5 to 5, want 0 to 4"):
        data.read_norb(tmp_path, train=True)
    (tmp_path / f"{TRAIN_STEM}-cat.mat").write_bytes(norb_bytes(np.zeros(0, np.int32)))
    with pytest.raises(CorruptDataError, match="holds no category"):
        data.read_norb(tmp_path, train=True)
    (tmp_path / f"{TRAIN_STEM}-info.mat").unlink()
    with pytest.raises(MissingDataError, match=r"training-info.mat: no such file, nor .*gz"):
        data.read_norb(tmp_path, train=True)
    with pytest.raises(MissingDataError, match="nothing: no such file; a binary matrix of smallNORB"):
        read_norb_matrix(tmp_path / "nothing", dtype=np.uint8)


# --- SVHN ------------------------------------------------------------------------------------------------------------


def write_svhn(path: Path, count: int = 7, **others: Any) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.RandomState(count).randint(0, 256, (32, 32, 3, count)).astype(np.uint8)
    labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"X": images, "y": labels, **others}, do_compression=True)
    return images, labels


def test_svhn_round_trip(tmp_path: Path) -> None:
    images, _ = write_svhn(tmp_path / "svhn" / "train_32x32.mat", 11)
    write_svhn(tmp_path / "svhn" / "test_32x32.mat", 3)
    read, labels = data.read_svhn(tmp_path / "svhn" / "train_32x32.mat")
    assert read.shape == (11, 3, 32, 32) and read.dtype == np.uint8
    for k, c, y, x in ((0, 0, 0, 0), (3, 1, 5, 30), (10, 2, 31, 7)):
        assert read[k, c, y, x] == images[y, x, c, k]
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]  # 10 stands for the digit 0
    splits = data.load("svhn", tmp_path)
    assert (len(splits.train), len(splits.test), splits.in_channels, splits.image_size) == (11, 3, 3, 32)
    assert splits.train.augment is None  # type: ignore[attr-defined]
    made = data.load("svhn", tmp_path, augment=True).train.augment  # type: ignore[attr-defined]
    assert (made.padding, made.flip) == (4, False)


def test_svhn_refuses_wrong_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train_32x32.mat"
    write_svhn(path)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-40], "truncated or wrong file: holds X .* want X .* and y|bytes that SciPy cannot read"),
        (whole[: len(whole) // 2], r"truncated or wrong file: holds X \(uint8 32 x 32 x 3 x 7\); want X .* and y"),
        (whole[:140], "140 bytes that SciPy cannot read as a MATLAB file"),
        (whole[:9000] + bytes(50) + whole[9050:], "bytes that SciPy cannot read as a MATLAB file"),
        (b"", "0 bytes that SciPy cannot read"),
        (b"\x89HDF\r\n\x1a\n" + bytes(600), "SciPy cannot read"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=message) as caught:
            data.read_svhn(path)
        assert str(path) in str(caught.value)
    for arrays, message in (
        ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, r"holds X \(uint8 32 x 32 x 3 x 4\); want X"),
        ({"X": np.zeros((32, 31, 3, 4), np.uint8), "y": np.ones((4, 1))}, "holds X .uint8 32 x 31 x 3 x 4., y"),
        ({"X": np.zeros((32, 32, 3, 4)), "y": np.ones((4, 1))}, r"holds X \(double"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones((3, 1))}, r"y \(double 3 x 1\); want"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.zeros((4, 1))}, "holds the labels 0 to 0, want 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [1.5]])}, "holds the label 1.5, want whole"),
        ({"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.array([[np.nan]])}, "holds the label nan, want whole"),
    ):
        savemat(path, arrays)
        with pytest.raises(CorruptDataError, match=message):
            data.read_svhn(path)
    large = np.random.RandomState(0).randint(0, 256, (32, 32, 3, 4000)).astype(np.uint8)
    savemat(path, {"X": large, "y": np.ones((2, 1))}, do_compression=True)
    assert peak_of(lambda: data.read_svhn(path), r"X \(uint8 32 x 32 x 3 x 4000\)") < 4_000_000  # of 12 MB
    cells = np.array([[np.zeros(80_000)], *[[0]] * 6], object)
    for arrays in ({"y": cells}, {"other": np.zeros(100_000, np.uint8)}):
        write_svhn(path, **arrays)
        with pytest.raises(CorruptDataError, match="unpacks to more bytes than 7 images of 32 x 32 x 3 and their lab"):
            data.read_svhn(path)
    write_svhn(path)
    with monkeypatch.context() as patch:
        patch.setattr("fastcaps.data.svhn.MOST_BYTES", 999)
        with pytest.raises(CorruptDataError, match="unpacks to more than 999 bytes, which is too large"):
            data.read_svhn(path)
    assert len(data.read_svhn(path)[1]) == 7
    with pytest.raises(MissingDataError, match=r"none.mat: no such file; a MATLAB file"):
        data.read_svhn(tmp_path / "none.mat")
    without(monkeypatch, "scipy")
    with pytest.raises(MissingDataError, match=r"needs SciPy, which is not installed: pip install 'fastcaps\[data\]'"):
        data.read_svhn(path)


# --- folders ---------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, sizes: tuple[tuple[int, int], ...] = ((8, 8), (8, 8))) -> dict[str, np.ndarray]:
    random, held = np.random.RandomState(0), {}
    for name in ("bee", "ant"):
        (folder / name).mkdir(parents=True)
        for k, (height, width) in enumerate(sizes):
            held[f"{name}/{k}.png"] = random.randint(0, 256, (height, width, 3)).astype(np.uint8)
            Image.fromarray(held[f"{name}/{k}.png"]).save(folder / name / f"{k}.png")
    (folder / "ant" / "notes.txt").write_text("no image")
    return held


def test_folders_round_trip(tmp_path: Path) -> None:
    held = write_folder(tmp_path / "train")
    write_folder(tmp_path / "val")
    images, labels = data.read_folder(tmp_path / "train")
    assert labels.tolist() == [0, 0, 1, 1]
    for k, name in enumerate(("ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png")):
        np.testing.assert_array_equal(images[k], held[name].transpose(2, 0, 1))
    grey, _ = data.read_folder(tmp_path / "train", channels=1)
    assert grey.shape == (4, 1, 8, 8)
    splits = data.load("folder", tmp_path)
    assert splits.classes == ("ant", "bee") and (splits.in_channels, splits.image_size) == (3, 8)
    assert torch.equal(splits.test.labels, torch.tensor([0, 0, 1, 1]))
    assert data.load("folder", tmp_path, image_size=5).image_size == 5


def test_folders_bring_images_to_one_size(tmp_path: Path) -> None:
    held = write_folder(tmp_path, ((6, 14), (20, 6)))
    images, _ = data.read_folder(tmp_path, image_size=6)
    np.testing.assert_array_equal(images[0], held["ant/0.png"][:, 4:10].transpose(2, 0, 1))
    np.testing.assert_array_equal(images[3], held["bee/1.png"][7:13].transpose(2, 0, 1))
    assert data.read_folder(tmp_path, image_size=3)[0].shape == (4, 3, 3, 3)
    with pytest.raises(CorruptDataError, match=r"0.png: 14 x 6 pixels, want squares of one size .* image_size="):
        data.read_folder(tmp_path)


def test_folders_refuse_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "train")
    path = tmp_path / "train" / "bee" / "1.png"
    whole = path.read_bytes()
    for content, message in (
        (whole[:100], "100 bytes of an image that ends early or is damaged"),
        (b"GIF of old", "no PNG, JPEG, BMP, GIF, PPM, TIFF or WEBP image; it begins with the bytes 47 49 46 20"),
        (b"", "it begins with nothing: it is empty"),
        # which Pillow would hand to Ghostscript
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "begins with the bytes 25 21 50 53"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=message) as caught:
            data.read_folder(tmp_path / "train")
        assert str(path) in str(caught.value)
    Image.fromarray(np.zeros((9000, 9000), np.uint8)).save(path)
    assert peak_of(lambda: data.read_folder(tmp_path / "train"), "states 9,000 x 9,000 pixels, want 67,10") < 4_000_000
    Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(path)
    with pytest.raises(CorruptDataError, match=r"1.png: pixels of more than 8 bits .Pillow's mode I.*want bytes"):
        data.read_folder(tmp_path / "train")
    Image.fromarray(np.zeros((7, 7), np.uint8)).save(path)
    with pytest.raises(CorruptDataError, match=r"1.png: 7 x 7 pixels, want squares of one size .* has 8 x 8"):
        data.read_folder(tmp_path / "train")
    with pytest.raises(CorruptDataError, match="bee: not one of the classes ant"):
        data.read_folder(tmp_path / "train", classes=["ant"])
    with pytest.raises(MissingDataError, match="cat: holds no image"):
        data.read_folder(tmp_path / "train", classes=["ant", "bee", "cat"])
    write_folder(tmp_path / "sizes" / "train")
    write_folder(tmp_path / "sizes" / "test", ((9, 9),))
    with pytest.raises(CorruptDataError, match="test: images of 9 x 9 pixels, want 8 x 8 as in train; image_size="):
        data.load("folder", tmp_path / "sizes")
    with pytest.raises(MissingDataError, match="test: no such folder, nor val"):
        data.load("folder", tmp_path)
    with pytest.raises(MissingDataError, match="none: no such folder; it should hold a folder of images"):
        data.read_folder(tmp_path / "none")
    with pytest.raises(MissingDataError, match="ant: holds no folder; want one for each class"):
        data.read_folder(tmp_path / "train" / "ant")
    for options, message in (
        ({"channels": 2}, "channels: got 2"),
        ({"image_size": 0}, "image_size: got 0, want 1 to 8192"),
        ({"image_size": 10**8}, "image_size: got 100000000, want 1 to 8192"),
    ):
        with pytest.raises(ValueError, match=message):
            data.read_folder(tmp_path / "train", **options)
    with pytest.raises(ValueError, match="image_size: got 8 for mnist"):
        data.load("mnist", tmp_path, image_size=8)
    without(monkeypatch, "PIL")
    with pytest.raises(MissingDataError, match=r"needs Pillow, which is not installed: pip install 'fastcaps\[data\]'"):
        data.read_folder(tmp_path / "train")


# --- the Sentiment Treebank ------------------------------------------------------------------------------------------

TREES = """\
(3 (2 (2 A) (3 (4 fine) (2 film))) (2 .))
(1 (0 dull) (2 (1 film) (2 -LRB-)))

"""


def write_trees(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text(TREES)
    (folder / "dev.txt").write_text("(2 (3 nice) (2 film))\n(4 (3 very) (3 nice))\n")
    (folder / "test.txt").write_text("(0 bad)\n")


def test_trees_give_every_unique_phrase(tmp_path: Path) -> None:
    write_trees(tmp_path / "trees")
    marked = tmp_path / "trees" / "train.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + marked.read_bytes())  # as some editors begin a file
    bank = data.load_treebank(tmp_path)
    assert dict(zip(bank.train.texts, bank.train.labels, strict=True)) == {
        "A": 2, "fine": 4, "film": 2, "fine film": 3, "A fine film": 2, ".": 2, "A fine film .": 3,
        "dull": 0, "(": 2, "film (": 2, "dull film (": 1,
    }  # fmt: skip
    assert len(bank.train) == 11 and len(set(bank.train.texts)) == 11
    assert bank.validation.texts == ("nice film", "very nice") and bank.validation.labels == (2, 4)
    assert (bank.test.texts, bank.test.labels, len(bank.classes)) == (("bad",), (0,), 5)
    two = data.load_treebank(tmp_path / "trees", classes=2)
    assert dict(zip(two.train.texts, two.train.labels, strict=True)) == {
        "fine": 1, "fine film": 1, "A fine film .": 1, "dull": 0, "dull film (": 0,
    }  # fmt: skip
    assert (two.validation.texts, two.validation.labels, two.classes) == (
        ("very nice",),
        (1,),
        ("negative", "positive"),
    )


def test_trees_refuse_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    for content, message in (
        ("(2 (2 A) (2 b)\n", "line 1: ends early; 1 brackets are not closed"),
        ("(2 a)\n(5 b)\n", "line 2: a node has the label '5', want 0 to 4"),
        ("(2 a) b\n", "line 1: 'b' stands outside of the tree"),
        ("A fine film .\n", "line 1: 'A' stands outside of the tree"),
        ("(2 a))\n", r"line 1: '\)' stands outside of the tree"),
        ("(2 (3 ) a)\n", "line 1: a node holds no word"),
        ("(2 a) (", "line 1: '\\(' stands outside of the tree"),
        ("(", "line 1: a node has the label 'the end of the line'"),
        ("\n\n", "holds no tree, want one a line"),
        ("", "holds no tree"),
        (b"(2 \xff\xfe)", "line 1: no UTF-8 text"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(CorruptDataError, match=message) as caught:
            data.read_trees(path, phrases=True)
        assert str(path) in str(caught.value)
    with pytest.raises(MissingDataError, match=r"dev.txt: no such file; a file of the treebank's trees"):
        path.write_text("(2 a)")
        data.load_treebank(tmp_path)
    with pytest.raises(
        MissingDataError, match=r"Treebank not found: looked for train.txt in .*trainDevTestTrees_PTB.zip"
    ):
        data.load_treebank(tmp_path / "none")
    with pytest.raises(ValueError, match="classes: got 3, want 5 or 2"):
        data.load_treebank(tmp_path, classes=3)


def test_a_deep_tree_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("(2 " * 3000 + "a" + ")" * 3000)
    assert data.read_trees(path, phrases=True).texts == ("a",)


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformers(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    embed = TextEmbedder(tmp_path)
    embeddings, mask = embed(["a fine film", "dull", "ab"])
    assert embeddings.shape == (3, 9, 3, 6) and mask.sum(1).tolist() == [9, 4, 2] and not embeddings.requires_grad
    assert not embeddings[1, 4:].any()
    torch.testing.assert_close(embeddings[0, 0, 0], embeddings[2, 0, 0])  # an a is an a before it sees others
    for row, text in enumerate(("a fine film", "dull", "ab")):
        alone, _ = embed([text])  # what pads a batch is not seen
        torch.testing.assert_close(embeddings[row, : alone.shape[1]], alone[0])
    assert TextEmbedder(tmp_path, dtype=torch.bfloat16)(["a"])[0].dtype == torch.bfloat16
    for texts, message in (([], "texts: got none"), (["a", " "], "texts: got ' ', which has no token")):
        with pytest.raises(ValueError, match=message):
            embed(texts)


def test_phrases_are_mixed_with_their_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformers(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    phrases, embed = Phrases(("a fine film", "dull", "ab"), (4, 0, 3)), TextEmbedder(tmp_path)
    assert embed.sizes == (3, 6)
    plain = TextDataset(phrases, embed)
    (embeddings, mask), labels = plain.finish(plain.gather([0, 1, 2]))
    torch.testing.assert_close((embeddings, mask), embed(phrases.texts), rtol=0, atol=0)
    assert labels.tolist() == [4, 0, 3] and plain[1] == ("dull", 0) and len(plain) == 3
    mixup = Mixup(5, 0.4)
    mixed = TextDataset(phrases, embed, mixup)
    torch.manual_seed(1)
    (made, shares), targets = mixed.finish(mixed.gather([0, 1, 2]))
    torch.manual_seed(1)
    draws = Draws.fresh(3)
    share, order = mixup.shares(draws), draws.uniform().argsort().tolist()
    assert order != [0, 1, 2]
    for k, other in enumerate(order):
        for got, of in ((made, embeddings), (shares, mask.float()), (targets, torch.eye(5)[labels])):
            torch.testing.assert_close(got[k], share[k] * of[k] + (1 - share[k]) * of[other])


def test_embeddings_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDataError, match=r"none: no config.json here; want a folder of a transformer"):
        TextEmbedder(tmp_path / "none")
    (tmp_path / "config.json").write_text("broken")
    fake_transformers(monkeypatch)
    with pytest.raises(
        CorruptDataError, match=r"transformers cannot load a model and its tokenizer \(OSError: no model\)"
    ):
        TextEmbedder(tmp_path)
    without(monkeypatch, "transformers")
    with pytest.raises(
        MissingDataError, match=r"need transformers, which is not installed: pip install 'fastcaps\[text\]'"
    ):
        TextEmbedder(tmp_path)


def test_embeddings_of_a_real_transformer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "fine": 2, "film": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=4, n_positions=16)
    model = transformers.GPT2Model(config).eval()
    model.save_pretrained(tmp_path)
    embeddings, mask = TextEmbedder(tmp_path)(["a fine film", "film"])
    assert embeddings.shape == (2, 3, 3, 8) and mask.tolist() == [[True] * 3, [True, False, False]]
    with torch.no_grad():
        wanted = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(embeddings[0], torch.stack(wanted, 2)[0])
    assert not embeddings[1, 1:].any()
