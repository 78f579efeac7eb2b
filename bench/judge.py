"""The largest allowed error of a result: one rule for the tests, the bench, the sanitizer and the ABI check.

The rule is :func:`allowed_error`; :class:`Bar` measures its arguments for a call. Only torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["Bar", "Rounding", "Verdict", "allowed_error", "largest", "largest_error"]

Tensors = Sequence[Tensor | None]
Run = Callable[[Tensors], dict[str, Tensor]]

TF32_ROUNDING = 2.0**-11  # the largest relative error of rounding to tf32


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor, or 0."""
    return tensor.masked_fill(~tensor.isfinite(), 0.0).abs().max().item() if tensor.numel() else 0.0


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference; equal infinities, and NaN in both, count as 0."""
    difference = found.double() - exact.double()
    if not difference.numel():
        return 0.0
    same = (found == exact) & ~exact.isfinite() | (found.isnan() & exact.isnan())
    return difference.masked_fill(same, 0.0).abs().nan_to_num(torch.inf, torch.inf).max().item()


def held_in(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exact values with infinity for those that overflow a dtype."""
    return torch.where(exact.to(dtype).isinf(), exact.to(dtype).to(exact.dtype), exact)


def allowed_error(exact: Tensor, dtype: torch.dtype, eager: float, condition: float) -> float:
    """Return the largest error that a result in ``dtype`` may have: twice eager's, plus the effect of rounding.

    Parameters
    ----------
    exact : Tensor
        The result in float64.
    eager : float
        The error of the eager reference of the same dtype.
    condition : float
        The change of the exact result if values change by one unit in the last place.
    """
    return 2 * eager + condition + torch.finfo(dtype).eps * largest(exact)


class Draws:
    """Random numbers, the same in every run on a kind of device."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers from [0, 1) in float64, as many as ``like`` has, where it lies."""
        if like.device not in self.generators:
            self.generators[like.device] = torch.Generator(like.device).manual_seed(2)
        generator = self.generators[like.device]
        return torch.rand(like.shape, generator=generator, dtype=torch.float64, device=like.device)


