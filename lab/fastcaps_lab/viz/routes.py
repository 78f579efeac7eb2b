"""Where the routes of a class come from: its parts from every capsule below, down to positions in the image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastcaps.nn import CapsNet, RoutingStack, RoutingTrace
from fastcaps_lab.inside import seen
from fastcaps_lab.viz.charts import finish, pyplot
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


def route_maps(network: CapsNet, image: Tensor, path: str | Path, *, title: str, names: Sequence[str] = ()) -> Path:
    """Draw where the predicted class comes from in one image, and return the file's path.

    There is a map for each layer on a grid, from the primary capsules up: the parts of its positions in the class, by
    :func:`descent`, summed over the capsule types. Primary capsules are taken to be spread evenly over the image, as
    after padded convolutions. The image is ``[channels, H, W]``; classes without ``names`` are numbered.
    """
    logits, trace, _ = traced(network, image[None])
    chosen = int(logits[0].argmax())
    levels = [each[0, chosen].cpu() for each in descent(network.routing, trace)]
    everywhere = _places(network.routing, image, levels)
    maps = [(level, where) for level, where in zip(levels, everywhere, strict=True) if where is not None]
    image = image.detach().float().cpu()
    width = 2.6 * (1 + len(maps))
    figure, plots = pyplot().subplots(1, 1 + len(maps), figsize=(width, 3.2), layout="constrained", squeeze=False)
    plain(plots[0, 0], image)
    plots[0, 0].set_title(names[chosen] if names else f"class {chosen}", fontsize=10)
    for k, (plot, (level, where)) in enumerate(zip(plots[0, 1:], maps, strict=True)):
        drawn = overlay(plot, image, level.sum(0), where, cmap="Oranges", vmin=0)
        plot.set_title(f"{'primary capsules' if k == 0 else f'layer {k}'}: {level.shape[0]} types", fontsize=10)
        figure.colorbar(drawn, ax=plot, shrink=0.7)
    return finish(figure, path, title)


def _places(stack: RoutingStack, image: Tensor, levels: Sequence[Tensor]) -> list[list[Tensor] | None]:
    """Return the positions of each level's capsules in the image, in pixels: rows and columns; None for a set."""
    if levels[0].dim() != 3:
        return [None] * len(levels)
    sizes = [*zip(levels[0].shape[1:], image.shape[1:], strict=True)]
    steps = [size / n for n, size in sizes]
    found: list[list[Tensor] | None] = [[(torch.arange(n) + 0.5) * size / n - 0.5 for n, size in sizes]]
    for layer, level in zip(stack.layers, levels[1:], strict=True):
        below = found[-1]
        if level.dim() != 3 or layer.window is None or below is None:
            found.append(None)
            continue
        kh, kw, sh, sw, ph, pw, dh, dw = layer.window.spec
        axes = zip(below, level.shape[1:], (kh, kw), (sh, sw), (ph, pw), (dh, dw), steps, strict=True)
        found.append([m[0] + by * (torch.arange(n) * s - p + (k - 1) * d / 2) for m, n, k, s, p, d, by in axes])
        steps = [step * s for step, s in zip(steps, (sh, sw), strict=True)]
    return found
