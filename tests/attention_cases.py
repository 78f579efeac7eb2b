"""Shapes, dtypes and the tolerance that every test of the attention pass runs over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fastcaps import backends, ops, reference
from fastcaps.geometry import SET_WINDOW, output_size

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Same numbers, dimensions reversed in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def interleaved(tensor: torch.Tensor) -> torch.Tensor:
    """Same numbers, every stride doubled, not at the start of its memory; NaN lies between."""
    wide = tensor.new_full([2 * size for size in tensor.shape], torch.nan)
    view = wide[(slice(1, None, 2),) * tensor.dim()]
    view.copy_(tensor)
    return view


def rows_first(tensor: torch.Tensor) -> torch.Tensor:
    """Same numbers, the last two dimensions swapped in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """Same numbers, one number behind an aligned address."""
    memory = tensor.new_full((tensor.numel() + 1,), torch.nan)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


LAYOUTS = (transposed, interleaved, rows_first, offset)
Pass = Callable[..., tuple[Tensor, Tensor]]


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any], *options: Any) -> Pass:
    """Return a backend's own two ops as one differentiable pass; ``options`` trail the arguments of both.

    The ops take what ``fastcaps::attention_pass`` and its backward take; none of them needs an autograd formula.
    """

    class Routed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, settings: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
            parents, sums = forward(*tensors, *settings, *options)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors[:6], sums)
            ctx.settings = settings
            return parents, sums

        @staticmethod
        def backward(ctx: Any, grad_parents: Tensor | None, grad_sums: Tensor | None) -> tuple[Tensor | None, ...]:
            normalize = ctx.settings[2]
            needed = list(ctx.needs_input_grad[1:])
            if not normalize or grad_parents is None:
                needed[5:7] = False, False
            needs = sum(1 << k for k, need in enumerate(needed) if need)
            grads = (grad_parents, grad_sums if normalize else None)
            found = backward(*grads, *ctx.saved_tensors, *ctx.settings, needs, *options)
            return None, *(gradient if need else None for gradient, need in zip(found, needed, strict=True))

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        return Routed.apply(arguments[len(TENSORS) :], *arguments[: len(TENSORS)])

    return run


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


TF32_ROUNDING = 2.0**-11  # at most this share of a number is lost where it is rounded to tf32


class _Tf32(TorchDispatchMode):
    """Rounds the factors of every matrix product to tf32, as float32 products under that setting do on a GPU.

    With ``draws`` the factors move by at most one such rounding, by chance, instead: what another, as good, way of
    computing the same might have lost.
    """

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "einsum", "convolution")

    def __init__(self, draws: torch.Generator | None = None) -> None:
        super().__init__()
        self.draws = draws

    def round(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.draws is not None:
            share = torch.rand(value.shape, generator=self.draws, dtype=torch.float64) * 2 - 1
            return value * (1 + TF32_ROUNDING * share)
        bits = value.contiguous().view(torch.int32)  # nearest, halves away from zero: sign and magnitude are apart
        return torch.where(value.isfinite(), ((bits + 0x1000) & -0x2000).view(torch.float32), value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.PRODUCTS:
            args = tree_map(self.round, args)
        return func(*args, **(kwargs or {}))


class Bar:
    """What a kernel may err on one call: :meth:`hold` asserts that it does not err more.

    At most twice what the eager reference of the same dtype errs, plus rounding. Rounding is one unit in the last place
    of the largest result, and the problem's condition: by how much the float64 results change when all inputs and all
    intermediate results move by one unit in the last place of the dtype in which sums are kept, up or down by chance.
    Three draws estimate that; where they do not suffice, 30 do it better. In float64 nothing more precise is there to
    measure the reference's own error: its condition stands for it.

    With ``tf32`` (float32 alone) the eager reference is the one whose matrix products round their factors to tf32, and
    so does the condition, where the factors move by up to that rounding.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        settings: tuple[Any, ...],
        grads: Sequence[Tensor | None],
        tf32: bool = False,
    ) -> None:
        self.dtype = tensors[0].dtype
        self.accumulated = reference.accumulation_dtype(self.dtype)
        self.wide = [[None if t is None else t.double() for t in given] for given in (tensors, grads)]
        self.settings, self.tf32 = settings, tf32
        self.exact = results(reference.attention_pass, self.wide[0], settings, self.wide[1])
        with _Tf32() if tf32 else nullcontext():
            eager = {} if self.dtype == torch.float64 else results(reference.attention_pass, tensors, settings, grads)
        self.eager_error = {name: _largest(value - self.exact[name]) for name, value in eager.items()}
        self.rounding = _Rounding(torch.finfo(self.accumulated).eps)
        self.condition = dict.fromkeys(self.exact, 0.0)
        self.draws = 0

    def draw(self) -> None:
        """Take one more draw into the estimate of the condition."""
        moved = [tree_map(self.rounding.move, given) for given in self.wide]
        with _Tf32(self.rounding.generator) if self.tf32 else nullcontext(), self.rounding:
            other = results(reference.attention_pass, moved[0], self.settings, moved[1])
        changes = {name: _largest(other[name] - value) for name, value in self.exact.items()}
        self.condition = {name: max(before, changes[name]) for name, before in self.condition.items()}
        self.draws += 1

    def allowed(self, name: str) -> float:
        """Return the largest error that a result may have."""
        condition = self.condition[name]
        last_place = torch.finfo(self.accumulated if name == "sums" else self.dtype).eps * _largest(self.exact[name])
        return 2 * self.eager_error.get(name, condition) + condition + last_place

    def hold(self, found: dict[str, Tensor]) -> None:
        """Assert that results, by name and in float64, are complete and err at most what is allowed."""
        assert found.keys() == self.exact.keys()
        for name, value in self.exact.items():
            assert found[name].shape == value.shape, name
            assert torch.isfinite(found[name]).all(), f"{name} has numbers that were never written"
        error = {name: _largest(found[name] - value) for name, value in self.exact.items()}
        while self.draws < 3:
            self.draw()
        while (wrong := [name for name in self.exact if error[name] > self.allowed(name)]) and self.draws < 30:
            self.draw()
        assert not wrong, [f"{name}: error {error[name]:.3g}, allowed {self.allowed(name):.3g}" for name in wrong]


def assert_honest(
    found: dict[str, Tensor],
    tensors: Sequence[Tensor | None],
    settings: tuple[Any, ...],
    grads: Sequence[Tensor | None],
    tf32: bool = False,
) -> None:
    """Assert that a kernel's results err at most what a :class:`Bar` allows."""
    Bar(tensors, settings, grads, tf32).hold(found)


def on_device(tensor: Tensor | None, device: str) -> Tensor | None:
    """Return the tensor on a device, its strides, its offset and what lies between its numbers kept."""
    if tensor is None or device == "cpu":
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype, device=device).set_(tensor.untyped_storage().to(device=device))
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check_op(
    tensors: Sequence[Tensor | None],
    settings: tuple[Any, ...],
    grads: Sequence[Tensor | None],
    run: Pass = ops.attention_pass,
    *,
    device: str = "cpu",
    tf32: bool = False,
) -> None:
    """Run an op with these arguments on a device and hold forward and every gradient to :func:`assert_honest`."""
    there = [[on_device(tensor, device) for tensor in given] for given in (tensors, grads)]
    found = results(run, there[0], settings, there[1])
    assert_honest({name: value.cpu() for name, value in found.items()}, tensors, settings, grads, tf32)
