"""Random numbers that depend only on a seed and an item's index.

An image therefore does not depend on its batch, the order of batches, the number of processes or the device. Each item
has a separate sequence of SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15 - 2**64  # as a signed number, as all three
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def _mix(state: Tensor) -> Tensor:
    """Return SplitMix64's output; int64 products wrap around, and the sign bits of a shift are masked."""
    for shift, factor in _ROUNDS:
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return state ^ ((state >> 31) & ((1 << 33) - 1))


class Draws:
    """Random numbers for the items of a batch; every call continues after the last.

    ``seed`` is any integer of 63 bits; ``items`` are the items' indices, int64 ``[n]``, on the device of the random
    numbers. :meth:`going_on` takes the ``states``, int64 ``[n]``.

    >>> import torch
    >>> Draws(0, torch.tensor([7, 8])).integers(10, 3).shape
    torch.Size([2, 3])
    >>> torch.equal(Draws(0, torch.tensor([7, 8])).uniform()[1], Draws(0, torch.tensor([8])).uniform()[0])
    True
    """

    def __init__(self, seed: int, items: Tensor) -> None:
        start = _mix(torch.tensor([seed], dtype=torch.int64) + _STEP).to(items.device)
        self.states = _mix(items.to(torch.int64) * _STEP + start)

    @classmethod
    def fresh(cls, count: int, device: torch.device | None = None) -> Draws:
        """Return draws for ``count`` items, seeded by torch's global generator."""
        return cls(int(torch.randint(2**62, ())), torch.arange(count, device=device))

    @classmethod
    def going_on(cls, states: Tensor) -> Draws:
        """Return draws that continue others, on the device of their :attr:`states`."""
        made = cls.__new__(cls)
        made.states = states
        return made

    def __len__(self) -> int:
        return len(self.states)

    def _bits(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        every = self.states[:, None] + torch.arange(1, count + 1, device=self.states.device) * _STEP
        self.states = every[:, -1]
        return _mix(every).view(-1, *shape)

    def integers(self, below: int | Tensor, *shape: int) -> Tensor:
        """Return int64 ``[n, *shape]``, uniform from 0 to ``below`` − 1, with a bias of at most ``below`` / 2⁶³."""
        return (self._bits(*shape) & ((1 << 63) - 1)) % below

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 ``[n, *shape]``, uniform in [0, 1): multiples of 2⁻²⁴."""
        return ((self._bits(*shape) >> 40) & ((1 << 24) - 1)).to(torch.float32) / (1 << 24)

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        """Return float32 ``[n, *shape]``, uniform from ``low`` to ``high``."""
        return low + (high - low) * self.uniform(*shape)
