"""Squashing and unit vectors of any length, in every dtype."""

from __future__ import annotations

import pytest
import torch

from fastcaps.vectors import squash, unit

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
