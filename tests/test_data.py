"""Readers, data sets and the registry, on small files written here, and on the real MNIST where it lies beside us."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcaps import data
from fastcaps.data import CorruptDataError, ImageDataset, MissingDataError, RandomCropFlip, ShuffledBatches

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not here: no real MNIST to read")


def idx_bytes(array: np.ndarray) -> bytes:
    """An IDX file, written from the format's description."""
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, train: int = 30, test: int = 10, *, packed: bool = False) -> dict[str, np.ndarray]:
    """Four small files under MNIST's names; returns what they hold."""
    random = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    held = {}
    for stem, count in (("train", train), ("t10k", test)):
        held[f"{stem}-images-idx3-ubyte"] = random.randint(0, 256, (count, 28, 28)).astype(np.uint8)
        held[f"{stem}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in held.items():
        content = idx_bytes(array)
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return held


def write_cifar(path: Path, records: int, label_bytes: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """One binary CIFAR file; returns its images and fine labels."""
    random = np.random.RandomState(1)
    labels = (np.arange(records * label_bytes) % classes).astype(np.uint8).reshape(records, label_bytes)
    images = random.randint(0, 256, (records, 3, 32, 32)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(label.tobytes() + image.tobytes() for label, image in zip(labels, images, strict=True)))
    return images, labels[:, -1].astype(np.int64)


# --- IDX -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(5,), (4, 28, 28), (0, 28, 28), (2, 3, 5, 7)])
def test_idx_round_trip(tmp_path: Path, shape: tuple[int, ...], packed: bool) -> None:
    array = np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
    read = data.read_idx(path, shape=(None, *shape[1:]))
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"not an IDX file; it begins with the bytes \(none\)"),
        (b"\x89PNG....", "not an IDX file; it begins with the bytes 89 50 4e 47"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "elements of type float, want unsigned byte"),
        (b"\x00\x00\x08\x03\x00\x00", "too short for the header of 3 dimensions"),
        (idx_bytes(np.zeros((3, 28, 28), np.uint8))[:-1], "truncated; its header states .* = 2,352 bytes, found 2,351"),
        (idx_bytes(np.zeros((3, 28, 28), np.uint8)) + b"x", "too long; .* found 2,353"),
        (struct.pack(">4sIII", b"\x00\x00\x08\x03", 2**32 - 1, 28, 28) + b"abc", "truncated; .* found 3$"),
        (idx_bytes(np.zeros((3, 28, 27), np.uint8)), "holds 3 x 28 x 27, want any x 28 x 28"),
        (idx_bytes(np.zeros(3, np.uint8)), "holds 3, want any x 28 x 28"),
        (gzip.compress(idx_bytes(np.zeros((3, 28, 28), np.uint8)), mtime=0)[:-9], "gzip that end early or are damaged"),
        (
            gzip.compress(idx_bytes(np.zeros((3, 28, 28), np.uint8))[:-1], mtime=0),
            "truncated; .* = 2,352 bytes, found 2,351",
        ),
        (gzip.compress(b"", mtime=0)[:10] + b"\xff" * 40, "gzip that end early or are damaged .*invalid block type"),
    ],
)
def test_idx_refuses_wrong_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=message) as caught:
        data.read_idx(path, shape=(None, 28, 28))
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_idx_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="nothing-here: no such file; an IDX file") as caught:
        data.read_idx(tmp_path / "nothing-here")
    assert isinstance(caught.value, FileNotFoundError)


# --- CIFAR -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("label_bytes", "classes"), [(1, 10), (2, 100)])
def test_cifar_round_trip(tmp_path: Path, label_bytes: int, classes: int) -> None:
    images, labels = write_cifar(tmp_path / "x.bin", 7, label_bytes, classes)
    read_images, read_labels = data.read_cifar(tmp_path / "x.bin", label_bytes=label_bytes, classes=classes, records=7)
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)