class Rounding(TorchDispatchMode):
    """Changes the result of every arithmetic operation by one unit in the last place, randomly up or down."""

    STILL = ("clone", "copy", "_to_copy", "new_", "ones", "zeros", "full", "empty", "constant_pad")

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.draws = Draws()

    def move(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value * (1 + self.epsilon * (2 * self.draws.uniform(value).round() - 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        aliases = schema.is_mutable or any(returned.alias_info for returned in schema.returns)
        if aliases or schema.name.removeprefix("aten::").startswith(self.STILL):
            return result
        return tree_map(self.move, result)


class _Tf32(TorchDispatchMode):
    """Rounds the factors of every matrix product to tf32, as float32 products on a GPU may.

    With ``draws`` it changes the factors randomly by at most one such rounding, as another equally good computation
    might.
    """

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "einsum", "convolution")

    def __init__(self, draws: Draws | None = None) -> None:
        super().__init__()
        self.draws = draws

    def round(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.draws is not None:
            return value * (1 + TF32_ROUNDING * (2 * self.draws.uniform(value) - 1))
        bits = value.contiguous().view(torch.int32)  # to nearest, ties away from zero, as the sign is a separate bit
        return torch.where(value.isfinite(), ((bits + 0x1000) & -0x2000).view(torch.float32), value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.PRODUCTS:
            args = tree_map(self.round, args)
        return func(*args, **(kwargs or {}))


class Verdict(NamedTuple):
    """The errors of results, and whether they keep the rule."""

    errors: dict[str, float]  # the largest of each
    allowed: dict[str, float]
    complaints: list[str]  # messages about wrong results


class Bar:
    """The allowed errors of one call's results; :meth:`hold` asserts that they keep them.

    The exact results are the reference's in float64, and eager's error is the reference's in the call's dtype. The
    condition is how much the float64 results change if all inputs and intermediate results change randomly by one unit
    in the last place of the accumulation dtype. It is estimated only if an error needs it, with up to 30 draws. In
    float64, where the reference's own error cannot be measured, the condition replaces it.

    Parameters
    ----------
    run : callable
        The reference: takes the tensors, in any dtype, and returns results and gradients by name.
    tensors : sequence of Tensor or None
        All inputs of the results, including gradients of outputs; the first has the call's dtype.
    eager : sequence of callables
        Eager implementations, of which the largest error counts; by default only ``run``.
    tf32 : bool
        The call is in float32, and its matrix products may round their factors to tf32. Then eager's do, and the
        condition changes factors by up to that rounding.
    """

    most_draws = 30

    def __init__(self, run: Run, tensors: Tensors, eager: Sequence[Run] = (), tf32: bool = False) -> None:
        assert tensors[0] is not None
        self.run, self.tensors, self.dtype, self.tf32 = run, tensors, tensors[0].dtype, tf32
        self.doubles = [None if t is None else t.double() for t in tensors]
        self.exact, self.eager_error, self.dtypes = self.measure(eager)
        self.rounding = Rounding(torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps)
        self.condition = dict.fromkeys(self.exact, 0.0)
        self.draws = 0

    def measure(self, eager: Sequence[Run]) -> tuple[dict[str, Tensor], dict[str, float], dict[str, torch.dtype]]:
        """Return the exact results, eager's errors, and the required dtypes of results."""
        exact = self.run(self.doubles)
        dtypes = {name: value.dtype for name, value in exact.items()}
        errors: dict[str, float] = {}
        for other in eager or (() if self.dtype == torch.float64 else (self.run,)):
            with _Tf32() if self.tf32 else nullcontext():
                found = other(self.tensors)
            dtypes = {name: value.dtype for name, value in found.items()}
            exact = {name: held_in(value, dtypes[name]) for name, value in exact.items()}
            errors = {n: max(errors.get(n, 0.0), largest_error(value, exact[n])) for n, value in found.items()}
        return exact, errors, dtypes

    def compared(self, name: str, found: Tensor) -> tuple[Tensor, Tensor]:
        """Return the compared part of a result, and the exact values for it."""
        return found, self.exact[name]

    def draw(self) -> None:
        """Add one random draw to the estimate of the condition."""
        moved = [self.rounding.move(tensor) for tensor in self.doubles]
        with _Tf32(self.rounding.draws) if self.tf32 else nullcontext(), self.rounding:
            other = self.run(moved)
        for name, value in self.exact.items():
            moved_far = torch.where(value.isfinite(), other[name], value)  # ignore infinities
            self.condition[name] = max(self.condition[name], largest_error(moved_far, value))
        self.draws += 1

    def allowed(self, name: str) -> float:
        """Return the largest error that a result may have."""
        condition = self.condition[name]
        eager = self.eager_error.get(name, condition)
        if self.dtype == torch.float64:
            eager = max(eager, condition)
        return allowed_error(self.exact[name], self.dtypes[name], eager, condition)

    def judge(self, found: dict[str, Tensor], share: float = 0.0) -> Verdict:
        """Return the verdict on results. ``share`` allows errors of that fraction of the largest value more."""
        if found.keys() != self.exact.keys():
            return Verdict({}, {}, [f"results are {sorted(found)}, wanted {sorted(self.exact)}"])
        return self._judge(found, share)

    def _judge(self, found: dict[str, Tensor], share: float) -> Verdict:
        wrong, errors = [], {}
        for name, result in found.items():
            one, value = self.compared(name, result)
            if one.shape != value.shape or (result.dtype != self.dtypes[name] and not share):
                wanted = f"{self.dtypes[name]} {list(value.shape)}"
                wrong.append(f"{name} is {result.dtype} {list(one.shape)}, wanted {wanted}")
            elif not torch.equal(one.isfinite(), value.isfinite()):
                wrong.append(f"{name} is not finite at the same places as the exact result")
            else:
                errors[name] = largest_error(one, value)
        if wrong:
            return Verdict({}, {}, wrong)
        while True:
            allowed = {name: self.allowed(name) + share * largest(self.exact[name]) for name in errors}
            late = [name for name, error in errors.items() if not error <= allowed[name]]
            if not late or self.draws >= self.most_draws:
                said = [f"{name} errs by {errors[name]:.3g}, allowed {allowed[name]:.3g}" for name in late]
                return Verdict(errors, allowed, said)
            self.draw()

    def hold(self, found: dict[str, Tensor]) -> None:
        """Assert that results, by name, are complete, have the right shapes and dtypes, and keep the rule."""
        wrong = self.judge(found).complaints
        assert not wrong, wrong
