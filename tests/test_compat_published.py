"""Published layers of dynamic and of EM routing under their own names, and what all twins of published layers have."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import nn_plain_routings
import pytest
import torch
from torch import nn

import fastcaps
from fastcaps.compat import (
    AgreementRouting,
    CapsLayer,
    CapsuleLayer,
    ConvCaps,
    DenseCapsule,
    DigitCaps,
    RoutingCapsules,
)
from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting
from fastcaps.compat.ml_capsules import CapsuleCONV, CapsuleFC

CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "dynamic": (
        CapsuleLayer,
        {"num_capsules": 5, "num_route_nodes": 12, "in_channels": 3, "out_channels": 4},
        (2, 12, 3),
    ),
    "detached": (
        RoutingCapsules,
        {"in_dim": 3, "in_caps": 12, "num_caps": 5, "dim_caps": 4, "num_routing": 3},
        (2, 12, 3),
    ),
    "tutorial": (
        DigitCaps,
        {"num_capsules": 5, "previous_layer_nodes": 12, "in_channels": 3, "out_channels": 4},
        (2, 12, 3),
    ),
    "em": (ConvCaps, {"B": 3, "C": 4, "K": 3, "P": 2, "stride": 2}, (2, 7, 5, 15)),
    "em-2": (ConvCaps, {"B": 2, "C": 3, "K": 2, "P": 3, "stride": 1, "iters": 2}, (2, 3, 4, 20)),
    "em-shared": (ConvCaps, {"B": 3, "C": 4, "K": 1, "P": 2, "stride": 1, "w_shared": True}, (2, 3, 4, 15)),
    "em-place": (
        ConvCaps,
        {"B": 3, "C": 4, "K": 1, "P": 2, "stride": 1, "w_shared": True, "coor_add": True},
        (2, 4, 3, 15),
    ),
}
CASES["dynamic-2"] = (CapsuleLayer, {**CASES["dynamic"][1], "num_iterations": 2}, (2, 12, 3))
CASES["dynamic-learned"] = (CapsuleLayer, {**CASES["dynamic"][1], "learned_logits": True}, (2, 12, 3))


def draw(name: str) -> torch.Tensor:
    children = torch.randn(CASES[name][2], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if CASES[name][0] is ConvCaps:
        children[..., -CASES[name][1]["B"] :] = children[..., -CASES[name][1]["B"] :].sigmoid()
    return children


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """Our layer and the plain one with the same random parameters, in float64."""
    kind, arguments, _ = CASES[name]
    torch.manual_seed(0)
    plain = getattr(nn_plain_routings, kind.__name__)(**arguments).double()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours = kind(**arguments).double()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    ours, plain = pair(name)
    results = []
    for layer in (ours, plain):
        children = draw(name).requires_grad_()
        found = layer(children)
        weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view(found.shape)
        found_and = torch.autograd.grad((found * weights).sum(), [children, *layer.parameters()])
        results.append([found, *found_and])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_converted(name: str) -> None:
    _, plain = pair(name)
    model = nn.Sequential(plain)
    want = model(draw(name))
    report = fastcaps.convert(model)
    assert report.converted == ["0"] and "results agree" in report.layers[0].why
    assert isinstance(model[0], CASES[name][0])
    torch.testing.assert_close(model(draw(name)), want, rtol=1e-6, atol=1e-8)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(draw(name)), model(draw(name)))


@pytest.mark.parametrize("turns", [0, 2])
def test_a_layer_with_a_routing_module(turns: int) -> None:
    torch.manual_seed(0)
    plain = nn_plain_routings.CapsLayer(12, 3, 5, 4, nn_plain_routings.AgreementRouting(12, 5, turns)).double()
    with torch.no_grad():
        plain.routing_module.b.normal_()
    ours = CapsLayer(12, 3, 5, 4, AgreementRouting(12, 5, turns)).double()
    ours.load_state_dict(plain.state_dict())
    model = nn.Sequential(copy.deepcopy(plain))
    report = fastcaps.convert(model)
    assert report.converted == ["0"] and "results agree" in report.layers[0].why
    assert isinstance(model[0], CapsLayer) and model[0].routing_module.n_iterations == turns
    assert list(model[0].state_dict()) == list(plain.state_dict())
    children = torch.randn(2, 12, 3, dtype=torch.float64)
    votes = torch.einsum("bid,idn->bin", children, plain.weights).unflatten(-1, (5, 4))
    torch.testing.assert_close(ours.routing_module(votes), plain(children))
    found = []
    for layer in (plain, ours, model[0]):
        given = children.clone().requires_grad_()
        parents = layer(given)
        weights = torch.linspace(-1, 1, parents.numel(), dtype=parents.dtype).view(parents.shape)
        found.append([parents, *torch.autograd.grad((parents * weights).sum(), [given, *layer.parameters()])])
    for want, *others in zip(*found, strict=True):
        for got in others:
            torch.testing.assert_close(got, want)


def test_a_routing_module_that_is_another_or_watched_keeps_its_layer() -> None:
    watched, other = (
        nn_plain_routings.CapsLayer(12, 3, 5, 4, nn_plain_routings.AgreementRouting(12, 5, 2)) for _ in range(2)
    )
    watched.routing_module.register_forward_hook(lambda *_: None)
    other.routing_module = nn.Identity()
    report = fastcaps.convert(nn.Sequential(watched, other))
    assert report.left == ["0", "1"]
    assert "has hooks" in report.layers[0].why and "got Identity" in report.layers[1].why
    with pytest.raises(ValueError, match=r"routing_module must have b of shape \(12, 5\), got \(12, 4\)"):
        CapsLayer(12, 3, 5, 4, AgreementRouting(12, 4, 2))
    with pytest.raises(TypeError, match="routing_module must be an AgreementRouting, got Identity"):
        CapsLayer(12, 3, 5, 4, nn.Identity())


def test_one_name_of_several_codes() -> None:
    """``DigitCaps`` is cezannec's, or Havir's under another name, or one whose logits are averaged over the batch."""

    class DigitCaps(nn_plain_routings.RoutingCapsules):
        pass

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_channels, self.num_routes, self.num_capsules = 3, 12, 5
            self.W = nn.Parameter(torch.randn(1, 12, 5, 4, 3))

    Averaged.__name__ = "DigitCaps"
    model = nn.Sequential(nn_plain_routings.DigitCaps(5, 12, 3, 4), DigitCaps(3, 12, 5, 4, 3), Averaged())
    report = fastcaps.convert(model)
    assert report.converted == ["0", "1"] and [type(layer) for layer in model[:2]] == [
        fastcaps.compat.DigitCaps,
        RoutingCapsules,
    ]
    assert "has no attribute previous_layer_nodes" in report.layers[2].why


def test_em_is_tried_on_a_grid_that_its_first_versions_take() -> None:
    """They count a window too few where the stride does not divide the rest, and fail; some of them mix windows too."""

    class Early(nn_plain_routings.ConvCaps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            room = x.shape[1] - self.K
            if (room + 1) // self.stride != room // self.stride + 1:
                raise RuntimeError("shape is invalid")
            return super().forward(x).flip(1, 2)

    Early.__name__ = "ConvCaps"
    (layer,) = fastcaps.convert(nn.Sequential(Early(3, 4, 3, 2, 2))).layers
    assert not layer.converted and layer.why.startswith("its results differ")


def test_primary_capsules_are_left_as_they_are() -> None:
    plain = nn_plain_routings.CapsuleLayer(3, 6, 4, 4)
    plain.num_route_nodes = -1
    del plain.route_weights
    (layer,) = fastcaps.convert(nn.Sequential(plain)).layers
    assert not layer.converted and layer.why == "makes primary capsules by convolutions, routes nothing"


def test_primary_capsules_by_name() -> None:
    layer = CapsuleLayer(3, -1, 2, 4, kernel_size=3, stride=2)
    images = torch.randn(2, 2, 9, 7)
    maps = torch.stack([convolution(images).flatten(1) for convolution in layer.capsules], -1)
    square = maps.square().sum(-1, keepdim=True)
    torch.testing.assert_close(layer(images), maps * square.sqrt() / (1 + square))


def test_signatures_are_the_authors() -> None:
    dynamic = [
        "num_capsules",
        "num_route_nodes",
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "num_iterations",
        "learned_logits",
    ]
    assert list(inspect.signature(CapsuleLayer).parameters) == dynamic
    assert list(inspect.signature(ConvCaps).parameters) == [
        "B",
        "C",
        "K",
        "P",
        "stride",
        "iters",
        "coor_add",
        "w_shared",
    ]
    havir = ["in_dim", "in_caps", "num_caps", "dim_caps", "num_routing", "device"]
    assert list(inspect.signature(RoutingCapsules).parameters) == havir
    cezannec = ["num_capsules", "previous_layer_nodes", "in_channels", "out_channels"]
    assert list(inspect.signature(DigitCaps).parameters) == cezannec
    bielski = ["input_caps", "input_dim", "output_caps", "output_dim", "routing_module"]
    assert list(inspect.signature(CapsLayer).parameters) == bielski
    with pytest.raises(ValueError, match="K and stride must be 1 with w_shared=True, got 3 and 2"):
        ConvCaps(w_shared=True)


TWINS = [
    CapsuleFC(6, 4, 3, 4, True, 0.0),
    CapsuleCONV(2, 4, 3, 4, 3, 1, True, 0.0),
    DenseCapsule(6, 4, 3, 4),
    RoutingCapsules(4, 6, 3, 4, 3),
    DigitCaps(3, 6, 4, 4),
    AgreementRouting(6, 3, 2),
    CapsuleLayer(3, 6, 4, 4),
    CapsuleLayer(3, 6, 4, 4, learned_logits=True),
    CapsuleLayer(3, -1, 4, 4, 3, 1),
    ConvCaps(2, 3, 3, 2),
    GenerativeMatrixRouting(6, 3, 2, 2, 2),
]


@pytest.mark.parametrize("layer", TWINS, ids=lambda layer: type(layer).__name__)
def test_reset_draws_what_the_constructor_drew(layer: nn.Module) -> None:
    arguments = {name: getattr(layer, name) for name in inspect.signature(type(layer)).parameters}
    torch.manual_seed(4)
    fresh = type(layer)(**arguments)
    twin = copy.deepcopy(fresh)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(4)
    twin.reset_parameters()
    for got, want in zip(twin.parameters(), fresh.parameters(), strict=True):
        if isinstance(layer, CapsuleLayer) and layer.num_route_nodes == -1:
            assert (got != 7.0).any()
        else:
            assert torch.equal(got, want)
    assert all(f"{name}={value}" in repr(layer) for name, value in arguments.items())


def test_subclasses_are_candidates() -> None:
    class Named(nn_plain_routings.DenseCapsule):
        def __init__(self) -> None:
            super().__init__(6, 4, 3, 4)

    class Louder(Named):
        def loudest(self) -> torch.Tensor:
            return self.weight.abs().max()

    model = nn.Sequential(Named(), Louder())
    report = fastcaps.convert(model)
    assert report.converted == ["0"] and report.left == ["1"]
    assert "has loudest of its own" in report.layers[1].why
