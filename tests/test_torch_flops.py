"""FlopCounterMode counts our ops: a formula each, for every routing and every backend."""

from __future__ import annotations

import pytest
import torch
from features import ROUTINGS, WINDOWS, Routing, number
from suite import every_backend
from torch.utils.flop_counter import FlopCounterMode

from fastcaps import Window, backend


def sizes(routing: Routing, window: Window | None) -> tuple[int, int]:
    """Operations of one product with all matrices, and of one sum of all votes or of their agreement."""
    given = routing.tensors(window)
    batch, types, *grid, rows, depth = given["children"].shape
    columns, parents = (given["weight"].shape[3], given["weight"].shape[1]) if "weight" in given else (depth, 1)
    places = (1, 1) if window is None else window.output_size(*grid)
    seen = types * (1 if window is None else window.positions)
    one = 2 * batch * places[0] * places[1] * seen * rows * columns
    one *= parents + ("leaky" in routing.name)
    return (one * depth if "weight" in given else 0), one


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if "prior" not in row.leaves], ids=str)  # has wider votes
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@every_backend
def test_forward_is_counted(name: str, window: Window | None, routing: Routing) -> None:
    """Every iteration computes votes; with a query also agreement and sums; else it is linear except for moments."""
    with backend(name), FlopCounterMode(display=False) as counter, torch.no_grad():
        routing.ours(routing.tensors(window, torch.float32), window)
    votes, one = sizes(routing, window)
    wanted = routing.first * (votes + (2 * one if routing.moments == 2 else 0))
    wanted += (routing.iterations - routing.first) * (votes + (1 + routing.moments) * one)
    # a convolution of its own for the bias of the votes
    more = one if routing.library else 0
    assert counter.get_total_flops() in (wanted, wanted + more)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_backward_is_counted(routing: Routing) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors(dtype=torch.float32).items()}
    loss = number(routing.ours(leaves))
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    votes, one = sizes(routing, None)
    iterations = 1 if "detach" in routing.name else routing.iterations
    # an iteration runs twice if a separate call sums the gradients of children and weights over iterations
    assert (
        0 < 2 * iterations * votes <= counter.get_total_flops() <= routing.iterations * (4 * votes + 8 * one)
        or not votes
    )
