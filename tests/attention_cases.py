"""Shapes, dtypes and the tolerance that every test of the attention pass runs over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fastcaps import backends, ops, reference
from fastcaps.geometry import SET_WINDOW, output_size

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TENSORS = reference.NEEDS
GRADIENTS = tuple(f"d{name}" for name in TENSORS)

native_only = pytest.mark.skipif(
    not backends.listing()[2].available, reason=f"no native CPU kernels: {backends.listing()[2].detail}"
)


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
        rows, _, columns = self.pose
        shape = (self.batch, *output_size(self.window, *self.grid), self.parents, rows, columns)
        both = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
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


def ids(case: Case) -> str:
    return case.name


Pass = Callable[..., tuple[Tensor, Tensor]]


def results(
    run: Pass, tensors: Sequence[Tensor | None], settings: tuple[Any, ...], grads: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Return outputs and gradients of a pass by name, in float64; what a call does not have is left out."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    outputs = run(*leaves, *settings)
    found = {"parents": outputs[0].detach().double()}
    if settings[2]:
        found["sums"] = outputs[1].detach().double()
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    present = [k for k, leaf in enumerate(leaves) if leaf is not None]
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        [leaves[k] for k in present],
        [grad for _, grad in pairs],
        materialize_grads=True,
    )
    for k, gradient in zip(present, gradients, strict=True):
        assert gradient.shape == leaves[k].shape and gradient.dtype == leaves[k].dtype
        found[GRADIENTS[k]] = gradient.double()
    return found


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


class _Rounding(TorchDispatchMode):
    """Moves the result of every arithmetic operation by one unit in the last place, up or down by chance."""

    STILL = ("clone", "copy", "_to_copy", "new_", "ones", "zeros", "full", "empty", "constant_pad")

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.generator = torch.Generator().manual_seed(2)

    def move(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self.generator).double() * 2 - 1
        return value * (1 + self.epsilon * signs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        aliases = schema.is_mutable or any(returned.alias_info for returned in schema.returns)
        if aliases or schema.name.removeprefix("aten::").startswith(self.STILL):
            return result
        return tree_map(self.move, result)


def assert_honest(
    found: dict[str, Tensor],
    tensors: Sequence[Tensor | None],
    settings: tuple[Any, ...],
    grads: Sequence[Tensor | None],
) -> None:
    """Assert that a kernel errs at most twice what the eager reference of the same dtype errs, plus rounding.

    Rounding is one unit in the last place of the largest result, and the problem's condition: by how much the float64
    results change when all inputs and all intermediate results move by one unit in the last place of the dtype in which
    sums are kept, up or down by chance. Three draws estimate that; where they do not suffice, 30 do it better. In
    float64 nothing more precise is there to measure the reference's own error: its condition stands for it.
    """
    dtype = tensors[0].dtype
    accumulated = reference.accumulation_dtype(dtype)
    wide = [[None if t is None else t.double() for t in given] for given in (tensors, grads)]
    exact = results(reference.attention_pass, wide[0], settings, wide[1])
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert found[name].shape == value.shape, name
        assert torch.isfinite(found[name]).all(), f"{name} has numbers that were never written"
    error = {name: _largest(found[name] - value) for name, value in exact.items()}
    eager = {} if dtype == torch.float64 else results(reference.attention_pass, tensors, settings, grads)
    eager_error = {name: _largest(value - exact[name]) for name, value in eager.items()}
    condition = dict.fromkeys(exact, 0.0)
    rounding = _Rounding(torch.finfo(accumulated).eps)
    for draw in range(1, 31):
        moved = [tree_map(rounding.move, given) for given in wide]
        with rounding:
            other = results(reference.attention_pass, moved[0], settings, moved[1])
        condition = {name: max(condition[name], _largest(other[name] - exact[name])) for name in exact}
        allowed = {
            name: 2 * eager_error.get(name, condition[name])
            + condition[name]
            + torch.finfo(accumulated if name == "sums" else dtype).eps * _largest(exact[name])
            for name in exact
        }
        wrong = [
            f"{name}: error {error[name]:.3g}, allowed {allowed[name]:.3g}"
            for name in exact
            if error[name] > allowed[name]
        ]
        if draw >= 3 and not wrong:
            break
    assert not wrong, wrong


def check_op(tensors: Sequence[Tensor | None], settings: tuple[Any, ...], grads: Sequence[Tensor | None]) -> None:
    """Run the op with these arguments and hold forward and every gradient to :func:`assert_honest`."""
    assert_honest(results(ops.attention_pass, tensors, settings, grads), tensors, settings, grads)
