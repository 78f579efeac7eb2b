"""The formulas that tests of torch's features compare with: they are what the public functions compute."""

from __future__ import annotations

import pytest
import torch
from features import ROUTINGS, WINDOWS, Routing, close, number

from fastcaps import Window, backend


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_results_coefficients_and_gradients_are_those_of_the_formulas(
    name: str, window: Window | None, routing: Routing
) -> None:
    leaves = {key: tensor.requires_grad_() for key, tensor in routing.tensors(window).items()}
    wanted = routing.plain(leaves, window, coefficients=True)
    with backend(name):
        found = routing.ours(leaves, window, coefficients=True)
        close(found, wanted)
        assert not found.pop("coefficients").requires_grad
        gradients = torch.autograd.grad(number(found), list(leaves.values()), allow_unused=True)
    wanted.pop("coefficients")
    expected = torch.autograd.grad(number(wanted), list(leaves.values()), allow_unused=True, materialize_grads=True)
    for got, want, key in zip(gradients, expected, leaves, strict=True):
        got = torch.zeros_like(want) if got is None else got
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
