r"""The ops of the four verbs: what any routing asks of its votes, and the derivatives of that, of any order.

With :math:`F = \sum_{im} r_{im} \langle V_{im}, Y_m \rangle` ``vote_scores`` is :math:`\partial F / \partial r`,
``vote_sums`` :math:`\partial F / \partial Y`, and ``vote_pull`` the derivatives in children, weight and bias. F is
linear in each, so that the derivatives of the three are the three again. The squared verbs do the same with
:math:`H = \sum_{im} r_{im} \sum_{ce} p_m (V_{im} - \mu_m)^2`; second derivatives of those go through the reference.

Beside its gradients (bits 1, 2, 4 of ``needs``) a pull returns, from the same votes, the scores (8), the sums (16) and,
if squared, the square sums (32): the other gradients of F and H. So a verb's gradient is one walk over the votes (if
children, weight and bias need none, one for each other gradient).

Results are in the accumulation dtype, gradients of children, weight and bias in theirs. Workspace of the CPU kernels:
some 100 KB a thread, copies of targets and precisions, and partial sums and gradients, up to 64 MiB each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import accumulation_dtype, check_shape, check_tensor, is_tracing, widen
from fastcaps.made import MADE, MadeVotes
from fastcaps.ops import shared, uniform
from fastcaps.ops.define import NATIVE, define, let_inductor_call, make_differentiable, written
from fastcaps.ops.signature import COUNT, votes_and_sum
from fastcaps.reference import verbs as reference
from fastcaps.votes import VoteInputs, autocast_dtype, without_autocast
from fastcaps.watchers import are_batched, are_plain, is_sharded, is_transformed, is_watched

STEM = "verbs"
_VOTES = written(VoteInputs.__annotations__)
_CALLS = {
    "vote_scores": (f"{_VOTES}, Tensor targets, Tensor? precisions, bool squared", "Tensor"),
    "vote_sums": (f"{_VOTES}, Tensor coefficients, Tensor? means, SymInt power", "Tensor"),
    "vote_pull": (
        f"{_VOTES}, Tensor coefficients, Tensor targets, Tensor? precisions, bool squared, int needs",
        "(Tensor dchildren, Tensor dweight, Tensor dbias, Tensor scores, Tensor sums, Tensor squares)",
    ),
}
_NAMES = {
    "vote_scores": ("targets", "precisions"),
    "vote_sums": ("coefficients", "means"),
    "vote_pull": ("coefficients", "targets", "precisions"),
}


def _check(name: str, votes: VoteInputs, rest: Sequence[Any]) -> None:
    """Raise unless a raw call's arguments fit each other: kernels in Python would broadcast."""
    votes.check()
    if votes.gate is not None:
        raise ValueError("gate must be None: multiply the coefficients by it")
    if name == "vote_sums" and rest[2] not in (1, 2):
        raise ValueError(f"power must be 1 or 2, got {rest[2]}")
    wide = accumulation_dtype(votes.children.dtype)
    like = votes.children.new_empty(0, dtype=wide)
    for key, value in zip(_NAMES[name], rest, strict=False):
        if value is not None:
            check_tensor(key, value, like, False)
            check_shape(key, value, votes.coefficients_shape if key == "coefficients" else votes.poses, "...")


def _runner(name: str) -> Callable[..., Any]:
    """Return an op's kernel, which runs it by the forced backend, or else by the first that can."""

    def run(*arguments: Any) -> Any:
        votes, rest = VoteInputs(*arguments[:COUNT]), arguments[COUNT:]
        if name == "vote_pull":
            *_, squared, needs = rest
            most, others = (63, "scores, sums, squares") if squared else (31, "scores, sums")
            if not 0 <= needs <= most:
                raise ValueError(
                    f"needs must be from 0 to {most}, bits for children, weight, bias, {others}, got {needs}"
                )
        chosen, options = backends.choose(STEM, votes)
        if chosen in NATIVE:  # checks for itself
            return native[name][chosen](*votes, *rest, options)
        _check(name, votes, rest)
        if chosen == "reference":
            with without_autocast(votes.children.device.type):
                found = getattr(reference, name)(votes, *rest)
        else:
            kernel = getattr(backends.triton_kernels(STEM), name)
            found = kernel(votes, *rest, options)
        if name == "vote_pull":
            found = _with_others(found, votes, *rest)
        return found.contiguous() if isinstance(found, Tensor) else tuple(found)

    return run


def _others(coefficients: Tensor, targets: Tensor, precisions: Tensor | None, squared: bool) -> Any:
    """Return what a pull can return beside gradients: ops, and what they take after the votes."""
    means = targets if squared else None
    sums = ("vote_sums", (coefficients, means, 1)), ("vote_sums", (coefficients, means, 2))
    return ("vote_scores", (targets, precisions, squared)), *sums


