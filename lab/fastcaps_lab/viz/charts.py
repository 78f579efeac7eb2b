"""The chart of a training; saving of figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

# Okabe and Ito's colours and a map from orange to purple: distinguishable with every colour vision
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#595959"
DIVERGING = "PuOr_r"


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
