"""Losses by values worked out by hand, and their error messages; squash and unit vectors of any length and dtype."""

from __future__ import annotations

import pytest
import torch
from suite import refusals

from fastcaps.losses import ReconstructionDecoder, margin_loss, reconstruction_loss, spread_loss
from fastcaps.vectors import length, squash, unit

LENGTHS = torch.tensor([[0.95, 0.4, 0.05], [0.2, 0.5, 0.3]], dtype=torch.float64)
LABELS = torch.tensor([0, 2])


def test_margin_loss_by_hand() -> None:
    assert torch.autograd.gradcheck(lambda x: margin_loss(x, LABELS), LENGTHS.clone().requires_grad_())
    # 0 + 0.5 * 0.3^2 + 0 = 0.045; 0.6^2 + 0.5 * (0.1^2 + 0.4^2) = 0.445
    each = margin_loss(LENGTHS, LABELS, reduction="none")
    torch.testing.assert_close(each, torch.tensor([0.045, 0.445], dtype=torch.float64))
    assert margin_loss(LENGTHS, LABELS).item() == pytest.approx(0.245)
    assert margin_loss(LENGTHS[:, 1:2], LABELS * 0).item() == pytest.approx((0.5**2 + 0.4**2) / 2)  # one class
    assert margin_loss(LENGTHS, LABELS, reduction="sum").item() == pytest.approx(0.49)
    # m+ = 1, m- = 0.2, lambda = 0.25: 0.05^2 + 0.25 * 0.2^2; 0.7^2 + 0.25 * 0.3^2
    other = margin_loss(LENGTHS, LABELS, upper=1.0, lower=0.2, down_weight=0.25, reduction="none")
    torch.testing.assert_close(other, torch.tensor([0.0125, 0.5125], dtype=torch.float64))
    several = torch.tensor([[True, False, True], [False, False, False]])
    # 0 + 0.5 * 0.3^2 + 0.85^2; 0.5 * (0.1^2 + 0.4^2 + 0.2^2)
    expected = torch.tensor([0.7675, 0.105], dtype=torch.float64)
    for target in (several, several.long(), several.double()):
        torch.testing.assert_close(margin_loss(LENGTHS, target, reduction="none"), expected)


def test_gradients_of_each_sample() -> None:
    def loss(lengths: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return margin_loss(lengths[None], label[None])

    found = torch.func.vmap(torch.func.grad(loss))(LENGTHS, LABELS)
    wanted = torch.func.grad(lambda x: margin_loss(x, LABELS, reduction="sum"))(LENGTHS)
    torch.testing.assert_close(found, wanted)


def test_spread_loss_by_hand() -> None:
    assert torch.autograd.gradcheck(lambda x: spread_loss(x, LABELS, 0.55), LENGTHS.clone().requires_grad_())
    # m = 0.6: a_t - a_i = 0.55, 0.9 -> 0.05^2; 0.1, -0.2 -> 0.5^2 + 0.8^2
    each = spread_loss(LENGTHS, LABELS, 0.6, reduction="none")
    torch.testing.assert_close(each, torch.tensor([0.0025, 0.89], dtype=torch.float64))
    assert spread_loss(LENGTHS, LABELS, 0.6).item() == pytest.approx(0.44625)
    assert spread_loss(LENGTHS[:1], LABELS[:1], 0.2).item() == 0.0


def test_reconstruction_loss_by_hand() -> None:
    images = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    drawn = torch.tensor([[[0.0, 4.0]], [[3.0, 0.0]]], requires_grad=True)
    torch.testing.assert_close(reconstruction_loss(drawn, images, reduction="none"), torch.tensor([0.0025, 0.0045]))
    loss = reconstruction_loss(drawn, images, scale=1.0)
    assert loss.item() == 7.0
    loss.backward()
    assert drawn.grad.tolist() == [[[-1.0, 2.0]], [[3.0, 0.0]]]


def test_decoder_sees_one_capsule_alone() -> None:
    decoder = ReconstructionDecoder(3, 4, (2, 5), hidden=(7,), dtype=torch.float64)
    capsules = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    drawn = decoder(capsules, LABELS)
    assert drawn.shape == (2, 2, 5) and ((drawn > 0) & (drawn < 1)).all()
    by_hand = torch.zeros(2, 12, dtype=torch.float64)
    by_hand[0, :4], by_hand[1, 8:] = capsules[0, 0], capsules[1, 2]
    first, _, second, _ = decoder.layers
    torch.testing.assert_close(drawn.flatten(1), second(first(by_hand).relu()).sigmoid())
    gradient = torch.autograd.grad(drawn.sum(), capsules)[0]
    for sample, label in enumerate(LABELS.tolist()):
        others = [k for k in range(3) if k != label]
        assert (gradient[sample, others] == 0).all() and (gradient[sample, label] != 0).any()
    with torch.no_grad():
        capsules[0, 1] = -9  # long, not large
        capsules[1, 2] *= 100
        assert torch.equal(decoder(capsules), decoder(capsules, torch.tensor([1, 2])))
        capsules[0, 0] = torch.nan
        assert decoder(capsules, LABELS.flip(0)).isfinite().all()
    paper = ReconstructionDecoder(10, 16, (1, 28, 28))
    shapes = [tuple(layer.weight.shape) for layer in paper.layers if hasattr(layer, "weight")]
    assert shapes == [(512, 160), (1024, 512), (784, 1024)]


def test_lengths_of_any_size() -> None:
    for scale in (1.0, 1e-30, 1e30):
        vectors = torch.tensor([[3.0, -4.0], [0.0, 0.0]]) * scale
        torch.testing.assert_close(length(vectors), torch.tensor([5.0, 0.0]) * scale)
        torch.testing.assert_close(unit(vectors), torch.tensor([[0.6, -0.8], [0.0, 0.0]]))
    assert length(vectors, keepdim=True).shape == (2, 1)
    assert length(vectors.view(1, 2, 1, 2), (-2, -1)).shape == (1, 2)
    broken = length(torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0]]))
    assert broken[0] == torch.inf and broken[1].isnan()


