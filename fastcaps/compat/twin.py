"""What the twins share: the names of published code, and what ``convert`` asks of a twin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count

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
    _drawn : (str, float)
        The parameter that is drawn from a normal distribution, and its standard deviation; all others start at zero.
    """

    _known_by: ClassVar[tuple[str, ...]]
    _sizes: ClassVar[tuple[float, ...]] = (1.0,)
    _versions: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    _drawn: tuple[str, float] = ("W", 1.0)

    def _count(self, **numbers: int) -> None:
        """Keep arguments that must be whole numbers of 1 or more."""
        for name, value in numbers.items():
            setattr(self, name, check_count(name, value))

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        drawn, std = self._drawn
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                parameter.normal_().mul_(std) if name == drawn else parameter.zero_()

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
        names = inspect.signature(cls).parameters.keys() - options.keys()
        return cls(**{name: getattr(old, name) for name in cls._known_by if name in names}, **options)

    @classmethod
    def _renamed(cls, old: Any) -> list[dict[str, Any]]:
        """Return more arguments of the twins that a layer with names of its own may be; none where nothing says."""
        return []

    def _adopt(self, old: Any) -> None:
        """Take over a layer's parameters, submodules and buffers."""
        for name in (*self._parameters, *self._modules, *self._buffers):
            setattr(self, name, getattr(old, name))

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        """Return arguments of ``forward`` to compare the two on."""
        raise NotImplementedError
