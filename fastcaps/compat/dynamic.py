"""Twins of layers of dynamic routing between vectors, with separate matrices for every child.

The published layers differ in names, in the order of dimensions, and in what competes. In the twins a parent whose
votes add up to zero is zero, not NaN, and they run on their input's device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, known_arguments, require_tensor, shape_text
from fastcaps.compat.twin import Probes, Twin, VectorTwin, arranged
from fastcaps.vectors import length, squash


class DynamicTwin(VectorTwin):
    """A layer of dynamic routing.

    Attributes
    ----------
    compete : "parents" or "children"
        Over which the softmax runs.
    detach : bool
        Whether the gradient flows through the last iteration only.
    """

    compete: str = "parents"
    detach: bool = False
    _probes: ClassVar[Probes] = (("compete", ("parents", "children")), ("detach", (True, False)))

    def _parents(self, name: str, children: Tensor, iterations: int, **options: Any) -> Tensor:
        """Return the parents ``[b, m, e]`` of children, an argument called ``name``."""
        options |= {"iterations": iterations, "compete": self.compete, "detach": self.detach}
        return routed(*self._checked(name, children), **options)


def routed(children: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """Return the parents ``[b, m, e]`` of vectors ``[b, i, 1, d]``."""
    parents = functional.dynamic_routing(children, weight, **options)
    assert isinstance(parents, Tensor)
    return parents.squeeze(-2)


def standing(parents: Tensor) -> Tensor:
    """Return parents ``[b, m, e]`` as ``[m, b, 1, 1, e]``, contiguous: callers may use ``view``."""
    return arranged(parents, "bme", "mb11e").contiguous()


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

    It routes ``[batch, in_num_caps, in_dim_caps]`` to ``[batch, out_num_caps, out_dim_caps]`` in ``routings``
    iterations, at least 1. Its parameter ``weight``, ``[out_num_caps, in_num_caps, out_dim_caps, in_dim_caps]``, is
    drawn from N(0, 0.01^2). The parents compete for each child. Gradients flow through the last iteration only: the
    coefficients are constants. Squashing is :math:`\frac{n^2}{1 + n^2} \frac{s}{n + 10^{-8}}` with
    :math:`n = \lVert s \rVert`.

    Examples
    --------
    >>> import torch
    >>> layer = DenseCapsule(in_num_caps=1152, in_dim_caps=8, out_num_caps=10, out_dim_caps=16, routings=3)
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    """

    routings: int
    _names = ("in_num_caps", "in_dim_caps", "out_num_caps", "out_dim_caps")
    _known_by = (*_names, "routings")
    _drawn, _axes, _std = "weight", "mied", 0.01
    _probes = (("routings", range(1, 7)), *DynamicTwin._probes)
    detach = True

    def __init__(
        self, in_num_caps: int, in_dim_caps: int, out_num_caps: int, out_dim_caps: int, routings: int = 3
    ) -> None:
        super().__init__()
        self._make(in_num_caps, in_dim_caps, out_num_caps, out_dim_caps, routings=routings)

    def forward(self, x: Tensor) -> Tensor:
        """Return the parents."""
        return shorten(self._parents("x", x, self.routings))


class RoutingCapsules(DynamicTwin):
    """``RoutingCapsules`` of capsule-network (D. Havir): what :class:`DenseCapsule` computes, under other names.

    It routes ``[batch, in_caps, in_dim]`` to ``[batch, num_caps, dim_caps]`` in ``num_routing`` iterations, at least 1.
    Its parameter ``W``, ``[1, num_caps, in_caps, dim_caps, in_dim]``, is drawn from N(0, 0.01^2). ``device`` is stored
    without effect (the published layer creates its logits on it).
    """

    num_routing: int
    _names = ("in_caps", "in_dim", "num_caps", "dim_caps")
    _known_by = (*_names, "num_routing")
    _axes, _std = "1mied", 0.01
    _probes = (("num_routing", range(1, 7)), *DynamicTwin._probes)
    detach = True

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
        self.device = device
        self._make(in_caps, in_dim, num_caps, dim_caps, num_routing=num_routing)

    def forward(self, x: Tensor) -> Tensor:
        """Return the parents."""
        return shorten(self._parents("x", x, self.num_routing))


class DigitCaps(DynamicTwin):
    """``DigitCaps`` of the tutorial capsule_net_pytorch (cezannec): three iterations, the **children** compete.

    It routes ``[batch, previous_layer_nodes, in_channels]`` to ``[num_capsules, batch, 1, 1, out_channels]``. Its
    parameter ``W``, ``[num_capsules, previous_layer_nodes, in_channels, out_channels]``, is drawn from N(0, 1).
    """

    _names = ("previous_layer_nodes", "in_channels", "num_capsules", "out_channels")
    _known_by = _names[:3]
    _axes = "mide"
    _probes = (("iterations", range(1, 7)), *DynamicTwin._probes)
    compete, iterations = "children", 3

    @partial(known_arguments, note="; compat.batch_averaged.DigitCaps is the twin of other implementations")
    def __init__(
        self,
        num_capsules: int = 10,
        previous_layer_nodes: int = 32 * 6 * 6,
        in_channels: int = 8,
        out_channels: int = 16,
    ) -> None:
        super().__init__()
        self._make(previous_layer_nodes, in_channels, num_capsules, out_channels)

    def forward(self, u: Tensor) -> Tensor:
        """Return the parents."""
        return standing(self._parents("u", u, self.iterations))


