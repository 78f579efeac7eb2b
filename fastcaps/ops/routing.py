"""Whole routings as ops: all turns in one call, and in the backward one call for all that is summed over turns.

A backend may have a kernel of its own for all turns; where it has none, the kernel is the loop of passes in Python,
each of them run by what serves the pass. A routing's op also returns the history that its backward needs: with the
parents of every turn known no turn has to be run again. The backward goes from turn to turn, last one first, by the
formulas of what lies between the passes and by the pass's backward (:class:`Reverse`).

Where a graph of the backward itself is wanted (a second derivative), the loop of passes is differentiated instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.registration import (
    LIBRARY,
    TAGS,
    Grads,
    Pass,
    by_name,
    differentiate,
    has_kernel,
    register_autocast,
)
from fastcaps.vectors import length, squash

__all__ = ["POSE", "Reverse", "Routing", "Steps", "asked", "queries_of", "squashed"]

POSE = (-2, -1)
Run = Callable[..., Any]


def squashed(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`fastcaps.vectors.squash` of S, rounded to a dtype."""
    return squash(sums, POSE).to(dtype)


class Steps:
    """What a turn leaves to the next, ``squash(S)`` or ``S / |S|``, and the way back; of all turns at once.

    Both are ``v = f(n) s`` with ``n = |s|`` and ``u = s / n``, so that ``ds = f dv + f' n u <u, dv>``: for
    ``f = n / (1 + n^2)`` that is ``f (dv + (2 / (1 + n^2) - 1) u <u, dv>)``, for ``f = 1 / n`` it is
    ``f (dv - u <u, dv>)``. At the zero vector all of it is 0.

    Parameters
    ----------
    sums
        S, ``[turns, ..., C, E]``.
    squashes
        Which of the two.
    """

    def __init__(self, sums: Tensor, squashes: bool) -> None:
        size = length(sums, POSE, keepdim=True)
        zero = size == 0
        whole = 1 + size.square()
        self.direction = sums / size.masked_fill(zero, 1.0)
        # 1 / f: where that is infinite, nothing is left
        self.divisor = whole / size if squashes else size.masked_fill(zero, torch.inf)
        self.bend = 2 / whole - 1 if squashes else -torch.ones_like(size)
        self.vectors = sums / self.divisor

    def backward(self, grad: Tensor, turn: int) -> Tensor:
        """Return dL/ds of a turn from dL/dv."""
        direction = self.direction[turn]
        along = (direction * grad).sum(POSE, keepdim=True)
        return (grad + self.bend[turn] * along * direction) / self.divisor[turn]


def queries_of(first: Tensor | None, steps: Iterable[Tensor], add: bool) -> Tensor | None:
    """Return the queries of a routing's turns, stacked; without the first turn's if that has none.

    Parameters
    ----------
    first
        Of the first turn.
    steps
        What each turn but the last leaves to the next.
    add
        Whether a query is the sum of all so far, or the last of them.
    """
    queries = [] if first is None else [first]
    for step in steps:
        queries.append(queries[-1] + step if add and queries else step)
    return torch.stack(queries) if queries else None


def asked(queries: Tensor | None, turn: int | slice) -> Tensor | None:
    """Return the query of a turn, counted from the last, or the queries of a slice of them; None if there is none."""
    if queries is None or (isinstance(turn, int) and len(queries) < -turn):
        return None
    return queries[turn]


class Reverse:
    """A routing's backward through its passes, last turn first.

    A turn is asked for the gradients of the parents that it was given: its query, say. The rest is summed over turns.
    Where a kernel makes that sum in one call, with votes and their gradients made once, it comes last; elsewhere a turn
    is asked for its share on the way, for there a call of its own would make everything twice.

    Parameters
    ----------
    run
        The pass's backward.
    many
        The backward of many turns; None where only a loop would serve it.
    arguments
        Called with a turn, or with the slice of all, returns what the backward takes before ``needs``.
    needs
        The bits of the gradients that are summed.
    """

    def __init__(
        self,
        run: Callable[..., Sequence[Tensor]],
        many: Callable[..., Sequence[Tensor]] | None,
        arguments: Callable[[Any], Sequence[Any]],
        needs: int,
    ) -> None:
        self.run, self.many, self.arguments, self.needs = run, many, arguments, needs
        self.total: dict[int, Tensor] = {}

    def ask(self, turn: int, own: int) -> Sequence[Tensor]:
        """Return the gradients of a turn's own parents whose bits are in ``own``, among others."""
        wanted = own if self.many else own | self.needs
        found = self.run(*self.arguments(turn), wanted) if wanted else ()
        if not self.many:
            self._add(found)
        return found

    def sums(self) -> dict[int, Tensor]:
        """Return what is summed over turns, all of which have been asked, by position."""
        if self.many and self.needs:
            self._add(self.many(*self.arguments(slice(None)), self.needs))
        return self.total

    def _add(self, found: Sequence[Tensor]) -> None:
        for k, gradient in enumerate(found):
            if self.needs >> k & 1:
                self.total[k] = self.total[k].add_(gradient) if k in self.total else gradient


