"""Half precision: what is rounded, and which dtype comes out, under autocast and without."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from features import ROUTINGS, WINDOWS, Leaves, Routing
from nn_layers import LAYERS, Row
from suite import every_backend
from torch import Tensor

from fastcaps import Window, backend

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def as_cast(routing: Routing, given: Leaves) -> Leaves:
    """What autocast makes of the arguments, in float64. Betas enter sums and keep their numbers; of Heinsen's scores it
    is their sigmoid that is cast."""
    cast = {k: t.double() if k.startswith("beta") else t.bfloat16().double() for k, t in given.items()}
    if routing.child == "scores":
        cast["scores"] = given["scores"].sigmoid().bfloat16().double().logit()
    return cast


@every_backend
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@every_routing
def test_results_err_no_more_than_what_is_rounded(routing: Routing, window: Window | None, name: str) -> None:
    """The tensors, and the poses after each iteration; coefficients are those that the call used."""
    given = routing.tensors(window, torch.float32)
    with backend("reference"):
        exact = routing.ours(as_cast(routing, given), window, coefficients=True)
        eager = routing.ours({key: t.bfloat16() for key, t in given.items()}, window, coefficients=True)
    with backend(name), autocast():
        found = routing.ours(given, window, coefficients=True)
    assert {found[key].dtype for key in routing.results} == {torch.bfloat16}
    for key, tensor in found.items():
        limit = 2 * (eager[key].double() - exact[key]).abs().max() + 2.0**-8 * exact[key].abs().max()
        assert (tensor.double() - exact[key]).abs().max() <= limit, key


@every_backend
@pytest.mark.parametrize(
    ("row", "options"), [*((row, {}) for row in LAYERS), (LAYERS[0], {"dropout": 0.4, "bias": True})], ids=str
)
def test_layers_return_one_dtype_in_training_and_in_eval(row: Row, options: dict[str, Any], name: str) -> None:
    module, children = row.kind(5, 3, 4, 4, **options), torch.randn(3, 5, 4)
    found = []
    for training in (True, False):
        with backend(name), autocast():
            results = module.train(training)(children)
        found.append([tensor.dtype for tensor in ((results,) if isinstance(results, Tensor) else results)])
    assert found[0] == found[1] and found[0][0] == torch.bfloat16