def test_cifar_refuses_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_cifar(path, 3, 1, 10)
    whole = path.read_bytes()

    def read(content: bytes, records: int | None = None) -> None:
        path.write_bytes(content)
        data.read_cifar(path, label_bytes=1, classes=10, records=records)

    read(whole)
    for content, records, message in (
        (whole[:-1], None, "truncated or wrong file: 9,218 bytes, want a multiple of 3,073"),
        (b"", None, "file: 0 bytes, want a multiple"),
        (whole, 4, "9,219 bytes, want 4 records of 3,073 = 12,292 bytes"),
        (b"\x80\x02" + whole, None, "Python version of CIFAR"),
        (b"\x1f\x8b" + whole, None, "gzip archive; unpack it first"),
        (b"\x0b" + whole[1:], None, "record 0 has the label 11, want 0 to 9"),
    ):
        with pytest.raises(CorruptDataError, match=message) as caught:
            read(content, records)
        assert str(path) in str(caught.value)
    with pytest.raises(MissingDataError, match="no such file; a binary CIFAR file"):
        data.read_cifar(tmp_path / "none.bin", label_bytes=1, classes=10)


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits_split_is_fixed_and_stratified() -> None:
    images, labels = data.read_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 255)
    train, test = data.split_digits(labels)
    assert sorted([*train, *test]) == list(range(1797))
    assert len(test) == 359
    # another split would make every stated accuracy another figure
    assert test[:6].tolist() == [3, 7, 13, 19, 36, 38]
    for digit in range(10):
        assert abs((labels[test] == digit).sum() - (labels == digit).sum() / 5) <= 0.5


# --- data sets -------------------------------------------------------------------------------------------------------


