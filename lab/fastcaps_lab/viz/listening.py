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
from fastcaps_lab.viz.charts import DIVERGING, finish
from fastcaps_lab.viz.maps import heat_maps


def traced(network: CapsNet, images: Tensor) -> tuple[Tensor, RoutingTrace, Inside]:
    """Return a network's logits in evaluation mode, its trace, and the last call of the class capsules' layer."""
    if not isinstance(network, CapsNet):
        raise TypeError(f"network must be a CapsNet, got {type(network).__name__}")
    with watched(network) as calls, torch.no_grad():
        logits, trace = network(images, return_trace=True)
    # the call has the layer's inputs; in concurrent routing, and so in the trace, the layer below has changed since
    return logits, trace, next(one for one in calls() if one.layer is network.routing.layers[-1])


@torch.no_grad()
def last_votes(network: CapsNet, images: Tensor) -> tuple[RoutingTrace, Tensor | None, Tensor]:
    """Return the inputs of the class capsules' last pass, in evaluation mode.

    The trace of the call; the activations (scores) ``[B, I]`` of the last layer's children, or None; its votes
    ``[B, I, M, d]``, of all positions together.
    """
    _, trace, last = traced(network, images)
    return trace, last.given.get(last.layer.activity_name), last.votes()


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
    trace, gate, votes = last_votes(network, images)  # children [B, I, d], types slowest
    layer: Any = network.routing.layers[-1]
    below = trace.poses[-2]
    if below.dim() != 5:
        raise ValueError(f"the class capsules' children are {list(below.shape)}, want a grid [B, N, H, W, d]")
    shares = trace.coefficients[-1]  # [B, I, M]
    if gate is not None:
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
    if images.dim() != 3:
        raise ValueError(f"images must be [n, height, width], got {list(images.shape)}")
    bound = float(np.percentile(contributions.abs().numpy(), 99.5)) or 1.0  # one place above all must not pale the rest
    # children of an unpadded window sit in the middle of the image, as far apart as its pixels or closer
    rows, columns = (
        (torch.arange(n) - (n - 1) / 2) * min(1.0, size / n) + (size - 1) / 2
        for n, size in zip(contributions.shape[2:], images.shape[1:], strict=True)
    )
    said = [
        f"a {classes[label]}" + (f",\ntaken for {classes[taken]}" if taken != label else "")
        for label, taken in zip(labels, predictions, strict=True)
    ]
    figure, plots, bar = heat_maps(
        images[:, None],
        contributions,
        (rows, columns),
        title=title,
        names=[f"class {name}" for name in classes],
        labels=said,
        cmap=DIVERGING,
        vmin=-bound,
        vmax=bound,
    )
    for line, sums, taken in zip(plots[:, 1:], contributions.sum((2, 3)), predictions, strict=True):
        for plot, each in zip(line, sums, strict=True):
            plot.set_xlabel(f"{float(each):+.1f}", fontsize=9, labelpad=5)
            plot.spines[:].set(color="#BBBBBB", linewidth=0.8)
        line[taken].spines[:].set(color="black", linewidth=3)
    bar.set_label("share of the logit", fontsize=10)
    figure.supxlabel(
        "Orange: the capsules at this place spoke for the class. Purple: against it. Lines: the image's outline. "
        "Below each map: its sum. Thick frame: the class chosen.",
        fontsize=10,
    )
    return finish(figure, path)
