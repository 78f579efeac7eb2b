"""Primary capsules, class head, and the container around a whole network."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functional_cases import draw
from nn_layers import LAYERS, Row
from torch import Tensor, nn

from fastcaps import ClassHead, PrimaryCapsules, RoutingPool2d, losses, models
from fastcaps.nn import CapsNet, CapsuleSpec, EMRouting, HeinsenRouting
from fastcaps.nn.capsnet import feature_shape
from fastcaps.vectors import squash


def split(features: Tensor, dim: int) -> Tensor:
    """Channels as poses: ``[B, N * dim, H, W]`` to ``[B, N, H, W, dim]``."""
    return features.unflatten(1, (-1, dim)).movedim(2, -1)


# ---- primary capsules ------------------------------------------------------------------------------------------------


def test_primary_is_a_convolution_and_a_layer_norm_over_each_pose() -> None:
    primary = PrimaryCapsules(5, 3, 4, kernel_size=3, stride=2, padding=1)
    nn.init.normal_(primary.norm.weight)
    nn.init.normal_(primary.norm.bias)
    features = torch.randn(2, 5, 9, 8)
    maps = F.conv2d(features, primary.conv.weight, primary.conv.bias, stride=2, padding=1)
    poses = primary(features)
    assert poses.shape == (2, 3, 5, 4, 4) and primary.output_size((9, 8)) == (5, 4)
    torch.testing.assert_close(poses, F.layer_norm(split(maps, 4), (4,), primary.norm.weight, primary.norm.bias))
    assert PrimaryCapsules(5, 3, 1).norm is None and not PrimaryCapsules(5, 3, 4).activations


@pytest.mark.parametrize("normalize", ["layer_norm", "squash", None])
@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_primary_leaves_a_positions_capsules_together(normalize: Any, kernel_size: int, form: Any) -> None:
    primary = PrimaryCapsules(6, 3, 4, kernel_size=kernel_size, normalize=normalize)
    features, made = torch.randn(2, 6, 5, 7).contiguous(memory_format=form), []
    primary.conv.register_forward_hook(lambda module, inputs, output: made.append((inputs[0], output)))
    poses = primary(features)
    assert poses.permute(0, 2, 3, 1, 4).is_contiguous()
    if form is torch.channels_last and normalize is None:  # then nothing is copied
        assert made[0][0].data_ptr() == features.data_ptr() and made[0][1].data_ptr() == poses.data_ptr()
    assert primary(features[:0]).shape == (0, *poses.shape[1:])


def test_primary_capsules_are_squashed_and_reset() -> None:
    primary = PrimaryCapsules(5, 3, 4, kernel_size=2, dilation=2, normalize="squash", eps=1e-3, activations=True)
    twin, features = copy.deepcopy(primary), torch.randn(2, 5, 6, 7)
    poses, activations = primary(features)
    assert poses.shape == (2, 3, 4, 5, 4) and primary.output_size((6, 7)) == activations.shape[2:] == (4, 5)
    torch.testing.assert_close(poses, squash(split(primary.conv(features), 4), eps=1e-3))
    torch.testing.assert_close(activations, primary.activation_conv(features).sigmoid())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(7.0)
    twin.reset_parameters()
    assert all((parameter != 7.0).any() for parameter in twin.parameters())
    assert repr(primary).startswith("PrimaryCapsules(\n  5, 3, 4, normalize='squash', activations=True, eps=0.001\n")
    plain = PrimaryCapsules(5, 3, 4, activations=True, bias=False)
    assert plain.conv.bias is None and plain.activation_conv.bias is not None


def test_channels_are_capsules_already() -> None:
    features = torch.randn(2, 12, 3, 5)
    primary = PrimaryCapsules(12, 3, 4, kernel_size=None, normalize=None)
    assert not list(primary.parameters()) and primary.output_size((3, 5)) == (3, 5)
    torch.testing.assert_close(primary(features), split(features, 4))
    primary = PrimaryCapsules(12, 3, 3, kernel_size=None, activations=True)
    poses, active = primary(features)
    torch.testing.assert_close(poses, F.layer_norm(split(features[:, :9], 3), (3,)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(active, features[:, 9:].sigmoid())
    assert repr(primary).startswith("PrimaryCapsules(\n  12, 3, 3, kernel_size=None, activations=True\n")
    assert not hasattr(primary, "kernel_size")  # torchinfo cannot read None


def test_primary_capsules_after_batch_norm_with_scores() -> None:
    primary = PrimaryCapsules(6, 3, 4, activations=True, scores=True, batch_norm=True, normalize=None)
    features = torch.randn(5, 6, 3, 2) * 3 + 1
    poses, scores = primary(features)
    normal = F.batch_norm(features, None, None, training=True)
    torch.testing.assert_close(poses, split(primary.conv(normal), 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores, primary.activation_conv(normal), rtol=1e-4, atol=1e-5)
    assert primary.batch_norm is not primary.activation_batch_norm


# ---- head and network ------------------------------------------------------------------------------------------------


def test_head_is_one_linear_shared_by_all_classes() -> None:
    head, poses = ClassHead(4), torch.randn(3, 7, 4)
    torch.testing.assert_close(head(poses), poses @ head.linear.weight[0] + head.linear.bias)
    assert sum(p.numel() for p in head.parameters()) == 5 and head(poses[:0]).shape == (0, 7)
    torch.testing.assert_close(head(poses, torch.zeros(3, 7)), head.linear.bias.expand(3, 7))
    torch.testing.assert_close(head(poses, torch.ones(3, 7)), head(poses))


def backbone(channels: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(max(1, channels), 6, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU())


def make(channels: int = 1, size: Any = (12, 14), **options: Any) -> CapsNet:
    sizes = {"in_channels": channels, "image_size": size, "capsules": 4, "dim": 4, "classes": 5}
    hidden = [CapsuleSpec(3, kernel_size=3, stride=2)]
    return CapsNet.build(backbone(channels), **{"hidden": hidden, **sizes, **options})


@pytest.mark.parametrize(("size", "channels"), [(12, 1), ((12, 14), 5), ((7, 31), 1), ((50, 9), 2)])
def test_any_image_size_channels_and_batch(size: Any, channels: int) -> None:
    net = make(channels, size).eval()
    height, width = net.image_size
    images = torch.randn(3, channels, height, width)
    logits = net(images)
    assert logits.shape == (3, 5) and net(images[:0]).shape == (0, 5)
    torch.testing.assert_close(net(images[2:3]), logits[2:3])
    grid = [((n + 1) // 2 - 3) // 2 + 1 for n in (height, width)]
    assert net.routing.layers[-1].in_capsules == 3 * grid[0] * grid[1]


def test_measuring_the_backbone_touches_nothing() -> None:
    module = backbone()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert feature_shape(module, 1, (12, 15)) == (6, 6, 8)
    assert torch.equal(state, torch.get_rng_state())
    assert module.training and all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    with pytest.raises(ValueError, match="backbone must return a feature map"):
        feature_shape(nn.Flatten(), 1, (3, 3))


def test_network_is_its_parts() -> None:
    net, images = make().eval(), torch.randn(3, 1, 12, 14)
    children = net.primary(net.backbone(images))
    want = net.head(net.routing(children))
    torch.testing.assert_close(net(images), want)
    logits, trace = net(images, return_trace=True)
    torch.testing.assert_close((logits, trace.poses[0]), (want, children))
    assert trace.coefficients[-1].shape == (3, net.routing.layers[-1].in_capsules, 5)
    torch.testing.assert_close(net(images, iterations=4), net.head(net.routing(children, iterations=4)))


@pytest.mark.parametrize("options", [{}, {"activations": True}, {"layer_norm": False}, {"routing": "sequential"}])
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    net = make(iterations=3, **options)
    F.cross_entropy(net(torch.randn(4, 1, 12, 14)), torch.arange(4)).backward()
    for name, parameter in net.named_parameters():
        # The head's bias moves all logits alike, which cross-entropy does not see: the one gradient that is 0.
        assert parameter.grad is not None and (name == "head.linear.bias" or parameter.grad.any()), name


NETWORKS: dict[str, dict[str, Any]] = {
    **{row.name: {"layer": row.kind, "head": row.kind.head} for row in LAYERS},
    "heinsen-linear": {"layer": HeinsenRouting, "bias": True},
    "class-layer": {"classes": CapsuleSpec(5, kernel_size="all", share=True, layer=EMRouting), "head": "activations"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_any_layers_learns(name: str, one_thread: None) -> None:
    options = {"dtype": torch.float64, "device": "cpu", "primary": {"dilation": 2, "kernel_size": 2}}
    net = make(size=12, hidden=[CapsuleSpec(4, kernel_size=3)], **options, **NETWORKS[name])
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    images, labels = draw(6, 1, 12, 12), torch.arange(6) % 5
    assert net(images, return_trace=True)[1].poses[-1].shape == (6, 5, 4)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    history = []
    for _ in range(8):
        optimizer.zero_grad()
        torch.manual_seed(1)  # the same dropout
        loss = (losses.margin_loss if name == "dynamic" else F.cross_entropy)(net(images), labels)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0]


def test_compilers_copies_autocast_vmap_and_the_meta_device() -> None:
    torch._dynamo.reset()
    net, images = make().eval(), torch.randn(2, 1, 12, 14)
    want = net(images)
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(images), want)
    other = make().eval()
    other.load_state_dict(net.state_dict())
    for copied in (other, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(copied(images), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert (net(images) - want).abs().max() < 0.1 * want.abs().max()
    for each, some in (
        (models.create("digits").eval(), torch.randn(2, 3, 1, 8, 8)),
        (RoutingPool2d(4), torch.randn(2, 3, 8, 6, 5)),
    ):
        torch.testing.assert_close(torch.vmap(each)(some), torch.stack([each(x) for x in some]))
    meta = make(size=np.int64(12), activations=True, device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in [*meta.parameters(), *meta.buffers()]} == {"meta"}
    assert {p.dtype for p in meta.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("row", LAYERS, ids=str)
def test_primary_capsules_have_what_the_first_layer_lives_on(row: Row) -> None:
    primary = make(layer=row.kind, head="linear").primary
    assert primary.activations == (row.kind.head == "activations")
    assert primary.scores == (row.kind.activity_name == "scores")


def test_wrong_arguments_are_named() -> None:
    primary, head, net = PrimaryCapsules(5, 3, 4, kernel_size=3), ClassHead(4), make()
    own = {"kernel_size": None}
    for error, message, call in [
        (ValueError, r"features must be \[B, 5, H, W\], got \[2, 4, 6, 7\]", lambda: primary(torch.randn(2, 4, 6, 7))),
        (ValueError, r"features must be \[B, 5, H, W\]", lambda: primary(torch.randn(5, 6, 7))),
        (ValueError, "smaller than the window", lambda: primary(torch.randn(2, 5, 2, 7))),
        (TypeError, "features must be a tensor", lambda: primary(None)),
        (ValueError, "capsules must be an int >= 1", lambda: PrimaryCapsules(5, 0, 4)),
        (ValueError, "eps must be a finite number >= 0", lambda: PrimaryCapsules(5, 3, 4, eps=torch.inf)),
        (ValueError, "normalize must be one of 'layer_norm', 'sq", lambda: PrimaryCapsules(5, 3, 4, normalize="batch")),
        (ValueError, "in_channels must be 9 with kernel_size=None", lambda: PrimaryCapsules(12, 3, 3, **own)),
        (
            ValueError,
            "in_channels must be 12 .* and their activations; got 13",
            lambda: PrimaryCapsules(13, 3, 3, activations=True, **own),
        ),
        (ValueError, "need a kernel_size", lambda: PrimaryCapsules(12, 3, 3, bias=False, **own)),
        (ValueError, "need a kernel_size", lambda: PrimaryCapsules(12, 3, 3, padding=1, **own)),
        (ValueError, "scores must be False", lambda: PrimaryCapsules(12, 3, 3, scores=True, **own)),
        (ValueError, r"poses must be \[B, M, 4\], got \[2, 3, 5\]", lambda: head(torch.randn(2, 3, 5))),
        (ValueError, r"activations must be \[2, 3\]", lambda: head(torch.randn(2, 3, 4), torch.rand(2, 4))),
        (ValueError, "dim must be an int >= 1", lambda: ClassHead(0)),
        (ValueError, r"images must be \[B, 1, H, W\], got \[2, 3, 12, 14\]", lambda: net(torch.randn(2, 3, 12, 14))),
        (ValueError, "images must be", lambda: net(torch.randn(1, 12, 14))),
        (ValueError, "must hold the 18 children.*built for.*image_size", lambda: net(torch.randn(2, 1, 24, 14))),
        (ValueError, "layer 0 .*larger than its grid of 2 x 7", lambda: make(size=(4, 14))),
        (ValueError, "image_size must be an int >= 1", lambda: make(size=(0, 14))),
        (ValueError, "image_size .* is too small", lambda: make(size=4, primary={"kernel_size": 3})),
        (ValueError, "in_channels must be an int >= 1", lambda: make(channels=0)),
        (ValueError, "routing must be one of", lambda: make(routing="both")),
        (TypeError, "images must be a tensor", lambda: net("image")),
        (TypeError, "floating-point numbers .*uint8", lambda: net(torch.zeros(2, 1, 12, 14, dtype=torch.uint8))),
    ]:
        with pytest.raises(error, match=message):
            call()
