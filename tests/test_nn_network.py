"""Primary capsules, class head, and the container around a whole network."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nn_layers import draw
from torch import Tensor, nn
from torch.nn.utils import prune

from fastcaps import ClassHead, PrimaryCapsules, RoutingPool2d
from fastcaps.nn import CapsNet, CapsuleSpec, DynamicRouting, EMRouting, HeinsenRouting, InvertedAttentionRouting
from fastcaps.nn.capsnet import feature_shape
from fastcaps.nn.layer import RoutingLayer
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


def test_primary_capsules_of_every_kind() -> None:
    primary = PrimaryCapsules(5, 3, 4, kernel_size=2, dilation=2, normalize="squash", eps=1e-3, activations=True)
    features = torch.randn(2, 5, 6, 7)
    poses, activations = primary(features)
    assert poses.shape == (2, 3, 4, 5, 4) and primary.output_size((6, 7)) == activations.shape[2:] == (4, 5)
    torch.testing.assert_close(poses, squash(split(primary.conv(features), 4), eps=1e-3))
    torch.testing.assert_close(activations, primary.activation_conv(features).sigmoid())
    before = {name: p.clone() for name, p in primary.named_parameters()}
    primary.reset_parameters()
    assert not any(torch.equal(p, before[name]) for name, p in primary.named_parameters())
    assert repr(primary).startswith("PrimaryCapsules(\n  5, 3, 4, normalize='squash', activations=True, eps=0.001\n")

    features = torch.randn(5, 12, 3, 5)
    channels = PrimaryCapsules(12, 3, 3, kernel_size=None, activations=True)  # which are capsules already
    poses, active = channels(features)
    torch.testing.assert_close(poses, F.layer_norm(split(features[:, :9], 3), (3,)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(active, features[:, 9:].sigmoid())
    assert channels.output_size((3, 5)) == (3, 5) and not hasattr(channels, "kernel_size")  # torchinfo reads no None

    scored = PrimaryCapsules(12, 3, 4, activations=True, scores=True, batch_norm=True, normalize=None)
    poses, scores = scored(3 * features + 1)
    normal = F.batch_norm(3 * features + 1, None, None, training=True)
    torch.testing.assert_close(poses, split(scored.conv(normal), 4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores, scored.activation_conv(normal), rtol=1e-4, atol=1e-5)
    assert scored.batch_norm is not scored.activation_batch_norm


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


def test_measuring_the_backbone_touches_nothing() -> None:
    module = backbone()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert feature_shape(module, 1, (12, 15)) == (6, 6, 8)
    assert torch.equal(state, torch.get_rng_state())
    assert module.training and all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    with pytest.raises(ValueError, match="backbone must return a feature map"):
        feature_shape(nn.Flatten(), 1, (3, 3))
    with pytest.raises(ValueError, match="backbone must have no lazy parameters"):
        feature_shape(nn.LazyConv2d(4, 3), 1, (3, 3))
    hooked = nn.Conv2d(1, 4, 3)
    hooked.register_forward_hook(lambda module, given, result: nn.functional.pad(result, (0, 0, 1, -1)))
    pruned = prune.l1_unstructured(nn.Conv2d(1, 4, 3), "weight", 0.5)
    holding = nn.utils.weight_norm(nn.Conv2d(1, 4, 3))
    holding.scale = torch.tensor(2.0)
    for module in (hooked, pruned, holding, torch.jit.script(nn.Conv2d(1, 4, 3))):
        assert feature_shape(module, 1, (5, 6)) == (4, 3, 4)
    hooked.register_forward_hook(lambda module, given, result: result[:, :2, 1:])
    assert feature_shape(hooked, 1, (5, 6)) == (2, 2, 4)


def test_network_is_its_parts() -> None:
    net, images = make().eval(), torch.randn(3, 1, 12, 14)
    children = net.primary(net.backbone(images))
    want = net.head(net.routing(children))
    torch.testing.assert_close(net(images), want)
    logits, trace = net(images, return_trace=True)
    torch.testing.assert_close((logits, trace.poses[0]), (want, children))
    assert trace.coefficients[-1].shape == (3, net.routing.layers[-1].in_capsules, 5)
    torch.testing.assert_close(net(images, iterations=4), net.head(net.routing(children, iterations=4)))


NETWORKS: dict[str, dict[str, Any]] = {
    "heinsen-linear": {"layer": HeinsenRouting, "bias": True},
    "class-layer": {"classes": CapsuleSpec(5, kernel_size="all", share=True, layer=EMRouting), "head": "activations"},
    "active": {"activations": True},
    "sequential": {"routing": "sequential", "layer_norm": False},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_all_of_a_network_takes_part(name: str) -> None:
    """As it does where all layers are of one class: test_models trains those."""
    options = {"dtype": torch.float64, "device": "cpu", "primary": {"dilation": 2, "kernel_size": 2}}
    net = make(size=12, hidden=[CapsuleSpec(4, kernel_size=3)], **options, **NETWORKS[name])
    layer = net.routing.layers[0]
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert net.primary.scores == (layer.activity_name == "scores")
    images, labels = draw(6, 1, 12, 12), torch.arange(6) % 5
    assert net(images, return_trace=True)[1].poses[-1].shape == (6, 5, 4)
    F.cross_entropy(net(images), labels).backward()
    for path, parameter in net.named_parameters():
        # The head's bias moves all logits alike, which cross-entropy does not see: the one gradient that is 0.
        assert path == "head.linear.bias" or parameter.grad.any(), path


def test_vmap_and_the_meta_device() -> None:
    for each, some in (
        (make(size=12).eval(), torch.randn(2, 3, 1, 12, 12)),
        (RoutingPool2d(4), torch.randn(2, 3, 8, 6, 5)),
    ):
        torch.testing.assert_close(torch.vmap(each)(some), torch.stack([each(x) for x in some]))
    meta = make(size=np.int64(12), activations=True, device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in [*meta.parameters(), *meta.buffers()]} == {"meta"}
    assert {p.dtype for p in meta.parameters()} == {torch.bfloat16}


def test_wrong_arguments_are_named() -> None:
    primary, head, net = PrimaryCapsules(5, 3, 4, kernel_size=3), ClassHead(4), make()
    settings = {"kernel_size": None}
    for error, message, call in [
        (ValueError, r"features must be \[B, 5, H, W\], got \[2, 4, 6, 7\]", lambda: primary(torch.randn(2, 4, 6, 7))),
        (ValueError, "smaller than the window", lambda: primary(torch.randn(2, 5, 2, 7))),
        (ValueError, "in_channels must be 9 with kernel_size=None", lambda: PrimaryCapsules(12, 3, 3, **settings)),
        (ValueError, "need a kernel_size", lambda: PrimaryCapsules(12, 3, 3, padding=1, **settings)),
        (
            ValueError,
            "activations must be True with scores",
            lambda: PrimaryCapsules(12, 3, 3, scores=True, **settings),
        ),
        (ValueError, r"poses must be \[B, M, 4\], got \[2, 3, 5\]", lambda: head(torch.randn(2, 3, 5))),
        (ValueError, r"activations must be \[2, 3\]", lambda: head(torch.randn(2, 3, 4), torch.rand(2, 4))),
        (ValueError, r"images must be \[B, 1, H, W\], got \[2, 3, 12, 14\]", lambda: net(torch.randn(2, 3, 12, 14))),
        (ValueError, "must hold the 18 children.*built for.*image size", lambda: net(torch.randn(2, 1, 24, 14))),
        (ValueError, "layer 0 .*larger than its grid of 2 x 7", lambda: make(size=(4, 14))),
        (ValueError, "image_size .* needs features of 3 x 3", lambda: make(size=4, primary={"kernel_size": 3})),
        (ValueError, r"backbone must take images \[B, 3, 12, 14\]", lambda: make(in_channels=3)),
        (TypeError, r"hidden must be a list .*got \[16\]", lambda: make(hidden=[16])),
        (TypeError, "layer must be .*got RoutingPool2d", lambda: make(layer=RoutingPool2d)),
        (TypeError, "features must be torch.float32.*got torch.float64", lambda: primary(draw(2, 5, 6, 7))),
        (TypeError, "floating-point numbers .*uint8", lambda: net(torch.zeros(2, 1, 12, 14, dtype=torch.uint8))),
    ]:
        with pytest.raises(error, match=message):
            call()


class Weighed(RoutingLayer):
    """Multiplies each vote by its child's activation, which the network must therefore give, and by ``iterations``."""

    def route(self, votes: Any, activations: Tensor, iterations: int) -> Tensor:
        gate = votes.unfold(activations)[..., None] * iterations / votes.parents
        return votes.sum(gate.expand(*gate.shape[:-1], votes.parents))


