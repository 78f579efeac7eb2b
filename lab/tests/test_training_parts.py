"""The parts of training: losses against plain loops, schedules against a table, metrics, optimisers, data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fastcaps.losses import margin_loss, spread_loss
from fastcaps_lab import models
from fastcaps_lab.training import TrainConfig
from fastcaps_lab.training.loss import Batch, BinaryCrossEntropy, CrossEntropy, Feedback, Loss, Margin, Spread, right
from fastcaps_lab.training.optimizer import Constant, Cosine, Exponential, Milestones, Optimizer, Schedule
from fastcaps_lab.training.settings import read

LOGITS = [[1.5, -0.5, 0.25], [-2.0, 0.75, 3.0]]
LENGTHS = [[0.7, 0.3, 0.05], [0.2, 0.95, 0.6]]


def value(loss: Loss, logits: list[list[float]], target: Any, done: float = 0.0) -> float:
    return loss.of(torch.tensor(logits, dtype=torch.float64), torch.as_tensor(target), done).item()


# --- losses ----------------------------------------------------------------------------------------------------------


def test_cross_entropy_takes_labels_and_shares() -> None:
    labels, shares = [0, 2], torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.25, 0.75]])  # float32, as mixup makes them
    hard = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    logs = torch.tensor(LOGITS, dtype=torch.float64).log_softmax(1)
    for smoothing in (0.0, 0.3):
        for given, targets in ((labels, hard), (shares, shares)):
            wanted = -(((1 - smoothing) * targets + smoothing / 3) * logs).sum(1).mean().item()
            assert value(CrossEntropy(smoothing=smoothing), LOGITS, given) == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"loss: cross-entropy needs one class per sample, got torch\.bool targets"):
        value(CrossEntropy(), LOGITS, torch.ones(2, 3, dtype=torch.bool))


def test_binary_cross_entropy_judges_every_class() -> None:
    there = torch.tensor([[True, True, False], [False, False, True]])
    for loss, numbers in ((BinaryCrossEntropy(), LOGITS), (BinaryCrossEntropy(probabilities=True), LENGTHS)):
        certain = torch.tensor(numbers, dtype=torch.float64)
        certain = certain if loss.probabilities else certain.sigmoid()
        assert value(loss, numbers, there) == pytest.approx(-certain.where(there, 1 - certain).log().mean().item())
        assert loss.threshold == (0.5 if loss.probabilities else 0.0)
        assert value(loss, numbers, [0, 1]) == pytest.approx(value(loss, numbers, [[1, 0, 0], [0, 1, 0]]))
    lengths = torch.tensor([[1.0 + 1e-6, 0.0, 0.5]], requires_grad=True)  # beyond the ends
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = BinaryCrossEntropy(probabilities=True).of(lengths, torch.tensor([[True, False, True]]), 0.0)
    found.backward()
    assert lengths.grad is not None and found.isfinite() and lengths.grad.isfinite().all()


def test_margin_loss_draws_the_raw_pixels() -> None:
    """Those of the image, or of several digits one by one."""
    network, loss = (
        models.create("digits", decoder=True, classes=3).double(),
        Margin(upper=0.8, lower=0.2, down_weight=0.25, reconstruction=0.01),
    )
    pixels = torch.rand(2, 2, 8, 8, dtype=torch.float64)
    mean, std = (torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (0.13, 0.31))
    images = (pixels[:, :1] - mean) / std
    poses = network(images, return_trace=True)[1].poses[-1]
    digits, there = torch.tensor([[2, 0], [1, -1]]), torch.tensor([[True, False, True], [False, True, False]])
    for batch, shown in (
        (Batch((images,), torch.tensor([2, 0]), mean, std), ((0, 0, 2), (1, 0, 0))),
        # the second image has one digit
        (Batch((images,), there, parts=pixels, part_labels=digits), ((0, 0, 2), (0, 1, 0), (1, 0, 1))),
    ):
        found, logits = loss(network, batch)
        drawn = [network.decoder(poses[b : b + 1], torch.tensor([label])) - pixels[b, k] for b, k, label in shown]
        by_hand = margin_loss(logits, batch.target, upper=0.8, lower=0.2, down_weight=0.25).item()
        assert found.item() == pytest.approx(by_hand + 0.01 * torch.stack(drawn).square().sum().item() / 2)
    with pytest.raises(ValueError, match=r"these data do not have their parts; want loss\.reconstruction=0"):
        loss(network, Batch((images,), there))


def test_the_spread_loss_and_its_margin() -> None:
    for loss, done, margin in (
        (Spread(), 0.0, 0.2),
        (Spread(), 0.5, 0.55),
        (Spread(), 1.0, 0.9),
        (Spread(start=0.1, end=0.5, over=0.25), 0.125, 0.3),
        (Spread(start=0.1, end=0.5, over=0.25), 0.8, 0.5),
    ):
        wanted = spread_loss(torch.tensor(LENGTHS, dtype=torch.float64), torch.tensor([0, 2]), margin).item()
        assert value(loss, LENGTHS, [0, 2], done) == pytest.approx(wanted)


@pytest.mark.parametrize("base", [Margin(), CrossEntropy()])
def test_feedback_adds_the_divergence_while_training(base: Loss) -> None:
    torch.manual_seed(0)
    network = models.create("li-encapnet-six", feedback="one", cost="l2", types=4, image_size=16)
    batch = Batch((torch.randn(3, 3, 16, 16),), torch.tensor([1, 2, 3]))
    loss = Feedback(base=base, weight=2.5)
    network.train()
    found, logits = loss(network, batch)
    again, divergence = network(batch.inputs[0], return_feedback=True)
    torch.testing.assert_close(logits, again)
    assert divergence.item() > 0
    torch.testing.assert_close(found, base.of(again, batch.target, 0.0) + 2.5 * divergence)
    network.eval()
    tested, logits = loss(network, batch)
    torch.testing.assert_close(tested, base.of(logits, batch.target, 0.0))
    assert loss.threshold == base.threshold


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_what_counts_as_right() -> None:
    def bools(*rows: str) -> torch.Tensor:
        return torch.tensor([[one == "1" for one in row] for row in rows])

    for metric, target, threshold, wanted in (
        ("accuracy", torch.tensor([0, 1]), 0.0, 1),  # the second one's highest logit is its third
        ("accuracy", torch.tensor([[0.6, 0.4, 0.0], [0.1, 0.2, 0.7]]), 0.0, 2),
        ("exact-match", bools("101", "011"), 0.0, 2),
        ("exact-match", bools("101", "011"), 1.0, 0),
        ("exact-match", bools("100", "011"), 0.0, 1),
        ("exact-match", torch.tensor([0, 2]), 1.0, 2),
        ("top-2", bools("101", "101"), 0.0, 1),
        ("top-2", torch.tensor([1, 0]), 0.0, 0),
    ):
        assert right(metric, torch.tensor(LOGITS), target, threshold).sum() == wanted
    with pytest.raises(ValueError, match="metric: accuracy needs one class per sample"):
        right("accuracy", torch.tensor(LOGITS), torch.ones(2, 3, dtype=torch.bool), 0.0)


# --- optimisers and schedules ----------------------------------------------------------------------------------------


# the factor at steps of a run of 20 steps, 5 an epoch, worked out by hand
TABLE: list[tuple[Schedule, dict[int, float]]] = [
    (Constant(), {0: 1, 10: 1, 19: 1}),
    (Constant(warmup=0.25, start=0.2), {0: 0.2, 1: 0.36, 4: 0.84, 5: 1, 19: 1}),
    (Cosine(), {0: 1, 5: (2 + 2**0.5) / 4, 10: 0.5, 15: (2 - 2**0.5) / 4, 20: 0}),
    (Cosine(end=0.2), {0: 1, 10: 0.6, 20: 0.2}),
    (Cosine(warmup=0.1, start=0.02, end=0.02), {0: 0.02, 1: 0.51, 2: 1, 11: 0.51, 20: 0.02}),
    (Cosine(by="epoch"), {0: 1, 4: 1, 5: (2 + 2**0.5) / 4, 9: (2 + 2**0.5) / 4, 14: 0.5, 15: (2 - 2**0.5) / 4}),
    (Cosine(warmup=0.2, start=0.04), {0: 0.04, 2: 0.52, 4: 1, 12: 0.5, 20: 0}),
    (Milestones(at=(0.3, 0.75)), {0: 1, 5: 1, 6: 0.1, 14: 0.1, 15: 0.01, 19: 0.01}),
    (Milestones(at=(0.3, 0.75), gamma=0.5, by="epoch"), {0: 1, 9: 1, 10: 0.5, 14: 0.5, 15: 0.25}),
    (Milestones(at=(0.5,), warmup=0.2), {0: 0, 1: 0.25, 3: 0.75, 4: 1, 9: 1, 10: 0.1}),
    (Exponential(every=4, gamma=0.5), {0: 1, 3: 1, 4: 0.5, 8: 0.25, 19: 0.0625}),
]


@pytest.mark.parametrize(("schedule", "wanted"), TABLE)
def test_schedules(schedule: Schedule, wanted: dict[int, float]) -> None:
    for step, factor in wanted.items():
        assert schedule.factor(step, 20, 5) == pytest.approx(factor, abs=1e-12), step


def test_milestones_fall_on_their_epochs() -> None:
    """150 of 350 epochs is no binary fraction: the rate must not change a step early or late."""
    schedule = Milestones()
    for steps in (1, 7, 391):
        edges = [e * steps + s for e in (150, 250) for s in (-1, 0)]
        found = [schedule.factor(step, 350 * steps, steps) for step in edges]
        assert found == pytest.approx([1, 0.1, 0.1, 0.01])


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_come_back_from_their_data_and_change_by_path() -> None:
    config = TrainConfig.of(
        network={"name": "digits", "options": {"iterations": 3}},
        data="digits",
        loss={"name": "feedback", "base": {"name": "margin", "upper": 0.8}, "weight": 3},
        optimizer={"name": "rmsprop", "lr": "1e-4", "momentum": "9e-1"},
        schedule={"name": "milestones", "at": [0.25, 0.5]},
        devices=2,
    )
    assert read(TrainConfig, json.loads(config.model_dump_json())) == config
    assert config.devices == "2" and config.loss.base.upper == 0.8 and config.optimizer.momentum == 0.9
    assert config.changed({"loss.base.name": "cross-entropy"}).loss.base == CrossEntropy()
    assert config.changed({"optimizer.name": "rmsprop"}) == config  # the same name clears nothing
    changes = {"optimizer.lr": 0.75, "optimizer.name": "sgd", "network.options.routing": "sequential"}
    other = config.changed({**changes, "loss": "spread"})
    assert (other.optimizer, other.loss) == (Optimizer(name="sgd", lr=0.75), Spread())
    assert other.network.options == {"iterations": 3, "routing": "sequential"}
