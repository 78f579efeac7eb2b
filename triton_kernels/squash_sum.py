"""squash_sum in Triton: ``out = a squash(x) [+ b squash(y)]`` over capsules in channels, and its gradients.

A program has a tile of pixels of one type of one sample: all values of their capsules, ``[D, P]``, so that lengths
stay on chip. It reads and writes each value once. Workspace: none; the same input gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import current, launch, tensor_refusal
from .schedule import power_of_two

LONG = tl.constexpr(1e15)  # as in csrc/algebra/squash_sum.h: a value whose square is far below float32's maximum
_TILE = 2048  # values of a tile: a program keeps as many of each summand


def refusal(
    device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int, has_weight: bool = False
) -> str | None:
    """Return why the kernels cannot take a call, or None if they can."""
    return tensor_refusal(device, dtype)


@triton.jit
def _capsules(start, at, inside, RELU: tl.constexpr):
    """Load a tile of capsules [D, P], after the ReLU; absent values are 0."""
    value = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays
    return value


@triton.jit
def _sizes(x):
    """Shrink the longest capsules [D, P]; return all, by how much, |x| and |x| / (1 + |x|^2), safe from overflow."""
    largest = tl.max(tl.abs(x), 0)
    too_long = (largest > LONG) & (largest < float("inf"))
    shrink = tl.where(too_long, LONG / tl.where(too_long, largest, 1.0), 1.0)
    x *= shrink[None, :]
    largest *= shrink
    by = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
    scaled = x / by[None, :]
    size = tl.sqrt(tl.sum(scaled * scaled, 0)) * by
    short = size < 1
    within, beyond = tl.where(short, size, 0.0), tl.where(short, 1.0, size)
    return x, shrink, size, tl.where(short, within / (1 + within * within), 1 / (1 / beyond + beyond))


@triton.jit
def _forward_part(x, a, at, inside, number, pixel, RELU: tl.constexpr):
    capsules, _, _, share = _sizes(_capsules(x, at, inside, RELU))
    if a is not None:
        share *= tl.load(a + number, mask=pixel, other=0.0).to(tl.float32)
    return capsules * share[None, :]


@triton.jit
def _place(pixels, blocks, dim, D: tl.constexpr, P: tl.constexpr):
    """Return where this program's values [D, P] and coefficients [P] lie, and which of them exist."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    p = tl.program_id(0) % blocks * P + tl.arange(0, P)
    k = tl.arange(0, D)
    pixel = p < pixels
    at = (row * dim + k[:, None]) * pixels + p[None, :]
    return at, (k[:, None] < dim) & pixel[None, :], row * pixels + p, pixel


@triton.jit
def _squash_sum_kernel(x, a, y, b, out, pixels, blocks, dim, RELU: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    at, inside, number, pixel = _place(pixels, blocks, dim, D, P)
    total = _forward_part(x, a, at, inside, number, pixel, RELU)
    if y is not None:
        total += _forward_part(y, b, at, inside, number, pixel, RELU)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_part(x, a, dx, da, grad, at, inside, number, pixel, RELU: tl.constexpr):
    """With n = |x|, u = x / n, h = <u, g>: da = f n h, dx = a f (g + (2 / (1 + n^2) - 1) h u)."""
    capsules, shrink, size, share = _sizes(_capsules(x, at, inside, RELU))
    long = size > 1e-30  # shorter capsules have no gradient to speak of
    direction = capsules * tl.where(long, 1 / tl.where(long, size, 1.0), 0.0)[None, :]
    along = tl.sum(direction * grad, 0)
    if da is not None:
        tl.store(da + number, (share * size * along).to(da.dtype.element_ty), mask=pixel)
    if dx is not None:
        share *= shrink  # for the values before they were shrunk
        if a is not None:
            share *= tl.load(a + number, mask=pixel, other=0.0).to(tl.float32)
        bend = (2 / (1 + size * size) - 1) * along
        found = share[None, :] * (grad + bend[None, :] * direction)
        if RELU:
            found = tl.where(capsules == 0, 0.0, found)
        tl.store(dx + at, found.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _squash_sum_backward_kernel(
    grad, x, a, y, b, dx, da, dy, db, pixels, blocks, dim, RELU: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):
    at, inside, number, pixel = _place(pixels, blocks, dim, D, P)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if dx is not None or da is not None:
        _backward_part(x, a, dx, da, g, at, inside, number, pixel, RELU)
    if dy is not None or db is not None:
        _backward_part(y, b, dy, db, g, at, inside, number, pixel, RELU)


def _tiles(x: Tensor, types: int) -> tuple[int, dict[str, int]]:
    """Return how many programs a call has, and their sizes."""
    dim, pixels = x.shape[1] // types, x.shape[2] * x.shape[3]
    depth = power_of_two(dim)
    tile = max(1, min(power_of_two(max(1, pixels)), _TILE // depth))
    blocks = -(-pixels // tile)
    return x.shape[0] * types * blocks, {"pixels": pixels, "blocks": blocks, "dim": dim, "D": depth, "P": tile}


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [tensor if tensor is None else tensor.contiguous() for tensor in tensors]


def squash_sum(x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int, relu: bool) -> Tensor:
    """Return the sum, ``[B, types * dim, H, W]``; arguments as :func:`fastcaps.encapnet.squash_sum` has them."""
    programs, sizes = _tiles(x, types)
    given = dict(zip(("x", "a", "y", "b"), _dense(x, a, y, b), strict=True))
    out = x.new_empty(x.shape)
    if programs:
        with current(x.device):
            launch(_squash_sum_kernel, programs, **given, out=out, **sizes, RELU=relu)
    return out


def squash_sum_backward(
    grad: Tensor,
    x: Tensor,
    a: Tensor | None,
    y: Tensor | None,
    b: Tensor | None,
    types: int,
    relu: bool,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, a, y and b; empty if the gradient's bit in ``needs`` is 0."""
    programs, sizes = _tiles(x, types)
    given = dict(zip(("grad", "x", "a", "y", "b"), _dense(grad, x, a, y, b), strict=True))
    found: dict[str, Tensor | None] = {
        f"d{name}": None if tensor is None or not needs >> k & 1 else tensor.new_empty(tensor.shape)
        for k, (name, tensor) in enumerate((("x", x), ("a", a), ("y", y), ("b", b)))
    }
    if programs and needs:
        with current(x.device):
            launch(_squash_sum_backward_kernel, programs, **given, **found, **sizes, RELU=relu)
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in found.values())