@dataclass(frozen=True, eq=False)
class Routing:
    """A whole routing as PyTorch has to know it.

    Attributes
    ----------
    name
        Of the op.
    schema
        Arguments and results.
    one
        The pass that it repeats.
    tensors
        The names of its leading arguments, all tensors.
    wide
        Those of them that are in the accumulation dtype of the children.
    loop
        The routing as a loop of passes: called with what runs a pass, and with the op's arguments. Differentiable if
        the pass is.
    checks
        Called with the arguments by name, raises RuntimeError unless they fit together.
    fakes
        Called with the arguments by name, returns empty tensors as the op would.
    results
        How many of the op's results have gradients; the others are the history.
    backward
        Called with what runs the pass's backward, what runs it for many turns or None, the gradients of those, the
        tensors, the op's results, the other arguments, and which gradients are needed; returns those of the tensors.
    """

    name: str
    schema: str
    one: Pass
    tensors: tuple[str, ...]
    loop: Callable[..., Any]
    checks: Callable[[Any], Any]
    fakes: Callable[[Any], tuple[Tensor, ...]]
    results: int
    backward: Callable[
        [Run, Run | None, Grads, Grads, Sequence[Tensor], tuple[Any, ...], Sequence[bool]],
        Grads,
    ]
    wide: frozenset[str] = frozenset()

    @property
    def stem(self) -> str:
        """The name of the pass's files, here and everywhere."""
        return self.one.stem

    @property
    def arguments(self) -> int:
        """The number of arguments."""
        return len(by_name(self.schema).__dict__)

    def check(self, *arguments: Any) -> None:
        """Raise RuntimeError unless the arguments of the op fit together."""
        self.checks(by_name(self.schema, *arguments))

    def fake(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the op would."""
        return self.fakes(by_name(self.schema, *arguments, **named))

    def run_pass(self, *arguments: Any) -> Any:
        """Run the pass by its op."""
        return getattr(torch.ops.fastcaps, self.one.name).default(*arguments)

    def by_reference(self, *arguments: Any) -> Any:
        """Run the routing as a loop of the reference's passes."""
        return self.loop(self.one.by_reference, *arguments)

    def by_passes(self, *arguments: Any) -> Any:
        """Run the routing as a loop of passes, each by what serves it: the kernel where there is no other."""
        self.check(*arguments)
        return self.loop(self.run_pass, *arguments)

    def define(self) -> None:
        """Define the op: schema, fake kernel, autograd, autocast."""
        LIBRARY.define(self.name + self.schema, tags=TAGS)
        qualified = f"{LIBRARY.ns}::{self.name}"
        torch.library.register_fake(qualified, self.fake, lib=LIBRARY)
        op, turns = (
            getattr(torch.ops.fastcaps, name).default for name in (f"{self.one.name}_backward", self.one.turns)
        )
        formula = partial(self.formula, op, turns=turns)
        torch.library.register_autograd(qualified, formula, setup_context=self.save, lib=LIBRARY)
        register_autocast(self.name, self.tensors, self.wide)

    def implement(self, key: str, kernel: Callable[..., Any]) -> None:
        """Register a Python function as the op's kernel under a dispatch key, ``"CPU"`` or ``"CUDA"``."""
        LIBRARY.impl(self.name, kernel, key)

    def serve_by_passes(self, key: str) -> None:
        """Register the loop as the kernel under a dispatch key, unless there is one."""
        if not has_kernel(self.name, key):
            self.implement(key, self.by_passes)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep in an autograd context what the backward will ask for."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[self.results :])
        count = len(self.tensors)
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.settings = tuple(inputs[count:])

    def formula(
        self, op: Callable[..., Any], ctx: Any, *grads: Tensor | None, turns: Callable[..., Any] | None = None
    ) -> tuple[Any, ...]:
        """Return the gradients of all arguments; ``op`` runs the pass's backward, ``turns`` that of many."""
        count = len(self.tensors)
        tensors, outputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        needed = list(ctx.needs_input_grad[:count])
        counting = grads[: self.results]
        gradients: Grads = [None] * count
        if any(grad is not None for grad in counting) and any(needed):
            if torch.is_grad_enabled():
                gradients = differentiate(
                    lambda *inputs: self.loop(self.run_pass, *inputs, *ctx.settings)[: self.results],
                    tensors,
                    counting,
                    [k for k, need in enumerate(needed) if need],
                )
            else:
                children = tensors[0]
                many = None if children.device.type.upper() in self.one.looped else turns
                found = self.backward(op, many, counting, tensors, outputs, ctx.settings, needed)
                gradients = [gradient if need else None for gradient, need in zip(found, needed, strict=True)]
        return (*gradients, *([None] * len(ctx.settings)))
