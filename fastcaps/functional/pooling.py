"""Routing as a pooling layer (Zhao & Huang 2019) as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fastcaps import ops
from fastcaps.functional import explaining
from fastcaps.functional.arguments import (
    Sizes,
    autocast,
    autocasts,
    check_bias,
    check_children,
    check_choice,
    check_count,
    check_finite,
    check_gate,
    check_routing,
    chosen_backend,
    seen_children,
    set_or_grid,
)
from fastcaps.geometry import SET_WINDOW, Window, from_op, to_op
from fastcaps.reference import pooling, routings
from fastcaps.vectors import squash, unit

__all__ = ["ACTIVATIONS", "activation_function", "routing_pool"]

VECTOR_NORMED = 0  # the routing ops' rule: Q = sum of unit(S)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": lambda poses: poses.sigmoid(),
    "squash": lambda poses: squash(poses, (-2, -1)),
    "tanh": lambda poses: poses.tanh(),
}
"""What ``activation`` may name; ``squash`` takes the length of a C x E pose."""


def activation_function(activation: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function that an ``activation`` argument stands for, or None."""
    if activation is None or callable(activation):
        return activation
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a function, a name or None, got {type(activation).__name__}")
    check_choice("activation", activation, tuple(ACTIVATIONS))
    return ACTIVATIONS[activation]


def routing_pool(
    children: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    parents: int | None = None,
    iterations: int = 3,
    sharpness: float = 0.5,
    activation: str | Callable[[Tensor], Tensor] | None = None,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Pool children into parents by vector-normed dynamic routing (Zhao & Huang 2019, Algorithm 1).

    .. math::
        r_{im} = \operatorname{softmax}_i \Bigl(\lambda \sum_{\tau < t}
                 \Bigl\langle \frac{V_{im}}{\lVert V_{im} \rVert}, \frac{s_m^\tau}{\lVert s_m^\tau \rVert}
                 \Bigr\rangle\Bigr), \quad
        s_m^t = \sum_i r_{im} V_{im}

    The children compete for each parent: the softmax runs over i, and a parent is a weighted mean of its votes. With
    :math:`\lambda = 0` it is their average, with a large one nearly the vote that agrees best with the others. The
    votes are the children themselves unless there are weights, ``V = P W + b``.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    weight : Tensor, optional
        W, ``[G, M, D, E]``; child i, counted as (ky, kx, n) with n fastest, uses group i mod G. None: E = D.
    bias : Tensor, optional
        Added to votes, ``[I or 1, M or 1, C, E]``. Padded positions send none.
    gate : Tensor, optional
        Not negative, ``[B, I]`` or ``[B, N, H, W]``: how much a child counts in the softmax; 0 is a child that is not
        there.
    parents : int, optional
        M. Taken from ``weight``, else from ``bias``, else 1. Parents with the same votes stay the same: several are of
        use only with weights or a bias that tells them apart.
    iterations : int
        Turns that find the coefficients, at least 0; one more sum is taken with them.
    sharpness : float
        :math:`\lambda`, at least 0.
    activation : str or callable, optional
        Applied to the sums, poses ``[..., C, E]``: a function, or one of "relu", "sigmoid", "squash", "tanh".
    window : Window, optional
        Makes the call one over a grid.
    return_coefficients : bool
        Also return the r of the last sum.

    Returns
    -------
    parents : Tensor
        ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; zeros where no child is there.
    coefficients : Tensor
        r, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without gradient. Only with ``return_coefficients``, which alone
        needs memory for them.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, device, shape, count or window; the message names it.
    BackendError
        If a forced backend cannot take the call.

    Examples
    --------
    >>> import torch
    >>> children = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0]]).view(1, 3, 1, 2)
    >>> routing_pool(children, sharpness=0.0).flatten()  # the average
    tensor([0.3333, 0.0333])
    >>> routing_pool(children, sharpness=5.0).flatten()  # the third disagrees, and is left out
    tensor([1.0000, 0.0506])
    """
    cast = autocasts(children)
    many = _parents(parents, weight, bias)
    if weight is None:
        check_children(children, window, cast)
        grid, count = seen_children(children, window)
        sizes = Sizes(children.shape[0], grid, count, many, children.shape[-2], children.shape[-1])
        check_bias(bias, children, sizes, cast)
        check_gate("gate", gate, children, cast)
    else:
        sizes, _ = check_routing(children, weight, bias, gate, window)
        if sizes.many != many:
            raise ValueError(f"parents must be the M = {sizes.many} of weight [G, M, D, E], got {parents}")
    check_count("iterations", iterations, 0)
    check_finite("sharpness", sharpness, 0.0)
    function = activation_function(activation)
    spec = SET_WINDOW if window is None else window.spec
    # with λ = 0 no turn changes anything
    turns = 1 if sharpness == 0 else iterations + 1
    tensors = (to_op(children, window), weight, bias, None if gate is None else to_op(gate, window))
    settings = (float(sharpness), True)
    if explaining.watching():
        routed, shares = explaining.watch_routing("pooling", children, weight, window, many)
        return (routed, shares) if return_coefficients else routed
    if chosen_backend(children, weight, "pooling", many) == "reference":
        sums, shares = _by_reference(children.device.type, *tensors, many, turns - 1, settings[0], spec)
    else:
        sums, history, _ = ops.pooling_routing(*tensors, *settings, many, VECTOR_NORMED, turns, False, spec)
        if return_coefficients:
            shares = _last_shares(*tensors, sums, history, settings, spec)
    routed = from_op(sums, window)
    routed = routed if function is None else function(routed)
    return (routed, set_or_grid(shares, window)) if return_coefficients else routed


def _last_shares(
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    sums: Tensor,
    history: Tensor,
    settings: tuple[float, bool],
    spec: Sequence[int],
) -> Tensor:
    """Return r of the last sum, ``[B, Ho, Wo, I, M]``, from the sums of all turns."""
    query = sums.new_zeros(sums.shape)
    for earlier in history[:-1]:  # as the turns themselves added them up: rounded to the children's dtype
        query = query + unit(earlier, (-2, -1)).to(sums.dtype)
    children, weight, query, bias, gate = autocast(children.device.type, children, weight, query, bias, gate)
    return pooling.coefficients(children, weight, query, bias, gate, *settings, spec)


def _by_reference(
    device_type: str,
    children: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    many: int,
    iterations: int,
    sharpness: float,
    spec: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return sums and shares in op layout."""
    children, weight, bias, gate = autocast(device_type, children, weight, bias, gate)
    if weight is None and many > 1:  # the reference counts the parents of identity votes by the bias
        rows, columns = children.shape[-2:]
        bias = children.new_zeros((1, many, rows, columns)) if bias is None else bias.expand(-1, many, -1, -1)
    settings: dict[str, Any] = {"iterations": iterations, "sharpness": sharpness, "window": spec}
    return routings.routing_pool(children, weight, bias, gate, **settings)


def _parents(parents: Any, weight: Any, bias: Any) -> int:
    """Return M."""
    if parents is not None:
        check_count("parents", parents)
        return int(parents)
    table = weight if weight is not None else bias
    return table.shape[1] if isinstance(table, Tensor) and table.dim() == 4 else 1
