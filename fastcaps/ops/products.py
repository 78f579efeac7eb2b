"""Attention without matrices as the library's products: a child's vote for every parent is its pose.

With X the poses of a sample's children ``[I, K]`` and Q its queries ``[M, K]``, an iteration is two products: the
logits ``A = Q X^T``, and the sums ``S = R X`` of their softmax R. Its backward is three: logits and gains
``[Q; dS] X^T``, the query's gradient ``dQ = dA X``, and the children's ``dX = [dA; R]^T [Q; dS]``.

They read the children in blocks (4 MB in float32), and the backward computes the coefficients again from the stored
queries, so that no tensor grows with children times parents. All is computed in the accumulation dtype. A child with a
gate of 0 has a coefficient of exactly 0, and no NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import accumulation_dtype, is_tracing, widen
from fastcaps.made import MadeVotes
from fastcaps.ops import folded, reverse, shared
from fastcaps.ops.define import declare
from fastcaps.ops.signature import Gradients
from fastcaps.reference.attention import parents_of
from fastcaps.reference.derivatives import inverse_or_zero
from fastcaps.rules import DETACH
from fastcaps.vectors import squash
from fastcaps.votes import (
    POSE,
    SET_WINDOW,
    VoteInputs,
    hidden,
    positions_of,
    without_autocast,
)
from fastcaps.watchers import are_batched, are_plain, is_transformed, is_watched

_BLOCK = 1 << 20  # values of children, or of coefficients, in a block on the CPU: half of it takes 1.1 times as long
_BLOCK_ELSEWHERE = 1 << 26  # each block is some launches
_LARGE, _LONG = 1 << 20, 32  # multiply-adds of a sample and values of a pose from which our forward kernel is slower
_SMALL = 1 << 15  # multiply-adds of a call below which Python takes longer than our backward kernel

_GIVEN = "Tensor children, Tensor? gate, Tensor? prior, Tensor? query"
plain_routing = declare(
    "cuda",
    "plain_routing",
    (f"{_GIVEN}, int parents, float scale, float eps, int iterations", "(Tensor parents, Tensor sums)"),
)
"""The CUDA library's dynamic routing of a set with a prior, ``[I or 1, M]``, and an eps (see squash)."""
plain_routing_reverse = declare(
    "cuda",
    "plain_routing_reverse",
    (
        f"Tensor grad, {_GIVEN}, Tensor sums, float scale, float eps, int needs",
        "(Tensor dchildren, Tensor dgate, Tensor dprior, Tensor dquery)",
    ),
)
"""Its backward; ``needs``: a bit for each result, and DETACH. ``grad``, of the last parents, and dprior: float32."""
_MOST_PARENTS = ((64, 32), (128, 24), (256, 15))  # of so many values at most: what 99 KB of shared memory hold


def serves(votes: VoteInputs, backward: bool) -> bool:
    """Return whether products run a call of attention, or its backward, instead of a backend: of the CPU's kernels
    where products are faster, of the reference (float16 on a CPU, other devices, no native library) always."""
    children = votes[0]
    if not takes(votes):
        return False
    if not backends.on_cpu("attention", children):
        return True
    count, rows, columns = children.shape[-3:]
    each = count * rows * columns * votes.parents
    return each * prod(children.shape[:-3]) >= _SMALL if backward else each >= _LARGE and rows * columns >= _LONG


def takes(votes: VoteInputs) -> bool:
    """Return whether products can run a call, and no kernel must: votes are children's poses, without a bias, and no
    child is copied (a set, or a grid under a 1 x 1 window whose positions, one after another, are samples).

    A GPU's kernels take their calls: nobody has measured products against them.
    """
    children, weight, bias = votes[:3]
    if weight is not None or bias is not None or children.is_cuda or backends.forced():
        return False
    if tuple(votes.window) != SET_WINDOW:
        return False
    lead = [(size, step) for size, step in zip(children.shape[:-3], children.stride(), strict=False) if size != 1]
    return all(step == size * inner for (_, step), (size, inner) in pairwise(lead))


