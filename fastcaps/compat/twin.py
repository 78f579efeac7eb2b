"""The base of the twins: the names of published code, and what ``convert`` needs of a twin."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count

Draw = Callable[..., Tensor]
"""Returns random values of a shape, given as several ints."""


class Twin(nn.Module):
    """A published layer on fastcaps' kernels, with the published constructor, ``forward``, attributes and parameters.

    Names with a leading underscore are not published; :func:`~fastcaps.compat.convert` uses them.

    Attributes
    ----------
    _known_by : tuple of str
        The attributes by which a published layer is recognised, with the arguments of its constructor.
    _sizes : tuple of float
        Scales of the children on which the published layer and its twin are compared.
    _versions : tuple of dict
        Further arguments of the twin for each public version of the layer, the maintained one first.
    _drawn : (str, float)
        The parameter drawn from a normal distribution, and its standard deviation; all others start at zero.
    """

    _known_by: ClassVar[tuple[str, ...]]
    _sizes: ClassVar[tuple[float, ...]] = (1.0,)
    _versions: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    _drawn: tuple[str, float] = ("W", 1.0)

    def _count(self, **numbers: int) -> None:
        """Store arguments that must be ints >= 1."""
        for name, value in numbers.items():
            setattr(self, name, check_count(name, value))

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        drawn, std = self._drawn
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                parameter.normal_().mul_(std) if name == drawn else parameter.zero_()

    def extra_repr(self) -> str:
        given = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return ", ".join(f"{name}={value}" for name, value in given.items() if not isinstance(value, nn.Module))

    @classmethod
    def _unfit(cls, old: Any) -> str:
        """Return why a layer with the right attributes must be left unchanged; else an empty string."""
        return ""

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        """Return a twin, newly initialised, from a layer's attributes and further arguments."""
        names = inspect.signature(cls).parameters.keys() - options.keys()
        return cls(**{name: getattr(old, name) for name in cls._known_by if name in names}, **options)

    @classmethod
    def _renamed(cls, old: Any) -> list[dict[str, Any]]:
        """Return the arguments of the possible twins of a layer with other attribute names."""
        return []

    def _adopt(self, old: Any) -> None:
        """Use a layer's parameters, submodules and buffers."""
        for name in (*self._parameters, *self._modules, *self._buffers):
            setattr(self, name, getattr(old, name))

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        """Return arguments of ``forward`` on which to compare the two."""
        raise NotImplementedError
