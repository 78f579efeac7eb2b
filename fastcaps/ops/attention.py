"""The op of the attention pass; see :func:`fastcaps.reference.attention_pass`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.ops.checks import Frame, check_call, check_tensors, frame_of
from fastcaps.ops.registration import LIBRARY, Pass, register_autocast

__all__ = ["ATTENTION", "attention_pass", "attention_pass_backward", "attention_turns_backward", "check_attention"]


def check_attention(given: Any) -> Frame:
    """Raise RuntimeError unless the arguments of ``attention_pass`` fit together; return its sizes."""
    frame = check_call(given.children, given.weight, 0, given.bias, given.gate, given.window)
    pose = (frame.pose[0] * frame.pose[1],)
    shapes = {"query": frame.poses, "norm_weight": pose, "norm_bias": pose}
    check_tensors(given, False, shapes)
    return frame


def _check_backward(given: Any) -> None:
    frame = check_attention(given)
    check_tensors(given, False, {"grad_parents": frame.poses})
    check_tensors(given, True, {"grad_sums": frame.poses, **({"sums": frame.poses} if given.normalize else {})})


def _fake(given: Any) -> tuple[Tensor, ...]:
    shape = frame_of(given.children, given.weight, 0, given.window).poses
    wide = reference.accumulation_dtype(given.children.dtype)
    return given.children.new_empty(shape), given.children.new_empty(shape if given.normalize else (0,), dtype=wide)


def _fake_backward(given: Any) -> tuple[Tensor, ...]:
    tensors = (given.children, given.weight, given.query, given.bias, given.gate)
    pose = (given.children.shape[4] * given.weight.shape[3],)
    shapes: list[Any] = [None if tensor is None else tensor.shape for tensor in tensors]
    shapes += [pose if given.normalize and given.grad_parents is not None else None] * 2
    return tuple(
        given.children.new_empty(shape if shape is not None and given.needs >> k & 1 else (0,))
        for k, shape in enumerate(shapes)
    )


def _kept(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    return *inputs[:6], output[1]


def _reached(grads: Sequence[Tensor | None], settings: tuple[Any, ...]) -> tuple[tuple[Any, ...], Collection[int]]:
    """Without LayerNorm the second result is empty, and nothing reaches an affine; nor does a gradient of the sums."""
    grad_parents, grad_sums = grads
    normalize = settings[2]
    return (grad_parents, grad_sums if normalize else None), (5, 6) if not normalize or grad_parents is None else ()


ATTENTION = Pass(
    name="attention_pass",
    schema="(Tensor children, Tensor weight, Tensor? query, Tensor? bias, Tensor? gate, Tensor? norm_weight, "
    "Tensor? norm_bias, float scale, float eps, bool normalize, int[] window, bool frozen=False) "
    "-> (Tensor parents, Tensor sums)",
    backward_schema="(Tensor? grad_parents, Tensor? grad_sums, Tensor children, Tensor weight, Tensor? query, "
    "Tensor? bias, Tensor? gate, Tensor? norm_weight, Tensor sums, float scale, float eps, bool normalize, "
    "int[] window, int needs) -> (Tensor dchildren, Tensor dweight, Tensor dquery, Tensor dbias, Tensor dgate, "
    "Tensor dnorm_weight, Tensor dnorm_bias)",
    tensors=reference.NEEDS,
    stacked=("grad_parents", "grad_sums", "sums", "query"),
    by_reference=reference.attention_pass,
    backward_by_reference=reference.attention_pass_backward,
    checks=check_attention,
    checks_backward=_check_backward,
    fakes=_fake,
    fakes_backward=_fake_backward,
    kept=_kept,
    reached=_reached,
    freezes=True,
    frozen=(2,),
)
ATTENTION.define(LIBRARY)
register_autocast(ATTENTION.name, ATTENTION.tensors, ATTENTION.wide)
attention_pass = torch.ops.fastcaps.attention_pass.default
attention_pass_backward = torch.ops.fastcaps.attention_pass_backward.default
attention_turns_backward = torch.ops.fastcaps.attention_turns_backward.default
