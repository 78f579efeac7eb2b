"""Primary capsules, class head, and the container around a whole network."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastcaps import ClassHead, PrimaryCapsules, RoutingPool2d, models
from fastcaps.nn import CapsNet, CapsuleSpec
from fastcaps.nn.capsnet import feature_shape


def test_primary_is_a_convolution_and_a_layer_norm_over_each_pose():
    torch.manual_seed(0)
    primary = PrimaryCapsules(5, 3, 4, kernel_size=3, stride=2, padding=1)
    nn.init.normal_(primary.norm.weight)
    nn.init.normal_(primary.norm.bias)
    features = torch.randn(2, 5, 9, 8)
    maps = F.conv2d(features, primary.conv.weight, primary.conv.bias, stride=2, padding=1)
    poses = primary(features)
    assert poses.shape == (2, 3, 5, 4, 4)
    assert primary.output_size((9, 8)) == (5, 4)
    for capsule in range(3):
        pose = maps[:, 4 * capsule : 4 * capsule + 4].movedim(1, -1)
        torch.testing.assert_close(poses[:, capsule], F.layer_norm(pose, (4,), primary.norm.weight, primary.norm.bias))


@pytest.mark.parametrize("normalize", ["layer_norm", "squash", None])
@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_primary_leaves_a_positions_capsules_together(normalize, kernel_size, form):
    primary = PrimaryCapsules(6, 3, 4, kernel_size=kernel_size, normalize=normalize)
    poses = primary(torch.randn(2, 6, 5, 7).contiguous(memory_format=form))
    assert poses.permute(0, 2, 3, 1, 4).is_contiguous()


def test_primary_copies_nothing_that_is_channels_last():
    primary = PrimaryCapsules(6, 3, 4, normalize=None)
    made = []
    primary.conv.register_forward_hook(lambda module, inputs, output: made.append((inputs[0], output)))
    features = torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last)
    poses = primary(features)
    assert made[0][0].data_ptr() == features.data_ptr()
    assert made[0][1].data_ptr() == poses.data_ptr()


def test_primary_activations_and_options():
    primary = PrimaryCapsules(5, 3, 4, kernel_size=3, activations=True, bias=False)
    poses, activations = primary(torch.randn(2, 5, 6, 7))
    assert poses.shape == (2, 3, 4, 5, 4) and activations.shape == (2, 3, 4, 5)
    assert ((activations > 0) & (activations < 1)).all()
    assert primary.conv.bias is None and primary.activation_conv.bias is not None
    assert PrimaryCapsules(5, 3, 1).norm is None
    assert not PrimaryCapsules(5, 3, 4).activations


@pytest.mark.parametrize("batch", [0, 1])
def test_primary_and_head_take_any_batch(batch):
    poses = PrimaryCapsules(5, 3, 4)(torch.randn(batch, 5, 6, 7))
    assert poses.shape == (batch, 3, 6, 7, 4)
    assert ClassHead(4)(poses.flatten(1, 3)).shape == (batch, 126)


def test_head_is_one_linear_shared_by_all_classes():
    head = ClassHead(4)
    poses = torch.randn(3, 7, 4)
    torch.testing.assert_close(head(poses), poses @ head.linear.weight[0] + head.linear.bias)
    assert sum(p.numel() for p in head.parameters()) == 5
    torch.testing.assert_close(head(poses, torch.zeros(3, 7)), head.linear.bias.expand(3, 7))
    torch.testing.assert_close(head(poses, torch.ones(3, 7)), head(poses))


def test_wrong_arguments_are_named():
    primary, head = PrimaryCapsules(5, 3, 4, kernel_size=3), ClassHead(4)
    for error, message, call in [
        (ValueError, r"features must be \[B, 5, H, W\], got \[2, 4, 6, 7\]", lambda: primary(torch.randn(2, 4, 6, 7))),
        (ValueError, r"features must be \[B, 5, H, W\]", lambda: primary(torch.randn(5, 6, 7))),
        (ValueError, "smaller than the window", lambda: primary(torch.randn(2, 5, 2, 7))),
        (TypeError, "features must be a tensor", lambda: primary(None)),
        (ValueError, r"poses must be \[B, M, 4\], got \[2, 3, 5\]", lambda: head(torch.randn(2, 3, 5))),
        (ValueError, r"activations must be \[2, 3\]", lambda: head(torch.randn(2, 3, 4), torch.rand(2, 4))),
        (ValueError, "capsules must be an int >= 1", lambda: PrimaryCapsules(5, 0, 4)),
        (ValueError, "dim must be an int >= 1", lambda: ClassHead(0)),
    ]:
        with pytest.raises(error, match=message):
            call()


def backbone(channels=1):
    return nn.Sequential(
        nn.Conv2d(max(1, channels), 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.ReLU()
    )


def make(channels=1, size=(12, 14), **options):
    hidden = [CapsuleSpec(3, kernel_size=3, stride=2)]
    return CapsNet.build(
        backbone(channels),
        in_channels=channels,
        image_size=size,
        capsules=4,
        dim=4,
        hidden=hidden,
        classes=5,
        **options,
    )


@pytest.mark.parametrize("size", [12, (12, 14), (7, 31), (50, 9)])
@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_any_image_size_channels_and_batch(size, channels, batch):
    net = make(channels, size).eval()
    height, width = net.image_size
    logits = net(torch.randn(batch, channels, height, width))
    assert logits.shape == (batch, 5)
    grid = [((n + 1) // 2 - 3) // 2 + 1 for n in (height, width)]
    assert net.routing.layers[-1].in_capsules == 3 * grid[0] * grid[1]


def test_measuring_the_backbone_touches_nothing():
    module = backbone()
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    assert feature_shape(module, 1, (12, 15)) == (6, 6, 8)
    assert torch.equal(state, torch.get_rng_state())
    assert module.training and all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    with pytest.raises(ValueError, match="backbone must return a feature map"):
        feature_shape(nn.Flatten(), 1, (3, 3))


def test_network_is_its_parts():
    net = make().eval()
    images = torch.randn(3, 1, 12, 14)
    children = net.primary(net.backbone(images))
    want = net.head(net.routing(children))
    torch.testing.assert_close(net(images), want)
    logits, trace = net(images, return_trace=True)
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(trace.poses[0], children)
    assert trace.coefficients[-1].shape == (3, net.routing.layers[-1].in_capsules, 5)
    torch.testing.assert_close(net(images, iterations=4), net.head(net.routing(children, iterations=4)))


def test_batch_does_not_change_a_sample():
    net = make().eval()
    images = torch.randn(4, 1, 12, 14)
    torch.testing.assert_close(net(images)[2:3], net(images[2:3]))


@pytest.mark.parametrize("options", [{}, {"activations": True}, {"layer_norm": False}, {"routing": "sequential"}])
def test_every_parameter_learns(options):
    torch.manual_seed(0)
    net = make(iterations=3, **options)
    F.cross_entropy(net(torch.randn(4, 1, 12, 14)), torch.arange(4)).backward()
    for name, parameter in net.named_parameters():
        # The head's bias moves all logits alike, which cross-entropy does not see: the one gradient that is 0.
        assert parameter.grad is not None, name
        if name != "head.linear.bias":
            assert parameter.grad.abs().max() > 0, name


def test_compile_deepcopy_pickle_and_autocast():
    torch._dynamo.reset()
    net = make().eval()
    images = torch.randn(2, 1, 12, 14)
    want = net(images)
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(images), want)
    torch.testing.assert_close(copy.deepcopy(net)(images), want)
    torch.testing.assert_close(pickle.loads(pickle.dumps(net))(images), want)
    other = make().eval()
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(images), want)
    with torch.autocast("cpu", torch.bfloat16):
        got = net(images)
    assert (got.float() - want).abs().max() < 0.1 * want.abs().max()


def test_network_errors_are_named():
    net = make()
    for error, message, call in [
        (ValueError, r"images must be \[B, 1, H, W\], got \[2, 3, 12, 14\]", lambda: net(torch.randn(2, 3, 12, 14))),
        (ValueError, "images must be", lambda: net(torch.randn(1, 12, 14))),
        (
            ValueError,
            "children must hold the 18 children.*built for.*image_size",
            lambda: net(torch.randn(2, 1, 24, 14)),
        ),
        (ValueError, "layer 0 .*larger than its grid of 2 x 7", lambda: make(size=(4, 14))),
        (ValueError, "image_size must be an int >= 1", lambda: make(size=(0, 14))),
        (ValueError, "in_channels must be an int >= 1", lambda: make(channels=0)),
        (ValueError, "routing must be one of", lambda: make(routing="both")),
        (TypeError, "images must be a tensor", lambda: net("image")),
        (TypeError, "floating-point numbers .*uint8", lambda: net(torch.zeros(2, 1, 12, 14, dtype=torch.uint8))),
    ]:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(ValueError, match=r"image_size .* is too small"):
        CapsNet.build(
            nn.Identity(), in_channels=1, image_size=2, capsules=4, dim=4, classes=5, primary={"kernel_size": 3}
        )


def test_vmap_over_a_network_and_a_pooling_layer():
    for net, images in ((models.create("digits").eval(), torch.randn(2, 3, 1, 8, 8)),
                        (RoutingPool2d(4), torch.randn(2, 3, 8, 6, 5))):  # fmt: skip
        torch.testing.assert_close(torch.vmap(net)(images), torch.stack([net(x) for x in images]))
