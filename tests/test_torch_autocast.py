"""Half precision: what is rounded, how often, and which dtype comes out, under autocast and without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from features import ROUTINGS, WINDOWS, Leaves, Routing, number
from nn_layers import LAYERS, Row
from torch import Tensor

from fastcaps import Window, backend
from fastcaps.functional import heinsen_routing

ROUNDING = 2.0**-8  # of bfloat16, relative, when rounded once
BACKENDS = ["cpu", "reference"]

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
every_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
every_backend = pytest.mark.parametrize("name", BACKENDS)


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def as_cast(routing: Routing, given: Leaves) -> Leaves:
    """What autocast makes of the arguments, in float64. Betas enter sums and keep their numbers; of Heinsen's scores it
    is their sigmoid that is cast."""
    cast = {k: t.double() if k.startswith("beta") else t.bfloat16().double() for k, t in given.items()}
    if routing.function is heinsen_routing:
        cast["gate"] = given["gate"].sigmoid().bfloat16().double().logit()
    return cast


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def one_turn(routing: Routing) -> dict[str, int]:
    if "iterations" not in routing.settings:
        return {}
    return {"iterations": 0 if "sharpness" in routing.settings else 1}


@every_window
@pytest.mark.parametrize("routing", [row for row in ROUTINGS if "prior" not in row.leaves], ids=str)  # squashes above
def test_one_turn_of_the_reference_is_rounded_once(routing: Routing, window: Window | None) -> None:
    """Sums, LayerNorm, squash and moments are taken in float32; the result alone is rounded."""
    given = routing.tensors(window, torch.float32)
    exact = routing.formulas(as_cast(routing, given), window, **{**routing.plain_settings, **one_turn(routing)})
    with backend("reference"), autocast():
        found = routing.ours(given, window, **one_turn(routing))
    for key, tensor in found.items():
        assert tensor.dtype == torch.bfloat16, key
        error = (tensor.double() - exact[key]).abs()
        assert (error <= 1.02 * ROUNDING * exact[key].abs() + 3e-6 * largest(exact[key])).all(), key


@every_backend
@every_window
@every_routing
def test_coefficients_are_as_exact_as_float32_allows(routing: Routing, window: Window | None, name: str) -> None:
    """Of one turn they come from the cast tensors and nothing else was rounded; no more than their own rounding."""
    given = routing.tensors(window, torch.float32)
    settings = one_turn(routing)
    exact = routing.formulas(as_cast(routing, given), window, **{**routing.plain_settings, **settings})["coefficients"]
    with backend(name), autocast():
        found = routing.ours(given, window, coefficients=True, **settings)["coefficients"]
    allowed = 1.02 * ROUNDING if found.dtype == torch.bfloat16 else 1e-5
    assert ((found.double() - exact).abs() <= allowed * exact + 1e-7).all()


@every_backend
@every_window
@every_routing
def test_several_turns_err_no_more_than_twice_eager(routing: Routing, window: Window | None, name: str) -> None:
    """Poses between turns may be kept in bfloat16, as eager keeps them; coefficients are those that the call used."""
    given = routing.tensors(window, torch.float32)
    exact = routing.plain(as_cast(routing, given), window, coefficients=True)
    half = {key: tensor.bfloat16() for key, tensor in as_cast(routing, given).items()}
    eager = routing.plain(half, window, coefficients=True)
    with backend(name), autocast():
        found = routing.ours(given, window, coefficients=True)
    for key, tensor in found.items():
        limit = 2 * largest(eager[key].double() - exact[key]) + ROUNDING * largest(exact[key])
        assert largest(tensor.double() - exact[key]) <= limit, key


@every_backend
@every_routing
@pytest.mark.parametrize("cast", [False, True], ids=["bfloat16", "autocast"])
def test_results_have_the_dtype_of_the_call(routing: Routing, cast: bool, name: str) -> None:
    given = routing.tensors(dtype=torch.float32 if cast else torch.bfloat16)
    for gradients in (False, True):
        leaves = {key: tensor.clone().requires_grad_(gradients) for key, tensor in given.items()}
        with backend(name), autocast() if cast else nullcontext():
            found = routing.ours(leaves, coefficients=True)
            found.pop("coefficients")
            assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
            if gradients:
                number(found).backward()
                for key, leaf in leaves.items():
                    assert leaf.grad is None or leaf.grad.dtype == leaf.dtype, key


EVERY = [(row, {}) for row in LAYERS]
EVERY += [(LAYERS[0], {"dropout": 0.4, "bias": True}), (LAYERS[0], {"dropout": 0.4, "activations": True})]


@every_backend
@pytest.mark.parametrize(("row", "options"), EVERY, ids=str)
def test_layers_return_one_dtype_in_training_and_in_eval(row: Row, options: dict[str, Any], name: str) -> None:
    module, children = row.kind(5, 3, 4, 4, **options), torch.randn(3, 5, 4)
    found = []
    for training in (True, False):
        module.train(training)
        with backend(name), autocast():
            results = module(children)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        found.append([tensor.dtype for tensor in results])
    assert found[0] == found[1] and found[0][0] == torch.bfloat16
