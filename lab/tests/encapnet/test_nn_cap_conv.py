"""EncapNet's layers against the paper's procedure (Li et al., 2018, section 3.1), and at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastcaps
from fastcaps_lab.encapnet import CapConv2d, CapFC
from fastcaps_lab.encapnet.cap_conv import rectified_squash

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS: dict[str, Any] = {
    "type-I": ((3, 1, 2), {"stride": 2, "skip": True}, (2, 5, 4)),
    "type-I-whole-map": ((2, 2, 3), {"coefficients": "own", "skip": True}, (2, 3, 1)),
    "type-II": ((3, 2, 2), {"kernel_size": 1, "coefficients": "other", "skip": True}, (2, 4, 3)),
    "no-skip": ((2, 3, 3), {"kernel_size": 1}, (2, 2, 5)),
    "master": ((3, 2, 3), {"stride": 2, "coefficients": "none", "skip": True}, (2, 5, 5)),
    "one-type": ((1, 2, 1), {"stride": 3, "skip": True}, (1, 7, 5)),
}


def squash(poses: Tensor, dim: int) -> Tensor:
    square = poses.square().sum(dim, keepdim=True)
    return poses * square.sqrt() / (1 + square)


def cap_conv(layer: CapConv2d, capsules: Tensor, skipped: Tensor | None = None) -> Tensor:
    """The whole layer, step by step; ``skipped`` as the layer takes it."""

    def convolve(conv: nn.Conv2d | None, given: Tensor, groups: int, stride: int = 1) -> Tensor:
        assert conv is not None
        return F.conv2d(given, conv.weight, conv.bias, stride, [n // 2 for n in conv.kernel_size], groups=groups)

    def capsules_of(norm: nn.BatchNorm2d | None, given: Tensor) -> Tensor:
        """BatchNorm, by the batch in training and by what was kept afterwards; ReLU; a squash for each type."""
        assert norm is not None and norm.running_mean is not None and norm.running_var is not None
        mean, variance = norm.running_mean, norm.running_var
        if norm.training:
            mean, variance = given.mean((0, 2, 3)), given.var((0, 2, 3), correction=0)
        scale, shift, mean, variance = (v[:, None, None] for v in (norm.weight, norm.bias, mean, variance))
        normal = (given - mean) / (variance + norm.eps).sqrt() * scale + shift
        return squash(normal.relu().unflatten(1, (layer.types, -1)), 2).flatten(1, 2)

    with torch.no_grad():
        summed = convolve(layer.master, capsules, layer.types, layer.stride)
        if layer.coefficients != "none":
            m = capsules_of(layer.master_norm, summed)
            n = capsules_of(layer.aide_norm, convolve(layer.aide, capsules, 1, layer.stride))
            by_m, by_n = (convolve(conv, x, layer.types) for conv, x in ((layer.of_master, m), (layer.of_aide, n)))
            both = {"own": (by_m, by_n), "other": (by_n, by_m)}.get(layer.coefficients)
            a, b = both or ((by_m + by_n)[:, 0::2], (by_m + by_n)[:, 1::2])
            summed = a.repeat_interleave(layer.out_dim, 1) * m + b.repeat_interleave(layer.out_dim, 1) * n
        if skipped is not None:
            summed = summed + skipped
        elif layer.skip:
            same = layer.in_dim == layer.out_dim and layer.stride == 1
            summed = summed + (capsules if same else convolve(layer.shortcut, capsules, 1, layer.stride))
        return capsules_of(layer.norm, summed)


def make(form: str) -> tuple[CapConv2d, Tensor]:
    """Return a layer whose numbers all differ from their start, and capsules for it."""
    sizes, options, (batch, height, width) = FORMS[form]
    layer = CapConv2d(*sizes, **options).double()
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.dim() == 1 else 0.5 * torch.randn_like(tensor))
    return layer, torch.randn(batch, sizes[0] * sizes[1], height, width, dtype=torch.float64)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_procedure(form: str, training: bool) -> None:
    layer, capsules = make(form)
    found = layer.train(training)(capsules)
    assert (found != 0).float().mean() > 0.2  # ReLU leaves something to compare
    torch.testing.assert_close(found, cap_conv(layer, capsules))
    skipped = torch.randn_like(found)  # from further back
    torch.testing.assert_close(layer(capsules, skipped), cap_conv(layer, capsules, skipped))


def test_the_squash_at_zero_capsules_and_in_every_dtype() -> None:
    maps = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    maps[0, :3] = -maps[0, :3].abs()  # capsules that the ReLU makes zero
    maps.requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):  # no NaN inside either, where the ReLU would hide it
        (gradient,) = torch.autograd.grad(rectified_squash(maps, 2).sum(), maps, create_graph=True)
        torch.autograd.grad(gradient.square().sum(), maps)
    assert (gradient[0, :3] == 0).all()
    assert torch.autograd.gradcheck(lambda x: rectified_squash(x, 2), maps)
    assert torch.autograd.gradgradcheck(lambda x: rectified_squash(x, 2), maps)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        given = maps.detach().to(dtype)
        wanted = fastcaps.functional.squash(given.relu().unflatten(1, (2, 3)), 2)
        torch.testing.assert_close(rectified_squash(given, 2), wanted)


def test_class_capsules_are_the_procedure() -> None:
    layer = CapFC(3 * 2 * 5, 7, 2).double()
    features = torch.randn(3, 6, 2, 5, dtype=torch.float64)
    capsules = torch.stack(
        [features[:, 2 * t : 2 * t + 2, y, x] for t in range(3) for y in range(2) for x in range(5)], 1
    )
    wanted = squash(torch.einsum("bik,kij->bjk", capsules, layer.weight), 2).detach()
    torch.testing.assert_close(layer(features), wanted)
    assert layer(features[:0]).shape == (0, 7, 2)
    with pytest.raises(ValueError, match="kernel_size must be odd, got 4"):
        CapConv2d(1, 1, 1, kernel_size=4)
