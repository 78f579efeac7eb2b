"""The op of the pooling pass; see :func:`fastcaps.reference.pooling.pooling_pass`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.checks import Frame, check, check_call, check_tensors, frame_of
from fastcaps.ops.registration import LIBRARY, Pass, register_autocast
from fastcaps.reference import accumulation_dtype, pooling

__all__ = ["POOLING", "check_pooling", "pooling_pass", "pooling_pass_backward", "pooling_turns_backward"]


def check_pooling(given: Any) -> Frame:
    """Raise RuntimeError unless the arguments of ``pooling_pass`` fit together; return its sizes."""
    check(given.query is None or given.query.dim() == 6, "query must be [B, Ho, Wo, M, C, E]")
    check(given.bias is None or given.bias.dim() == 4, "bias must be [I or 1, M or 1, C, E]")
    parents = pooling.parents_of(given.weight, given.query, given.bias)
    frame = check_call(given.children, given.weight, parents, given.bias, given.gate, given.window)
    check_tensors(given, False, {"query": frame.poses})
    return frame


def _check_backward(given: Any) -> None:
    frame = check_pooling(given)
    check_tensors(given, False, {"grad_parents": frame.poses, "parents": frame.poses})
    check_tensors(given, True, {"grad_logsumexp": frame.numbers, "logsumexp": frame.numbers})


def _fake(given: Any) -> tuple[Tensor, ...]:
    parents = pooling.parents_of(given.weight, given.query, given.bias)
    frame = frame_of(given.children, given.weight, parents, given.window)
    logsumexp = given.children.new_empty(frame.numbers, dtype=accumulation_dtype(given.children.dtype))
    return given.children.new_empty(frame.poses), logsumexp


def _fake_backward(given: Any) -> tuple[Tensor, ...]:
    tensors = (given.children, given.weight, given.query, given.bias, given.gate)
    return tuple(
        given.children.new_empty(tensor.shape if tensor is not None and given.needs >> k & 1 else (0,))
        for k, tensor in enumerate(tensors)
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
    stacked=("parents", "logsumexp", "grad_parents", "grad_logsumexp", "query"),
    by_reference=pooling.pooling_pass,
    backward_by_reference=pooling.pooling_pass_backward,
    checks=check_pooling,
    checks_backward=_check_backward,
    fakes=_fake,
    fakes_backward=_fake_backward,
    kept=_kept,
    freezes=True,
    frozen=(2, 4),
)
POOLING.define(LIBRARY)
register_autocast(POOLING.name, POOLING.tensors, POOLING.wide)
pooling_pass = torch.ops.fastcaps.pooling_pass.default
pooling_pass_backward = torch.ops.fastcaps.pooling_pass_backward.default
pooling_turns_backward = torch.ops.fastcaps.pooling_turns_backward.default