def images_and_labels(count: int = 6, channels: int = 3, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(2)
    return random.randint(0, 256, (count, channels, size, size)).astype(np.uint8), np.arange(count) % 3


def test_items_are_normalised() -> None:
    images, labels = images_and_labels()
    dataset = ImageDataset(images, labels, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    image, label = dataset[4]
    expected = (images[4] / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([0.5, 0.6, 0.7])[:, None, None]
    np.testing.assert_allclose(image.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert int(label) == labels[4]
    assert len(dataset) == 6
    assert torch.equal(dataset[-1][0], dataset[5][0])
    with pytest.raises(IndexError):
        dataset[6]
    every = ImageDataset(images, labels, mean=0.5, std=0.25)
    assert torch.equal(every[4][0], ImageDataset(images, labels, mean=3 * [0.5], std=3 * [0.25])[4][0])


def test_datasets_refuse_what_does_not_fit() -> None:
    images, labels = images_and_labels()
    for given, mean, std, message in (
        ((images, labels[:-1]), (0, 0, 0), (1, 1, 1), r"want \[n, c, h, w\] and \[n\]"),
        ((images, labels[:, None]), (0, 0, 0), (1, 1, 1), r"want \[n, c, h, w\] and \[n\]"),
        ((images, labels), (0,), (1, 1, 1), "got 1 and 3 numbers for 3 channels"),
        ((images, labels + 0.5), (0, 0, 0), (1, 1, 1), "labels: got float64, want whole"),
        ((images, labels), (0, 0, 0), (1, 0, 1), "std: got 1, 0, 1, want numbers above 0"),
        ((images - np.int16(9), labels), (0, 0, 0), (1, 1, 1), "bytes.*got int16"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageDataset(*given, mean=mean, std=std)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "digits"])
def test_digits_and_clothes_are_mirrored_only_where_that_is_asked_for(tmp_path: Path, name: str) -> None:
    """A mirrored 2 is no 2."""
    if name != "digits":
        write_mnist(tmp_path / name)

    def mirrored(**options: bool) -> float:
        """The share of training images that come out mirrored; a bright left half shows which way an image lies."""
        train = data.load(name, tmp_path, **options).train
        train.images = torch.zeros(400, 1, 28, 28, dtype=torch.uint8)
        train.images[..., :14] = 255
        train.labels = torch.zeros(400, dtype=torch.int64)
        torch.manual_seed(0)
        made, _ = train.batch(slice(None))
        return float((made[..., :14].sum((1, 2, 3)) < made[..., 14:].sum((1, 2, 3))).double().mean())

    assert data.load(name, tmp_path).train.augment is None
    assert mirrored(augment=True) == mirrored(augment=True, flip=False) == 0
    assert abs(mirrored(augment=True, flip=True) - 0.5) < 0.1
    assert abs(mirrored(flip=True) - 0.5) < 0.1


def test_augmentation_pads_with_black_before_normalising() -> None:
    images = np.full((1, 1, 4, 4), 255, np.uint8)
    dataset = ImageDataset(images, np.zeros(1, int), mean=(0.5,), std=(0.5,), augment=RandomCropFlip(4))
    values = torch.stack([dataset[0][0] for _ in range(40)])
    assert values.unique().tolist() == [-1.0, 1.0]  # black is (0 - 0.5) / 0.5, never 0


# --- the order of batches --------------------------------------------------------------------------------------------


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def test_batches_cover_everything_in_a_new_order_each_epoch() -> None:
    batches = ShuffledBatches(23, 5, seed=0)
    first = list(batches)
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 3] and len(batches) == 5
    assert sorted(flat(first)) == list(range(23))
    assert list(batches) == first
    batches.set_epoch(1)
    second = list(batches)
    assert sorted(flat(second)) == list(range(23)) and second != first
    assert list(ShuffledBatches(23, 5, seed=1)) != first


def test_batches_can_begin_in_the_middle() -> None:
    whole = list(ShuffledBatches(23, 5, seed=0, epoch=3))
    rest = ShuffledBatches(23, 5, seed=0, epoch=3, start=2)
    rest.set_epoch(3)
    assert list(rest) == whole[2:]
    assert len(rest) == 5  # Lightning counts the batches of the epoch, done or not
    rest.set_epoch(4)
    assert list(rest) == list(ShuffledBatches(23, 5, seed=0, epoch=4))


def test_ranks_share_the_images_and_take_as_many_steps() -> None:
    parts = [list(ShuffledBatches(23, 5, seed=0, rank=rank, world_size=4)) for rank in range(4)]
    assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
    assert {index for part in parts for index in flat(part)} == set(range(23))


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_mnist_is_found_in_its_customary_places(tmp_path: Path, folder: str, packed: bool) -> None:
    held = write_mnist(tmp_path / folder, packed=packed)
    splits = data.load("mnist", tmp_path)
    assert (len(splits.train), len(splits.test)) == (30, 10)
    assert (splits.in_channels, splits.image_size, len(splits.classes)) == (1, 28, 10)
    np.testing.assert_array_equal(splits.test.images[:, 0].numpy(), held["t10k-images-idx3-ubyte"])
    assert splits.train.augment is None and splits.test.augment is None
    assert len(data.load("mnist", tmp_path, limit=7).train) == 7


def test_fashion_does_not_pass_for_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path / "fashion-mnist")
    assert data.load("fashion-mnist", tmp_path).classes[9] == "Ankle boot"
    assert data.load("fashion-mnist", tmp_path / "fashion-mnist").name == "fashion-mnist"
    for where in (tmp_path, tmp_path / "fashion-mnist"):
        with pytest.raises(MissingDataError, match=r"MNIST not found under .* Wanted: the four IDX files"):
            data.load("mnist", where)


def test_registry_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data: got 'imagenet', want one of mnist, fashion-mnist"):
        data.load("imagenet")
    with pytest.raises(ValueError, match=r"data: got 'MNIST' \(did you mean mnist"):
        data.load("MNIST")
    with pytest.raises(MissingDataError, match="needs a data directory"):
        data.load("cifar10")
    with pytest.raises(MissingDataError, match="no such folder; it should hold the archive 'CIFAR-10 binary"):
        data.load("cifar10", tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        MissingDataError, match=r"it holds: notes.txt\); looked for data_batch_1.bin in .*cifar-10-batch"
    ):
        data.load("cifar10", tmp_path)
    with pytest.raises(ValueError, match="limit: got 0"):
        data.load("digits", limit=0)
    held = write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(MissingDataError, match=r"t10k-labels-idx1-ubyte: no such file, nor .*gz"):
        data.load("mnist", tmp_path)
    for labels, message in (
        (np.zeros(9, np.uint8), "10 images and .* 9 labels"),
        (np.full(10, 12, np.uint8), "holds the label 12, want 0 to 9"),
    ):
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
        with pytest.raises(CorruptDataError, match=message):
            data.load("mnist", tmp_path)
    assert held["t10k-labels-idx1-ubyte"].shape == (10,)


def test_cifar_loads_and_augments_its_training_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder / "train.bin", 4, 2, 100)
    write_cifar(folder / "test.bin", 3, 2, 100)
    with pytest.raises(CorruptDataError, match=r"train.bin: .* want 50,000 records of 3,074"):
        data.load("cifar100", tmp_path)
    read = data.sources.read_cifar  # real files hold 60,000 records; small ones do for the rest
    monkeypatch.setattr(data.sources, "read_cifar", lambda path, **kinds: read(path, **{**kinds, "records": None}))
    splits = data.load("cifar100", tmp_path)
    assert (splits.in_channels, splits.image_size, len(splits.classes)) == (3, 32, 100)
    made = splits.train.augment
    assert isinstance(made, RandomCropFlip) and (made.padding, made.flip) == (4, True) and splits.test.augment is None
    assert data.load("cifar100", tmp_path, augment=False).train.augment is None
    made = data.load("cifar100", tmp_path, flip=False).train.augment
    assert isinstance(made, RandomCropFlip) and (made.padding, made.flip) == (4, False)
    write_cifar(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", 3, 1, 10)
    for k in range(1, 6):
        write_cifar(tmp_path / "cifar-10-batches-bin" / f"data_batch_{k}.bin", 2, 1, 10)
    assert len(data.load("cifar10", tmp_path).train) == 10


def test_normalisation_constants_are_those_of_the_data() -> None:
    splits = data.load("digits")
    images, _ = splits.train.batch(slice(None))
    assert abs(float(images.mean())) < 0.02
    assert abs(float(images.std()) - 1) < 0.02


@needs_shared
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_mnist(name: str) -> None:
    splits = data.load(name, SHARED)
    assert (len(splits.train), len(splits.test)) == (60_000, 10_000)
    digits = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert torch.bincount(splits.test.labels).tolist() == (digits if name == "mnist" else [1000] * 10)
    pixels = splits.train.images.float() / 255
    mean, std = splits.train.mean.item(), splits.train.std.item()
    assert abs(float(pixels.mean()) - mean) < 1e-4
    assert abs(float(pixels.std()) - std) < 1e-4


# --- what is made of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("multimnist", 36), ("diverse-multimnist", 36), ("affnist", 40)])
def test_what_is_made_of_mnist_keeps_its_halves_apart(tmp_path: Path, name: str, size: int) -> None:
    held = write_mnist(tmp_path, train=60, test=40)
    splits = data.load(name, tmp_path)
    assert (len(splits.train), len(splits.test), splits.image_size, len(splits.classes)) == (60, 40, size, 10)
    for part, stem in ((splits.train, "train"), (splits.test, "t10k")):
        np.testing.assert_array_equal(part.images[:, 0].numpy(), held[f"{stem}-images-idx3-ubyte"])
        assert part.batch(range(3))[0].shape == (3, 1, size, size)
    first = splits.train.batch(range(9))[0], splits.test.batch(range(9))[0]
    assert not torch.equal(splits.train.batch(range(9))[0], first[0])
    assert torch.equal(data.load(name, tmp_path).test.batch(range(9))[0], first[1])
    assert len(data.load(name, tmp_path, limit=20).train) == 20
    single = {"multimnist": 0.0, "diverse-multimnist": 1 / 6}
    if name in single:
        assert splits.train.single == splits.test.single == single[name]  # type: ignore[attr-defined]
    for option in ({"augment": True}, {"flip": True}):
        with pytest.raises(ValueError, match=f"augment, flip: got .* for {name}, which is drawn at random as it is"):
            data.load(name, tmp_path, **option)
    with pytest.raises(MissingDataError, match="MNIST not found under"):
        data.load(name, tmp_path / "..", augment=False)


def test_the_page_of_data_is_that_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[a-z0-9-]+`(?:, `[a-z0-9-]+`)*) \| .* \|$", page.split("## Digits")[0], re.MULTILINE)
    assert sorted(name.strip("`") for row in rows for name in row.split(", ")) == sorted(data.names())
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "data.md", "exec"), {})
        assert capsys.readouterr().out.strip() == "torch.Size([16, 3, 32, 32]) torch.Size([16, 10])"
