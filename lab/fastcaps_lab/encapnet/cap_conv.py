"""The layers of EncapNet (Li et al., 2018): routing approximated in one pass, capsules in channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastcaps.functional import squash
from fastcaps_lab.checks import check_choice


def rectified_squash(maps: Tensor, types: int) -> Tensor:
    """Return ``squash(ReLU(s))`` of capsules in channels, ``[B, types * dim, H, W]``, as ``[B, types, dim, H, W]``.

    :func:`fastcaps.functional.squash` scales each vector first, so that no square overflows; after a BatchNorm none
    does, and this formula takes half the time. It computes half types in float32.
    """
    poses = maps.relu().unflatten(1, (types, -1))
    wide = poses.to(torch.promote_types(maps.dtype, torch.float32))
    square = wide.square().sum(2, keepdim=True)
    length = square.clamp(min=torch.finfo(wide.dtype).tiny).sqrt()  # with a finite derivative at the zero vector
    return (wide * (length / (1 + square))).to(maps.dtype)


class CapConv2d(nn.Module):
    r"""Map capsules to the next layer's by two convolutions (Li et al., 2018, section 3.1).

    The *master* is a convolution grouped by capsule type: each type reads the same type below. The *aide*, not grouped
    and four pixels wider, reads all types. BatchNorm, ReLU and a squash over every capsule's values follow each of
    them, with results :math:`m` of the master and :math:`n` of the aide. The capsules of the next layer are

    .. math:: P = \mathrm{squash}(\mathrm{ReLU}(\mathrm{BN}(a \, m + b \, n + \text{skip})))

    where the coefficients :math:`a` and :math:`b`, one for each capsule and position, come from m and n by 3 x 3
    convolutions grouped by type.

    Capsules are in channels, ``[B, types * dim, H, W]``: type t has channels ``t * dim`` to ``t * dim + dim - 1``.

    Parameters
    ----------
    types, in_dim, out_dim : int
        Capsule types, below and above; components of a capsule below, and above.
    kernel_size, stride : int
        The master's kernel, odd: 3 in the paper's type I, which raises the dimension, 1 in its type II, which keeps it.
        The stride of both divides the map's height and width, rounded up.
    coefficients : "own", "other", "both" or "none"
        The source of a branch's coefficient: its own capsules (``master/aide_v1`` of Table 3), the other branch's
        (``v2``), or both (``v3``). "none": neither aide nor coefficients, only the master (the table's baseline).
    skip : bool
        Add the layer's input before the last BatchNorm, through a 3 x 3 convolution if the shapes differ.

    Examples
    --------
    >>> import torch
    >>> layer = CapConv2d(32, 2, 4, stride=2, skip=True)
    >>> layer(torch.randn(2, 64, 16, 17)).shape
    torch.Size([2, 128, 8, 9])
    """

    def __init__(
        self,
        types: int,
        in_dim: int,
        out_dim: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        coefficients: str = "both",
        skip: bool = False,
    ) -> None:
        super().__init__()
        self.types, self.in_dim, self.out_dim = types, in_dim, out_dim
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        check_choice("coefficients", coefficients, ("own", "other", "both", "none"))
        self.kernel_size, self.stride, self.coefficients, self.skip = kernel_size, stride, coefficients, skip
        below, above = types * in_dim, types * out_dim

        def convolution(size: int, groups: int = 1) -> nn.Conv2d:
            return nn.Conv2d(below, above, size, stride, padding=size // 2, groups=groups)

        self.master = convolution(kernel_size, types)
        branches, both = coefficients != "none", coefficients == "both"
        self.aide = convolution(kernel_size + 4) if branches else None
        self.master_norm = nn.BatchNorm2d(above) if branches else None
        self.aide_norm = nn.BatchNorm2d(above) if branches else None
        # with "both", the coefficients of the two branches are added, so one bias is enough
        count = (2 if both else 1) * types
        self.of_master = nn.Conv2d(above, count, 3, padding=1, groups=types) if branches else None
        self.of_aide = nn.Conv2d(above, count, 3, padding=1, groups=types, bias=not both) if branches else None
        self.shortcut = convolution(3) if skip and (in_dim != out_dim or stride != 1) else None
        self.norm = nn.BatchNorm2d(above)

    def forward(self, capsules: Tensor, skipped: Tensor | None = None) -> Tensor:
        """Return the capsules of the next layer, of lengths below 1: ``[B, types * out_dim, Ho, Wo]``.

        ``capsules`` are ``[B, types * in_dim, H, W]``. ``skipped``, of the result's shape, is added before the last
        BatchNorm instead of the layer's own input: the input of the first of several layers that one connection skips.
        """
        summed = self.combine(capsules)
        if skipped is not None:
            summed = summed + skipped
        elif self.skip:
            summed = summed + (capsules if self.shortcut is None else self.shortcut(capsules))
        return rectified_squash(self.norm(summed), self.types).flatten(1, 2)

    def combine(self, capsules: Tensor) -> Tensor:
        """Return a m + b n, before skip connection and BatchNorm."""
        master = self.master(capsules)
        if self.aide is None:
            return master
        assert self.master_norm is not None and self.aide_norm is not None
        assert self.of_master is not None and self.of_aide is not None
        m = rectified_squash(self.master_norm(master), self.types)
        n = rectified_squash(self.aide_norm(self.aide(capsules)), self.types)
        by_master, by_aide = self.of_master(m.flatten(1, 2)), self.of_aide(n.flatten(1, 2))
        if self.coefficients == "own":
            a, b = by_master, by_aide
        elif self.coefficients == "other":
            a, b = by_aide, by_master
        else:
            a, b = (by_master + by_aide).unflatten(1, (self.types, 2)).unbind(2)
        return (m * a.unsqueeze(2) + n * b.unsqueeze(2)).flatten(1, 2)


class CapFC(nn.Module):
    r"""Map all capsules to class capsules by a linear map for each value of a pose (Li et al., 2018, section 3.1).

    .. math:: p_{jk} = \sum_i W_{kij} \, p_{ik}, \quad P_j = \mathrm{squash}(p_j)

    Value k of a capsule above depends only on value k of the capsules below.

    Parameters
    ----------
    in_capsules, out_capsules : int
        Capsules below, types times height times width, and above, one per class.
    dim : int
        Components of a capsule, below and above.

    Examples
    --------
    >>> import torch
    >>> layer = CapFC(32 * 4 * 4, 10, 16)
    >>> layer(torch.randn(2, 32 * 16, 4, 4)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(self, in_capsules: int, out_capsules: int, dim: int) -> None:
        super().__init__()
        self.in_capsules, self.out_capsules, self.dim = in_capsules, out_capsules, dim
        bound = 1 / math.sqrt(in_capsules)  # as of a linear layer
        self.weight = nn.Parameter(torch.empty(dim, in_capsules, out_capsules).uniform_(-bound, bound))

    def forward(self, capsules: Tensor) -> Tensor:
        """Return the class capsules ``[B, out_capsules, dim]``, of lengths below 1.

        ``capsules`` are a map ``[B, types * dim, H, W]``, read types slowest, then rows, then columns.
        """
        given = capsules.unflatten(1, (-1, self.dim)).flatten(3).movedim(2, 0).flatten(2)  # [dim, B, in_capsules]
        return squash((given @ self.weight).permute(1, 2, 0)).contiguous()
