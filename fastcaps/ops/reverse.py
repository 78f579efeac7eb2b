"""The way back through the turns of a routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastcaps.ops.routing import Gradients, Routing
from fastcaps.votes import Votes

__all__ = ["Reverse"]


def stack_of_turn(stack: Tensor | None, turn: int) -> Tensor | None:
    """Return the part of a stack of turns that one turn, counted from the last, has; None where that has none."""
    return None if stack is None or len(stack) < -turn else stack[turn : turn + 1 or None]


class Reverse:
    """A routing's backward, last turn first.

    A turn is asked for the gradients of the parents that it was given: its query, say. The rest is summed over turns.
    Where a kernel makes that sum in one call, with votes and their gradients made once, it comes last; elsewhere a turn
    is asked for its part on the way.

    Parameters
    ----------
    routing
        Whose backward it is.
    run
        The backward op.
    together
        Whether the sum over turns is one call at the end.
    turns
        How many there are.
    needed
        The names of the gradients that are summed.
    """

    def __init__(self, routing: Routing, run: Callable[..., Any], together: bool, turns: int, needed: set[str]) -> None:
        self.routing, self.run, self.together, self.turns = routing, run, together, turns
        self.needs = sum(1 << k for k, name in enumerate(routing.gradient_names) if name in needed)
        self.total: dict[str, Tensor | None] = {}

    def ask(
        self, turn: int | None, heads: Gradients, votes: Votes, own: Sequence[Any], bits: int = 0
    ) -> Sequence[Tensor]:
        """Return the gradients of a turn's own parents whose ``bits`` are set, among others.

        ``heads`` are those of the turn's results, ``own`` the op's other arguments, of all turns. A turn of None asks
        for what is summed over all of them.
        """
        wanted = self.needs if turn is None else bits if self.together else bits | self.needs
        if not wanted:
            return ()
        part = own
        if turn is not None and self.turns > 1:
            flags = self.routing.own_is_stacked
            part = [stack_of_turn(x, turn) if stacked else x for x, stacked in zip(own, flags, strict=True)]
        found: Sequence[Tensor] = self.run(*heads, *votes, *part, wanted)
        if turn is None or not self.together:
            for k, (name, gradient) in enumerate(zip(self.routing.gradient_names, found, strict=True)):
                if self.needs >> k & 1:
                    before = self.total.get(name)
                    self.total[name] = gradient if before is None else before.add_(gradient)
        return found
