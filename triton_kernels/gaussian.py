"""Gaussian routing in Triton, host side: the ops' arguments and results, see :mod:`fastcaps.ops`.

Its algebra: ``gaussian_kernels.py``; what all routings share, workspace included: ``launches.py``. Backward keeps three
parents tensors more a turn, and where every child has its own betas, 2 * I * M numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from fastcaps.reference.gaussian import log_sigmas
from fastcaps.rules import Rule

from .attention import one_turn, start_of
from .call import Call, Routing, current
from .gaussian_kernels import GAUSSIAN, REST, Gaussian, _prepare_kernel
from .launches import Gradients, answer, forward
from .schedule import LIMITS, Crowd, Limits

ROUTING = Routing(
    "gaussian",
    GAUSSIAN,
    sums=("pose", "pose", "each", "each"),
    gradients=("pose", "pose", "each"),
    crowd=Crowd(forward=2, products=4, backward=2, pose=8),
    same_votes=True,  # differences from means and between votes may be all that is left
)
FIRST = replace(ROUTING, sums=(*ROUTING.sums, "pose"))
"""A turn without means, which leaves their base besides."""
MEASURED = replace(ROUTING, name="rest", algebra=REST, sums=("pose", "each"))
"""Rest and count of a turn."""
refusal, schedule_call = ROUTING.refusal, ROUTING.schedule_call


def turn_of(
    state: Sequence[Tensor | None],
    betas: Sequence[Tensor | None],
    eps: float,
    results: Sequence[Tensor | None] = (None, None, None),
) -> Gaussian:
    """Return what a turn starts from, and its numbers, as the kernels take them."""
    mean, variance, log_weight = state
    if variance is not None and eps == 0.0:  # a variance of 0 says nothing: the kernels' 1 / (2 variance) is then 0
        variance = variance.masked_fill(variance == 0.0, torch.inf)
    tensors = (mean, None if mean is None else variance, log_weight, *betas, *results)
    forms = [size > 1 for beta in betas for size in ((1, 1) if beta is None else beta.shape)]
    return Gaussian(
        *(None if tensor is None else tensor.contiguous() for tensor in tensors),  # type: ignore[arg-type]
        *(eps, *(tl.constexpr(large) for large in forms)),
    )


def gaussian_routing(
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: int,
    window: Sequence[int],
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    temperatures: Sequence[float],
    rule: int,
    eps: float,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Route one turn: parents are Gaussians that explain the votes; ``temperatures`` has its inverse one.

    The same input gives the same bits whatever the options. ``limits``: what a program may hold; tests make it small.
    Returns scores, means, variances with eps; then, with one turn in front, counts, means, variances without, scores.
    """
    one_turn(len(temperatures))
    first = mean is None
    call = Call(FIRST if first else ROUTING, children, weight, bias, gate, parents, window, options, limits)
    each, pose = (1, *call.shape[:4]), (1, *call.shape)
    betas = (None, None) if rule == Rule.EM else (beta_use, beta_ignore)
    counts, means, variances, scores = call.empty(*each), call.empty(*pose), call.empty(*pose), call.zeros(*each)
    if call.poses:
        with current(call.device):
            turn = turn_of((mean, variance, log_weight), betas, eps)
            forward(call, turn, (counts, means, variances, scores), not first or log_weight is not None)
    wide = variances + eps
    if rule == Rule.EM and beta_use is not None and beta_ignore is not None:
        cost = (call.pose[0] * call.pose[2] * beta_use + log_sigmas(wide)) * counts
        scores = temperatures[0] * (beta_ignore - cost)
    return scores[0].clone(), means[0].clone(), wide[0], counts, means, variances, scores


def _total_gate(call: Call) -> Tensor:
    """Return the sum of the gates that each position sees, ``[B | 1, Ho, Wo]``; children that are there have 1."""
    kh, kw, sh, sw, ph, pw, dh, dw = call.window
    gate = call.tensors[3]
    if gate is None:
        total = torch.full((1, call.sizes["H"], call.sizes["W"]), float(call.types), device=call.device)
    else:
        total = gate.to(torch.float32).sum(-1)
    seen = F.pad(total, (pw, pw, ph, ph))
    seen = seen.unfold(1, (kh - 1) * dh + 1, sh)[..., ::dh].unfold(2, (kw - 1) * dw + 1, sw)[..., ::dw]
    return seen.sum((-2, -1))


