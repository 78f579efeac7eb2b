"""The demo: it writes what it says; its pictures show what the network really did; its figures are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fastcaps_lab import data, demo, measure, models, viz


def pixels(path: Path) -> np.ndarray:
    import matplotlib.image

    return matplotlib.image.imread(path)


def test_a_short_demo_writes_what_it_says(tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=(tmp_path / "log").open("w"))
    summary = demo.run(tmp_path / "out", epochs=2, speed=False, console=console)
    printed = console.export_text()
    assert summary["test_accuracy"] > 0.9
    assert f"test accuracy {100 * summary['test_accuracy']:.2f} % on 359 digits" in printed
    assert json.loads((tmp_path / "out" / "demo.json").read_text()) == summary
    assert len(summary["pictures"]) == 2
    for picture in map(Path, summary["pictures"]):
        assert picture.name in printed.replace("\n", "")
        height, width = pixels(picture).shape[:2]
        assert width >= 1000 and height >= 400
        assert pixels(picture)[..., :3].std() > 0.05  # not an empty page


@pytest.mark.slow
def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    assert demo.run(tmp_path, speed=False, console=Console(quiet=True))["test_accuracy"] >= 0.97


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_norm": False, "iterations": 1},
        {"activations": True, "bias": True},
        {"routing": "sequential", "pose": "vector"},
    ],
)
def test_maps_add_up_to_the_logits(overrides: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = models.create("digits", **overrides).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # LayerNorm's affine must not be 1 and 0
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    network.train()
    contributions = viz.listening(network, images)
    assert network.training
    assert contributions.shape == (3, 10, 6, 6)
    network.eval()
    with torch.no_grad():
        logits, trace = network(images, return_trace=True)
        head, norm = network.head.linear, network.routing.layers[-1].norm
        constant = torch.zeros(1, 1, dtype=torch.float64) if norm is None else head.weight[0] @ norm.bias
        if trace.activations[-1] is not None:
            constant = constant * trace.activations[-1]
        torch.testing.assert_close(contributions.sum((2, 3)) + constant + head.bias, logits, rtol=1e-9, atol=1e-9)


def test_map_marks_mistakes(tmp_path: Path) -> None:
    splits = data.load("digits")
    images = splits.test.images[:2, 0]
    contributions = torch.randn(2, 10, 6, 6)
    names = {"classes": splits.classes, "title": "Maps"}
    right = viz.listening_map(images, contributions, [3, 7], [3, 7], tmp_path / "right.svg", **names).read_text()
    wrong = viz.listening_map(images, contributions, [3, 7], [3, 8], tmp_path / "wrong.svg", **names).read_text()
    assert "taken for 8" not in right and "taken for 8" in wrong


# --- measuring -------------------------------------------------------------------------------------------------------


def test_memory_is_measured_in_a_fresh_process() -> None:
    figures = measure.apart("fastcaps_lab.measure", "classes", "reference")
    assert figures["step_mb"] > 1.5 * 8 * 800 * 10 * 16 * 4 / 1e6  # the reference stores its votes, and their gradient
