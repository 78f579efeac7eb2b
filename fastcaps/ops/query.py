"""What attention and pooling share: the parents' state is a query, and turns change it by squashing or unit vectors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.ops.reverse import Reverse
from fastcaps.ops.routing import Gradients, Routing
from fastcaps.reference.seen import POSE
from fastcaps.rules import DETACH, Rule
from fastcaps.votes import Votes

__all__ = ["QueryRouting", "check_like"]

QUERY_AT = 4
"""The place of the query's gradient, in the order of the op's tensors."""
GATE, QUERY = 1 << 3, 1 << QUERY_AT
"""Bits of gradients."""


class QueryRouting(Routing):
    """A routing whose turns ask with a query: the last parents, or the sum of what all turns so far have left."""

    flags = ("detach", "coefficients")
    final_count = 1
    grads = "Tensor grad"
    constant = QUERY
    """The bits of the gradients that do not exist where coefficients are detached."""

    def turns(self, given: Any) -> int:
        return given.iterations

    def first(self, given: Any) -> tuple[Any, ...]:
        return (given.query,)

    @abstractmethod
    def own_of(self, given: Any, queries: Tensor | None, history: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return what the backward takes after the votes."""

    @abstractmethod
    def left(self, given: Any, sums: Tensor) -> Tensor:
        """Return what turns leave to the next from their S, rounded to the dtype of the children."""

    def adds(self, given: Any) -> bool:
        """Return whether what a turn leaves is added to the query, or takes its place."""
        return given.rule in (Rule.SQUASH, Rule.UNIT)

    def queries(self, given: Any, left: Sequence[Tensor]) -> Tensor | None:
        """Return the queries of all turns, stacked, without the first turn's if that has none.

        ``left`` is what each turn but the last leaves to the next.
        """
        queries = [] if given.query is None else [given.query]
        for step in left:
            queries.append(queries[-1] + step if self.adds(given) and queries else step)
        if len(queries) < 2:
            return queries[0].unsqueeze(0) if queries else None
        return torch.stack(queries)

    def backward(self, reverse: Reverse, grads: Gradients, votes: Votes, given: Any, history: Any) -> None:
        (grad,), sums, turns = grads, history[0], given.iterations
        dtype, wide, squashes = votes.children.dtype, accumulation_dtype(sums.dtype), given.rule == Rule.SQUASH
        steps = Steps(sums.to(wide), squashes) if self.adds(given) and (squashes or turns > 1) else None
        left: Sequence[Tensor] = ()
        if turns > 1:
            left = (self.left(given, sums[:-1]) if steps is None else steps.vectors[:-1].to(dtype)).unbind()
        own = self.own_of(given, self.queries(given, left), history)
        each: list[Tensor] = []  # the gradients of S, or of LayerNorm(S), from the turn that is asked on
        reverse.together = reverse.together and not given.detach
        reverse.summed = reverse.needs & ~(self.constant if given.detach else QUERY)

        def ask(turn: int | None, bits: int) -> Sequence[Tensor]:
            return reverse.ask(turn, (torch.stack(each) if turn is None else each[0].unsqueeze(0),), votes, own, bits)

        def reach(turn: int, gradient: Tensor) -> None:
            if steps is not None and (squashes or turn != -1):  # else S itself is the result
                gradient = steps.backward(gradient.to(wide), turn)
            each.insert(0, gradient.to(wide).contiguous())  # parents' would be rounded to the children's dtype

        assert grad is not None
        reach(-1, grad)
        if given.detach:
            if reverse.summed:
                ask(-1, DETACH)
            return
        carried: Tensor | None = None  # the gradient of the parents, or of their sum so far
        for turn in range(-1, -turns - 1, -1):
            bits = QUERY if turn > -turns else reverse.needs & QUERY
            found = ask(turn, bits)
            if bits:
                dquery = found[QUERY_AT]
                carried = carried + dquery if carried is not None and self.adds(given) else dquery
            if turn > -turns:
                assert carried is not None
                reach(turn - 1, carried)
        if reverse.together:
            ask(None, 0)
        if reverse.needs & QUERY:
            reverse.gradients[QUERY_AT] = carried


class Steps:
    """What a turn adds to the query, ``squash(S)`` or ``S / |S|``, and the way back; of all turns at once.

    Both are ``v = f(n) s`` with ``n = |s|`` and ``u = s / n``, so that ``ds = f dv + f' n u <u, dv>``: for
    ``f = n / (1 + n^2)`` that is ``f (dv + (2 / (1 + n^2) - 1) u <u, dv>)``, for ``f = 1 / n`` it is
    ``f (dv - u <u, dv>)``. At the zero vector all of it is 0.

    Parameters
    ----------
    sums
        S, ``[turns, ..., C, E]``.
    squashes
        Whether it is ``squash(S)``; else ``S / |S|``.
    """

    def __init__(self, sums: Tensor, squashes: bool) -> None:
        tiny = torch.finfo(sums.dtype).tiny  # under what a zero vector is divided by
        largest = sums.abs().amax(POSE, keepdim=True).clamp(min=tiny)
        shrunk = sums / largest  # whose squares neither overflow nor vanish
        ratio = shrunk.square().sum(POSE, keepdim=True).sqrt()
        size, self.vectors = ratio * largest, shrunk / ratio.clamp(min=tiny)
        self.directions = self.vectors.unbind()
        self.bends: Sequence[Tensor | float] = [-1.0] * len(sums)
        inverse = size.reciprocal()
        # 1 / f: where that is infinite, nothing is left
        self.divisors = (size + inverse if squashes else size.masked_fill(size == 0, torch.inf)).unbind()
        if squashes:
            length = (1 + inverse.square()).reciprocal()  # n^2 / (1 + n^2), for an infinite n too
            self.bends = (1 - 2 * length).unbind()
            self.vectors = self.vectors * length

    def backward(self, grad: Tensor, turn: int) -> Tensor:
        """Return dL/ds of a turn from dL/dv."""
        direction = self.directions[turn]
        along = (direction * grad).sum(POSE, keepdim=True)
        return torch.addcmul(grad, direction, self.bends[turn] * along) / self.divisors[turn]


def check_like(votes: Votes, given: Any, shapes: Mapping[str, Sequence[int]], wide: bool = False) -> None:
    """Raise unless those arguments that are given have their shapes, and the call's device and dtype.

    ``wide``: the dtype in which sums over the children are kept.
    """
    children = votes.children
    dtype = accumulation_dtype(children.dtype) if wide else children.dtype
    for name, shape in shapes.items():
        tensor = getattr(given, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype or tensor.device != children.device:
            raise TypeError(f"{name} must be {dtype} on {children.device}, got {tensor.dtype} on {tensor.device}")
