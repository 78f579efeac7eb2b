"""The bases of the twins: the names of published code, and what ``convert`` needs of a twin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count, require_tensor, shape_text

Draw = Callable[..., Tensor]
"""Returns random values of a shape, given as several ints."""
Probes = tuple[tuple[str, Sequence[Any]], ...]


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
    _probes : tuple of (str, sequence)
        Attributes of the twin, and values of each with which it may agree with a changed copy of the code.
    _drawn, _std : str and float
        The parameter drawn from a normal distribution, and its standard deviation; all others start at zero.
    """

    _known_by: ClassVar[tuple[str, ...]]
    _sizes: ClassVar[tuple[float, ...]] = (1.0,)
    _versions: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    _probes: ClassVar[Probes] = ()
    _drawn: str = "W"
    _std: ClassVar[float] = 1.0

    def _count(self, **numbers: int) -> None:
        """Store arguments that must be ints >= 1."""
        for name, value in numbers.items():
            setattr(self, name, check_count(name, value))

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                parameter.normal_().mul_(self._std) if name == self._drawn else parameter.zero_()

    def extra_repr(self) -> str:
        given = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return ", ".join(f"{name}={value}" for name, value in given.items() if not isinstance(value, nn.Module))

    @classmethod
    def _routes(cls, old: Any) -> bool:
        """Return whether a layer with the right attributes routes, or makes primary capsules by convolutions."""
        return True

    @classmethod
    def _like(cls, old: Any, *parts: Any, **options: Any) -> Twin:
        """Return a twin, newly initialised, from the attributes of ``parts`` of a layer, or else its own, and further
        arguments."""
        for name, argument in inspect.signature(cls).parameters.items():
            holder = next((each for each in (*parts, old) if hasattr(each, name)), None)
            if holder is not None and argument.kind is not argument.KEYWORD_ONLY:
                options.setdefault(name, getattr(holder, name))
        return cls(**options)

    def _adopt(self, old: Any) -> None:
        """Use a layer's parameters, submodules and buffers."""
        for name in (*self._parameters, *self._modules, *self._buffers):
            setattr(self, name, getattr(old, name))

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        """Return arguments of ``forward`` on which to compare the two."""
        raise NotImplementedError


class VectorTwin(Twin):
    """A layer that routes vectors by a matrix for every child and parent; published layers differ in names and layout.

    Dimensions are letters: b the batch, i the children and d the components of a child's pose, m the parents and e
    those of a parent's, 1 a dimension of size 1.

    Attributes
    ----------
    _names : tuple of str
        The arguments of the constructor for i, d, m and e.
    _given : str
        The dimensions of the children.
    _axes : str
        The dimensions of the matrices, the parameter ``_drawn``.
    """

    # children that are small beside the weights agree almost equally with all parents, which hides differences
    _sizes = (1.0, 30.0)
    _names: ClassVar[tuple[str, str, str, str]]
    _given: ClassVar[str] = "bid"
    _axes: str

    def _make(self, *sizes: int, **others: int) -> None:
        """Store the sizes i, d, m and e, and others that must be ints >= 1, and create the matrices."""
        self._count(**dict(zip(self._names, sizes, strict=True)), **others)
        self.register_parameter(self._drawn, nn.Parameter(torch.empty([self._size(axis) for axis in self._axes])))
        self.reset_parameters()

    def _size(self, axis: str) -> int:
        return 1 if axis == "1" else getattr(self, self._names["idme".index(axis)])

    def _checked(self, name: str, children: Tensor) -> tuple[Tensor, Tensor]:
        """Return the children, an argument called ``name``, as ``[b, i, 1, d]``, and the matrices ``[i, m, d, e]``."""
        require_tensor(children, name)
        wanted = [self._size(axis) for axis in self._given[1:]]
        if children.dim() != 3 or list(children.shape[1:]) != wanted:
            raise ValueError(f"{name} must be [batch, {wanted[0]}, {wanted[1]}], got {shape_text(children)}")
        return arranged(children, self._given, "bi1d"), self._matrices()

    def _matrices(self) -> Tensor:
        """Return the matrices ``[i, m, d, e]``."""
        return arranged(getattr(self, self._drawn), self._axes, "imde")

    @classmethod
    def _like(cls, old: Any, *parts: Any, **options: Any) -> Twin:
        for axis, name in zip("idme", cls._names, strict=True):
            if name not in options and not hasattr(old, name):  # some layers do not store all sizes
                options[name] = getattr(old, cls._drawn).shape[cls._axes.index(axis)]
        return super()._like(old, *parts, **options)

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        return [(draw(2, *map(self._size, self._given[1:])),)]


def arranged(tensor: Tensor, axes: str, wanted: str) -> Tensor:
    """Return a tensor of dimensions ``axes`` in the order ``wanted``; those called 1 have size 1."""
    kept = axes.replace("1", "")
    found = tensor.squeeze(tuple(place for place, axis in enumerate(axes) if axis == "1"))
    found = found.permute([kept.index(axis) for axis in wanted if axis != "1"])
    for place, axis in enumerate(wanted):
        found = found.unsqueeze(place) if axis == "1" else found
    return found
