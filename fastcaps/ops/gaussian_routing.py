"""The op of routings whose parents are Gaussians: EM routing, and Heinsen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.ops.checks import check, check_tensors, frame_of
from fastcaps.ops.gaussian import GAUSSIAN, check_gaussian
from fastcaps.ops.registration import Grads
from fastcaps.ops.routing import POSE, Reverse, Routing
from fastcaps.reference import accumulation_dtype

__all__ = ["GAUSSIAN_ROUTING", "gaussian_routing"]

EM, HEINSEN, K_MEANS = 0, 1, 2
"""Values of ``model``."""

TENSORS = ("children", "weight", "bias", "gate", "beta_a", "beta_b")


def _check(given: Any) -> None:
    check(given.model in (EM, HEINSEN, K_MEANS), f"model must be 0, 1 or 2, got {given.model}")
    check(len(given.schedule) >= 1, "schedule must have a number for every turn, at least one")
    use, ignore = (None, None) if given.model == EM else (given.beta_a, given.beta_b)
    state = dict.fromkeys(("mean", "variance", "log_weight"))
    frame = check_gaussian(SimpleNamespace(**vars(given), **state, beta_use=use, beta_ignore=ignore))
    if given.model == EM:
        check_tensors(given, True, dict.fromkeys(("beta_a", "beta_b"), (frame.parents,)))


def _loop(
    run: Callable[..., Any],
    children: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    beta_a: Tensor,
    beta_b: Tensor,
    schedule: Sequence[float],
    model: int,
    eps: float,
    window: Sequence[int],
) -> tuple[Tensor, ...]:
    betas = (None, None) if model == EM else (beta_a, beta_b)
    state: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    history: list[tuple[Tensor, ...]] = []
    score = mean = variance = children
    for inverse_temperature in schedule:
        counts, mean, narrow, evidence = run(children, weight, *state, bias, gate, *betas, eps, window)
        variance = narrow + eps
        log_sigma = 0.5 * variance.log().sum(POSE)
        if model == EM:
            numbers = variance.shape[-2] * variance.shape[-1]
            score = inverse_temperature * (beta_b - (numbers * beta_a + log_sigma) * counts)
        else:
            score = evidence
        history.append(tuple(tensor.detach() for tensor in (counts, mean, narrow, score)))
        log_weight = F.logsigmoid(score)
        state = (mean, None, log_weight) if model == K_MEANS else (mean, variance, log_weight - log_sigma)
    # results must not be another result's memory, nor a pass's: the history is made of copies
    return score, mean, variance, *(torch.stack(turns) for turns in zip(*history, strict=True))


def _fake(given: Any) -> tuple[Tensor, ...]:
    frame, turns = frame_of(given.children, given.weight, 0, given.window), len(given.schedule)
    shapes: list[tuple[Any, ...]] = [frame.numbers, frame.poses, frame.poses]
    shapes += [(turns, *shape) for shape in (frame.numbers, frame.poses, frame.poses, frame.numbers)]
    dtype = accumulation_dtype(given.children.dtype)
    return tuple(given.children.new_empty(shape, dtype=dtype) for shape in shapes)


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of what there is."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _stacked(turns: Sequence[Tensor | None]) -> Tensor | None:
    """Return a gradient of all turns, 0 in those that have none; None if no turn has it."""
    like = next((turn for turn in turns if turn is not None), None)
    return None if like is None else torch.stack([torch.zeros_like(like) if t is None else t for t in turns])


def _backward(
    run: Callable[..., Any],
    many: Callable[..., Any] | None,
    grads: Grads,
    tensors: Grads,
    outputs: Sequence[Tensor],
    settings: tuple[Any, ...],
    needed: Sequence[bool],
) -> Grads:
    schedule, model, eps, window = settings
    children, weight, bias, gate, beta_a, beta_b = tensors
    assert beta_a is not None
    counts, means, narrow, scores = outputs[3:]
    numbers = means.shape[-2] * means.shape[-1]
    betas = (None, None) if model == EM else (beta_a, beta_b)
    variances = narrow + eps
    left: tuple[Tensor | None, ...]
    log_sigma = 0.5 * variances.log().sum(POSE)
    log_weights = F.logsigmoid(scores)
    # what a turn leaves to the next, and the bits of its gradients
    left, own = (means, variances, log_weights - log_sigma), 4 | 8 | 16
    if model == K_MEANS:
        left, own = (means, None, log_weights), 4 | 16

    each: list[tuple[Tensor | None, ...]] = []  # the gradients of what the passes return, from the turn asked on

    def arguments(turn: int | slice) -> Sequence[Any]:
        given: Sequence[Tensor | None] = each[0]
        before: int | slice | None = None
        if isinstance(turn, slice):
            given, before = [_stacked(kind) for kind in zip(*each, strict=True)], slice(-1)
            each.clear()  # the gradients are there once more
        elif turn > 0:
            before = turn - 1
        state = (None if before is None or tensor is None else tensor[before] for tensor in left)
        kept = (children, weight, *state, bias, gate, *betas, counts[turn], means[turn], narrow[turn])
        return (*given, *kept, eps, window)

    d_score, d_mean, d_variance = grads
    if model != EM and d_score is None and len(schedule) > 1:
        d_score = torch.zeros_like(scores[-1])  # the betas count for the turns before
    places = (0, 1, 5, 6, 7, 8)  # of the routing's tensors in the pass
    reached = 4 if model == EM or d_score is None else 6  # the betas of a pass by its evidence alone
    needs = sum(1 << place for place, need in zip(places[:reached], needed, strict=False) if need)
    reverse = Reverse(run, many if len(schedule) > 1 else None, arguments, needs)
    heats: list[Tensor | None] = []
    d_log_sigma: Tensor | None = None
    for turn in reversed(range(len(schedule))):
        heat = d_counts = None
        if model == EM and d_score is not None:
            heat = schedule[turn] * d_score
            d_log_sigma = _plus(d_log_sigma, -heat * counts[turn])
            d_counts = -heat * (numbers * beta_a + log_sigma[turn])
        if d_log_sigma is not None:
            d_variance = _plus(d_variance, 0.5 * d_log_sigma[..., None, None] / variances[turn])
        heats.insert(0, heat)
        each.insert(0, (d_counts, d_mean, d_variance, None if model == EM else d_score))
        found = reverse.ask(turn, own if turn > 0 else 0)
        if turn > 0:
            d_mean, d_variance, d_log_weight = found[2], None if model == K_MEANS else found[3], found[4]
            d_score = d_log_weight * (-scores[turn - 1]).sigmoid()
            d_log_sigma = None if model == K_MEANS else -d_log_weight

    sums = reverse.sums()
    gradients = [sums.get(place) for place in places]
    if (heat := _stacked(heats)) is not None:
        gradients[4:] = -numbers * (heat * counts).sum((0, 1, 2, 3)), heat.sum((0, 1, 2, 3))
    return gradients


GAUSSIAN_ROUTING = Routing(
    name="gaussian_routing",
    schema="(Tensor children, Tensor weight, Tensor? bias, Tensor? gate, Tensor beta_a, Tensor beta_b, "
    "float[] schedule, int model, float eps, int[] window) -> (Tensor scores, Tensor means, Tensor variances, "
    "Tensor counts, Tensor all_means, Tensor all_variances, Tensor all_scores)",
    one=GAUSSIAN,
    tensors=TENSORS,
    loop=_loop,
    checks=_check,
    fakes=_fake,
    results=3,
    backward=_backward,
    wide=frozenset(("beta_a", "beta_b")),
)
GAUSSIAN_ROUTING.define()
gaussian_routing = torch.ops.fastcaps.gaussian_routing.default