class Scaled(RoutingLayer):
    """Has no iterations, and an option, which is not mistaken for activations."""

    def route(self, votes: Any, scale: float = 1.0) -> Tensor:
        return votes.sum(scale / votes.parents)


def test_an_own_layer_needs_no_iterations_and_no_activations() -> None:
    sizes: dict[str, Any] = {"in_channels": 1, "image_size": (6, 5), "capsules": 3, "dim": 4, "classes": 7}
    net, images = CapsNet.build(nn.Conv2d(1, 2, 3), layer=Scaled, iterations=5, **sizes), torch.randn(2, 1, 6, 5)
    assert torch.equal(net(images, iterations=4), net(images)) and not net.primary.activations
    with pytest.raises(TypeError, match=r"layers\[1\]: Scaled.route takes no activations, but EMRouting below"):
        CapsNet.build(nn.Conv2d(1, 2, 3), layer=Scaled, hidden=[CapsuleSpec(3, layer=EMRouting)], **sizes)
    layer, children = net.routing.layers[-1], torch.randn(2, 3 * 4 * 3, 4)
    torch.testing.assert_close(layer(children, scale=2.0), 2 * layer(children))


@pytest.mark.parametrize("layer", [InvertedAttentionRouting, DynamicRouting, EMRouting, Weighed])
def test_a_built_network_runs_the_iterations_that_it_is_given(layer: type[RoutingLayer[Any, Any]]) -> None:
    """By its layers or its stack; a layer's option wins."""
    sizes: dict[str, Any] = {"in_channels": 1, "image_size": (6, 5), "capsules": 3, "dim": 4, "classes": 7}
    images = torch.randn(2, 1, 6, 5)
    nets = [CapsNet.build(nn.Conv2d(1, 2, 3), layer=layer, iterations=count, **sizes) for count in (1, 5)]
    nets[1].load_state_dict(nets[0].state_dict())
    one, five = (net(images) for net in nets)
    assert not torch.allclose(one, five)
    torch.testing.assert_close(nets[0](images, iterations=5), five)
    if layer is not InvertedAttentionRouting:
        last = CapsuleSpec(7, options={"iterations": 4})
        made = CapsNet.build(nn.Conv2d(1, 2, 3), layer=layer, iterations=5, **{**sizes, "classes": last})
        assert made.routing.layers[0].iterations == 4


def test_all_of_a_built_network_has_its_dtype_and_device() -> None:
    """Also a backbone that is not float32, and what a layer adds itself."""

    class Scaled(DynamicRouting):
        def __init__(self, *sizes: int | None, **options: Any) -> None:
            super().__init__(*sizes, **options)
            self.scale = nn.LayerNorm(self.out_dim)

    sizes: dict[str, Any] = {"in_channels": 1, "image_size": (6, 5), "capsules": 3, "dim": 4, "classes": 7}
    for place in ({"dtype": torch.float64}, {"device": "meta"}):
        net = CapsNet.build(nn.Conv2d(1, 2, 3, **place), layer=Scaled, **sizes, **place)
        wanted = torch.empty(0, **place)
        assert all((each.dtype, each.device) == (wanted.dtype, wanted.device) for each in net.parameters())
        assert net(torch.randn(2, 1, 6, 5, **place)).shape == (2, 7)
