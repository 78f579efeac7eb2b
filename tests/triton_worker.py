"""Runs the Triton kernels without a GPU: a process of its own, in which Triton interprets them.

Triton decides when it is first imported whether to compile kernels or to interpret them, so a test process that has
compiled one cannot interpret another. Calls therefore go to a child, as tensors with their strides.
"""

from __future__ import annotations

import importlib
import io
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from cases import apart
from registry import Call, routing_of
from torch import Tensor


def interpret(function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function by name in the child: ``"fastcaps.triton_kernels.attention.attention_routing"``.

    A process that interprets kernels itself needs none.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _run(function, arguments, options)
    with patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):  # which the child has from its start
        answer = _child().submit(_serve, _packed((function, arguments, options)))
    return _unpacked(answer.result())


@cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _packed(message: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(message, memory)
    return memory.getvalue()


def _unpacked(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)


def _run(function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from fastcaps.triton_kernels.schedule import Limits

    limits = options.pop("limits", None)
    if limits is not None:
        options["limits"] = Limits(**limits)
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _serve(message: bytes) -> bytes:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: what no kernel writes shows
    return _packed(_run(*_unpacked(message)))


# ---- what that process runs by itself: whole ops, and calls whose offsets pass 2**31 --------------------------------

FAR = 1 << 30


def training(stem: str, case: Any) -> list[dict[str, Tensor]]:
    """Return results and gradients of a case, and of it as a set, by the public op with the Triton backend."""
    import fastcaps

    call = routing_of(stem).call(case)
    with fastcaps.backend("triton"):
        return [one.training(Call.by_op) for one in (call, call.as_set())]


def attention(options: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients near and far: rows and columns of poses and matrices lie 2**30 numbers apart."""
    from fastcaps.ops import Attention
    from fastcaps.triton_kernels.attention import attention_routing, attention_routing_backward
    from fastcaps.votes import VoteInputs

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
        votes = VoteInputs(children, weight, None, None, 2, (1, 1, 1, 1, 0, 0, 1, 1))
        _, sums = attention_routing(votes, Attention(query, None, None, 0.5, 0.0, 1), options)
        given = (votes, (query[None], None, None, 0.5, 0.0), 1 | 2 | 16, options)
        both.append([sums, *attention_routing_backward([grad[None]], *given)])
    return both[0], both[1]
