"""The reference of :func:`fastcaps_lab.encapnet.squash_sum`, in plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.reference.derivatives import differentiate
from fastcaps.vectors import squash


def squash_sum(x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int, relu: bool) -> Tensor:
    r"""Return :math:`a \, \mathrm{squash}(x) + b \, \mathrm{squash}(y)`: :func:`fastcaps_lab.encapnet.squash_sum`.

    Half types are computed in float32 and rounded once.
    """
    wide = accumulation_dtype(x.dtype)

    def part(capsules: Tensor, coefficient: Tensor | None) -> Tensor:
        given = capsules.to(wide).relu() if relu else capsules.to(wide)
        found = squash(given.unflatten(1, (types, given.shape[1] // types)), 2)
        return (found if coefficient is None else found * coefficient.unsqueeze(2)).flatten(1, 2)

    return (part(x, a) if y is None else part(x, a) + part(y, b)).to(x.dtype)


def squash_sum_backward(
    grad: Tensor, x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int, relu: bool, needs: int
) -> tuple[Tensor, ...]:
    """Return the gradients, by autograd, of those of x, a, y and b whose bits are set in ``needs``."""
    run: Any = partial(squash_sum, types=types, relu=relu)
    return differentiate(lambda *given: [run(*given)], (x, a, y, b), (grad,), needs)
