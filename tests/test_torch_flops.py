"""FlopCounterMode counts our ops: a formula each, for every routing and every backend."""

from __future__ import annotations

import pytest
import torch
from features import BATCH, ROUTINGS, WINDOWS, Routing, number
from torch.utils.flop_counter import FlopCounterMode

from fastcaps import Window, backend
from fastcaps.functional import inverted_attention_routing


def sizes(routing: Routing, window: Window | None) -> tuple[int, int]:
    """Operations of one product with all matrices, and of one sum of all votes or of their agreement."""
    given = routing.tensors(window)
    rows, depth = given["children"].shape[-2:]
    columns = given["weight"].shape[-1] if "weight" in given else depth
    parents = (given["weight"].shape[1] if "weight" in given else 1) + ("leaky" in routing.name)
    positions, seen = 1, given["children"].shape[1]
    if window is not None:
        height, width = window.output_size(*given["children"].shape[2:4])
        positions, seen = height * width, seen * window.positions
    one = 2 * BATCH * positions * seen * parents * rows * columns
    return (one * depth if "weight" in given else 0), one


def expected(routing: Routing, window: Window | None) -> int:
    """Every turn makes the votes; with a query it measures agreement and sums; else it is linear but for moments."""
    votes, one = sizes(routing, window)
    sums = 2 if routing.name.startswith(("em", "heinsen")) else 1
    first = votes + (2 * one if sums == 2 else 0)
    turns = routing.turns - routing.first
    return routing.first * first + turns * (votes + (1 + sums) * one)


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if "prior" not in row.leaves], ids=str)  # has wider votes
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_forward_is_counted(name: str, window: Window | None, routing: Routing) -> None:
    with backend(name), FlopCounterMode(display=False) as counter, torch.no_grad():
        routing.ours(routing.tensors(window, torch.float32), window)
    wanted = {expected(routing, window)}
    if routing.function is inverted_attention_routing and routing.first:
        wanted.add(max(wanted) + sizes(routing, window)[1])  # a convolution of its own for the bias of the votes
    assert counter.get_total_flops() in wanted


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_backward_is_counted(routing: Routing) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors(dtype=torch.float32).items()}
    loss = number(routing.ours(leaves))
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    votes, one = sizes(routing, None)
    turns = 1 if "detach" in routing.name else routing.turns
    # a turn is asked twice where the gradients of children and weights are summed over turns in a call of their own
    assert 2 * turns * votes <= counter.get_total_flops() <= routing.turns * (4 * votes + 8 * one)
    assert counter.get_total_flops() > 0
