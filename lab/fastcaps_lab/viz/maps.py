"""Heat maps over images, and the positions of a grid of features in an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.nn import CapsNet, RoutingPool2d
from fastcaps_lab.inside import watched
from fastcaps_lab.viz.charts import pyplot

Places = tuple[Tensor, Tensor]


def places(network: nn.Module, images: Tensor, grid: tuple[int, int]) -> Places:
    """Return the centres of the receptive fields of a grid of features, in pixels: rows ``[H']`` and columns ``[W']``.

    They are computed from gradients of features on images of noise. If these give no lattice (all features depend on
    the whole image), the grid is spread over the image. ValueError unless the network is a
    :class:`~fastcaps.nn.CapsNet` or has a :class:`~fastcaps.nn.RoutingPool2d`.
    """
    size = images.shape[-2:]
    even = [(torch.arange(n) + 0.5) * s / n - 0.5 for n, s in zip(grid, size, strict=True)]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, *images.shape[1:], generator=generator, device="cpu")  # whatever the default device
    noise = noise.to(images.device, images.dtype).requires_grad_()
    with watched(network) as calls, torch.enable_grad():
        if isinstance(network, CapsNet):
            made = network.primary(network.backbone(noise))
            features = (made if isinstance(made, Tensor) else made[0]).movedim((2, 3), (-2, -1))
        else:
            network(noise)
            pools = [one.given["features"] for one in calls() if isinstance(one.layer, RoutingPool2d)]
            if not pools:
                raise ValueError(f"network must be a CapsNet or have a RoutingPool2d, got {type(network).__name__}")
            features = pools[-1]
        if features.shape[-2:] != grid:
            return even[0], even[1]
        first = [n // 2 - (n > 1) for n in grid]  # two neighbours in the middle, where no border cuts what they see
        middles = []
        for step in (0, 1):
            y, x = (min(start + step, n - 1) for start, n in zip(first, grid, strict=True))
            seeing = features[..., y, x]  # whose sum may be the same whatever they see: LayerNorm's is
            weights = torch.randn(seeing.shape, generator=generator, device="cpu").to(seeing)
            (slope,) = torch.autograd.grad(seeing, noise, weights, retain_graph=True)
            seen = slope.abs().sum((0, 1)) > 0
            middles.append([_middle(seen.any(1)), _middle(seen.any(0))])
    found = []
    for axis, n in enumerate(grid):
        pitch = middles[1][axis] - middles[0][axis]
        lattice = middles[0][axis] + pitch * (torch.arange(n) - first[axis])
        inside = bool((lattice > -1).all() and (lattice < size[axis]).all())
        found.append(lattice if n > 1 and pitch > 0 and inside else even[axis])
    return found[0], found[1]


def _middle(seen: Tensor) -> float:
    where = seen.nonzero()
    return float(where[0] + where[-1]) / 2 if len(where) else 0.0


def _edges(middles: Tensor, size: int) -> tuple[float, float]:
    """Return the start and end of a heat map of these positions, in pixels."""
    half = float(middles[1] - middles[0]) / 2 if len(middles) > 1 else size / 2
    return float(middles[0]) - half, float(middles[-1]) + half


def plain(plot: Any, image: Tensor) -> None:
    """Draw an image ``[channels, H, W]`` in grey, with a light background."""
    grey = image.mean(0)
    edge = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]]).median()
    plot.imshow(grey.numpy(), cmap="gray_r" if edge < (grey.min() + grey.max()) / 2 else "gray")
    plot.set(xticks=[], yticks=[])


def overlay(plot: Any, image: Tensor, heat: Tensor, where: Places, **colours: Any) -> Any:
    """Draw a heat map at its positions in the image, with the image's outline over it."""
    height, width = image.shape[-2:]
    (low, high), (left, right) = _edges(where[0], height), _edges(where[1], width)
    plot.set_facecolor("#EEEEEE")
    drawn = plot.imshow(heat.numpy(), extent=(left, right, high, low), interpolation="nearest", **colours)
    grey = image.float().mean(0)
    if grey.min() < grey.max():
        plot.contour(grey.numpy(), levels=[float(grey.min() + grey.max()) / 2], colors="black", linewidths=1)
    plot.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[])
    return drawn


def heat_maps(
    images: Tensor,
    heat: Tensor,
    where: Places,
    *,
    title: str,
    names: Sequence[str],
    labels: Sequence[str],
    **colours: Any,
) -> tuple[Any, Any, Any]:
    """Draw heat maps ``[n, columns, H', W']`` over images ``[n, channels, H, W]``, a row per image.

    Return the figure; its plots, with the images in the first column; the colour bar.
    """
    rows, columns = heat.shape[:2]
    figure, plots = pyplot().subplots(
        rows, columns + 1, figsize=(1.15 * (columns + 1) + 1.6, 1.2 * rows + 0.9), layout="constrained", squeeze=False
    )
    drawn: Any = None
    for line, image, hot in zip(plots, images.float(), heat, strict=True):
        plain(line[0], image)
        for plot, each in zip(line[1:], hot, strict=True):
            drawn = overlay(plot, image, each, where, **colours)
    for plot, name in zip(plots[0], ("image", *names), strict=True):
        plot.set_title(name, fontsize=10)
    for plot, label in zip(plots[:, 0], labels, strict=False):
        plot.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=6)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return figure, plots, figure.colorbar(drawn, ax=plots, fraction=0.02, pad=0.01, aspect=30, extend="both")
