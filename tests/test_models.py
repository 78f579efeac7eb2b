"""Networks by name: blocks, overrides, options of a call, names of one's own, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastcaps import models
from fastcaps.nn import CapsuleSpec, EMRouting


def inputs(net, batch=2):
    return torch.randn(batch, net.in_channels, *net.image_size)


def normal(features):
    return F.batch_norm(features, torch.zeros(features.shape[1]), torch.ones(features.shape[1]))


def test_residual_blocks():
    block = models.BasicBlock(4, 6, stride=2).eval()
    features = torch.randn(2, 4, 8, 8)
    inner = F.relu(normal(F.conv2d(features, block.conv1.weight, stride=2, padding=1)))
    inner = normal(F.conv2d(inner, block.conv2.weight, padding=1))
    short = normal(F.conv2d(features, block.shortcut[0].weight, stride=2))
    torch.testing.assert_close(block(features), F.relu(inner + short))
    for same, wanted in (
        (models.BasicBlock(4, 4), features),
        (models.BasicBlock(4, 7, stride=2, shortcut="pad"), F.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, 0, 3))),
    ):
        torch.nn.init.zeros_(same.conv2.weight)
        torch.testing.assert_close(same.eval()(features), F.relu(wanted))


@pytest.mark.parametrize(
    "overrides",
    [
        {"iterations": 4, "routing": "sequential"},
        {"layer_norm": False, "activations": True},
        {"dropout": 0.2, "primary_bias": False},
        {"pose": "vector", "hidden": ()},
        {"hidden": (CapsuleSpec(6, kernel_size=2), CapsuleSpec(5, dim=4))},
        {"capsules": 3, "dim": 9, "channels": 10, "backbone": "simple"},
    ],
)
def test_overrides_build_and_learn(overrides, one_thread):
    small = {"channels": 8, "capsules": 4, "dim": 4, "hidden": (CapsuleSpec(4, kernel_size=3, stride=2),)}
    net = models.create("digits", **{**small, **overrides})
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_options_take_effect():
    net = models.create("mnist", iterations=3, routing="sequential", layer_norm=False, activations=True, dropout=0.1)
    assert (net.routing.iterations, net.routing.routing) == (3, "sequential")
    for layer in net.routing.layers:
        assert layer.norm is None and layer.activations and layer.dropout == 0.1
    assert net.primary.activations and net.primary.norm is not None
    pool = models.create("zhao-cnn-routing", sharpness=3.0, iterations=4)[-3]
    assert (pool.sharpness, pool.iterations) == (3.0, 4)
    meta = models.create("mnist", device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.float64)}
    for name, options, wanted in (
        ("li-capnet-dynamic", {}, {"compete": "children"}),
        ("li-capnet-dynamic", {"compete": "parents", "iterations": 1}, {"compete": "parents", "iterations": 1}),
        ("li-capnet-em", {}, {"normalize_cost": True}),
        ("li-capnet-em", {"normalize_cost": False}, {"normalize_cost": False}),
        ("sabour-mnist", {"detach": True}, {"detach": True}),
        ("mnist", {"start": "learned", "layer_norm": False, "pose": "vector"}, {"norm": None, "pose": "vector"}),
        ("zhao-affnist", {"sharpness": 15.0}, {"sharpness": 15.0}),
        ("digits", {"routing": "equilibrium", "tolerance": 1e-3}, {"iterations": 32, "tolerance": 1e-3}),
        ("digits", {"routing": "equilibrium", "iterations": 9}, {"iterations": 9}),
    ):
        for layer in models.create(name, **options).routing.layers:
            assert {option: getattr(layer, option) for option in wanted} == wanted
            assert "start" not in options or layer.first_poses is not None


@pytest.mark.parametrize("name", ["sabour-mnist", "hinton-norb", "heinsen-norb", "zhao-affnist"])
def test_a_call_may_ask_for_other_iterations(name):
    net, one = models.create(name).eval(), models.create(name, iterations=1).eval()
    for parameter in net.routing.parameters():  # whose betas are zero at the start
        torch.nn.init.normal_(parameter, std=0.3)
    one.load_state_dict(net.state_dict())
    images = inputs(net, 1)
    torch.testing.assert_close(net(images, iterations=1), one(images))
    assert not torch.equal(net(images), one(images))


def test_reconstruction():
    net = models.create("sabour-mnist", image_size=20, decoder=(8,)).eval()
    images = inputs(net)
    labels = torch.tensor([3, 8])
    logits, drawn, trace = net(images, reconstruct=labels, return_trace=True)
    torch.testing.assert_close(drawn, net.decoder(trace.poses[-1], labels))
    torch.testing.assert_close(logits, trace.poses[-1].norm(dim=-1))
    torch.testing.assert_close(net(images, reconstruct=True)[1], net.decoder(trace.poses[-1], logits.argmax(1)))
    with pytest.raises(ValueError, match="reconstruct must be False for a network without a decoder"):
        models.create("digits")(torch.randn(1, 1, 8, 8), reconstruct=True)


def test_coordinates_of_heinsens_images():
    coordinates = models.create("heinsen-norb").backbone[0](torch.zeros(1, 2, 3, 5))
    torch.testing.assert_close(coordinates[0, 2, 1], torch.tensor([-1, -0.5, 0, 0.5, 1]))
    torch.testing.assert_close(coordinates[0, 3, :, 4], torch.tensor([-1.0, 0, 1]))


def test_a_network_of_ones_own_has_a_name_too():
    sizes = {"channels": 8, "capsules": 2, "dim": 4, "classes": 5, "image_size": 6, "in_channels": 1}
    own = {"hidden": (CapsuleSpec(3),), "layer": EMRouting, "primary": {"normalize": None}}
    config = models.NetworkConfig("tiny", **sizes, **own)
    models.register("own", config)
    try:
        assert "own" in models.names()
        assert models.create("own", classes=4)(torch.randn(2, 1, 6, 6)).shape == (2, 4)
        with pytest.raises(ValueError, match="name must be a new one, got 'own'"):
            models.register("own", config)
    finally:
        models._NETWORKS.pop("own")


def create(*arguments, **overrides):
    return lambda *given: models.create(*arguments, **overrides)(*given)


text = create("heinsen-sst2", layers=1, embedding=2)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "called 'tsai-iar-simple-c1'.*mean tsai-iar-simple-c10", create("tsai-iar-simple-c1")),
        (ValueError, "did you mean zhao-affnist, sabour-affnist or ", create("affnist")),
        (ValueError, "no network is called None", create(None)),
        (TypeError, "no override iteration .did you mean iterations", create("mnist", iteration=1)),
        (TypeError, "create.. has no override batch, lr; there are: .*image_size", create("mnist", lr=1, batch=2)),
        (ValueError, "backbone must be", create("mnist", backbone="vgg")),
        (ValueError, "larger than its grid", create("mnist", image_size=8)),
        (ValueError, "classes must be an int >= 1", create("mnist", classes=0)),
        (ValueError, "channels must be None", create("sabour-mnist", channels=8)),
        (ValueError, "left alone for DynamicRouting", create("sabour-mnist", routing="sequential")),
        (ValueError, "image_size .8, 8. is too small", create("sabour-mnist", image_size=8)),
        (ValueError, "must divide the 100 capsules", create("li-capnet-dynamic", parents=100)),
        (ValueError, "images must be .B, 3, 32, 32.", lambda: create("zhao-cnn-max")(torch.randn(1, 1, 32, 32))),
        (ValueError, "mask must be", lambda: text(torch.randn(1, 3, 1, 2), torch.ones(1, 2))),
        (ValueError, "embeddings must be", lambda: text(torch.randn(1, 3, 2))),
    ],
)  # fmt: skip
def test_errors_are_named(error, message, call):
    with pytest.raises(error, match=message):
        call()
