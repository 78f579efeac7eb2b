"""The op of the pooling pass; see :func:`fastcaps.reference.pooling.pooling_pass`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.checks import Frame, check, check_call, check_tensors, frame_of
from fastcaps.ops.registration import LIBRARY, Pass, register_autocast
from fastcaps.reference import accumulation_dtype, pooling

__all__ = ["POOLING", "check_pooling", "pooling_pass", "pooling_pass_backward"]


def check_pooling(
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    frozen: bool = False,
) -> Frame:
    """Raise RuntimeError unless the arguments of ``pooling_pass`` fit together; return its sizes."""
    check(query is None or query.dim() == 6, "query must be [B, Ho, Wo, M, C, E]")
    check(bias is None or bias.dim() == 4, "bias must be [I or 1, M or 1, C, E]")
    frame = check_call(children, weight, pooling.parents_of(weight, query, bias), bias, gate, window)
    check_tensors(children, False, [("query", query, frame.poses)])
    return frame


def _check_backward(
    grad_parents: Tensor | None,
    grad_logsumexp: Tensor | None,
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> None:
    frame = check_pooling(children, weight, query, bias, gate, scale, normalize, window)
    check_tensors(children, False, [("grad_parents", grad_parents, frame.poses), ("parents", parents, frame.poses)])
    wide = [("grad_logsumexp", grad_logsumexp, frame.numbers), ("logsumexp", logsumexp, frame.numbers)]
    check_tensors(children, True, wide)


def _fake(
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    frozen: bool = False,
) -> tuple[Tensor, Tensor]:
    frame = frame_of(children, weight, pooling.parents_of(weight, query, bias), window)
    logsumexp = children.new_empty(frame.numbers, dtype=accumulation_dtype(children.dtype))
    return children.new_empty(frame.poses), logsumexp


def _fake_backward(
    grad_parents: Tensor | None,
    grad_logsumexp: Tensor | None,
    children: Tensor,
    weight: Tensor | None,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    return tuple(
        children.new_empty(tensor.shape if tensor is not None and needs >> k & 1 else (0,))
        for k, tensor in enumerate((children, weight, query, bias, gate))
    )


def _kept(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    return *inputs[:5], *output


POOLING = Pass(
    name="pooling_pass",
    schema="(Tensor children, Tensor? weight, Tensor? query, Tensor? bias, Tensor? gate, float scale, "
    "bool normalize, int[] window, bool frozen=False) -> (Tensor parents, Tensor logsumexp)",
    backward_schema="(Tensor? grad_parents, Tensor? grad_logsumexp, Tensor children, Tensor? weight, Tensor? query, "
    "Tensor? bias, Tensor? gate, Tensor parents, Tensor logsumexp, float scale, bool normalize, int[] window, "
    "int needs) -> (Tensor dchildren, Tensor dweight, Tensor dquery, Tensor dbias, Tensor dgate)",
    tensors=pooling.NEEDS,
    by_reference=pooling.pooling_pass,
    backward_by_reference=pooling.pooling_pass_backward,
    check=check_pooling,
    check_backward=_check_backward,
    fake=_fake,
    fake_backward=_fake_backward,
    kept=_kept,
    freezes=True,
    frozen=(2, 4),
)
POOLING.define(LIBRARY)
register_autocast(POOLING.name, POOLING.tensors, POOLING.wide)
pooling_pass = torch.ops.fastcaps.pooling_pass.default
pooling_pass_backward = torch.ops.fastcaps.pooling_pass_backward.default
