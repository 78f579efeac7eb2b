"""Networks by name: parameters by hand and as published, shapes of tables, a training step, options, errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from stand_ins import refusals

from fastcaps import losses
from fastcaps.nn import CapsuleSpec, EMRouting
from fastcaps_lab import models
from fastcaps_lab.encapnet.networks import FeedbackConfig
from fastcaps_lab.models.layers import simple, small

PAGE = Path(__file__).parents[1] / "docs" / "networks.md"
EM_PAIR = 2 * (9 * 32 * 32 * 16 + 2 * 32)
CAPNET = 9 * (3 * 32 + 32 * 64 + 64 * 128) + 2 * (32 + 64 + 128) + 32 * 512 * 8 * 16 + 32 * 10 * 16 * 16
SST = 39 * 1280 + 1281 * 64 + 64 * 64 * 2 + 2 * 2 * 64
BY_HAND = {
    "sabour-affnist": 82 * 256 + 20_737 * 256 + 144 * 32 * 10 * 128 + 161 * 512 + 513 * 1024 + 1025 * 40**2,
    "hinton-norb": 51 * 32 + 33 * 512 + 33 * 32 + EM_PAIR + (32 * 16 + 2) * 5,
    "heinsen-norb": 37 * 64 + 5 * 577 * 64 + 2 * 324 + 65 * (64 + 1024) + 4 * 64 + (64 + 64 * 5) * 34,
    "heinsen-sst5": SST + 64 * 5 * 8,
    "heinsen-sst2": SST + 64 * 2 * 8,
    "zhao-cnn": 76 * 64 + 3 * 1601 * 64 + 65 * 10,
    "li-capnet-dynamic": CAPNET + 9 * 128 * 256 + 2 * 256,
    "li-capnet-em": CAPNET + 9 * 128 * 288 + 2 * 288 + 2 * (512 + 10),
}
"""Parameters that no paper has, or roughly: the sum of what the text says."""

EVERY = [name for name in models.names() if not isinstance(models.config(name), FeedbackConfig)]
"""All but those that tests/encapnet has."""

ONE_OF_A_KIND = (
    "tsai-iar-simple-c10", "tsai-dr-simple-c10", "tsai-em-simple-c10", "tsai-dmm-cnn", "sabour-mnist", "hinton-norb",
    "heinsen-norb", "heinsen-sst2", "zhao-affnist", "zhao-cnn-routing", "zhao-resnet20-average", "li-capnet-dynamic",
    "li-capnet-em", "digits",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_the_published_and_told(name):
    """As many digits of millions as the page says that the paper has."""
    with torch.device("meta"):
        net = models.create(name)
        exact = weights(net)
        lines = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if f"{exact:,}" in line]
        published = next(row[-2] for row in lines if name.partition("-")[0] in row[1])
        close = {f"{exact / 1e6:.{digits}f}M" for digits in (0, 1, 2)} & {*re.findall(r"[\d.]+M", published)}
        assert close or BY_HAND.get(name, BY_HAND.get(name.rpartition("-")[0])) == exact or name in ("mnist", "digits")
        if name.startswith("tsai-iar"):  # as the authors' code has it: the table's figure either way
            without = models.create(name, primary={"bias": False})
            assert exact - weights(without) == without.primary.conv.out_channels
            assert f"{weights(without) / 1e6:.2f}M" in published


def weights(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def inputs(net, batch=2):
    """Images, or embeddings of four tokens and of two."""
    if hasattr(net, "embedding"):
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])[:batch]
        return torch.randn(batch, 4, net.layers, net.embedding), mask
    return (torch.randn(batch, net.in_channels, *net.image_size),)


def loss_of(net, given, labels):
    """The logits' cross-entropy, or margins and the reconstruction.

    Each class by itself: softmax would not see a bias that all classes share, whose gradient were rounding alone.
    """
    if getattr(net, "decoder", None) is None:
        logits = net(*given).float()
        return F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, logits.shape[1]).float())
    lengths, drawn = net(*given, reconstruct=labels)
    return losses.margin_loss(lengths, labels) + losses.reconstruction_loss(drawn, given[0].sigmoid())


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("tsai-iar-simple-c10", [(32, 16, 16, 16), (32, 7, 7, 16), (32, 5, 5, 16), (10, 16)]),
        ("tsai-iar-resnet-c100", [(32, 16, 16, 36), (32, 7, 7, 36), (32, 5, 5, 36), (20, 36), (100, 36)]),
        ("tsai-dr-simple-c10", [(32, 8, 8, 8), (10, 16)]),
        ("tsai-dr-resnet-c100", [(32, 8, 8, 8), (100, 16)]),
        ("tsai-em-simple-c100", [(32, 16, 16, 16), (32, 7, 7, 16), (32, 5, 5, 16), (100, 16)]),
        ("tsai-dmm-matrix", [(16, 8, 8, 64), (16, 6, 6, 64), (10, 64)]),
        ("tsai-dmm-dynamic", [(16, 8, 8, 64), (16, 6, 6, 64), (10, 64)]),
        ("sabour-mnist", [(32, 6, 6, 8), (10, 16)]),
        ("hinton-norb", [(32, 14, 14, 16), (32, 6, 6, 16), (32, 4, 4, 16), (5, 16)]),
        ("heinsen-norb", [(64, 9, 9, 16), (64, 16), (5, 16)]),
        ("zhao-multimnist", [(2, 9, 9, 32), (10, 16)]),
        ("li-capnet-em", [(32, 8, 8, 8), (512, 16), (10, 16)]),
    ],
)
def test_shapes_are_those_of_the_tables(name, shapes):
    once = {"iterations": 1} if hasattr(models.config(name), "iterations") else {}  # the sizes are the same
    with torch.device("meta"):
        net = models.create(name, **once).eval()
        logits, trace = net(*inputs(net, 1), return_trace=True)
    assert [tuple(poses.shape[1:]) for poses in trace.poses] == shapes
    assert logits.shape == (1, shapes[-1][0])


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_a_network_of_every_kind_trains_and_takes_every_batch(name):
    """Images of another size, of two channels and four classes, in one network."""
    size = (33, 36) if name.startswith(("tsai-em", "hinton")) else (50, 41)  # where EM's activations are not all 0
    other = {} if "sst" in name else {"image_size": size, "in_channels": 2, "classes": 4}
    net = models.create(name, **other)
    given, classes = inputs(net), other.get("classes", models.config(name).classes)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(3 if name.startswith("heinsen") else 1):  # whose benefits and costs are zero at the start
        optimizer.zero_grad()
        loss_of(net, given, torch.arange(2)).backward()
        optimizer.step()
    for path, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        rounding = name.startswith("tsai-em-simple") and path == "backbone.0.bias"  # in front of a BatchNorm
        assert rounding or parameter.grad.any(), path
    net.eval()
    for batch in (0, 1):
        assert net(*(tensor[:batch] for tensor in given)).shape == (batch, classes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("sabour-mnist", (1, 20, 20), {"image_size": 20, "decoder": (8,)}),
        ("hinton-norb", (2, 28, 28), {"image_size": 28}),
        ("heinsen-sst2", (5, 3, 8), {"layers": 3, "embedding": 8, "parts": 6}),
        ("zhao-affnist", (1, 24, 24), {"image_size": 24, "decoder": (8,)}),
        ("li-encapnet-v1", (3, 8, 8), {"image_size": 8, "types": 2}),
    ],
)
def test_networks_are_compiled_in_one_graph_and_exported(name, shape, options):
    torch._dynamo.reset()
    net, given = models.create(name, **options).eval(), torch.randn(2, *shape)
    wanted = net(given)
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(given), wanted)
    program = torch.export.export(net, (given,), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    torch.testing.assert_close(program.module()(torch.cat([given] * 3)), torch.cat([wanted] * 3))


def test_other_texts():
    net = models.create("heinsen-sst5", layers=3, embedding=20, classes=7, parts=6, dim=8).eval()
    assert not net.depth.any()
    embeddings = torch.randn(2, 5, 3, 20)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    scores, trace = net(embeddings, mask, return_trace=True)
    assert scores.shape == (2, 7) and trace.poses[1].shape == (2, 6, 2)
    for parameter in net.parameters():  # at the start all scores are 0
        torch.nn.init.normal_(parameter, std=0.3)
    alone = net(embeddings[1:, :3])
    torch.testing.assert_close(net(embeddings, mask)[1:], alone, rtol=1e-4, atol=1e-5)  # padding leaves no trace
    assert not torch.allclose(net(embeddings)[1:], alone, rtol=1e-2)
    shares, seen = torch.tensor([[1, 0.25], [0.5, 0]]), []  # of tokens, as mixup makes them
    net.routing.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    net(embeddings[:, :2], shares)
    torch.testing.assert_close(seen[0], torch.log(shares / (1 - shares)).repeat_interleave(3, 1))


# ---- blocks, options and names ---------------------------------------------------------------------------------------


def test_residual_blocks():
    features, projected = torch.randn(2, 4, 8, 8), models.BasicBlock(4, 6, stride=2).eval()
    for block, wanted in (
        (models.BasicBlock(4, 4), features),
        (models.BasicBlock(4, 7, stride=2, shortcut="pad"), F.pad(features[:, :, ::2, ::2], (0, 0, 0, 0, 0, 3))),
        (projected, projected.shortcut(features)),
    ):
        torch.nn.init.zeros_(block.conv2.weight)
        torch.testing.assert_close(block.eval()(features), F.relu(wanted))


def test_options_take_effect():
    changes = {"pose": "vector", "hidden": (CapsuleSpec(6, kernel_size=2), CapsuleSpec(5, dim=4)), "capsules": 3}
    net = models.create("digits", **changes, dim=9, backbone=simple(10), primary={"bias": False})
    loss_of(net, inputs(net), torch.arange(2)).backward()
    assert all(parameter.grad.any() for parameter in net.parameters())
    net = models.create("mnist", iterations=3, routing="sequential", layer_norm=False, activations=True, dropout=0.1)
    assert (net.routing.iterations, net.routing.routing) == (3, "sequential")
    for layer in net.routing.layers:
        assert layer.norm is None and layer.activations and layer.dropout == 0.1
    assert net.primary.activations and net.primary.norm is not None
    pools = [models.create(f"zhao-cnn-{kind}", device="meta")[-3] for kind in ("average", "max", "routing")]
    assert isinstance(pools[0], torch.nn.AdaptiveAvgPool2d) and isinstance(pools[1], torch.nn.AdaptiveMaxPool2d)
    assert (pools[2].dim, pools[2].sharpness, pools[2].iterations) == (16, 0.5, 3)
    assert models.create("zhao-resnet20-routing", device="meta")[-3].sharpness == 5
    meta = models.create("mnist", device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.float64)}
    for name, options, wanted in (
        ("li-capnet-dynamic", {}, {"compete": "children"}),
        ("li-capnet-em", {}, {"normalize_cost": True}),
        ("sabour-mnist", {"detach": True}, {"detach": True}),
        ("mnist", {"start": "learned", "layer_norm": False, "pose": "vector"}, {"norm": None, "pose": "vector"}),
        ("zhao-affnist", {"sharpness": 15.0}, {"sharpness": 15.0}),
    ):
        for layer in models.create(name, **options).routing.layers:
            assert {option: getattr(layer, option) for option in wanted} == wanted
            assert "start" not in options or layer.first_poses is not None


def test_coordinates_of_heinsens_images():
    coordinates = models.create("heinsen-norb").backbone[0](torch.zeros(1, 2, 3, 5))
    torch.testing.assert_close(coordinates[0, 2, 1], torch.tensor([-1, -0.5, 0, 0.5, 1]))
    torch.testing.assert_close(coordinates[0, 3, :, 4], torch.tensor([-1.0, 0, 1]))


def test_a_network_of_ones_own_has_a_name_too(monkeypatch):
    sizes = {"capsules": 2, "dim": 4, "classes": 5, "image_size": 6, "in_channels": 1}
    changed = {"hidden": (CapsuleSpec(3),), "layer": EMRouting, "primary": {"normalize": None}}
    monkeypatch.setitem(models.NETWORKS, "own", models.NetworkConfig(small(8, 1), **sizes, **changed))
    assert models.create("own", classes=4)(torch.randn(2, 1, 6, 6)).shape == (2, 4)


def create(*arguments, **overrides):
    return lambda *given: models.create(*arguments, **overrides)(*given)


text = create("heinsen-sst2", layers=1, embedding=2)


test_errors_are_named = refusals(
    (ValueError, "called 'tsai-iar-simple-c1'.*mean tsai-iar-simple-c10", create("tsai-iar-simple-c1")),
    (ValueError, "did you mean zhao-affnist or sabour-affnist or ", create("affnist")),
    (TypeError, "no argument iteration .did you mean iterations", create("mnist", iteration=1)),
    (TypeError, "no override image_sizes .did you mean image_size", create("sabour-cnn", image_sizes=1)),
    (ValueError, "'concurrent' for DynamicRouting", create("sabour-mnist", routing="sequential")),
    (ValueError, "image_size .8, 8. is too small", create("sabour-mnist", image_size=8)),
    (ValueError, "images must be .B, 3, 32, 32.", lambda: create("zhao-cnn-max")(torch.randn(1, 1, 32, 32))),
    (ValueError, "embeddings must be", lambda: text(torch.randn(1, 3, 2))),
)  # fmt: skip
