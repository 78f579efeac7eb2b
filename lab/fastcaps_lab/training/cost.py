"""Memory and time of a training step of a whole network: ``python -m fastcaps_lab.training.cost FOLDER [eager]``.

It runs in a fresh process, so that nothing else has used memory before. ``eager`` measures the same network in ordinary
differentiable PyTorch, whose autograd stores the votes of every iteration, as in the published implementations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, replace_all_batch_norm_modules_

from fastcaps_lab import models
from fastcaps_lab.measure import median_ms, peak_growth
from fastcaps_lab.training.config import TrainConfig, kept


def measure(config: TrainConfig, *, eager: bool = False, seconds: float = 1.0) -> dict[str, Any]:
    """Measure steps of a network, sized as in the paper, on random images.

    Return ``memory`` that a step adds at its peak in MB (10^6 bytes), ``time`` of a step in ms (the median of about
    ``seconds``), ``parameters``, ``seed``. ``eager`` skips updates that cannot change the result, and computes no votes
    in the first iteration, which is linear; the published implementations need more.
    """
    torch.manual_seed(config.seed)
    network: Any = models.create(config.network.name, **config.network.options)
    if eager:
        replace_all_batch_norm_modules_(network)  # torch.func does not allow them to update statistics
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    images = torch.randn(config.batch_size, network.in_channels, *network.image_size)

    def step(some: Tensor) -> None:
        if eager:  # torch.func runs the reference's formulas, which are ordinary PyTorch
            grad(lambda given: functional_call(network, given, (some,)).logsumexp(1).sum())(weights)
            return
        network(some).logsumexp(1).sum().backward()
        network.zero_grad()

    step(images[:1])  # creates threads, code and caches, which are not part of a step's memory
    grown = peak_growth(lambda: step(images))
    milliseconds = median_ms(lambda: step(images), seconds)
    parameters = sum(weight.numel() for weight in weights.values())
    return {"memory": grown / 1e6, "time": milliseconds, "parameters": parameters, "seed": config.seed}


if __name__ == "__main__":
    print(json.dumps(measure(kept(Path(sys.argv[1])), eager="eager" in sys.argv[2:])))
