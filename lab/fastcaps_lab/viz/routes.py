"""Where the routes of a class come from: its parts from every capsule below, down to positions in the image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.patches import ConnectionPatch
from torch import Tensor

from fastcaps.nn import CapsNet, RoutingStack, RoutingTrace
from fastcaps_lab.inside import seen, watched
from fastcaps_lab.viz.charts import GREY, ORANGE, finish, pyplot
from fastcaps_lab.viz.listening import overlay, plain, traced


@torch.no_grad()
def descent(stack: RoutingStack, trace: RoutingTrace) -> list[Tensor]:
    r"""Return how much of each class capsule comes from every capsule below it.

    Child i has the part :math:`q_{im} = g_i r_{im} / \sum_{i'} g_{i'} r_{i'm}` (coefficient r, gate g) in parent m at
    position l. From the class capsules down, parts multiply along a path, and the paths to a child add up:

    .. math:: R^k_{ci} = \sum_{m,l} R^{k+1}_{cml} \, q_{iml}, \quad R^{top}_{cm} = [c = m].

    The parts of a class add up to 1 in every layer. They do not depend on the strength of votes, which
    :func:`listening` shows for one layer.

    The stack has layers of any routing and a set of last parents; ``trace`` is that of a call of it. The result has,
    for each ``trace.poses[k]``, ``[B, classes, N, H, W]`` for a grid or ``[B, classes, I]`` for a set; the last is 1
    for each class at itself.
    """
    batch, classes = trace.poses[-1].shape[:2]
    found = [torch.eye(classes, device=trace.poses[-1].device).expand(batch, -1, -1)]
    for k in reversed(range(len(stack.layers))):
        found.insert(0, _below(stack, trace, k, found[0]))
    return found


def _below(stack: RoutingStack, trace: RoutingTrace, k: int, above: Tensor) -> Tensor:
    """Return the parts of layer k's children, from ``above``, those of its parents, ``[B, C, M]`` or
    ``[B, C, M, Ho, Wo]``: one step of :func:`descent`."""
    layer, children, shares = stack.layers[k], trace.poses[k], trace.coefficients[k].float()
    shares = shares if shares.dim() == 5 else shares[:, None, None]  # [B, Ho, Wo, I, M]
    gates = trace.activations[k]
    if gates is None:
        gates = torch.ones_like(children[..., 0])
    elif stack.layers[max(k - 1, 0)].activity_name == "scores":
        gates = gates.sigmoid()

    def read(gates: Tensor) -> Tensor:
        if layer.on_grid and children.dim() == 3:  # how a layer over a whole grid reads a set
            row = len(children), layer.in_capsules or 1, 1, -1
            return seen(layer, children.reshape(*row, children.shape[2]), gates.reshape(row))
        return seen(layer, children, gates)

    at_places, gather = torch.func.vjp(read, gates.float())[:2]
    parts = shares * at_places[..., None]
    parts = parts / parts.sum(-2, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
    found = torch.einsum("bcmhw,bhwim->bchwi", above if above.dim() == 5 else above[..., None, None], parts)
    # a child gets what every window that sees it has there: the transpose of how windows read gates
    return torch.stack([gather(each)[0] for each in found.unbind(1)], 1)


def parse_tree(
    network: CapsNet, image: Tensor, path: str | Path, *, title: str, names: Sequence[str] = (), branches: int = 3
) -> Path:
    """Draw one image's parse tree, from the predicted class down to the image, and return the file's path.

    Below each capsule are the ``branches`` children with the largest parts in it (:func:`descent`'s q), with the part
    in percent, which is also the thickness of the line. A frame shows a capsule's position in the image; at the left
    are the parts of the whole layer in the class. The image is ``[channels, H, W]``. Capsules without a grid have no
    frame, and classes without ``names`` are numbered.
    """
    logits, trace, _ = traced(network, image[None])
    chosen = int(logits[0].argmax())
    levels = [each[0, chosen].cpu() for each in descent(network.routing, trace)][::-1]
    tree: list[list[Node]] = [[Node((chosen,), 0, 1.0)]]
    for k in reversed(range(len(network.routing.layers))):
        line = []
        for index, node in enumerate(tree[-1]):
            above = torch.zeros_like(trace.poses[k + 1][..., 0])[:, None]  # [1, 1, M] or [1, 1, M, Ho, Wo]
            above[(0, 0, *node.capsule)] = 1
            parts = _below(network.routing, trace, k, above.float())[0, 0]
            best = parts.flatten().topk(min(parts.numel(), max(1, min(branches, _MOST // len(tree[-1])))))
            spots = zip(*(each.tolist() for each in torch.unravel_index(best.indices, parts.shape)), strict=True)
            line += [Node(spot, index, part) for spot, part in zip(spots, best.values.tolist(), strict=True)]
        tree.append(line)
    name = names[chosen] if names else f"class {chosen}"
    return finish(_tree(image.detach().float().cpu(), levels, tree, _frames(network, image, levels), name), path, title)


_MOST = 12  # capsules side by side


class Node(NamedTuple):
    """A capsule of a parse tree: its index in its layer, its parent in the line above, its part in that."""

    capsule: tuple[int, ...]
    above: int
    part: float


Frames = list[tuple[Sequence[Tensor], Sequence[float]] | None]
"""For each level the positions in the image, and the height and width of a receptive field; None for a set."""


def _places(network: CapsNet, image: Tensor, grid: Sequence[int]) -> list[Tensor]:
    """Return the centres of the primary capsules' receptive fields, in pixels: rows ``[H']`` and columns ``[W']``.

    They follow from gradients of two neighbours in the middle, where no border cuts what they see, on noise.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, *image.shape, generator=generator).to(image).requires_grad_()
    middles = []
    with watched(network), torch.enable_grad():
        made = network.primary(network.backbone(noise))
        features = (made if isinstance(made, Tensor) else made[0]).movedim((2, 3), (-2, -1))
        first = [(n - 1) // 2 for n in grid]
        for step in (0, 1):
            y, x = (min(start + step, n - 1) for start, n in zip(first, grid, strict=True))
            seeing = features[..., y, x]  # whose sum may be the same whatever they see: LayerNorm's is
            weights = torch.randn(seeing.shape, generator=generator).to(seeing)
            (slope,) = torch.autograd.grad(seeing, noise, weights, retain_graph=True)
            there = slope.abs().sum((0, 1)) > 0
            middles.append([float(there.any(axis).nonzero()[[0, -1]].float().mean()) for axis in (1, 0)])
    pairs = zip(grid, first, *middles, strict=True)
    return [a + (b - a or 1.0) * (torch.arange(n) - start) for n, start, a, b in pairs]


def _frames(network: CapsNet, image: Tensor, levels: Sequence[Tensor]) -> Frames:
    if levels[-1].dim() != 3:
        return [None] * len(levels)
    where = _places(network, image, levels[-1].shape[1:])
    axes = zip(where, image.shape[1:], strict=True)
    steps = [float(each[1] - each[0]) if len(each) > 1 else float(size) for each, size in axes]
    spans = list(steps)
    frames: Frames = [(where, steps)]
    for layer, level in zip(network.routing.layers, levels[-2::-1], strict=True):
        below = frames[0]
        if level.dim() != 3 or layer.window is None or below is None:
            frames.insert(0, None)
            continue
        kh, kw, sh, sw, ph, pw, dh, dw = layer.window.spec
        sizes = zip(below[0], level.shape[1:], (kh, kw), (sh, sw), (ph, pw), (dh, dw), steps, strict=True)
        middles = [m[0] + by * (torch.arange(n) * s - p + (k - 1) * d / 2) for m, n, k, s, p, d, by in sizes]
        spans = [span + (k - 1) * d * by for span, k, d, by in zip(spans, (kh, kw), (dh, dw), steps, strict=True)]
        steps = [step * s for step, s in zip(steps, (sh, sw), strict=True)]
        frames.insert(0, (middles, spans))
    return frames


def _tree(image: Tensor, levels: Sequence[Tensor], tree: Sequence[Sequence[Node]], frames: Frames, name: str) -> Any:
    plt = pyplot()
    widest = max(map(len, tree))
    size = (1.9 + 1.15 * widest, 0.6 + 1.75 * len(tree))
    figure, grid = plt.subplots(len(tree), widest + 1, figsize=size, layout="constrained", squeeze=False)
    for plot in grid.flat:
        plot.set_axis_off()
    above: list[Any] = []  # the plots of the line above
    for plots, level, line, frame in zip(grid, levels, tree, frames, strict=True):
        if frame is not None:
            overlay(plots[0], image, level.sum(0), frame[0], cmap="Oranges", vmin=0)
            plots[0].set_title("all of this layer's", fontsize=8, color=GREY, pad=3)
        drawn = [plots[1 + int((index + 0.5) * widest / len(line))] for index in range(len(line))]
        most = max(node.part for node in line)
        for plot, node in zip(drawn, line, strict=True):
            plot.set_axis_on()
            plain(plot, image)
            kind = "type" if level.dim() == 3 else "capsule"
            label = f"{kind} {node.capsule[0]}: {100 * node.part:.1f} %" if above else name
            plot.set_title(label, fontsize=9, pad=3)
            if frame is not None and len(node.capsule) == 3:
                (rows, columns), (tall, wide) = frame
                corner = float(columns[node.capsule[2]]) - wide / 2, float(rows[node.capsule[1]]) - tall / 2
                plot.add_patch(plt.Rectangle(corner, wide, tall, fill=False, edgecolor=ORANGE, linewidth=2))
            if above:
                thick = 0.6 + 3.4 * node.part / most if most > 0 else 0.6
                ends = ((0.5, 0.0), (0.5, 1.25), above[node.above].transAxes, plot.transAxes)
                figure.add_artist(ConnectionPatch(*ends, color=GREY, linewidth=thick, alpha=0.7, zorder=0))
        above = drawn
    return figure
