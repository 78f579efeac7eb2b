"""Votes that a function computes, a block of children at a time: :meth:`fastcaps.Votes.in_blocks`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.random import fork_rng

from fastcaps.checks import accumulation_dtype, check_shape, check_tensor, is_tracing, refuse_nested
from fastcaps.votes import SET_WINDOW, VoteInputs
from fastcaps.watchers import are_plain, is_transformed

BLOCK = 1 << 20  # values in a block of votes: 4 MB of float32
MADE = ("reference", "votes that a function computes come a block at a time, in plain PyTorch")
"""The backend, and why, for an explanation."""


class MadeVotes(VoteInputs):
    """The votes of a function; to a routing, those of a set of children at each of B * space positions.

    ``children`` is a zero expanded to that shape, so that sizes, dtype and device can be read as from any children.
    """

    maker: Maker

    @classmethod
    def by(cls, maker: Maker) -> MadeVotes:
        places, (parents, rows, columns) = prod(maker.places), maker.shape
        children = maker.like.new_zeros(()).expand(places, maker.count, rows, columns)
        votes = cls(children, None, None, None, parents, SET_WINDOW)
        votes.maker = maker
        return votes

    def _replace(self, **changes: Any) -> MadeVotes:
        votes = super()._replace(**changes)
        votes.maker = self.maker
        return votes

    def with_gate(self, gate: Any, name: str) -> MadeVotes:
        """Return the votes with gates ``[B, *space, I]``, checked."""
        if gate is None:
            return self
        check_tensor(name, gate, self.children, self.autocasts, (torch.bool,) if name != "scores" else ())
        check_shape(name, gate, self.public_pairs()[:-1], "B, *space, I")
        return self._replace(gate=self.pairs_to_op(gate).to(self.children.dtype))

    # a position is an element of the ops' batch

    def to_op(self, tensor: Tensor) -> Tensor:
        space = len(self.maker.places) - 1
        return tensor.movedim(1, 1 + space).flatten(0, space)

    def from_op(self, tensor: Tensor) -> Tensor:
        return self.pairs_from_op(tensor).movedim(len(self.maker.places), 1)

    def pairs_to_op(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, len(self.maker.places) - 1)

    def pairs_from_op(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, self.maker.places) if tensor.dim() > 1 else tensor

    def public_poses(self) -> tuple[int, ...]:
        (batch, *space), (parents, *pose) = self.maker.places, self.maker.shape
        return (batch, parents, *space, *pose)

    def public_pairs(self) -> tuple[int, ...]:
        return (*self.maker.places, self.maker.count, self.parents)


class Maker:
    """A function that computes votes, with a check that it returns the same votes in every call.

    Attributes
    ----------
    count
        I.
    places, shape
        B and the spatial sizes; M, C, E.
    like
        A tensor of the votes' dtype and device.
    blocks
        The ranges of children.
    """

    def __init__(self, make: Callable[[int, int], Tensor], count: int, block: int | None) -> None:
        if not callable(make):
            raise TypeError(f"make must be a function make(i, j) of votes, got {type(make).__name__}")
        self.make, self.count = make, count
        with torch.no_grad(), nullcontext() if is_tracing() else fork_rng(devices=()):
            first: Any = make(0, 1)
        if not isinstance(first, Tensor):
            raise TypeError(f"make must return a torch.Tensor, got {type(first).__name__}")
        if first.layout != torch.strided or first.is_nested:
            raise TypeError(f"make must return dense tensors, got layout {first.layout}")
        if not first.is_floating_point() or first.element_size() == 1:
            raise TypeError(f"make must return float32, float64, bfloat16 or float16, got {first.dtype}")
        if first.dim() < 5 or first.shape[-4] != 1 or 0 in first.shape[1:]:
            raise ValueError(f"make(0, 1) must return votes [B, *space, 1, M, C, E], got {list(first.shape)}")
        self.places, self.shape = tuple(first.shape[:-4]), tuple(first.shape[-3:])
        self.like = first.new_empty(0)
        step = max(1, BLOCK // max(1, first.numel())) if block is None else block
        self.blocks = [(i, min(i + step, count)) for i in range(0, count, step)]
        self._drawn_from: dict[tuple[int, int], list[Tensor]] = {}  # states of the generators before a random block
        self._sizes: dict[tuple[int, int], Tensor] = {}

    def __call__(self, first: int, last: int) -> Tensor:
        """Return the votes of children first to last - 1, ``[B * space, I, M, C, E]``, in the accumulation dtype."""
        made = self._made(first, last)
        return made.flatten(0, len(self.places) - 1).to(accumulation_dtype(made.dtype))

    def _made(self, first: int, last: int) -> Tensor:
        """Return the function's votes, computed with the same random numbers as in earlier calls."""
        if is_tracing():  # a trace cannot save the states of generators
            made = self.make(first, last)
            self._check(first, last, made)
            return made
        device, block = self.like.device, (first, last)
        before = _random_states(device)
        drawn_from = self._drawn_from.get(block)
        with fork_rng([device] * (len(before) - 1), drawn_from is not None, device_type=device.type):
            if drawn_from is not None:
                torch.set_rng_state(drawn_from[0])
                for state in drawn_from[1:]:
                    getattr(torch, device.type).set_rng_state(state, device)
            made = self.make(first, last)
        self._check(first, last, made)
        if made.is_meta or not are_plain((made,)):  # no values to compare
            return made
        if drawn_from is None and any(a.ne(b).any() for a, b in zip(before, _random_states(device), strict=True)):
            self._drawn_from[block] = before
        if is_transformed():
            return made
        size = made.detach().abs().sum()
        if not torch.allclose(size, self._sizes.setdefault(block, size), rtol=1e-3, atol=0.0, equal_nan=True):
            raise ValueError(
                f"make must return the same votes in every call, but make({first}, {last}) returned others: it must "
                "not depend on anything that changes between a forward and its backward, such as statistics of a "
                "batch; after an optimizer's step, build new Votes"
            )
        return made

    def _check(self, first: int, last: int, made: Any) -> None:
        if not isinstance(made, Tensor):
            raise TypeError(f"make must return a torch.Tensor, got {type(made).__name__} from make({first}, {last})")
        refuse_nested(f"make({first}, {last})", made)
        wanted = (*self.places, last - first, *self.shape)
        for what, found, right in (
            ("shape", list(made.shape), list(wanted)),
            ("dtype", made.dtype, self.like.dtype),
            ("device", made.device, self.like.device),
            ("layout", made.layout, self.like.layout),
        ):
            if found != right:
                raise ValueError(f"make({first}, {last}) must return votes of {what} {right}, got {found}")


def _random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a function on a device may use."""
    own: Any = getattr(torch, device.type, None)
    states = [torch.get_rng_state()]
    return [*states, own.get_rng_state(device)] if device.type != "cpu" and hasattr(own, "get_rng_state") else states
