"""The function of EM routing (Hinton et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps import ops
from fastcaps.checks import check_choice, check_count, check_finite, check_table, is_tracing, known_arguments, widen
from fastcaps.functional.verbs import Votes, inputs_of
from fastcaps.reference.gaussian import benefits
from fastcaps.results import Capsules, RoutedCapsules
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs, Window, autocast_dtype

FIRST_COEFFICIENTS = ("uniform", "ones")
InverseTemperature = float | Sequence[float] | Callable[[int], float]
MOST_ITERATIONS = 1 << 24  # of EM and Heinsen routing, whose ops take a list with an entry for each


def inverse_temperatures(inverse_temperature: InverseTemperature | None, iterations: int) -> list[float]:
    """Return λ of every iteration, from one value, a value for each, or a function of the iteration (from 0).

    None is the usual ``0.01 (1 - 0.95^(iteration + 1))``.

    Examples
    --------
    >>> inverse_temperatures(1e-3, 3)
    [0.001, 0.001, 0.001]
    >>> inverse_temperatures(lambda iteration: 0.5 * iteration, 3)
    [0.0, 0.5, 1.0]
    """
    if iterations > MOST_ITERATIONS:
        raise ValueError(f"iterations must be at most {MOST_ITERATIONS}, got {iterations}")
    given: Any = (lambda k: 0.01 * (1 - 0.95 ** (k + 1))) if inverse_temperature is None else inverse_temperature
    if not is_tracing() and hasattr(given, "tolist") and not isinstance(given, Tensor):  # an array: no gradient is lost
        given = given.tolist()
    if callable(given):
        values = [given(iteration) for iteration in range(iterations)]
    elif isinstance(given, Sequence):
        values = list(given)
        if len(values) != iterations:
            raise ValueError(
                f"inverse_temperature must have a value for each of the {iterations} iterations, got {len(values)}"
            )
    else:
        values = [given] * iterations
    for value in values:
        check_finite("inverse_temperature", value, 0.0)
    return [float(value) for value in values]


@known_arguments
def em_routing(
    children: Tensor | Votes,
    activations: Tensor | None,
    weight: Tensor | None,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int = 3,
    inverse_temperature: InverseTemperature | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-8,
    window: Window | None = None,
    return_coefficients: bool = False,
    first_coefficients: str = "uniform",
    normalize_cost: bool = False,
) -> Capsules | RoutedCapsules:
    r"""Route children to parents by EM (Hinton et al. 2018, Procedure 1).

    .. math::
        V_{im} &= P_i W_{i \bmod G, m} + \text{bias}_{im}, \\
        r_{im} &= \operatorname{softmax}_m \Bigl(\ln a_m
                  - \sum_{ce} \ln \sigma_m - \sum_{ce} \frac{(V_{im} - \mu_m)^2}{2 \sigma_m^2}\Bigr), \quad
        n_m = \sum_i a_i r_{im}, \\
        \mu_m &= \sum_i \frac{a_i r_{im} V_{im}}{n_m}, \quad
        \sigma_m^2 = \sum_i \frac{a_i r_{im} (V_{im} - \mu_m)^2}{n_m}, \quad
        a_m = \operatorname{sigmoid}\bigl(\lambda_t (\beta_{a,m} - \sum_{ce} (\beta_{u,m} + \ln \sigma_m) n_m)\bigr)

    Each parent is a Gaussian with a diagonal variance. The parents compete for each child: the softmax runs over m. In
    the first iteration ``r = 1 / M`` (see ``first_coefficients``). The computation uses logarithms, so activations of 0
    and small variances never cause NaN. Activations weight the sums; r is not divided by them.

    Parameters
    ----------
    children, weight, bias, window
        See :class:`~fastcaps.Votes`; ``[B, I, C, D]`` or ``[B, N, H, W, C, D]``, ``[G, M, D, E]`` and
        ``[I or 1, M or 1, C, E]``. Children may also be :class:`~fastcaps.Votes`, which hold the others.
    activations : Tensor or None
        a_i of the children, in [0, 1], ``[B, I]`` or ``[B, N, H, W]``, or booleans; None is 1 for all. A child with an
        activation of 0 has no effect.
    beta_u, beta_a : Tensor
        ``[M]``: the cost of describing a child, per value of its pose; the benefit of activating a parent.
    iterations : int
        At least 1.
    inverse_temperature : float, sequence of float, callable, optional
        :math:`\lambda_t`: one value, a value for each iteration, or a function of the iteration (counted from 0). None
        is the usual ``0.01 (1 - 0.95^(iteration + 1))``.
    eps : float
        Added to n in the denominators of mean and variance, and to the variances.
    return_coefficients : bool
        Also return the r of the last iteration.
    first_coefficients : "uniform" or "ones"
        r of the first iteration: 1 / M, or 1 for every pair, as in SR-CapsNet's code (Hahn et al. 2019). Means and
        variances are the same except for ``eps``; n and the cost are M times as large.
    normalize_cost : bool
        Normalise :math:`\beta_a` minus the cost to mean 0 and variance 1 over the parents of a position, before it is
        multiplied by :math:`\lambda_t`, whose default is then 1. Without it, small :math:`\sigma` can push all
        activations to 1 (Li et al., 2018, appendix A, which does not say over what to normalise).

    Returns
    -------
    Capsules
        ``poses``: :math:`\mu`, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; ``activations``: ``[B, M]`` or
        ``[B, M, Ho, Wo]``. With ``return_coefficients`` a :class:`~fastcaps.results.RoutedCapsules`, which also has r,
        ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without gradient.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in :mod:`fastcaps.functional`.

    Examples
    --------
    >>> import torch
    >>> children, weight = torch.randn(2, 6, 4, 4), torch.randn(6, 3, 4, 4)
    >>> poses, activations = em_routing(children, torch.rand(2, 6), weight, torch.zeros(3), torch.zeros(3))
    >>> poses.shape, activations.shape
    (torch.Size([2, 3, 4, 4]), torch.Size([2, 3]))
    """
    others = (beta_u, beta_a)
    votes = inputs_of(
        children, weight, bias, activations, window,
        gate_name="activations", others=others, parents_at=0, check=_check,
    )  # fmt: skip
    iterations, eps = check_count("iterations", iterations), check_finite("eps", eps, 0.0)
    given = 1.0 if normalize_cost and inverse_temperature is None else inverse_temperature
    temperatures = inverse_temperatures(given, iterations)
    check_choice("first_coefficients", first_coefficients, FIRST_COEFFICIENTS)
    use, ignore = widen(votes.children.dtype, *others)
    own = ops.Gaussian(
        beta_use=use, beta_ignore=ignore, temperatures=temperatures, eps=eps, coefficients=bool(return_coefficients)
    )
    ones, first_votes = first_coefficients == "ones", votes
    if ones:  # the op starts from r = 1 / M, which gates M times as large make r = 1
        gate = torch.ones_like(votes.children[..., 0, 0]) if votes.gate is None else votes.gate
        first_votes = votes._replace(gate=gate * votes.parents)
    if normalize_cost:
        scores, poses, coefficients = _with_normalized_cost(first_votes, votes, own)
    else:
        if ones and iterations > 1:
            first = own._replace(temperatures=temperatures[:1], coefficients=False)
            state: Any = ops.gaussian_routing.advance(first, ops.gaussian_routing(first_votes, first))
            first_votes, own = votes, own._replace(temperatures=temperatures[1:], **state)
        scores, poses, *_, coefficients = ops.gaussian_routing(first_votes, own)
    if ones and iterations == 1 and return_coefficients:
        coefficients = coefficients * votes.parents
    dtype = result_dtype(votes)
    result = Capsules(votes.from_op(poses).to(dtype), votes.from_op(scores.sigmoid()).to(dtype))
    return RoutedCapsules(*result, votes.pairs_from_op(coefficients)) if return_coefficients else result


def _check(votes: VoteInputs, beta_u: Any, beta_a: Any) -> None:
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        check_table(name, beta, votes.children, [(votes.parents,)], "M", votes.autocasts)


def _with_normalized_cost(
    first_votes: VoteInputs, votes: VoteInputs, own: ops.Gaussian
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parents' scores and means, and the coefficients, with a separate op for every iteration.

    The op of Heinsen routing computes the moments; with a benefit of 1 and a cost of 0 its scores are the counts n.
    """
    beta_u, beta_a = own.beta_use, own.beta_ignore
    assert beta_u is not None and beta_a is not None
    one = beta_u.new_ones((1, 1))
    counting = own._replace(beta_use=one, beta_ignore=torch.zeros_like(one), rule=int(Rule.HEINSEN))

    def scored(temperature: float, results: Any) -> Tensor:
        benefit = benefits(results[0], results[2], beta_u, beta_a)
        return temperature * F.layer_norm(benefit, benefit.shape[-1:])

    def run(votes: VoteInputs, own: ops.Gaussian) -> Any:
        return ops.gaussian_routing(first_votes if own.mean is None else votes, own)

    def advance(own: ops.Gaussian, results: Any) -> dict[str, Tensor | None]:
        return ops.gaussian_routing.advance(own, (scored(own.temperatures[0], results), *results[1:3]))

    last = ops.gaussian_routing.iterate(run, votes, counting, advance)[-1]
    return scored(own.temperatures[-1], last), last[1], last[-1]


