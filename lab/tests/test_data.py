"""The registry, data sets of images and of texts, and the order of batches."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_ins import fake_transformers, write_bank
from test_data_readers import cifar_bytes, idx_bytes, write, write_mnist
from torch.utils.data import DataLoader

from fastcaps_lab import data
from fastcaps_lab.data import (
    CorruptDataError,
    ImageDataset,
    MissingDataError,
    Mixup,
    RandomCropFlip,
    ShuffledBatches,
    TextDataset,
    TextEmbedder,
)


def test_items_are_normalised_and_padding_is_black() -> None:
    images, labels = np.random.RandomState(2).randint(0, 256, (6, 3, 8, 8)).astype(np.uint8), np.arange(6) % 3
    dataset = ImageDataset(images, labels, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7])
    image, label = dataset[4]
    wanted = (images[4].transpose(1, 2, 0) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    np.testing.assert_allclose(image.permute(1, 2, 0), wanted, atol=1e-6)
    assert int(label) == labels[4] and torch.equal(dataset[-1][0], dataset[5][0])
    with pytest.raises(IndexError):
        dataset[6]
    white = np.full((1, 1, 4, 4), 255, np.uint8)
    dataset = ImageDataset(white, np.zeros(1, int), mean=(0.5,), std=(0.5,), augment=RandomCropFlip(4))
    values = torch.stack([dataset[0][0] for _ in range(40)])
    assert values.unique().tolist() == [-1.0, 1.0]  # black is (0 - 0.5) / 0.5, never 0
    for wrong, message in (
        ((images, labels[:-1]), r"labels must be whole numbers \[6\], got int64 \[5\]"),
        ((images, labels + 0.5), "labels must be whole numbers .* got float64"),
        ((images - np.int16(9), labels), "images must be bytes, .* got int16"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageDataset(*wrong, mean=0.5, std=0.25)


def test_batches_of_every_epoch_seed_start_and_rank() -> None:
    batches = ShuffledBatches(23, 5, seed=0)
    first = list(batches)
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 3] and len(batches) == 5 and list(batches) == first
    batches.set_epoch(1)
    second = list(batches)
    for made in (first, second):
        assert sorted(index for batch in made for index in batch) == list(range(23))
    assert second != first != list(ShuffledBatches(23, 5, seed=1))
    rest = ShuffledBatches(23, 5, seed=0, epoch=3, start=2)  # in the middle of the epoch, and of no other
    assert list(rest) == list(ShuffledBatches(23, 5, seed=0, epoch=3))[2:]
    assert len(rest) == 5  # Lightning counts the batches of the epoch, done or not
    rest.set_epoch(4)
    assert list(rest) == list(ShuffledBatches(23, 5, seed=0, epoch=4))
    parts = [list(ShuffledBatches(23, 5, seed=0, rank=rank, world_size=4)) for rank in range(4)]
    assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
    assert {index for part in parts for batch in part for index in batch} == set(range(23))


def test_texts_are_embedded_and_mixed_with_their_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDataError, match=r"none: no config.json here; want a folder of a transformer"):
        TextEmbedder(tmp_path / "none")
    fake_transformers(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    embed, phrases = TextEmbedder(tmp_path), [("a fine film", 4), ("dull", 0), ("ab", 3)]
    ids, mask = embed.tokens(texts := [text for text, _ in phrases])
    embeddings = embed.layers(ids, mask)
    assert embed.sizes == (3, 6) and embeddings.shape == (3, 9, 3, 6) and not embeddings.requires_grad
    assert mask.sum(1).tolist() == [9, 4, 2]
    for row, text in enumerate(texts):
        alone = embed.layers(*embed.tokens([text]))  # what pads a batch is not seen
        torch.testing.assert_close(embeddings[row, : alone.shape[1]], alone[0])
        assert not embeddings[row, alone.shape[1] :].any()
    plain, mixup = TextDataset(phrases, embed), Mixup(5, 0.4)
    inputs, labels = plain.finish(plain.gather([0, 1, 2]))
    torch.testing.assert_close(inputs, (embeddings, mask), rtol=0, atol=0)
    assert labels.tolist() == [4, 0, 3] and plain[1] == ("dull", 0) and len(plain) == 3
    mixed = TextDataset(phrases, embed, mixup)
    gathered = mixed.gather([0, 1, 2])
    made, wanted = mixed.finish(gathered), mixup((embeddings, mask.float()), labels, gathered[-1])
    torch.testing.assert_close(made, wanted, rtol=0, atol=0)
    assert not torch.equal(made[0][1], mask.float())
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDataError, match=r"need transformers: pip install './lab\[text\]'"):
        TextEmbedder(tmp_path)


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "packed"), [("", False), ("mnist", True), ("MNIST/raw", False)])
def test_mnist_is_found_in_its_customary_places(tmp_path: Path, folder: str, packed: bool) -> None:
    held = write_mnist(tmp_path / folder, packed=packed)
    splits = data.load("mnist", tmp_path)
    assert (len(splits.train), splits.in_channels, splits.image_size, len(splits.classes)) == (30, 1, 28, 10)
    np.testing.assert_array_equal(splits.test.images[:, 0].numpy(), held["t10k-images-idx3-ubyte"])
    assert splits.train.augment is None and splits.test.augment is None
    assert len(data.load("mnist", tmp_path, limit=7).train) == 7
    other = tmp_path / "other"
    write_mnist(other / "fashion-mnist")
    for where in (other, other / "fashion-mnist"):  # must not pass for MNIST
        assert data.load("fashion-mnist", where).classes[9] == "Ankle boot"
        with pytest.raises(MissingDataError, match=r"MNIST not found under .* Wanted: the four IDX files"):
            data.load("mnist", where)


def test_registry_errors_say_what_to_do(tmp_path: Path) -> None:
    write_bank(tmp_path / "trees")
    for arguments, options, error, message in (
        (("imagenet",), {}, ValueError, "data: got 'imagenet', want one of mnist, fashion-mnist"),
        (("MNIST",), {}, ValueError, r"data: got 'MNIST' \(did you mean mnist"),
        (("cifar10",), {}, MissingDataError, "needs a data directory"),
        (
            ("cifar10", tmp_path),
            {},
            MissingDataError,
            r"looked for data_batch_1.bin in .* Wanted: the archive 'CIFAR-1",
        ),
        (("sst5", tmp_path), {}, MissingDataError, "sst5 needs transformer=path"),
        (("sst5", tmp_path / "x"), {}, MissingDataError, "Stanford Sentiment Treebank not found under .*_PTB.zip"),
        (("mnist",), {"transformer": "x"}, ValueError, "transformer: got x for mnist, which does not take it"),
        (("mnist",), {"image_size": 8}, ValueError, "image_size: got 8 for mnist"),
        (("sst5",), {"augment": True}, ValueError, "augment: got True for sst5, which does not take it"),
        (("multimnist",), {"flip": True}, ValueError, "flip: got True for multimnist"),
    ):
        with pytest.raises(error, match=message):
            data.load(*arguments, **options)
    write_mnist(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    path.unlink()
    with pytest.raises(MissingDataError, match=r"t10k-labels-idx1-ubyte: no such file.* Wanted: the four"):
        data.load("mnist", tmp_path)
    for labels, message in (
        (np.zeros(9, np.uint8), "holds 9, want 10.* Wanted: the four"),
        (np.full(10, 12, np.uint8), "holds the labels 12 to 12, want labels from 0 to 9.* Wanted: the four"),
    ):
        path.write_bytes(idx_bytes(labels))
        with pytest.raises(CorruptDataError, match=message):
            data.load("mnist", tmp_path)


def test_cifar_loads_and_augments_its_training_images(tmp_path: Path) -> None:
    write(tmp_path / "cifar-100-binary", {"train.bin": cifar_bytes(4, 100), "test.bin": cifar_bytes(3, 100)})
    parts = {f"data_batch_{k}.bin": cifar_bytes(2, 10) for k in range(1, 6)}
    write(tmp_path / "cifar-10-batches-bin", {**parts, "test_batch.bin": cifar_bytes(3, 10)})
    splits = data.load("cifar10", tmp_path)
    assert (len(splits.train), len(splits.test), splits.test.augment, splits.image_size) == (10, 3, None, 32)
    for name, options, wanted in (
        ("cifar100", {}, (4, True)),
        ("cifar100", {"flip": False}, (4, False)),
        ("cifar100", {"augment": False}, None),
        ("digits", {}, None),  # a mirrored 2 is no 2
        ("digits", {"augment": True}, (4, False)),
        ("digits", {"flip": True}, (0, True)),
    ):
        made = data.load(name, tmp_path, **options).train.augment
        assert (made and (made.padding, made.flip)) == wanted


@pytest.mark.parametrize(("name", "size"), [("multimnist", 36), ("diverse-multimnist", 36), ("affnist", 40)])
def test_what_is_made_of_mnist_keeps_its_halves_apart(tmp_path: Path, name: str, size: int) -> None:
    held = write_mnist(tmp_path, train=60, test=40)
    splits = data.load(name, tmp_path)
    assert (len(splits.train), len(splits.test), splits.image_size, len(splits.classes)) == (60, 40, size, 10)
    for part, stem in ((splits.train, "train"), (splits.test, "t10k")):
        np.testing.assert_array_equal(part.images[:, 0].numpy(), held[f"{stem}-images-idx3-ubyte"])
    test, train = splits.test.batch(slice(None))[0], splits.train.batch(range(9))[0]
    assert train.shape == (9, 1, size, size) and not torch.equal(splits.train.batch(range(9))[0], train)
    again = data.load(name, tmp_path, limit=20)
    # the test images are the same in every run and every batch, until another epoch
    assert len(again.train) == 20 and torch.equal(torch.cat([x for x, _ in DataLoader(again.test, batch_size=7)]), test)
    assert torch.equal(again.test[-1][0], test[-1]) and torch.equal(again.test[5:9:2][0], test[5:9:2])
    again.test.set_epoch(1)
    assert not torch.equal(again.test.batch(slice(None))[0], test)
    single = {"multimnist": 0.0, "diverse-multimnist": 1 / 6}.get(name)
    assert getattr(splits.train, "single", None) == getattr(splits.test, "single", None) == single
