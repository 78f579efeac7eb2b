"""EM routing (Hinton et al. 2018) as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import ops
from fastcaps.functional import explaining
from fastcaps.functional.arguments import (
    autocast,
    check_count,
    check_eps,
    check_finite,
    check_routing,
    check_table,
    chosen_backend,
    result_dtype,
    set_or_grid,
    wide,
)
from fastcaps.geometry import SET_WINDOW, Window, from_op, to_op
from fastcaps.reference import gaussian, routings
from fastcaps.reference.routings import default_inverse_temperature

__all__ = ["InverseTemperature", "coordinate_bias", "default_inverse_temperature", "em_routing", "schedule"]

InverseTemperature = float | Sequence[float] | Callable[[int], float]
EM = 0  # the model of the routing op


def schedule(inverse_temperature: InverseTemperature | None, iterations: int) -> list[float]:
    """Return λ of every turn.

    Parameters
    ----------
    inverse_temperature : float, sequence of float, callable or None
        The same λ for all turns; one for each; a function of the turn, which counts from 0; or the customary
        ``0.01 (1 - 0.95^(turn + 1))``.
    iterations : int
        Turns.

    Examples
    --------
    >>> schedule(1e-3, 3)
    [0.001, 0.001, 0.001]
    >>> schedule(lambda turn: 0.5 * turn, 3)
    [0.0, 0.5, 1.0]
    """
    given = default_inverse_temperature if inverse_temperature is None else inverse_temperature
    if callable(given):
        values = [given(turn) for turn in range(iterations)]
    elif isinstance(given, Sequence):
        values = list(given)
        if len(values) != iterations:
            raise ValueError(
                f"inverse_temperature must have a number for each of the {iterations} iterations, got {len(values)}"
            )
    else:
        values = [given] * iterations
    for value in values:
        check_finite("inverse_temperature", value, 0.0)
    return [float(value) for value in values]


def em_routing(
    children: Tensor,
    activations: Tensor | None,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int = 3,
    inverse_temperature: InverseTemperature | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-8,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> tuple[Tensor, ...]:
    r"""Route children to parents by EM (Hinton et al. 2018, Procedure 1).

    .. math::
        V_{im} &= P_i W_{i \bmod G, m} + b_{im}, \\
        r_{im} &= \operatorname{softmax}_m \Bigl(\ln a_m
                  - \sum_{ce} \ln \sigma_m - \sum_{ce} \frac{(V_{im} - \mu_m)^2}{2 \sigma_m^2}\Bigr), \quad
        n_m = \sum_i a_i r_{im}, \\
        \mu_m &= \sum_i \frac{a_i r_{im} V_{im}}{n_m}, \quad
        \sigma_m^2 = \sum_i \frac{a_i r_{im} (V_{im} - \mu_m)^2}{n_m}, \quad
        a_m = \operatorname{sigmoid}\Bigl(\lambda_t \bigl(\beta_{a,m} - \sum_{ce} (\beta_{u,m} + \ln \sigma_m)
              n_m\bigr)\Bigr)

    Each parent is a Gaussian with a diagonal variance; the parents compete for each child (the softmax runs over m),
    in the first turn ``r = 1 / M``. All is computed from logarithms, so that no activation of 0 and no small variance
    makes a NaN, and no vote is stored. The children's activations weigh them in the sums; they are not divided out.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    activations : Tensor or None
        a_i of the children, in [0, 1], ``[B, I]`` or ``[B, N, H, W]``; None is 1 for all. A child with an activation of
        0 leaves no trace.
    weight : Tensor
        W, ``[G, M, D, E]``; child i, counted as (ky, kx, n) with n fastest, uses group i mod G: G = I for own matrices,
        G = N shared over space, G = 1.
    beta_u, beta_a : Tensor
        ``[M]``: the cost of describing a child, per number of its pose; the benefit of a parent's being active.
    iterations : int
        Turns, at least 1.
    inverse_temperature : float, sequence of float, callable, optional
        :math:`\lambda_t`: a number, one for each turn, or a function of the turn (counted from 0). None is the
        customary ``0.01 (1 - 0.95^(turn + 1))``.
    bias : Tensor, optional
        Added to votes, ``[I or 1, M or 1, C, E]``; see :func:`coordinate_bias`.
    eps : float
        Added to n under the moments, and to the variances.
    window : Window, optional
        Makes the call one over a grid.
    return_coefficients : bool
        Also return the r of the last turn.

    Returns
    -------
    poses : Tensor
        :math:`\mu`, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``.
    activations : Tensor
        ``[B, M]`` or ``[B, M, Ho, Wo]``.
    coefficients : Tensor
        r, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without gradient. Only with ``return_coefficients``, which alone
        needs memory for them, and for the votes.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, device, shape, count or window; the message names it.
    BackendError
        If a forced backend cannot take the call.

    Examples
    --------
    >>> import torch
    >>> children, weight = torch.randn(2, 6, 4, 4), torch.randn(6, 3, 4, 4)
    >>> poses, activations = em_routing(children, torch.rand(2, 6), weight, torch.zeros(3), torch.zeros(3))
    >>> poses.shape, activations.shape
    (torch.Size([2, 3, 4, 4]), torch.Size([2, 3]))
    """
    sizes, cast = check_routing(children, weight, bias, activations, window, "activations")
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        check_table(name, beta, children, [(sizes.many,)], "M", cast)
    check_count("iterations", iterations)
    check_eps(eps)
    temperatures = schedule(inverse_temperature, iterations)
    if explaining.watching():
        poses, shares = explaining.watch_routing("gaussian", children, weight, window, sizes.many)
        result = (poses, poses[..., 0, 0])
        return (*result, shares) if return_coefficients else result
    spec = SET_WINDOW if window is None else window.spec
    gate = None if activations is None else to_op(activations, window)
    tensors = (to_op(children, window), weight, bias, gate)
    betas = (wide(children, beta_u), wide(children, beta_a))
    found: tuple[Tensor, ...]
    if chosen_backend(children, weight, "gaussian") == "reference":
        grid, weight, bias, gate = autocast(children.device.type, *tensors)
        settings: dict[str, Any] = {"iterations": iterations, "eps": eps, "window": spec}
        gate = grid.new_ones(grid.shape[:4]) if gate is None else gate
        found = routings.em_routing(
            grid, gate, weight, *betas, bias, inverse_temperature=lambda turn: temperatures[turn], **settings
        )
    else:
        scores, means, _, *history = ops.gaussian_routing(*tensors, *betas, temperatures, EM, eps, spec)
        found = (means, scores.sigmoid())
        if return_coefficients:
            found = (*found, last_shares(*tensors, history, EM, eps, spec))
    dtype = result_dtype(children)
    result = (from_op(found[0], window).to(dtype), from_op(found[1], window).to(dtype))
    return (*result, set_or_grid(found[-1], window)) if return_coefficients else result


@torch.no_grad()
def last_shares(
    children: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    history: Sequence[Tensor],
    model: int,
    eps: float,
    spec: Sequence[int],
) -> Tensor:
    """Return r of the last turn of a Gaussian routing, ``[B, Ho, Wo, I, M]``, from what the turns left behind.

    ``history``: counts, means, variances (without ``eps``) and scores of every turn; ``model``: as the op counts them,
    2 being k-means.
    """
    children, weight, bias, gate = autocast(children.device.type, children, weight, bias, gate)
    _, means, variances, scores = history
    mean = variance = log_weight = None
    if len(means) > 1:
        mean, variance = means[-2], variances[-2] + eps
        log_weight = torch.nn.functional.logsigmoid(scores[-2])
        if model == 2:
            variance = None
        else:
            log_weight = log_weight - 0.5 * variance.log().sum((-2, -1))
    return gaussian.coefficients(children, weight, mean, variance, log_weight, bias, spec)


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
    """Return coordinate addition (Hinton et al. 2018) as a bias of votes, for a window that spans the whole grid.

    Where one layer sees a whole grid with weights shared over space, a vote would not know its place. So the place of
    the child, ``((y + 0.5) / height, (x + 0.5) / width)``, is added to its vote: to the first two numbers of a matrix's
    right-hand column, to the first two numbers of a vector.

    Parameters
    ----------
    height, width : int
        H, W of the grid.
    types : int
        N, child types at a position.
    rows, columns : int
        C, E of a parent's pose. C = 1 is a vector, of at least 2 numbers; a matrix has at least two rows.

    Returns
    -------
    Tensor
        ``[H * W * N, 1, C, E]``, in the order (y, x, n) of a window's children.

    Raises
    ------
    TypeError, ValueError
        For sizes that are not positive integers, or a pose without two numbers to add to.

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
