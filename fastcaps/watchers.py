"""How a call must run for those who watch it: as an op, or as plain formulas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = {type(None), Tensor, torch.nn.Parameter}  # anything else (a subclass, a fake) may want to see the op


def are_plain(tensors: Sequence[Any]) -> bool:
    """Return whether all tensors are plain ones or None, not of a subclass that may handle the op itself."""
    return _PLAIN.issuperset(map(type, tensors))


def are_batched(tensors: Sequence[Any]) -> bool:
    """Return whether a gradient stands for several (``is_grads_batched``): ops take it one by one, Python cannot."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)


def is_watched() -> bool:
    """Return whether a compiler, a dispatch mode, a trace or autocast must see a call as an op."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
    )


def is_sharded(tensors: Sequence[Any]) -> bool:
    """Return whether a tensor is a DTensor; there is none unless their module was imported."""
    if are_plain(tensors):
        return False
    known: Any = sys.modules.get("torch.distributed.tensor")
    return known is not None and any(isinstance(tensor, known.DTensor) for tensor in tensors)


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode derivatives are active.

    The ops have no rules for them, so the reference runs, which is ordinary PyTorch.
    """
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
