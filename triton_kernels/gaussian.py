"""The Gaussian pass in Triton, host side.

Parents are Gaussians that explain the votes: arguments, layouts and results are those of the ops
(:mod:`fastcaps.reference.gaussian`). Its functions: ``gaussian_kernels.py``; what all passes share, workspace included:
``skeleton.py``. Backward keeps two parents tensors more, and where every child has its own betas, 2 * I * M numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import call, gaussian_kernels, skeleton
from .call import Call, Pass, current, launch, watched
from .gaussian_kernels import _gaussian_prepare_kernel
from .plan import LIMITS, Crowd, Limits, Plan

__all__ = ["PASS", "gaussian_pass", "gaussian_pass_backward", "plan_call", "refusal", "watched"]

PASS = Pass(
    "gaussian",
    gaussian_kernels,
    gradients=("pose", "pose", "each"),
    crowd=Crowd(forward=2, products=4, backward=2, pose=4),
)


def refusal(device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int) -> str | None:
    """Return why the kernels cannot take a call with poses (C, D, E) and M parents, or None if they can."""
    return call.refusal(PASS, device, dtype, pose, parents)


def plan_call(
    children: Tensor,
    weight: Tensor,
    window: Sequence[int],
    *,
    backward: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> Plan:
    """Return how a call with these arguments would be cut up; nothing runs, and meta tensors will do."""
    return Call(PASS, children, weight, None, None, window, allow_tf32=allow_tf32, limits=limits).plan(backward)


def _forms(*betas: Tensor | None) -> int:
    """Return the bits of MODE that tell the forms of the betas."""
    sizes = [size > 1 for beta in betas if beta is not None for size in beta.shape]
    return sum(1 << k for k, large in enumerate(sizes) if large)


def gaussian_pass(
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
    *,
    deterministic: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Explain once; see :func:`fastcaps.reference.gaussian.gaussian_pass`. The same input gives the same bits anyway.

    Parameters
    ----------
    deterministic
        Makes no difference here: forward adds nothing up in an order that could change.
    allow_tf32
        Whether products of float32 numbers may be rounded to TF32 on tensor cores.
    limits
        What a program may hold; tests make it small.
    """
    variance = None if mean is None else variance
    here = Call(
        *(PASS, children, weight, bias, gate, window, (mean, variance, log_weight, beta_use, beta_ignore)),
        mode=_forms(beta_use, beta_ignore), eps=eps, allow_tf32=allow_tf32, limits=limits,
    )  # fmt: skip
    each, pose = here.shape[:4], here.shape
    evidence = None if beta_use is None else here.empty(*each)
    counts, means, variances = here.empty(*each), here.empty(*pose), here.empty(*pose)
    if here.poses:
        parts = ("pose", "pose", "each", "each") + (("pose",) if mean is None else ())
        scored = mean is not None or log_weight is not None
        with current(here.device):
            skeleton.forward(here, (counts, means, variances, evidence), parts, scored)
    return counts, means, variances, here.empty(0) if evidence is None else evidence


def _total_gate(here: Call, gate: Tensor | None) -> Tensor:
    """Return the sum of the gates that each position sees, ``[B | 1, Ho, Wo]``; children that are there have 1."""
    kh, kw, sh, sw, ph, pw, dh, dw = here.window
    if gate is None:
        total = torch.full((1, here.height, here.width), float(here.types), device=here.device)
    else:
        total = gate.to(torch.float32).sum(-1)
    seen = F.pad(total, (pw, pw, ph, ph))
    seen = seen.unfold(1, (kh - 1) * dh + 1, sh)[..., ::dh].unfold(2, (kw - 1) * dw + 1, sw)[..., ::dw]
    return seen.sum((-2, -1))


