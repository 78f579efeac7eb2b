"""A call's arguments by name, with a cotangent of each result: drawn from a seed, cut, cast and moved together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Inputs", "is_batched", "size_of"]

_OF_SAMPLES = {"children", "parents", "activations", "scores", "poses", "means", "variances"}


def is_batched(name: str) -> bool:
    """Tell whether an argument or a result, or its gradient ``d`` + name, has the batch as its first dimension."""
    return name in _OF_SAMPLES or (name[0] == "d" and name[1:] in _OF_SAMPLES)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the numbers in tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one routing, and the cotangents of its results for the training step, in public layout.

    Grids lie in memory with a position's capsules together (B, H, W, N, C, D), as the layer before leaves them.
    """

    arguments: dict[str, Tensor]  # by name; what is absent is not there
    grads: dict[str, Tensor]  # a cotangent for each result, by the result's name, in order
    fixed: tuple[str, ...] = ()  # arguments that no training step differentiates

    @property
    def children(self) -> Tensor:
        """The children's poses."""
        return self.arguments["children"]

    @property
    def learned(self) -> dict[str, Tensor]:
        """The arguments that a training step differentiates."""
        return {name: tensor for name, tensor in self.arguments.items() if name not in self.fixed}

    def each(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """Return the same with every tensor changed."""
        arguments, grads = ({n: change(n, t) for n, t in given.items()} for given in (self.arguments, self.grads))
        return replace(self, arguments=arguments, grads=grads)

    def to(self, target: torch.dtype | torch.device) -> Inputs:
        """Return the same numbers in another dtype or on another device, cut off from any graph."""
        return self.each(lambda _, tensor: tensor.detach().to(target))

    def samples(self, part: slice | Sequence[int]) -> Inputs:
        """Return the samples ``part`` of the batch; what has no batch stays whole."""
        return self.each(lambda name, tensor: tensor[part] if is_batched(name) else tensor)

    def require_grad(self) -> Inputs:
        """Let every argument that is learned require its gradient, in place; return self."""
        for tensor in self.learned.values():
            tensor.requires_grad_()
        return self
