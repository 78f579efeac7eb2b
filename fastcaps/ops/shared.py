"""Linear verbs of children that share matrices, or have none, as the library's products: no vote is made.

``<Q_m, P_i W_gm> = <P_i, Q_m W_gm^T>``, and ``sum_i r_im P_i W_gm = sum_g (sum_{i of g} r_im P_i) W_gm``: where many
children have the same matrix, that is less work than their votes. It is plain PyTorch, differentiable as often as one
likes. Autograd stores the arguments, the results and one pose for each group and parent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastcaps.checks import widen
from fastcaps.votes import VoteInputs, pose_of, positions_of, seen_of, windows

LIBRARY = ("torch", "where children share matrices or have none, the library's products make no votes")
FUSED = ("cuda", "where children share matrices, a kernel between the library's products makes no votes")
WHOLE = ("cuda", "one launch makes all iterations of poses without matrices")
EVEN = ("torch", "equal coefficients: one matrix product or convolution of PyTorch")
"""What runs, and why, for an explanation."""


def serves(votes: VoteInputs) -> bool:
    """Return whether the library's products are less work than votes (G <= I / 2), copy no child more than once
    (windows that do not overlap), and make at most four values for each child and parent (G M C D at a position)."""
    # no properties of the named tuple: the compiler of torch 2.10 reads none
    kh, kw, sh, sw, ph, pw, _, _ = votes.window
    (_, *places), (rows, depth, _) = positions_of(votes), pose_of(votes)
    apart = not places or ((kh <= sh or places[0] == 1) and (kw <= sw or places[1] == 1))
    few = votes.weight is None or votes.weight.shape[0] * max(2, rows * depth / 4) <= seen_of(votes)
    return apart and few and not (ph or pw)


def without_matrix(votes: VoteInputs) -> VoteInputs:
    """Return votes whose one matrix for all parents is applied to the children: each has one vote, not M.

    Their poses come in the accumulation dtype. Other votes stay as they are.
    """
    weight, types = votes.weight, votes.children.shape[-3]
    if weight is None or votes.parents == 1 or weight.stride(1) != 0 or types % weight.shape[0]:
        return votes
    if weight.requires_grad and weight.is_leaf:  # its gradient has a matrix for each parent
        return votes
    children, weight, bias = widen(weight.dtype, *votes[:3])
    assert children is not None and weight is not None
    groups = children.unflatten(-3, (-1, weight.shape[0]))
    return votes._replace(children=(groups @ weight[:, 0]).flatten(-4, -3), weight=None, bias=bias)


def agreement(votes: VoteInputs, targets: Tensor) -> Tensor:
    """Return ``<Y_m, V_im>`` ``[*places, I, M]`` for Y ``[*places, M, C, E]``."""
    poses, weight, bias = _seen(votes)
    if weight is None:
        found = poses @ targets.flatten(-2).mT
    else:
        pulled = torch.einsum("...mce,gmde->...gmcd", targets, weight).flatten(-2)
        found = (_by_group(poses, weight) @ pulled.mT).transpose(-3, -2).flatten(-3, -2)
    return found if bias is None else found + torch.einsum("...mce,imce->...im", targets, bias)


def sums(votes: VoteInputs, coefficients: Tensor) -> Tensor:
    """Return ``sum_i r_im V_im`` ``[*places, M, C, E]`` for r ``[*places, I, M]``."""
    poses, weight, bias = _seen(votes)
    if weight is None:
        found = (coefficients.mT @ poses).unflatten(-1, votes.children.shape[-2:])
    else:
        gathered = _by_group(coefficients, weight).mT @ _by_group(poses, weight)
        gathered = gathered.unflatten(-1, votes.children.shape[-2:])
        found = torch.einsum("...gmcd,gmde->...mce", gathered, weight).contiguous()
    if bias is None:
        return found
    shares = coefficients if bias.shape[0] > 1 else coefficients.sum(-2, keepdim=True)
    return found + torch.einsum("...im,imce->...mce", shares, bias)


def _seen(votes: VoteInputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the poses that positions see ``[*places, I, C * D]``, weight and bias, in the accumulation dtype."""
    children, weight, bias = widen(votes.children.dtype, *votes[:3])
    assert children is not None
    return (children if children.dim() == 4 else windows(children, votes.window)).flatten(-2), weight, bias


def _by_group(values: Tensor, weight: Tensor) -> Tensor:
    """Return values of children ``[*places, I, n]`` as ``[*places, G, I / G, n]``."""
    return values.unflatten(-2, (-1, weight.shape[0])).transpose(-3, -2)