def _beta_gradients(
    here: Call,
    betas: Sequence[Tensor | None],
    found: Tensor | None,
    devidence: Tensor,
    counts: Tensor,
    gate: Tensor | None,
) -> list[Tensor | None]:
    """Return dbeta_use and dbeta_ignore: from the kernels' sums where every child has its own, else from the counts.

    ``sum_i w_im = n_m``: without betas of its own a child need not be looked at again.
    """
    gradients: list[Tensor | None] = []
    for k, beta in enumerate(betas):
        if beta is None:
            gradients.append(None)
        elif beta.shape[0] > 1:
            gradients.append(None if found is None else found[k].sum_to_size(beta.shape))
        else:
            used = counts if k == 0 else counts - _total_gate(here, gate).unsqueeze(-1)
            gradients.append((devidence * used).sum((0, 1, 2)).unsqueeze(0).sum_to_size(beta.shape))
    return gradients


def gaussian_pass_backward(
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
    *,
    deterministic: bool = False,
    allow_tf32: bool = False,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return the nine gradients; see :func:`fastcaps.reference.gaussian.gaussian_pass_backward`.

    Parameters
    ----------
    deterministic
        Add everything up in one order: dP, dgate and the parents' gradients by a launch for each place in the window,
        which no two windows share, dW, dbias and dbetas by programs that own them. Otherwise atomic additions do it.
    allow_tf32, limits
        As for :func:`gaussian_pass`.
    """
    inputs = (children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore)
    variance = None if mean is None else variance
    here = Call(
        *(PASS, children, weight, bias, gate, window, (mean, variance, log_weight, beta_use, beta_ignore)),
        mode=_forms(beta_use, beta_ignore), eps=eps, allow_tf32=allow_tf32, limits=limits,
    )  # fmt: skip
    devidence = None if beta_use is None else grad_evidence
    wanted = [bool(needs >> k & 1) and tensor is not None for k, tensor in enumerate(inputs)]
    wanted[7:] = [want and devidence is not None for want in wanted[7:]]
    shapes = [None if tensor is None else tensor.shape for tensor in inputs]
    wide = (2, 3, 4, 7, 8)
    dtypes = [torch.float32 if k in wide else here.dtype for k in range(9)]
    if here.poses == 0:
        return skeleton.answer(here, wanted, shapes, [None] * 9, dtypes)
    grads = [None if t is None else t.contiguous() for t in (grad_counts, grad_means, grad_variances, devidence)]
    saved = [tensor.contiguous() for tensor in (counts, means, variances)]
    own = [wanted[2], wanted[3] and variance is not None, wanted[4]]
    betas = [beta if want else None for beta, want in zip(inputs[7:], wanted[7:], strict=True)]
    asked = skeleton.Wanted(
        children=wanted[0], weight=wanted[1], bias=bias if wanted[5] else None, gate=wanted[6], own=own,
        betas=any(beta is not None and beta.shape[0] > 1 for beta in betas), each_tile=devidence is not None,
    )  # fmt: skip
    with current(here.device):
        tile, blocks = here.pose_tile()
        slope, bend, offset = here.empty(*here.shape), here.empty(*here.shape), here.empty(*here.shape[:4])
        launch(
            _gaussian_prepare_kernel,
            blocks,
            **dict(zip(("grad_counts", "grad_means", "grad_variances"), grads, strict=False)),
            **dict(zip(("counts", "means", "variances"), saved, strict=True)),
            slope=slope,
            bend=bend,
            offset=offset,
            poses=here.poses,
            eps=eps,
            **tile,
        )
        given = (slope, bend, offset, saved[1], grads[3])
        found = skeleton.gradients(here, given, asked, deterministic, mean is not None or log_weight is not None)
    made = [found.get(name) for name in ("children", "weight", "bias", "gate")]
    made[2:2] = found["own"]
    if devidence is not None:
        made += _beta_gradients(here, betas, found.get("betas"), devidence, saved[0], gate)
    else:
        made += [None, None]
    return skeleton.answer(here, wanted, shapes, made, dtypes)
