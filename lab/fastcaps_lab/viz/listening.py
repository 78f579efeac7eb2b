"""Which children each class listened to: the contributions to the class capsules' logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcaps.nn import CapsNet, RoutingTrace
from fastcaps_lab.inside import Inside, watched
from fastcaps_lab.viz.charts import DIVERGING, finish, pyplot


def traced(network: CapsNet, images: Tensor) -> tuple[Tensor, RoutingTrace, Inside]:
    """Return a network's logits in evaluation mode, its trace, and the last call of the class capsules' layer."""
    if not isinstance(network, CapsNet):
        raise TypeError(f"network must be a CapsNet, got {type(network).__name__}")
    with watched(network) as calls, torch.no_grad():
        logits, trace = network(images, return_trace=True)
    # the call has the layer's inputs; in concurrent routing, and so in the trace, the layer below has changed since
    return logits, trace, next(one for one in calls() if one.layer is network.routing.layers[-1])


@torch.no_grad()
def listening(network: CapsNet, images: Tensor) -> Tensor:
    """Return how much the children at every position raised or lowered every class's logit.

    A class capsule is the normalised weighted sum of votes, ``S_m = Σ_i r_im V_im``, and its logit is linear. With
    LayerNorm's standard deviation of S_m taken as given, the logit is a sum over the children,

        ``logit_m = const + Σ_i r_im · strength_im``,  ``strength_im = ⟨w ⊙ γ, V_im - mean V_im⟩ / σ(S_m)``:

    the coefficient of child i for the class, times the strength of its vote. Nothing is approximated: the sum of the
    result over all positions is the logit without the constant ``⟨w, β⟩ + b``.

    Images are ``[B, channels, H, W]``; the result is ``[B, classes, H', W']`` on the children's grid H' x W', summed
    over the child types of a position. TypeError or ValueError if ``network`` is not a CapsNet, or its class capsules'
    children are not on a grid.
    """
    _, trace, last = traced(network, images)
    layer, below, votes = last.layer, trace.poses[-2], last.votes()  # votes [B, I, M, d], types slowest
    if below.dim() != 5:
        raise ValueError(f"the class capsules' children are {list(below.shape)}, want a grid [B, N, H, W, d]")
    shares = trace.coefficients[-1]  # [B, I, M]
    if (gate := last.given.get(layer.activity_name)) is not None:
        shares = shares * gate[..., None]
    assert network.head.linear is not None
    reading = network.head.linear.weight[0]  # [d]
    if layer.norm is not None:
        sums = torch.einsum("bim,bimd->bmd", shares, votes)
        deviation = (sums.var(-1, correction=0) + layer.norm.eps).sqrt()  # [B, M]
        votes = votes - votes.mean(-1, keepdim=True)
        shares = shares / deviation[:, None]
        reading = reading * layer.norm.weight
    contributions = shares * (votes @ reading)
    if trace.activations[-1] is not None:
        contributions = contributions * trace.activations[-1][:, None]
    return contributions.reshape(*below.shape[:4], -1).sum(1).permute(0, 3, 1, 2)


def listening_map(
    images: Tensor,
    contributions: Tensor,
    labels: Sequence[int],
    predictions: Sequence[int],
    path: str | Path,
    *,
    classes: Sequence[str],
    title: str,
) -> Path:
    """Draw the positions that every class listened to, for some images, and return the file's path.

    Images are ``[n, height, width]`` in grey, contributions ``[n, classes, H', W']`` from :func:`listening`; labels and
    predictions are the true and the predicted class of every image, ``classes`` the names of all classes.
    """
    rows, columns = contributions.shape[:2]
    bound = float(np.percentile(contributions.abs().numpy(), 99.5)) or 1.0  # one place above all must not pale the rest
    size = (1.15 * (columns + 1) + 1.6, 1.2 * rows + 0.9)
    figure, plots = pyplot().subplots(rows, columns + 1, figsize=size, layout="constrained", squeeze=False)
    drawn: Any = None
    for line, image, maps, label, taken in zip(plots, images, contributions, labels, predictions, strict=True):
        plain(line[0], image[None])
        mistaken = f",\ntaken for {classes[taken]}" if taken != label else ""
        line[0].set_ylabel(f"a {classes[label]}{mistaken}", rotation=0, ha="right", va="center", labelpad=6)
        for plot, each in zip(line[1:], maps, strict=True):
            # children of an unpadded window sit in the middle of the image, as far apart as its pixels or closer
            where = [
                (torch.arange(n) - (n - 1) / 2) * min(1.0, size / n) + (size - 1) / 2
                for n, size in zip(each.shape, image.shape, strict=True)
            ]
            drawn = overlay(plot, image[None], each, where, cmap=DIVERGING, vmin=-bound, vmax=bound)
            plot.set_xlabel(f"{float(each.sum()):+.1f}", fontsize=9, labelpad=5)
            plot.spines[:].set(color="#BBBBBB", linewidth=0.8)
        line[1 + taken].spines[:].set(color="black", linewidth=3)
    for plot, name in zip(plots[0], ("image", *(f"class {name}" for name in classes)), strict=True):
        plot.set_title(name, fontsize=10)
    bar = figure.colorbar(drawn, ax=plots, fraction=0.02, pad=0.01, aspect=30, extend="both")
    bar.set_label("share of the logit", fontsize=10)
    figure.supxlabel(
        "Orange: the capsules at this place spoke for the class. Purple: against it. Lines: the image's outline. "
        "Below each map: its sum. Thick frame: the class chosen.",
        fontsize=10,
    )
    return finish(figure, path, title)


def plain(plot: Any, image: Tensor) -> None:
    """Draw an image ``[channels, H, W]`` in grey, with a light background."""
    grey = image.float().mean(0)
    edge = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]]).median()
    plot.imshow(grey.numpy(), cmap="gray_r" if edge < (grey.min() + grey.max()) / 2 else "gray")
    plot.set(xticks=[], yticks=[])


def overlay(plot: Any, image: Tensor, heat: Tensor, where: Sequence[Tensor], **colours: Any) -> Any:
    """Draw a heat map at its positions, rows and columns in pixels, in the image, with the image's outline over it."""
    ends = []
    for middles, size in zip(where, image.shape[1:], strict=True):
        half = float(middles[1] - middles[0]) / 2 if len(middles) > 1 else size / 2
        ends.append((float(middles[0]) - half, float(middles[-1]) + half))
    plot.set_facecolor("#EEEEEE")
    extent = (*ends[1], *ends[0][::-1])
    drawn = plot.imshow(heat.numpy(), extent=extent, interpolation="nearest", **colours)
    grey = image.float().mean(0)
    if grey.min() < grey.max():
        plot.contour(grey.numpy(), levels=[float(grey.min() + grey.max()) / 2], colors="black", linewidths=1)
    height, width = grey.shape
    plot.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[])
    return drawn
