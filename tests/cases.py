"""One call of a routing op: its numbers, drawn from a seed, and the factors that rows of cases are made of."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastcaps.rules import Rule
from fastcaps.votes import SET_WINDOW, output_size

__all__ = ["GPU_DTYPES", "LAYOUTS", "TEMPERATURES", "Case", "apart", "case_of", "common_factors", "on_device"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TEMPERATURES = (0.3, 0.5, 0.8)


# ---- how a tensor lies in memory -------------------------------------------------------------------------------------


def plain(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    """Same numbers, dimensions reversed in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def interleaved(tensor: Tensor) -> Tensor:
    """Same numbers, every stride doubled, not at the start of its memory; NaN lies between."""
    wide = tensor.new_full([2 * size for size in tensor.shape], torch.nan)
    view = wide[(slice(1, None, 2),) * tensor.dim()]
    view.copy_(tensor)
    return view


def as_published(tensor: Tensor) -> Tensor:
    """Same numbers, the first two dimensions swapped in memory, and the last two: ``[M, G, E, D]`` of a weight."""
    if tensor.dim() < 4:
        return transposed(tensor)
    return tensor.transpose(0, 1).transpose(-1, -2).contiguous().transpose(-1, -2).transpose(0, 1)


def offset(tensor: Tensor) -> Tensor:
    """Same numbers, one number behind an aligned address."""
    memory = tensor.new_full((tensor.numel() + 1,), torch.nan)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


def expanded(tensor: Tensor) -> Tensor:
    """The numbers of the first entry for all entries, with a stride of 0."""
    return tensor[:1].clone().expand(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    layout.__name__: layout for layout in (plain, transposed, interleaved, as_published, offset, expanded)
}


def alike(tensor: Tensor) -> Tensor:
    """One number, its first, with strides of 0."""
    return tensor.flatten()[0].clone().expand(tensor.shape)


