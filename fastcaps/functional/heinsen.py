"""Heinsen routing (Heinsen 2019) as a function."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcaps import ops
from fastcaps.functional import explaining
from fastcaps.functional.arguments import (
    autocast,
    check_choice,
    check_count,
    check_eps,
    check_routing,
    check_table,
    chosen_backend,
    result_dtype,
    set_or_grid,
    wide,
)
from fastcaps.functional.em import last_shares
from fastcaps.geometry import SET_WINDOW, Window, from_op, to_op
from fastcaps.reference import routings

__all__ = ["heinsen_routing"]

MODELS = {"gaussian": 1, "kmeans": 2}  # as the routing op counts them


def heinsen_routing(
    children: Tensor,
    scores: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    beta_use: Tensor,
    beta_ignore: Tensor,
    *,
    iterations: int = 3,
    model: str = "gaussian",
    eps: float = 1e-5,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> tuple[Tensor, ...]:
    r"""Route children to parents by the algorithm of Heinsen 2019 (Algorithm 1).

    .. math::
        V_{im} &= P_i W_{i \bmod G, m} + b_{im}, \quad
        r_{im} = \operatorname{softmax}_m \bigl(\ln \operatorname{sigmoid}(a_m) + \ln p(V_{im})\bigr), \\
        D_{im} &= \operatorname{sigmoid}(a_i)\, r_{im}, \quad
        a_m = \sum_i \beta^{use}_{im} D_{im}
              - \sum_i \beta^{ign}_{im} (\operatorname{sigmoid}(a_i) - D_{im}), \\
        \mu_m &= \frac{\sum_i D_{im} V_{im}}{\sum_i D_{im} + \epsilon}, \quad
        \sigma_m^2 = \frac{\sum_i D_{im} (V_{im} - \mu_m)^2}{\sum_i D_{im} + \epsilon} + \epsilon

    The parents compete for each child (the softmax runs over m), in the first turn ``r = 1 / M``. p is the parent's
    Gaussian with a diagonal variance, or, for k-means, ``exp(-|V - mu|^2)``. No vote is stored.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    scores : Tensor or None
        a_i of the children, any numbers, ``[B, I]`` or ``[B, N, H, W]``. Minus infinity is a child that is not there
        and leaves no trace, plus infinity one that certainly is; None is plus infinity for all.
    weight : Tensor
        W, ``[G, M, D, E]``; child i, counted as (ky, kx, n) with n fastest, uses group i mod G. With G = 1, and one row
        in ``bias`` and betas, any number of children will do; with one column each (expand the weight), any number of
        parents (section 2.1.1 of the paper).
    bias : Tensor or None
        Added to votes, ``[I or 1, M or 1, C, E]``.
    beta_use, beta_ignore : Tensor
        ``[I or 1, M or 1]``: net benefit of using a child, net cost of ignoring it.
    iterations : int
        Turns, at least 1.
    model : "gaussian" or "kmeans"
        How likely a vote is under a parent.
    eps : float
        As in the equations.
    window : Window, optional
        Makes the call one over a grid.
    return_coefficients : bool
        Also return the r of the last turn.

    Returns
    -------
    scores : Tensor
        a_m, ``[B, M]`` or ``[B, M, Ho, Wo]``.
    means, variances : Tensor
        ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``.
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
    >>> children, weight, beta = torch.randn(2, 6, 4, 4), torch.randn(1, 3, 4, 4), torch.zeros(1, 3)
    >>> scores = torch.zeros(2, 6).masked_fill(torch.arange(6) >= torch.tensor([[6], [4]]), -torch.inf)
    >>> scores, means, variances = heinsen_routing(children, scores, weight, None, beta, beta)  # 6 children, and 4
    >>> scores.shape, means.shape
    (torch.Size([2, 3]), torch.Size([2, 3, 4, 4]))
    """
    sizes, cast = check_routing(children, weight, bias, scores, window, "scores")
    for name, beta in (("beta_use", beta_use), ("beta_ignore", beta_ignore)):
        check_table(name, beta, children, [(sizes.children, 1), (sizes.many, 1)], "I or 1, M or 1", cast)
    check_count("iterations", iterations)
    check_choice("model", model, tuple(MODELS))
    check_eps(eps)
    if explaining.watching():
        poses, shares = explaining.watch_routing("gaussian", children, weight, window, sizes.many)
        result: tuple[Tensor, ...] = (poses[..., 0, 0], poses, torch.ones_like(poses))
        return (*result, shares) if return_coefficients else result
    spec = SET_WINDOW if window is None else window.spec
    gate = None if scores is None else to_op(wide(children, scores).sigmoid().to(children.dtype), window)
    tensors = (to_op(children, window), weight, bias, gate)
    betas = (wide(children, beta_use), wide(children, beta_ignore))
    if chosen_backend(children, weight, "gaussian") == "reference":
        found = _by_reference(children, scores, weight, bias, *betas, iterations, model, eps, window)
    else:
        turns = [1.0] * iterations
        *found, _, _, _, _ = history = ops.gaussian_routing(*tensors, *betas, turns, MODELS[model], eps, spec)
        if return_coefficients:
            found.append(last_shares(*tensors, history[3:], MODELS[model], eps, spec))
    dtype = result_dtype(children)
    result = tuple(from_op(tensor, window).to(dtype) for tensor in found[:3])
    return (*result, set_or_grid(found[3], window)) if return_coefficients else result


def _by_reference(
    children: Tensor,
    scores: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    beta_use: Tensor,
    beta_ignore: Tensor,
    iterations: int,
    model: str,
    eps: float,
    window: Window | None,
) -> list[Tensor]:
    """Return scores, means, variances and shares in op layout."""
    if scores is None:
        scores = children.new_full(children.shape[:-2], torch.inf)
    grid, op_scores, weight, bias = autocast(
        children.device.type, to_op(children, window), to_op(scores, window), weight, bias
    )
    return list(
        routings.heinsen_routing(
            grid,
            op_scores,
            weight,
            bias,
            beta_use,
            beta_ignore,
            iterations=iterations,
            model=model,  # type: ignore[arg-type]
            eps=eps,
            window=SET_WINDOW if window is None else window.spec,
        )
    )
