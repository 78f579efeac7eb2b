"""Figures of trained networks: each is held to what it says it draws, on networks small enough to check."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from test_training import run, settings
from torch import Tensor, nn

from fastcaps.nn import DynamicRouting
from fastcaps_lab import models
from fastcaps_lab.models.layers import Conv
from fastcaps_lab.training import figures, tables

SMALL = models.NetworkConfig(
    (Conv(8, 3),), capsules=4, dim=4, classes=3, image_size=8, in_channels=1,
    layer=DynamicRouting, pose="vector", iterations=2, primary={"kernel_size": 3, "stride": 2, "normalize": "squash"},
    class_layer={"dim": 6}, decoder=(12,),
)  # fmt: skip
LABELS = torch.tensor([2, 0, 1, 2])


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return SMALL.build().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_one_number_of_the_right_capsule_is_moved(network: Any, images: Tensor) -> None:
    assert figures.perturbations(network, images, LABELS).shape == (4, 6, 11, 1, 8, 8)

    class Seen(nn.Module):
        def forward(self, capsules: Tensor, target: Tensor) -> Tensor:
            return capsules

    network.decoder = Seen()
    before = network(images, return_trace=True)[1].poses[-1]
    moved = figures.perturbations(network, images, LABELS) - before[:, None, None]  # [B, d, steps, M, d]
    wanted = torch.zeros_like(moved)
    for image, label in enumerate(LABELS):
        for number in range(6):
            for step in range(11):
                wanted[image, number, step, label, number] = -0.25 + 0.05 * step
    torch.testing.assert_close(moved, wanted, atol=1e-6, rtol=0)
    network.decoder = None
    with pytest.raises(ValueError, match="network: got one without a decoder"):
        figures.perturbations(network, images, LABELS)


@torch.no_grad()
def test_agreement_is_that_of_the_votes(network: Any, images: Tensor) -> None:
    found = figures.agreement(network, images, LABELS, bins=8)
    trace = network(images, return_trace=True)[1]
    children, parents = trace.poses[-2].flatten(1, -2), trace.poses[-1]  # [B, I, 4], [B, M, 6]
    count, length = torch.zeros(8), torch.zeros(8)
    for image, label in enumerate(LABELS):
        parent = parents[image, label]
        for i, child in enumerate(children[image]):
            vote = child @ network.routing.layers[-1].weight[i, label]
            cosine = float(vote @ parent / (vote.norm() * parent.norm()))
            count[int((cosine + 1) * 4)] += 1
            length[int((cosine + 1) * 4)] += float(vote.norm())
    torch.testing.assert_close(found.share.float(), 100 * count / count.sum())
    torch.testing.assert_close(found.length.float(), length / count, equal_nan=True)
    assert found.cosines.tolist() == [-0.875 + 0.25 * index for index in range(8)]


def test_turning_turns_the_image(network: Any, images: Tensor) -> None:
    poses = figures.moved(network, images[0], 2, figures.rotations([0, 90]))
    assert poses.shape == (2, 1, 6)
    both = torch.stack([images[0], images[0].rot90(1, (1, 2))])
    wanted = figures.class_poses(network, both, torch.tensor([2, 2]))
    torch.testing.assert_close(poses[:, 0], wanted, atol=1e-5, rtol=1e-4)


def test_a_run_is_loaded_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path / "run", epochs=1, data__limit=128)
    result = run(config)
    trained = figures.load(config, "digits")
    images, _ = trained.images(16)
    with torch.no_grad():
        torch.testing.assert_close(trained.network(images), result.network(images))
        assert not torch.allclose(trained.fresh(images), result.network(images))
    assert {*get_args(get_type_hints(tables.Table)["draw"])} == {"bars", "lines", *figures.FIGURES}
    every, few = figures.Trained.images, {60: 4, 1000: 100}
    monkeypatch.setattr(figures.Trained, "images", lambda self, count: every(self, few.get(count, count)))
    for name in ("poses", "changes"):
        figures.FIGURES[name]([trained], tmp_path / f"{name}.png", "Digits")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
