"""The base of attention and pooling: the parents' state is a query, which iterations replace or add to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.ops.reverse import Reverse
from fastcaps.ops.routing import Routing
from fastcaps.ops.signature import Gradients, Results, State
from fastcaps.rules import Rule
from fastcaps.votes import POSE, VoteInputs


class QueryRouting(Routing):
    """A routing with a query: the last parents, or the sum of the steps of all iterations so far."""

    state = ("query",)
    finals = ("parents",)
    heads = MappingProxyType({"grad": "Tensor"})

    @abstractmethod
    def rest(self, own: Any, queries: Tensor | None, history: Results) -> Any:
        """Return the backward's arguments after the votes."""

    @abstractmethod
    def steps_of(self, own: Any, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the steps of iterations from their S, rounded to ``dtype``, the children's."""

    def adds(self, own: Any) -> bool:
        """Return whether an iteration's step is added to the query; otherwise it replaces the query."""
        return own.rule in (Rule.SQUASH, Rule.UNIT)

    def step(self, own: Any, results: Results) -> Tensor:
        """Return an iteration's step."""
        return results[0]

    def advance(self, own: Any, results: Results) -> State:
        step = self.step(own, results)
        return {"query": own.query + step if own.query is not None and self.adds(own) else step}

    def queries(self, own: Any, steps: Sequence[Tensor]) -> Tensor | None:
        """Return the queries of all iterations, stacked, without the first iteration's if it has none.

        ``steps`` are those of all iterations but the last.
        """
        queries = [] if own.query is None else [own.query]
        for step in steps:
            queries.append(queries[-1] + step if self.adds(own) and queries else step)
        if len(queries) < 2:
            return queries[0].unsqueeze(0) if queries else None
        return torch.stack(queries)

    def last_query(self, own: Any, sums: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the query of the last iteration, from the S of all iterations."""
        queries = self.queries(own, self.steps_of(own, sums[:-1], dtype).unbind())
        return None if queries is None else queries[-1]

    def backward(
        self, reverse: Reverse, grads: Gradients, votes: VoteInputs, own: Any, history: Results, eps: float = 0.0
    ) -> None:
        """Compute the gradients of a call; ``eps`` is that of squash."""
        (grad,), sums, count = grads, history[0], own.iterations
        dtype, wide, squashes = votes.children.dtype, accumulation_dtype(sums.dtype), own.rule == Rule.SQUASH
        steps = Steps(sums.to(wide), squashes, eps) if self.adds(own) and (squashes or count > 1) else None
        before: Sequence[Tensor] = ()
        if count > 1:
            before = (self.steps_of(own, sums[:-1], dtype) if steps is None else steps.vectors[:-1].to(dtype)).unbind()
        rest = self.rest(own, self.queries(own, before), history)
        each: list[Tensor] = []  # the gradients of S, or of LayerNorm(S), from the current iteration on
        needs_query = {"query"} & reverse.needs  # empty without the op's argument; inner queries always have gradients
        reverse.summed = reverse.needs - (self.constant if own.detach else needs_query)
        assert grad is not None
        carried: Tensor | None = None  # the gradient of the parents, or of their sum so far
        for k in range(-1, -count - 1, -1):
            gradient = grad if carried is None else carried
            if steps is not None and (squashes or k != -1):  # else S is the result
                gradient = steps.backward(gradient.to(wide), k)
            each.insert(0, gradient.to(wide).contiguous())  # the parents' dtype would round it
            if own.detach:  # earlier iterations have no gradient
                reverse.together = False
                reverse.ask(-1, (each[0].unsqueeze(0),), rest, detach=True)
                return
            wanted = {"query"} if k > -count else needs_query
            found = reverse.ask(k, (each[0].unsqueeze(0),), rest, wanted)
            if wanted:
                carried = carried + found["query"] if carried is not None and self.adds(own) else found["query"]
        if reverse.together:
            reverse.ask(None, (torch.stack(each),), rest)
        if needs_query:
            assert carried is not None
            reverse.gradients["query"] = carried


class Steps:
    """The steps of all iterations, ``squash(S)`` or ``S / |S|``, and their backward.

    Both are ``v = f(n) s`` with ``n = |s|`` and ``u = s / n``, so that ``ds = f dv + f' n u <u, dv>``: for
    ``f = n / (1 + n^2)`` that is ``f (dv + (2 / (1 + n^2) - 1) u <u, dv>)``, for ``f = 1 / n`` it is
    ``f (dv - u <u, dv>)``. At the zero vector all of it is 0. ``sums`` are S, ``[T, ..., C, E]``. With an ``eps`` under
    the root of squash f is ``sqrt(c)`` times that, and 1 in the first bracket is c, for ``c = n^2 / (n^2 + eps)``.
    """

    def __init__(self, sums: Tensor, squashes: bool, eps: float = 0.0) -> None:
        tiny = torch.finfo(sums.dtype).tiny  # the divisor of a zero vector
        largest = sums.abs().amax(POSE, keepdim=True).clamp(min=tiny)
        shrunk = sums / largest  # so that squares neither overflow nor underflow
        ratio = torch.linalg.vector_norm(shrunk, dim=POSE, keepdim=True)
        size, self.vectors = ratio * largest, shrunk / ratio.clamp(min=tiny)
        self.directions = self.vectors.unbind()
        bends: Tensor | float = -1.0
        inverse = size.reciprocal()
        # 1 / f; if it is infinite, the gradient is 0
        divisors = size + inverse if squashes else size.masked_fill(size == 0, torch.inf)
        if squashes:
            length = (1 + inverse.square()).reciprocal()  # n^2 / (1 + n^2), also for infinite n
            bends = torch.rsub(length, 1, alpha=2)
            if eps:
                share = (1 + eps * inverse.square()).reciprocal()  # c
                bends, length, divisors = bends + (1 - share), length * share.sqrt(), divisors / share.sqrt()
        self.divisors, self.bent = divisors.unbind(), (bends * self.vectors).unbind()
        if squashes:
            self.vectors = self.vectors * length

    def backward(self, grad: Tensor, k: int) -> Tensor:
        """Return dL/ds of an iteration from dL/dv."""
        along = (self.directions[k] * grad).sum(POSE, keepdim=True)
        return torch.addcmul(grad, self.bent[k], along) / self.divisors[k]


def check_like(votes: VoteInputs, own: Any, shapes: Mapping[str, Sequence[int]], wide: bool = False) -> None:
    """Raise unless all arguments but None have their shapes, and the call's device and dtype.

    ``wide``: the accumulation dtype instead of the children's.
    """
    children = votes.children
    dtype = accumulation_dtype(children.dtype) if wide else children.dtype
    for name, shape in shapes.items():
        tensor = getattr(own, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != dtype or tensor.device != children.device:
            raise TypeError(f"{name} must be {dtype} on {children.device}, got {tensor.dtype} on {tensor.device}")
