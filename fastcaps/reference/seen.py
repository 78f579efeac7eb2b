"""What the routings of the oracle share: how children are seen, and how votes are made.

A child behind a gate of 0 (:func:`fastcaps.votes.hidden`) whose votes or logits are not finite is called *broken* here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype, widen
from fastcaps.votes import Votes, windows


@dataclass(frozen=True)
class Seen:
    """A call as output positions see it, in the accumulation dtype.

    Attributes
    ----------
    votes
        What the votes are made of.
    children
        ``[B, Ho, Wo, I, C, D]``.
    gate
        ``[B | 1, Ho, Wo, I]``, 0 where a child is absent; None where it is 1 everywhere.
    present
        Which children exist, ``[1, Ho, Wo, I]`` of 0 and 1; None where no window reaches into the padding.
    broken
        Which silent children were taken out, ``[B, Ho, Wo, I]``; None before they are known.
    """

    votes: Votes
    children: Tensor
    gate: Tensor | None
    present: Tensor | None
    broken: Tensor | None = None

    @property
    def silent(self) -> Tensor | None:
        """Whether a child adds nothing, ``[B | 1, Ho, Wo, I]``."""
        return None if self.gate is None else self.gate == 0

    def gated(self, shares: Tensor) -> Tensor:
        """Return shares ``[B, Ho, Wo, I, M]`` times the gates."""
        return shares if self.gate is None else shares * self.gate[..., None]


def see(votes: Votes) -> Seen:
    """Return a call as output positions see it."""
    children, weight, bias, gate = widen(votes.children.dtype, *votes[:4])
    assert children is not None
    window, present = votes.window, None
    if window[4] or window[5]:
        present = windows(children.new_ones((1, *children.shape[1:4])), window)
    seen_gate = present if gate is None else windows(gate, window)  # padded gates are already 0
    wide = votes._replace(children=children, weight=weight, bias=bias, gate=gate)
    return Seen(wide, windows(children, window), seen_gate, present)


def sample_by_sample(votes: Votes, state: Sequence[Tensor | None], shares: Callable[..., Tensor]) -> Tensor:
    """Return ``shares(votes, *state)`` ``[B, Ho, Wo, I, M]``, the votes of one sample at a time."""
    found = []
    for b in range(votes.children.shape[0]):
        children, gate, *rest = (None if x is None else x[b : b + 1] for x in (votes.children, votes.gate, *state))
        assert children is not None
        found.append(shares(votes._replace(children=children, gate=gate), *widen(children.dtype, *rest)))
    if found:
        return torch.cat(found)
    dtype = accumulation_dtype(votes.children.dtype)
    return votes.children.new_empty((0, *votes.grid, votes.seen, votes.parents), dtype=dtype)


def make_votes(seen: Seen) -> Tensor:
    """Return all votes ``[B, Ho, Wo, I, M, C, E]``: ``P W + bias``, or ``P + bias`` for each parent.

    Votes of absent and of broken children are 0 whatever their bias is.
    """
    children, (_, weight, bias, _, parents, _) = seen.children, seen.votes
    if weight is None:
        result = children.unsqueeze(4).expand(*children.shape[:4], parents, *children.shape[4:])
    else:
        groups, _, _, columns = weight.shape
        batch, ho, wo, count, rows, depth = children.shape
        grouped = children.reshape(batch, ho, wo, count // groups, groups, rows, depth)
        result = torch.einsum("bhwjgcd,gmde->bhwjgmce", grouped, weight)
        result = result.reshape(batch, ho, wo, count, parents, rows, columns)
    if bias is not None:
        result = result + bias
    if seen.present is not None:
        # not a product: a bias or a weight of infinity must not turn an absent child into NaN
        result = result.masked_fill(seen.present[..., None, None, None] == 0, 0.0)
    return result if seen.broken is None else result.masked_fill(seen.broken[..., None, None, None], 0.0)


def without(seen: Seen, finite: Tensor) -> Seen:
    """Return ``seen`` with zeros for silent children that are not ``finite`` ``[B, Ho, Wo, I]``, cut off from every
    gradient."""
    assert seen.gate is not None and seen.silent is not None
    broken = seen.silent & ~finite
    gate = seen.gate.expand(broken.shape).masked_fill(broken, 0.0)
    return replace(seen, children=seen.children.masked_fill(broken[..., None, None], 0.0), gate=gate, broken=broken)


def without_broken(seen: Seen, look: Callable[[Seen], tuple[Tensor, Tensor]]) -> Seen:
    """Return ``seen`` without the broken children: behind a gate of 0, and with a vote or a logit that is not finite.

    ``look`` returns votes ``[B, Ho, Wo, I, M, C, E]`` and what becomes of them ``[B, Ho, Wo, I, M]``.
    """
    if seen.silent is None:
        return seen
    with torch.no_grad():
        all_votes, numbers = look(seen)
        finite = all_votes.isfinite().all(-1).all(-1) & numbers.isfinite()
    return without(seen, finite.all(-1))


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
        pairs = [(x, head) for x, head in zip(run(*leaves), heads, strict=True) if head is not None and x.requires_grad]
    if pairs:
        results, grads = zip(*pairs, strict=True)
        made = torch.autograd.grad(results, [leaves[k] for k in wanted], grads, materialize_grads=True)
    else:
        made = tuple(torch.zeros_like(leaves[k]) for k in wanted)
    for k, gradient in zip(wanted, made, strict=True):
        found[k] = gradient.contiguous()
    return tuple(found)
