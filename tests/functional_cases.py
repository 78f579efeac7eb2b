"""Small layers in public layout, and their positions as the papers' loops want them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from oracle_routings import Seen, positions
from torch import Tensor

from fastcaps import Window
from fastcaps.votes import SET_WINDOW, as_grid, to_op

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(groups: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return children, weight and bias of a small set in public layout."""
    return draw(2, 6, 2, 2), draw(groups, 3, 2, 2, seed=1), draw(6, 3, 2, 2, seed=2)


def seen_by(
    window: Window | None, children: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None
) -> Iterator[tuple[tuple[int, int, int], Seen]]:
    """Yield every position with its children, as the oracle wants them."""
    place = as_grid if window is None else lambda tensor: to_op(tensor, window)
    gates = None if gate is None else place(gate)
    yield from positions(place(children), weight, bias, gates, SET_WINDOW if window is None else window.spec)


def expect(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.flatten(), expected.flatten(), **CLOSE)


def at(result: Tensor, window: Window | None, place: tuple[int, int, int], coefficients: bool = False) -> Tensor:
    """Return one position of a public result."""
    if window is None:
        return as_grid(result)[place]
    return (result if coefficients else to_op(result, window))[place]


def gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    loss = sum((r * draw(*r.shape, seed=k).to(r.dtype)).sum() for k, r in enumerate(results))
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
