"""Shared by the reference's routings: inverses that stay finite, and derivatives by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def inverse_or_zero(numbers: Tensor) -> Tensor:
    """Return 1 / x, or 0 with gradient 0 if x is 0: a parent without children has no mean."""
    nothing = numbers == 0
    return numbers.masked_fill(nothing, 1.0).reciprocal().masked_fill(nothing, 0.0)


@contextmanager
def recording() -> Iterator[None]:
    """Record a graph, also inside an op's kernel, where the dispatcher excludes autograd despite
    ``torch.enable_grad``."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out), torch.enable_grad():
        yield


def differentiate(
    run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor | None], heads: Sequence[Tensor | None], needs: int
) -> tuple[Tensor, ...]:
    """Return by autograd the gradients of ``tensors`` from ``heads``, those of the results of ``run(*tensors)``.

    A gradient is empty if its tensor is None, or its bit in ``needs`` is not set (``1 << k`` for the k-th).
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
        with recording():  # for the recomputation of blocks of votes
            made = torch.autograd.grad(results, [leaves[k] for k in wanted], grads, materialize_grads=True)
    else:
        made = tuple(torch.zeros_like(leaves[k]) for k in wanted)
    for k, gradient in zip(wanted, made, strict=True):
        found[k] = gradient.contiguous()
    return tuple(found)
