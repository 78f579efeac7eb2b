"""``CapsLayer`` and ``AgreementRouting`` of CapsNet-pytorch (A. Bielski): dynamic routing from learned logits.

What differs: a parent whose votes add up to zero is zero, not NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, require_tensor, shape_text
from fastcaps.compat.twin import DynamicTwin, Twin

__all__ = ["AgreementRouting", "CapsLayer"]


class AgreementRouting(Twin):
    """How a :class:`CapsLayer` routes: by agreement, from learned logits. The parents compete for each child.

    Parameters
    ----------
    input_caps, output_caps : int
        Children and parents.
    n_iterations : int
        Iterations after the first; 0 shares every child as the logits say.

    Attributes
    ----------
    b : Parameter
        ``[input_caps, output_caps]``, zero at the start: what every iteration's logits start from.
    """

    def __init__(self, input_caps: int, output_caps: int, n_iterations: int) -> None:
        super().__init__()
        self._count(input_caps=input_caps, output_caps=output_caps)
        self.n_iterations = check_count("n_iterations", n_iterations, 0)
        self.b = nn.Parameter(torch.empty(input_caps, output_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the logits to zero."""
        nn.init.zeros_(self.b)

    def forward(self, u_predict: Tensor) -> Tensor:
        """Route votes ``[batch, input_caps, output_caps, numbers]`` to ``[batch, output_caps, numbers]``.

        A :class:`CapsLayer` does not call it: it would have to store its votes.
        """
        require_tensor(u_predict, "u_predict")
        if u_predict.dim() != 4 or u_predict.shape[1:3] != self.b.shape:
            wanted = f"[batch, {self.b.shape[0]}, {self.b.shape[1]}, numbers]"
            raise ValueError(f"u_predict must be {wanted}, got {shape_text(u_predict)}")
        children = u_predict.flatten(2)  # a child's votes in a row, of which each parent's matrix takes its own
        own = torch.eye(children.shape[-1], device=children.device, dtype=children.dtype)
        weight = own.unflatten(1, u_predict.shape[2:]).movedim(1, 0).unsqueeze(0)
        parents = functional.dynamic_routing(
            children.unsqueeze(-2), weight, iterations=self.n_iterations + 1, prior=self.b
        )
        assert isinstance(parents, Tensor)
        return parents.squeeze(-2)


class CapsLayer(DynamicTwin):
    """A set of capsules routed to a set of parents by dynamic routing, with that code's names.

    Parameters
    ----------
    input_caps, input_dim : int
        Children, and the numbers in a child's pose.
    output_caps, output_dim : int
        Parents, and the numbers in a parent's pose.
    routing_module : AgreementRouting
        Holds the logits and the number of iterations.

    Attributes
    ----------
    weights : Parameter
        ``[input_caps, input_dim, output_caps * output_dim]``, drawn uniformly from -1 to 1 over the root of
        ``input_caps``.

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
        """Draw the matrices anew."""
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
