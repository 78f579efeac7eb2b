"""The op of the attention pass; see :func:`fastcaps.reference.attention_pass`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.ops.checks import Frame, check_call, check_tensors, frame_of
from fastcaps.ops.registration import LIBRARY, Pass, register_autocast

__all__ = ["ATTENTION", "attention_pass", "attention_pass_backward", "check_attention"]


def check_attention(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    frozen: bool = False,
) -> Frame:
    """Raise RuntimeError unless the arguments of ``attention_pass`` fit together; return its sizes."""
    frame = check_call(children, weight, 0, bias, gate, window)
    pose = (frame.pose[0] * frame.pose[1],)
    tensors = [("query", query, frame.poses), ("norm_weight", norm_weight, pose), ("norm_bias", norm_bias, pose)]
    check_tensors(children, False, tensors)
    return frame


def _check_backward(
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> None:
    frame = check_attention(children, weight, query, bias, gate, norm_weight, None, scale, eps, normalize, window)
    check_tensors(children, False, [("grad_parents", grad_parents, frame.poses)])
    check_tensors(children, True, [("grad_sums", grad_sums, frame.poses)])
    check_tensors(children, True, [("sums", sums if normalize else None, frame.poses)])


def _fake(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    frozen: bool = False,
) -> tuple[Tensor, Tensor]:
    shape = frame_of(children, weight, 0, window).poses
    sums = children.new_empty(shape if normalize else (0,), dtype=reference.accumulation_dtype(children.dtype))
    return children.new_empty(shape), sums


def _fake_backward(
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    pose = (children.shape[4] * weight.shape[3],)
    shapes: list[Any] = [None if tensor is None else tensor.shape for tensor in (children, weight, query, bias, gate)]
    shapes += [pose if normalize and grad_parents is not None else None] * 2
    return tuple(
        children.new_empty(shape if shape is not None and needs >> k & 1 else (0,)) for k, shape in enumerate(shapes)
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
    by_reference=reference.attention_pass,
    backward_by_reference=reference.attention_pass_backward,
    check=check_attention,
    check_backward=_check_backward,
    fake=_fake,
    fake_backward=_fake_backward,
    kept=_kept,
    reached=_reached,
    freezes=True,
    frozen=(2,),
)
ATTENTION.define(LIBRARY)
register_autocast(ATTENTION.name, ATTENTION.tensors, ATTENTION.wide)
attention_pass = torch.ops.fastcaps.attention_pass.default
attention_pass_backward = torch.ops.fastcaps.attention_pass_backward.default
