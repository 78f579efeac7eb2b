"""Charts of a training, and of our values beside a paper's; saving of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

# Okabe and Ito's colours and a map from orange to purple: distinguishable with every colour vision
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"
OURS, OTHERS = BLUE, "#8C8C8C"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
DIVERGING = "PuOr_r"
Measured = Sequence[tuple[float, float | None] | None]
"""Values and their standard deviations, or None."""


def pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw into files, without a screen."""
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def finish(figure: Any, path: str | Path, title: str = "") -> Path:
    """Write a figure into its file, under its title if it has one, and close it."""
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    return Path(path)


def tidy(plot: Any, grid: str = "") -> None:
    """Remove two sides of a plot's frame, and draw light lines under it along an axis."""
    plot.spines[["top", "right"]].set_visible(False)
    if grid:
        plot.grid(axis=grid, color="#DDDDDD", linewidth=0.8)
        plot.set_axisbelow(True)


def learning_curve(
    history: Sequence[dict[str, float]], path: str | Path, *, title: str, target: float | None = None
) -> Path:
    """Draw loss and accuracy over the epochs into a file, and return its path.

    ``history`` has rows with epoch, train_loss, test_loss, train_accuracy and test_accuracy, as training returns them;
    ``target`` is an accuracy from 0 to 1 to mark with a line.
    """
    figure, plots = pyplot().subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    said = (("loss", 1.0, "cross-entropy (nats per image)"), ("accuracy", 100.0, "images classified correctly (%)"))
    for plot, (quantity, factor, label) in zip(plots, said, strict=True):
        for part, colour, marker in (("train", BLUE, "o"), ("test", ORANGE, "s")):
            at, values = zip(*((row["epoch"], factor * row[f"{part}_{quantity}"]) for row in history), strict=True)
            plot.plot(at, values, color=colour, marker=marker, markersize=5, linewidth=2, label=f"{part} images")
        plot.set(xlabel="epoch", ylabel=label)
        plot.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        tidy(plot, "y")
    plots[0].set_yscale("log")
    plots[0].legend(frameon=False)
    if target is not None:
        plots[1].axhline(100 * target, color=GREY, linewidth=1, linestyle="--")
    last = 100 * history[-1]["test_accuracy"]
    plots[1].set_title(f"last: {last:.2f} % of test images", loc="right", fontsize=10, color=ORANGE)
    return finish(figure, path, title)


def bars(labels: Sequence[str], ours: Measured, paper: Measured, path: str | Path, *, title: str, axis: str) -> Path:
    """Draw values beside those of a paper, if there are any, as bars from zero; ``axis`` says what is measured."""
    figure, plot = pyplot().subplots(figsize=(8, 1.6 + 0.62 * len(labels)), layout="constrained")
    pairs = ((-0.2, ours, OURS, "ours"), (0.2, paper, OTHERS, "paper")) if any(paper) else ((0.0, ours, OURS, "ours"),)
    for shift, values, colour, who in pairs:
        numbers, spreads = np.array([(np.nan, np.nan) if each is None else each for each in values], float).T
        at = np.arange(len(labels)) + shift
        drawn = plot.barh(at, numbers, 0.38, color=colour, label=who, xerr=spreads, error_kw={"capsize": 3})
        plot.bar_label(drawn, fmt="%.2f", padding=3, fontsize=9)
        for place in at[np.isnan(numbers)] if who == "ours" else ():
            plot.text(0, place, " not run", va="center", fontsize=9, color=GREY)
    plot.margins(x=0.12)
    plot.set(xlim=(0, None), xlabel=axis, yticks=range(len(labels)), yticklabels=labels)
    plot.invert_yaxis()
    tidy(plot)
    if any(paper):
        figure.legend(frameon=False, loc="outside lower right", ncols=2)
    return finish(figure, path, title)


def lines(
    values: Sequence[Any],
    measured: Mapping[str, tuple[Measured, Measured]],
    path: str | Path,
    *,
    title: str,
    over: str,
    axis: str,
) -> Path:
    """Draw values over what is varied: ours as lines, those of a paper dashed.

    ``measured`` maps labels to ours and the paper's, one for each value; ``over`` and ``axis`` say what is varied and
    what is measured.
    """
    figure, plot = pyplot().subplots(figsize=(8, 5.2), layout="constrained")
    for index, (label, both) in enumerate(measured.items()):
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        for who, line, fill, found in (("ours", "-", style["color"], both[0]), ("paper", "--", "white", both[1])):
            here = [(x, *each) for x, each in zip(values, found, strict=True) if each is not None]
            if here:
                at, means, spreads = zip(*here, strict=True)
                errors = np.array(spreads, float) if any(spreads) else None  # None is NaN, which draws no bar
                name = f"{label}, {who}" if any(both[1]) else label
                plot.errorbar(at, means, errors, linestyle=line, label=name, markerfacecolor=fill, capsize=3, **style)
    plot.set(xlabel=over, ylabel=axis, xticks=list(values))
    tidy(plot, "y")
    if plot.get_legend_handles_labels()[0]:
        figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return finish(figure, path, title)
