"""Twins of class capsules whose logits are averaged over the batch, so that an image's result depends on the others.

The copies differ in who competes, and over which dimension they squash. Here a vector of zeros stays zero, where theirs
becomes NaN, and all run on their input's device.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps.checks import accumulation_dtype, check_choice, known_arguments, require_tensor, shape_text
from fastcaps.compat.twin import Draw, Twin
from fastcaps.functional.verbs import Votes
from fastcaps.vectors import squash

SIDES = {"parents": 1, "children": 0}
VECTORS = {"pose": -1, "parents": 1, "number": -2}
"""The squashed dimension of parents ``[b, m, 1, e]``; over the one of size 1 every value is a vector of its own."""


class BatchAveraged(Twin):
    r"""Dynamic routing in which the images of a batch share their logits.

    :math:`r = \operatorname{softmax} b`, with logits of 0 at first; :math:`v_m = \operatorname{squash} \sum_i r_{im}
    V_{im}`; in each iteration :math:`b_{im}` grows by the batch's mean of :math:`\langle v_m, V_{im} \rangle`.

    Parameters
    ----------
    compete : str
        "parents" or "children", over which the softmax runs.
    squashed : str
        The vectors that squash shortens: each parent's "pose", one value of all "parents", or each "number".

    Attributes
    ----------
    num_routing : int
        Iterations, at least 1.
    _matrices : str
        The parameter, ``[1, children, parents, out, in]``, drawn from N(0, 1).
    _children_last : bool
        Whether the children, not the poses, are the last dimension of the input.
    """

    num_routing = 3
    _matrices: ClassVar[str] = "W"
    _children_last: ClassVar[bool] = True
    _sizes = (1.0, 10.0)

    def _make(self, shape: tuple[int, ...], compete: str, squashed: str) -> None:
        check_choice("compete", compete, tuple(SIDES))
        check_choice("squashed", squashed, tuple(VECTORS))
        self.compete, self.squashed = compete, squashed
        self.register_parameter(self._matrices, nn.Parameter(torch.empty(1, *shape)))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Route children, ``[batch, i, d]`` or ``[batch, d, i]``, to ``[batch, m, e, 1]``."""
        require_tensor(x, "x")
        shape = self._shape()
        if x.dim() != 3 or x.shape[1:] != shape:
            raise ValueError(f"x must be [batch, {shape[0]}, {shape[1]}], got {shape_text(x)}")
        children = x.transpose(1, 2) if self._children_last else x
        votes = Votes(children.unsqueeze(-2), getattr(self, self._matrices)[0].transpose(-1, -2))
        logits = x.new_zeros((votes.count, votes.parents), dtype=accumulation_dtype(x.dtype))
        for iteration in range(self.num_routing):
            parents = squash(votes.sum(logits.softmax(SIDES[self.compete])), VECTORS[self.squashed])
            if iteration + 1 < self.num_routing:
                logits = logits + votes.agreement(parents).mean(0)
        return parents.transpose(-1, -2).to(x.dtype)

    def _shape(self) -> tuple[int, int]:
        """Return the sizes of the input, without the batch."""
        _, count, _, _, size = getattr(self, self._matrices).shape
        return (size, count) if self._children_last else (count, size)

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        return [(draw(3, *self._shape()),)]


def versions(compete: str, squashed: str) -> tuple[dict[str, Any], ...]:
    """Return the arguments of all versions, the published layer's first."""
    every = [{"compete": side, "squashed": vector} for side, vector in product(SIDES, VECTORS)]
    own = {"compete": compete, "squashed": squashed}
    return (own, *(each for each in every if each != own))


