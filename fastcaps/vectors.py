"""Lengths of vectors, unit vectors, and squashing, each with a derivative everywhere: at the zero vector it is 0.

The textbook formulas divide by the length there, and one capsule that is zero then turns every parameter into NaN.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["length", "squash", "unit"]

Dims = int | tuple[int, ...]


def length(vectors: Tensor, dim: Dims = -1, keepdim: bool = False) -> Tensor:
    r"""Return the Euclidean length :math:`\lVert v \rVert`, with gradient 0 at the zero vector.

    Neither the squares of very long vectors overflow nor those of very short ones vanish.

    Parameters
    ----------
    vectors : Tensor
        ``[..., d]``, or any shape with ``dim`` telling which numbers form a vector.
    dim : int or tuple of int
        The dimensions of one vector: -1 for flat poses, (-2, -1) for ``C x D`` ones.
    keepdim : bool
        Whether ``dim`` stays, with size 1.

    Returns
    -------
    Tensor
        ``[...]``.

    Examples
    --------
    >>> import torch
    >>> poses = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    >>> length(poses)
    tensor([5., 0.], grad_fn=<SqueezeBackward1>)
    >>> length(poses).sum().backward()
    >>> poses.grad
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    largest = vectors.detach().abs().amax(dim, keepdim=True)
    zero = largest == 0
    largest = largest.masked_fill(zero | ~largest.isfinite(), 1.0)
    squares = (vectors / largest).square().sum(dim, keepdim=True)
    result = squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0) * largest
    return result if keepdim else result.squeeze(dim)


def unit(vectors: Tensor, dim: Dims = -1) -> Tensor:
    r"""Return :math:`v / \lVert v \rVert`; the zero vector stays zero, with gradient 0.

    Parameters
    ----------
    vectors : Tensor
        ``[..., d]``, or any shape with ``dim`` telling which numbers form a vector.
    dim : int or tuple of int
        The dimensions of one vector.

    Returns
    -------
    Tensor
        Of the shape of ``vectors``.

    Examples
    --------
    >>> import torch
    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    size = length(vectors, dim, keepdim=True)
    zero = size == 0
    return (vectors / size.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def squash(vectors: Tensor, dim: Dims = -1) -> Tensor:
    r"""Return :math:`\frac{\lVert s \rVert^2}{1 + \lVert s \rVert^2} \frac{s}{\lVert s \rVert}` (Sabour et al. 2017).

    Directions stay, short vectors shrink towards zero, long ones towards length 1. The zero vector stays zero; the
    derivative there is 0, which is the formula's limit.

    Parameters
    ----------
    vectors : Tensor
        ``[..., d]``, or any shape with ``dim`` telling which numbers form a vector.
    dim : int or tuple of int
        The dimensions of one vector.

    Returns
    -------
    Tensor
        Of the shape of ``vectors``, with lengths in [0, 1).

    Examples
    --------
    >>> import torch
    >>> squash(torch.tensor([[0.0, 3.0], [0.0, 0.0]]))
    tensor([[0.0000, 0.9000],
            [0.0000, 0.0000]])
    """
    size = length(vectors, dim, keepdim=True)
    return vectors * (size / (1 + size.square()))
