"""Options that all layers share, and stacks and networks of mixed layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastcaps import functional, losses
from fastcaps.nn import (
    CapsNet,
    CapsuleSpec,
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    PrimaryCapsules,
    RoutingPool,
    RoutingPool2d,
    RoutingStack,
)
from fastcaps.nn.stack import as_scores
from fastcaps.results import Capsules, Gaussians, Routed, RoutedCapsules, RoutedGaussians
from fastcaps.vectors import squash

EVERY: list[Any] = [InvertedAttentionRouting, DynamicRouting, EMRouting, HeinsenRouting, RoutingPool]
every = pytest.mark.parametrize("kind", EVERY)


def make(kind: Any, *sizes: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = kind(*sizes, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def poses_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.poses


def same(found: Any, wanted: Any) -> None:
    for got, want in zip(*([r] if isinstance(r, Tensor) else r for r in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want)


@every
def test_results_are_named_with_poses_first(kind: Any) -> None:
    plain, full = {
        EMRouting: (Capsules, RoutedCapsules),
        HeinsenRouting: (Gaussians, RoutedGaussians),
    }.get(kind, (Tensor, Routed))
    layer = make(kind, 6, 3, 4, 4)
    found, routed = layer(draw(2, 6, 4)), layer(draw(2, 6, 4), return_coefficients=True)
    assert isinstance(found, plain) and isinstance(routed, full)
    same(routed[0], poses_of(found))
    assert routed.coefficients.shape == (2, 6, 3) and poses_of(found).shape == (2, 3, 4)


@every
def test_poses_of_any_number_of_rows(kind: Any) -> None:
    for sizes, pose in (((6, 3, 6, 9), 3), ((6, 3, 4, 6), "matrix"), ((6, 3, 5, 2), 1)):
        layer = make(kind, *sizes, pose=pose)
        rows, columns, out_columns = layer.pose_shape
        assert layer.weight.shape == (6, 3, columns, out_columns) and rows * out_columns == sizes[3]
        wide = make(kind, *sizes, pose=pose, share=True)
        votes = torch.einsum("bicd,mde->bmce", draw(2, 1, sizes[2]).unflatten(-1, (rows, columns)), wide.weight[0])
        if kind is RoutingPool:  # of one child the parent is its vote
            torch.testing.assert_close(wide(draw(2, 1, sizes[2])), votes.flatten(-2))
        assert poses_of(layer(draw(2, 6, sizes[2]))).shape == (2, 3, sizes[3])


@every
def test_integers_of_numpy_and_absent_parameters(kind: Any) -> None:
    six, three, four = (np.int64(n) for n in (6, 3, 4))
    layer = kind(six, three, four, four, kernel_size=(np.int32(3), 3), stride=np.int64(2), iterations=np.int64(2))
    assert type(layer.in_capsules) is int and layer.iterations == 2
    assert "bias" in layer._parameters and layer.bias is None  # as in nn.Linear: a parameter may be put there
    for wrong in (True, 2.0, "2"):
        with pytest.raises(TypeError, match="out_capsules must be an int"):
            kind(6, wrong, 4, 4)
    with pytest.raises(ValueError, match="padding must be"):
        kind(6, 3, 4, 4, kernel_size=3, padding=2**62)


@pytest.mark.parametrize("kind", [InvertedAttentionRouting, DynamicRouting, EMRouting, HeinsenRouting, PrimaryCapsules])
def test_an_eps_that_is_no_number_is_refused(kind: Any) -> None:
    sizes = (6, 3, 4) if kind is PrimaryCapsules else (6, 3, 4, 4)
    for wrong in (torch.inf, torch.nan, -1.0):
        with pytest.raises(ValueError, match="eps must be a finite number >= 0"):
            kind(*sizes, eps=wrong)
    if kind is not PrimaryCapsules:
        with pytest.raises(TypeError, match="eps must be a number, got None"):
            kind(*sizes, eps=None)


@every
def test_any_number_of_children_and_of_parents(kind: Any) -> None:
    layer = make(kind, None, None, 4, 6, bias=True)
    assert layer.weight.shape == (1, 1, 2, 3) and layer.bias.shape == (1, 1, 2, 3) and layer.bias_step is not None
    for count in (2, 5):
        assert poses_of(layer(draw(2, count, 4))).shape == (2, count, 6)
        found = layer(draw(2, count, 4), out_capsules=3)
        fixed = make(kind, count, 3, 4, 6, bias=True, share=True)  # the same, written out
        with torch.no_grad():
            for name, parameter in fixed.named_parameters():
                own = layer.get_parameter(name)
                if name == "bias":
                    own = own + layer.bias_step * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None, None]
                parameter.copy_(own)
        same(found, fixed(draw(2, count, 4)))
    with pytest.raises(ValueError, match="out_capsules must be None, since this layer has 3 parents; got 4"):
        fixed(draw(2, 5, 4), out_capsules=4)
    grid = make(kind, 2, None, 4, 4, kernel_size=2)
    assert poses_of(grid(draw(1, 2, 4, 3, 4), out_capsules=5)).shape == (1, 5, 3, 2, 4)


def test_queries_tell_the_number_of_parents() -> None:
    keys = make(InvertedAttentionRouting, None, None, 4, 4, pose="vector", matrices=False, break_symmetry=False)
    assert keys.weight is None and list(dict(keys.named_parameters())) == ["norm.weight", "norm.bias"]
    queries, children = draw(2, 3, 4), draw(2, 7, 4)
    poses, shares = keys(children, queries, return_coefficients=True)
    wanted = (torch.einsum("bmd,bid->bim", queries, children) / 2).softmax(-1)
    torch.testing.assert_close(shares, wanted)
    sums = torch.einsum("bim,bid->bmd", wanted, children)
    torch.testing.assert_close(poses, torch.nn.functional.layer_norm(sums, (4,), keys.norm.weight, keys.norm.bias))


@every
def test_votes_without_matrices_are_those_of_identities(kind: Any) -> None:
    for window in ({}, {"kernel_size": 2}):
        layer = make(kind, 2, 3, 4, 4, matrices=False, bias=True, share=True, **window)
        other = make(kind, 2, 3, 4, 4, bias=True, share=True, **window)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                eye = torch.eye(2, dtype=torch.float64).expand_as(parameter) if name == "weight" else None
                parameter.copy_(layer.get_parameter(name) if eye is None else eye)
        children = draw(2, 2, *((3, 4) if window else ()), 4)
        same(layer(children, return_coefficients=True), other(children, return_coefficients=True))
    bare = kind(6, 3, 4, 4, matrices=False)
    assert poses_of(bare(torch.randn(2, 6, 4))).shape == (2, 3, 4) and "matrices=False" in repr(bare)


@every
def test_a_bias_of_one_call(kind: Any) -> None:
    layer, other = make(kind, 6, 3, 4, 4, bias=True), make(kind, 6, 3, 4, 4, bias=True)
    place = draw(6, 1, 2, 2)
    with torch.no_grad():
        other.bias.add_(place)
    same(layer(draw(2, 6, 4), bias=place), other(draw(2, 6, 4)))


def test_coordinates_and_a_bias() -> None:
    options = {"kernel_size": "all", "share": True}
    layer = make(EMRouting, 2, 3, 4, 4, coordinates=True, bias=True, **options)
    other = make(EMRouting, 2, 3, 4, 4, bias=True, **options)
    place = functional.coordinate_bias(3, 4, 2, 2, 2, dtype=torch.float64)
    same(layer(draw(2, 2, 3, 4, 4)), other(draw(2, 2, 3, 4, 4), bias=place))


def test_options_of_one_call() -> None:
    em = make(EMRouting, 6, 3, 4, 4)
    same(
        em(draw(2, 6, 4), inverse_temperature=0.5), make(EMRouting, 6, 3, 4, 4, inverse_temperature=0.5)(draw(2, 6, 4))
    )
    pool = make(RoutingPool, 6, 3, 4, 4)
    same(pool(draw(2, 6, 4), sharpness=0.0, iterations=0), make(RoutingPool, 6, 3, 4, 4, sharpness=0.0)(draw(2, 6, 4)))
    features = draw(2, 8, 4, 4)
    same(
        RoutingPool2d(4)(features, sharpness=2.0, iterations=1), RoutingPool2d(4, sharpness=2.0, iterations=1)(features)
    )
    attention = make(InvertedAttentionRouting, 6, 3, 4, 4, iterations=3)
    once = make(InvertedAttentionRouting, 6, 3, 4, 4)
    same(attention(draw(2, 6, 4)), once(draw(2, 6, 4), iterations=3))
    assert "iterations=3" in repr(attention) and "iterations" not in repr(once)


@pytest.mark.parametrize("compete", ["parents", "children"])
def test_learned_priors_and_an_eps_under_the_root(compete: str) -> None:
    layer = make(DynamicRouting, 6, 3, 4, 4, prior=True, eps=0.3, compete=compete, iterations=2)
    children = draw(2, 6, 4)
    votes = torch.einsum("bicd,imde->bimce", children.unflatten(-1, (2, 2)), layer.weight).flatten(-2)
    logits, dim = layer.prior.expand(2, 6, 3), 2 if compete == "parents" else 1
    for _ in range(2):
        parents = squash(torch.einsum("bim,bimd->bmd", logits.softmax(dim), votes), eps=0.3)
        logits = logits + torch.einsum("bimd,bmd->bim", votes, parents)
    torch.testing.assert_close(layer(children), parents)
    layer(children).sum().backward()
    assert layer.prior.grad.abs().sum() > 0 and "prior=True, eps=0.3" in repr(layer)
    assert (DynamicRouting(6, 3, 4, 4, prior=True).prior == 0).all()


def hot(turn: int) -> float:
    return 0.1 * (turn + 1)


def test_a_schedule_that_cannot_be_pickled_says_so() -> None:
    for given in (None, 0.5, [0.1, 0.2, 0.3], hot):
        layer = make(EMRouting, 6, 3, 4, 4, inverse_temperature=given)
        again = pickle.loads(pickle.dumps(layer))
        assert again.inverse_temperature == given
        same(again(draw(2, 6, 4)), layer(draw(2, 6, 4)))
    layer.inverse_temperature = lambda turn: 0.1 * (turn + 1)
    same(copy.deepcopy(layer)(draw(2, 6, 4)), layer(draw(2, 6, 4)))
    with pytest.raises(
        pickle.PicklingError, match=r"a lambda.*cannot be pickled; let it be a number, one for each turn"
    ):
        pickle.dumps(layer)


def test_scores_of_activations() -> None:
    activations = torch.tensor([0.0, 0.25, 1.0], requires_grad=True)
    scores = as_scores(activations)
    torch.testing.assert_close(scores.sigmoid(), activations)
    assert scores[0] == -torch.inf and scores[2] == torch.inf
    scores[1].backward()
    assert activations.grad.tolist() == [0.0, pytest.approx(1 / (0.25 * 0.75)), 0.0]


SPEC = {"kernel_size": 2, "stride": 2}
STACKS: dict[str, list[Any]] = {
    "dynamic": [CapsuleSpec(4, layer=DynamicRouting, **SPEC), CapsuleSpec(3, layer=DynamicRouting)],
    "em": [
        CapsuleSpec(4, layer=EMRouting, **SPEC),
        CapsuleSpec(3, kernel_size="all", share=True, layer=EMRouting, options={"coordinates": True}),
    ],
    "heinsen": [
        CapsuleSpec(4, layer=HeinsenRouting, options={"bias": True}, **SPEC),
        CapsuleSpec(3, layer=HeinsenRouting),
    ],
    "pool": [CapsuleSpec(4, layer=RoutingPool, **SPEC), CapsuleSpec(3, layer=RoutingPool)],
    "em-heinsen": [CapsuleSpec(4, layer=EMRouting, **SPEC), CapsuleSpec(3, layer=HeinsenRouting)],
    "heinsen-em": [CapsuleSpec(4, layer=HeinsenRouting, **SPEC), CapsuleSpec(3, layer=EMRouting)],
    "mixed": [
        CapsuleSpec(4, kernel_size=2, options={"activations": True}),
        CapsuleSpec(4, layer=EMRouting, kernel_size=2),
        CapsuleSpec(5, layer=HeinsenRouting),
        CapsuleSpec(4, layer=DynamicRouting),
        CapsuleSpec(3),
    ],
}


def by_hand(stack: RoutingStack, below: Tensor, numbers: Tensor | None) -> Any:
    """One iteration of a stack, layer by layer."""
    scores, found = stack.layers[0].activity_name == "scores", below
    for layer in stack.layers:
        wanted = layer.activity_name == "scores"
        if numbers is not None and wanted != scores:
            numbers = numbers.logit() if wanted else numbers.sigmoid()
        given = (None, numbers) if layer.takes_parents else (numbers,)
        found = layer(below, *given, iterations=1)
        numbers, scores = getattr(found, "activations", None), False
        if isinstance(found, Gaussians):
            numbers, scores = found.scores, True
        below = poses_of(found)
    return found


@pytest.mark.parametrize("routing", ["concurrent", "sequential"])
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_any_layers_trains_a_step(name: str, routing: str) -> None:
    torch.manual_seed(0)
    stack = RoutingStack.build(STACKS[name], in_capsules=2, in_dim=4, size=(4, 6), routing=routing, dtype=torch.float64)
    children, numbers = draw(5, 2, 4, 6, 4), draw(5, 2, 4, 6).sigmoid()
    same(stack(children, numbers, iterations=1), by_hand(stack, children, numbers))
    result, trace = stack(children, numbers, return_trace=True)
    same(result, stack(children, numbers))
    assert [tuple(poses.shape) for poses in trace.poses[1:]] == [
        (5, spec.capsules, *grid, 4)
        for spec, grid in zip(STACKS[name], [p.shape[2:-1] for p in trace.poses[1:]], strict=True)
    ]
    assert len(trace.coefficients) == len(stack.layers)
    optimizer = torch.optim.Adam(stack.parameters(), 0.01)
    history = []
    for _ in range(6):
        optimizer.zero_grad()
        found = stack(children, numbers)
        loss = (poses_of(found) - 0.3).square().mean()
        if not isinstance(found, Tensor):
            loss = loss + (found[1] - 0.5).square().mean()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in stack.parameters())
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0]


def test_layers_without_parents_route_once_what_did_not_change() -> None:
    stack = RoutingStack.build(STACKS["em"], in_capsules=2, in_dim=4, size=(4, 6), iterations=4)
    calls = [0, 0]
    for index, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    stack(torch.randn(2, 2, 4, 6, 4))
    assert calls == [1, 1]


def test_only_routing_layers_stack() -> None:
    with pytest.raises(TypeError, match=r"layers\[1\] must be a routing layer, got Linear"):
        RoutingStack([DynamicRouting(6, 4, 4, 4), nn.Linear(4, 4)])  # type: ignore[list-item]


NETWORKS: dict[str, dict[str, Any]] = {
    "dynamic": {"layer": DynamicRouting, "head": "length", "primary": {"normalize": "squash"}},
    "em": {"layer": EMRouting, "head": "activations", "primary": {"dilation": 2, "kernel_size": 2}},
    "heinsen": {"layer": HeinsenRouting, "head": "activations", "bias": True},
    "heinsen-linear": {"layer": HeinsenRouting},
    "pool": {"layer": RoutingPool, "iterations": 1},
    "class-layer": {"classes": CapsuleSpec(3, kernel_size="all", share=True, layer=EMRouting), "head": "activations"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_any_layers_learns(name: str) -> None:
    torch.manual_seed(0)
    options = {"classes": 3, **NETWORKS[name]}
    hidden = [CapsuleSpec(4, kernel_size=3)]
    net = CapsNet.build(
        nn.Conv2d(1, 8, 3, stride=2), in_channels=1, image_size=15, capsules=4, dim=4, hidden=hidden,
        dtype=torch.float64, device="cpu", **options,
    )  # fmt: skip
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    images, labels = draw(6, 1, 15, 15), torch.arange(6) % 3
    assert net(images).shape == (6, 3)
    assert net(images, return_trace=True)[1].poses[-1].shape == (6, 3, 4)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    loss_of = losses.margin_loss if name == "dynamic" else nn.functional.cross_entropy
    history = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(net(images), labels)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0]


def test_a_network_on_the_meta_device() -> None:
    net = CapsNet.build(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)), in_channels=1, image_size=np.int64(12), capsules=4, dim=4,
        classes=3, activations=True, device="meta", dtype=torch.bfloat16,
    )  # fmt: skip
    assert {p.device.type for p in [*net.parameters(), *net.buffers()]} == {"meta"}
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


def test_primary_capsules_are_squashed_and_reset() -> None:
    torch.manual_seed(3)
    primary = PrimaryCapsules(5, 3, 4, kernel_size=2, dilation=2, normalize="squash", eps=1e-3, activations=True)
    twin = copy.deepcopy(primary)
    poses, activations = primary(torch.randn(2, 5, 6, 7))
    assert (
        poses.shape == (2, 3, 4, 5, 4) == (2, 3, *primary.output_size((6, 7)), 4)
        and activations.shape == poses.shape[:-1]
    )
    plain = PrimaryCapsules(5, 3, 4, kernel_size=2, dilation=2, normalize=None)
    plain.conv = primary.conv
    features = torch.randn(2, 5, 6, 7)
    torch.testing.assert_close(primary(features).poses, squash(plain(features), eps=1e-3))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    twin.reset_parameters()
    assert all((parameter != 7.0).any() for parameter in twin.parameters())
    assert repr(primary).startswith("PrimaryCapsules(\n  5, 3, 4, normalize='squash', activations=True, eps=0.001\n")
    with pytest.raises(ValueError, match="normalize must be one of 'layer_norm', 'squash', got 'batch'"):
        PrimaryCapsules(5, 3, 4, normalize="batch")
