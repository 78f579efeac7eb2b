"""The calls of the attention pass that every test of it runs over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from pass_cases import (
    DTYPES,
    GPU_DTYPES,
    LAYOUTS,
    Judge,
    Run,
    Tensors,
    ids,
    interleaved,
    native_only,
    offset,
    on_device,
    rows_first,
    transposed,
)
from pass_cases import differentiable as differentiable_pass
from torch import Tensor

from fastcaps import ops, reference
from fastcaps.votes import SET_WINDOW, output_size

__all__ = [
    "BY_NAME",
    "CASES",
    "CONV",
    "DTYPES",
    "GPU_DTYPES",
    "GRADIENTS",
    "JUDGE",
    "LAYOUTS",
    "SMALL",
    "TENSORS",
    "Case",
    "assert_honest",
    "check_op",
    "differentiable",
    "ids",
    "interleaved",
    "native_only",
    "offset",
    "on_device",
    "random_cases",
    "results",
    "rows_first",
    "transposed",
]

TENSORS = reference.NEEDS
JUDGE = Judge(ops.ATTENTION, ("parents", "sums"), ("sums",))
GRADIENTS = JUDGE.gradients
results = JUDGE.results


@dataclass(frozen=True)
class Case:
    """One call of the op. ``groups`` is a number, or "I" or "N"; ``bias`` two letters of I and M, "1" for broadcast."""

    name: str
    batch: int = 2
    grid: tuple[int, int] = (1, 1)
    types: int = 5
    parents: int = 3
    pose: tuple[int, int, int] = (2, 3, 2)  # C, D, E
    groups: int | str = "I"
    window: tuple[int, ...] = SET_WINDOW
    query: bool = True
    bias: str | None = None
    gate: bool = False
    normalize: bool = True
    affine: bool = True
    scale: float | None = None
    eps: float = 1e-5

    @property
    def children(self) -> int:
        return self.window[0] * self.window[1] * self.types

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parents, ``[B, Ho, Wo, M, C, E]``."""
        return (self.batch, *output_size(self.window, *self.grid), self.parents, self.pose[0], self.pose[2])

    def settings(self) -> tuple[float, float, bool, list[int]]:
        scale = (self.pose[0] * self.pose[2]) ** -0.5 if self.scale is None else self.scale
        return scale, self.eps, self.normalize, list(self.window)

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor | None]:
        """Return the seven tensor arguments in op layout, with numbers that ``dtype`` has exactly."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, size: float = 1.0, shift: float = 0.0) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * size + shift).to(dtype)

        rows, depth, columns = self.pose
        ho, wo = output_size(self.window, *self.grid)
        groups = {"I": self.children, "N": self.types}.get(self.groups, self.groups)
        bias = None
        if self.bias is not None:
            first, second = self.bias
            bias = draw(self.children if first == "I" else 1, self.parents if second == "M" else 1, rows, columns)
        affine = self.affine and self.normalize
        return [
            draw(self.batch, *self.grid, self.types, rows, depth),
            draw(groups, self.parents, depth, columns, size=depth**-0.5),
            draw(self.batch, ho, wo, self.parents, rows, columns) if self.query else None,
            bias,
            draw(self.batch, *self.grid, self.types, size=0.3, shift=0.5) if self.gate else None,
            draw(rows * columns, size=0.5, shift=1.0) if affine else None,
            draw(rows * columns) if affine else None,
        ]

    def grads(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Tensor | None]:
        """Return gradients for the two outputs; the sums get one in their own dtype where there are sums."""
        generator = torch.Generator().manual_seed(seed)
        both = [torch.randn(self.shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
        return [both[0], both[1].to(reference.accumulation_dtype(dtype)) if self.normalize else None]


CONV = (3, 3, 2, 2, 0, 0, 1, 1)
CASES = (
    # sets: sizes of one, primes, and sizes around the widths of vector registers
    Case("ones", batch=1, types=1, parents=1, pose=(1, 1, 1), normalize=False),
    Case("one-child", types=1),
    Case("one-parent", parents=1, gate=True),
    Case("empty-batch", batch=0, bias="IM", gate=True),
    Case("primes", batch=3, types=7, parents=11, pose=(5, 3, 7), bias="IM", gate=True),
    Case("primes-plain", batch=5, types=13, parents=17, pose=(3, 5, 2)),
    Case("many-parents", batch=1, types=3, parents=131, pose=(2, 2, 2), bias="1M"),
    Case("many-children", batch=1, types=301, parents=4, pose=(2, 2, 2), groups=7, gate=True),
    Case("large-batch", batch=37, types=4, parents=5, pose=(2, 2, 2)),
    Case("parents-15", types=6, parents=15, pose=(4, 4, 4)),
    Case("parents-16", types=6, parents=16, pose=(4, 4, 4), bias="I1"),
    Case("parents-33", types=6, parents=33, pose=(4, 4, 4), gate=True),
    Case("vector-1x1", batch=3, types=9, parents=10, pose=(1, 1, 1), normalize=False, bias="11"),
    # the papers' poses
    Case("pose-4x4", batch=3, types=20, parents=10, pose=(4, 4, 4)),
    Case("pose-6x6", batch=2, types=9, parents=20, pose=(6, 6, 6), gate=True),
    Case("pose-8x8", batch=2, types=9, parents=10, pose=(8, 8, 8), bias="IM"),
    Case("pose-1x8-1x16", batch=3, types=19, parents=10, pose=(1, 8, 16), scale=1.0),
    Case("pose-1x16", batch=2, types=8, parents=30, pose=(1, 16, 16), groups=1, gate=True),
    Case("pose-1x64", batch=2, types=6, parents=10, pose=(1, 64, 64)),
    Case("pose-1x64-1x2", batch=2, types=6, parents=5, pose=(1, 64, 2), groups=1, bias="1M", gate=True),
    # weight groups, bias forms, what may be left out
    Case("groups-1", types=6, groups=1, bias="I1"),
    Case("groups-3-of-6", types=6, groups=3, bias="IM"),
    Case("no-query", query=False, bias="IM", gate=True),
    Case("no-query-grid", query=False, grid=(5, 4), window=CONV, bias="I1"),
    Case("no-norm", normalize=False, bias="I1", gate=True),
    Case("no-affine", affine=False, bias="1M"),
    Case("bias-11", bias="11"),
    Case("large-eps", eps=0.5),
    Case("no-eps", types=7, pose=(4, 4, 4), eps=0.0, bias="IM", gate=True),  # and lanes that no position fills
    Case("one-parent-shared", batch=1, types=64, parents=1, pose=(4, 4, 4), groups=1),
    Case("negative-scale", scale=-0.7),
    Case("sharp", scale=30.0),
    # grids
    Case("conv-4x4", grid=(7, 7), types=8, parents=8, pose=(4, 4, 4), window=CONV),
    Case("conv-4x4-m32", batch=1, grid=(5, 7), types=4, parents=32, pose=(4, 4, 4), window=CONV, gate=True),
    Case("conv-8x8", batch=1, grid=(5, 5), types=4, parents=16, pose=(8, 8, 8), window=(3, 3, 1, 1, 0, 0, 1, 1)),
    Case("conv-shared", grid=(6, 5), types=4, groups="N", window=CONV, bias="IM", gate=True),
    Case("conv-groups-2", grid=(6, 5), types=4, groups=2, window=CONV),
    Case("conv-groups-12", grid=(6, 5), types=4, groups=12, window=CONV, bias="1M"),
    Case("pointwise", grid=(3, 5), types=4, window=(1, 1, 1, 1, 0, 0, 1, 1), bias="I1"),
    Case("pointwise-strided", grid=(5, 6), types=3, window=(1, 1, 2, 3, 0, 0, 1, 1)),
    Case("padded", grid=(3, 4), types=3, window=(3, 3, 1, 1, 1, 1, 1, 1), bias="IM", gate=True),
    Case("padded-no-gate", grid=(3, 4), types=3, window=(3, 2, 1, 2, 2, 1, 1, 1), bias="I1"),
    Case("padded-all-absent", batch=1, grid=(1, 1), types=2, window=(1, 1, 1, 1, 2, 2, 1, 1), bias="IM"),
    Case("padded-no-query", grid=(3, 4), types=3, query=False, window=(2, 3, 1, 1, 1, 2, 1, 1), bias="1M"),
    Case("dilated", grid=(7, 6), types=2, window=(3, 2, 1, 1, 0, 0, 2, 3), gate=True),
    Case("dilated-padded-strided", grid=(6, 7), types=2, window=(2, 3, 2, 1, 1, 2, 3, 2), bias="IM", gate=True),
    Case("gaps", grid=(7, 8), types=2, window=(1, 2, 3, 4, 0, 0, 1, 1)),  # children that no window sees
    Case("whole-grid", grid=(4, 3), types=2, window=(4, 3, 1, 1, 0, 0, 1, 1)),
    Case("tall", batch=1, grid=(17, 1), types=3, window=(5, 1, 1, 1, 0, 0, 1, 1)),
)
BY_NAME = {case.name: case for case in CASES}
SMALL = tuple(  # what the loops get through quickly
    replace(case, batch=min(case.batch, 2)) for case in CASES if case.children * case.parents * case.pose[1] < 2000
)


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Draw small calls of every kind."""
    small = st.integers(1, 4)
    window = tuple(
        draw(st.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 3), (1, 3), (0, 2), (0, 2), (1, 2), (1, 2))
    )
    least = [max(1, (window[k] - 1) * window[6 + k] + 1 - 2 * window[4 + k]) for k in (0, 1)]
    types = draw(st.integers(1, 5))
    children = window[0] * window[1] * types
    pose = draw(st.sampled_from([(4, 4, 4), (1, 8, 16), (1, 16, 16), (6, 6, 6), None]))
    return Case(
        "random",
        batch=draw(st.integers(0, 3)),
        grid=(least[0] + draw(st.integers(0, 3)), least[1] + draw(st.integers(0, 3))),
        types=types,
        parents=draw(st.one_of(st.integers(1, 6), st.integers(7, 40))),
        pose=pose or (draw(small), draw(small), draw(small)),
        groups=draw(st.sampled_from([g for g in range(1, children + 1) if children % g == 0])),
        window=window,
        query=draw(st.integers(0, 4)) > 0,
        bias=draw(st.sampled_from([None, "IM", "I1", "1M", "11"])),
        gate=draw(st.booleans()),
        normalize=draw(st.booleans()),
        affine=draw(st.booleans()),
    )


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any], *options: Any) -> Run:
    """Return a backend's own two ops as one differentiable pass; ``options`` trail the arguments of both."""
    return differentiable_pass(ops.ATTENTION, forward, backward, *options)


def assert_honest(
    found: dict[str, Tensor], tensors: Tensors, settings: tuple[Any, ...], grads: Tensors, tf32: bool = False
) -> None:
    """Assert that a kernel's results err at most what a :class:`Bar` allows."""
    JUDGE.bar(tensors, settings, grads, tf32).hold(found)


def check_op(
    tensors: Tensors,
    settings: tuple[Any, ...],
    grads: Tensors,
    run: Run = ops.attention_pass,
    *,
    device: str = "cpu",
    tf32: bool = False,
) -> None:
    """Run an op with these arguments on a device and hold forward and every gradient to :func:`assert_honest`."""
    JUDGE.check(tensors, settings, grads, run, device=device, tf32=tf32)
