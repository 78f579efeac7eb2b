"""What the routings of the oracle share: how positions see children, how votes are made, and how all is differentiated.

A child behind a gate of 0 (:func:`fastcaps.votes.hidden`) whose votes or logits are not finite is called *broken* here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype, widen
from fastcaps.votes import VoteInputs, as_grid, windows

_BLOCK = 1 << 22  # votes that `in_blocks` makes at a time, counted in numbers: 16 MB of float32


@dataclass(frozen=True)
class Seen:
    """A call as output positions see it, in the accumulation dtype.

    Attributes
    ----------
    votes
        V, ``[B, Ho, Wo, I, M, C, E]``; 0 of absent and of broken children.
    gate
        ``[B | 1, Ho, Wo, I]``, 0 where a child is absent or broken; None where it is 1 everywhere.
    broken
        Which children were taken out, ``[B, Ho, Wo, I]``; None where there can be none.
    """

    votes: Tensor
    gate: Tensor | None
    broken: Tensor | None

    def gated(self, shares: Tensor) -> Tensor:
        """Return shares ``[B, Ho, Wo, I, M]`` times the gates."""
        return shares if self.gate is None else shares * self.gate[..., None]


def see(votes: VoteInputs, numbers: Callable[[Seen], Tensor]) -> Seen:
    """Return a call as output positions see it, its broken children taken out and cut off from every gradient.

    ``numbers`` returns what becomes of votes ``[B, Ho, Wo, I, M]``, and has to be finite too.
    """
    gate = gate_of(votes)
    if gate is None:
        return _see(votes, None, None)
    with torch.no_grad():
        seen = _see(votes, gate, None)
        finite = seen.votes.isfinite().all(-1).all(-1) & numbers(seen).isfinite()
        broken = (gate == 0) & ~finite.all(-1)
    return _see(votes, gate.expand(broken.shape).masked_fill(broken, 0.0), broken)


def _see(votes: VoteInputs, gate: Tensor | None, broken: Tensor | None) -> Seen:
    children, weight, bias = widen(votes.children.dtype, *votes[:3])
    assert children is not None
    seen, presence = windows(children, votes.window), present(votes)
    if broken is not None:
        seen = seen.masked_fill(broken[..., None, None], 0.0)
    made = make_votes(seen, weight, bias, votes.parents)
    # not a product: a bias or a weight of infinity must not turn an absent child into NaN
    for out in (None if presence is None else presence == 0, broken):
        made = made if out is None else made.masked_fill(out[..., None, None, None], 0.0)
    return Seen(made, gate, broken)


def present(votes: VoteInputs) -> Tensor | None:
    """Return which children exist, ``[1, Ho, Wo, I]`` of 0 and 1; None where no window reaches into the padding."""
    if not (votes.window[4] or votes.window[5]):
        return None
    shape = (1, *votes.children.shape[1:4])
    return windows(votes.children.new_ones(shape, dtype=accumulation_dtype(votes.children.dtype)), votes.window)


def gate_of(votes: VoteInputs) -> Tensor | None:
    """Return the gates as positions see them, ``[B | 1, Ho, Wo, I]``, of sets ``[B, I]``; 0 of absent children."""
    (gate,) = widen(votes.children.dtype, votes.gate)
    return present(votes) if gate is None else gate if votes.is_set else windows(gate, votes.window)


def make_votes(children: Tensor, weight: Tensor | None, bias: Tensor | None, parents: int) -> Tensor:
    """Return the votes ``[B, Ho, Wo, I, M, C, E]`` of children ``[B, Ho, Wo, I, C, D]``: ``P W`` or P, and the bias."""
    if weight is None:
        made = children.unsqueeze(4).expand(*children.shape[:4], parents, *children.shape[4:])
    else:
        groups = children.unflatten(3, (-1, weight.shape[0]))
        made = torch.einsum("bhwjgcd,gmde->bhwjgmce", groups, weight).flatten(3, 4)
    return made if bias is None else made + bias


def in_blocks(
    children: Tensor, weight: Tensor | None, bias: Tensor | None, parents: int
) -> Iterator[tuple[slice, tuple[Tensor, Tensor | None, Tensor | None]]]:
    """Yield what :func:`make_votes` takes a few children at a time: which these are, and theirs."""
    batch, ho, wo, count, rows, depth = children.shape
    columns = depth if weight is None else weight.shape[3]
    step = max(1, _BLOCK // (max(batch * ho * wo * rows, depth) * parents * columns))  # by their votes, or weights
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        own, table = weight, bias if bias is None or bias.shape[0] == 1 else bias[part]
        if weight is not None and step < count:
            own = weight[torch.arange(part.start, part.stop, device=weight.device) % weight.shape[0]]
        yield part, (children[:, :, :, part], own, table)


def pairs(votes: VoteInputs, state: Sequence[Tensor | None], numbers: Callable[..., Tensor]) -> Tensor:
    """Return ``numbers(votes, *state)`` of each child and parent, ``[B, Ho, Wo, I, M]`` or ``[B, I, M]``.

    They are 0 of absent children. Votes are made for a few children of one sample at a time: beside the result only
    some 16 MB are used.
    """
    children, weight, bias, *wide = widen(votes.children.dtype, *votes[:3], *state)
    assert children is not None
    if votes.is_set:
        children, *wide = (None if x is None else as_grid(x) for x in (children, *wide))
        assert children is not None
    result, presence = children.new_empty((len(children), *votes.grid, votes.seen, votes.parents)), present(votes)
    for b in range(len(children)):
        own = [None if x is None else x[b : b + 1] for x in wide]
        for part, some in in_blocks(windows(children[b : b + 1], votes.window), weight, bias, votes.parents):
            result[b, :, :, part] = numbers(make_votes(*some, votes.parents), *own)[0]
    if presence is not None:
        result.masked_fill_(presence[..., None] == 0, 0.0)
    return result.view(votes.shares)


def agreement(all_votes: Tensor, query: Tensor | None, scale: float) -> Tensor:
    """Return ``scale <Q_m, V_im>`` ``[B, Ho, Wo, I, M]``; 0 without a query."""
    if query is None:
        return all_votes.new_zeros(all_votes.shape[:5])
    return torch.einsum("bhwmce,bhwimce->bhwim", query, all_votes) * scale


def inverse_or_zero(numbers: Tensor) -> Tensor:
    """Return 1 / x, and 0 with gradient 0 where x is 0: a parent that no child chose has no mean."""
    nothing = numbers == 0
    return numbers.masked_fill(nothing, 1.0).reciprocal().masked_fill(nothing, 0.0)


def log_or_zero(numbers: Tensor) -> Tensor:
    """Return ln x, and 0 with gradient 0 where x is 0: a parent that no child chose has no spread either."""
    return numbers.masked_fill(numbers == 0, 1.0).log()


@contextmanager
def recording() -> Iterator[None]:
    """Record a graph, within an op's kernel too: there the dispatcher leaves autograd out, and results need no
    gradient whatever ``torch.enable_grad`` says."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield


def differentiate(
    run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], heads: Sequence[Tensor | None], needs: int
) -> tuple[Tensor, ...]:
    """Return the gradients of ``run(*tensors)``'s results, of which ``heads`` are those of the loss, by autograd.

    Of a tensor that is None, or whose bit in ``needs`` is not set (``1 << k`` for the k-th), it is empty.
    """
    children = tensors[0]
    assert children is not None
    wanted = [k for k, tensor in enumerate(tensors) if tensor is not None and needs >> k & 1]
    found = [children.new_empty(0) for _ in tensors]
    with recording():
        leaves: list[Any] = [None if x is None else x.detach() for x in tensors]
        for k in wanted:
            leaves[k].requires_grad_()
        asked = [(x, head) for x, head in zip(run(*leaves), heads, strict=True) if head is not None and x.requires_grad]
    if asked:
        results, grads = zip(*asked, strict=True)
        made = torch.autograd.grad(results, [leaves[k] for k in wanted], grads, materialize_grads=True)
    else:
        made = tuple(torch.zeros_like(leaves[k]) for k in wanted)
    for k, gradient in zip(wanted, made, strict=True):
        found[k] = gradient.contiguous()
    return tuple(found)
