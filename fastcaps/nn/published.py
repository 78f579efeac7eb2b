"""How the layers of published capsule code are recognised, rebuilt and tried out, for :func:`fastcaps.convert`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.compat import (
    caps_layer,
    capsule_network,
    dense_capsule,
    digit_caps,
    heinsen_routing,
    matrix_capsules,
    ml_capsules,
    routing_capsules,
)

__all__ = ["Published", "published"]

Draw = Callable[..., Tensor]


class Published(ABC):
    """One published layer and our twin of it.

    Parameters
    ----------
    ours : type
        The twin, whose class has the name of the published one.
    arguments : sequence of str
        The constructor's arguments that the layer keeps as attributes.
    parameters : sequence of str
        Its own parameters, which the twin takes over.
    optional : sequence of str
        Those of them that some copies of the code lack.
    submodules, buffers : sequence of str
        Its submodules, which the twin takes over, and its buffers.

    Attributes
    ----------
    sizes : tuple of float
        How large the children are that the two are compared on.
    versions : tuple of dict
        More arguments of the twin, a dict for each public version of the layer; the maintained one first.
    """

    sizes: tuple[float, ...] = (1.0,)
    versions: tuple[dict[str, Any], ...] = ({},)

    def __init__(
        self,
        ours: type[nn.Module],
        arguments: Sequence[str],
        parameters: Sequence[str],
        submodules: Sequence[str] = (),
        buffers: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> None:
        self.ours = ours
        self.arguments = tuple(arguments)
        self.parameters = tuple(parameters)
        self.submodules = tuple(submodules)
        self.buffers = tuple(buffers)
        self.optional = tuple(optional)

    @property
    def name(self) -> str:
        """The name of the published class."""
        return self.ours.__name__

    def missing(self, old: Any) -> list[str]:
        """The attributes by which the layer is known and that ``old`` has not."""
        return [name for name in (*self.arguments, *self.submodules) if not hasattr(old, name)]

    def held(self, old: Any) -> tuple[str, ...]:
        """The parameters to be found in a layer: all but the optional ones that it lacks."""
        return tuple(name for name in self.parameters if name not in self.optional or hasattr(old, name))

    def unfit(self, old: Any) -> str:
        """Why a layer that has the attributes is left alone all the same; an empty string if it need not be."""
        return ""

    def construct(self, old: Any, **options: Any) -> nn.Module:
        """A twin from the layer's attributes and the options of a version, its numbers drawn anew."""
        return self.ours(**{name: getattr(old, name) for name in self.arguments}, **options)

    def adopt(self, old: Any, new: nn.Module) -> None:
        """Give the twin what the layer holds."""
        for name in (*self.held(old), *self.submodules, *self.buffers):
            setattr(new, name, getattr(old, name))

    @abstractmethod
    def calls(self, new: Any, draw: Draw) -> list[tuple[Any, ...]]:
        """Arguments of ``forward`` to compare the two on; ``draw(*shape)`` gives random numbers."""


class _MlCapsules(Published):
    """The layers of Tsai et al."""

    def __init__(self, ours: type[nn.Module], *more: str) -> None:
        names = ("in_n_capsules", "in_d_capsules", "out_n_capsules", "out_d_capsules", "matrix_pose", *more)
        super().__init__(ours, names, ("w",), ("nonlinear_act", "drop"))
        if ours is ml_capsules.CapsuleCONV:
            self.versions = ({}, {"mixed_windows": True})

    def unfit(self, old: Any) -> str:
        fits = isinstance(old.nonlinear_act, nn.LayerNorm) and isinstance(old.drop, nn.Dropout)
        return "" if fits else "nonlinear_act must be a LayerNorm and drop a Dropout"

    def construct(self, old: Any, **options: Any) -> nn.Module:
        if self.ours is ml_capsules.CapsuleCONV:
            options["coordinate_add"] = getattr(old, "coordinate_add", False)
        return super().construct(old, dp=old.drop.p, **options)

    def adopt(self, old: Any, new: Any) -> None:
        super().adopt(old, new)
        for name in ("weight_init_const", "dropout_rate", "scale"):
            if hasattr(old, name):
                setattr(new, name, getattr(old, name))
        new.scale = float(new.scale)

    def calls(self, new: Any, draw: Draw) -> list[tuple[Any, ...]]:
        conv = self.ours is ml_capsules.CapsuleCONV
        grid = (new.kernel_size, new.kernel_size + new.stride) if conv else ()
        children = draw(2, new.in_n_capsules, *grid, new.in_d_capsules)
        parents = draw(2, new.out_n_capsules, *((1, 2) if conv else ()), new.out_d_capsules)
        return [(children, 0, None), (children, 0, parents)]


