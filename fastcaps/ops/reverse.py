"""The way back through the turns of a routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastcaps.checks import accumulation_dtype, check_tensor
from fastcaps.votes import Votes

if TYPE_CHECKING:
    from fastcaps.ops.routing import Gradients, Routing

__all__ = ["Reverse", "turn_after_turn"]


def _of_turn(stack: Tensor | None, turn: int) -> Tensor | None:
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
    needs
        The gradients that are wanted, as bits in the order of the op's tensors.

    Attributes
    ----------
    summed
        Those that are summed over turns; a routing clears the bits of those it makes itself, such as the query's.
    gradients
        What was found, in the order of the op's tensors.
    """

    def __init__(self, routing: Routing, run: Callable[..., Any], together: bool, turns: int, needs: int) -> None:
        self.routing, self.run, self.together, self.turns, self.needs = routing, run, together, turns, needs
        self.summed = needs
        self.gradients: list[Tensor | None] = [None] * len(routing.tensors)

    def ask(self, turn: int | None, heads: Gradients, votes: Votes, own: Sequence[Any], bits: int) -> Sequence[Tensor]:
        """Return the gradients of a turn's own parents whose ``bits`` are set, among others.

        ``heads`` are those of the turn's results, ``own`` the op's other arguments, of all turns. A turn of None asks
        for what is summed over all of them.
        """
        last = turn is None or not self.together
        wanted = bits | self.summed if last else bits
        if not wanted:
            return ()
        part = own
        if turn is not None and self.turns > 1:
            part = [_of_turn(x, turn) if k else x for x, k in zip(own, self.routing.own_is_stacked, strict=True)]
        found: Sequence[Tensor] = self.run(*heads, *votes, *part, wanted)
        if last:
            for k, gradient in enumerate(found):
                if self.summed >> k & 1:
                    before = self.gradients[k]
                    self.gradients[k] = gradient if before is None else before.add_(gradient)
        return found


def turn_after_turn(routing: Routing, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run a backward of several turns as the sum of the reference's backwards of one."""
    _, backward = routing.reference()
    heads, rest = arguments[: routing.head_count], arguments[routing.head_count :]
    votes, own, needs = Votes(*rest[:6]), rest[6:-1], rest[-1]
    votes.check()
    for name, value in zip(routing.backward_names, arguments, strict=True):
        if isinstance(value, Tensor):
            check_tensor(name, value, votes.children, False, (accumulation_dtype(votes.children.dtype),))
    total: Any = None

    def of(turn: int, stack: Tensor | None) -> Tensor | None:
        part = _of_turn(stack, turn)
        return None if part is None else part[0]

    turns = len(next(head for head in heads if head is not None))
    for turn in range(-turns, 0):  # counted from the last, which all stacks have
        part = [of(turn, x) if stacked else x for x, stacked in zip(own, routing.own_is_stacked, strict=True)]
        found = backward(*(of(turn, head) for head in heads), votes, *part, needs)
        total = found if total is None else tuple(a.add_(b) for a, b in zip(total, found, strict=True))
    return tuple(total)
