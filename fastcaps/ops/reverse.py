"""The backward through the iterations of a routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fastcaps.ops.signature import Gradients, Signature
from fastcaps.rules import DETACH
from fastcaps.votes import VoteInputs


@dataclass
class Reverse:
    """A routing's backward, last iteration first: :meth:`ask` calls ``run``, the backward op, for one iteration.

    Each iteration has the gradients of its state, such as its query. The others of ``needs`` are sums over all
    iterations, collected in ``gradients``. On the CPU the last call computes these sums and makes the votes once;
    elsewhere each iteration adds its part.
    """

    routing: Signature
    run: Callable[..., Any]
    votes: VoteInputs
    count: int
    needs: set[str]
    on_cpu: bool
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parts: Sequence[Sequence[Any]] = ()

    def __post_init__(self) -> None:
        self.together = self.on_cpu and self.count > 1
        self.summed = self.needs

    def ask(
        self, k: int | None, heads: Gradients, rest: Sequence[Any], own: Iterable[str] = (), detach: bool = False
    ) -> dict[str, Tensor]:
        """Return gradients by name, among them those of ``own``, the state of iteration k.

        ``heads`` are the gradients of the iteration's results, ``rest`` the backward op's arguments after the votes, of
        all iterations. k counts from the last, -1; None asks for the sums over all.
        """
        last = k is None or not self.together
        wanted = {*own, *self.summed} if last else {*own}
        if not wanted:
            return {}
        if k is not None and self.count > 1:
            self.parts = self.parts or self.routing.parts(rest, self.count)
            rest = self.parts[k]
        bits = self.routing.bits(wanted) | (DETACH if detach else 0)
        found = dict(zip(self.routing.tensors, self.run(*heads, *self.votes, *rest, bits), strict=True))
        if last:
            for name in self.summed:
                before = self.gradients.get(name)
                self.gradients[name] = found[name] if before is None else before.add_(found[name])
        return found
