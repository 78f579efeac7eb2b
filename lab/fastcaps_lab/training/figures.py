"""The papers' figures of trained networks, drawn from finished runs.

Each figure has a function that computes and one that draws; :data:`FIGURES` holds the latter, by the name in a table's
``draw``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.nn import CapsNet
from fastcaps_lab.data import Splits
from fastcaps_lab.training.config import TrainConfig, kept
from fastcaps_lab.training.data import read_data
from fastcaps_lab.training.folder import load_weights
from fastcaps_lab.training.run import build_network
from fastcaps_lab.viz import last_votes, perturbation_map, perturbations
from fastcaps_lab.viz.charts import BLUE, GREY, finish, pyplot


@dataclass(frozen=True)
class Trained:
    """A network from a run."""

    label: str
    network: Any  # with trained weights, in evaluation mode
    fresh: Any  # with initial weights
    splits: Splits

    def images(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first test images ``[count, channels, H, W]``, and their labels ``[count]``."""
        return self.splits.test.batch(slice(0, count))


def load(config: TrainConfig, label: str = "") -> Trained:
    """Return the network of a finished run, of its best epoch if it had validation images, else of its last.

    A configuration without a folder of data uses the run's.
    """
    before = kept(config.folder)
    splits = read_data(replace(before.data, dir=config.data.dir or before.data.dir))
    torch.manual_seed(before.seed)
    fresh, network = build_network(before, splits), build_network(before, splits)
    load_weights(network, config.folder)
    return Trained(label, network.eval(), fresh.eval(), splits)


def class_poses(network: CapsNet, images: Tensor, labels: Tensor) -> Tensor:
    """Return the poses ``[B, d]`` of the images' class capsules."""
    poses = network(images, return_trace=True)[1].poses[-1]
    return poses[torch.arange(len(labels)), labels]


