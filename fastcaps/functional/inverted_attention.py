"""The function of inverted dot-product attention routing (Tsai et al. 2020)."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

from torch import Tensor

from fastcaps import ops
from fastcaps.checks import check_count, check_finite, check_shape, check_tensor, known_arguments
from fastcaps.functional.verbs import Votes, inputs_of
from fastcaps.ops import products
from fastcaps.results import Routed
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs, Window, pose_of


@known_arguments
def inverted_attention_routing(
    children: Tensor | Votes,
    weight: Tensor | EllipsisType | None = ...,
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
) -> Tensor | Routed:
    r"""Route children to parents by inverted dot-product attention (Tsai et al. 2020).

    .. math::
        V_{im} = P_i W_{i \bmod G, m} + \text{bias}_{im}, \quad
        a_{im} = s \langle Q_m, V_{im} \rangle, \quad
        r_{im} = \operatorname{softmax}_m a_{im}, \quad
        Q'_m = \operatorname{LayerNorm}\Bigl(\sum_i g_i r_{im} V_{im}\Bigr)

    The parents compete for each child: the softmax runs over m. Without ``parents`` this is the first iteration, in
    which ``r = 1 / M``. It is linear in the children up to LayerNorm, so a convolution or matmul computes it
    (``fastcaps/ops/uniform.py``), unless copying large weights for it would be most of the work.

    Parameters
    ----------
    children, weight, bias, window
        See :class:`~fastcaps.Votes`; ``[B, I, C, D]`` or ``[B, N, H, W, C, D]``, ``[G, M, D, E]`` and
        ``[I or 1, M or 1, C, E]``. Children may also be :class:`~fastcaps.Votes`, which hold the others.
    parents : Tensor, optional
        Q, the last iteration's poses, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; without ``weight`` they set M.
    gate : Tensor, optional
        g, the children's activations, ``[B, I]`` or ``[B, N, H, W]``, or booleans.
    norm_weight, norm_bias : Tensor, optional
        Affine of LayerNorm, ``[C * E]``, shared by all parents.
    eps : float
        Of LayerNorm.
    scale : float, optional
        s; ``1 / sqrt(C * E)`` by default.
    normalize : bool
        False skips LayerNorm; it is also skipped for poses of one value.
    iterations : int
        At least 1; each starts from the parents of the one before. All iterations with parents are one op.
    return_coefficients : bool
        Also return the r of the last iteration.

    Returns
    -------
    Tensor
        The parents, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; the latter in the memory order B, Ho, Wo, M, C, E.
        With ``return_coefficients`` a :class:`~fastcaps.results.Routed` of them and r, ``[B, I, M]`` or
        ``[B, Ho, Wo, I, M]``, without gradient; 0 for a padded child.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in :mod:`fastcaps.functional`.
    """
    others = (parents, norm_weight, norm_bias, bool(normalize))
    votes = inputs_of(children, weight, bias, gate, window, others=others, parents_at=1, check=_check)
    votes = products.with_one_vote(votes)
    query = None if parents is None else votes.to_op(parents)
    rows, _, columns = pose_of(votes)
    pose = rows * columns
    eps, iterations = check_finite("eps", eps, 0.0), check_count("iterations", iterations)
    scale = pose**-0.5 if scale is None else check_finite("scale", scale)
    rule = Rule.LAYER_NORM if normalize and pose != 1 else Rule.PLAIN
    if rule == Rule.PLAIN:
        norm_weight = norm_bias = None
    flags = (False, bool(return_coefficients))
    own = ops.Attention(query, norm_weight, norm_bias, scale, eps, int(rule), iterations, *flags)
    routed, _, coefficients = ops.attention_routing(votes, own)
    routed = votes.from_op(routed)
    return Routed(routed, votes.pairs_from_op(coefficients)) if return_coefficients else routed


def _check(votes: VoteInputs, parents: Any, norm_weight: Any, norm_bias: Any, normalize: bool) -> None:
    if parents is not None:
        check_tensor("parents", parents, votes.children, votes.autocasts)
        shape = votes.public_poses()
        check_shape("parents", parents, shape, "B, M, C, E" if len(shape) == 4 else "B, M, Ho, Wo, C, E")
    rows, _, columns = pose_of(votes)
    for name, affine in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if affine is not None:
            if not normalize:
                raise ValueError(f"{name} must be None with normalize=False, got a tensor")
            check_tensor(name, affine, votes.children, votes.autocasts)
            check_shape(name, affine, (rows * columns,), "C * E")
