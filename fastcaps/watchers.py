"""Who must see a call as an op, who wants plain formulas instead, and who listens: asked once, at the border."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

listener: ContextVar[Any] = ContextVar("fastcaps_listener", default=None)
"""Who listens in this thread to the calls that fake kernels see: what :func:`fastcaps.explain` makes. It hears
``routing(op, votes, own, by_library)`` and ``other(call, described, runs)`` of what is no routing's op."""

_PLAIN = {type(None), Tensor, torch.nn.Parameter}  # anything else (a subclass, a fake) may want to see the op


def are_plain(tensors: Sequence[Any]) -> bool:
    """Return whether tensors, or None in their place, are PyTorch's own: no type that asks to see the op."""
    return _PLAIN.issuperset(map(type, tensors))


def is_watched() -> bool:
    """Return whether somebody must see a call as an op: a compiler, a dispatch mode, a trace, autocast."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
    )


def is_sharded(tensors: Sequence[Any]) -> bool:
    """Return whether a tensor is a DTensor: there is none as long as nobody has imported them."""
    if are_plain(tensors):
        return False
    known: Any = sys.modules.get("torch.distributed.tensor")
    return known is not None and any(isinstance(tensor, known.DTensor) for tensor in tensors)


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode derivatives want plain formulas.

    The ops have no rules for those: the reference, which is ordinary code, is right under all of them.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
