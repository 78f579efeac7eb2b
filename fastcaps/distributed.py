"""Routings of DTensors: the part of each process, the communication between them, and PyTorch's rules for the ops.

The border (:class:`fastcaps.ops.Routing`) passes calls with a :class:`torch.distributed.tensor.DTensor` among children,
weights or parents to this module. Each dimension of the mesh cuts one of three axes:

*batch*
    Every process routes its own samples, without communication.
*children*
    Every process sums over its own children. Each iteration communicates the parents' state: S for attention; S and two
    values for each parent for pooling, whose softmax over the children is merged by its log-sum-exp; counts and means,
    then variances around the joint mean (Chan's formula), for Gaussians.
*parents*
    Every process has its own parents. If parents compete, each iteration communicates the softmax's log-sum-exp, two
    values per child. A process's share of a child's softmax then multiplies the child's gate, so that the same kernels
    can run. Pooling, whose parents do not compete, does not communicate.

Votes are never communicated. The backward communicates the same tensors in the other direction.

Tensors that are not DTensors, such as a layer's own parameters, must be the same on every process, and their gradients
are, too. Importing this module also registers PyTorch's rules of the ops, for raw calls of ``torch.ops.fastcaps`` and
for compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fastcaps import backends, reference
from fastcaps.checks import accumulation_dtype, refuse_second_derivatives, widen
from fastcaps.ops import Attention, Gaussian, Pooling, Routing, attention_routing, gaussian_routing, pooling_routing
from fastcaps.ops.sharding import AXES, cuts_of, lying
from fastcaps.reference.derivatives import inverse_or_zero
from fastcaps.reference.gaussian import benefits, logits_of
from fastcaps.reference.verbs import VoteBlocks, blocks_of
from fastcaps.rules import DETACH, Rule
from fastcaps.votes import VoteInputs, hidden

# ---- calls -----------------------------------------------------------------------------------------------------------


def route(routing: Routing, votes: VoteInputs, own: Any) -> tuple[Any, ...]:
    """Return the op's results for a call with DTensors, as DTensors, with None for the history of iterations.

    Parents are sharded as the batch and the parents are, and the same on all processes that share the children.
    ValueError for shards that cannot be routed, such as a process without children.
    """
    layout = Layout(routing, votes, own)
    local, local_own = routing.given(layout.local())
    with torch.autocast(local.children.device.type, enabled=False):
        if "children" in layout.axes or ("parents" in layout.axes and routing.competing):
            results = routing.iterate(partial(_RUN[routing.stem], layout), local, local_own)[-1]
        else:
            results = routing(local, local_own)
    poses, place = votes.poses, local.children.dim() - 3
    finals = results[: len(routing.finals)]
    finals = [layout.wrap(x, poses if x.dim() == len(poses) else votes.parent_values_shape, place) for x in finals]
    for x in finals:
        if x.requires_grad:
            # PyTorch's backwards of shards lose the graph, so those of this module do not have one
            x.register_hook(lambda _: refuse_second_derivatives("A routing of DTensors"))
    shares = layout.wrap(results[-1], votes.coefficients_shape, place + 1, place) if own.coefficients else None
    return (*finals, *(None for _ in routing.history), shares)


class Layout:
    """The layout of a call on a mesh: which axis each of the mesh's dimensions cuts, if any."""

    def __init__(self, routing: Routing, votes: VoteInputs, own: Any) -> None:
        self.routing, self.parents = routing, votes.parents
        self.given = given = dict(zip(routing.names, (*votes, *own), strict=True))
        spread = {name: x for name, x in given.items() if isinstance(x, DTensor)}
        self.mesh = next(iter(spread.values())).device_mesh
        for name, x in spread.items():
            if x.device_mesh != self.mesh:
                raise ValueError(f"{name} must be on the mesh of the others, {self.mesh}, got {x.device_mesh}")
        self.cuts = {axis: cuts_of(axis, given, routing) for axis in AXES}
        self.axes = [self._axis(k, spread) for k in range(self.mesh.ndim)]
        self.whole = [Replicate() for _ in self.axes]
        self._check(given)

    def _axis(self, k: int, spread: dict[str, Any]) -> str | None:
        """Return the axis that the mesh's k-th dimension cuts: of the children, or else of the first other tensor."""
        for name, x in spread.items():  # in the op's order: children first
            placement = x.placements[k]
            if isinstance(placement, Shard):
                for axis in AXES:
                    if self.cuts[axis].get(name) == placement.dim % x.dim():
                        return axis
                if name == "children":
                    raise ValueError(
                        f"children must be sharded over the batch or the children (not over positions of a grid), "
                        f"got {placement} of channels last, {list(x.shape)}"
                    )
        return None

    def _check(self, given: dict[str, Any]) -> None:
        """Raise if a process has a part that it cannot route."""
        votes = VoteInputs(*(given[name] for name in VoteInputs._fields))
        types, groups = votes.children.shape[-3], votes.groups
        if "parents" in self.axes:
            if not votes.is_set and self.routing.competing:
                raise ValueError("parents must be whole if the children are a grid: shard the batch or the children")
            self._parts("parents", votes.parents)
        if "children" not in self.axes:
            return
        parts = self._parts("children", types)
        if any(part % groups for part in parts) and groups != types:
            raise ValueError(
                f"weight [G, ...] must have a G of {types}, a matrix for every child that is sharded, or one that "
                f"divides the children of each process, {parts}; got {groups}"
            )
        for name in ("bias", "beta_use", "beta_ignore"):
            table = given.get(name)
            if table is not None and table.dim() > 1 and table.shape[0] not in (1, types):
                raise ValueError(f"{name} must have 1 row, or one for each of {types} children, got {table.shape[0]}")

    def _parts(self, axis: str, count: int) -> list[int]:
        """Return how many of ``count`` children or parents each process has; raise if one has none."""
        parts = [count]
        for size in (self.mesh.size(k) for k, each in enumerate(self.axes) if each == axis):
            parts = [_chunk(part, size, k) for part in parts for k in range(size)]
        if min(parts) < 1:
            raise ValueError(f"{axis} must be >= 1 on every process, got {count}, which PyTorch splits into {parts}")
        return parts

    def placements(self, name: str) -> list[Placement]:
        """Return the required placements of an argument."""
        return [lying(None if axis is None else self.cuts[axis].get(name)) for axis in self.axes]

    def gradients(self, name: str, rule: int) -> list[Placement]:
        """Return the placements of an argument's gradient, which is partial if a whole argument is used with shards.

        If children are cut, arguments used between two iterations apply to the joint sums, which are the same
        everywhere.
        """
        between = name in (*self.routing.state, "norm_weight", "norm_bias") or (rule == Rule.EM and "beta" in name)
        same = (None, "children") if between else (None,)
        found = zip(self.placements(name), self.axes, strict=True)
        return [at if isinstance(at, Shard) or axis in same else Partial() for at, axis in found]

    def local(self) -> list[Any]:
        """Return a process's part of a call, as plain tensors, in autocast's dtype."""
        local = dict(self.given)
        constant = self.routing.constant if local.get("detach") else ()
        for name in self.routing.tensors:
            x = local[name]
            if x is None:
                continue
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, self.mesh, self.whole, run_check=False)
            if name in constant:  # it gets no gradient, which torch's backward of a redistribution does not support
                x = x.detach()
            placements = self.placements(name)
            if list(x.placements) != placements:
                x = x.redistribute(placements=placements)
            local[name] = x.to_local(grad_placements=self.gradients(name, local["rule"]))
        parents, at = self.parents, self.mesh.get_coordinate() or [0] * self.mesh.ndim
        for k, axis in enumerate(self.axes):
            if axis == "parents":
                parents = _chunk(parents, self.mesh.size(k), at[k])
        local["parents"] = parents
        return self.routing.cast(list(local.values()))

    def wrap(self, local: Tensor, shape: Sequence[int], parents: int, children: int | None = None) -> Tensor:
        """Return a process's part of a result as a DTensor, given its dimensions of parents and children."""
        dims = {None: None, "batch": 0, "parents": parents, "children": children}
        placements = [lying(dims[axis]) for axis in self.axes]
        stride = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
        size = torch.Size(shape)
        return DTensor.from_local(local.contiguous(), self.mesh, placements, run_check=False, shape=size, stride=stride)

    # ---- communication -----------------------------------------------------------------------------------------------

    def over(self, axis: str, one: Placement) -> list[Placement]:
        """Return placements ``one`` along the mesh's dimensions that cut an axis, and whole along the others."""
        return [one if each == axis else Replicate() for each in self.axes]

    def joined(self, axis: str, *parts: Tensor, by: str = "sum") -> list[Tensor]:
        """Return the sums of tensors over the processes that share an axis, by one message.

        All processes continue in the same way with them, so their gradients need no communication.
        """
        if axis not in self.axes:
            return list(parts)
        whole = DTensor.from_local(_packed(parts), self.mesh, self.over(axis, Partial(by)), run_check=False)
        return _unpacked(whole.redistribute(placements=self.whole).to_local(), parts)

    def entered(self, axis: str, *same: Any) -> list[Any]:
        """Return tensors that are the same on all processes that share an axis, with gradients summed over these."""
        given = [x for x in same if x is not None]
        if axis not in self.axes or not any(x.requires_grad for x in given):
            return list(same)
        whole = DTensor.from_local(_packed(given), self.mesh, self.whole, run_check=False)
        found = iter(_unpacked(whole.to_local(grad_placements=self.over(axis, Partial())), given))
        return [None if x is None else next(found) for x in same]

    def share(self, votes: VoteInputs, logits: Callable[[VoteBlocks], Tensor] | None) -> Tensor | None:
        """Return the share of a process's own parents in each child's softmax over all parents, ``[B, I]``.

        ``logits`` returns those of the votes; None for r = 1 / M.
        """
        if "parents" not in self.axes:
            return None
        if logits is None:
            dtype = accumulation_dtype(votes.children.dtype)
            return votes.children.new_full(votes.children.shape[:2], votes.parents / self.parents, dtype=dtype)
        log_sum = _log_sum(votes, logits)
        (top,) = self.joined("parents", log_sum.detach(), by="max")
        exponentials = (log_sum - top.masked_fill(~top.isfinite(), 0.0)).exp()
        return exponentials / self.entered("parents", *self.joined("parents", exponentials))[0]


