"""Gaussian routing in Triton, host side: the ops' arguments and results, see :mod:`fastcaps.ops`.

Its algebra: ``gaussian_kernels.py``; what all routings share, workspace included: ``launches.py``. Backward keeps three
further parents tensors for each iteration, and 2 * I * M values if every child has its own betas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastcaps.reference.gaussian import log_sigmas
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs, windows

from .attention import one_iteration, start_of
from .call import Call, Routing, current, table_strides
from .gaussian_kernels import GAUSSIAN, REST, Gaussian, _prepare_kernel
from .launches import Answer, Gradients, forward, shapes_of
from .schedule import LIMITS, Limits, Traits

ROUTING = Routing(
    "gaussian",
    GAUSSIAN,
    sums=("pose", "pose", "each", "each"),
    gradients=("pose", "pose", "each"),
    # small differences from means and between votes must keep their digits
    traits=Traits(forward=2, products=4, backward=2, pose=8, same_votes=True),
)
FIRST = replace(ROUTING, sums=(*ROUTING.sums, "pose"))
"""An iteration without means, which also stores their base."""
MEASURED = replace(ROUTING, name="rest", algebra=REST, sums=("pose", "each"))
"""Measures the rest and the count of an iteration."""
refusal = ROUTING.refusal


def iteration_of(
    state: Sequence[Tensor | None],
    betas: Sequence[Tensor | None],
    eps: float,
    results: Sequence[Tensor | None] = (None, None, None),
) -> Gaussian:
    """Return the tensors and numbers of an iteration, as the kernels take them."""
    mean, variance, log_weight = state
    if variance is not None and eps == 0.0:  # a variance of 0 has no effect: 1 / (2 variance) must be 0
        variance = variance.masked_fill(variance == 0.0, torch.inf)
    given = (mean, None if mean is None else variance, log_weight, *betas, *results)
    tensors = [None if tensor is None else tensor.contiguous() for tensor in given]
    strides = (*table_strides(tensors[3]), *table_strides(tensors[4]))
    return Gaussian(*tensors, eps, *strides)  # type: ignore[arg-type, call-arg]


def gaussian_routing(votes: VoteInputs, own: Any, options: int, limits: Limits = LIMITS) -> tuple[Tensor, ...]:
    """Route one iteration: parents are Gaussians that explain the votes.

    The same input gives the same bits whatever the options. ``limits``: what a program may hold; tests make it small.
    Returns scores, means, variances with eps; then, iterations leading, counts, means, variances without it, scores.
    """
    one_iteration(len(own.temperatures))
    (mean, variance, log_weight, beta_use, beta_ignore), rule, eps = own[:5], own.rule, own.eps
    first = mean is None
    call = Call(FIRST if first else ROUTING, votes, options, limits)
    each, pose = (1, *call.shape[:-2]), (1, *call.shape)
    betas = (None, None) if rule == Rule.EM else (beta_use, beta_ignore)
    counts, means, variances, scores = call.empty(*each), call.empty(*pose), call.empty(*pose), call.zeros(*each)
    if call.poses:
        with current(call.device):
            iteration = iteration_of((mean, variance, log_weight), betas, eps)
            forward(call, iteration, (counts, means, variances, scores), not first or log_weight is not None)
    wide = variances + eps
    if rule == Rule.EM and beta_use is not None and beta_ignore is not None:
        cost = (call.pose[0] * call.pose[2] * beta_use + log_sigmas(wide)) * counts
        scores = own.temperatures[0] * (beta_ignore - cost)
    return scores[0].clone(), means[0].clone(), wide[0], counts, means, variances, scores


def _total_gate(call: Call) -> Tensor:
    """Return the sum of the gates that each position sees, ``[B | 1, Ho, Wo]``; children that are there have 1."""
    gate = call.tensors[3]
    if gate is None:
        total = torch.full((1, call.sizes["H"], call.sizes["W"]), float(call.types), device=call.device)
    else:
        total = gate.to(torch.float32).sum(-1)
    return windows(total.unsqueeze(-1), call.window).sum(-1)


def _beta_gradients(
    call: Call, betas: Sequence[Tensor | None], found: Tensor | None, devidence: Tensor, counts: Tensor
) -> list[Tensor | None]:
    """Return dbeta_use and dbeta_ignore: from the kernels' sums if every child has its own, else from the counts.

    ``sum_i w_im = n_m``: for betas that children share the counts are enough.
    """
    gradients: list[Tensor | None] = []
    for k, beta in enumerate(betas):
        if beta is None:
            gradients.append(None)
        elif beta.shape[0] > 1:
            gradients.append(None if found is None else found[k].sum_to_size(beta.shape))
        else:
            used = counts if k == 0 else counts - _total_gate(call).reshape(-1, *call.shape[1:-3], 1)
            gradients.append((devidence * used).flatten(0, -2).sum(0, keepdim=True).sum_to_size(beta.shape))
    return gradients


def gaussian_routing_backward(
    heads: Sequence[Tensor | None], votes: VoteInputs, own: Any, needs: int, options: int, limits: Limits = LIMITS
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight, dbias, dgate, dmean, dvariance, dlog_weight, dbeta_use, dbeta_ignore of T iterations.

    They are summed over iterations. If means or variances have a gradient, a sweep first measures what counts and means
    lost to rounding; it skips tiles without a tight parent (see :mod:`.gaussian_kernels`). Option 1: as for
    :func:`fastcaps.triton_kernels.attention.attention_routing_backward`.
    """
    mean, variance, log_weight, beta_use, beta_ignore, counts, means, variances, eps = own
    iterations = len(counts)
    call = Call(ROUTING, votes, options, limits)
    state = (mean, None if mean is None else variance, log_weight)
    devidence = None if beta_use is None else heads[3]
    shapes = shapes_of(*votes[:4], *(start_of(tensor, 0, iterations) for tensor in state), beta_use, beta_ignore)
    answer = Answer(call, shapes, needs, wide=5)
    wanted = answer.wanted
    wanted[7:] = [want and devidence is not None for want in wanted[7:]]
    if call.poses == 0:
        return answer.of([None] * 9)
    grads = [None if t is None else t.contiguous() for t in heads[:3]]
    devidence = None if devidence is None else devidence.contiguous()
    counts, means, variances = (tensor.contiguous() for tensor in (counts, means, variances))
    betas = [beta if want else None for beta, want in zip((beta_use, beta_ignore), wanted[7:], strict=True)]
    own_betas = any(beta is not None and beta.shape[0] > 1 for beta in betas)
    made = Gradients(call, wanted[:4], wanted[4:7], own_betas, each_tile=devidence is not None, iterations=iterations)
    starts = [[start_of(tensor, k, iterations) for tensor in state] for k in range(iterations)]
    scored = [start[0] is not None or start[2] is not None for start in starts]
    with current(call.device):
        slack, measured_counts = None, counts
        if grads[1] is not None or grads[2] is not None:
            slack, measured_counts = torch.empty_like(means), torch.empty_like(counts)
            measured = Call(MEASURED, votes, options, limits)
            for k in range(iterations):
                iteration = iteration_of(starts[k], (None, None), eps, (counts[k], means[k], variances[k]))
                forward(measured, iteration, (slack[k], measured_counts[k]), scored[k])
        tile, blocks = call.pose_tile(iterations * call.poses)
        slope, bend, offset = torch.empty_like(means), torch.empty_like(means), torch.empty_like(counts)
        call.launch(
            _prepare_kernel,
            blocks,
            grad_counts=grads[0],
            grad_means=grads[1],
            grad_variances=grads[2],
            counts=measured_counts,
            variances=variances,
            rest=slack,
            slope=slope,
            bend=bend,
            offset=offset,
            poses=iterations * call.poses,
            eps=eps,
            **tile,
        )
        for k in range(iterations):
            given = (slope[k], bend[k], offset[k], means[k], None if devidence is None else devidence[k])
            made.add(iteration_of(starts[k], (beta_use, beta_ignore), eps), given, scored[k])
    found = made.all()
    if devidence is None:
        found += [None, None]
    else:
        found += _beta_gradients(call, betas, made.found.get("betas"), devidence, counts)
    return answer.of(found)
