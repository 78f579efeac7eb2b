"""The picture of a :class:`fastcaps_lab.diagnosis.Diagnosis`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastcaps_lab.diagnosis import Diagnosis
from fastcaps_lab.viz.charts import BLUE, ORANGE, finish, pyplot, tidy

_LOWEST = 1e-6  # what is smaller is drawn there


def diagnosis(found: Diagnosis, path: str | Path) -> Path:
    """Draw the strengths, entropies and gradients of :func:`fastcaps_lab.diagnose`, a line per layer, lowest below."""
    layers, at = found.layers, range(len(found.layers))
    figure, plots = pyplot().subplots(
        1, 3, figsize=(13, 2.4 + 0.75 * len(layers)), layout="constrained", sharey=True, width_ratios=(5, 3, 3)
    )
    strengths, entropy, gradients = plots
    for index, layer in enumerate(layers):
        values = np.clip(layer.strengths, _LOWEST, None)
        spread = np.linspace(-0.3, 0.3, len(values)) if len(values) > 1 else np.zeros(1)
        dead = np.isin(np.arange(len(values)), layer.dead)
        strengths.scatter(values[~dead], index + spread[~dead], s=12, color=BLUE, alpha=0.7, linewidths=0)
        strengths.scatter(values[dead], index + spread[dead], s=16, color=ORANGE, marker="x", linewidths=1.2)
        label = "no choice" if layer.compete else "no coefficients"
        label = label if layer.entropy is None else f"{layer.entropy:.3f}\n{layer.compete} compete"
        entropy.text((layer.entropy or 0.0) + 0.02, index, label, va="center", fontsize=9)
    entropy.barh(at, [layer.entropy or 0.0 for layer in layers], 0.5, color=BLUE)
    weights, returned = [each.weight_gradient for each in layers], [each.parent_gradient for each in layers]
    for norms, marker, colour, name in ((weights, "o", BLUE, "weights"), (returned, "D", ORANGE, "what it returns")):
        known = [np.nan if each is None else max(each, _LOWEST) for each in norms]
        gradients.plot(known, at, marker=marker, color=colour, linestyle="none", label=name, clip_on=False)
    names = [
        f"{each.path}\n{each.layer}: {len(each.dead)} of {len(each.strengths)} dead, by {each.measured_by}"
        for each in layers
    ]
    strengths.set(yticks=at, yticklabels=names, ylim=(-0.6, len(layers) - 0.4), xscale="log")
    strengths.set_xlabel("greatest strength in the batch (crosses: dead)")
    strengths.axvline(found.threshold, color=ORANGE, linewidth=1, linestyle="--")
    entropy.set(xlim=(0, 1.5), xticks=(0, 0.5, 1), xlabel="0: each goes to one; 1: all alike")
    gradients.set_xscale("log")
    drawn = [max(each, _LOWEST) for each in (*weights, *returned) if each is not None] or [1.0]
    gradients.set_xlim(*(10.0 ** np.array([np.floor(np.log10(min(drawn))), np.floor(np.log10(max(drawn))) + 1])))
    gradients.xaxis.get_major_locator().set_params(numticks=5)
    gradients.minorticks_off()
    gradients.set_xlabel("none without a loss" if found.loss is None else "of the loss")
    gradients.legend(frameon=False, fontsize=9)
    for plot, title in zip(plots, ("Dead capsules", "Routing entropy", "Gradient norms"), strict=True):
        plot.set_title(title, loc="left", fontsize=11)
        tidy(plot, "x")
        plot.tick_params(axis="y", length=0)
    return finish(figure, path, found.title)
