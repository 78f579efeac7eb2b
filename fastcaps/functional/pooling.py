"""The function of routing as pooling (Zhao & Huang 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fastcaps import ops
from fastcaps.checks import check_choice, check_count, check_finite, known_arguments
from fastcaps.functional.verbs import Votes, inputs_of
from fastcaps.results import Routed
from fastcaps.rules import Rule
from fastcaps.vectors import squash
from fastcaps.votes import Window

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": lambda poses: poses.sigmoid(),
    "squash": lambda poses: squash(poses, (-2, -1)),
    "tanh": lambda poses: poses.tanh(),
}
"""The functions that ``activation`` may name; ``squash`` takes the length of a C x E pose."""


def activation_function(activation: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function of an ``activation`` argument, or None."""
    if activation is None or callable(activation):
        return activation
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a function, a name or None, got {type(activation).__name__}")
    check_choice("activation", activation, tuple(ACTIVATIONS))
    return ACTIVATIONS[activation]


@known_arguments
def routing_pool(
    children: Tensor | Votes,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    parents: int | None = None,
    iterations: int = 3,
    sharpness: float = 0.5,
    activation: str | Callable[[Tensor], Tensor] | None = None,
    detach: bool = False,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> Tensor | Routed:
    r"""Pool children into parents by vector-normed dynamic routing (Zhao & Huang 2019, Algorithm 1).

    .. math::
        r_{im} = \operatorname{softmax}_i \Bigl(\lambda \sum_{\tau < t}
                 \Bigl\langle \frac{V_{im}}{\lVert V_{im} \rVert}, \frac{S_m^\tau}{\lVert S_m^\tau \rVert}
                 \Bigr\rangle\Bigr), \quad
        S_m^t = \sum_i r_{im} V_{im}

    The children compete for each parent: the softmax runs over i, and a parent is a weighted mean of its votes. With
    :math:`\lambda = 0` it is their average, with a large λ nearly the vote that agrees best with the others. Without
    weights the votes are the children; with weights ``V = P W + b``.

    Parameters
    ----------
    children, weight, bias, window
        See :class:`~fastcaps.Votes`; ``[B, I, C, D]`` or ``[B, N, H, W, C, D]``, ``[G, M, D, E]`` and
        ``[I or 1, M or 1, C, E]``. Children may also be :class:`~fastcaps.Votes`, which hold the others.
    gate : Tensor, optional
        The children's weights in the softmax, not negative, ``[B, I]`` or ``[B, N, H, W]``, or booleans; 0 for a child
        that does not exist.
    parents : int, optional
        M; by default that of ``weight``, else of ``bias``, else 1. Parents with equal votes stay equal, so several
        parents need weights or a bias that differ between them.
    iterations : int
        Number of times the coefficients are computed, at least 0; one more sum follows.
    sharpness : float
        :math:`\lambda`, at least 0.
    activation : str or callable, optional
        Applied to the sums, poses ``[..., C, E]``: a function, or one of "relu", "sigmoid", "squash", "tanh".
    detach : bool
        Treat the coefficients as constants in the gradient: it flows through the last sum only.
    return_coefficients : bool
        Also return the r of the last sum.

    Returns
    -------
    Tensor
        The parents, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; zeros if no child exists. With
        ``return_coefficients`` a :class:`~fastcaps.results.Routed` of them and r, ``[B, I, M]`` or
        ``[B, Ho, Wo, I, M]``, without gradient.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in :mod:`fastcaps.functional`.

    Examples
    --------
    >>> import torch
    >>> children = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0]]).view(1, 3, 1, 2)
    >>> routing_pool(children, sharpness=0.0).flatten()  # the average
    tensor([0.3333, 0.0333])
    >>> routing_pool(children, sharpness=5.0).flatten()  # the third disagrees, and is left out
    tensor([1.0000, 0.0506])
    """
    votes = inputs_of(children, weight, bias, gate, window, parents)
    iterations, sharpness = check_count("iterations", iterations, 0), check_finite("sharpness", sharpness, 0.0)
    function = activation_function(activation)
    sums = 1 if sharpness == 0 else iterations + 1  # with λ = 0 no iteration changes anything
    own = ops.Pooling(None, sharpness, True, int(Rule.UNIT), sums, bool(detach), bool(return_coefficients))
    routed, _, _, coefficients = ops.pooling_routing(votes, own)
    routed = votes.from_op(routed)
    routed = routed if function is None else function(routed)
    return Routed(routed, votes.pairs_from_op(coefficients)) if return_coefficients else routed