class _Dynamic(Published):
    """A layer of dynamic routing; by default Guo's. Small children agree with every parent alike, whatever a copy does
    with that: so larger ones are tried too. (The other routings norm what they compare; large poses only magnify
    roundings there.)

    ``children`` names the attributes that count the children, and the numbers in one.
    """

    sizes = (1.0, 10.0)
    children = ("in_num_caps", "in_dim_caps")

    def calls(self, new: Any, draw: Draw) -> list[tuple[Any, ...]]:
        return [(draw(2, *(getattr(new, name) for name in self.children)),)]


class _RoutingCapsules(_Dynamic):
    """Havir's layer; some copies know no device."""

    children = ("in_caps", "in_dim")

    def construct(self, old: Any, **options: Any) -> nn.Module:
        return super().construct(old, device=getattr(old, "device", None), **options)


class _CapsLayer(_Dynamic):
    """Bielski's layer; its routing module stays, as what holds the logits."""

    children = ("input_caps", "input_dim")

    def unfit(self, old: Any) -> str:
        routing = old.routing_module
        if type(routing).__name__ != "AgreementRouting" or not hasattr(routing, "b"):
            return f"routing_module must be an AgreementRouting with logits b, got {type(routing).__name__}"
        return ""

    def construct(self, old: Any, **options: Any) -> nn.Module:
        return super().construct(old, routing_module=old.routing_module, **options)


class _DigitCaps(_Dynamic):
    """cezannec's layer, which does not keep the size of a parent."""

    children = ("previous_layer_nodes", "in_channels")

    def construct(self, old: Any, **options: Any) -> nn.Module:
        return super().construct(old, out_channels=old.W.shape[-1], **options)


class _CapsuleLayer(_Dynamic):
    """gram-ai's layer, where it routes; it keeps no sizes of poses."""

    children = ("num_route_nodes", "in_channels")

    def unfit(self, old: Any) -> str:
        return "makes primary capsules by convolutions, routes nothing" if old.num_route_nodes == -1 else ""

    def construct(self, old: Any, **options: Any) -> nn.Module:
        options["learned_logits"] = "route_logits" in self.held(old)
        return self.ours(*old.route_weights.shape, num_iterations=old.num_iterations, **options)


class _ConvCaps(Published):
    """yl-1993's layer."""

    def calls(self, new: Any, draw: Draw) -> list[tuple[Any, ...]]:
        size = new.K + 2 * new.stride - 1  # two windows a side, by the formula of the first versions too
        activations = draw(2, size, size, new.B).sigmoid()
        return [(torch.cat([draw(2, size, size, new.B * new.psize), activations], dim=3),)]


class _Heinsen(Published):
    """Heinsen's layer."""

    def calls(self, new: Any, draw: Draw) -> list[tuple[Any, ...]]:
        count = 5 if new.n_inp < 0 else new.n_inp
        return [(draw(2, count), draw(2, count, new.d_cov, new.d_inp))]


@cache
def published() -> dict[str, tuple[Published, ...]]:
    """Return the published layers by the names of their classes, of which several codes may have the same; made when
    asked for, as the twins' modules import this package."""
    dense = ("in_num_caps", "in_dim_caps", "out_num_caps", "out_dim_caps", "routings")
    havir = ("in_dim", "in_caps", "num_caps", "dim_caps", "num_routing")
    bielski = ("input_caps", "input_dim", "output_caps", "output_dim")
    layer = ("num_capsules", "num_route_nodes", "num_iterations")
    cezannec = ("num_capsules", "previous_layer_nodes", "in_channels")
    conv = ("B", "C", "K", "P", "stride", "iters", "coor_add", "w_shared")
    heinsen = heinsen_routing.GenerativeMatrixRouting
    routing = _RoutingCapsules(routing_capsules.RoutingCapsules, havir, ("W",))
    every = (
        _MlCapsules(ml_capsules.CapsuleFC),
        _MlCapsules(ml_capsules.CapsuleCONV, "kernel_size", "stride"),
        _Dynamic(dense_capsule.DenseCapsule, dense, ("weight",)),
        routing,
        _CapsLayer(caps_layer.CapsLayer, bielski, ("weights",), ("routing_module",)),
        _DigitCaps(digit_caps.DigitCaps, cezannec, ("W",)),
        _CapsuleLayer(
            capsule_network.CapsuleLayer, layer, ("route_weights", "route_logits"), optional=("route_logits",)
        ),
        _ConvCaps(matrix_capsules.ConvCaps, conv, ("weights", "beta_u", "beta_a")),
        _Heinsen(heinsen, heinsen_routing.NAMES, ("W", "B", "beta_use", "beta_ign"), buffers=("CONST_one",)),
    )
    named = {each.name: (each,) for each in every}
    return {**named, "DigitCaps": (*named["DigitCaps"], routing)}  # many copies of Havir's layer have this name
