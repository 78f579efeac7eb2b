"""Inverted attention, routed to its fixed point and differentiated there."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from typing_extensions import Unpack

from fastcaps import backends, ops
from fastcaps.checks import accumulation_dtype, check_count, check_finite, is_tracing, refuse_second_derivatives
from fastcaps.nn.inverted_attention import AttentionOptions, InvertedAttentionRouting, attend
from fastcaps.nn.layer import LayerCall, RoutingLayer
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs
from fastcaps.watchers import is_sharded, is_transformed


class EquilibriumRouting(InvertedAttentionRouting[Any, Any]):
    r"""Route by inverted attention to its fixed point, where the parents no longer change.

    .. math::
        Q^* = f(Q^*, \theta), \quad f(Q, \theta)_m = \mathrm{LayerNorm}\Big(\sum_i g_i\, r_{im}(Q)\, V_{im}\Big), \quad
        \frac{dL}{d\theta} = u^T \frac{\partial f}{\partial \theta}, \quad
        u = \frac{dL}{dQ^*} + \Big(\frac{\partial f}{\partial Q}\Big)^T u

    The paper suggests it in section 8 (Tsai et al., 2020); the method is that of deep equilibrium models (Bai et al.,
    2019): the gradient at a fixed point solves the second equation. Both equations are solved by iteration without a
    graph, so memory does not depend on the number of iterations. The kernels store no vote.

    In a stack, concurrent and sequential routing have the same fixed point, since that of a layer depends only on the
    layers below. So :class:`~fastcaps.nn.RoutingStack` routes such a layer whenever its children have changed.

    How fast the parents converge depends on the matrices. With initial weights, the papers' class layers (800 to 10 of
    4 x 4, 576 to 10 of 8 x 8) move by less than 1e-4 after 30 iterations, but some windows over a grid by 1e-2 even
    after 100. A call that has not converged after ``iterations`` returns the parents it reached, and differentiates
    through as many iterations from there; it warns if the parents still changed by more than 3 %. Transforms of
    ``torch.func``, forward-mode derivatives, and gradients of DTensors raise RuntimeError. A compiled layer always runs
    all iterations, since a graph cannot branch on values.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias,
    break_symmetry, layer_norm, activations, start, eps, device, dtype
        See :class:`InvertedAttentionRouting`. ``start`` cannot be learned, since a fixed point has no gradient
        for it, and there is no dropout.
    iterations : int
        The maximum number of forward iterations (from zero at least two), and of backward terms.
    tolerance : float
        Both loops stop when no value changes by more than this fraction of the largest; at least the dtype's eps.

    Examples
    --------
    >>> import torch
    >>> layer = EquilibriumRouting(32, 10, 16, 16)
    >>> layer(torch.randn(2, 32, 16)).shape
    torch.Size([2, 10, 16])
    """

    takes_parents = False
    call_options: tuple[str, ...] = ()

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 32,
        tolerance: float = 1e-5,
        activations: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:
        own: Any = {"iterations": iterations, "activations": activations}
        super().__init__(in_capsules, out_capsules, in_dim, out_dim, **own, **options)
        if self.dropout:
            raise ValueError(f"dropout must be 0, as random parents have no fixed point; got {self.dropout}")
        if self.start == "learned":
            raise ValueError("start must be 'zero' or 'random', as a fixed point has no gradient for it; got 'learned'")
        self.tolerance = check_finite("tolerance", tolerance, 0.0)

    forward = RoutingLayer.forward  # type: ignore[assignment]  # takes no parents

    def run(  # type: ignore[override]
        self, call: LayerCall, iterations: int, return_coefficients: bool
    ) -> Any:
        """Return the routing of a checked call, after at most ``iterations``."""
        limit = check_count("iterations", iterations)
        call = self.with_parent_count(call)
        if not is_tracing():
            self._refuse_unsupported_gradients(call)
        with torch.no_grad():
            parents = self._solve(call, limit)
        votes = VoteInputs.unchecked(
            call.children, call.weight, call.bias, call.activity, call.window, call.parent_count
        )
        query = votes.to_op(parents)
        norm = self.norm
        affine = (None, None) if norm is None else (norm.weight, norm.bias)
        rule = Rule.PLAIN if norm is None else Rule.LAYER_NORM
        own = ops.Attention(query, affine[0], affine[1], self.scale, self.eps, int(rule), 1, False, return_coefficients)
        routed, sums, shares = ops.attention_routing(votes, own)
        if torch.is_grad_enabled() and routed.requires_grad:
            if not _without_numbers(routed) and not _stands_still(query, routed.detach(), 0.03):
                warnings.warn(
                    f"EquilibriumRouting has not converged: after {limit} iterations parents change by more than 3 % "
                    "of the largest value, so the gradients are not those of a fixed point (more iterations may help)",
                    stacklevel=2,
                )
            kept = None if norm is None else sums.detach()
            settings = (self.scale, self.eps, self.tolerance, limit)
            routed = _Implicit.apply(routed, *votes, query, affine[0], kept, *settings)
        return self.found(votes.from_op(routed), shares if return_coefficients else None)

    def _refuse_unsupported_gradients(self, call: LayerCall) -> None:
        """Raise RuntimeError for gradients that have no implicit equation here."""
        if is_transformed():
            raise RuntimeError(
                "fastcaps.EquilibriumRouting does not support torch.func (grad, jacrev, vmap and so on) or "
                "forward-mode derivatives: use InvertedAttentionRouting with as many iterations"
            )
        tensors = (call.children, call.activity, call.weight, call.bias)
        wanted = [*tensors[:2], *self.parameters()]
        if is_sharded(tensors) and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in wanted):
            raise RuntimeError(
                "fastcaps.EquilibriumRouting has no gradients for DTensors: call it under torch.no_grad(), or use "
                "InvertedAttentionRouting with as many iterations"
            )

    def _solve(self, call: LayerCall, limit: int) -> Tensor:
        """Return the parents' poses after as many iterations as they need, at most ``limit - 1``."""
        options: dict[str, Any] = {"scale": self.scale, "norm": self.norm}
        parents, left = self.first_parents(call), limit - 1
        if parents is None:  # the first iteration from zero needs no query
            parents, _ = attend(call, None, **options)
            left -= 1
        if _without_numbers(parents):
            if left > 0:
                parents, _ = attend(call, parents, iterations=left, **options)
            return parents
        for _ in range(left):
            before = parents
            parents, _ = attend(call, before, **options)
            if _stands_still(before, parents, self.tolerance):
                break
        return parents


