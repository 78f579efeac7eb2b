"""The recipes: each is whole, its network is built of it, and a step of its loss is made; errors name the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcaps import cli, data, models
from fastcaps.training import SettingError, recipe, recipes
from fastcaps.training.loss import Batch

SHAPES = {  # channels, pixels, classes; where a recipe crops, its crop counts
    "mnist": (1, 28, 10),
    "fashion-mnist": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "svhn": (3, 32, 10),
    "smallnorb": (2, 96, 5),
    "multimnist": (1, 36, 10),
    "diverse-multimnist": (1, 36, 10),
    "affnist": (1, 40, 10),
    "folder": (3, 128, 200),
}
TEXTS = {"sst5": 5, "sst2": 2}
SEVERAL = ("multimnist", "diverse-multimnist")
WIDE = re.compile(r"tsai-dmm-|tsai-cnn|sabour-mnist-cnn|-imagenet|li-cnn-large|tsai-dr-.*-c100|resnet18|resnet(32|44|56)|li-encapnet-")
"""Networks whose step takes more than a second: they are made narrower, or left to the slow tests."""

EVERY = recipes.names()


def network_of(name: str, **smaller: Any) -> torch.nn.Module:
    config = recipe(name).config
    sizes: dict[str, Any] = {}
    if config.data.name not in TEXTS:
        channels, pixels, classes = SHAPES[config.data.name]
        sizes = {"in_channels": channels, "image_size": config.data.crop or pixels, "classes": classes}
    return models.create(config.network.name, **{**sizes, **config.network.options, **smaller})


@pytest.mark.parametrize("name", EVERY)
def test_every_recipe_is_whole(name: str) -> None:
    read = recipe(name)
    given = recipes.read_yaml(recipes.find(name).read_text())
    wanted = {"source", "network", "data", "loss", "metric", "optimizer", "schedule", "epochs", "batch_size"}
    assert wanted <= set(given)
    assert read.source.paper and re.search(r" (2017|2018|2019|2020)$", read.source.paper) and read.source.section
    assert read.config.recipe == name and str(read.config.folder) == f"runs/{name}"
    with torch.device("meta"):
        network = network_of(name)
    assert sum(p.numel() for p in network.parameters()) > 10_000
    assert all(p.is_meta for p in network.parameters())
    config = models.config(read.config.network.name)
    if getattr(config, "iterations", None) is not None:  # where a network makes turns, the recipe says how many
        assert "iterations" in read.config.network.options


def batch_of(name: str, size: int = 2) -> Batch:
    config = recipe(name).config
    torch.manual_seed(1)
    if config.data.name in TEXTS:
        classes = TEXTS[config.data.name]
        inputs = torch.randn(size, 4, 37, 1280), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
        return Batch(inputs, torch.randint(classes, (size,)))
    channels, pixels, classes = SHAPES[config.data.name]
    pixels = config.data.crop or pixels
    images = (torch.randn(size, channels, pixels, pixels),)
    mean, std = torch.full((1, channels, 1, 1), 0.1), torch.full((1, channels, 1, 1), 0.3)
    if config.data.name not in SEVERAL:
        target = torch.randint(classes, (size,))
        if config.data.mixup:
            target = torch.rand(size, classes).softmax(1)
        return Batch(images, target, mean, std)
    labels = torch.tensor([[3, 1], [4, 1]])
    present = torch.zeros(size, classes, dtype=torch.bool).scatter_(1, labels, True)
    return Batch(images, present, mean, std, torch.rand(size, 2, pixels, pixels), labels)


def step(name: str, **smaller: Any) -> None:
    """One step of the recipe's optimiser lowers its loss on that batch, or at least reaches the weights."""
    config = recipe(name).config
    torch.manual_seed(0)
    network, batch = network_of(name, **smaller).train(), batch_of(name)
    optimizer = config.optimizer.build(network.parameters())
    loss, logits = config.loss(network, batch, 0.5)
    assert loss.dim() == 0 and torch.isfinite(loss) and logits.shape[0] == 2
    loss.backward()
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    assert any(bool(g.any()) for g in grads) and all(bool(torch.isfinite(g).all()) for g in grads)
    before = [p.detach().clone() for p in network.parameters()]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if WIDE.search(name) else []) for name in EVERY]
)
def test_a_step_of_every_loss(name: str) -> None:
    step(name)