# ---- one iteration ---------------------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Some children of some samples, in the accumulation dtype."""

    samples: slice
    children: slice
    poses: Tensor  # [b, i, K]
    gate: Tensor | None  # [b, 1, i]

    def gated(self, values: Tensor) -> Tensor:
        """Return values of children ``[b, ..., i]`` times their gates, in place; 0 for a gate of 0."""
        return values if self.gate is None else values.mul_(self.gate).masked_fill_(self.gate == 0, 0.0)


def cleaned(votes: VoteInputs) -> VoteInputs:
    """Return votes whose children with a gate of 0 hold neither NaN nor infinity."""
    children, gate = votes.children, votes.gate
    if gate is None:
        return votes
    # a sum takes a tenth of the time of a look at every value; elsewhere reading it would wait for the device
    if children.is_cpu and children.sum(dtype=accumulation_dtype(children.dtype)).isfinite():
        return votes
    return votes._replace(children=children.masked_fill(hidden(children, gate)[..., None, None], 0.0))


def with_one_vote(votes: VoteInputs) -> VoteInputs:
    """Return votes without their matrix, where one is for all parents: it is applied to the children, once.

    Half precision keeps it, for the sake of its dtype, and so do calls that others must see as ops.
    """
    weight = votes[1]
    if isinstance(votes, MadeVotes) or weight is None or weight.stride(1) != 0:
        return votes
    if votes[0].dtype not in (torch.float32, torch.float64) or is_tracing():
        return votes
    if backends.is_explaining():
        return shared.without_matrix(votes)
    if is_watched() or is_transformed() or not are_plain(votes[:2]):
        return votes
    return shared.without_matrix(cleaned(votes))  # else the matrix' gradient could be NaN


