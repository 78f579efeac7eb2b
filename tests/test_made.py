"""Votes that a function makes: verbs and routings are those of the same votes, stored or made by matrices."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from features import ROUTINGS, Leaves, Routing, close, number, training, with_gradients
from stored_votes import Case, Stored, derivatives, made, verbs
from torch import Tensor

from fastcaps import Votes, functional

PLACES = [(4,), (2, 2), (1, 2, 2), (2, 1, 2, 1)]
MAKEABLE = [row for row in ROUTINGS if "prior" not in row.leaves and "leaky" not in row.name]


def at_places(x: Tensor, places: tuple[int, ...], of_children: bool) -> Tensor:
    """Return what a call on ``[B * space, ...]`` is given or returns, as that on ``[B, *space, ...]`` has it."""
    x = x.unflatten(0, places)
    return x if of_children else x.movedim(len(places), 1)


@pytest.mark.parametrize("block", [1, 2, None])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_verbs_of_made_votes(places: tuple[int, ...], block: int | None) -> None:
    case = Case(batch=4, types=5, bias="IM")
    given = {k: at_places(x, places, k == "r") if k in ("parents", "p", "r") else x for k, x in case.leaves().items()}
    votes = made(given, places, block)
    assert votes.coefficients_shape == given["r"].shape and votes.parents_shape == given["parents"].shape
    found = derivatives(lambda leaves: verbs(made(leaves, places, block), leaves), given)

    def stored(leaves: Leaves) -> Leaves:
        whole = leaves["children"].unsqueeze(2) @ leaves["weight"] + leaves["bias"]
        return verbs(Stored.of(whole.unflatten(0, places)), leaves)

    close(found, derivatives(stored, given))


@pytest.mark.parametrize(("places", "block"), list(zip(PLACES, (1, 2, 3, None), strict=True)), ids=str)
@pytest.mark.parametrize("routing", MAKEABLE, ids=str)
def test_routings_of_made_votes(routing: Routing, places: tuple[int, ...], block: int | None) -> None:
    """They return, and pass back, what they do for the same votes made by matrices."""
    given, flat = routing.tensors(batch=prod(places)), len(places) - 1
    leaves = {k: x.requires_grad_() for k, x in given.items()}
    placed: dict[str, Any] = {k: x for k, x in leaves.items() if k not in ("children", "weight", "bias")} | {
        "weight": None
    }
    placed |= {k: at_places(leaves[k], places, k != "parents") for k in (routing.child, "parents") if k in leaves}
    placed |= {"bias": None} if "bias" in leaves else {}
    result = routing.function(made(leaves, places, block), **placed, **routing.settings, return_coefficients=True)
    close({"r": result.coefficients.flatten(0, flat)}, {"r": routing.ours(given, coefficients=True)["coefficients"]})
    found = {name: getattr(result, name).movedim(1, flat + 1).flatten(0, flat) for name in routing.results}
    close(with_gradients(found, leaves), training(routing, given))


def test_random_votes_are_the_same_in_every_verb() -> None:
    """On the way back too; and the generator moves on once, by what the blocks draw."""
    given = {k: x.requires_grad_() for k, x in Case(types=5, batch=4).leaves().items()}
    kept: dict[Any, list[Tensor]] = {}

    def dropped(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5)
        kept.setdefault(x.shape[1], []).append(x.detach())
        return x

    votes = made(given, (4,), 3, dropped)
    kept.clear()
    torch.manual_seed(0)
    number(verbs(votes, given)).backward()
    after = torch.rand(2)
    assert set(kept) == {3, 2} and all(torch.equal(one, each[0]) for each in kept.values() for one in each)
    assert len(kept[3]) > 8  # made again
    torch.manual_seed(0)
    for block in (kept[3], kept[2]):
        F.dropout(block[0], 0.5)
    assert torch.equal(after, torch.rand(2))


def test_what_make_raises_leaves_the_generator_alone() -> None:
    calls = []

    def make(i: int, j: int) -> Tensor:
        calls.append(torch.rand(3))
        if len(calls) > 2:
            raise OSError("disk")
        return torch.ones(2, j - i, 3, 1, 2)

    votes = Votes.in_blocks(make, 4)
    first = votes.sum(1.0)
    state = torch.get_rng_state()
    with pytest.raises(OSError, match="disk"):
        votes.agreement(first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_convolution_makes_votes_of_an_empty_batch() -> None:
    convolutions = torch.nn.ModuleList(torch.nn.Conv3d(2, 3 * 4, 3, padding=1) for _ in range(5))
    for batch in (2, 0):
        x = torch.randn(batch, 5, 2, 3, 4, 2)

        def make(i: int, j: int, x: Tensor = x) -> Tensor:
            every = [
                convolutions[k](x[:, k]).unflatten(1, (3, 1, 4)).movedim((1, 2, 3), (-3, -2, -1)) for k in range(i, j)
            ]
            return torch.stack(every, -4)

        votes = Votes.in_blocks(make, 5, block=2)
        parents, r = functional.dynamic_routing(votes, return_coefficients=True)
        assert parents.shape == (batch, 3, 3, 4, 2, 1, 4) and r.shape == (batch, 3, 4, 2, 5, 3)
        parents.sum().backward()
    assert all(c.weight.grad is not None for c in convolutions)


@pytest.mark.parametrize("verb", ["agreement", "distance", "sum", "square_sum"])
def test_a_change_in_place_is_found_by_autograd(verb: str) -> None:
    """Of what a verb used beside the votes, which are made again on the way back."""
    given = {k: x.requires_grad_() for k, x in Case(types=5).leaves().items()}
    x = 1 * given["r" if "sum" in verb else "parents"]
    found = getattr(made(given, (2,), 2), verb)(x, *[0.0] * (verb == "square_sum"))
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_votes_that_change_are_named() -> None:
    """Between two verbs, and between forward and backward."""
    scale, leaf = [1.0], torch.ones(2, 1, 3, 1, 1, requires_grad=True)
    votes = Votes.in_blocks(lambda i, j: (leaf * scale[0]).expand(-1, j - i, -1, 2, 2), 4, block=2)
    found = votes.sum(torch.ones(4, 1, requires_grad=True))
    scale[0] = 2.0
    for run in (lambda: votes.sum(1.0), found.sum().backward):
        with pytest.raises(ValueError, match=r"make must return the same votes .* make\([02], [24]\) returned others"):
            run()
