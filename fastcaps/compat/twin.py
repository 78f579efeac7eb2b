"""What the twins share: the names of published code, and what ``convert`` asks of a twin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, require_tensor, shape_text

__all__ = ["Draw", "DynamicTwin", "Twin"]

Draw = Callable[..., Tensor]
"""Draws random numbers of a shape, given as several ints."""


class Twin(nn.Module):
    """A published layer on fastcaps' kernels, with that code's constructor, ``forward``, attributes and parameters.

    Names that begin with an underscore are no published code's: they serve :func:`~fastcaps.compat.convert`.

    Attributes
    ----------
    _known_by : tuple of str
        The attributes by which a published layer is known, among them the arguments of its constructor.
    _sizes : tuple of float
        How large the children are that the published layer and its twin are compared on.
    _versions : tuple of dict
        More arguments of the twin, a dict for each public version of the layer; the maintained one first.
    """

    _known_by: ClassVar[tuple[str, ...]]
    _sizes: ClassVar[tuple[float, ...]] = (1.0,)
    _versions: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def _count(self, **numbers: int) -> None:
        """Keep arguments that must be whole numbers of 1 or more."""
        for name, value in numbers.items():
            setattr(self, name, check_count(name, value))

    def extra_repr(self) -> str:
        """All arguments by name, but for modules."""
        given = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return ", ".join(f"{name}={value}" for name, value in given.items() if not isinstance(value, nn.Module))

    @classmethod
    def _unfit(cls, old: Any) -> str:
        """Return why a layer that has the attributes is left alone all the same; an empty string if it need not be."""
        return ""

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        """Return a twin from a layer's attributes and further arguments, its numbers drawn anew."""
        arguments = inspect.signature(cls).parameters
        return cls(**{name: getattr(old, name) for name in cls._known_by if name in arguments}, **options)

    def _adopt(self, old: Any) -> None:
        """Take over a layer's parameters, submodules and buffers."""
        for name in (*self._parameters, *self._modules, *self._buffers):
            setattr(self, name, getattr(old, name))

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        """Return arguments of ``forward`` to compare the two on."""
        raise NotImplementedError


class DynamicTwin(Twin):
    """A layer of dynamic routing.

    Small children agree with every parent alike, whatever a copy of the code does with that, so larger ones are tried
    too. (The other routings normalise what they compare; large poses only magnify roundings there.)

    Attributes
    ----------
    _children : (str, str)
        The attributes that count the children, and the numbers in one.
    """

    _sizes = (1.0, 10.0)
    _children: ClassVar[tuple[str, str]]

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        return [(draw(2, *(getattr(self, name) for name in self._children)),)]

    def _route(self, name: str, children: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Route children ``[b, i, d]``, an argument called ``name``, by ``[i, m, d, e]`` to parents ``[b, m, e]``."""
        require_tensor(children, name)
        count, numbers = (getattr(self, each) for each in self._children)
        if children.dim() != 3 or children.shape[1:] != (count, numbers):
            raise ValueError(f"{name} must be [batch, {count}, {numbers}], got {shape_text(children)}")
        parents = functional.dynamic_routing(children.unsqueeze(-2), weight, **options)
        assert isinstance(parents, Tensor)
        return parents.squeeze(-2)