@pytest.mark.parametrize("function", [length, unit, squash])
def test_vectors_gradcheck(function: object) -> None:
    vectors = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, vectors)
    assert torch.autograd.gradgradcheck(function, vectors)
    zero = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(function(zero).sum(), zero, create_graph=True)[0]
    assert (first == 0).all()
    if first.requires_grad:
        assert torch.autograd.grad(first.sum(), zero)[0].isfinite().all()


RANGES = {torch.float32: (-30, 30), torch.float16: (-7, 4.816), torch.bfloat16: (-37.9, 38.53)}


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", RANGES)
def test_squash_of_every_length(dtype: torch.dtype, eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rounding, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    for exponent in torch.linspace(*RANGES[dtype], 150, dtype=torch.float64).tolist():
        drawn = torch.randn(8, 16, generator=generator, dtype=torch.float64)
        drawn = drawn / drawn.abs().amax(-1, keepdim=True) * 10**exponent
        vectors = drawn.to(dtype).requires_grad_()
        exact = vectors.detach().double().requires_grad_()
        assert exact.isfinite().all()
        square = exact.square().sum(-1, keepdim=True)
        wanted = square / (1 + square) * exact / (square + eps).sqrt()
        found = squash(vectors, eps=eps)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=4 * rounding, atol=4 * least)
        grad = torch.randn(8, 16, generator=generator, dtype=torch.float64).to(dtype)
        (got,) = torch.autograd.grad(found, vectors, grad)
        (want,) = torch.autograd.grad(wanted, exact, grad.double())
        size = want.abs().amax(-1, keepdim=True)  # gradients below 1e-22 may vanish
        assert ((got.double() - want).abs() <= 16 * rounding * size + max(least, 1e-22)).all(), exponent


@pytest.mark.parametrize("dtype", RANGES)
def test_unit_vectors_of_every_length(dtype: torch.dtype) -> None:
    for exponent in torch.linspace(*RANGES[dtype], 50, dtype=torch.float64).tolist():
        vectors = torch.full((2, 16), 10**exponent, dtype=dtype)
        torch.testing.assert_close(unit(vectors), torch.full((2, 16), 0.25, dtype=dtype))


DECODER = ReconstructionDecoder(3, 4, (5,))
test_errors_name_the_argument = refusals(
    (TypeError, "lengths must be a tensor", lambda: margin_loss([0.5], LABELS)),
    (ValueError, r"lengths must be \[B, M\]", lambda: margin_loss(LENGTHS[0], LABELS)),
    (ValueError, r"target must be \[2\].*\[3\]", lambda: margin_loss(LENGTHS, torch.zeros(3).long())),
    (ValueError, r"target must be \[2\] or \[2, 3\] to fit", lambda: margin_loss(LENGTHS, torch.zeros(2, 4))),
    (TypeError, "target must hold classes as int64", lambda: margin_loss(LENGTHS, LABELS.float())),
    (ValueError, "target must hold classes from 0 to 2, got 3", lambda: margin_loss(LENGTHS, LABELS + 1)),
    (ValueError, "target must hold classes from 0 to 2, got -1", lambda: spread_loss(LENGTHS, LABELS - 1, 0.2)),
    (ValueError, "target must hold classes from 0 to 2, got 3", lambda: DECODER(torch.ones(2, 3, 4), LABELS + 3)),
    (ValueError, "reduction must be one of", lambda: margin_loss(LENGTHS, LABELS, reduction="max")),
    (ValueError, r"target must be \[2\]", lambda: spread_loss(LENGTHS, LABELS[:1], 0.2)),
    (ValueError, r"images must be \[2, 3\]", lambda: reconstruction_loss(LENGTHS, LENGTHS[:1])),
    (ValueError, "image_shape must be an int >= 1", lambda: ReconstructionDecoder(3, 4, (5, 0))),
    (ValueError, r"capsules must be \[B, 3, 4\]", lambda: DECODER(torch.ones(2, 4, 3))),
)