class DigitCaps(BatchAveraged):
    """``DigitCaps`` of Capsule-Network-Tutorial (higgsfield) and Pytorch-CapsuleNet (jindongwang): three iterations.

    It routes ``[batch, num_routes, in_channels]`` to ``[batch, num_capsules, out_channels, 1]``.

    Parameters
    ----------
    num_capsules, num_routes : int
        Parents and children.
    in_channels, out_channels : int
        Values in a child's pose and in a parent's.
    compete, squashed : str
        See :class:`BatchAveraged`; in the published layer the children compete, and each value is squashed alone.

    Attributes
    ----------
    W : Parameter
        ``[1, num_routes, num_capsules, out_channels, in_channels]``, drawn from N(0, 1).
    """

    num_routes: int
    in_channels: int
    W: nn.Parameter
    _known_by = ("num_capsules", "num_routes", "in_channels", "W")
    _versions = versions("children", "number")
    _children_last = False

    @partial(known_arguments, note="; compat.DigitCaps is the twin of another code")
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
        self._count(num_capsules=num_capsules, num_routes=num_routes, in_channels=in_channels)
        self._count(out_channels=out_channels)
        self._make((num_routes, num_capsules, out_channels, in_channels), compete, squashed)

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, out_channels=old.W.shape[-2], **options)  # it has no such attribute


class CapsuleLayer(BatchAveraged):
    """``CapsuleLayer`` of pytorch-capsule (timomernick), for routing: three iterations.

    It routes ``[batch, in_units, in_channels]`` to ``[batch, num_units, unit_size, 1]``.

    Parameters
    ----------
    in_units, in_channels : int
        Values in a child's pose, and children.
    num_units, unit_size : int
        Parents, and the values in a parent's pose.
    use_routing : bool
        Must be True: primary capsules, which are convolutions, have no twin.
    compete, squashed : str
        See :class:`BatchAveraged`; in the published layer the children compete, and squash runs over the parents.

    Attributes
    ----------
    W : Parameter
        ``[1, in_channels, num_units, unit_size, in_units]``, drawn from N(0, 1).
    """

    in_units: int
    in_channels: int
    _known_by: ClassVar[tuple[str, ...]] = ("in_units", "in_channels", "num_units", "use_routing")
    _versions = versions("children", "parents")

    @partial(known_arguments, note="; compat.CapsuleLayer is the twin of another code")
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
        self._count(in_units=in_units, in_channels=in_channels, num_units=num_units, unit_size=unit_size)
        self._only_routes(use_routing)
        self._make((in_channels, num_units, unit_size, in_units), compete, squashed)

    def _only_routes(self, use_routing: bool) -> None:
        if not use_routing:
            raise ValueError("use_routing must be True, as primary capsules are convolutions; got False")
        self.use_routing = True

    @classmethod
    def _unfit(cls, old: Any) -> str:
        return "" if old.use_routing else "computes primary capsules by convolutions, routes nothing"

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, unit_size=getattr(old, cls._matrices).shape[-2], **options)  # it has none


class RoutedCapsuleLayer(CapsuleLayer):
    """``CapsuleLayer`` of capsule-net-pytorch (cedrickchee), for routing.

    It routes ``[batch, in_unit, in_channel]`` to ``[batch, num_unit, unit_size, 1]``.

    Parameters
    ----------
    in_unit, in_channel : int
        Values in a child's pose, and children.
    num_unit, unit_size : int
        Parents, and the values in a parent's pose.
    use_routing : bool
        Must be True: primary capsules, which are convolutions, have no twin.
    num_routing : int
        Iterations, at least 1.
    cuda_enabled : bool
        Stored, without effect: the published layer creates its logits there.
    compete, squashed : str
        See :class:`BatchAveraged`; in the published layer the parents compete, and squash runs over a pose.

    Attributes
    ----------
    weight : Parameter
        ``[1, in_channel, num_unit, unit_size, in_unit]``, drawn from N(0, 1).
    """

    in_unit: int
    in_channel: int
    num_routing: int
    _known_by = ("in_unit", "in_channel", "num_unit", "use_routing", "num_routing", "cuda_enabled")
    _matrices = "weight"
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
        BatchAveraged.__init__(self)
        self._count(in_unit=in_unit, in_channel=in_channel, num_unit=num_unit, unit_size=unit_size)
        self._count(num_routing=num_routing)
        self.cuda_enabled = cuda_enabled
        self._only_routes(use_routing)
        self._make((in_channel, num_unit, unit_size, in_unit), compete, squashed)