def some_classes(trained: Trained) -> list[int]:
    """Return four classes to show, evenly spaced."""
    return [index * len(trained.splits.classes) // 4 for index in range(4)]


def draw_perturbations(trained: Sequence[Trained], path: Path, title: str) -> Path:
    """Draw a grid of images for each of four classes: a row per value of the capsule, a column per step."""
    (each,) = trained
    images, labels = each.images(200)
    chosen = [int((labels == label).nonzero()[0]) for label in some_classes(each)]
    names = [each.splits.classes[int(label)] for label in labels[chosen]]
    return perturbation_map(perturbations(each.network, images[chosen], labels[chosen]), path, names=names, title=title)


class Agreement(NamedTuple):
    """A histogram of the cosine between votes and a parent."""

    cosines: Tensor  # of the bins' middles, [n]
    share: Tensor  # of the votes in each, in percent
    length: Tensor  # their mean length; NaN for no votes


@torch.no_grad()
def agreement(network: CapsNet, images: Tensor, labels: Tensor, bins: int = 40) -> Agreement:
    """Return how the votes of the last layer's children agree with the image's class capsule, in bins of cosines from
    -1 to 1 (Li et al. 2018, Figure 2)."""
    counts, lengths = torch.zeros(bins, dtype=torch.float64), torch.zeros(bins, dtype=torch.float64)
    for some, target in zip(images.split(20), labels.split(20), strict=True):
        trace, _, votes = last_votes(network, some)
        each = torch.arange(len(some))
        class_votes, parents = votes[each, :, target], trace.poses[-1][each, target]  # [B, I, d] and [B, d]
        cosine = F.cosine_similarity(class_votes, parents[:, None].to(class_votes.dtype), dim=-1)
        where = ((cosine + 1) / 2 * bins).long().clamp(0, bins - 1).flatten()
        counts += torch.bincount(where, minlength=bins)
        lengths += torch.bincount(where, weights=class_votes.norm(dim=-1).flatten().double(), minlength=bins)
    middles = (torch.arange(bins) + 0.5) * 2 / bins - 1
    return Agreement(middles, 100 * counts / counts.sum(), lengths / counts)


def draw_agreement(trained: Sequence[Trained], path: Path, title: str) -> Path:
    """Draw number and length of votes over their cosine with the class capsule, before and after training."""
    figure, plots = pyplot().subplots(
        len(trained), 2, figsize=(11, 1 + 3.4 * len(trained)), layout="constrained", squeeze=False
    )
    for row, each in zip(plots, trained, strict=True):
        images, labels = each.images(200)
        for plot, network, when in zip(row, (each.fresh, each.network), ("as drawn", "trained"), strict=True):
            found = agreement(network, images, labels)
            plot.bar(found.cosines, found.share, 1.8 / len(found.cosines), color="#BBBBBB")
            plot.set(xlabel="cosine of vote and class capsule", title=f"{each.label}, {when}", xlim=(-1, 1))
            plot.set_ylabel("share of the children (%), grey", color=GREY)
            beside = plot.twinx()
            beside.plot(found.cosines, found.length, color=BLUE, linewidth=2)
            beside.set_ylabel("mean length of their votes", color=BLUE)
            beside.set_ylim(bottom=0)
    return finish(figure, path, title)


def in_two_dimensions(points: Tensor) -> Tensor:
    """Return the first two principal components ``[n, 2]`` of points ``[n, d]``."""
    points = points.double()
    centred = points - points.mean(0)
    return centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T


def rotations(degrees: Sequence[float]) -> Tensor:
    """Return maps ``[steps, 2, 3]`` that rotate an image to the left, from result to image coordinates."""
    both = [(math.cos(angle), math.sin(angle)) for angle in map(math.radians, degrees)]
    return torch.tensor([[[cosine, -sine, 0], [sine, cosine, 0]] for cosine, sine in both])


def tilts(degrees: Sequence[float]) -> Tensor:
    """Return maps ``[steps, 2, 3]`` that tilt an image back, which shrinks its height by the angle's cosine."""
    return torch.tensor([[[1, 0, 0], [0, 1 / math.cos(math.radians(each)), 0]] for each in degrees])


@torch.no_grad()
def moved(network: CapsNet, image: Tensor, label: int, maps: Tensor) -> Tensor:
    """Return the pose ``[steps, C, D]`` of a class capsule while the image moves (Heinsen 2019, Figure 4).

    ``maps`` are ``[steps, 2, 3]``, as for :func:`torch.nn.functional.affine_grid`.
    """
    grid = F.affine_grid(maps, [len(maps), *image.shape], align_corners=False)
    images = F.grid_sample(image.expand(len(maps), -1, -1, -1), grid, padding_mode="border", align_corners=False)
    layer: Any = network.routing.layers[-1]
    return class_poses(network, images, torch.full((len(maps),), label)).unflatten(-1, layer.pose_shape[::2])


def changes(poses: Tensor) -> dict[str, Tensor]:
    """Return how vectors ``[steps, ..., D]`` differ from the first step's (Heinsen 2019, Figures 6 and 7).

    Their distance from it and their length, relative to its length, and their cosine with it.
    """
    first, size = poses[:1], poses[:1].norm(dim=-1)
    return {
        "distance": (poses - first).norm(dim=-1) / size,
        "length": poses.norm(dim=-1) / size,
        "cosine": F.cosine_similarity(poses, first, dim=-1),
    }


def draw_poses(trained: Sequence[Trained], path: Path, title: str) -> Path:
    """Draw the poses of the test images' class capsules, and of single images' while they rotate."""
    (each,) = trained
    plt = pyplot()
    images, labels = each.images(1000)
    parts = zip(images.split(100), labels.split(100), strict=True)
    with torch.no_grad():
        points = in_two_dimensions(torch.cat([class_poses(each.network, *part) for part in parts]))
    figure = plt.figure(figsize=(13, 5.4), layout="constrained")
    grid = figure.add_gridspec(2, 4)
    plot = figure.add_subplot(grid[:, :2])
    shown = plot.scatter(*points.T, c=labels, cmap="tab10", s=8, vmin=-0.5, vmax=9.5)
    figure.colorbar(shown, ax=plot, ticks=range(len(each.splits.classes)), label="class")
    plot.set(title=f"{len(images)} test images", xlabel="first principal component", ylabel="second")
    degrees = [float(angle) for angle in range(-40, 41, 10)]
    for place, label in enumerate(some_classes(each)):
        plot = figure.add_subplot(grid[place // 2, 2 + place % 2])
        image = images[int((labels == label).nonzero()[0])]
        paths = moved(each.network, image, label, rotations(degrees))  # [steps, C, D]
        flat = in_two_dimensions(paths.flatten(0, 1)).unflatten(0, paths.shape[:2])
        if paths.shape[1] == 1:  # a single vector: connect its steps
            plot.plot(*flat[:, 0].T, color="#BBBBBB", linewidth=1, zorder=0)
        for step, vertices in enumerate(flat):
            plot.plot(*vertices.T, color=plt.get_cmap("viridis")(step / (len(degrees) - 1)), marker="o", linewidth=1)
        plot.set(title=f"a {each.splits.classes[label]}, turned by -40° (dark) to 40°", xticks=[], yticks=[])
        plot.title.set_fontsize(10)
    return finish(figure, path, title)


def draw_changes(trained: Sequence[Trained], path: Path, title: str) -> Path:
    """Draw how the class capsules' vectors change while images rotate by 360°, and while they tilt back."""
    (each,) = trained
    images, labels = each.images(60)
    ways = {"turned": (rotations, range(0, 341, 20)), "laid back": (tilts, [7.5 * step for step in range(9)])}
    figure, plots = pyplot().subplots(3, 2, figsize=(11, 7.5), layout="constrained", sharex="col")
    for column, (way, (maps, degrees)) in enumerate(ways.items()):
        poses = [moved(each.network, *pair, maps(degrees)) for pair in zip(images, labels.tolist(), strict=True)]
        for plot, (name, lines) in zip(plots[:, column], changes(torch.cat(poses, 1)).items(), strict=True):
            plot.plot(degrees, lines, color="#BBBBBB", linewidth=0.5)
            plot.plot(degrees, lines.mean(1), color=BLUE, linewidth=2)
            low, high = lines.flatten().quantile(torch.tensor([0.005, 0.995])).tolist()  # without outliers
            plot.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            plot.set_ylabel("" if column else f"{name}, from the first view")
        plots[0, column].set_title(f"{len(images)} test images, {way}")
        plots[-1, column].set_xlabel("degrees")
    return finish(figure, path, title)


FIGURES: dict[str, Callable[[Sequence[Trained], Path, str], Path]] = {
    "perturbations": draw_perturbations,
    "agreement": draw_agreement,
    "poses": draw_poses,
    "changes": draw_changes,
}
"""The values of a table's ``draw``, besides bars and lines."""
