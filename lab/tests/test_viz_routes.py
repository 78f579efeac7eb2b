"""Routes from a class down to the image: what they add up to, where they lead, where that lies in the image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastcaps
import fastcaps_lab
from fastcaps.nn import CapsuleSpec, RoutingStack
from fastcaps_lab import viz
from fastcaps_lab.viz.routes import _places

EM, HEINSEN, DYNAMIC = fastcaps.EMRouting, fastcaps.HeinsenRouting, fastcaps.DynamicRouting


def network(**options: Any) -> Any:
    torch.manual_seed(0)
    return fastcaps_lab.models.create("digits", **options)


def test_two_layers_by_loops() -> None:
    """The parts multiply along every way from a class to a child, and the ways add up."""
    stack = RoutingStack([EM(5, 4, 4, 4), EM(4, 3, 4, 4)])
    gates = torch.rand(1, 5)
    _, trace = stack(torch.randn(1, 5, 4), gates, return_trace=True)
    lowest, middle, top = viz.descent(stack, trace)

    def part(k: int, child: int, parent: int) -> Tensor:
        gate, r = trace.activations[k][0], trace.coefficients[k][0]  # type: ignore[index]
        return gate[child] * r[child, parent] / (gate * r[:, parent]).sum()

    for c in range(3):
        for i in range(5):
            wanted = sum(part(1, m, c) * part(0, i, m) for m in range(4))
            torch.testing.assert_close(lowest[0, c, i], wanted)
        torch.testing.assert_close(middle[0, c], torch.stack([part(1, m, c) for m in range(4)]))
    assert torch.equal(top[0], torch.eye(3))


STACKS = {
    "grids, one padded": [
        CapsuleSpec(4, kernel_size=3, stride=2, padding=1),
        CapsuleSpec(3, kernel_size=2),
        CapsuleSpec(5),
    ],
    "EM, the whole grid last": [
        CapsuleSpec(4, kernel_size=3, layer=EM),
        CapsuleSpec(5, kernel_size="all", share=True, layer=EM),
    ],
    "scores to activations": [CapsuleSpec(4, kernel_size=3, layer=HEINSEN), CapsuleSpec(5, layer=EM)],
    "activations to scores": [CapsuleSpec(4, kernel_size=3, layer=EM), CapsuleSpec(5, layer=HEINSEN)],
    "children compete": [CapsuleSpec(4, kernel_size=3), CapsuleSpec(5, layer=DYNAMIC, options={"compete": "children"})],
    "a pool": [CapsuleSpec(4, kernel_size=3), CapsuleSpec(5, layer=fastcaps.RoutingPool)],
    "a set read as a row": [CapsuleSpec(6), CapsuleSpec(5, kernel_size="all", types=2, share=True)],
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_what_a_class_is_made_of_adds_up_to_1_in_every_layer(name: str) -> None:
    torch.manual_seed(1)
    stack = RoutingStack.build(STACKS[name], in_capsules=2, in_dim=4, size=(6, 7), iterations=2)
    active = (
        None
        if stack.layers[0].activity_name == "activations" and stack.layers[0].takes_parents
        else torch.rand(2, 2, 6, 7)
    )
    _, trace = stack(torch.randn(2, 2, 6, 7, 4), active, return_trace=True)
    found = viz.descent(stack, trace)
    for poses, part in zip(trace.poses, found, strict=True):
        assert part.shape == (2, 5, *poses.shape[1:-1])
        torch.testing.assert_close(part.flatten(2).sum(-1), torch.ones(2, 5))


def test_a_child_that_is_not_there_has_no_part_and_the_window_is_where_it_is() -> None:
    stack = RoutingStack([EM(1, 2, 4, 4, kernel_size=2, stride=2), EM(2, 3, 4, 4, kernel_size="all", share=True)])
    gates = torch.zeros(1, 1, 4, 6)
    gates[0, 0, 1, 4] = 0.9  # alone
    _, trace = stack(torch.randn(1, 1, 4, 6, 4), gates, return_trace=True)
    lowest, middle, _ = viz.descent(stack, trace)
    assert all(float(lowest[0, c, 0, 1, 4]) == pytest.approx(float(middle[0, c, :, 0, 2].sum())) for c in range(3))
    for kernel_size in (None, "all"):  # types and places keep their order
        children = 2 if kernel_size else 24
        stack = RoutingStack([EM(children, 3, 4, 4, kernel_size=kernel_size, share=kernel_size == "all")])
        gates = torch.rand(1, 2, 3, 4)
        gates[0, 1, 2, 0] = 0
        _, trace = stack(torch.randn(1, 2, 3, 4, 4), gates, return_trace=True)
        assert (viz.descent(stack, trace)[0][0, 0] == 0).nonzero().tolist() == [[1, 2, 0]]


def test_places_are_the_middles_of_what_windows_see() -> None:
    specs = [CapsuleSpec(4, kernel_size=3, stride=2, padding=1), CapsuleSpec(3, kernel_size=2), CapsuleSpec(5)]
    stack = RoutingStack.build(specs, in_capsules=2, in_dim=4, size=(6, 8))
    levels = [torch.zeros(each) for each in ((2, 6, 8), (4, 3, 4), (3, 2, 3), (5,))]
    lowest, lower, upper, top = _places(stack, torch.rand(1, 12, 16), levels)
    assert top is None
    for axis, (places, windows) in enumerate(((6, 3), (8, 4))):
        assert lowest[axis].tolist() == [0.5 + 2 * k for k in range(places)]
        assert lower[axis].tolist() == [0.5 + 4 * k for k in range(windows)]  # the padding lies before the first place
        assert upper[axis].tolist() == [2.5 + 4 * k for k in range(windows - 1)]


def test_pictures(tmp_path: Path) -> None:
    net, images = network(), torch.rand(2, 1, 8, 8)
    modes = [module.training for module in net.modules()]
    names = [f"class {k}" for k in range(10)]
    drawn = viz.route_maps(net, images[0], tmp_path / "routes.svg", title="Routes", names=names).read_text()
    assert drawn.count("<image") == 1 + 2 * 2  # the image; a map and its colours for each of two layers on grids
    assert modes == [module.training for module in net.modules()]
    flat = fastcaps_lab.models.create("sabour-mnist", image_size=20)  # one layer, whose children come from a grid
    assert viz.route_maps(flat, torch.rand(1, 20, 20), tmp_path / "flat.png", title="Sabour").stat().st_size > 5000
    with pytest.raises(TypeError, match="network must be a CapsNet, got Flatten"):
        viz.listening(nn.Flatten(), images)
    contributions = viz.listening(net, images)
    options = {"classes": names, "title": "Maps"}
    right, wrong = (
        viz.listening_map(images[:, 0], contributions, [3, 7], taken, tmp_path / "map.svg", **options).read_text()
        for taken in ([3, 7], [3, 8])
    )
    assert "taken for class 8" not in right and "taken for class 8" in wrong
    assert right.count("<image") == 2 * (1 + 10) + 1  # the images, their maps, the bar of colours


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_norm": False, "iterations": 1},
        {"activations": True, "bias": True},
        {"routing": "sequential", "pose": "vector"},
    ],
)
def test_maps_add_up_to_the_logits(overrides: dict[str, Any]) -> None:
    net = network(**overrides).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # LayerNorm's affine must not be 1 and 0
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    net.train()
    contributions = viz.listening(net, images)
    assert net.training and contributions.shape == (3, 10, 6, 6)
    net.eval()
    with torch.no_grad():
        logits, trace = net(images, return_trace=True)
        head, norm = net.head.linear, net.routing.layers[-1].norm
        constant = torch.zeros(1, 1, dtype=torch.float64) if norm is None else head.weight[0] @ norm.bias
        if trace.activations[-1] is not None:
            constant = constant * trace.activations[-1]
        torch.testing.assert_close(contributions.sum((2, 3)) + constant + head.bias, logits, rtol=1e-9, atol=1e-9)
