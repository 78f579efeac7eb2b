"""The function of Heinsen routing (Heinsen 2019)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastcaps import ops
from fastcaps.checks import (
    accumulation_dtype,
    check_choice,
    check_count,
    check_finite,
    check_table,
    known_arguments,
    widen,
)
from fastcaps.functional.em import inverse_temperatures, result_dtype
from fastcaps.functional.verbs import Votes, inputs_of
from fastcaps.results import Gaussians, RoutedGaussians
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs, Window

MODELS = {"gaussian": int(Rule.HEINSEN), "kmeans": int(Rule.KMEANS)}


@known_arguments
def heinsen_routing(
    children: Tensor | Votes,
    scores: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    beta_use: Tensor,
    beta_ignore: Tensor,
    *,
    iterations: int = 3,
    model: str = "gaussian",
    eps: float = 1e-5,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> Gaussians | RoutedGaussians:
    r"""Route children to parents by Algorithm 1 of Heinsen 2019.

    .. math::
        V_{im} &= P_i W_{i \bmod G, m} + \text{bias}_{im}, \quad
        r_{im} = \operatorname{softmax}_m \bigl(\ln \operatorname{sigmoid}(a_m) + \ln p(V_{im})\bigr), \\
        w_{im} &= \operatorname{sigmoid}(a_i)\, r_{im}, \quad
        a_m = \sum_i \beta^{use}_{im} w_{im}
              - \sum_i \beta^{ign}_{im} (\operatorname{sigmoid}(a_i) - w_{im}), \\
        \mu_m &= \frac{\sum_i w_{im} V_{im}}{\sum_i w_{im} + \epsilon}, \quad
        \sigma_m^2 = \frac{\sum_i w_{im} (V_{im} - \mu_m)^2}{\sum_i w_{im} + \epsilon} + \epsilon

    The parents compete for each child: the softmax runs over m. In the first iteration ``r = 1 / M``. p is the parent's
    Gaussian with a diagonal variance or, for k-means, ``exp(-|V - mu|^2)``. No vote is stored.

    Parameters
    ----------
    children, weight, bias, window
        See :class:`~fastcaps.Votes`; ``[B, I, C, D]`` or ``[B, N, H, W, C, D]``, ``[G, M, D, E]`` and
        ``[I or 1, M or 1, C, E]``. Children may also be :class:`~fastcaps.Votes`, which hold the others. With G = 1 and
        one row in ``bias`` and betas, the number of children is free; with one column in each (expand the weight), the
        number of parents is free (section 2.1.1 of the paper). Without ``weight``, ``bias`` or betas set M.
    scores : Tensor or None
        a_i of the children, real values, ``[B, I]`` or ``[B, N, H, W]``. Minus infinity marks a child that does not
        exist and has no effect, plus infinity one that certainly exists; None is plus infinity for all.
    beta_use, beta_ignore : Tensor
        ``[I or 1, M or 1]``: net benefit of using a child, net cost of ignoring it.
    iterations : int
        At least 1.
    model : "gaussian" or "kmeans"
        The probability p of a vote.
    eps : float
        The epsilon of the equations.
    return_coefficients : bool
        Also return the r of the last iteration.

    Returns
    -------
    Gaussians
        ``poses``: the means, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; ``scores``: a_m, ``[B, M]`` or
        ``[B, M, Ho, Wo]``; ``variances``: as the means. With ``return_coefficients`` a
        :class:`~fastcaps.results.RoutedGaussians`, which also has r, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without
        gradient.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in :mod:`fastcaps.functional`.

    Examples
    --------
    >>> import torch
    >>> children, weight, beta = torch.randn(2, 6, 4, 4), torch.randn(1, 3, 4, 4), torch.zeros(1, 3)
    >>> scores = torch.zeros(2, 6).masked_fill(torch.arange(6) >= torch.tensor([[6], [4]]), -torch.inf)
    >>> poses, scores, variances = heinsen_routing(children, scores, weight, None, beta, beta)  # 6 children, and 4
    >>> scores.shape, poses.shape
    (torch.Size([2, 3]), torch.Size([2, 3, 4, 4]))
    """
    others = (beta_use, beta_ignore)
    votes = inputs_of(
        children, weight, bias, scores, window,
        gate_name="scores", others=others, parents_at=1, check=_check,
    )  # fmt: skip
    iterations, eps = check_count("iterations", iterations), check_finite("eps", eps, 0.0)
    check_choice("model", model, tuple(MODELS))
    if votes.gate is not None:  # scores, until here
        gate = votes.gate.to(accumulation_dtype(votes.children.dtype)).sigmoid()
        votes = votes._replace(gate=gate.to(votes.children.dtype))
    use, ignore = widen(votes.children.dtype, *others)
    own = ops.Gaussian(
        beta_use=use,
        beta_ignore=ignore,
        temperatures=inverse_temperatures(1.0, iterations),
        rule=MODELS[model],
        eps=eps,
        coefficients=bool(return_coefficients),
    )
    found, means, variances, *_, coefficients = ops.gaussian_routing(votes, own)
    dtype = result_dtype(votes)
    result = Gaussians(*(votes.from_op(tensor).to(dtype) for tensor in (means, found, variances)))
    return RoutedGaussians(*result, votes.pairs_from_op(coefficients)) if return_coefficients else result


def _check(votes: VoteInputs, beta_use: Any, beta_ignore: Any) -> None:
    for name, beta in (("beta_use", beta_use), ("beta_ignore", beta_ignore)):
        sizes = [(votes.seen, 1), (votes.parents, 1)]
        check_table(name, beta, votes.children, sizes, "I or 1, M or 1", votes.autocasts)
