"""Pictures: how a training went, which children each class listened to, our numbers beside those of a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor

from fastcaps.nn import CapsNet
from fastcaps.reference.seen import make_votes, see
from fastcaps.votes import Votes

# Okabe and Ito's colours and a map from orange to purple: told apart by people of every colour vision
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"
COLOURS = (ORANGE, BLUE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
DIVERGING = "PuOr_r"


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files: a machine without a screen must do."""
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def finish(figure: Any, path: str | Path, dpi: int = 120) -> Path:
    """Write a figure into its file, and forget it."""
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)
    return Path(path)


def learning_curve(
    history: Sequence[dict[str, float]], path: str | Path, *, title: str, target: float | None = None
) -> Path:
    """Draw loss and accuracy over the epochs.

    Parameters
    ----------
    history : sequence of dict
        Rows with epoch, train_loss, test_loss, train_accuracy and test_accuracy, as training returns them.
    path : str or Path
        Where the picture goes; the ending says the format.
    title : str
        What was trained on what.
    target : float, optional
        An accuracy (share of 1) to mark with a line.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ValueError
        If there is no row.
    """
    if not history:
        raise ValueError("history: got no rows, want one per epoch")
    plt = pyplot()
    epochs = [row["epoch"] for row in history]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axis, quantity, factor in ((left, "loss", 1.0), (right, "accuracy", 100.0)):
        for part, colour, marker in (("train", BLUE, "o"), ("test", ORANGE, "s")):
            values = [factor * row[f"{part}_{quantity}"] for row in history]
            label = {"train": "training images", "test": "test images"}[part]
            axis.plot(epochs, values, color=colour, marker=marker, markersize=5, linewidth=2, label=label)
        axis.set_xlabel("epoch")
        axis.set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
    left.set_title("Cross-entropy loss (lower is better)", loc="left", fontsize=11)
    left.set_ylabel("loss (nats per image)")
    left.set_yscale("log")
    left.legend(frameon=False)
    right.set_title("Accuracy (higher is better)", loc="left", fontsize=11)
    right.set_ylabel("images classified correctly (%)")
    last = 100 * history[-1]["test_accuracy"]
    lowest = 100 * min(min(row["test_accuracy"], row["train_accuracy"]) for row in history)
    right.set_ylim(max(0.0, lowest - 3), 101)
    if target is not None:
        right.axhline(100 * target, color=GREY, linewidth=1, linestyle="--")
        where = max(epochs) + 0.4
        right.text(where, 100 * target - 0.3, f"{100 * target:.0f} % wanted", color=GREY, ha="right", va="top")
    right.set_title(f"last: {last:.2f} % of test images", loc="right", fontsize=10, color=ORANGE)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return finish(figure, path)


def last_votes(network: CapsNet, images: Tensor) -> tuple[Any, tuple[Any, ...], Tensor]:
    """What the class capsules' last pass was made of, in evaluation mode.

    Returns
    -------
    tuple
        The trace of the call; what the last layer was given, children first; its votes ``[B, I, M, d]``, all places
        together.
    """
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
    ValueError
        If the class capsules' children lie on no grid.
    """
    layer: Any = network.routing.layers[-1]
    trace, (_, _, gate), votes = last_votes(network, images)  # children [B, I, d], types slowest
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


Measured = tuple[float, float | None] | None
"""A number and its standard deviation; None where there is none."""


def bars(
    labels: Sequence[str],
    ours: Sequence[Measured],
    paper: Sequence[Measured],
    path: str | Path,
    *,
    title: str,
    axis: str,
) -> Path:
    """Draw numbers beside those of a paper, a pair of bars each, from zero.

    Parameters
    ----------
    labels : sequence of str
        What each pair is.
    ours, paper : sequence
        Numbers with their standard deviations; None where there is none.
    path : str or Path
        Where the picture goes.
    title, axis : str
        What stands above, and what is measured.

    Returns
    -------
    Path
        ``path``.
    """
    figure, plot = pyplot().subplots(figsize=(8, 1.6 + 0.62 * len(labels)), layout="constrained")
    widest = max((each[0] + (each[1] or 0) for each in (*ours, *paper) if each is not None), default=1.0)
    for shift, values, colour, who in ((-0.2, ours, ORANGE, "ours"), (0.2, paper, BLUE, "paper")):
        plot.scatter([], [], color=colour, marker="s", s=80, label=who)  # in the legend even if there is none yet
        for index, value in enumerate(values):
            if value is None:
                text = "not run" if who == "ours" else ""
                plot.text(0.01 * widest, index + shift, text, va="center", fontsize=9, color=GREY)
                continue
            spread = value[1] or 0.0
            plot.barh(index + shift, value[0], 0.38, color=colour, xerr=spread or None, error_kw={"capsize": 3})
            end = value[0] + spread + 0.01 * widest
            plot.text(end, index + shift, f"{value[0]:.2f}", va="center", fontsize=9, color=colour)
    plot.set(xlim=(0, 1.12 * widest), xlabel=axis, yticks=range(len(labels)), yticklabels=labels)
    plot.invert_yaxis()
    plot.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower right", ncols=2)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return finish(figure, path)


def lines(
    values: Sequence[Any],
    measured: Mapping[str, tuple[Sequence[Measured], Sequence[Measured]]],
    path: str | Path,
    *,
    title: str,
    over: str,
    axis: str,
) -> Path:
    """Draw numbers over what is varied: ours as lines, those of a paper dashed.

    Parameters
    ----------
    values : sequence
        What is varied.
    measured : mapping
        Labels to ours and the paper's, a number and its standard deviation for each value; None where there is none.
    path : str or Path
        Where the picture goes.
    title, over, axis : str
        What stands above, what is varied, and what is measured.

    Returns
    -------
    Path
        ``path``.
    """
    figure, plot = pyplot().subplots(figsize=(8, 5.2), layout="constrained")
    for index, (label, both) in enumerate(measured.items()):
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        for who, line, found in (("ours", "-", both[0]), ("paper", "--", both[1])):
            here = [(x, *each) for x, each in zip(values, found, strict=True) if each is not None]
            if here:
                at, means, spreads = zip(*here, strict=True)
                fill = style["color"] if who == "ours" else "white"
                errors = [spread or 0.0 for spread in spreads] if any(spreads) else None
                name = f"{label}, {who}" if any(both[1]) else label
                plot.errorbar(at, means, errors, linestyle=line, label=name, markerfacecolor=fill, capsize=3, **style)
    plot.set(xlabel=over, ylabel=axis, xticks=list(values))
    plot.spines[["top", "right"]].set_visible(False)
    plot.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    if plot.get_legend_handles_labels()[0]:
        figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    return finish(figure, path)
