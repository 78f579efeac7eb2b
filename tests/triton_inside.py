"""What the process that interprets kernels runs by itself: whole ops, and calls whose offsets pass 2**31.

The memory of those is mapped and hardly ever touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from registry import Call, routing_of
from torch import Tensor

NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python names from 3.12 on
FAR = 1 << 30


def mapped(numbers: int) -> Tensor:
    """Return float32 numbers, all 0, of which only those that are written take memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, 4 * numbers, flags=flags), dtype=torch.float32)


def apart(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the same numbers with those strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    view = mapped(last + 1).as_strided(tensor.shape, strides)
    return view.copy_(tensor)


def training(stem: str, case: Any) -> dict[str, Tensor]:
    """Return results and gradients of a case by the public op with the Triton backend, of however many turns."""
    import fastcaps

    with fastcaps.backend("triton"):
        return Call.training(routing_of(stem).call(case), Call.by_op)


def attention(options: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients near and far: rows and columns of poses and matrices lie 2**30 numbers apart."""
    from fastcaps.ops import Attention
    from fastcaps.triton_kernels.attention import attention_routing, attention_routing_backward
    from fastcaps.votes import Votes

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    children, weight, query, grad = (
        draw(1, 1, 1, 2, 3, 4), draw(2, 2, 4, 3), draw(1, 1, 1, 2, 3, 3), draw(1, 1, 1, 2, 3, 3)
    )  # fmt: skip
    both = []
    for far in (False, True):
        if far:
            children = apart(children, (1, 1, 1, 1, FAR, FAR + 2))
            weight = apart(weight, (1, 2, FAR, FAR + 4))
        votes = Votes(children, weight, None, None, 2, (1, 1, 1, 1, 0, 0, 1, 1))
        _, sums = attention_routing(votes, Attention(query, None, None, 0.5, 0.0, 1), options)
        given = (votes, (query[None], None, None, 0.5, 0.0), 1 | 2 | 16, options)
        both.append([sums, *attention_routing_backward([grad[None]], *given)])
    return both[0], both[1]
