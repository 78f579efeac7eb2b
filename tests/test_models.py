"""The networks by name: Table 1's parameter counts, the layers of Tables 8 and 9, overrides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastcaps import models
from fastcaps.nn import CapsuleSpec

HERE = [name for name in models.names() if name.startswith("tsai-iar-") or name in ("digits", "mnist")]
TABLE_1 = {
    "tsai-iar-simple-c10": (561_809, 0.56),
    "tsai-iar-simple-c100": (1_464_141, 1.46),
    "tsai-iar-resnet-c10": (1_829_329, 1.83),
    "tsai-iar-resnet-c100": (2_800_781, 2.80),
}


def count(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", TABLE_1)
def test_parameter_counts_are_table_1s(name):
    exact, millions = TABLE_1[name]
    net = models.create(name)
    assert count(net) == exact
    assert round(exact / 1e6, 2) == millions
    without = models.create(name, primary_bias=False)  # as the authors' code has it: the table's figure either way
    assert round(count(without) / 1e6, 2) == millions
    assert count(net) - count(without) == without.primary.conv.out_channels


def test_the_sums_by_hand():
    backbone = {
        "simple": lambda channels: 3 * 9 * channels + channels,
        "resnet": lambda channels: (
            (3 * 9 * 64 + 2 * 64)
            + 3 * 2 * (64 * 64 * 9 + 2 * 64)
            + (64 * 9 * channels + 9 * channels**2 + 64 * channels + 3 * 2 * channels)
            + 3 * 2 * (9 * channels**2 + 2 * channels)
        ),
    }
    for kind, classes, channels, d in [
        ("simple", 10, 256, 16), ("simple", 100, 128, 36), ("resnet", 10, 128, 16), ("resnet", 100, 128, 36)
    ]:  # fmt: skip
        sets = [(800, 10)] if classes == 10 else [(800, 20), (20, 100)]
        total = backbone[kind](channels) + (channels + 1) * 32 * d + 2 * d
        total += 2 * (288 * 32 * d + 2 * d) + sum(n * m * d + 2 * d for n, m in sets) + d + 1
        assert total == TABLE_1[f"tsai-iar-{kind}-c{classes}"][0]
        net = models.create(f"tsai-iar-{kind}-c{classes}")
        assert count(net.backbone) == backbone[kind](channels)


@pytest.mark.parametrize("name", TABLE_1)
def test_layers_are_tables_8_and_9(name):
    net = models.create(name).eval()
    classes, dim = (10, 16) if name.endswith("c10") else (100, 36)
    logits, trace = net(torch.randn(1, 3, 32, 32), return_trace=True)
    sets = [(1, 10, 16)] if classes == 10 else [(1, 20, 36), (1, 100, 36)]
    want = [(1, 32, 16, 16, dim), (1, 32, 7, 7, dim), (1, 32, 5, 5, dim), *sets]
    assert [tuple(p.shape) for p in trace.poses] == want
    assert logits.shape == (1, classes)
    features = net.backbone(torch.randn(1, 3, 32, 32))
    assert features.shape == (1, {"simple-c10": 256}.get(name.removeprefix("tsai-iar-"), 128), 16, 16)
    assert (net.routing.iterations, net.routing.routing) == (2, "concurrent")


def test_resnet_blocks():
    block = models.BasicBlock(4, 6, stride=2).eval()
    features = torch.randn(2, 4, 8, 8)
    inner = F.relu(
        F.batch_norm(F.conv2d(features, block.conv1.weight, stride=2, padding=1), torch.zeros(6), torch.ones(6))
    )
    inner = F.batch_norm(F.conv2d(inner, block.conv2.weight, padding=1), torch.zeros(6), torch.ones(6))
    short = F.batch_norm(F.conv2d(features, block.shortcut[0].weight, stride=2), torch.zeros(6), torch.ones(6))
    torch.testing.assert_close(block(features), F.relu(inner + short))
    same = models.BasicBlock(4, 4).eval()
    assert count(same) == 2 * (4 * 4 * 9 + 8)
    for conv in (same.conv1, same.conv2):
        torch.nn.init.zeros_(conv.weight)
    torch.testing.assert_close(same(features), F.relu(features))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_every_network_on_every_batch(name, batch):
    net = models.create(name).eval()
    logits = net(torch.randn(batch, net.in_channels, *net.image_size))
    assert logits.shape == (batch, models.config(name).classes)


@pytest.mark.parametrize("name", HERE)
def test_other_images_channels_and_classes(name):
    net = models.create(name, image_size=(20, 33), in_channels=2, classes=4).eval()
    assert net(torch.randn(1, 2, 20, 33)).shape == (1, 4)
    assert (net.image_size, net.in_channels) == ((20, 33), 2)


@pytest.mark.parametrize(
    "overrides",
    [
        {"iterations": 1},
        {"iterations": 4, "routing": "sequential"},
        {"layer_norm": False},
        {"activations": True},
        {"dropout": 0.2},
        {"pose": "vector"},
        {"hidden": ()},
        {"hidden": (CapsuleSpec(6, kernel_size=2), CapsuleSpec(5, dim=4))},
        {"capsules": 3, "dim": 9, "channels": 10},
        {"backbone": "simple"},
        {"primary_bias": False},
    ],
)
def test_overrides_build_and_learn(overrides, one_thread):
    torch.manual_seed(0)
    small = {"channels": 8, "capsules": 4, "dim": 4, "hidden": (CapsuleSpec(4, kernel_size=3, stride=2),)}
    net = models.create("digits", **{**small, **overrides})
    images, labels = torch.randn(8, 1, 8, 8), torch.arange(8)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_overrides_take_effect():
    net = models.create("mnist", iterations=3, routing="sequential", layer_norm=False, activations=True, dropout=0.1)
    assert (net.routing.iterations, net.routing.routing) == (3, "sequential")
    for layer in net.routing.layers:
        assert layer.norm is None and layer.activations and layer.dropout == 0.1
    assert net.primary.activations and net.primary.norm is not None
    assert models.create("mnist", pose="vector").routing.layers[0].pose == "vector"
    pool = models.create("zhao-cnn-routing", sharpness=3.0, iterations=4)[-3]
    assert (pool.sharpness, pool.iterations) == (3.0, 4)
    meta = models.create("mnist", device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.float64)}


def test_errors_are_named():
    near = "no network is called 'tsai-iar-simple-c1'.*did you mean tsai-iar-simple-c10"
    override = "create.. has no override batch, lr; there are: .*image_size"
    for error, message, call in [
        (ValueError, near, lambda: models.create("tsai-iar-simple-c1")),
        (ValueError, "did you mean mnist", lambda: models.create("MNIST")),
        (ValueError, "did you mean zhao-affnist, sabour-affnist or ", lambda: models.create("affnist")),
        (ValueError, r"^no network is called '', fastcaps.models.names\(\) lists all$", lambda: models.create("")),
        (ValueError, "no network is called None", lambda: models.create(None)),
        (TypeError, "no override iteration .did you mean iterations", lambda: models.create("mnist", iteration=1)),
        (TypeError, "image_size must be an int >= 1, got 28.0", lambda: models.create("mnist", image_size=28.0)),
        (TypeError, override, lambda: models.create("mnist", lr=1, batch=2)),
        (ValueError, "backbone must be", lambda: models.create("mnist", backbone="vgg")),
        (ValueError, "larger than its grid", lambda: models.create("mnist", image_size=8)),
        (ValueError, "classes must be an int >= 1", lambda: models.create("mnist", classes=0)),
        (ValueError, "square", lambda: models.create("mnist", dim=12)),
    ]:
        with pytest.raises(error, match=message):
            call()