def _blocks(votes: VoteInputs, width: int) -> Iterator[_Block]:
    """Yield cleaned children in blocks; ``width`` is the number of coefficients of a child."""
    children, gate = votes.children.flatten(0, -4), None if votes.gate is None else votes.gate.flatten(0, -2)
    batch, count, rows, columns = children.shape
    wide, room = accumulation_dtype(children.dtype), _BLOCK if children.is_cpu else _BLOCK_ELSEWHERE
    most = max(1, room // max(width, rows * columns))  # children
    samples, most = max(1, most // count), min(most, count)
    for b in range(0, batch, samples):
        for i in range(0, count, most):
            here = slice(b, min(b + samples, batch)), slice(i, min(i + most, count))
            poses, gates = children[here].to(wide), None
            if gate is not None:
                gates = gate[here].to(wide).unsqueeze(1)
            yield _Block(*here, poses.flatten(2), gates)


def _coefficients(block: _Block, logits: Tensor | None, start: Tensor | None) -> Tensor:
    """Return ``r`` ``[b, M, i]`` of a block, from its logits ``[b, M, i]``, in place, and the prior ``[M, I or 1]``.

    The bits of torch's softmax depend on the number of threads, those of these steps do not.
    """
    if start is not None:
        start = start[:, block.children] if start.shape[1] > 1 else start
        logits = (
            start.expand(-1, block.poses.shape[1]).repeat(block.poses.shape[0], 1, 1)
            if logits is None
            else logits.add_(start)
        )
    assert logits is not None
    r = logits.sub_(logits.amax(1, keepdim=True)).exp_()
    return r.div_(r.sum(1, keepdim=True))


def _by_parent(prior: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a prior ``[I or 1, M]`` as ``[M, I or 1]`` in the accumulation dtype."""
    return None if prior is None else prior.mT.to(accumulation_dtype(dtype)).contiguous()


def _add_sums(total: Tensor, weights: Tensor, poses: Tensor) -> None:
    """Add ``weights @ poses`` ``[b, M, i] @ [b, i, K]`` to ``total``, with the same bits for any number of threads.

    The library divides a batch among threads, but the sums of a single matrix, too: it is made a batch of two.
    """
    if poses.shape[0] > 1:
        total.baddbmm_(weights, poses)
        return
    half = poses.shape[1] // 2
    if half:
        parts = weights[0, :, : 2 * half].unflatten(1, (2, half)).movedim(1, 0)
        total += torch.bmm(parts, poses[0, : 2 * half].unflatten(0, (2, half))).sum(0)
    if poses.shape[1] % 2:
        total += weights[:, :, -1:] * poses[:, -1:]


def _asked(votes: VoteInputs, query: Tensor | None, scale: float) -> Tensor | None:
    """Return the queries times the scale, ``[B, M, K]``, in the accumulation dtype."""
    return (
        None if query is None else query.flatten(0, -4).flatten(2).to(accumulation_dtype(votes.children.dtype)) * scale
    )


def sums(votes: VoteInputs, query: Tensor | None, prior: Tensor | None, scale: float) -> Tensor:
    """Return ``S_m = sum_i g_i r_im P_i`` ``[*places, M, C, E]`` for ``r = softmax_m(prior_im + scale <Q_m, P_i>)``.

    ``query`` is ``[*places, M, C, E]``, ``prior`` ``[I or 1, M]``; None stands for 0. The sums have the accumulation
    dtype.
    """
    children, parents = votes.children.flatten(0, -4), votes.parents
    batch, _, rows, columns = children.shape
    asked, start = _asked(votes, query, scale), _by_parent(prior, children.dtype)
    wide, even = accumulation_dtype(children.dtype), query is None and prior is None
    if even and votes.gate is None:
        found = children.sum(1, dtype=wide).flatten(1).unsqueeze(1)
    else:
        found = children.new_zeros((batch, 1 if even else parents, rows * columns), dtype=wide)
        for block in _blocks(votes, 2 * parents):
            logits = None if asked is None else torch.bmm(asked[block.samples], block.poses.mT)
            r: Any = block.gate if even else block.gated(_coefficients(block, logits, start))
            _add_sums(found[block.samples], r, block.poses)
    if even:
        found = (found / parents).repeat(1, parents, 1)
    return found.view(*positions_of(votes), parents, rows, columns)


def gradients(
    votes: VoteInputs,
    query: Tensor | None,
    prior: Tensor | None,
    scale: float,
    grad: Tensor,
    needs: Set[str],
    detach: bool = False,
    dchildren: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the gradients of :func:`sums` that ``needs`` names, of children, gate, query and prior.

    ``grad`` is that of its result, in the accumulation dtype. With ``detach`` coefficients are constants. The gradient
    of the children is added to ``dchildren``, if given.
    """
    children, gate, parents, first = votes.children, votes.gate, votes.parents, False
    asked, start, heads = _asked(votes, query, scale), _by_parent(prior, children.dtype), grad.flatten(0, -4).flatten(2)
    if dchildren is None and "children" in needs:
        dchildren, first = children.new_empty(children.shape), True
    dgate = gate.new_empty(gate.shape) if gate is not None and "gate" in needs else None
    dquery = None if query is None or "query" not in needs else torch.zeros_like(heads)
    dprior = None if start is None or "prior" not in needs else torch.zeros_like(start)
    even = asked is None and start is None
    if even:  # all parents have one sum
        heads = heads.sum(1, keepdim=True) / parents
    flows = not (even or detach)
    needs_gains = flows or dgate is not None
    rows = torch.cat([x for x in (asked, heads if needs_gains else None) if x is not None] or [heads], 1)
    turned = rows if asked is None else torch.cat([heads, asked], 1)
    for block in _blocks(votes, 2 * rows.shape[1]):
        here, (size, count, _) = block.samples, block.poses.shape
        both = torch.bmm(rows[here], block.poses.mT) if asked is not None or needs_gains else None
        logits = None if asked is None or both is None else both[:, :parents]
        r = block.poses.new_ones((size, 1, count)) if even else _coefficients(block, logits, start)
        weights, targets = r, heads[here]
        if both is not None and needs_gains:
            gains = both[:, -heads.shape[1] :]
            mean = (r * gains).sum(1, keepdim=True)
            if dgate is not None:
                broken = (block.gate == 0) & ~mean.isfinite()
                dgate.flatten(0, -2)[here, block.children] = mean.masked_fill(broken, 0.0).squeeze(1)
        if both is not None and flows:
            gains.sub_(mean).mul_(r)  # the logits' gradient
            if asked is None:
                block.gated(gains)
            else:
                weights, targets = both, turned[here]
        block.gated(weights)
        if dquery is not None and flows:
            _add_sums(dquery[here], gains, block.poses)
        if dprior is not None and flows:
            many = dprior.shape[1] > 1
            part = dprior[:, block.children] if many else dprior
            part += gains.sum(0) if many else gains.sum((0, 2)).unsqueeze(1)
        if dchildren is None:
            continue
        out = dchildren.flatten(0, -4)[here, block.children].flatten(2)
        if out.dtype != rows.dtype:
            product = torch.bmm(weights.mT, targets)
            out.copy_(product if first else product + out)
        elif first:
            torch.bmm(weights.mT, targets, out=out)
        else:
            out.baddbmm_(weights.mT, targets)
    found: dict[str, Any] = {"children": dchildren, "gate": dgate, "prior": None if dprior is None else dprior.mT}
    found["query"] = None if dquery is None else (dquery * scale).view(grad.shape)
    return {name: found[name] for name in needs}


# ---- all iterations --------------------------------------------------------------------------------------------------


def attention_routing(votes: VoteInputs, own: Any) -> tuple[Tensor, Tensor]:
    """Return parents and S of one iteration, as :func:`fastcaps.reference.attention_routing` does."""
    if votes.weight is None:
        total = sums(votes, own.query, None, own.scale)
    else:
        total = folded.sums(votes, own.query, own.scale)
    dtype = votes.children.dtype
    norm_weight, norm_bias = widen(dtype, own.norm_weight, own.norm_bias)
    parents = parents_of(total, norm_weight, norm_bias, own.eps, own.rule)
    return parents.to(dtype, copy=parents is total), total.unsqueeze(0)


@dataclass
class Reverse(reverse.Reverse):
    """A backward by products: all iterations add to one gradient of the children."""

    prior: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.votes.weight is None:
            self.votes = cleaned(self.votes)

    def ask(
        self, k: int | None, heads: Gradients, rest: Any, own: Iterable[str] = (), detach: bool = False
    ) -> dict[str, Tensor]:
        query, grad, found = rest.query, heads[0], {}
        assert k is not None and grad is not None
        query, grad = None if query is None or len(query) < -k else query[k], grad[0]
        if rest.sums is not None:
            grad, *affine = _layer_norm_backward(grad, rest.sums[k], rest.norm_weight, rest.eps)
            found = dict(zip(("norm_weight", "norm_bias"), affine, strict=True))
        wanted, total = {*own, *self.summed} - found.keys(), self.gradients
        before = total.get("children")
        with without_autocast(grad.device.type):  # a user's, around the backward alone
            if self.votes.weight is None:
                found |= gradients(self.votes, query, self.prior, rest.scale, grad, wanted, detach, before)
            else:
                found |= folded.gradients(self.votes, query, rest.scale, grad, wanted, detach, before)
        for name in self.summed:
            if name in total and name != "children":
                found[name] = total[name] + found[name]
            total[name] = found[name]
        return found


def _layer_norm_backward(
    grad: Tensor, sums: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of S, weight and bias of :func:`fastcaps.reference.attention.layer_norm`."""
    flat, dparents, (wide,) = sums.flatten(-2), grad.flatten(-2), widen(sums.dtype, weight)
    centred = flat - flat.mean(-1, keepdim=True)
    centred -= centred.mean(-1, keepdim=True)
    inverse = inverse_or_zero((centred.square().mean(-1, keepdim=True) + eps).sqrt())
    unit, dunit = centred * inverse, dparents if wide is None else dparents * wide
    dflat = dunit - dunit.mean(-1, keepdim=True) - unit * (dunit * unit).mean(-1, keepdim=True)
    every = [*range(flat.dim() - 1)]
    return (dflat * inverse).view_as(grad), (dparents * unit).sum(every), dparents.sum(every)


# ---- dynamic routing with a prior or an eps --------------------------------------------------------------------------


Formula = Callable[[VoteInputs, Tensor | None], Tensor]


class _Dynamic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routing: Any, formula: Formula, own: Any, parents: int, eps: float, *tensors: Any) -> Tensor:
        children, gate, prior = tensors
        ctx.given = routing, formula, own, parents, eps
        if _is_on_gpu(children):
            routed, history = plain_routing(children, gate, prior, None, parents, 1.0, eps, own.iterations)
            ctx.save_for_backward(*tensors, history)
            return routed
        votes = cleaned(VoteInputs(children, None, None, gate, parents, SET_WINDOW))
        query: Any = None
        every: list[Tensor] = []
        step: Any = None
        for _ in range(own.iterations):
            query = step if query is None else query + step
            every.append(sums(votes, query, prior, 1.0))
            step = squash(every[-1], POSE, eps).to(children.dtype)
        ctx.save_for_backward(*tensors, torch.stack(every))
        return step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (routing, formula, own, parents, eps), (*tensors, history) = ctx.given, ctx.saved_tensors
        needed, names = ctx.needs_input_grad[5:], ("children", "gate", "prior")
        found: dict[str, Any]
        graph = torch.is_grad_enabled()
        if by_formula := graph or are_batched([grad]):
            with torch.enable_grad():
                # new nodes, at which the derivative stops
                tensors = [x.view_as(x) if x is not None and x.requires_grad else x for x in tensors]
        children, gate, prior = tensors
        votes = VoteInputs(children, None, None, gate, parents, SET_WINDOW)
        if by_formula:
            with torch.enable_grad():
                made = formula(votes, prior)
            leaves = {name: x for name, x, want in zip(names, tensors, needed, strict=True) if want}
            every: Any = torch.autograd.grad(made, [*leaves.values()], grad, create_graph=graph, allow_unused=True)
            found = dict(zip(leaves, every, strict=True))
        elif _is_on_gpu(children):
            bits = sum(1 << k for k, want in enumerate(needed) if want) | (DETACH if own.detach else 0)
            *every, _ = plain_routing_reverse(grad.float(), children, gate, prior, None, history, 1.0, eps, bits)
            found = {name: x for name, x, want in zip(names, every, needed, strict=True) if want}
            if found.get("prior") is not None:
                found["prior"] = found["prior"].to(prior.dtype)
        else:
            needs = {name for name, want in zip(names, needed, strict=True) if want}
            backward = Reverse(routing, routing.run_backward, votes, own.iterations, needs, False, prior=prior)
            routing.backward(backward, (grad,), votes, own, (history,), eps)
            found = backward.gradients
        return (None,) * 5 + tuple(found.get(name) for name in names)


def takes_dynamic(votes: VoteInputs, prior: Tensor | None) -> bool:
    """Return whether :func:`dynamic` takes a call: no compiler, autocast, transform or subclass must see its ops."""
    if isinstance(votes, MadeVotes) or not (takes(votes) or _takes_on_gpu(votes)):
        return False
    if backends.is_explaining():  # of the call as it runs without an explanation
        return True
    return are_plain((votes[0], votes[3], prior)) and not (is_watched() or is_transformed())


def _is_on_gpu(children: Tensor) -> bool:
    return children.is_cuda


def _takes_on_gpu(votes: VoteInputs) -> bool:
    """Return whether :data:`plain_routing` takes a call of dynamic routing."""
    values = prod(votes.children.shape[-2:])
    if votes.weight is not None or votes.bias is not None or not (_is_on_gpu(votes.children) and votes.is_set):
        return False
    fits = any(values <= most and votes.parents <= parents for most, parents in _MOST_PARENTS)
    return fits and backends.choose("attention", votes)[0] == "cuda"


def dynamic(routing: Any, votes: VoteInputs, own: Any, prior: Tensor | None, eps: float, formula: Formula) -> Tensor:
    """Return the parents ``[*places, M, C, E]`` of dynamic routing from a prior ``[I or 1, M]``.

    ``routing`` is the attention op, ``own`` its arguments without a query, ``eps`` that of squash. Second derivatives
    go through ``formula(votes, prior)``, which returns the same.
    """
    runs = shared.WHOLE if _is_on_gpu(votes.children) else shared.LIBRARY
    backends.choose_formula(routing.name, routing.stem, votes, runs)
    if backends.is_explaining():
        found: Tensor = routing.fakes(votes, own)[0]
        return found
    tensors = votes.children, votes.gate, prior
    found = _Dynamic.apply(routing, formula, own, votes.parents, eps, *tensors)
    return found
