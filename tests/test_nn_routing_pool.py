"""Routing as a pooling layer: its procedure as loops, average pooling at sharpness 0, what it takes the place of."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from functional_cases import expect
from oracle_routings import vector_normed
from torch import Tensor, nn

import fastcaps
from fastcaps import RoutingPool2d

DIM = 3


def windows(features: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]):
    """Yield (b, y, x) and the capsules under the window there: ``[group][place]`` lists of vectors."""
    _, channels, height, width = features.shape
    rows = (height + 2 * padding[0] - kernel[0]) // stride[0] + 1
    columns = (width + 2 * padding[1] - kernel[1]) // stride[1] + 1
    for b, y, x in ((b, y, x) for b in range(len(features)) for y in range(rows) for x in range(columns)):
        groups = []
        for n in range(channels // DIM):
            places = []
            for ky in range(kernel[0]):
                for kx in range(kernel[1]):
                    at = (y * stride[0] - padding[0] + ky, x * stride[1] - padding[1] + kx)
                    if 0 <= at[0] < height and 0 <= at[1] < width:
                        places.append(features[b, n * DIM : (n + 1) * DIM, at[0], at[1]].tolist())
            groups.append(places)
        yield (b, y, x), groups


GEOMETRY = {
    "whole": ({}, (4, 5), (1, 1), (0, 0)),
    "window": ({"kernel_size": 2}, (2, 2), (2, 2), (0, 0)),
    "overlap": ({"kernel_size": (3, 2), "stride": 1, "padding": (1, 0)}, (3, 2), (1, 1), (1, 0)),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("parents", [None, 1, 4])
@pytest.mark.parametrize("name", GEOMETRY)
def test_the_layer_is_the_procedure(name: str, parents: int | None, channels_last: bool) -> None:
    options, *geometry = GEOMETRY[name]
    features = draw(2, 6, 4, 5)
    if channels_last:
        features = features.contiguous(memory_format=torch.channels_last)
    extra = {"in_channels": 6, "out_dim": 2} if parents == 4 else {}
    layer = RoutingPool2d(DIM, sharpness=1.5, iterations=2, parents=parents, **options, **extra).double()
    found, r = layer(features, return_coefficients=True)
    assert found.shape[:2] == (2, {None: 6, 1: DIM, 4: 8}[parents])
    for (b, y, x), groups in windows(features, *geometry):
        if parents is None:
            wanted = [vector_normed([[vote] for vote in places], 2, 1.5)[0] for places in groups]
        else:
            every = [(n, groups[n][k]) for k in range(len(groups[0])) for n in range(2)]  # groups fastest
            if parents == 1:
                votes = [[vote] for _, vote in every]
            else:
                matrices = layer.weight.detach()
                votes = [
                    [(torch.tensor(vote, dtype=torch.float64) @ matrices[n, m]).tolist() for m in range(4)]
                    for n, vote in every
                ]
            wanted = vector_normed(votes, 2, 1.5)
        expect(found[b, :, y, x].detach(), wanted)
    count = math.prod(geometry[0]) * (1 if parents is None else 2)
    assert r.shape == (2, *found.shape[2:], count, parents or 2)
    torch.testing.assert_close(r.sum(-2), torch.ones_like(r.sum(-2)))
    torch.testing.assert_close(layer(features), found)


def test_coefficients_show_where_a_parent_looks() -> None:
    """The capsule that points the other way gets the least."""
    features = torch.ones(1, 6, 4, 5, dtype=torch.float64) + 0.1 * draw(1, 6, 4, 5)
    features[0, :3, 2, 1] *= -1
    _, r = RoutingPool2d(DIM, sharpness=3.0)(features, return_coefficients=True)
    picture = r[0, 0, 0, :, 0].view(4, 5)
    assert picture.argmin() == 2 * 5 + 1 and r[0, 0, 0, :, 1].view(4, 5)[2, 1] > 0.03
    pooled = RoutingPool2d(DIM, sharpness=3.0)(features)
    torch.testing.assert_close(pooled[0, :3, 0, 0], (picture * features[0, :3]).sum((1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64, 8, 8), (3, 16, 7, 5), (0, 16, 4, 4)])
def test_sharpness_0_is_average_pooling_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    features = draw(*shape).to(dtype).requires_grad_()
    pairs = [
        (RoutingPool2d(16, sharpness=0), nn.AdaptiveAvgPool2d(1)),
        (RoutingPool2d(16, sharpness=0, kernel_size=2), nn.AvgPool2d(2)),
        (RoutingPool2d(16, sharpness=0.0, kernel_size=(3, 2), stride=1), nn.AvgPool2d((3, 2), 1)),
        (
            RoutingPool2d(16, sharpness=0, kernel_size=3, stride=2, padding=1),
            nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        ),
    ]
    for ours, theirs in pairs:
        found, wanted = ours(features), theirs(features)
        assert torch.equal(found, wanted) and found.shape == wanted.shape
        grad = torch.randn_like(found)
        for got, want in zip(
            torch.autograd.grad(found, features, grad), torch.autograd.grad(wanted, features, grad), strict=True
        ):
            assert torch.equal(got, want)
    one = RoutingPool2d(16, sharpness=0, parents=1)(features)
    if dtype != torch.bfloat16:
        torch.testing.assert_close(one, features.unflatten(1, (-1, 16)).mean((1, 3, 4))[..., None, None])


@pytest.mark.parametrize("name", GEOMETRY)
def test_the_pooling_pass_itself_averages_at_sharpness_0(name: str) -> None:
    """Not only the shortcut: shares at sharpness 0 are equal, and a tiny sharpness is near the average."""
    options, *_ = GEOMETRY[name]
    features = draw(2, 6, 4, 5)
    exact, r = RoutingPool2d(DIM, sharpness=0, **options)(features, return_coefficients=True)
    there = r > 0
    torch.testing.assert_close(r, there.double() / there.sum(-2, keepdim=True))
    torch.testing.assert_close(RoutingPool2d(DIM, sharpness=1e-9, **options)(features), exact, rtol=0, atol=1e-7)


def test_very_sharp_pooling_picks_one_place() -> None:
    features = draw(1, 3, 4, 5)
    pooled = RoutingPool2d(DIM, sharpness=1e4)(features)
    assert (pooled - features).abs().amax(1).min() < 1e-9


def test_activations() -> None:
    features = draw(2, 6, 4, 5)
    plain = RoutingPool2d(DIM)(features)
    squashed = RoutingPool2d(DIM, activation="squash")(features)
    torch.testing.assert_close(
        squashed.view(2, 2, DIM), fastcaps.losses.length(plain.view(2, 2, DIM), keepdim=True).pow(2)
        / (1 + fastcaps.losses.length(plain.view(2, 2, DIM), keepdim=True).pow(2))
        * F.normalize(plain.view(2, 2, DIM), dim=-1)
    )  # fmt: skip
    torch.testing.assert_close(RoutingPool2d(DIM, activation="relu")(features), plain.relu())
    torch.testing.assert_close(RoutingPool2d(DIM, activation=torch.exp)(features), plain.exp())
    norm = nn.LayerNorm(DIM).double()
    layer = RoutingPool2d(DIM, activation=norm)
    assert set(layer.state_dict()) == {"activation.weight", "activation.bias"}
    torch.testing.assert_close(layer(features).view(2, 2, DIM), norm(plain.view(2, 2, DIM)))


@pytest.mark.parametrize("parents", [None, 1, 4])
@pytest.mark.parametrize("kernel", [None, 2])
def test_gradients(parents: int | None, kernel: int | None) -> None:
    layer = RoutingPool2d(DIM, sharpness=2.0, parents=parents, in_channels=6, kernel_size=kernel).double()
    features = draw(2, 6, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda f, *_: layer(f), (features, *layer.parameters()), fast_mode=True)


def test_zero_features_have_a_gradient() -> None:
    features = torch.zeros(2, 6, 4, 4, requires_grad=True)
    RoutingPool2d(DIM)(features).sum().backward()
    assert features.grad.isfinite().all()


def test_at_the_end_of_a_network_compiled_and_under_autocast() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), RoutingPool2d(16, sharpness=5.0), nn.Flatten())
    net = net.append(nn.Linear(32, 10))
    images = torch.randn(4, 3, 8, 8)
    wanted = net(images)
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(images), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = net(images)
    assert (rounded.float() - wanted).abs().max() < 0.05
    rounded.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(copied(images), wanted)
    told = fastcaps.explain(net, images)
    assert isinstance(told, fastcaps.functional.Explanation) and told.backend in ("cpu", "reference")


def test_state_initialisation_and_repr() -> None:
    layer = RoutingPool2d(16, parents=10, in_channels=64, out_dim=8, activation="squash", kernel_size=4, padding=1)
    assert layer.weight.shape == (4, 10, 16, 8)
    assert abs(layer.weight.std().item() * 4 - 1) < 5 / math.sqrt(2 * layer.weight.numel())
    assert list(layer.state_dict()) == ["weight"] and not RoutingPool2d(16).state_dict()
    other = RoutingPool2d(16, parents=10, in_channels=64, out_dim=8, activation="squash", kernel_size=4, padding=1)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    features = torch.randn(2, 64, 6, 6)
    assert torch.equal(layer(features), other(features))
    assert repr(RoutingPool2d(16)) == "RoutingPool2d(16)"
    for part in ("kernel_size=4, padding=1, parents=10", "activation='squash'"):
        assert part in repr(layer)


WRONG = [
    ((0,), {}, ValueError, "dim must be an int >= 1"),
    (((1, 1),), {}, TypeError, r"dim must be an int, the channels of a capsule, got \(1, 1\); kernel_size=None pools"),
    ((16,), {"sharpness": -1.0}, ValueError, "sharpness must be a finite number >= 0"),
    ((16,), {"iterations": -1}, ValueError, "iterations must be an int >= 0"),
    ((16,), {"stride": 2}, ValueError, "stride and padding need a kernel_size"),
    ((16,), {"parents": 0}, ValueError, "parents must be an int >= 1"),
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
    layer = RoutingPool2d(16)
    with pytest.raises(ValueError, match=r"features must be \[B, channels, H, W\], got \[2, 16\]"):
        layer(torch.randn(2, 16))
    with pytest.raises(ValueError, match="features must have channels that dim = 16 divides, got 20"):
        layer(torch.randn(2, 20, 4, 4))
    with pytest.raises(TypeError, match="features must be a tensor"):
        layer([1.0])
    with pytest.raises(ValueError, match="features must be as large as the window"):
        RoutingPool2d(16, kernel_size=5)(torch.randn(2, 16, 4, 4))
    with pytest.raises(ValueError, match=r"features must be \[B, 64, H, W\], got \[2, 32, 4, 4\]"):
        RoutingPool2d(16, parents=4, in_channels=64)(torch.randn(2, 32, 4, 4))
