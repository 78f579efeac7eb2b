"""The pictures of docs/routings: one small scene, routed iteration by iteration by every algorithm.

Twelve children vote for two parents, in poses of two numbers. Six agree on parent A, six on parent B; what a child says
to the other parent is scattered. The coefficients and poses are what the reference computes, in float64.

    python -m tools.routing_pictures        # writes docs/routings/*.svg
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from matplotlib.patches import Ellipse
from torch import Tensor
from torch.nn.functional import normalize

import fastcaps
from bench.charts import BLUE, ORANGE, as_svg, pyplot
from fastcaps import functional

DOCS = Path(__file__).resolve().parents[1] / "docs" / "routings"
CHILDREN, PARENTS, ITERATIONS = 12, 2, 3
COLOURS = (BLUE, ORANGE)
Iteration = tuple[Tensor, Tensor, Tensor | None]
"""Coefficients [I, M], poses [M, 2], and variances [M, 2] where the parents have some."""


def votes() -> Tensor:
    """Return the votes of the scene, ``[I, M, 2]``: those of the first half agree on parent 0, of the second on 1."""
    chance, centres = random.Random(26), ((0.7, 0.45), (-0.55, 0.6))
    made = []
    for child in range(CHILDREN):
        chosen = child * PARENTS // CHILDREN
        for parent in range(PARENTS):
            middle, spread = (centres[parent], 0.16) if parent == chosen else ((0.0, 0.0), 1.0)
            made.append([middle[k] + chance.uniform(-spread, spread) for k in range(2)])
    return torch.tensor(made, dtype=torch.float64).view(CHILDREN, PARENTS, 2)


SCENES = ("inverted-attention", "dynamic", "em", "heinsen", "pooling")


def scene(name: str, iteration: int) -> Iteration:
    """Return what a routing has after so many iterations. It routes children of zeros, whose votes are the biases."""
    bias = votes()[:, :, None]
    children, zeros = bias.new_zeros(1, CHILDREN, 1, 2), bias.new_zeros(1, PARENTS)
    given: dict[str, Any] = {"bias": bias, "iterations": iteration, "return_coefficients": True}
    with fastcaps.backend("reference"):
        if name == "em":
            found = functional.em_routing(children, None, None, zeros[0], zeros[0], **given)
            r, poses = found.coefficients[0], found.poses[0, :, 0]
            return r, poses, (r[..., None] * (bias[:, :, 0] - poses) ** 2).sum(0) / r.sum(0)[:, None]
        if name == "heinsen":
            del given["bias"]
            found = functional.heinsen_routing(children, None, None, bias, zeros + 1.0, zeros, **given)
            return found.coefficients[0], found.poses[0, :, 0], found.variances[0, :, 0]
        if name == "dynamic":
            found = functional.dynamic_routing(children, None, **given)
        elif name == "pooling":  # its last sum is an iteration of this picture
            found = functional.routing_pool(children, sharpness=1.5, **given | {"iterations": iteration - 1})
        else:
            found = functional.inverted_attention_routing(children, None, normalize=False, **given)
    poses = found.poses[0, :, 0]
    return found.coefficients[0], normalize(poses, dim=-1) if name == "inverted-attention" else poses, None


def picture(name: str) -> str:
    """Return the SVG of one routing: a row a parent, a column an iteration.

    A dot is a vote, as large as its coefficient; a cross the parent's pose, an ellipse its variances.
    """
    figure, plots = pyplot().subplots(PARENTS, ITERATIONS, figsize=(6.4, 4.4))
    figure.subplots_adjust(0.05, 0.02, 0.99, 0.94, 0.05, 0.05)
    owners = [COLOURS[child * PARENTS // CHILDREN] for child in range(CHILDREN)]
    for t in range(ITERATIONS):
        r, poses, variances = scene(name, t + 1)
        shares = r * CHILDREN / PARENTS if name == "pooling" else r  # whose sum over children is 1
        for m in range(PARENTS):
            plot, (x, y) = plots[m][t], poses[m].tolist()
            plot.scatter(*votes()[:, m].T.tolist(), [(2 + 14 * share**0.5) ** 2 for share in shares[:, m].tolist()],
                         c=owners, alpha=0.55, linewidths=0)  # fmt: skip
            if variances is not None:
                wide, high = (2 * float(one) ** 0.5 for one in variances[m])
                plot.add_patch(Ellipse((x, y), wide, high, fill=False, edgecolor=COLOURS[m]))
            if name in ("inverted-attention", "dynamic"):
                plot.plot([0, x], [0, y], color=COLOURS[m])
            plot.plot([x], [y], "+", color="black", markersize=10, markeredgewidth=2)
            plot.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), xticks=[], yticks=[])
        plots[0][t].set_title(f"iteration {t + 1}", fontsize=10)
    for m in range(PARENTS):
        plots[m][0].set_ylabel("AB"[m], rotation=0, labelpad=8, color=COLOURS[m])
    return as_svg(figure)


def main() -> None:
    for name in SCENES:
        (DOCS / f"{name}.svg").write_text(picture(name), encoding="utf-8")
        print(f"written: {DOCS / name}.svg")


if __name__ == "__main__":
    main()
