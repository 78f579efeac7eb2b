"""Training by its data: every recipe's, phrases, images that are drawn, those of others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stand_ins import SEVERAL, SHAPES, fake_transformers, write_bank
from test_training import run, settings

from fastcaps_lab import cli, data
from fastcaps_lab.training import CapsuleClassifier, build_network, recipe, recipes, train
from fastcaps_lab.training.callbacks import Report
from fastcaps_lab.training.data import ImageData, Subset, hold_out, read_data

pytestmark = pytest.mark.usefixtures("one_thread")


def arrays(name: str, _: Any, image_size: int | None) -> Any:
    """Instead of a data set's files: eight images to train with and four to test."""
    channels, pixels, classes = SHAPES[name]
    pixels = image_size or pixels
    images = np.random.RandomState(0).randint(0, 256, (12, channels, pixels, pixels)).astype(np.uint8)
    labels = np.arange(12) % classes
    return (images[:8], labels[:8]), (images[8:], labels[8:]), tuple(map(str, range(classes)))


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Small data for every recipe, and the settings that name them."""
    monkeypatch.setattr("fastcaps_lab.data.registry._read", arrays)
    fake_transformers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text("{}")
    return {"data.dir": str(write_bank(tmp_path / "trees"))}


def settings_of(name: str, stand_ins: dict[str, Any]) -> dict[str, Any]:
    """The settings by which a recipe takes its stand-in."""
    given = recipe(name).config.data
    transformer: dict[str, Any] = {"data.options.transformer": "gpt"} if given.name.startswith("sst") else {}
    return stand_ins | transformer | ({"data.validation": 2} if given.validation else {})


WIDE = re.compile(r"-imagenet|tsai-dmm-(matrix-42m|dynamic|vector)|tsai-dr-.*-c100|sabour-mnist-cnn|li-encapnet-")
"""Networks whose step takes a second or more: others make the same step."""


def kinds(name: str) -> list[str]:
    """Return what a recipe asks of the code: its data, and its loss with what it is given."""
    config = recipe(name).config
    base = getattr(config.loss, "base", config.loss).name
    given = config.data.name in SEVERAL, config.data.name.startswith("sst"), config.data.mixup > 0
    return [str(config.data), f"{config.loss.name} {base} {given} {getattr(config.loss, 'reconstruction', 0) > 0}"]


QUICK_LAST = sorted(recipes.names(), key=lambda name: not WIDE.search(name))
CHOSEN = {kind: name for name in QUICK_LAST for kind in kinds(name)}
"""A recipe for each declaration of data and each kind of step."""


@pytest.mark.parametrize("name", sorted({*CHOSEN.values()}))
def test_a_recipe_reads_its_data_and_makes_a_step(name: str, stand_ins: dict[str, Any]) -> None:
    """The loss and its gradients are finite, and the optimiser's step reaches the weights."""
    config = recipe(name, settings_of(name, stand_ins)).config
    splits = read_data(config.data)
    wide = WIDE.search(name) is not None
    network: Any = torch.nn.Linear(1, 1) if wide else build_network(config, splits)
    parts, pixels = ImageData(splits, config), {name: getattr(splits.train, name, None) for name in ("mean", "std")}
    module = CapsuleClassifier(network.train(), config, **pixels)
    batch = module.batch(parts.train.finish(parts.train.__getitems__([0, 1])))
    tested = module.batch(parts.test.finish(parts.test.__getitems__([0, 1])))
    texts, several = config.data.name.startswith("sst"), config.data.name in SEVERAL
    assert (parts.validation is not None) == (config.data.validation > 0 or texts)
    if texts:
        assert batch.inputs[0].shape[2:] == (splits.layers, splits.embedding) == (3, 6)
    else:
        channels, size, _ = SHAPES[config.data.name]
        size = config.data.crop or size
        assert batch.inputs[0].shape == tested.inputs[0].shape == (2, channels, size, size)
    assert batch.target.dim() == (2 if several or config.data.mixup else 1) and tested.target.dim() == 1 + several
    if wide:
        return
    optimizer = config.optimizer.build(network.parameters())
    loss, logits = config.loss(network, batch, 0.5)
    assert loss.dim() == 0 and torch.isfinite(loss) and logits.shape == (2, len(splits.classes))
    loss.backward()
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    assert any(bool(g.any()) for g in grads) and all(bool(torch.isfinite(g).all()) for g in grads)
    before = [p.detach().clone() for p in network.parameters()]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_what_does_not_fit_is_told_in_one_line(stand_ins: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    here, gpt = ["--data-dir", stand_ins["data.dir"]], ["--set", "data.options.transformer=gpt"]
    mnist = ["--network", "mnist", "--data", "mnist"]
    there = ["--recipe", "heinsen-sst5", *gpt, *here]
    for command, message in (
        (["--recipe", "heinsen-sst2", *here], "sst2 needs transformer=path (--set data.options.transformer=path): the"),
        ([*there, "--set", "data.pad=2"], "data.pad: got 2 for sst5, whose samples it does not fit;"),
        ([*there, "--network", "mnist"], "network mnist takes images and sst5 are texts"),
        ([*mnist, "--set", "data.options.size=2"], "data.options: got {'size': 2}: load"),
        ([*mnist, "--set", "network.options.classes=2"], "multiple values for keyword argument 'classes'"),
        (["--recipe", "sabour-multimnist", "--set", "data.mixup=0.2"], "data.mixup: got 0.2 for multimnist, whose"),
    ):
        assert cli.main(["train", *command]) == 2 - (" needs " in message)  # 1 where files are missing
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not Path("runs").exists()


# --- images that are drawn, held out, of others -----------------------------------------------------------------------


def overlapping(length: int, kind: type[data.OverlappingDigits] = data.OverlappingDigits, **options: Any) -> Any:
    """Digits over each other: so many images to train with, and 64 to test."""
    images, labels = data.read_digits()
    train = kind(images[:length], labels[:length], shift=2, **options)
    test = data.OverlappingDigits(images[:64], labels[:64], shift=2, **{**options, "seed": 0})
    return data.Splits("overlapping", train, test, tuple("0123456789"), 1, 12)


def test_digits_over_each_other_are_drawn_one_by_one(tmp_path: Path) -> None:
    """With a reconstruction, batches hold the digits that an image is made of."""
    splits = overlapping(128)
    test, loss = splits.test, {"name": "margin", "reconstruction": 0.01}
    config = settings(tmp_path, epochs=1, loss=loss, metric="top-2", network__options__decoder=True, seed=3)
    result = run(config, splits=splits)
    parts = Subset(test, parts=True)
    image, there, digits, classes = (each[1] for each in parts.finish(parts.__getitems__([5, 9])))
    torch.testing.assert_close(digits.sum(0).clamp(max=1), (image * test.std + test.mean)[0, 0], atol=1e-5, rtol=0)
    assert set(classes.tolist()) == set(there.nonzero().flatten().tolist())
    with torch.no_grad():
        module = CapsuleClassifier(result.network, config, mean=test.mean, std=test.std)
        batch = module.batch(parts.finish(parts.__getitems__(list(range(64)))))
        lost, logits = config.loss(result.network, batch, 1.0)
    assert result.test_loss == pytest.approx(lost.item(), rel=1e-4)
    highest = logits.topk(2).indices
    assert result.test_accuracy == pytest.approx(
        batch.target.gather(1, highest).all(1).double().mean().item(), abs=1e-6
    )


def test_every_epoch_makes_images_of_its_own(tmp_path: Path) -> None:
    """Where a data set has a seed, an image follows from it, its number and the epoch."""
    seen: list[tuple[int, int]] = []

    class Watched(data.OverlappingDigits):
        def gather(self, indices: Any) -> Any:
            seen.append((self.epoch, len(indices)))
            return super().gather(indices)

    splits = overlapping(128, Watched, seed=1)
    run(settings(tmp_path, epochs=3, loss="bce", metric="exact-match"), splits=splits)
    assert seen == [(epoch, 64) for epoch in (0, 0, 1, 1, 2, 2)]


def test_ordinary_torch_data_sets_train(tmp_path: Path) -> None:
    halves = torch.eye(2).repeat(35, 1).repeat_interleave(4, 1)[:, None, :, None].expand(-1, 1, 8, 8).contiguous()
    train = [(image, index % 2) for index, image in enumerate(halves)]  # pairs, as of torchvision's data sets
    test = torch.utils.data.TensorDataset(halves[:10], torch.arange(10) % 2)
    splits = data.Splits("mine", train, test, ("a", "b"), in_channels=1, image_size=8)
    done = run(settings(tmp_path, epochs=1, batch_size=8, data__validation=6), splits=splits)
    assert done.test_accuracy == 1.0 and done.history[-1]["validation_accuracy"] == 1.0


def test_a_split_is_the_same_for_every_seed_and_is_not_augmented() -> None:
    splits = data.load("digits", augment=True)
    train, held_out = hold_out(splits.train, 100)
    again = hold_out(splits.train, 100)
    mine = set(train.indices), set(held_out.indices)
    assert mine[0] | mine[1] == set(range(1438)) and not mine[0] & mine[1] and len(mine[1]) == 100
    assert (set(again[0].indices), set(again[1].indices)) == mine
    first = held_out.indices[0]
    plain = data.load("digits", augment=False).train[first][0]
    assert all(torch.equal(held_out.finish(held_out.__getitems__([0]))[0][0], plain) for _ in range(5))
    assert not all(torch.equal(splits.train[first][0], plain) for _ in range(5))


def test_phrases_train(stand_ins: dict[str, Any], tmp_path: Path) -> None:
    changes = {**settings_of("heinsen-sst5", stand_ins), "batch_size": 6, "epochs": 3, "out": str(tmp_path / "run")}
    changes |= {"accelerator": "cpu", "network.options.parts": 4, "optimizer.lr": 0.02}
    config = recipe("heinsen-sst5", changes).config
    done = train(config, report=Report(quiet=True))
    assert len(read_data(config.data).train) == 22 and done.history[0]["step"] == 4
    held_out = [row["validation_accuracy"] for row in done.history]
    assert done.best_epoch == held_out.index(max(held_out)) + 1
    assert all(round(3 * each) in range(4) for each in held_out)
    test = read_data(config.data).test
    inputs, labels = test.finish(test.gather(range(4)))
    with torch.no_grad():
        right = (done.network(*inputs).argmax(1) == labels).double().mean().item()
    assert done.test_accuracy == pytest.approx(right)
