"""Squash capsules that lie in channels, weigh them and add: the reference, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from fastcaps.vectors import squash

__all__ = ["squash_sum"]


def squash_sum(x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int) -> Tensor:
    r"""Return :math:`\mathrm{squash}(x) a + \mathrm{squash}(y) b`, the squash over each capsule's numbers.

    Parameters
    ----------
    x, y : Tensor
        ``[B, types * dim, H, W]``; without y there is one summand.
    a, b : Tensor or None
        ``[B, types, H, W]``: one number for each capsule and position; 1 if None.
    types : int
        Capsule types, the slower of the two that make a channel.

    Returns
    -------
    Tensor
        Of the shape of x.
    """

    def part(capsules: Tensor, coefficient: Tensor | None) -> Tensor:
        found = squash(capsules.unflatten(1, (types, -1)), 2)
        return (found if coefficient is None else found * coefficient.unsqueeze(2)).flatten(1, 2)

    return part(x, a) if y is None else part(x, a) + part(y, b)