class CapsuleLayer(DynamicTwin):
    """``CapsuleLayer`` of gram-ai's capsule-networks: dynamic routing in which the **children** compete, or primary
    capsules by convolutions.

    It routes ``[batch, num_route_nodes, in_channels]`` to ``[num_capsules, batch, 1, 1, out_channels]`` in
    ``num_iterations`` iterations. Its parameter ``route_weights``, ``[num_capsules, num_route_nodes, in_channels,
    out_channels]``, is drawn from N(0, 1). The logits start from zero.

    With ``num_route_nodes=-1`` it makes primary capsules, ``[batch, out_channels * h' * w', num_capsules]``, of a map
    ``[batch, in_channels, h, w]``. Its ``capsules`` are convolutions with ``kernel_size`` and ``stride``, one for each
    of the ``num_capsules`` components of a pose.

    Examples
    --------
    >>> import torch
    >>> primary = CapsuleLayer(8, -1, 256, 32, kernel_size=9, stride=2)
    >>> digits = CapsuleLayer(10, 32 * 6 * 6, 8, 16)
    >>> digits(primary(torch.randn(2, 256, 20, 20))).squeeze().transpose(0, 1).shape
    torch.Size([2, 10, 16])
    """

    num_route_nodes: int
    num_iterations: int
    _names = ("num_route_nodes", "in_channels", "num_capsules", "out_channels")
    _known_by = ("num_capsules", "num_route_nodes", "num_iterations")
    _drawn, _axes = "route_weights", "mide"
    _probes = (("num_iterations", range(1, 7)), *DynamicTwin._probes)
    compete = "children"

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
    ) -> None:
        super().__init__()
        sizes = {"num_capsules": num_capsules, "in_channels": in_channels, "out_channels": out_channels}
        self._count(**sizes, num_iterations=num_iterations)
        self.kernel_size, self.stride = kernel_size, stride
        if num_route_nodes == -1:
            self.num_route_nodes = -1
            size, step = check_count("kernel_size", kernel_size), check_count("stride", stride)
            self.capsules = nn.ModuleList(
                nn.Conv2d(in_channels, out_channels, size, stride=step) for _ in range(num_capsules)
            )
            return
        self._count(num_route_nodes=num_route_nodes)
        self._make(num_route_nodes, in_channels, num_capsules, out_channels)

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        super().reset_parameters()
        for convolution in getattr(self, "capsules", ()):
            convolution.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return the parents, or primary capsules."""
        if self.num_route_nodes == -1:
            require_tensor(x, "x")
            return squash(torch.stack([convolution(x).flatten(1) for convolution in self.capsules], dim=-1))
        return standing(self._parents("x", x, self.num_iterations))

    @classmethod
    def _routes(cls, old: Any) -> bool:
        return bool(old.num_route_nodes != -1)


class AgreementRouting(Twin):
    """The routing of a :class:`CapsLayer`, from learned logits. The parents compete for each child.

    ``n_iterations`` counts the iterations after the first; with 0 the coefficients come from the logits alone. The
    parameter ``b``, ``[input_caps, output_caps]``, holds the logits that every iteration starts from; zero at first.
    """

    def __init__(self, input_caps: int, output_caps: int, n_iterations: int) -> None:
        super().__init__()
        self._count(input_caps=input_caps, output_caps=output_caps)
        self.n_iterations = check_count("n_iterations", n_iterations, 0)
        self.b = nn.Parameter(torch.empty(input_caps, output_caps))
        self.reset_parameters()

    def forward(self, u_predict: Tensor) -> Tensor:
        """Route votes ``[batch, input_caps, output_caps, numbers]`` to ``[batch, output_caps, numbers]``.

        A :class:`CapsLayer` does not call this method, which would store the votes.
        """
        require_tensor(u_predict, "u_predict")
        if u_predict.dim() != 4 or u_predict.shape[1:3] != self.b.shape:
            wanted = f"[batch, {self.b.shape[0]}, {self.b.shape[1]}, numbers]"
            raise ValueError(f"u_predict must be {wanted}, got {shape_text(u_predict)}")
        children = u_predict.flatten(2)  # a child holds its votes for all parents, and each parent's matrix picks one
        identity = torch.eye(children.shape[-1], device=children.device, dtype=children.dtype)
        weight = identity.unflatten(1, u_predict.shape[2:]).movedim(1, 0).unsqueeze(0)
        return routed(children.unsqueeze(-2), weight, iterations=self.n_iterations + 1, prior=self.b)


class CapsLayer(DynamicTwin):
    """``CapsLayer`` of CapsNet-pytorch (A. Bielski): dynamic routing from learned logits.

    It routes ``[batch, input_caps, input_dim]`` to ``[batch, output_caps, output_dim]``. ``routing_module``, an
    :class:`AgreementRouting`, holds the logits and the number of iterations. The parameter ``weights``, ``[input_caps,
    input_dim, output_caps * output_dim]``, is drawn uniformly from ±1 / sqrt(input_caps).

    Examples
    --------
    >>> import torch
    >>> layer = CapsLayer(1152, 8, 10, 16, AgreementRouting(1152, 10, 3))
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    """

    output_dim: int
    _names = ("input_caps", "input_dim", "output_caps", "output_dim")
    _known_by = (*_names, "routing_module")

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
        """Return the parents."""
        routing: Any = self.routing_module
        return self._parents("caps_output", caps_output, routing.n_iterations + 1, prior=routing.b)

    def _matrices(self) -> Tensor:
        return self.weights.unflatten(2, (-1, self.output_dim)).movedim(2, 1)