def apart(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Same numbers with those strides, in address space that the system commits only where it is written; OSError if
    there is not so much."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.12 on
    memory = mmap.mmap(-1, extent * tensor.dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def on_device(tensor: Tensor | None, device: str) -> Tensor | None:
    """Return the tensor on a device, its strides, its offset and what lies between its numbers kept."""
    if tensor is None or device == "cpu":
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype, device=device).set_(tensor.untyped_storage().to(device=device))
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


DENSE = ("transposed", "as_published")  # and not contiguous


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions with more than one entry."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


# ---- one call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of a routing op; what an op does not have is not looked at."""

    name: str
    rule: Rule
    batch: int = 2
    grid: tuple[int, int] = (1, 1)
    types: int = 5
    parents: int = 3
    pose: tuple[int, int, int] = (2, 3, 2)  # C, D, E
    window: tuple[int, ...] = SET_WINDOW
    groups: int | str = "own"  # matrices for every child; some for all "types", "one" for all, "none", or a number
    bias: str | None = None  # two letters of I and M, "1" for broadcast
    # "some" gates; "silent": a third of them is 0; "broken": and what lies behind it is NaN; "shut": all of the first
    # sample are 0
    gate: str | None = None
    start: bool = True  # whether the first iteration is given parents
    iterations: int = 1
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    scale: float | None = None
    eps: float = 1e-5
    affine: bool = True  # whether LayerNorm has parameters
    normalize: bool = False  # whether keys are unit vectors
    log_weight: bool = True  # whether parents have one
    betas: str = "IM"  # as ``bias``; those of EM are always [M]
    detach: bool = False  # whether coefficients are constants
    size: float = 1.0  # of the values of children: with 30 coefficients are peaked

    def __str__(self) -> str:
        return self.name

    seen = property(lambda self: self.window[0] * self.window[1] * self.types)  # I
    # the shapes of a number for every parent, [B, Ho, Wo, M], and of the parents' poses, [B, Ho, Wo, M, C, E]
    numbers = property(lambda self: (self.batch, *output_size(self.window, *self.grid), self.parents))
    poses = property(lambda self: (*self.numbers, self.pose[0], self.pose[2]))
    # the multiply-adds of the votes of all iterations
    products = property(lambda self: math.prod((*self.numbers, self.seen, *self.pose, self.iterations)))
    wide = property(lambda self: torch.promote_types(self.dtype, torch.float32))  # the accumulation dtype
    # the scale of the logits
    factor = property(lambda self: (self.pose[0] * self.pose[2]) ** -0.5 if self.scale is None else self.scale)

    def generator(self, seed: int) -> Callable[..., Tensor]:
        """Return a function that draws tensors of the call's dtype (or ``dtype``) one after the other.

        Where the default device is ``meta`` they have no numbers, and take no memory.
        """
        generator = None if torch.get_default_device().type == "meta" else torch.Generator().manual_seed(seed)

        def draw(*shape: int, size: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * size + shift
            return numbers.to(dtype or self.dtype)

        return draw

    def table(self, letters: str, draw: Callable[..., Tensor], *pose: int, **options: Any) -> Tensor:
        """Return what every child has for every parent, ``[I or 1, M or 1, ...]``."""
        first, second = self.seen if letters[0] == "I" else 1, self.parents if letters[1] == "M" else 1
        return draw(first, second, *pose, **options)

    def votes(self, seed: int = 0) -> dict[str, Any]:
        """Return what the votes are made of: the leading arguments of every op, by name."""
        draw = self.generator(seed)
        rows, depth, columns = self.pose
        groups = {"own": self.seen, "types": self.types, "one": 1}.get(self.groups, self.groups)  # type: ignore[call-overload]
        children = draw(self.batch, *self.grid, self.types, rows, depth, size=self.size)
        weight = None if groups == "none" else draw(groups, self.parents, depth, columns, size=depth**-0.5)
        bias = None if self.bias is None else self.table(self.bias, draw, rows, columns)
        gate = None
        if self.gate is not None:
            gate = draw(*children.shape[:4], size=0.3, shift=0.5).abs().clamp(max=1.0)
            if self.gate in ("silent", "broken"):
                gate = gate.masked_fill(torch.arange(gate.numel()).reshape(gate.shape) % 3 == 1, 0.0)
            if self.gate == "broken":
                children = children.masked_fill((gate == 0)[..., None, None], torch.nan)
            if self.gate == "shut":
                gate[:1] = 0.0
        return {
            "children": children,
            "weight": weight,
            "bias": bias,
            "gate": gate,
            "parents": self.parents,
            "window": list(self.window),
        }

    def arranged(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor as it lies in memory in this call."""
        return None if tensor is None else LAYOUTS[self.layout](tensor)


# ---- factors ---------------------------------------------------------------------------------------------------------

CONV = (3, 3, 2, 2, 0, 0, 1, 1)
POSES = {
    "4x4": (4, 4, 4),
    "6x6": (6, 6, 6),
    "8x8": (8, 8, 8),
    "1x8-1x16": (1, 8, 16),
    "1x16": (1, 16, 16),
    "1x64": (1, 64, 64),
    "1x64-1x2": (1, 64, 2),
    "primes": (5, 3, 7),
    "1x1": (1, 1, 1),
}
SIZES = {  # samples, child types of a set, parents
    "few": (2, 5, 3),
    "ones": (1, 1, 1),
    "one-child": (2, 1, 3),
    "one-parent": (3, 6, 1),
    "primes": (3, 7, 11),
    "no-sample": (0, 4, 3),
    "many-parents": (1, 3, 37),
    "many-children": (1, 43, 4),  # and one position: children fill the lanes
    "many-positions": (37, 4, 5),
    "full-lanes": (16, 9, 6),
}
WINDOWS = {
    "set": ((1, 1), SET_WINDOW),
    "conv": ((5, 6), CONV),
    "padded": ((3, 4), (3, 2, 1, 2, 2, 1, 1, 1)),
    "dilated": ((6, 7), (2, 3, 2, 1, 1, 2, 3, 2)),
    "nobody": ((1, 1), (1, 1, 1, 1, 1, 1, 1, 1)),  # most positions see padding alone
    "gaps": ((5, 6), (1, 2, 3, 4, 0, 0, 1, 1)),  # no position sees all children
    "tall": ((9, 1), (5, 1, 1, 1, 0, 0, 1, 1)),
}


def common_factors(*groups: str) -> dict[str, list[Any]]:
    """Return the factors that every routing has; ``groups``: what a routing has besides."""
    return {
        "pose": list(POSES),
        "size": list(SIZES),
        "window": list(WINDOWS),
        "groups": ["own", "types", "one", "half", *groups],
        "bias": [None, "IM", "I1", "1M", "11"],
        "gate": [None, "some", "silent"],
        "start": [True, False],
        "iterations": [1, 2, 3],
        "dtype": list(DTYPES),
        "layout": list(LAYOUTS),
    }


def case_of(name: str, row: dict[str, Any]) -> Case:
    """Return the case that a row of factors describes; factors of a routing's own are fields of the case."""
    row = dict(row)
    batch, types, parents = SIZES[row.pop("size")]
    grid, window = WINDOWS[row.pop("window")]
    positions = window[0] * window[1]
    if grid != (1, 1):
        batch, types = min(batch, 3), -(-types // positions)
    rows, depth, columns = POSES[row.pop("pose")]
    groups = row.pop("groups")
    if groups == "half":  # of the children have other matrices, whichever types they are
        count = positions * types
        groups = count // 2 if count % 2 == 0 else 1
    case = Case(name, Rule.PLAIN, batch, grid, types, parents, (rows, depth, columns), window, groups)
    if groups == "none":
        case = replace(case, pose=(rows, depth, depth))
    return replace(case, **row)
