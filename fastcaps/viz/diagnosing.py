"""The picture of a :class:`fastcaps.diagnosis.Diagnosis`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastcaps.diagnosis import Diagnosis
from fastcaps.viz.charts import BLUE, GREY, ORANGE, finish, pyplot, tidy

_LOWEST = 1e-6  # what is smaller is drawn there


def diagnosis(found: Diagnosis, path: str | Path) -> Path:
    """Draw the strengths, entropies and gradients of :func:`fastcaps.diagnose`, a line a layer, the lowest below."""
    layers = found.layers
    figure, plots = pyplot().subplots(
        1, 3, figsize=(13, 2.4 + 0.75 * len(layers)), layout="constrained", sharey=True, width_ratios=(5, 3, 3)
    )
    strengths, entropy, gradients = plots
    across = gradients.get_yaxis_transform()  # across in shares of the plot, upwards in layers
    for index, layer in enumerate(layers):
        values = np.clip(layer.strengths, _LOWEST, None)
        spread = np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1)
        dead = np.isin(np.arange(len(values)), layer.dead)
        strengths.scatter(values[~dead], index + spread[~dead], s=12, color=BLUE, alpha=0.7, linewidths=0)
        strengths.scatter(values[dead], index + spread[dead], s=16, color=ORANGE, marker="x", linewidths=1.2)
        if layer.entropy is None:
            entropy.text(0.02, index, "no coefficients" if not layer.compete else "no choice", va="center", color=GREY)
        else:
            entropy.barh(index, layer.entropy, 0.5, color=BLUE)
            entropy.text(
                layer.entropy + 0.02, index, f"{layer.entropy:.3f}\nof {layer.compete}", va="center", fontsize=9
            )
        for value, marker, colour in ((layer.weight_gradient, "o", BLUE), (layer.parent_gradient, "D", ORANGE)):
            if value:
                gradients.plot(value, index, marker=marker, color=colour, markersize=7, linestyle="none")
            elif value is not None:
                gradients.text(0.02, index, "0", transform=across, color=colour, va="center")
    names = [
        f"{each.path}\n{each.layer}: {len(each.dead)} of {len(each.strengths)} dead, by {each.measured_by}"
        for each in layers
    ]
    strengths.set(yticks=range(len(layers)), yticklabels=names, ylim=(-0.6, len(layers) - 0.4), xscale="log")
    strengths.axvline(found.threshold, color=ORANGE, linewidth=1, linestyle="--")
    strengths.set_xlabel("the parents' greatest strength in the batch (crosses: dead)")
    strengths.set_title("Dead capsules", loc="left", fontsize=11)
    entropy.set(xlim=(0, 1.5), xticks=(0, 0.5, 1), xlabel="0: each goes to one; 1: all alike")
    entropy.set_title("Routing entropy", loc="left", fontsize=11)
    gradients.set_title("Gradient norms", loc="left", fontsize=11)
    known = [each for layer in layers for each in (layer.weight_gradient, layer.parent_gradient)]
    if any(known):
        gradients.set_xscale("log")
    for marker, colour, name in (("o", BLUE, "weights"), ("D", ORANGE, "what it returns")):
        gradients.plot([], [], marker=marker, color=colour, linestyle="none", label=name)
    if any(each is not None for each in known):
        gradients.legend(
            frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.02 - 0.5 / len(layers)), ncols=2
        )
    else:
        gradients.text(0.5, 0.5, "no loss given", transform=gradients.transAxes, color=GREY, ha="center")
        gradients.set_xticks([])
    for plot in plots:
        tidy(plot, "x")
        plot.tick_params(axis="y", length=0)
    return finish(figure, path, found.title)