def result_dtype(votes: VoteInputs) -> torch.dtype:
    """Return the dtype of a routing's results: autocast's if it is on, else the children's."""
    children = votes.children
    return children.dtype if children.dtype == torch.float64 else autocast_dtype(children.device.type) or children.dtype


def coordinate_bias(
    height: int,
    width: int,
    types: int,
    rows: int,
    columns: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return coordinate addition (Hinton et al. 2018) as a bias of votes, for a window over the whole grid.

    With weights shared over a whole grid, a vote does not depend on the child's position. So the position,
    ``((y + 0.5) / height, (x + 0.5) / width)``, is added to the vote: to the first two values of a matrix's last
    column, or to the first two values of a vector.

    Parameters
    ----------
    height, width : int
        H, W of the grid.
    types : int
        N, child types at a position.
    rows, columns : int
        C, E of a parent's pose. C = 1 is a vector, of at least 2 values; a matrix has at least two rows.

    Returns
    -------
    Tensor
        ``[H * W * N, 1, C, E]``, in the order (y, x, n) of a window's children.

    Raises
    ------
    TypeError, ValueError
        For sizes that are not positive integers, or a pose without two values to add to.

    Examples
    --------
    >>> coordinate_bias(2, 1, 1, 2, 2)[:, 0]
    tensor([[[0.0000, 0.2500],
             [0.0000, 0.5000]],
    <BLANKLINE>
            [[0.0000, 0.7500],
             [0.0000, 0.5000]]])
    """
    for name, value in (("height", height), ("width", width), ("types", types), ("rows", rows), ("columns", columns)):
        check_count(name, value)
    if rows == 1 and columns < 2:
        raise ValueError(f"columns must be at least 2 for a vector pose (rows = 1) to hold coordinates, got {columns}")
    bias = torch.zeros((height, width, types, 1, rows, columns), device=device, dtype=dtype)
    down = (torch.arange(height, device=device, dtype=dtype or bias.dtype) + 0.5) / height
    across = (torch.arange(width, device=device, dtype=dtype or bias.dtype) + 0.5) / width
    first, second = ((0, 0), (0, 1)) if rows == 1 else ((0, columns - 1), (1, columns - 1))
    bias[..., first[0], first[1]] = down.view(-1, 1, 1, 1)
    bias[..., second[0], second[1]] = across.view(-1, 1, 1)
    return bias.flatten(0, 2)
