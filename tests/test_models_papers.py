"""The papers' networks: parameters by hand and as published, shapes of tables, a training step, autocast, compilers."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastcaps import losses, models
from fastcaps.encapnet.networks import FeedbackConfig

PAGE = Path(__file__).parents[1] / "docs" / "networks.md"


def conv(before, after, size, bias=1):
    return (before * size * size + bias) * after


def blocks(before, after, count, short=1):
    """Residual blocks with BatchNorm; ``short``: whether the shortcut of the first has a convolution."""
    first = conv(before, after, 3, 0) + conv(after, after, 3, 0) + 4 * after
    rest = (count - 1) * (2 * conv(after, after, 3, 0) + 4 * after)
    return first + rest + short * (before != after) * (conv(before, after, 1, 0) + 2 * after)


def linear(before, after):
    return (before + 1) * after


STEM = conv(3, 64, 3, 0) + 2 * 64
RESNET_128 = STEM + blocks(64, 64, 3) + blocks(64, 128, 4)
RESNET_256 = STEM + blocks(64, 64, 3) + blocks(64, 256, 4)
EM_PAIR = 2 * (9 * 32 * 32 * 16 + 2 * 32)
WIDE = conv(1024, 1024, 3) + 2 * 1024
DMM = conv(1, 1024, 3) + conv(1024, 1024, 3)


def attention(backbone, channels, numbers, classes):
    sets = [(800, 10)] if classes == 10 else [(800, 20), (20, 100)]
    routed = 2 * (9 * 32 * 32 * numbers + 2 * numbers) + sum(n * m * numbers + 2 * numbers for n, m in sets)
    return backbone + conv(channels, 32 * numbers, 1) + 2 * numbers + routed + linear(numbers, 1)


def em(backbone, channels, classes):
    return backbone + conv(channels, 512, 1) + conv(channels, 32, 1) + EM_PAIR + (32 * 16 + 2) * classes


def decoder(pixels):
    return linear(160, 512) + linear(512, 1024) + linear(1024, pixels)


def sabour(size):
    grid = ((size - 8) - 9) // 2 + 1
    return conv(1, 256, 9) + conv(256, 256, 9) + grid**2 * 32 * 10 * 8 * 16 + decoder(size**2)


def resnet(depth, in_channels=3):
    count = (depth - 2) // 6
    stages = blocks(16, 16, count, 0) + blocks(16, 32, count, 0) + blocks(32, 64, count, 0)
    return conv(in_channels, 16, 3, 0) + 2 * 16 + stages


def capnet(activations, parents=512):
    widths = [3, 32, 64, 128, 256 + activations]
    convs = sum(conv(a, b, 3, 0) + 2 * b for a, b in pairwise(widths))
    betas = 2 * (parents + 10) if activations else 0
    return convs + 32 * parents * 8 * 16 + 32 * 10 * 16 * 16 + betas


def sst(classes):
    first = 64 * 64 * 2 + 64 * 2 + 2 * 64
    return 37 * 1280 + 2 * 1280 + linear(1280, 64) + first + 64 * classes * (2 * 2 + 2 + 2)


NORB = (
    conv(4, 64, 3) + 5 * conv(64, 64, 3) + 2 * (4 + 5 * 64)  # (c), each after BatchNorm
    + conv(64, 64, 1) + conv(64, 1024, 1) + 2 * 2 * 64  # (d)
    + 64 * (16 + 16 + 2) + 64 * 5 * (16 + 16 + 2)  # (e)
)  # fmt: skip

# Numbers as the papers have them, or as the text adds up; in millions with two digits where they are Table 1's.
HAND = {
    "tsai-iar-simple-c10": (561_809, attention(conv(3, 256, 3), 256, 16, 10), 0.56),
    "tsai-iar-simple-c100": (1_464_141, attention(conv(3, 128, 3), 128, 36, 100), 1.46),
    "tsai-iar-resnet-c10": (1_829_329, attention(RESNET_128, 128, 16, 10), 1.83),
    "tsai-iar-resnet-c100": (2_800_781, attention(RESNET_128, 128, 36, 100), 2.80),
    "tsai-dr-simple-c10": (7_992_576, conv(3, 256, 9) + conv(256, 256, 9) + 2048 * 10 * 8 * 16, 7.99),
    "tsai-dr-simple-c100": (31_585_536, conv(3, 256, 9) + conv(256, 256, 9) + 2048 * 100 * 8 * 16, 31.59),
    "tsai-dr-resnet-c10": (12_451_136, RESNET_256 + conv(256, 256, 9) + 2048 * 10 * 8 * 16, 12.45),
    "tsai-dr-resnet-c100": (36_044_096, RESNET_256 + conv(256, 256, 9) + 2048 * 100 * 8 * 16, 36.04),
    "tsai-em-simple-c10": (453_044, em(conv(3, 256, 4) + 2 * 256, 256, 10), 0.45),
    "tsai-em-simple-c100": (499_304, em(conv(3, 256, 4) + 2 * 256, 256, 100), 0.50),
    "tsai-em-resnet-c10": (1_710_580, em(RESNET_128, 128, 10), 1.71),
    "tsai-em-resnet-c100": (1_756_840, em(RESNET_128, 128, 100), 1.76),
    "tsai-cnn-c10": (18_919_434, conv(3, 1024, 3) + 2 * WIDE + linear(1024, 10), 18.92),
    "tsai-cnn-c100": (19_011_684, conv(3, 1024, 3) + 2 * WIDE + linear(1024, 100), 19.01),
    "tsai-dmm-matrix": (9_964_993, DMM + 144 * 16 * 64 + 576 * 10 * 64 + 3 * 128 + 65, 9.96),
    "tsai-dmm-vector": (42_479_041, DMM + 144 * 16 * 64**2 + 576 * 10 * 64**2 + 3 * 128 + 65, 42.48),
    "tsai-dmm-dynamic": (42_478_592, DMM + 144 * 16 * 64**2 + 576 * 10 * 64**2, 42.48),
    "tsai-dmm-cnn": (19_553_162, conv(1, 1024, 3) + 2 * WIDE + linear(1024, 640) + linear(640, 10), 19.55),
    "tsai-dmm-cnn-learned": (
        42_490_762, conv(1, 1024, 3) + 2 * WIDE + linear(36 * 1024, 640) + linear(640, 10), 42.49
    ),
    "tsai-dmm-matrix-42m": (
        41_597_377, conv(1, 1024, 3) + conv(1024, 4096, 3) + 576 * 64 * 64 + 2304 * 10 * 64 + 3 * 128 + 65, None
    ),
    "resnet18-c10": (
        11_173_962,
        STEM + blocks(64, 64, 2) + blocks(64, 128, 2) + blocks(128, 256, 2) + blocks(256, 512, 2) + linear(512, 10),
        11.17,
    ),
    "resnet18-c100": (
        11_220_132,
        STEM + blocks(64, 64, 2) + blocks(64, 128, 2) + blocks(128, 256, 2) + blocks(256, 512, 2) + linear(512, 100),
        11.22,
    ),
    "sabour-mnist": (8_215_568, sabour(28), None),
    "sabour-multimnist": (11_361_808, sabour(36), 11.36),
    "sabour-affnist": (13_475_648, sabour(40), None),  # about 13.4M, says Zhao
    "sabour-cnn": (
        35_445_522,
        conv(1, 256, 5) + conv(256, 256, 5) + conv(256, 128, 5)
        + linear(128 * 28**2, 328) + linear(328, 192) + linear(192, 10),
        None,  # 35.4M
    ),
    "hinton-norb": (
        317_194, conv(2, 32, 5) + conv(32, 512, 1) + conv(32, 32, 1) + EM_PAIR + (32 * 16 + 2) * 5, None
    ),  # not the published 310K
    "heinsen-norb": (271_688, NORB, None),
    "heinsen-sst5": (142_912, sst(5), None),
    "heinsen-sst2": (141_376, sst(2), None),
    "zhao-affnist": (2_526_768, resnet(20, 1) + 2 * 10 * 32 * 16 + decoder(40**2), None),
    "zhao-multimnist": (2_215_168, resnet(20, 1) + 2 * 10 * 32 * 16 + decoder(36**2), None),
    "li-capnet-dynamic": (2_567_968, capnet(0), None),
    "li-capnet-em": (2_605_940, capnet(32), None),
}  # fmt: skip
for kind in ("max", "average", "routing"):
    HAND[f"zhao-cnn-{kind}"] = (312_906, conv(3, 64, 5) + 3 * conv(64, 64, 5) + linear(64, 10), None)
for depth, number, published in [(20, 269_722, 0.27), (32, 464_154, 0.46), (44, 658_586, 0.66), (56, 853_018, 0.85)]:
    for kind in ("average", "routing"):
        HAND[f"zhao-resnet{depth}-{kind}"] = (number, resnet(depth) + linear(64, 10), published)

ENCAPNET = {
    name for name in models.names() if isinstance(models.config(name), FeedbackConfig)
}  # tests/encapnet has them
ONE_OF_A_KIND = (
    "tsai-iar-simple-c10", "tsai-dr-simple-c10", "tsai-em-simple-c10", "tsai-dmm-cnn", "sabour-mnist", "hinton-norb",
    "heinsen-norb", "heinsen-sst2", "zhao-affnist", "zhao-cnn-routing", "zhao-resnet20-average", "li-capnet-dynamic",
    "li-capnet-em", "digits",
)  # fmt: skip
EVERY = sorted({*HAND, "mnist", "digits"})


def test_every_name_has_its_parameters_tested_and_told():
    assert set(models.names()) == {*HAND, *ENCAPNET, "mnist", "digits"}
    page = PAGE.read_text(encoding="utf-8")
    for name, (exact, _, _) in HAND.items():
        stem = re.sub(r"-(c100|max|average|routing)$", "", name)
        rows = [row for row in page.splitlines() if row.startswith("|") and f"`{stem}" in row]
        assert any(f"{exact:,}" in row for row in rows), name


def weights(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def inputs(net, batch=2):
    """Images, or embeddings of four tokens and of two."""
    if hasattr(net, "embedding"):
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])[:batch]
        return torch.randn(batch, 4, net.layers, net.embedding), mask
    return (torch.randn(batch, net.in_channels, *net.image_size),)


def step(net, given, labels, optimizer):
    """Train once on the logits' cross-entropy, or on margins and the reconstruction; return the loss.

    Each class by itself: softmax would not see a bias that all classes share, whose gradient were rounding alone.
    """
    optimizer.zero_grad()
    if getattr(net, "decoder", None) is None:
        logits = net(*given).float()
        loss = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, logits.shape[1]).float())
    else:
        lengths, drawn = net(*given, reconstruct=labels)
        loss = losses.margin_loss(lengths.float(), labels)
        loss = loss + losses.reconstruction_loss(drawn.float(), given[0].sigmoid())
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", HAND)
def test_parameters_by_hand_and_as_published(name):
    exact, by_hand, published = HAND[name]
    with torch.device("meta"):
        net = models.create(name)
        assert weights(net) == exact == by_hand
        if published is not None:
            assert round(exact / 1e6, 2) == published
        if name.startswith("tsai-iar"):  # as the authors' code has it: the table's figure either way
            without = models.create(name, primary_bias=False)
            assert exact - weights(without) == without.primary.conv.out_channels
            assert round(weights(without) / 1e6, 2) == published


def test_counts_that_are_rounded_otherwise():
    with torch.device("meta"):
        assert weights(models.create("sabour-mnist").decoder) == decoder(784) == 1_411_344
        norb = models.create("heinsen-norb")
        statistics = sum(b.numel() for n, b in norb.named_buffers() if n.endswith(("running_mean", "running_var")))
        assert weights(norb) + statistics == 272_592
        assert weights(models.create("tsai-dr-resnet-c10").backbone) == 4_521_024
        text = models.create("li-capnet-dynamic", parents=2048)
        assert text.routing.layers[0].weight.numel() == 8_388_608  # section 2.2
        assert weights(text) == capnet(0, 2048)


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
    net = models.create(name).eval()
    logits, trace = net(*inputs(net, 1), return_trace=True)
    assert [tuple(poses.shape[1:]) for poses in trace.poses] == shapes
    assert logits.shape == (1, shapes[-1][0])


def test_maps_of_the_networks_without_capsules():
    def sizes(name):
        net, found = models.create(name), []
        for module in net:
            module.register_forward_hook(lambda module, given, made: found.append(tuple(made.shape[1:])))
        net.eval()(*inputs(net, 1))
        return list(dict.fromkeys(found))

    wide = [(1024, size, size) for size in (16, 8, 4, 2, 1)]
    assert sizes("tsai-cnn-c10") == [*wide, (1024,), (10,)]
    dmm = [(1024, 18, 18), (1024, 8, 8), (1024, 6, 6)]
    assert sizes("tsai-dmm-cnn") == [*dmm, (640, 6, 6), (640, 1, 1), (640,), (10,)]
    assert sizes("tsai-dmm-cnn-learned") == [*dmm, (36 * 1024,), (640,), (10,)]
    assert sizes("zhao-resnet20-average")[:3] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert sizes("zhao-cnn-max") == [(64, 32, 32), (64, 1, 1), (64,), (10,)]


# every day a few
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_A_KIND)) for name in EVERY]
)
def test_every_network_trains_and_takes_every_batch(name):
    """Images of another size, of two channels and four classes, in one network."""
    size = (33, 36) if name.startswith(("tsai-em", "hinton")) else (50, 41)  # where EM's activations are not all 0
    other = {} if "sst" in name else {"image_size": size, "in_channels": 2, "classes": 4}
    net = models.create(name, **other)
    given, classes = inputs(net), other.get("classes", models.config(name).classes)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for _ in range(3 if name.startswith("heinsen") else 1):  # whose benefits and costs are zero at the start
        assert step(net, given, torch.arange(2), optimizer) > 0
    for path, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        rounding = name.startswith("tsai-em-simple") and path == "backbone.0.bias"  # in front of a BatchNorm
        assert rounding or parameter.grad.any(), path
    net.eval()
    for batch in (0, 1):
        assert net(*(tensor[:batch] for tensor in given)).shape == (batch, classes)


def test_other_texts():
    net = models.create("heinsen-sst5", layers=3, embedding=20, classes=7, parts=6, dim=8).eval()
    with torch.no_grad():
        net.depth.fill_(torch.nan)  # as after a build without memory
    net.apply(lambda module: getattr(module, "reset_parameters", int)())
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
