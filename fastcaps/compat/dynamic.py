"""Twins of layers of dynamic routing between vectors, with separate matrices for every child.

They differ in names, in the order of dimensions, and in who competes. Here a parent whose votes add up to zero is zero,
not NaN, and all run on their input's device.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, known_arguments, require_tensor, shape_text
from fastcaps.compat.twin import Draw, Twin
from fastcaps.vectors import length, squash


class DynamicTwin(Twin):
    """A layer of dynamic routing.

    Small children agree almost equally with all parents, which hides differences between copies of the code, so larger
    ones are compared, too. (Other routings normalise what they compare; large poses would only magnify roundings.)

    Attributes
    ----------
    _children : (str, str)
        The attributes with the number of children, and of values in a child.
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
        return routed(children, weight, **options)


def routed(children: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Return the parents ``[b, m, e]`` of vectors ``[b, i, d]``."""
    parents = functional.dynamic_routing(children.unsqueeze(-2), weight, **options)
    assert isinstance(parents, Tensor)
    return parents.squeeze(-2)


def standing(parents: Tensor) -> Tensor:
    """Return parents ``[b, m, e]`` as ``[m, b, 1, 1, e]``, contiguous: callers may use ``view``."""
    return parents.transpose(0, 1).contiguous()[:, :, None, None]


def shorten(parents: Tensor) -> Tensor:
    """Return squashed vectors as in Guo's formula, whose 1e-8 shortens vectors that were near 0.

    A squashed length p was ``n = sqrt(p / (1 - p))`` before; Guo's formula multiplies the vector by ``n / (n + 1e-8)``.
    """
    size = length(parents, keepdim=True)
    zero = size == 0
    root = size.masked_fill(zero, 1.0).sqrt()
    rest = (1 - size).clamp(min=2.0**-80).sqrt()  # the root of 0 has no derivative
    return parents * (root / (root + 1e-8 * rest)).masked_fill(zero, 0.0)


class DenseCapsule(DynamicTwin):
    r"""``DenseCapsule`` of CapsNet-Pytorch (X. Guo), the most used code of dynamic routing, with many copies.

    The parents compete for each child. Gradients flow through the last iteration only: the coefficients are constants.
    Squashing is :math:`\frac{n^2}{1 + n^2} \frac{s}{n + 10^{-8}}` with :math:`n = \lVert s \rVert`.

    Parameters
    ----------
    in_num_caps, in_dim_caps : int
        Children, and the values in a child's pose.
    out_num_caps, out_dim_caps : int
        Parents, and the values in a parent's pose.
    routings : int
        Iterations, at least 1.
    stored : (str, str)
        The name of the matrices, and their dimensions: i and m for children and parents, d and e for the values in
        their poses. Copies of the code differ in both.
    returned : str
        The dimensions of the result, where b is the batch.
    detach : bool
        Whether the coefficients are constants in the gradient; copies differ.

    Attributes
    ----------
    weight : Parameter
        ``[out_num_caps, in_num_caps, out_dim_caps, in_dim_caps]``, drawn from N(0, 0.01^2).

    Examples
    --------
    >>> import torch
    >>> layer = DenseCapsule(in_num_caps=1152, in_dim_caps=8, out_num_caps=10, out_dim_caps=16, routings=3)
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    """

    _children = ("in_num_caps", "in_dim_caps")
    _known_by = (*_children, "out_num_caps", "out_dim_caps", "routings")
    _drawn = ("weight", 0.01)

    def __init__(
        self,
        in_num_caps: int,
        in_dim_caps: int,
        out_num_caps: int,
        out_dim_caps: int,
        routings: int = 3,
        *,
        stored: tuple[str, str] = ("weight", "mied"),
        returned: str = "bme",
        detach: bool = True,
    ) -> None:
        super().__init__()
        self._count(in_num_caps=in_num_caps, in_dim_caps=in_dim_caps, out_num_caps=out_num_caps)
        self._count(out_dim_caps=out_dim_caps, routings=routings)
        self.stored, self.returned, self.detach = stored, returned, detach
        sizes = {"i": in_num_caps, "d": in_dim_caps, "m": out_num_caps, "e": out_dim_caps, "1": 1}
        self._drawn = (stored[0], 0.01)
        self.register_parameter(stored[0], nn.Parameter(torch.empty([sizes[axis] for axis in stored[1]])))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, in_num_caps, in_dim_caps]`` to ``[batch, out_num_caps, out_dim_caps]``."""
        name, axes = self.stored
        kept = axes.replace("1", "")
        weight = getattr(self, name).reshape([getattr(self, name).shape[axes.index(axis)] for axis in kept])
        weight = weight.permute([kept.index(axis) for axis in "imde"])
        parents = shorten(self._route("x", x, weight, iterations=self.routings, detach=self.detach))
        for place, axis in enumerate(self.returned):
            parents = parents.unsqueeze(place) if axis == "1" else parents
        return parents

    @classmethod
    def _renamed(cls, old: Any) -> list[dict[str, Any]]:
        """Return the possible sizes of a copy, from its only parameter with dimensions in one of several orders."""
        found = list(old.named_parameters())
        shape = list(found[0][1].shape) if len(found) == 1 else []
        front = shape[: max(0, len(shape) - 4)]
        if len(shape) < 4 or any(size != 1 for size in front):
            return []
        counts = [x for name, x in vars(old).items() if type(x) is int and ("iter" in name or "routing" in name)]
        options = []
        for axes, detach, returned in product(("mied", "imed", "imde", "mide"), (True, False), ("bme", "b1me1")):
            sizes = dict(zip(axes, shape[len(front) :], strict=True))
            names = {"i": "in_num_caps", "d": "in_dim_caps", "m": "out_num_caps", "e": "out_dim_caps"}
            own = {"stored": (found[0][0], "1" * len(front) + axes), "returned": returned, "detach": detach}
            options.append({names[axis]: size for axis, size in sizes.items()} | own | {"routings": [*counts, 3][0]})
        return options


class RoutingCapsules(DynamicTwin):
    """``RoutingCapsules`` of capsule-network (D. Havir): what :class:`DenseCapsule` computes, under other names.

    Parameters
    ----------
    in_dim, in_caps : int
        Values in a child's pose, and children.
    num_caps, dim_caps : int
        Parents, and the values in a parent's pose.
    num_routing : int
        Iterations, at least 1.
    device : torch.device, optional
        Stored, without effect: the published layer creates its logits there.

    Attributes
    ----------
    W : Parameter
        ``[1, num_caps, in_caps, dim_caps, in_dim]``, drawn from N(0, 0.01^2).
    """

    _children = ("in_caps", "in_dim")
    _known_by = (*_children, "num_caps", "dim_caps", "num_routing")
    _drawn = ("W", 0.01)

    def __init__(
        self,
        in_dim: int,
        in_caps: int,
        num_caps: int,
        dim_caps: int,
        num_routing: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._count(in_dim=in_dim, in_caps=in_caps, num_caps=num_caps, dim_caps=dim_caps, num_routing=num_routing)
        self.device = device
        self.W = nn.Parameter(torch.empty(1, num_caps, in_caps, dim_caps, in_dim))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, in_caps, in_dim]`` to ``[batch, num_caps, dim_caps]``."""
        return shorten(self._route("x", x, self.W[0].permute(1, 0, 3, 2), iterations=self.num_routing, detach=True))

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, device=getattr(old, "device", None), **options)  # some copies have no device


class DigitCaps(DynamicTwin):
    """``DigitCaps`` of the tutorial capsule_net_pytorch (cezannec): three iterations, the **children** compete.

    Parameters
    ----------
    num_capsules : int
        Parents.
    previous_layer_nodes : int
        Children.
    in_channels, out_channels : int
        Values in a child's pose and in a parent's.

    Attributes
    ----------
    W : Parameter
        ``[num_capsules, previous_layer_nodes, in_channels, out_channels]``, drawn from N(0, 1).
    """

    _children = ("previous_layer_nodes", "in_channels")
    _known_by = ("num_capsules", *_children)

    @partial(known_arguments, note="; compat.batch_averaged.DigitCaps is the twin of other codes")
    def __init__(
        self,
        num_capsules: int = 10,
        previous_layer_nodes: int = 32 * 6 * 6,
        in_channels: int = 8,
        out_channels: int = 16,
    ) -> None:
        super().__init__()
        self._count(num_capsules=num_capsules, previous_layer_nodes=previous_layer_nodes)
        self._count(in_channels=in_channels, out_channels=out_channels)
        self.W = nn.Parameter(torch.empty(num_capsules, previous_layer_nodes, in_channels, out_channels))
        self.reset_parameters()

    def forward(self, u: Tensor) -> Tensor:
        """Route ``[batch, previous_layer_nodes, in_channels]`` to ``[num_capsules, batch, 1, 1, out_channels]``."""
        return standing(self._route("u", u, self.W.transpose(0, 1), iterations=3, compete="children"))

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, out_channels=old.W.shape[-1], **options)  # it has no such attribute


class CapsuleLayer(DynamicTwin):
    """``CapsuleLayer`` of gram-ai's capsule-networks: dynamic routing in which the **children** compete, or primary
    capsules by convolutions.

    The routing starts from logits of zero, or from learned ones as in the code's first revisions.

    Parameters
    ----------
    num_capsules : int
        Parents; for primary capsules the values in a pose, one convolution for each.
    num_route_nodes : int
        Children; -1 for primary capsules.
    in_channels, out_channels : int
        Values in a child's pose and in a parent's; for primary capsules, channels of the map and of each convolution.
    kernel_size, stride : int, optional
        Of primary capsules.
    num_iterations : int
        Iterations.
    learned_logits : bool
        Have ``route_logits``, as the first revisions and their checkpoints do.

    Attributes
    ----------
    route_weights : Parameter
        ``[num_capsules, num_route_nodes, in_channels, out_channels]``, drawn from N(0, 1).
    route_logits : Parameter
        With ``learned_logits``: ``[num_capsules, 1, num_route_nodes, 1, 1]``, zero at the start.
    capsules : nn.ModuleList
        Of primary capsules.

    Examples
    --------
    >>> import torch
    >>> primary = CapsuleLayer(8, -1, 256, 32, kernel_size=9, stride=2)
    >>> digits = CapsuleLayer(10, 32 * 6 * 6, 8, 16)
    >>> digits(primary(torch.randn(2, 256, 20, 20))).squeeze().transpose(0, 1).shape
    torch.Size([2, 10, 16])
    """

    _children = ("num_route_nodes", "in_channels")
    _known_by = ("num_capsules", "num_route_nodes", "num_iterations")
    _drawn = ("route_weights", 1.0)

    @partial(known_arguments, note="; compat.batch_averaged.CapsuleLayer is the twin of another code")
    def __init__(
        self,
        num_capsules: int,
        num_route_nodes: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int | None = None,
        stride: int | None = None,
        num_iterations: int = 3,
        *,
        learned_logits: bool = False,
    ) -> None:
        super().__init__()
        self._count(num_capsules=num_capsules, in_channels=in_channels, out_channels=out_channels)
        self._count(num_iterations=num_iterations)
        self.num_route_nodes = -1 if num_route_nodes == -1 else check_count("num_route_nodes", num_route_nodes)
        self.kernel_size, self.stride = kernel_size, stride
        self.learned_logits = bool(learned_logits)
        if num_route_nodes == -1:
            size, step = check_count("kernel_size", kernel_size), check_count("stride", stride)
            self.capsules = nn.ModuleList(
                nn.Conv2d(in_channels, out_channels, size, stride=step) for _ in range(num_capsules)
            )
            return
        if learned_logits:
            self.route_logits = nn.Parameter(torch.empty(num_capsules, 1, num_route_nodes, 1, 1))
        self.route_weights = nn.Parameter(torch.empty(num_capsules, num_route_nodes, in_channels, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        if self.num_route_nodes == -1:
            for convolution in self.capsules:
                convolution.reset_parameters()  # type: ignore[operator]
            return
        super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, num_route_nodes, in_channels]`` to ``[num_capsules, batch, 1, 1, out_channels]``.

        For primary capsules, map ``[batch, in_channels, h, w]`` to ``[batch, out_channels * h' * w', num_capsules]``.
        """
        if self.num_route_nodes == -1:
            require_tensor(x, "x")
            return squash(torch.stack([convolution(x).flatten(1) for convolution in self.capsules], dim=-1))
        options = {"prior": self.route_logits.flatten(1).T} if self.learned_logits else {}
        weight = self.route_weights.transpose(0, 1)
        return standing(self._route("x", x, weight, iterations=self.num_iterations, compete="children", **options))

    @classmethod
    def _unfit(cls, old: Any) -> str:
        return "computes primary capsules by convolutions, routes nothing" if old.num_route_nodes == -1 else ""

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        _, _, in_channels, out_channels = old.route_weights.shape  # the layer has no attributes for them
        options["learned_logits"] = hasattr(old, "route_logits")  # as its first versions have
        return super()._like(old, in_channels=in_channels, out_channels=out_channels, **options)


class AgreementRouting(Twin):
    """The routing of a :class:`CapsLayer`, from learned logits. The parents compete for each child.

    Parameters
    ----------
    input_caps, output_caps : int
        Children and parents.
    n_iterations : int
        Iterations after the first; with 0 the logits alone give the coefficients.

    Attributes
    ----------
    b : Parameter
        ``[input_caps, output_caps]``, the logits that every iteration starts from; zero at first.
    """

    def __init__(self, input_caps: int, output_caps: int, n_iterations: int) -> None:
        super().__init__()
        self._count(input_caps=input_caps, output_caps=output_caps)
        self.n_iterations = check_count("n_iterations", n_iterations, 0)
        self.b = nn.Parameter(torch.empty(input_caps, output_caps))
        self.reset_parameters()

    def forward(self, u_predict: Tensor) -> Tensor:
        """Route votes ``[batch, input_caps, output_caps, numbers]`` to ``[batch, output_caps, numbers]``.

        A :class:`CapsLayer` does not call it: it would have to store its votes.
        """
        require_tensor(u_predict, "u_predict")
        if u_predict.dim() != 4 or u_predict.shape[1:3] != self.b.shape:
            wanted = f"[batch, {self.b.shape[0]}, {self.b.shape[1]}, numbers]"
            raise ValueError(f"u_predict must be {wanted}, got {shape_text(u_predict)}")
        children = u_predict.flatten(2)  # a child holds its votes for all parents, and each parent's matrix picks one
        own = torch.eye(children.shape[-1], device=children.device, dtype=children.dtype)
        weight = own.unflatten(1, u_predict.shape[2:]).movedim(1, 0).unsqueeze(0)
        return routed(children, weight, iterations=self.n_iterations + 1, prior=self.b)


class CapsLayer(DynamicTwin):
    """``CapsLayer`` of CapsNet-pytorch (A. Bielski): dynamic routing from learned logits.

    Parameters
    ----------
    input_caps, input_dim : int
        Children, and the values in a child's pose.
    output_caps, output_dim : int
        Parents, and the values in a parent's pose.
    routing_module : AgreementRouting
        Holds the logits and the number of iterations.

    Attributes
    ----------
    weights : Parameter
        ``[input_caps, input_dim, output_caps * output_dim]``, drawn uniformly from ±1 / sqrt(input_caps).

    Examples
    --------
    >>> import torch
    >>> layer = CapsLayer(1152, 8, 10, 16, AgreementRouting(1152, 10, 3))
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    """

    output_dim: int
    _children = ("input_caps", "input_dim")
    _known_by = (*_children, "output_caps", "output_dim", "routing_module")

    def __init__(
        self, input_caps: int, input_dim: int, output_caps: int, output_dim: int, routing_module: nn.Module
    ) -> None:
        super().__init__()
        self._count(input_caps=input_caps, input_dim=input_dim, output_caps=output_caps, output_dim=output_dim)
        if not (hasattr(routing_module, "b") and hasattr(routing_module, "n_iterations")):
            raise TypeError(f"routing_module must be an AgreementRouting, got {type(routing_module).__name__}")
        shape = tuple(routing_module.b.shape)  # type: ignore[arg-type]
        if shape != (input_caps, output_caps):
            raise ValueError(f"routing_module must have b of shape ({input_caps}, {output_caps}), got {shape}")
        self.routing_module = routing_module
        self.weights = nn.Parameter(torch.empty(input_caps, input_dim, output_caps * output_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the matrices."""
        bound = len(self.weights) ** -0.5
        nn.init.uniform_(self.weights, -bound, bound)

    def forward(self, caps_output: Tensor) -> Tensor:
        """Route ``[batch, input_caps, input_dim]`` to ``[batch, output_caps, output_dim]``."""
        routing: Any = self.routing_module
        weight = self.weights.unflatten(2, (-1, self.output_dim)).movedim(2, 1)
        return self._route("caps_output", caps_output, weight, iterations=routing.n_iterations + 1, prior=routing.b)

    @classmethod
    def _unfit(cls, old: Any) -> str:
        name = type(old.routing_module).__name__
        return "" if name == "AgreementRouting" else f"routing_module must be an AgreementRouting, got {name}"