def _chunk(count: int, size: int, k: int) -> int:
    """Return how many of ``count`` the k-th of ``size`` processes has; below 1 for none."""
    step = -(-count // size)
    return min(step, count - step * k)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat([x.reshape(-1) for x in parts])


def _unpacked(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    if len(like) == 1:
        return [message]
    return [x.view(y.shape) for x, y in zip(message.split([y.numel() for y in like]), like, strict=True)]


def _log_sum(votes: VoteInputs, logits: Callable[[VoteBlocks], Tensor]) -> Tensor:
    """Return ``log sum_m exp(logit_im)`` of a set's children ``[B, I]``, a block at a time, as no kernel returns it."""
    children, gate = votes.children, votes.gate
    if gate is not None:
        children = children.masked_fill(hidden(children, gate)[..., None, None], 0.0)
    return logits(blocks_of(votes._replace(children=children, gate=None))).logsumexp(-1)


def _gated(votes: VoteInputs, share: Tensor | None) -> VoteInputs:
    """Return votes with gates multiplied by a process's share of each child."""
    if share is None:
        return votes
    share = share.to(votes.children.dtype)
    return votes._replace(gate=share if votes.gate is None else votes.gate * share)


# ---- iterations ------------------------------------------------------------------------------------------------------


def _attention(layout: Layout, votes: VoteInputs, own: Attention) -> Sequence[Any]:
    """Return an iteration, with S summed over the processes that share the children."""
    (asked,) = layout.entered("children", own.query)
    (query,) = widen(votes.children.dtype, asked)
    share = layout.share(votes, None if query is None else lambda seen: own.scale * seen.scores(query))
    if share is not None and own.detach:
        share = share.detach()
    plain = own._replace(query=asked, norm_weight=None, norm_bias=None, rule=int(Rule.PLAIN))
    sums, _, shares = attention_routing(_gated(votes, share), plain)
    (sums,) = layout.joined("children", sums.to(accumulation_dtype(votes.children.dtype)))
    if share is not None and own.coefficients:
        shares = shares * share.detach()[..., None]
    return attention_routing.steps_of(own, sums, votes.children.dtype), shares


def _pooling(layout: Layout, votes: VoteInputs, own: Pooling) -> Sequence[Any]:
    """Return an iteration, with S and the log-sum-exp over the children merged."""
    (asked,) = layout.entered("children", own.query)
    settings = (votes.parents, votes.window, own._replace(query=None, rule=int(Rule.UNIT), coefficients=False))
    sums, part = _Pooled.apply(layout, settings, *votes[:4], asked)
    shares = None
    if own.coefficients:
        shares = reference.pooling_coefficients(votes, asked, own.scale, own.normalize) * part.unsqueeze(-2)
    return sums if own.rule == Rule.UNIT else pooling_routing.steps_of(own, sums, sums.dtype), shares


class _Pooled(torch.autograd.Function):
    """An iteration of pooling over all processes' children: S, and a process's part of each parent's softmax.

    A backward takes S and the log-sum-exp of the softmax over all children, so it is right for any part of them.
    """

    @staticmethod
    def forward(ctx: Any, layout: Layout, settings: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        parents, window, own = settings
        votes = VoteInputs._make((*tensors[:4], parents, window))
        _, (sums,), (log_sum,), _ = pooling_routing.compute(votes, own._replace(query=tensors[4]))
        (top,) = layout.joined("children", log_sum, by="max")
        top = top.masked_fill(top == -torch.inf, 0.0)
        part = (log_sum - top).exp()
        joint, total = layout.joined("children", part[..., None, None] * sums, part)
        inverse = inverse_or_zero(total)
        joint, log_sum = (joint * inverse[..., None, None]).to(sums.dtype), top + total.log()
        ctx.settings, ctx.blocks = settings, backends.settings()
        ctx.save_for_backward(*tensors, joint, log_sum)
        part = part * inverse
        ctx.mark_non_differentiable(part)
        return joint.clone(), part

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad, _), (*parts, query, sums, log_sum) = grads, ctx.saved_tensors
        parents, window, given = ctx.settings
        rest = (None if query is None else query[None], sums[None], log_sum[None], given.scale, given.normalize)
        wide = grad.to(log_sum.dtype).contiguous()[None]  # type: ignore[union-attr]
        needs = sum(want << k for k, want in enumerate(ctx.needs_input_grad[2:]))
        if given.detach:
            needs = needs & ~pooling_routing.bits(pooling_routing.constant) | DETACH
        return None, None, *_run_backward(ctx, pooling_routing, needs, wide, *parts, parents, window, *rest)


def _gaussian(layout: Layout, votes: VoteInputs, own: Gaussian) -> Sequence[Any]:
    """Return an iteration, with the moments of all processes' children joined by Chan's formula."""
    em, eps, state = own.rule == Rule.EM, own.eps, own[:3]
    one = votes.children.new_ones((1, 1), dtype=accumulation_dtype(votes.children.dtype))
    betas = (one, one) if em else (own.beta_use, own.beta_ignore)
    asked = layout.entered("children", *state)
    uniform = own.mean is None and own.log_weight is None
    share = layout.share(votes, None if uniform else lambda seen: logits_of(seen, *asked))
    gated = _gated(votes, share)
    settings = (votes.parents, votes.window, int(Rule.HEINSEN if em else own.rule), eps)
    counts, means, narrow, evidence = _Moments.apply(settings, *gated[:4], *asked, *betas)
    if share is not None and not em:
        assert own.beta_ignore is not None
        evidence = evidence - _ignored(votes, share, own.beta_ignore)
    # the first moment is (n + eps) mean; about any c the second is (n + eps) variance + 2 eps mean d + n d^2
    whole, n = (counts + eps)[..., None, None], counts[..., None, None]
    counts, sums, evidence = layout.joined("children", counts, whole * means, evidence)
    inverse = inverse_or_zero(counts + eps)[..., None, None]
    mean = sums * inverse
    apart = means - layout.entered("children", mean)[0]
    (second,) = layout.joined("children", whole * narrow + apart * (2 * eps * means + n * apart))
    variances = second * inverse + eps
    if em:
        assert own.beta_use is not None and own.beta_ignore is not None
        evidence = own.temperatures[0] * benefits(counts, variances, own.beta_use, own.beta_ignore)
    shares = None
    if own.coefficients:
        shares = reference.gaussian_coefficients(votes, *state)
        shares = shares if share is None else shares * share.detach()[..., None]
    return evidence, mean, variances, shares


def _ignored(votes: VoteInputs, share: Tensor, beta: Tensor) -> Tensor:
    """Return ``sum_i beta_ignore_im (g_i - g'_i)``, which the kernel misses if gates g' hold a share of the child."""
    gate = 1.0 if votes.gate is None else votes.gate
    missed = gate - gate * share
    return missed.sum(1, keepdim=True) * beta if beta.shape[0] == 1 else missed @ beta


class _Moments(torch.autograd.Function):
    """An iteration of a process's Gaussians: counts, means, variances without eps, evidence, all with gradients."""

    @staticmethod
    def forward(ctx: Any, settings: Any, *tensors: Any) -> tuple[Tensor, ...]:
        parents, window, rule, eps = settings
        votes = VoteInputs._make((*tensors[:4], parents, window))
        own = Gaussian._make((*tensors[4:], [1.0], rule, eps, False))
        evidence, *_, counts, means, narrow, _, _ = gaussian_routing.compute(votes, own)
        ctx.settings, ctx.blocks = settings, backends.settings()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, counts, means, narrow)
        return counts[0].clone(), means[0].clone(), narrow[0].clone(), evidence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        parents, window, _, eps = ctx.settings
        *tensors, counts, means, narrow = ctx.saved_tensors
        heads = [None if x is None else x.contiguous()[None] for x in grads]
        state = [None if x is None else x[None] for x in tensors[4:7]]
        needs = sum(want << k for k, want in enumerate(ctx.needs_input_grad[1:]))
        rest = (*state, *tensors[7:], counts, means, narrow, eps)
        return None, *_run_backward(ctx, gaussian_routing, needs, *heads, *tensors[:4], parents, window, *rest)


def _run_backward(ctx: Any, routing: Routing, needs: int, *arguments: Any) -> list[Tensor | None]:
    with backends.under(ctx.blocks):
        # not the gaussian's own, whose gradient of a shared bias cancels within one process, not among several
        found = Routing.run_backward(routing, *arguments, needs)
    return [gradient if needs >> k & 1 else None for k, gradient in enumerate(found)]


_RUN: dict[str, Callable[..., Any]] = {"attention": _attention, "gaussian": _gaussian, "pooling": _pooling}
