"""Twins of class capsules whose logits are averaged over the batch, so that an image's result depends on the others.

The published layers differ in what competes and in the dimension of squash. In the twins a vector of zeros stays zero
and does not become NaN, and they run on their input's device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from fastcaps.checks import accumulation_dtype, known_arguments
from fastcaps.compat.twin import VectorTwin
from fastcaps.functional.verbs import Votes
from fastcaps.vectors import squash

SIDES = {"parents": 1, "children": 0}
VECTORS = {"pose": -1, "parents": 1, "number": -2}
"""The squashed dimension of parents ``[b, m, 1, e]``; over the one of size 1 every value is a vector of its own."""


class BatchAveraged(VectorTwin):
    r"""Dynamic routing in which the images of a batch share their logits.

    :math:`r = \operatorname{softmax} b`, with logits of 0 at first; :math:`v_m = \operatorname{squash} \sum_i r_{im}
    V_{im}`; in each of ``num_routing`` iterations, at least 1, :math:`b_{im}` grows by the batch's mean of
    :math:`\langle v_m, V_{im} \rangle`. The matrices are drawn from N(0, 1).

    Attributes
    ----------
    compete : str
        "parents" or "children", over which the softmax runs.
    squashed : str
        The vectors that squash shortens: each parent's "pose", one value of all "parents", or each "number".
    """

    num_routing = 3
    compete: str = "children"
    squashed: str
    _axes = "1imed"
    _probes = (("num_routing", range(1, 7)), ("compete", tuple(SIDES)), ("squashed", tuple(VECTORS)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the parents."""
        votes = Votes(*self._checked("x", x))
        logits = x.new_zeros((votes.count, votes.parents), dtype=accumulation_dtype(x.dtype))
        for iteration in range(self.num_routing):
            parents = squash(votes.sum(logits.softmax(SIDES[self.compete])), VECTORS[self.squashed])
            if iteration + 1 < self.num_routing:
                logits = logits + votes.agreement(parents).mean(0)
        return parents.transpose(-1, -2).to(x.dtype)


class DigitCaps(BatchAveraged):
    """``DigitCaps`` of Capsule-Network-Tutorial (higgsfield) and Pytorch-CapsuleNet (jindongwang): three iterations.

    It routes ``[batch, num_routes, in_channels]`` to ``[batch, num_capsules, out_channels, 1]`` by the parameter ``W``,
    ``[1, num_routes, num_capsules, out_channels, in_channels]``. The children compete; each value is squashed
    alone.
    """

    _names = ("num_routes", "in_channels", "num_capsules", "out_channels")
    _known_by = ("num_capsules", "num_routes", "in_channels", "W")
    squashed = "number"

    @partial(known_arguments, note="; compat.DigitCaps is the twin of another code")
    def __init__(
        self, num_capsules: int = 10, num_routes: int = 32 * 6 * 6, in_channels: int = 8, out_channels: int = 16
    ) -> None:
        super().__init__()
        self._make(num_routes, in_channels, num_capsules, out_channels)


class CapsuleLayer(BatchAveraged):
    """``CapsuleLayer`` of pytorch-capsule (timomernick), for routing: three iterations.

    It routes ``[batch, in_units, in_channels]``, children in channels, to ``[batch, num_units, unit_size, 1]`` by the
    parameter ``W``, ``[1, in_channels, num_units, unit_size, in_units]``. ``use_routing`` must be True: primary
    capsules, which are convolutions, have no twin. The children compete, and squash runs over the parents.
    """

    _names = ("in_channels", "in_units", "num_units", "unit_size")
    _known_by: ClassVar[tuple[str, ...]] = ("in_units", "in_channels", "num_units", "use_routing")
    _given = "bdi"
    squashed = "parents"

    @partial(known_arguments, note="; compat.CapsuleLayer is the twin of another code")
    def __init__(self, in_units: int, in_channels: int, num_units: int, unit_size: int, use_routing: bool) -> None:
        super().__init__()
        self._only_routes(use_routing)
        self._make(in_channels, in_units, num_units, unit_size)

    def _only_routes(self, use_routing: bool) -> None:
        if not use_routing:
            raise ValueError("use_routing must be True, as primary capsules are convolutions; got False")
        self.use_routing = True

    @classmethod
    def _routes(cls, old: Any) -> bool:
        return bool(old.use_routing)


class RoutedCapsuleLayer(CapsuleLayer):
    """``CapsuleLayer`` of capsule-net-pytorch (cedrickchee), for routing in ``num_routing`` iterations.

    It routes ``[batch, in_unit, in_channel]``, children in channels, to ``[batch, num_unit, unit_size, 1]`` by the
    parameter ``weight``, ``[1, in_channel, num_unit, unit_size, in_unit]``. ``use_routing`` must be True: primary
    capsules, which are convolutions, have no twin. ``cuda_enabled`` is stored without effect (in the published layer it
    places the logits). The parents compete, and squash runs over a pose.
    """

    num_routing: int
    _names = ("in_channel", "in_unit", "num_unit", "unit_size")
    _known_by = ("in_unit", "in_channel", "num_unit", "use_routing", "num_routing", "cuda_enabled")
    _drawn = "weight"
    compete, squashed = "parents", "pose"

    def __init__(
        self,
        in_unit: int,
        in_channel: int,
        num_unit: int,
        unit_size: int,
        use_routing: bool,
        num_routing: int,
        cuda_enabled: bool,
    ) -> None:
        BatchAveraged.__init__(self)
        self.cuda_enabled = cuda_enabled
        self._only_routes(use_routing)
        self._make(in_channel, in_unit, num_unit, unit_size, num_routing=num_routing)