def _beta_gradients(
    call: Call, betas: Sequence[Tensor | None], found: Tensor | None, devidence: Tensor, counts: Tensor
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
            used = counts if k == 0 else counts - _total_gate(call).unsqueeze(-1)
            gradients.append((devidence * used).sum((0, 1, 2, 3)).unsqueeze(0).sum_to_size(beta.shape))
    return gradients


def gaussian_routing_backward(
    grad_counts: Tensor | None,
    grad_means: Tensor | None,
    grad_variances: Tensor | None,
    grad_evidence: Tensor | None,
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    parents: int,
    window: Sequence[int],
    mean: Tensor | None,
    variance: Tensor | None,
    log_weight: Tensor | None,
    beta_use: Tensor | None,
    beta_ignore: Tensor | None,
    counts: Tensor,
    means: Tensor,
    variances: Tensor,
    eps: float,
    needs: int,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight, dbias, dgate, dmean, dvariance, dlog_weight, dbeta_use, dbeta_ignore of T turns.

    They are summed over turns. Where means or variances have a gradient, what counts and means lost to rounding is
    measured first, in a sweep of its own that skips tiles without a tight parent (see :mod:`.gaussian_kernels`).
    Option 1: as for :func:`fastcaps.triton_kernels.attention.attention_routing_backward`.
    """
    turns = len(counts)
    call = Call(ROUTING, children, weight, bias, gate, parents, window, options, limits)
    state = (mean, None if mean is None else variance, log_weight)
    inputs = (children, weight, bias, gate, *(start_of(tensor, 0, turns) for tensor in state), beta_use, beta_ignore)
    devidence = None if beta_use is None else grad_evidence
    wanted = [bool(needs >> k & 1) and tensor is not None for k, tensor in enumerate(inputs)]
    wanted[7:] = [want and devidence is not None for want in wanted[7:]]
    shapes = [None if tensor is None else tensor.shape for tensor in inputs]
    dtypes = [call.dtype] * 4 + [torch.float32] * 5
    if call.poses == 0:
        return answer(call, wanted, shapes, [None] * 9, dtypes)
    grads = [None if t is None else t.contiguous() for t in (grad_counts, grad_means, grad_variances)]
    devidence = None if devidence is None else devidence.contiguous()
    counts, means, variances = (tensor.contiguous() for tensor in (counts, means, variances))
    betas = [beta if want else None for beta, want in zip(inputs[7:], wanted[7:], strict=True)]
    own_betas = any(beta is not None and beta.shape[0] > 1 for beta in betas)
    made = Gradients(call, wanted[:4], wanted[4:7], own_betas, each_tile=devidence is not None, turns=turns)
    starts = [[start_of(tensor, k, turns) for tensor in state] for k in range(turns)]
    scored = [start[0] is not None or start[2] is not None for start in starts]
    with current(call.device):
        rest, measured_counts = None, counts
        if grads[1] is not None or grads[2] is not None:
            rest, measured_counts = torch.empty_like(means), torch.empty_like(counts)
            measured = Call(MEASURED, children, weight, bias, gate, parents, window, options, limits)
            for k in range(turns):
                turn = turn_of(starts[k], (None, None), eps, (counts[k], means[k], variances[k]))
                forward(measured, turn, (rest[k], measured_counts[k]), scored[k])
        tile, blocks = call.pose_tile(turns * call.poses)
        slope, bend, offset = torch.empty_like(means), torch.empty_like(means), torch.empty_like(counts)
        call.launch(
            _prepare_kernel,
            blocks,
            grad_counts=grads[0],
            grad_means=grads[1],
            grad_variances=grads[2],
            counts=measured_counts,
            variances=variances,
            rest=rest,
            slope=slope,
            bend=bend,
            offset=offset,
            poses=turns * call.poses,
            eps=eps,
            **tile,
        )
        for k in range(turns):
            given = (slope[k], bend[k], offset[k], means[k], None if devidence is None else devidence[k])
            made.add(turn_of(starts[k], (beta_use, beta_ignore), eps), given, scored[k])
    found = made.all()
    if devidence is None:
        found += [None, None]
    else:
        found += _beta_gradients(call, betas, made.found.get("betas"), devidence, counts)
    return answer(call, wanted, shapes, found, dtypes)
