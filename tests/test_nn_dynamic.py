"""The layer of dynamic routing: its procedure as loops, its options, its start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from functional_cases import at, expect, seen_by
from oracle_routings import dynamic

from fastcaps import DynamicRouting, losses

OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "children": {"compete": "children"},
    "leaky": {"leaky": True},
    "detach": {"detach": True},
    "turns": {"iterations": 5},
    "bias": {"bias": True},
}
FORMS: dict[str, Any] = {
    "set": ((6, 3, 3, 5), {"pose": "vector"}),
    "matrix": ((6, 3, 4, 6), {"share": True}),
    "rows": ((6, 3, 6, 9), {"pose": 3}),
    "grid": ((2, 3, 3, 5), {"pose": "vector", "kernel_size": (3, 2), "stride": 2, "padding": 1}),
}


def make(form: str, option: str) -> DynamicRouting:
    sizes, arguments = FORMS[form]
    torch.manual_seed(0)
    layer = DynamicRouting(*sizes, dtype=torch.float64, **arguments, **OPTIONS[option])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_procedure(form: str, option: str) -> None:
    layer = make(form, option)
    grid = (5, 4) if form == "grid" else ()
    children = torch.randn(2, layer.in_capsules, *grid, layer.in_dim, dtype=torch.float64)
    found, r = layer(children, return_coefficients=True)
    rows, columns, _ = layer.pose_shape
    asked = {name: value for name, value in OPTIONS[option].items() if name in ("compete", "leaky")}
    poses = children.unflatten(-1, (rows, columns))
    for place, seen in seen_by(layer.window, poses, layer.weight.detach(), layer.bias, None):
        v, c = dynamic([child.votes for child in seen], layer.iterations, **asked)
        expect(at(found, layer.window, place).detach(), v)
        expect(at(r, layer.window, place, True)[[child.index for child in seen]], c)
    assert losses.length(found).max() < 1


def test_without_detach_gradients_flow_through_every_turn() -> None:
    kept, cut = make("set", "paper"), make("set", "detach")
    children = torch.randn(2, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(kept(children), cut(children))
    for layer in (kept, cut):
        layer(children).square().sum().backward()
    assert not torch.allclose(kept.weight.grad, cut.weight.grad)


@pytest.mark.parametrize(
    ("sizes", "options", "seen"),
    [((1152, 10, 8, 16), {"pose": "vector"}, 1152), ((32, 32, 16, 16), {"kernel_size": 3}, 288)],
)
def test_initialisation(sizes: tuple[int, ...], options: dict[str, Any], seen: int) -> None:
    layer = DynamicRouting(*sizes, **options)
    std = math.sqrt(layer.out_capsules / (layer.pose_shape[1] * seen))
    assert abs(layer.weight.std().item() / std - 1) < 5 / math.sqrt(2 * layer.weight.numel())
    chosen = DynamicRouting(*sizes, **options, std=0.05)
    assert abs(chosen.weight.std().item() / 0.05 - 1) < 5 / math.sqrt(2 * layer.weight.numel())


def test_parameter_names_and_repr() -> None:
    layer = DynamicRouting(6, 3, 3, 5, pose="vector", bias=True, leaky=True, detach=True)
    assert set(layer.state_dict()) == {"weight", "bias"} and set(make("set", "paper").state_dict()) == {"weight"}
    assert layer.weight.shape == (6, 3, 3, 5) and layer.bias.shape == (6, 3, 1, 5)
    assert repr(layer) == "DynamicRouting(6, 3, 3, 5, pose='vector', bias=True, detach=True, leaky=True)"
    assert repr(DynamicRouting(6, 3, 4, 4)) == "DynamicRouting(6, 3, 4, 4)"
    assert "compete='children'" in repr(make("set", "children")) and "compete" not in repr(layer)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="compete must be one of 'parents', 'children', got 'all'"):
        DynamicRouting(6, 3, 4, 4, compete="all")
    with pytest.raises(ValueError, match="leaky must be False with compete='children'"):
        DynamicRouting(6, 3, 4, 4, compete="children", leaky=True)
