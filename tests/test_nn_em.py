"""The layer of EM routing: its procedure as loops, coordinate addition, edges, its start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from functional_cases import at, expect, gradients, seen_by
from oracle_routings import em

from fastcaps import EMRouting, losses
from fastcaps.functional.em import default_inverse_temperature

FORMS: dict[str, Any] = {
    "set": ((6, 3, 4, 4), {"inverse_temperature": 0.5}),
    "vector": ((6, 3, 3, 5), {"pose": "vector", "inverse_temperature": [0.1, 0.2, 0.3], "bias": True}),
    "grid": ((2, 3, 4, 4), {"kernel_size": (3, 2), "stride": 2, "inverse_temperature": lambda turn: 0.2 * (turn + 1)}),
    "shared": ((2, 3, 4, 4), {"kernel_size": 3, "share": True}),
}


def make(form: str, **changes: Any) -> EMRouting:
    sizes, arguments = FORMS[form]
    torch.manual_seed(0)
    layer = EMRouting(*sizes, dtype=torch.float64, eps=1e-3, **{**arguments, **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def temperatures(layer: EMRouting) -> list[float]:
    given = layer.inverse_temperature or default_inverse_temperature
    if callable(given):
        return [given(turn) for turn in range(3)]
    return list(given) if isinstance(given, list) else [given] * 3


@pytest.mark.parametrize("first", ["uniform", "ones"])
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_procedure(form: str, turns: int, first: str) -> None:
    lambdas = temperatures(make(form))[:turns]
    layer = make(form, iterations=turns, first_coefficients=first, inverse_temperature=lambdas)
    grid = (5, 4) if layer.window is not None else ()
    children = torch.randn(2, layer.in_capsules, *grid, layer.in_dim, dtype=torch.float64)
    activations = torch.rand(children.shape[:-1], dtype=torch.float64)
    poses, active, r = layer(children, activations, return_coefficients=True)
    one = {"uniform": None, "ones": 1.0}[first]
    rows, columns, _ = layer.pose_shape
    cut = children.unflatten(-1, (rows, columns))
    for place, seen in seen_by(layer.window, cut, layer.weight.detach(), layer.bias, activations):
        betas = (layer.beta_u.tolist(), layer.beta_a.tolist())
        wanted = em([c.votes for c in seen], [c.gate for c in seen], *betas, lambdas, 1e-3, one)
        for found, numbers in zip((poses, active), wanted, strict=False):
            expect(at(found, layer.window, place).detach(), numbers)
        expect(at(r, layer.window, place, True), wanted[2])


@pytest.mark.parametrize("pose", ["matrix", "vector"])
def test_the_class_layer_adds_coordinates(pose: str) -> None:
    """Hinton et al. 2018: a child's place in the grid is added to the first two numbers of the right-hand column."""
    layer = EMRouting(
        2, 3, 4, 4, pose=pose, kernel_size="all", share=True, coordinates=True, dtype=torch.float64, eps=1e-3
    )
    height, width = 3, 4
    children = torch.randn(2, 2, height, width, 4, dtype=torch.float64)
    activations = torch.rand(2, 2, height, width, dtype=torch.float64)
    poses, active, r = layer(children, activations, return_coefficients=True)
    assert poses.shape == (2, 3, 4) and active.shape == (2, 3) and r.shape == (2, 24, 3)
    rows, columns, _ = layer.pose_shape
    places = [(y, x, n) for y in range(height) for x in range(width) for n in range(2)]
    for b in range(2):
        votes = []
        for y, x, n in places:
            matrix = children[b, n, y, x].view(rows, columns)
            each = [matrix @ layer.weight[n, m].detach() for m in range(3)]
            for vote in each:
                if pose == "matrix":
                    vote[0, 1] += (y + 0.5) / height
                    vote[1, 1] += (x + 0.5) / width
                else:
                    vote[0, 0] += (y + 0.5) / height
                    vote[0, 1] += (x + 0.5) / width
            votes.append([vote.flatten().tolist() for vote in each])
        gates = [activations[b, n, y, x].item() for y, x, n in places]
        schedule = [default_inverse_temperature(turn) for turn in range(3)]
        wanted = em(votes, gates, [0.0] * 3, [0.0] * 3, schedule, 1e-3)
        for found, numbers in zip((poses, active, r), wanted, strict=True):
            expect(found[b].detach(), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [[0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6], ids=str)
def test_the_edges_are_finite(dtype: torch.dtype, pattern: list[int]) -> None:
    """Votes that agree exactly, so that variances are the eps of 1e-12; activations of exactly 0 and 1."""
    layer = EMRouting(6, 3, 4, 4, share=True, eps=1e-12, inverse_temperature=10.0, dtype=dtype)
    with torch.no_grad():
        layer.beta_u.copy_(100 * torch.randn(3))
        layer.beta_a.copy_(100 * torch.randn(3))
    children = torch.randn(2, 1, 4, dtype=dtype).expand(-1, 6, -1).clone().requires_grad_()
    activations = torch.tensor(pattern, dtype=dtype).expand(2, 6).clone().requires_grad_()
    found = layer(children, activations)
    assert all(result.isfinite().all() for result in found)
    leaves = [children, activations, *layer.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients(found, leaves))


def test_the_temperature_may_change_during_training() -> None:
    layer = make("set")
    children = torch.randn(2, 6, 4, dtype=torch.float64)
    before = layer(children)[1]
    layer.inverse_temperature = [0.1, 0.1, 5.0]
    assert not torch.allclose(layer(children)[1], before)
    torch.testing.assert_close(make("set", inverse_temperature=[0.1, 0.1, 5.0])(children)[1], layer(children)[1])


def test_layers_stack_into_a_network_that_trains() -> None:
    torch.manual_seed(0)
    conv = EMRouting(4, 6, 4, 4, kernel_size=3, stride=2)
    classes = EMRouting(6, 3, 4, 4, kernel_size="all", share=True, coordinates=True)
    children, activations = torch.randn(8, 4, 7, 7, 4), torch.rand(8, 4, 7, 7)
    labels = torch.arange(8) % 3
    optimizer = torch.optim.Adam([*conv.parameters(), *classes.parameters()], 0.02)
    history = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = losses.spread_loss(classes(*conv(children, activations))[1], labels, margin=0.2)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.9 * history[0]


def test_initialisation_names_and_repr() -> None:
    layer = EMRouting(64, 32, 16, 16, kernel_size=3, bias=True, inverse_temperature=1e-3, eps=1e-6)
    assert abs(layer.weight.std().item() * 2 - 1) < 5 / math.sqrt(2 * layer.weight.numel())
    assert set(layer.state_dict()) == {"weight", "bias", "beta_u", "beta_a"}
    assert all((p == 0).all() and p.shape == (32,) for p in (layer.beta_u, layer.beta_a))
    for part in ("64, 32, 16, 16, kernel_size=(3, 3), bias=True", "inverse_temperature=0.001", "1e-06"):
        assert part in repr(layer)
    whole = EMRouting(2, 3, 4, 4, kernel_size="all", share=True, coordinates=True)
    assert "kernel_size='all', share=True" in repr(whole) and "coordinates=True" in repr(whole)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="coordinates must be False without kernel_size='all'"):
        EMRouting(2, 3, 4, 4, kernel_size=3, coordinates=True)
    with pytest.raises(ValueError, match="inverse_temperature must have a number for each of the 3"):
        EMRouting(6, 3, 4, 4, inverse_temperature=[0.1])
    with pytest.raises(TypeError, match="inverse_temperature must be a number"):
        EMRouting(6, 3, 4, 4, inverse_temperature="hot")
