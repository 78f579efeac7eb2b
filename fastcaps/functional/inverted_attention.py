"""Inverted dot-product attention routing (Tsai et al. 2020) as a function."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastcaps import ops, reference
from fastcaps.functional import explaining, uniform
from fastcaps.functional.arguments import autocast, check_attention, check_count, chosen_backend, set_or_grid
from fastcaps.geometry import SET_WINDOW, Window, from_op, to_op

__all__ = ["inverted_attention_routing"]

SEQUENTIAL = 0  # the routing op's rule: parents are LayerNorm(S), and the next query


def inverted_attention_routing(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    scale: float | None = None,
    window: Window | None = None,
    normalize: bool = True,
    iterations: int = 1,
    return_coefficients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Route children to parents, once or more often, by inverted dot-product attention (Tsai et al. 2020).

    .. math::
        V_{im} = P_i W_{i \bmod G, m} + b_{im}, \quad
        a_{im} = s \langle Q_m, V_{im} \rangle, \quad
        r_{im} = \operatorname{softmax}_m a_{im}, \quad
        Q'_m = \operatorname{LayerNorm}\Bigl(\sum_i g_i r_{im} V_{im}\Bigr)

    The parents compete for each child: the softmax runs over m. Without ``parents`` this is the first iteration, in
    which ``r = 1 / M``; before LayerNorm the result is then linear in the children, made by a convolution or matmul
    (:func:`fastcaps.functional.uniform_pass`) except where copying large weights for that would be most of the work.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    weight : Tensor
        W, ``[G, M, D, E]``; G divides the number of children that a position sees (I, or kh * kw * N). Child i, counted
        as (ky, kx, n) with n fastest, uses group i mod G: G = I for own matrices, G = N shared over the window, G = 1.
    parents : Tensor, optional
        Q, the parents' poses of the last iteration, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``.
    bias : Tensor, optional
        Added to votes, ``[I or 1, M or 1, C, E]``. Padded positions send none.
    gate : Tensor, optional
        g, the children's activations, ``[B, I]`` or ``[B, N, H, W]``.
    norm_weight, norm_bias : Tensor, optional
        Affine of LayerNorm, ``[C * E]``, shared by all parents.
    eps : float
        Of LayerNorm.
    scale : float, optional
        s; ``1 / sqrt(C * E)`` by default.
    window : Window, optional
        Makes the call one over a grid.
    normalize : bool
        False leaves LayerNorm out; so does a pose of one number.
    iterations : int
        Turns, at least 1, each with the parents of the one before: sequential routing. Those with parents are one op.
    return_coefficients : bool
        Also return the r of the last turn.

    Returns
    -------
    parents : Tensor
        ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; the latter lies in memory as B, Ho, Wo, M, C, E.
    coefficients : Tensor
        r, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without gradient; 0 for a padded child. Only with
        ``return_coefficients``.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, device, shape, count or window; the message names it.
    BackendError
        If a forced backend cannot take the call.
    """
    check_attention(children, weight, parents, bias, gate, norm_weight, norm_bias, eps, window, normalize)
    check_count("iterations", iterations)
    if explaining.watching():
        told = explaining.watch(children, weight, parents, window, return_coefficients)
        return told if iterations == 1 else explaining.watch(children, weight, children, window, return_coefficients)
    pose = children.shape[-2] * weight.shape[3]
    scale = pose**-0.5 if scale is None else scale
    normalize = normalize and pose != 1
    spec = SET_WINDOW if window is None else window.spec
    grid = to_op(children, window)
    query = None if parents is None else to_op(parents, window)
    op_gate = None if gate is None else to_op(gate, window)
    settings: dict[str, Any] = {"scale": scale, "eps": eps, "normalize": normalize, "spec": spec}
    settings |= {"bias": bias, "gate": op_gate, "norm_weight": norm_weight, "norm_bias": norm_bias}
    chosen = chosen_backend(children, weight)
    if return_coefficients and iterations > 1:  # the last turn by itself: coefficients come from what it starts with
        query, iterations = _turns(chosen, grid, weight, query, iterations - 1, **settings), 1
    routed = from_op(_turns(chosen, grid, weight, query, iterations, **settings), window)
    if not return_coefficients:
        return routed
    shares = reference.coefficients(grid, weight, query, bias, scale, spec)
    return routed, set_or_grid(shares, window)


def _turns(
    chosen: str | None,
    grid: Tensor,
    weight: Tensor,
    query: Tensor | None,
    iterations: int,
    *,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    spec: tuple[int, ...],
) -> Tensor:
    """Return the parents in op layout after some turns."""
    if query is None and chosen != "reference" and not uniform.kernel_beats_library(grid, weight, spec):
        query = uniform.uniform_pass(grid, weight, bias, gate, norm_weight, norm_bias, eps, normalize, spec)
        iterations -= 1
        if iterations == 0:
            return query
    tensors = (grid, weight, query, bias, gate, norm_weight, norm_bias)
    if chosen == "reference":
        grid, weight, query, bias, gate, norm_weight, norm_bias = autocast(grid.device.type, *tensors)
        affine = (norm_weight, norm_bias)
        for _ in range(iterations):
            query = reference.attention_pass(grid, weight, query, bias, gate, *affine, scale, eps, normalize, spec)[0]
        assert query is not None
        return query
    if iterations == 1:
        parents: Tensor = ops.attention_pass(*tensors, scale, eps, normalize, spec)[0]
        return parents
    parents, _ = ops.attention_routing(*tensors, scale, eps, normalize, SEQUENTIAL, iterations, False, spec)
    return parents
