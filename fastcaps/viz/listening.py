"""Which children each class listened to: what the class capsules' logits are made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastcaps.nn import CapsNet
from fastcaps.reference.seen import make_votes, see
from fastcaps.viz.charts import DIVERGING, finish, pyplot
from fastcaps.votes import Votes


def last_votes(network: CapsNet, images: Tensor) -> tuple[Any, tuple[Any, ...], Tensor]:
    """What the class capsules' last pass was made of, in evaluation mode.

    Returns
    -------
    tuple
        The trace of the call; what the last layer was given, children first; its votes ``[B, I, M, d]``, all places
        together.
    """
    if not isinstance(network, CapsNet):
        raise TypeError(f"network must be a CapsNet, got {type(network).__name__}")
    layer: Any = network.routing.layers[-1]
    calls: list[tuple[Any, ...]] = []
    # what the last pass read: with concurrent routing the layer below has moved on since, in the trace as well
    hook = layer.register_forward_hook(lambda _, given, __: calls.append(given))
    was_training = network.training
    network.eval()
    try:
        _, trace = network(images, return_trace=True)
    finally:
        hook.remove()
        network.train(was_training)
    call = layer.prepare(calls[-1][0], None)
    votes = make_votes(see(Votes.of(call.children, call.weight, call.bias, None, call.window).on_grid()))
    return trace, calls[-1], votes.flatten(1, -4).flatten(-2)


@torch.no_grad()
def listening(network: CapsNet, images: Tensor) -> Tensor:
    """How much the children at every place raised or lowered every class.

    A class capsule is the normalised sum of the votes that it listened to, ``S_m = Σ_i r_im V_im``, and its logit is
    read off linearly. With LayerNorm's standard deviation of S_m as it came out, the logit is a sum over the children,

        ``logit_m = const + Σ_i r_im · strength_im``,  ``strength_im = ⟨w ⊙ γ, V_im - mean V_im⟩ / σ(S_m)``:

    the coefficient with which child i was routed to the class, times the strength of its vote for it. Nothing is
    approximated: what is returned, summed over the places, is the logit but for the constant ``⟨w, β⟩ + b``.

    Parameters
    ----------
    network : CapsNet
        A network whose class capsules read a grid of children.
    images : Tensor
        ``[B, channels, H, W]``.

    Returns
    -------
    Tensor
        ``[B, classes, H', W']``, H' x W' being the grid of the children; the child types of a place are summed.

    Raises
    ------
    TypeError, ValueError
        If ``network`` is no CapsNet, or its class capsules' children lie on no grid.
    """
    trace, (_, _, gate), votes = last_votes(network, images)  # children [B, I, d], types slowest
    layer: Any = network.routing.layers[-1]
    below = trace.poses[-2]
    if below.dim() != 5:
        raise ValueError(f"the class capsules' children are {list(below.shape)}, want a grid [B, N, H, W, d]")
    types, height, width = below.shape[1:4]
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
    return contributions.unflatten(1, (types, height, width)).sum(1).permute(0, 3, 1, 2)


def _outline(axis: Any, image: Tensor, grid: tuple[int, int]) -> None:
    """Lay the ink's outline over a map of the children: the image reaches past the outermost children's centres."""
    rows, columns = image.shape
    # children of an unpadded window sit in the middle of the image, as far apart as its pixels or further
    y = (np.arange(rows) - (rows - 1) / 2) * max(1.0, grid[0] / rows) + (grid[0] - 1) / 2
    x = (np.arange(columns) - (columns - 1) / 2) * max(1.0, grid[1] / columns) + (grid[1] - 1) / 2
    ink = image.numpy().astype(float)
    axis.contour(x, y, ink, levels=[ink.max() / 2], colors="black", linewidths=1.1)
    axis.set_xlim(-0.5, grid[1] - 0.5)
    axis.set_ylim(grid[0] - 0.5, -0.5)


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
    """Draw, for some images, which places every class listened to.

    Parameters
    ----------
    images : Tensor
        ``[n, height, width]`` in grey.
    contributions : Tensor
        ``[n, classes, H', W']`` from :func:`listening`.
    labels, predictions : sequence of int
        The true and the predicted class of every image.
    path : str or Path
        Where the picture goes.
    classes : sequence of str
        Names of the classes.
    title : str
        What network and data.

    Returns
    -------
    Path
        ``path``.
    """
    plt = pyplot()
    rows, columns = contributions.shape[:2]
    figure = plt.figure(figsize=(1.02 * columns + 3.4, 1.1 * rows + 1.9), layout="constrained")
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1.15] + [1.0] * columns)
    bound = float(np.percentile(contributions.abs().numpy(), 99.5)) or 1.0  # one place above all must not pale the rest
    drawn: Any = None
    maps = []
    for row in range(rows):
        axis = figure.add_subplot(grid[row, 0])
        axis.imshow(images[row].numpy(), cmap="gray_r")
        label = f"a {classes[labels[row]]}"
        wrong = labels[row] != predictions[row]
        axis.set_ylabel(
            f"{label},\ntaken for {classes[predictions[row]]}" if wrong else label,
            rotation=0,
            ha="right",
            va="center",
            fontsize=12,
            labelpad=8,
        )
        axis.set(xticks=[], yticks=[])
        if row == 0:
            axis.set_title("image", fontsize=11)
        for column in range(columns):
            axis = figure.add_subplot(grid[row, column + 1])
            drawn = axis.imshow(contributions[row, column].numpy(), cmap=DIVERGING, vmin=-bound, vmax=bound)
            _outline(axis, images[row], (contributions.shape[2], contributions.shape[3]))
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{float(contributions[row, column].sum()):+.1f}", fontsize=9, labelpad=2)
            chosen = column == predictions[row]
            for spine in axis.spines.values():
                spine.set_color("black" if chosen else "#BBBBBB")
                spine.set_linewidth(3 if chosen else 0.8)
            if row == 0:
                axis.set_title(f"class {classes[column]}", fontsize=11)
            maps.append(axis)
    bar = figure.colorbar(drawn, ax=maps, fraction=0.016, pad=0.012, aspect=40, extend="both")
    bar.set_label("share of the logit: coefficient × strength of the vote", fontsize=10)
    explained = (
        "Orange: the capsules at this place spoke for the class. Purple: against it. Lines: the image's outline. "
        "Below each map: its sum. Thick frame: the class chosen."
    )
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.75 / figure.get_figheight()))  # room for two lines above
    figure.text(0.01, 1 - 0.2 / figure.get_figheight(), title, fontsize=13, fontweight="bold", va="center")
    figure.text(0.01, 1 - 0.5 / figure.get_figheight(), explained, fontsize=10.5, va="center")
    return finish(figure, path, dpi=110)
