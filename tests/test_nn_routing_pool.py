"""Routing as a pooling layer: its procedure, average pooling at sharpness 0, gradients, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_layers import draw, expect, seen_by
from oracle_routings import vector_normed
from torch import nn

from fastcaps import RoutingPool, RoutingPool2d, Window
from fastcaps.vectors import squash

DIM = 3


GEOMETRY: dict[str, tuple[dict[str, Any], Window]] = {
    "whole": ({}, Window((4, 5))),
    "window": ({"kernel_size": 2}, Window(2, 2)),
    "overlap": ({"kernel_size": (3, 2), "stride": 1, "padding": (1, 0)}, Window((3, 2), 1, (1, 0))),
}


@pytest.mark.parametrize("parents", [None, 1, 4])
@pytest.mark.parametrize("name", GEOMETRY)
def test_the_layer_is_the_procedure(name: str, parents: int | None) -> None:
    options, window = GEOMETRY[name]
    features = draw(2, 6, 4, 5)
    extra = {"in_channels": 6, "out_dim": 2} if parents == 4 else {}
    layer = RoutingPool2d(DIM, sharpness=1.5, iterations=2, parents=parents, **options, **extra).double()
    found, r = layer(features, return_coefficients=True)
    poses = features.unflatten(1, (2, 1, DIM)).movedim((2, 3), (-2, -1))  # [B, N, H, W, 1, dim]
    weight = None if layer.weight is None else layer.weight.detach()
    parts = poses.split(1, 1) if parents is None else (poses,)  # each group by itself, or all together
    for part, channels in zip(parts, found.detach().chunk(len(parts), 1), strict=True):
        for (b, y, x), seen in seen_by(window, part, weight, None, None):
            expect(channels[b, :, y, x], vector_normed(seen, 2, 1.5)[0])
    count = window.positions * (1 if parents is None else 2)
    assert r.shape == (2, *found.shape[2:], count, parents or 2)
    torch.testing.assert_close(r.sum(-2), torch.ones_like(r.sum(-2)))
    torch.testing.assert_close(layer(features), found)
    torch.testing.assert_close(layer(features.contiguous(memory_format=torch.channels_last)), found)
    leaves = features.requires_grad_(), *layer.parameters()
    assert torch.autograd.gradcheck(lambda given, *_: layer(given), leaves, fast_mode=True)
    changed = RoutingPool2d(DIM, sharpness=2.0, iterations=1, parents=parents, **options, **extra).double()
    changed.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(features, sharpness=2.0, iterations=1), changed(features))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64, 8, 8), (3, 16, 7, 5), (0, 16, 4, 4)])
def test_sharpness_0_is_average_pooling_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    features = draw(*shape).to(dtype).requires_grad_()
    window = {"kernel_size": 3, "stride": 2, "padding": 1}
    for ours, theirs in (
        (RoutingPool2d(16, sharpness=0), nn.AdaptiveAvgPool2d(1)),
        (RoutingPool2d(16, sharpness=0.0, kernel_size=(3, 2), stride=1), nn.AvgPool2d((3, 2), 1)),
        (RoutingPool2d(16, sharpness=0, **window), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    ):
        found, wanted = ours(features), theirs(features)
        grad = torch.randn_like(found)
        got, want = (torch.autograd.grad(made, features, grad)[0] for made in (found, wanted))
        assert torch.equal(found, wanted) and found.shape == wanted.shape and torch.equal(got, want)
    one = RoutingPool2d(16, sharpness=0, parents=1)(features)
    if dtype != torch.bfloat16:
        torch.testing.assert_close(one, features.unflatten(1, (-1, 16)).mean((1, 3, 4))[..., None, None])


@pytest.mark.parametrize("name", GEOMETRY)
def test_the_sharpness_goes_from_average_to_maximum(name: str) -> None:
    """Not only by the shortcut: shares at sharpness 0 are equal, and a tiny sharpness is near the average."""
    features, options = draw(2, 6, 4, 5), GEOMETRY[name][0]
    exact, r = RoutingPool2d(DIM, sharpness=0, **options)(features, return_coefficients=True)
    there = r > 0
    torch.testing.assert_close(r, there.double() / there.sum(-2, keepdim=True))
    torch.testing.assert_close(RoutingPool2d(DIM, sharpness=1e-9, **options)(features), exact, rtol=0, atol=1e-7)
    _, r = RoutingPool2d(DIM, sharpness=1e4, **options)(features, return_coefficients=True)
    assert r.amax(-2).min() > 0.49  # one place, or two that are opposite


def test_activations() -> None:
    features = draw(2, 6, 4, 5)
    plain = RoutingPool2d(DIM)(features)
    squashed = RoutingPool2d(DIM, activation="squash")(features)
    torch.testing.assert_close(squashed.view(2, 2, DIM), squash(plain.view(2, 2, DIM)))
    zero = torch.zeros(2, 6, 4, 4, requires_grad=True)
    RoutingPool2d(DIM, activation="squash")(zero).sum().backward()
    assert zero.grad.isfinite().all()
    torch.testing.assert_close(RoutingPool2d(DIM, activation="relu")(features), plain.relu())
    norm = nn.LayerNorm(DIM).double()
    layer = RoutingPool2d(DIM, activation=norm)
    assert set(layer.state_dict()) == {"activation.weight", "activation.bias"}
    torch.testing.assert_close(layer(features).view(2, 2, DIM), norm(plain.view(2, 2, DIM)))


@pytest.mark.parametrize("options", [{}, {"kernel_size": 2}], ids=str)
def test_no_gradient_through_detached_coefficients(options: dict[str, Any]) -> None:
    given, layer = draw(2, 8, 5, 5).requires_grad_(), RoutingPool2d(4, sharpness=3.0, **options)
    wanted = layer(given)
    (through,) = torch.autograd.grad(wanted.square().sum(), given)
    layer.detach = True
    found = layer(given)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(torch.autograd.grad(found.square().sum(), given)[0], through)


def test_detached_coefficients_are_constants() -> None:
    layer = RoutingPool(6, 3, 4, 4, sharpness=3.0, detach=True, dtype=torch.float64)
    given = draw(2, 6, 4).requires_grad_()
    found, shares = layer(given, return_coefficients=True)
    votes = torch.einsum("bicd,imde->bimce", given.unflatten(-1, (2, 2)), layer.weight).flatten(-2)
    sums = torch.einsum("bim,bimd->bmd", shares, votes)
    got, want = (torch.autograd.grad(made.square().sum(), given)[0] for made in (found, sums))
    torch.testing.assert_close(got, want)


WRONG = [
    (((1, 1),), {}, TypeError, r"dim must be an int, the channels of a capsule, got \(1, 1\); kernel_size=None pools"),
    ((16,), {"stride": 2}, ValueError, "stride and padding need a kernel_size"),
    ((16,), {"parents": 4}, ValueError, "in_channels must be given with several parents"),
    ((16,), {"parents": 4, "in_channels": 40}, ValueError, "channels that dim = 16 divides, got 40"),
    ((16,), {"out_dim": 8}, ValueError, "out_dim must be dim = 16 without several parents, got 8"),
    ((16,), {"activation": "swish"}, ValueError, "activation must be one of"),
]


@pytest.mark.parametrize(("sizes", "options", "error", "message"), WRONG)
def test_wrong_constructor_arguments(sizes, options, error, message) -> None:
    with pytest.raises(error, match=message):
        RoutingPool2d(*sizes, **options)


def test_wrong_inputs_are_named() -> None:
    layer, several = RoutingPool2d(16), RoutingPool2d(16, parents=4, in_channels=64)
    assert RoutingPool2d(16, kernel_size=4)(torch.randn(2, 16, 4, 4)).shape == (2, 16, 1, 1)  # just large enough
    for message, call in [
        (r"features must be \[B, channels, H, W\], got \[2, 16\]", lambda: layer(torch.randn(2, 16))),
        ("features must have channels that dim = 16 divides", lambda: layer(torch.randn(2, 20, 4, 4))),
        ("as large as the window", lambda: RoutingPool2d(16, kernel_size=5)(torch.randn(2, 16, 4, 4))),
        (r"features must be \[B, 64, H, W\], got \[2, 32, 4, 4\]", lambda: several(torch.randn(2, 32, 4, 4))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