def _with_others(gradients: Sequence[Tensor], votes: VoteInputs, *rest: Any) -> tuple[Tensor, ...]:
    """Return a pull's results of a kernel that makes gradients only."""
    *given, needs = rest
    others = (
        ops[name](*votes, *arguments) if needs >> k & 1 else given[0].new_empty(0)
        for k, (name, arguments) in enumerate(_others(*given), 3)
    )
    return (*gradients, *others)


# ---- what PyTorch asks for -------------------------------------------------------------------------------------------


def _faker(name: str) -> Callable[..., Any]:
    """Return an op's fake kernel, which returns empty results."""

    def fake(*arguments: Any) -> Any:
        votes, rest = VoteInputs(*arguments[:COUNT]), arguments[COUNT:]
        let_inductor_call(ops[name])
        for key, value in zip((*VoteInputs._fields[:4], *_NAMES[name]), (*votes[:4], *rest), strict=False):
            if value is not None and value.device != votes.children.device:  # such as a meta tensor among others
                raise ValueError(f"{key} must be on {votes.children.device}, got {value.device}")
        children, wide = votes.children, accumulation_dtype(votes.children.dtype)
        if name == "vote_pull":
            shapes: list[Any] = [None if x is None else x.shape for x in votes[:3]]
            shapes += [votes.coefficients_shape, votes.poses, votes.poses]
            wanted = [(0,) if x is None or not rest[-1] >> k & 1 else x for k, x in enumerate(shapes)]
            return tuple(children.new_empty(x, dtype=wide if k > 2 else None) for k, x in enumerate(wanted))
        return children.new_empty(votes.coefficients_shape if name == "vote_scores" else votes.poses, dtype=wide)

    return fake


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.blocks = backends.settings()
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def _saved(ctx: Any) -> tuple[VoteInputs, list[Any]]:
    given = [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
    return VoteInputs(*given[:COUNT]), given[COUNT:]


def _pulled(ctx: Any, votes: VoteInputs, *rest: Any, more: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the gradients of the leading six arguments, and of :func:`_others` what ``more`` asks for.

    One pull makes them all, unless second derivatives need a graph: a pull's other results have none.
    """
    needs, asked = (sum(1 << k for k, bit in enumerate(bits) if bit) for bits in (ctx.needs_input_grad[:3], more))
    together = needs and not torch.is_grad_enabled()
    found: list[Any] = [None] * 6
    if needs:
        found = list(_run("vote_pull", *votes, *rest, needs | asked << 3 if together else needs))
    for k, (name, given) in enumerate(_others(*rest)):
        if more[k] and not together:
            found[3 + k] = _run(name, *votes, *given)
    found = [x if (needs | asked << 3) >> k & 1 else None for k, x in enumerate(found)]
    return found[:3] + [None] * (COUNT - 3), found[3:]


def _scores_backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    votes, (targets, precisions, squared) = _saved(ctx)
    if grad is None:
        return (None,) * (COUNT + 3)
    with backends.under(ctx.blocks):
        more = (False, *ctx.needs_input_grad[COUNT : COUNT + 2])
        gradients, (_, sums, squares) = _pulled(ctx, votes, grad, targets, precisions, squared, more=more)
        if squared and sums is not None:
            sums = -2 * (sums if precisions is None else precisions * sums)
        return (*gradients, sums, squares, None)


def _sums_backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    votes, (coefficients, means, power) = _saved(ctx)
    if grad is None:
        return (None,) * (COUNT + 3)
    needs, squared = ctx.needs_input_grad[COUNT:], power == 2
    about = torch.zeros_like(grad) if means is None else means
    given = (about, grad, True) if squared else (grad, None, False)
    with backends.under(ctx.blocks):
        more = (needs[0], squared and needs[1], False)
        gradients, (dcoefficients, dmeans, _) = _pulled(ctx, votes, coefficients, *given, more=more)
        if dcoefficients is not None and means is not None and not squared:
            apart = (grad * means).sum((-2, -1)).unsqueeze(-2)
            dcoefficients = reference.blocks_of(votes).present(dcoefficients - apart)
        if dmeans is not None:
            dmeans = -2 * grad * dmeans
        elif needs[1]:
            absent = reference.blocks_of(votes).absent
            there = coefficients if absent is None else coefficients.masked_fill(absent[..., None], 0.0)
            dmeans = -grad * there.sum(-2)[..., None, None]
        return (*gradients, dcoefficients, dmeans, None)


def _pull_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of a pull: those of ``sum_im r_im <V'_im, Y_m>``, in which V' is what the cotangents make.

    V' = P' W + P W' + b': votes of which one factor is a cotangent.
    """
    votes, (coefficients, targets, precisions, squared, _) = _saved(ctx)
    if any(grad is not None for grad in grads[3:]):
        raise NotImplementedError("a pull's scores, sums and squares have no gradient: call vote_scores and vote_sums")
    with backends.under(ctx.blocks):
        if squared:
            found = _through_reference(ctx, votes, (coefficients, targets, precisions), grads)
            return (*found[:3], *[None] * (COUNT - 3), *found[3:], None, None)
        dchildren, dweight, dbias = grads[:3]
        found = [None] * COUNT
        dcoefficients = dtargets = None
        parts = []
        if dchildren is not None or dbias is not None:
            moved = torch.zeros_like(votes.children) if dchildren is None else dchildren
            parts.append((0, votes._replace(children=moved, bias=dbias)))
        if dweight is not None:
            parts.append((1, votes._replace(weight=dweight, bias=None)))
        for other, part in parts:
            if ctx.needs_input_grad[COUNT]:
                one = _run("vote_scores", *part, targets, None, False)
                dcoefficients = one if dcoefficients is None else dcoefficients + one
            if ctx.needs_input_grad[COUNT + 1]:
                one = _run("vote_sums", *part, coefficients, None, 1)
                dtargets = one if dtargets is None else dtargets + one
            # P' multiplies W, W' multiplies P: the gradient is that of the factor which is no cotangent
            which = 1 - other
            if ctx.needs_input_grad[which] and votes.weight is not None and (which == 0 or dchildren is not None):
                pulled = _run("vote_pull", *part, coefficients, targets, None, False, 1 << which)
                found[which] = pulled[which]
        return (*found, dcoefficients, dtargets, None, None, None)


def _through_reference(ctx: Any, votes: VoteInputs, rest: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Return the gradients of a squared pull in children, weight, bias, coefficients, targets and precisions."""
    every: list[Any] = [*votes[:3], *rest]
    with torch.enable_grad():
        given: list[Any] = [
            None if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in every
        ]
        parts = [x for x in given[:3] if x is not None]
        fresh = VoteInputs._make((*given[:3], None, votes.parents, votes.window))
        scores = reference.vote_scores(fresh, given[4], given[5], True)
        pulled = torch.autograd.grad(scores, parts, given[3], create_graph=True, materialize_grads=True)
        made = iter(pulled)
        heads = [(next(made), grad) for x, grad in zip(given[:3], grads[:3], strict=True) if x is not None]
        asked = [(x, grad) for x, grad in heads if grad is not None]
        needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[COUNT : COUNT + 3]]
        wanted = [k for k, need in enumerate(needs) if need]
        leaves: list[Any] = [given[k] for k in wanted]
        found: Any = [None] * len(leaves)
        if asked:
            results, heads_of = zip(*asked, strict=True)
            graph = torch.is_grad_enabled()
            found = torch.autograd.grad(results, leaves, heads_of, create_graph=graph, allow_unused=True)
    gradients = dict(zip(wanted, found, strict=True))
    return [gradients.get(k) for k in range(len(every))]


def _flops(name: str) -> Callable[..., int]:
    """Return a function that counts an op's operations: it computes the votes, and uses them once."""

    def count(*shapes: Any, **_: Any) -> int:
        votes, one = votes_and_sum(shapes)
        if name != "vote_pull":
            return votes + one
        others = int(shapes[-1] >> 3).bit_count()  # what it makes of votes beside the gradients
        return (2 + (others > 0)) * votes + (1 + others) * one

    return count


ops: dict[str, Any] = {}
native: dict[str, dict[str, Any]] = {}
for _name, (_takes, _returns) in _CALLS.items():
    ops[_name], native[_name] = define(
        _name,
        *(_takes, _returns, _runner(_name), _faker(_name), _flops(_name)),
        native=(f"{_takes}, int options", _returns),
    )


def _formula(name: str) -> Callable[..., Any]:
    kernel = getattr(reference, name)

    def formula(*arguments: Any) -> Any:
        votes, rest = VoteInputs(*arguments[:COUNT]), arguments[COUNT:]
        found = kernel(votes, *rest)
        return _with_others(found, votes, *rest) if name == "vote_pull" else found

    return formula


_BACKWARDS: tuple[Any, ...] = (_scores_backward, _sums_backward, _pull_backward)
for _name, _backward in zip(_CALLS, _BACKWARDS, strict=True):
    make_differentiable(ops[_name], _backward, _save, _formula(_name), _faker(_name))
vote_scores, vote_sums, vote_pull = ops.values()


def _recorder(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's eager call with a graph, equal to its registered autograd but in a fraction of the time."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        found = run(*arguments)
        _save(ctx, arguments, found)
        return found

    run = _runner(name)
    halves = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    key = {"_compiled_autograd_key": torch.autograd.Function._compiled_autograd_key}
    base = torch.autograd.function._SingleLevelFunction  # not Function: no transform is active here
    recorded: Any = type(name, (base,), halves | key)
    return recorded.apply


_EAGER = {name: (_runner(name), _recorder(name, each)) for name, each in zip(_CALLS, _BACKWARDS, strict=True)}
"""The kernel of each op, and its call with a graph, where nobody must see the op."""


def _run(name: str, *arguments: Any) -> Any:
    """Run an op; without the dispatcher, which takes longer than a small call, where nobody watches."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if is_watched() or not are_plain(tensors) or are_batched(tensors):
        return ops[name](*arguments)
    return _EAGER[name][torch.is_grad_enabled() and any(x.requires_grad for x in tensors)](*arguments)


# ---- what the class Votes calls --------------------------------------------------------------------------------------


def scores(votes: VoteInputs, targets: Tensor, precisions: Tensor | None = None, *, squared: bool = False) -> Tensor:
    """Return what :func:`vote_scores` returns, by the library's products where they are less work."""
    votes = _prepared(votes, targets, precisions)
    if not squared and _by_library(votes):
        return _plainly("vote_scores", shared.agreement, votes, targets)
    return _called("vote_scores", votes, targets, precisions, squared)


def sums(votes: VoteInputs, coefficients: Tensor, means: Tensor | None = None, *, power: int = 1) -> Tensor:
    """Return what :func:`vote_sums` returns, by the library's products where they are less work."""
    votes = _prepared(votes, coefficients, means)
    if power == 1 and means is None and _by_library(votes):
        return _plainly("vote_sums", shared.sums, votes, coefficients)
    return _called("vote_sums", votes, coefficients, means, power)


def even_sums(votes: VoteInputs, coefficient: float, coefficients: Tensor) -> Tensor:
    """Return the sums of votes whose coefficients are all the same: linear in the children, they are a matmul or
    convolution of the library's (:mod:`fastcaps.ops.uniform`), unless a kernel is faster."""
    others = isinstance(votes, MadeVotes) or is_tracing()  # sizes that a compiler leaves free decide nothing
    if not others and uniform.torch_runs_first_iteration(prepared := _prepared(votes)):
        wide: Any = [*widen(votes.children.dtype, *prepared[:3]), *prepared[3:]]

        def formula(votes: VoteInputs) -> Tensor:
            return uniform.uniform_parents(votes, None, None, 0.0, False) * (coefficient * votes.parents)

        return _plainly("vote_sums", formula, VoteInputs._make(wide), runs=shared.EVEN)
    return sums(votes, coefficients)


def _called(name: str, votes: VoteInputs, *rest: Any) -> Tensor:
    """Run an op, or its formula in plain PyTorch where no backend can serve."""
    if isinstance(votes, MadeVotes) or (is_transformed() and not is_tracing()):  # a compiler must see the op
        backends.refuse_unless_reference(STEM)
        return _plainly(name, getattr(reference, name), votes, *rest)
    found: Tensor = _run(name, *votes, *rest)
    return found


def _plainly(
    name: str, formula: Callable[..., Tensor], votes: VoteInputs, *rest: Any, runs: tuple[str, str] = shared.LIBRARY
) -> Tensor:
    """Run a formula in plain PyTorch; ``runs``: what runs, and why.

    Autocast stays on only where a function of the user makes the votes.
    """
    made = isinstance(votes, MadeVotes)
    backends.choose_formula(name, STEM, votes, MADE if made else runs)
    with nullcontext() if made else without_autocast(votes.children.device.type):
        return formula(votes, *rest)


def _prepared(votes: VoteInputs, *rest: Tensor | None) -> VoteInputs:
    """Return the votes in autocast's dtype, where that is on, with one matrix of all parents applied already."""
    if is_sharded((*votes[:3], *rest)):
        raise NotImplementedError("what Votes and their verbs take must be plain tensors, got DTensors")
    if isinstance(votes, MadeVotes):
        return votes
    dtype = autocast_dtype(votes.children.device.type)
    if dtype is not None and votes.children.dtype != torch.float64:
        parts: Any = [None if x is None else x.to(dtype) for x in votes[:3]]
        votes = VoteInputs._make((*parts, *votes[3:]))
    with without_autocast(votes.children.device.type):
        return shared.without_matrix(votes)


def _by_library(votes: VoteInputs) -> bool:
    return not isinstance(votes, MadeVotes) and backends.forced() != "reference" and shared.serves(votes)
