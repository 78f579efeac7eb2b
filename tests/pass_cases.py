"""What judges a pass, whichever: how its calls are made and differentiated, and how much a kernel may err.

The cases of a pass are its own: ``attention_cases``, ``pooling_cases``, ``gaussian_cases``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fastcaps import backends, ops, reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

native_only = pytest.mark.skipif(
    not backends.listing()[2].available, reason=f"no native CPU kernels: {backends.listing()[2].detail}"
)


def ids(case: Any) -> str:
    return case.name


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
Tensors = Sequence[Tensor | None]
Run = Callable[..., tuple[Tensor, ...]]


def gradients_like(outputs: Sequence[Tensor], seed: int = 1) -> list[Tensor | None]:
    """Return a random gradient for every output; none for an empty one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        if output.dim() > 1
        else None
        for output in outputs
    ]


def autograd_gradients(run: Run, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors) -> list[Tensor | None]:
    """Return autograd's gradients of a pass for every tensor, zeros where nothing reaches it."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    outputs = run(*leaves, *settings)
    pairs = [(o, grad) for o, grad in zip(outputs, grads, strict=True) if grad is not None and o.requires_grad]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            [leaf for leaf in leaves if leaf is not None],
            [grad for _, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [None if leaf is None else next(found) for leaf in leaves]


def differentiable(
    one: ops.Pass | ops.Routing, forward: Callable[..., Any], backward: Callable[..., Any], *options: Any
) -> Run:
    """Return a backend's own two functions as one differentiable pass; ``options`` trail the arguments of both.

    They take what the pass's ops take, but that the forward is not told whether coefficients are constants. None of
    them needs an autograd formula. Of a routing ``backward`` is that of its pass.
    """
    taken = one.arguments - (one.freezes if isinstance(one, ops.Pass) else 0)

    class Routed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            outputs = forward(*arguments[:taken], *options)
            one.save(ctx, arguments, outputs)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return one.formula(lambda *arguments: backward(*arguments, *options), ctx, *grads)

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return Routed.apply(*arguments, *((False,) if len(arguments) < one.arguments else ()))

    return run


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference; infinities must stand where they ought to."""
    same = (found == exact) & ~exact.isfinite()
    return _largest((found - exact).masked_fill(same, 0.0))


class Rounding(TorchDispatchMode):
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


