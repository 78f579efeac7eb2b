"""The way back through the iterations of a routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fastcaps.ops.signature import Gradients, Signature
from fastcaps.rules import DETACH
from fastcaps.votes import VoteInputs


class Reverse:
    """A routing's backward, last iteration first.

    An iteration is asked for the gradients of the parents that it was given: its query, say. The rest, ``summed``, is
    summed over iterations; a routing takes out of it what it makes itself. Where a kernel makes that sum in one call
    (``together``), with votes and their gradients made once, it comes last; elsewhere an iteration is asked for its
    part on the way. ``gradients`` holds what was found.

    Parameters
    ----------
    routing, run
        Whose backward it is, and the op that makes it.
    votes, count
        What the votes are made of, and how many iterations there are.
    needs
        The names of the tensors whose gradients are wanted.
    """

    def __init__(
        self,
        routing: Signature,
        run: Callable[..., Any],
        votes: VoteInputs,
        count: int,
        needs: set[str],
        together: bool,
    ) -> None:
        self.routing, self.run, self.votes, self.count = routing, run, votes, count
        self.needs, self.together, self.summed = needs, together, needs
        self.gradients: dict[str, Tensor] = {}

    def ask(
        self, k: int | None, heads: Gradients, rest: Sequence[Any], own: Iterable[str] = (), detach: bool = False
    ) -> dict[str, Tensor]:
        """Return the gradients of what iteration k alone was given, ``own``, among others.

        ``heads`` are those of the iteration's results, ``rest`` what the backward op takes after the votes, of all
        iterations. k counts from the last, -1; None asks for what is summed over all.
        """
        last = k is None or not self.together
        wanted = {*own, *self.summed} if last else {*own}
        if not wanted:
            return {}
        if k is not None and self.count > 1:
            rest = self.routing.part(rest, k)
        bits = self.routing.bits(wanted) | (DETACH if detach else 0)
        found = dict(zip(self.routing.tensors, self.run(*heads, *self.votes, *rest, bits), strict=True))
        if last:
            for name in self.summed:
                before = self.gradients.get(name)
                self.gradients[name] = found[name] if before is None else before.add_(found[name])
        return found
