"""The op of the Gaussian pass; see :func:`fastcaps.reference.gaussian.gaussian_pass`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps.ops.checks import Frame, broadcast, check, check_call, check_tensors, frame_of
from fastcaps.ops.registration import LIBRARY, Pass, register_autocast
from fastcaps.reference import accumulation_dtype, gaussian

__all__ = ["GAUSSIAN", "check_gaussian", "gaussian_pass", "gaussian_pass_backward", "gaussian_turns_backward"]


def check_gaussian(given: Any) -> Frame:
    """Raise RuntimeError unless the arguments of ``gaussian_pass`` fit together; return its sizes."""
    frame = check_call(given.children, given.weight, 0, given.bias, given.gate, given.window)
    check(given.variance is None or given.mean is not None, "a variance wants a mean")
    check_tensors(given, True, {"mean": frame.poses, "variance": frame.poses, "log_weight": frame.numbers})
    together = (given.beta_use is None) == (given.beta_ignore is None)
    check(together, "beta_use and beta_ignore come together or not at all")
    for name, beta in (("beta_use", given.beta_use), ("beta_ignore", given.beta_ignore)):
        if beta is not None:
            check(beta.dim() == 2, f"{name} must be [I or 1, M or 1]")
            check_tensors(given, True, {name: broadcast(beta, frame)})
    return frame


def _check_backward(given: Any) -> None:
    frame = check_gaussian(given)
    check_tensors(given, True, dict.fromkeys(("grad_counts", "counts"), frame.numbers))
    check_tensors(given, True, dict.fromkeys(("grad_means", "grad_variances", "means", "variances"), frame.poses))
    if given.beta_use is not None:
        check_tensors(given, True, {"grad_evidence": frame.numbers})


def _fake(given: Any) -> tuple[Tensor, ...]:
    frame = frame_of(given.children, given.weight, 0, given.window)
    shapes = (frame.numbers, frame.poses, frame.poses, (0,) if given.beta_use is None else frame.numbers)
    dtype = accumulation_dtype(given.children.dtype)
    return tuple(given.children.new_empty(shape, dtype=dtype) for shape in shapes)


def _fake_backward(given: Any) -> tuple[Tensor, ...]:
    unheard = ("beta_use", "beta_ignore") if given.grad_evidence is None else ()
    tensors = [None if name in unheard else getattr(given, name) for name in gaussian.NEEDS]
    dtype = given.children.dtype
    wide = accumulation_dtype(dtype)
    return tuple(
        given.children.new_empty(0, dtype=wide if k in gaussian.STATE else dtype)
        if tensor is None or not given.needs >> k & 1
        else tensor.new_empty(tensor.shape)
        for k, tensor in enumerate(tensors)
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
    stacked=(
        *("counts", "means", "variances"),
        *("grad_counts", "grad_means", "grad_variances", "grad_evidence"),
        *("mean", "variance", "log_weight"),
    ),
    by_reference=gaussian.gaussian_pass,
    backward_by_reference=gaussian.gaussian_pass_backward,
    checks=check_gaussian,
    checks_backward=_check_backward,
    fakes=_fake,
    fakes_backward=_fake_backward,
    kept=_kept,
    reached=_reached,
    wide=frozenset(("mean", "variance", "log_weight", "beta_use", "beta_ignore")),
)
GAUSSIAN.define(LIBRARY)
register_autocast(GAUSSIAN.name, GAUSSIAN.tensors, GAUSSIAN.wide)
gaussian_pass = torch.ops.fastcaps.gaussian_pass.default
gaussian_pass_backward = torch.ops.fastcaps.gaussian_pass_backward.default
gaussian_turns_backward = torch.ops.fastcaps.gaussian_turns_backward.default