@dataclass(frozen=True)
class Judge:
    """How the calls of one pass, or of a whole routing, are made and judged.

    Attributes
    ----------
    one
        The pass, or the routing.
    outputs
        The names of its results.
    wide
        Those of them that are in the accumulation dtype.
    by_formulas
        Whether the eager reference is differentiated by its explicit backward. That is fair where what a pass keeps
        for it was rounded, while autograd's own backward repeats the same rounding errors, which then cancel: the
        parents of the pooling pass are in the dtype of the children, and of a Gaussian whose variance is nothing beside
        its mean, differences from the mean are rounding errors alone.
    """

    one: ops.Pass | ops.Routing
    outputs: tuple[str, ...]
    wide: tuple[str, ...]
    by_formulas: bool = False

    @property
    def eager(self) -> Run:
        """Return the reference as a kernel is compared with it."""
        one = self.one
        if self.by_formulas:
            backward = one.backward_by_reference if isinstance(one, ops.Pass) else one.one.backward_by_reference
            return differentiable(one, one.by_reference, backward)
        return one.by_reference

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the gradients."""
        return tuple(f"d{name}" for name in self.one.tensors)

    def is_wide(self, name: str) -> bool:
        """Return whether a result or gradient is in the accumulation dtype of the children."""
        return name in self.wide or name.removeprefix("d") in self.one.wide

    def results(self, run: Run, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors) -> dict[str, Tensor]:
        """Return outputs and gradients of a pass by name, in float64; what a call does not have is left out."""
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
        outputs = run(*leaves, *settings)
        found = {
            name: output.detach().double()
            for name, output in zip(self.outputs, outputs, strict=True)
            if output.dim() > 1
        }
        pairs = [(o, grad) for o, grad in zip(outputs, grads, strict=True) if grad is not None and o.requires_grad]
        present = [k for k, leaf in enumerate(leaves) if leaf is not None]
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaves[k] for k in present],
            [grad for _, grad in pairs],
            materialize_grads=True,
        )
        for k, gradient in zip(present, gradients, strict=True):
            assert gradient.shape == leaves[k].shape and gradient.dtype == leaves[k].dtype
            found[self.gradients[k]] = gradient.double()
        return found

    def bar(self, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors, tf32: bool = False) -> Bar:
        """Return what a kernel may err on a call."""
        return Bar(self, tensors, settings, grads, tf32)

    def check(
        self,
        tensors: Tensors,
        settings: tuple[Any, ...],
        grads: Tensors,
        run: Run,
        *,
        device: str = "cpu",
        tf32: bool = False,
    ) -> None:
        """Run a pass with these arguments on a device and hold forward and every gradient to the :class:`Bar`."""
        there = [[on_device(tensor, device) for tensor in given] for given in (tensors, grads)]
        found = self.results(run, there[0], settings, there[1])
        self.bar(tensors, settings, grads, tf32).hold({name: value.cpu() for name, value in found.items()})


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
        self, judge: Judge, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors, tf32: bool = False
    ) -> None:
        self.judge, run = judge, judge.one.by_reference
        self.dtype = tensors[0].dtype
        self.accumulated = reference.accumulation_dtype(self.dtype)
        self.wide = [[None if t is None else t.double() for t in given] for given in (tensors, grads)]
        self.settings, self.tf32 = settings, tf32
        self.exact = judge.results(run, self.wide[0], settings, self.wide[1])
        with _Tf32() if tf32 else nullcontext():
            known = self.dtype == torch.float64 and not judge.by_formulas
            eager = {} if known else judge.results(judge.eager, tensors, settings, grads)
        self.eager_error = {name: _error(value, self.exact[name]) for name, value in eager.items()}
        self.rounding = Rounding(torch.finfo(self.accumulated).eps)
        self.condition = dict.fromkeys(self.exact, 0.0)
        self.draws = 0

    def draw(self) -> None:
        """Take one more draw into the estimate of the condition."""
        moved = [tree_map(self.rounding.move, given) for given in self.wide]
        with _Tf32(self.rounding.generator) if self.tf32 else nullcontext(), self.rounding:
            other = self.judge.results(self.judge.one.by_reference, moved[0], self.settings, moved[1])
        changes = {name: _error(other[name], value) for name, value in self.exact.items()}
        self.condition = {name: max(before, changes[name]) for name, before in self.condition.items()}
        self.draws += 1

    def allowed(self, name: str) -> float:
        """Return the largest error that a result may have."""
        condition = self.condition[name]
        dtype, exact = self.accumulated if self.judge.is_wide(name) else self.dtype, self.exact[name]
        last_place = torch.finfo(dtype).eps * _largest(exact.masked_fill(~exact.isfinite(), 0.0))
        eager = self.eager_error.get(name, condition)
        return 2 * (max(eager, condition) if self.dtype == torch.float64 else eager) + condition + last_place

    def hold(self, found: dict[str, Tensor]) -> None:
        """Assert that results, by name and in float64, are complete and err at most what is allowed."""
        assert found.keys() == self.exact.keys()
        for name, value in self.exact.items():
            assert found[name].shape == value.shape, name
            assert torch.equal(found[name].isfinite(), value.isfinite()), f"{name} has numbers that were never written"
        error = {name: _error(found[name], value) for name, value in self.exact.items()}
        while self.draws < 3:
            self.draw()
        while (wrong := [name for name in self.exact if error[name] > self.allowed(name)]) and self.draws < 30:
            self.draw()
        assert not wrong, [f"{name}: error {error[name]:.3g}, allowed {self.allowed(name):.3g}" for name in wrong]


@cache
def bar_of(judge: Judge, case: Any, dtype: torch.dtype, seed: int = 0, tf32: bool = False) -> Bar:
    """Return what a case may err, which takes far longer to find than a kernel's results: many layouts share it."""
    return judge.bar(case.tensors(dtype, seed), case.settings(), case.grads(dtype, seed + 1), tf32)


def on_device(tensor: Tensor | None, device: str) -> Tensor | None:
    """Return the tensor on a device, its strides, its offset and what lies between its numbers kept."""
    if tensor is None or device == "cpu":
        return tensor
    memory = torch.empty(0, dtype=tensor.dtype, device=device).set_(tensor.untyped_storage().to(device=device))
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
