"""Dynamic routing (Sabour et al. 2017) as a function."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastcaps import ops, reference
from fastcaps.functional import explaining
from fastcaps.functional.arguments import (
    autocast,
    check_choice,
    check_count,
    check_routing,
    chosen_backend,
    set_or_grid,
)
from fastcaps.geometry import SET_WINDOW, Window, from_op, to_op
from fastcaps.reference import pooling, routings
from fastcaps.vectors import squash

__all__ = ["dynamic_routing"]

DYNAMIC = 1  # the routing ops' rule: v = squash(S), Q = sum of v


def dynamic_routing(
    children: Tensor,
    weight: Tensor,
    *,
    iterations: int = 3,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    compete: str = "parents",
    detach: bool = False,
    leaky: bool = False,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Route children to parents by dynamic routing (Sabour et al. 2017, Procedure 1).

    .. math::
        V_{im} = P_i W_{i \bmod G, m} + b_{im}, \quad
        r_{im} = \operatorname{softmax}_m \Bigl\langle V_{im}, \sum_{\tau < t} v_m^\tau \Bigr\rangle, \quad
        v_m^t = \operatorname{squash}\Bigl(\sum_i g_i r_{im} V_{im}\Bigr)

    The paper keeps the log-priors of all pairs of child and parent and adds to each the agreement of a vote with its
    parent, turn by turn. They are linear in the votes, so that the sum of the parents so far says as much: the state is
    M poses, not I * M numbers, and no vote is stored. In the first turn ``r = 1 / M``. ``squash(s)`` is
    ``|s|^2 / (1 + |s|^2) s / |s|``, with derivative 0 at the zero vector; its length is over the C * E numbers.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    weight : Tensor
        W, ``[G, M, D, E]``; G divides the number of children that a position sees (I, or kh * kw * N). Child i, counted
        as (ky, kx, n) with n fastest, uses group i mod G: G = I for own matrices, G = N shared over the window, G = 1.
    iterations : int
        Turns, at least 1.
    bias : Tensor, optional
        Added to votes, ``[I or 1, M or 1, C, E]``. Padded positions send none.
    gate : Tensor, optional
        g, ``[B, I]`` or ``[B, N, H, W]``; 0 is a child that is not there. The paper has none.
    compete : "parents" or "children"
        Over which of them the softmax runs. The paper says parents; many published codes let the children of a parent
        compete. Then the gates, which must not be negative, stand inside the softmax, and shares add up to 1 over the
        children; in the first turn ``r = 1 / I``.
    detach : bool
        The coefficients are constants to the gradient: it flows through the last turn's sum alone, to the children and
        the weights. Many published codes do so.
    leaky : bool
        A child may also go to none of the parents: one logit of 0 more, whose share is dropped. For
        ``compete="parents"``. It pads the weights (and the bias) by a parent of zeros.
    window : Window, optional
        Makes the call one over a grid.
    return_coefficients : bool
        Also return the r of the last turn.

    Returns
    -------
    parents : Tensor
        ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; the latter lies in memory as B, Ho, Wo, M, C, E.
    coefficients : Tensor
        r, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without gradient; 0 for a padded child. Only with
        ``return_coefficients``, which alone needs memory for them, and for the votes.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, device, shape, count or window; the message names it.
    BackendError
        If a forced backend cannot take the call.

    Examples
    --------
    >>> import torch
    >>> children, weight = torch.randn(2, 6, 1, 8), torch.randn(6, 3, 8, 16)
    >>> parents, r = dynamic_routing(children, weight, return_coefficients=True)
    >>> parents.shape, r.shape
    (torch.Size([2, 3, 1, 16]), torch.Size([2, 6, 3]))
    >>> bool(torch.allclose(r.sum(-1), torch.ones(2, 6)))  # each child spreads over the parents
    True
    """
    sizes, _ = check_routing(children, weight, bias, gate, window)
    check_count("iterations", iterations)
    check_choice("compete", compete, ("parents", "children"))
    if leaky and compete == "children":
        raise ValueError("leaky must be False with compete='children': a child cannot leak from a parent's softmax")
    spec = SET_WINDOW if window is None else window.spec
    op_gate = None if gate is None else to_op(gate, window)
    if leaky:
        weight, bias = F.pad(weight, (0, 0, 0, 0, 0, 1)), _pad_bias(bias, sizes.many)
    grid = to_op(children, window)
    stem = "attention" if compete == "parents" else "pooling"
    if explaining.watching():
        routed, shares = explaining.watch_routing(stem, children, weight, window, sizes.many)
        return (routed, shares) if return_coefficients else routed
    found: tuple[Tensor, Tensor | None]
    if chosen_backend(children, weight, stem) == "reference":
        grid, weight, bias, op_gate = autocast(children.device.type, grid, weight, bias, op_gate)
        found = routings.dynamic_routing(
            grid,
            weight,
            bias,
            op_gate,
            iterations=iterations,
            compete=compete,  # type: ignore[arg-type]
            detach=detach,
            window=spec,
        )
    else:
        found = _by_ops(grid, weight, bias, op_gate, iterations, compete, detach, spec, return_coefficients)
    routed = from_op(found[0][:, :, :, : sizes.many], window)
    if found[1] is None or not return_coefficients:
        return routed
    return routed, set_or_grid(found[1][..., : sizes.many], window)


def _pad_bias(bias: Tensor | None, many: int) -> Tensor | None:
    """Return a bias of votes with zeros for one parent more."""
    return None if bias is None else F.pad(bias.expand(-1, many, -1, -1), (0, 0, 0, 0, 0, 1))


def _by_ops(
    children: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    iterations: int,
    compete: str,
    detach: bool,
    spec: tuple[int, ...],
    with_shares: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the parents in op layout and, if asked for, the shares."""
    if compete == "parents":
        settings = (1.0, 0.0, False, DYNAMIC, iterations, detach, spec)
        parents, sums = ops.attention_routing(children, weight, None, bias, gate, None, None, *settings)
    else:
        parents, sums, _ = ops.pooling_routing(
            children, weight, bias, gate, 1.0, False, weight.shape[1], DYNAMIC, iterations, detach, spec
        )
    if not with_shares:
        return parents, None
    query = None
    for turn in sums[:-1]:  # as the turns themselves added them up: rounded to the children's dtype
        value = squash(turn, (-2, -1)).to(parents.dtype)
        query = value if query is None else query + value
    children, weight, query, bias, gate = autocast(children.device.type, children, weight, query, bias, gate)
    if compete == "parents":
        return parents, reference.coefficients(children, weight, query, bias, 1.0, spec)
    return parents, pooling.coefficients(children, weight, query, bias, gate, 1.0, False, spec)
