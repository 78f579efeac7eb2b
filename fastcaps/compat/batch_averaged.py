"""Twins of class capsules whose logits are averaged over the batch: what an image gives depends on its neighbours.

The copies differ in who competes for whom, and in what their squash takes for a vector. A vector of zeros stays zero
here, where theirs becomes NaN, and all run wherever their input is.
"""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps.checks import accumulation_dtype, require_tensor, shape_text
from fastcaps.compat.dynamic import DynamicTwin
from fastcaps.compat.twin import Twin
from fastcaps.functional.verbs import Votes
from fastcaps.vectors import squash

SIDES = {"parents": 1, "children": 0}
VECTORS = {"pose": -1, "parents": 1, "number": -2}
"""Dimensions of the parents ``[b, m, 1, e]``; that of size 1 takes every number for a vector by itself."""


class BatchAveraged(DynamicTwin):
    r"""Dynamic routing in which the images of a batch share their logits.

    :math:`r = \operatorname{softmax} b`, from logits of 0; :math:`v_m = \operatorname{squash} \sum_i r_{im} V_{im}`;
    and :math:`b_{im}` grows by the mean over the batch of :math:`\langle v_m, V_{im} \rangle`. The matrices are
    ``[1, children, parents, numbers in a parent's pose, in a child's]``, drawn from N(0, 1).

    Parameters
    ----------
    compete : str
        "parents" or "children": over whom the softmax runs.
    squashed : str
        What squash takes for a vector: a parent's "pose", a number of the poses of all "parents", each "number".
    """

    _children: ClassVar[tuple[str, str]]  # in the order of the input's dimensions
    _out: ClassVar[str]
    use_routing: bool

    def _make(self, compete: str, squashed: str, **sizes: int) -> None:
        """Keep the arguments; sizes are children, parents, and the numbers in their poses: parents' first."""
        self._count(**sizes)
        for name, value, known in (("compete", compete, SIDES), ("squashed", squashed, VECTORS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.compete, self.squashed = compete, squashed
        self.register_parameter(self._drawn[0], nn.Parameter(torch.empty(1, *sizes.values())))
        self.reset_parameters()

    def _only_routes(self, use_routing: bool) -> None:
        if not use_routing:
            raise ValueError(
                "use_routing must be True: primary capsules are convolutions, and stay the published layer"
            )
        self.use_routing = True

    def _averaged(self, x: Tensor, iterations: int, transposed: bool = False) -> Tensor:
        """Route children ``[batch, i, d]``, or transposed ones, to ``[batch, m, e, 1]``."""
        require_tensor(x, "x")
        sizes = tuple(getattr(self, name) for name in self._children)
        if x.dim() != 3 or x.shape[1:] != sizes:
            raise ValueError(f"x must be [batch, {sizes[0]}, {sizes[1]}], got {shape_text(x)}")
        children = x.transpose(1, 2) if transposed else x
        votes = Votes(children.unsqueeze(-2), getattr(self, self._drawn[0])[0].transpose(-1, -2))
        logits = x.new_zeros((votes.count, votes.parents), dtype=accumulation_dtype(x.dtype))
        for iteration in range(iterations):
            parents = squash(votes.sum(logits.softmax(SIDES[self.compete])), VECTORS[self.squashed])
            if iteration + 1 < iterations:
                logits = logits + votes.agreement(parents).mean(0)
        return parents.transpose(-1, -2).to(x.dtype)

    @classmethod
    def _unfit(cls, old: Any) -> str:
        return "" if getattr(old, "use_routing", True) else "makes primary capsules by convolutions, routes nothing"

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, **{cls._out: getattr(old, cls._drawn[0]).shape[-2]}, **options)  # not all keep it


def versions(compete: str, squashed: str) -> tuple[dict[str, Any], ...]:
    """Return the arguments of all versions, the published layer's first."""
    every = [{"compete": side, "squashed": vector} for side, vector in product(SIDES, VECTORS)]
    own = {"compete": compete, "squashed": squashed}
    return (own, *(each for each in every if each != own))


class DigitCaps(BatchAveraged):
    """``DigitCaps`` of Capsule-Network-Tutorial (higgsfield) and Pytorch-CapsuleNet (jindongwang): three iterations.

    The children compete, and each number is squashed by itself. The matrices are ``W``; ``num_routes`` counts children,
    ``in_channels`` and ``out_channels`` the numbers in a child's pose and in a parent's. See :class:`BatchAveraged`.
    """

    num_routes: int
    in_channels: int
    _children, _out = ("num_routes", "in_channels"), "out_channels"
    _known_by = ("num_capsules", *_children, "W")
    _versions = versions("children", "number")

    def __init__(
        self,
        num_capsules: int = 10,
        num_routes: int = 32 * 6 * 6,
        in_channels: int = 8,
        out_channels: int = 16,
        *,
        compete: str = "children",
        squashed: str = "number",
    ) -> None:
        super().__init__()
        sizes = {"out_channels": out_channels, "in_channels": in_channels}
        self._make(compete, squashed, num_routes=num_routes, num_capsules=num_capsules, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, num_routes, in_channels]`` to ``[batch, num_capsules, out_channels, 1]``."""
        return self._averaged(x, 3)


class CapsuleLayer(BatchAveraged):
    """``CapsuleLayer`` of pytorch-capsule (timomernick) where it routes: three iterations.

    The children compete, and squash takes lengths over the parents. The matrices are ``W``; ``in_channels`` counts
    children, ``in_units`` the numbers in a child's pose. See :class:`BatchAveraged`.
    """

    _children, _out = ("in_units", "in_channels"), "unit_size"
    _known_by = (*_children, "num_units", "use_routing")
    _versions = versions("children", "parents")

    def __init__(
        self,
        in_units: int,
        in_channels: int,
        num_units: int,
        unit_size: int,
        use_routing: bool,
        *,
        compete: str = "children",
        squashed: str = "parents",
    ) -> None:
        super().__init__()
        self._only_routes(use_routing)
        sizes = {"unit_size": unit_size, "in_units": in_units}
        self._make(compete, squashed, in_channels=in_channels, num_units=num_units, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, in_units, in_channels]`` to ``[batch, num_units, unit_size, 1]``."""
        return self._averaged(x, 3, transposed=True)


class RoutedCapsuleLayer(BatchAveraged):
    """``CapsuleLayer`` of capsule-net-pytorch (cedrickchee) where it routes.

    The parents compete, and a pose is squashed. The matrices are ``weight``; ``in_channel`` counts children,
    ``in_unit`` the numbers in a child's pose. ``cuda_enabled`` has no effect. See :class:`BatchAveraged`.
    """

    num_routing: int
    _children, _out = ("in_unit", "in_channel"), "unit_size"
    _known_by = (*_children, "num_unit", "use_routing", "num_routing", "cuda_enabled")
    _drawn = ("weight", 1.0)
    _versions = versions("parents", "pose")

    def __init__(
        self,
        in_unit: int,
        in_channel: int,
        num_unit: int,
        unit_size: int,
        use_routing: bool,
        num_routing: int,
        cuda_enabled: bool,
        *,
        compete: str = "parents",
        squashed: str = "pose",
    ) -> None:
        super().__init__()
        self._only_routes(use_routing)
        self._count(num_routing=num_routing)
        self.cuda_enabled = cuda_enabled
        sizes = {"unit_size": unit_size, "in_unit": in_unit}
        self._make(compete, squashed, in_channel=in_channel, num_unit=num_unit, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, in_unit, in_channel]`` to ``[batch, num_unit, unit_size, 1]``."""
        return self._averaged(x, self.num_routing, transposed=True)