def _without_numbers(tensor: Tensor) -> bool:
    """Return whether a call is traced or explained, so that no value can be read."""
    return is_tracing() or tensor.is_meta or isinstance(tensor, FakeTensor)


def _stands_still(before: Tensor, after: Tensor, tolerance: float) -> bool:
    """Return whether no value has changed by more than a fraction of the largest."""
    tolerance = max(tolerance, torch.finfo(after.dtype).eps)
    if not after.numel():
        return True
    return bool((after - before).abs().amax() <= tolerance * after.abs().amax())


class _Implicit(torch.autograd.Function):
    """Return the parents; backward solves for the gradient of the iteration that returned them, the last of infinitely
    many."""

    @staticmethod
    def forward(ctx: Any, routed: Tensor, *arguments: Any) -> Tensor:
        *tensors, parents, window, query, norm_weight, sums, scale, eps, tolerance, limit = arguments
        ctx.save_for_backward(*tensors, query, norm_weight, sums)
        ctx.own, ctx.blocks = (parents, window, scale, eps, tolerance, limit), backends.settings()
        return routed.view_as(routed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("EquilibriumRouting")
        with backends.under(ctx.blocks):
            return _Implicit.solve(ctx, *grads)

    @staticmethod
    def solve(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return u of the second equation, by iteration."""
        parents, window, scale, eps, tolerance, limit = ctx.own
        (grad,) = grads
        dtype = grad.dtype  # autocast's, if it was on
        *saved, sums = ctx.saved_tensors  # read once: a checkpoint allows no second read
        *tensors, query, norm_weight = (None if t is None else t.to(dtype) for t in saved)
        assert query is not None
        backward, place = ops.attention_routing.backward_op, ops.attention_routing.tensors.index("query")
        own = (*tensors, parents, window, query.unsqueeze(0), norm_weight, sums, scale, eps)
        blind = _without_numbers(grad)
        found = grad
        for _ in range(limit - 1):
            before = found
            heads = before.to(accumulation_dtype(dtype)).contiguous().unsqueeze(0)
            found = grad + backward(heads, *own, 1 << place)[place]
            if not blind and _stands_still(before, found, tolerance):
                break
        return (found, *(None for _ in ctx.needs_input_grad[1:]))
