"""What the values of a class capsule mean: reconstructions with one of them changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.nn import CapsNet
from fastcaps_lab.viz.charts import finish, pyplot

REACH, STEPS = 0.25, 11  # of the paper: steps of 0.05


@torch.no_grad()
def perturbations(network: CapsNet, images: Tensor, labels: Tensor) -> Tensor:
    """Return reconstructions with one value of the class capsule changed (Sabour et al. 2017, Figure 4).

    Each value changes by -0.25 to 0.25 in steps of 0.05, as in the paper. Images are ``[B, channels, H, W]``, the
    result is ``[B, d, steps, channels, H, W]``; the middle step is the unchanged reconstruction. ValueError if the
    network has no decoder.
    """
    if network.decoder is None:
        raise ValueError("network: got one without a decoder, want one that reconstructs")
    capsules = network(images, return_trace=True)[1].poses[-1]  # [B, M, d]
    count, dim = len(images), capsules.shape[-1]
    steps = torch.linspace(-REACH, REACH, STEPS)
    perturbed = capsules[:, None, None].repeat(1, dim, len(steps), 1, 1)  # [B, d, steps, M, d]
    one_number = torch.eye(dim)[:, None] * steps[:, None]  # [d, steps, d]: a step of one number, the others 0
    perturbed[torch.arange(count), :, :, labels] += one_number
    drawn: Tensor = network.decoder(perturbed.flatten(0, 2), labels.repeat_interleave(dim * len(steps)))
    return drawn.reshape(count, dim, len(steps), *drawn.shape[1:])


def perturbation_map(drawn: Tensor, path: str | Path, *, names: Sequence[str], title: str) -> Path:
    """Draw, for images of classes ``names``, a row per value of the capsule and a column per step; return the path.

    ``drawn`` is ``[n, d, steps, channels, H, W]`` from :func:`perturbations`; of several channels the mean is shown.
    """
    count, dim, steps = drawn.shape[:3]
    framed = F.pad(drawn.mean(3), (1, 1, 1, 1), value=0.15)  # a thin frame keeps images apart
    height, width = framed.shape[-2:]
    side = 0.3  # inches an image
    figure, plots = pyplot().subplots(
        1,
        count,
        figsize=(count * (steps * side * width / height + 0.2) + 0.6, dim * side + 1.1),
        layout="constrained",
        squeeze=False,
    )
    for plot, grid, name in zip(plots[0], framed, names, strict=True):
        plot.imshow(grid.transpose(1, 2).flatten(2).flatten(0, 1).numpy(), cmap="gray_r", vmin=0, vmax=1)
        ends = [(k + 0.5) * width - 0.5 for k in (0, (steps - 1) / 2, steps - 1)]
        plot.set(title=f"a {name}", xticks=ends, yticks=[(k + 0.5) * height - 0.5 for k in range(dim)])
        plot.set_xticklabels([f"−{REACH:g}", "0", f"+{REACH:g}"])
        plot.set_yticklabels([str(k) for k in range(dim)] if plot is plots[0][0] else [], fontsize=7)
        plot.tick_params(length=0, labelsize=8)
    plots[0][0].set_ylabel("which number of the capsule is moved")
    return finish(figure, path, title)
