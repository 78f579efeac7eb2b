"""The op of the Gaussian pass; see :func:`fastcaps.reference.gaussian.gaussian_pass`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.checks import Frame, broadcast, check, check_call, check_tensors, frame_of
from fastcaps.ops.registration import LIBRARY, Pass, register_autocast
from fastcaps.reference import accumulation_dtype, gaussian

__all__ = ["GAUSSIAN", "check_gaussian", "gaussian_pass", "gaussian_pass_backward"]


def check_gaussian(
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    eps: float,
    window: Sequence[int],
) -> Frame:
    """Raise RuntimeError unless the arguments of ``gaussian_pass`` fit together; return its sizes."""
    frame = check_call(children, weight, 0, bias, gate, window)
    check(variance is None or mean is not None, "a variance wants a mean")
    state = [
        ("mean", mean, frame.poses),
        ("variance", variance, frame.poses),
        ("log_weight", log_weight, frame.numbers),
    ]
    check_tensors(children, True, state)
    check((beta_use is None) == (beta_ignore is None), "beta_use and beta_ignore come together or not at all")
    for name, beta in (("beta_use", beta_use), ("beta_ignore", beta_ignore)):
        if beta is not None:
            check(beta.dim() == 2, f"{name} must be [I or 1, M or 1]")
            check_tensors(children, True, [(name, beta, broadcast(beta, frame))])
    return frame


def _check_backward(
    grad_counts: Tensor | None,
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_evidence: Tensor | None,
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    counts: Tensor,
    means: Tensor,
    variances: Tensor,
    eps: float,
    window: Sequence[int],
    needs: int,
) -> None:
    frame = check_gaussian(children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore, eps, window)
    tensors = [
        ("grad_counts", grad_counts, frame.numbers),
        ("grad_means", grad_means, frame.poses),
        ("grad_variances", grad_variances, frame.poses),
        ("grad_evidence", None if beta_use is None else grad_evidence, frame.numbers),
        ("counts", counts, frame.numbers),
        ("means", means, frame.poses),
        ("variances", variances, frame.poses),
    ]
    check_tensors(children, True, tensors)


def _fake(
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    eps: float,
    window: Sequence[int],
) -> tuple[Tensor, ...]:
    frame = frame_of(children, weight, 0, window)
    shapes = (frame.numbers, frame.poses, frame.poses, (0,) if beta_use is None else frame.numbers)
    dtype = accumulation_dtype(children.dtype)
    return tuple(children.new_empty(shape, dtype=dtype) for shape in shapes)


def _fake_backward(
    grad_counts: Tensor | None,
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_evidence: Tensor | None,
    children: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    counts: Tensor,
    means: Tensor,
    variances: Tensor,
    eps: float,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    inputs = [children, weight, mean, variance, log_weight, bias, gate]
    inputs += [None, None] if grad_evidence is None else [beta_use, beta_ignore]
    wide = accumulation_dtype(children.dtype)
    return tuple(
        children.new_empty(0, dtype=wide if k in gaussian.STATE else children.dtype)
        if tensor is None or not needs >> k & 1
        else tensor.new_empty(tensor.shape)
        for k, tensor in enumerate(inputs)
    )


def _kept(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    return *inputs[:9], *output[:3]


def _reached(grads: Sequence[Tensor | None], settings: tuple[Any, ...]) -> tuple[tuple[Any, ...], Collection[int]]:
    """Without a gradient of the evidence none reaches the betas; without betas the evidence is empty."""
    grad_evidence = grads[3]
    if grad_evidence is not None and grad_evidence.dim() == 1:
        grad_evidence = None
    return (*grads[:3], grad_evidence), (7, 8) if grad_evidence is None else ()


GAUSSIAN = Pass(
    name="gaussian_pass",
    schema="(Tensor children, Tensor weight, Tensor? mean, Tensor? variance, Tensor? log_weight, Tensor? bias, "
    "Tensor? gate, Tensor? beta_use, Tensor? beta_ignore, float eps, int[] window) "
    "-> (Tensor counts, Tensor means, Tensor variances, Tensor evidence)",
    backward_schema="(Tensor? grad_counts, Tensor? grad_means, Tensor? grad_variances, Tensor? grad_evidence, "
    "Tensor children, Tensor weight, Tensor? mean, Tensor? variance, Tensor? log_weight, Tensor? bias, Tensor? gate, "
    "Tensor? beta_use, Tensor? beta_ignore, Tensor counts, Tensor means, Tensor variances, float eps, int[] window, "
    "int needs) -> (Tensor dchildren, Tensor dweight, Tensor dmean, Tensor dvariance, Tensor dlog_weight, "
    "Tensor dbias, Tensor dgate, Tensor dbeta_use, Tensor dbeta_ignore)",
    tensors=gaussian.NEEDS,
    by_reference=gaussian.gaussian_pass,
    backward_by_reference=gaussian.gaussian_pass_backward,
    check=check_gaussian,
    check_backward=_check_backward,
    fake=_fake,
    fake_backward=_fake_backward,
    kept=_kept,
    reached=_reached,
    wide=frozenset(("mean", "variance", "log_weight", "beta_use", "beta_ignore")),
)
GAUSSIAN.define(LIBRARY)
register_autocast(GAUSSIAN.name, GAUSSIAN.tensors, GAUSSIAN.wide)
gaussian_pass = torch.ops.fastcaps.gaussian_pass.default
gaussian_pass_backward = torch.ops.fastcaps.gaussian_pass_backward.default
