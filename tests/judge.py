"""How much a result may err: one rule for the tests, the gate of the bench, the sanitizer and the ABI check.

The rule is :func:`allowed_error`; :class:`Bar` finds the numbers that it needs for a call. Only torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["Bar", "Rounding", "allowed_error", "largest", "largest_error"]

Tensors = Sequence[Tensor | None]
Run = Callable[[Tensors], dict[str, Tensor]]

TF32_ROUNDING = 2.0**-11  # at most this share of a number is lost where it is rounded to tf32


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor; 0 where there is none."""
    return tensor.masked_fill(~tensor.isfinite(), 0.0).abs().max().item() if tensor.numel() else 0.0


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference; infinities count as right where they ought to stand, and NaN nowhere else."""
    difference = found.double() - exact.double()
    if not difference.numel():
        return 0.0
    same = (found == exact) & ~exact.isfinite() | (found.isnan() & exact.isnan())
    return difference.masked_fill(same, 0.0).abs().nan_to_num(torch.inf, torch.inf).max().item()


def held_in(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exact numbers with infinity in place of those that exceed a dtype, which is what it rounds them to."""
    return torch.where(exact.to(dtype).isinf(), exact.to(dtype).to(exact.dtype), exact)


def allowed_error(exact: Tensor, dtype: torch.dtype, eager: float, condition: float) -> float:
    """Return the largest error that a result in ``dtype`` may have: twice eager's, plus what rounding explains.

    Parameters
    ----------
    exact : Tensor
        The result in float64.
    eager : float
        The error of the eager reference of the same dtype.
    condition : float
        By how much the exact result moves when numbers move by one unit in the last place.
    """
    return 2 * eager + condition + torch.finfo(dtype).eps * largest(exact)


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
    """What the results of one call may err: :meth:`hold` asserts that they do not err more.

    The exact results are the reference's in float64, eager's error is that of the reference in the call's dtype. The
    condition is by how much the float64 results change when all inputs and all intermediate results move by one unit
    in the last place of the dtype in which sums are kept, up or down by chance. Three draws estimate that; where they
    do not suffice, 30 do it better. In float64 nothing more precise is there to measure the reference's own error: its
    condition stands for it.

    Parameters
    ----------
    run : callable
        The reference: takes the tensors, in any dtype, and returns results and gradients by name.
    tensors : sequence of Tensor or None
        All that the results depend on, gradients of outputs included; the first has the call's dtype.
    eager : callable, optional
        Another eager way to the same results whose error counts. By default ``run``.
    tf32 : bool
        The call is in float32, and its matrix products may round their factors to tf32. So do eager's, and the
        condition is where the factors move by up to that rounding.
    """

    def __init__(self, run: Run, tensors: Tensors, eager: Run | None = None, tf32: bool = False) -> None:
        assert tensors[0] is not None
        self.run, self.dtype, self.tf32 = run, tensors[0].dtype, tf32
        self.doubles = [None if t is None else t.double() for t in tensors]
        self.exact = run(self.doubles)
        self.dtypes = {name: value.dtype for name, value in self.exact.items()}
        self.eager_error: dict[str, float] = {}
        if self.dtype != torch.float64 or eager is not None:
            with _Tf32() if tf32 else nullcontext():
                found = (eager or run)(tensors)
            self.dtypes = {name: value.dtype for name, value in found.items()}
            self.exact = {name: held_in(value, self.dtypes[name]) for name, value in self.exact.items()}
            self.eager_error = {name: largest_error(value, self.exact[name]) for name, value in found.items()}
        accumulated = torch.promote_types(self.dtype, torch.float32)
        self.rounding = Rounding(torch.finfo(accumulated).eps)
        self.condition = dict.fromkeys(self.exact, 0.0)
        self.draws = 0

    def draw(self) -> None:
        """Take one more draw into the estimate of the condition."""
        moved = [self.rounding.move(tensor) for tensor in self.doubles]
        with _Tf32(self.rounding.generator) if self.tf32 else nullcontext(), self.rounding:
            other = self.run(moved)
        for name, value in self.exact.items():
            moved_far = torch.where(value.isfinite(), other[name], value)  # infinity is infinity
            self.condition[name] = max(self.condition[name], largest_error(moved_far, value))
        self.draws += 1

    def allowed(self, name: str) -> float:
        """Return the largest error that a result may have."""
        condition = self.condition[name]
        eager = self.eager_error.get(name, condition)
        if self.dtype == torch.float64:
            eager = max(eager, condition)
        return allowed_error(self.exact[name], self.dtypes[name], eager, condition)

    def complaints(self, found: dict[str, Tensor]) -> list[str]:
        """Return what is wrong with results, in words; nothing if they keep the rule."""
        if found.keys() != self.exact.keys():
            return [f"results are {sorted(found)}, wanted {sorted(self.exact)}"]
        wrong = []
        for name, value in self.exact.items():
            one = found[name]
            if one.shape != value.shape or one.dtype != self.dtypes[name]:
                wanted = f"{self.dtypes[name]} {list(value.shape)}"
                wrong.append(f"{name} is {one.dtype} {list(one.shape)}, wanted {wanted}")
            elif not torch.equal(one.isfinite(), value.isfinite()):
                wrong.append(f"{name} has numbers that were never written, or is finite where the exact result is not")
        if wrong:
            return wrong
        error = {name: largest_error(found[name], value) for name, value in self.exact.items()}
        while self.draws < 3:
            self.draw()
        while (late := [name for name in self.exact if error[name] > self.allowed(name)]) and self.draws < 30:
            self.draw()
        return [f"{name}: error {error[name]:.3g}, allowed {self.allowed(name):.3g}" for name in late]

    def hold(self, found: dict[str, Tensor]) -> None:
        """Assert that results, by name, are complete, of the right shapes and dtypes, and keep the rule."""
        wrong = self.complaints(found)
        assert not wrong, wrong
