"""``CapsLayer`` and ``AgreementRouting`` of CapsNet-pytorch (A. Bielski): dynamic routing from learned logits.

What differs: a parent whose votes add up to zero is zero, not NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, shape_text
from fastcaps.nn.poses import every_argument_repr, require_tensor

__all__ = ["AgreementRouting", "CapsLayer"]


def route(children: Tensor, weight: Tensor, routing: nn.Module) -> Tensor:
    """Route ``[b, i, d]`` by matrices ``[i or 1, m, d, e]`` to ``[b, m, e]``, as ``routing`` says."""
    prior, turns = routing.b, routing.n_iterations
    parents = functional.dynamic_routing(children.unsqueeze(-2), weight, iterations=turns + 1, prior=prior)  # type: ignore[arg-type, operator]
    assert isinstance(parents, Tensor)
    return parents.squeeze(-2)


class AgreementRouting(nn.Module):
    """How a :class:`CapsLayer` routes: by agreement, from learned logits. The parents compete for each child.

    Parameters
    ----------
    input_caps, output_caps : int
        Children and parents.
    n_iterations : int
        Turns after the first; 0 shares every child as the logits say.

    Attributes
    ----------
    b : Parameter
        ``[input_caps, output_caps]``, zero at the start: what every turn's logits start from.
    """

    def __init__(self, input_caps: int, output_caps: int, n_iterations: int) -> None:
        super().__init__()
        self.input_caps, self.output_caps = (
            check_count("input_caps", input_caps),
            check_count("output_caps", output_caps),
        )
        self.n_iterations = check_count("n_iterations", n_iterations, 0)
        self.b = nn.Parameter(torch.empty(input_caps, output_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the logits to zero."""
        nn.init.zeros_(self.b)

    def forward(self, u_predict: Tensor) -> Tensor:
        """Route votes that are there already; a :class:`CapsLayer` does not store them.

        Parameters
        ----------
        u_predict : Tensor
            Votes, ``[batch, input_caps, output_caps, numbers]``.

        Returns
        -------
        Tensor
            ``[batch, output_caps, numbers]``.
        """
        require_tensor(u_predict, "u_predict")
        if u_predict.dim() != 4 or u_predict.shape[1:3] != self.b.shape:
            wanted = f"[batch, {self.input_caps}, {self.output_caps}, numbers]"
            raise ValueError(f"u_predict must be {wanted}, got {shape_text(u_predict)}")
        children = u_predict.flatten(2)  # a child's votes in a row, of which each parent's matrix takes its own
        own = torch.eye(children.shape[-1], device=children.device, dtype=children.dtype)
        return route(children, own.unflatten(1, u_predict.shape[2:]).movedim(1, 0).unsqueeze(0), self)

    extra_repr = every_argument_repr


class CapsLayer(nn.Module):
    """A set of capsules routed to a set of parents by dynamic routing, with that code's names.

    Parameters
    ----------
    input_caps, input_dim : int
        Children, and the numbers in a child's pose.
    output_caps, output_dim : int
        Parents, and the numbers in a parent's pose.
    routing_module : AgreementRouting
        Holds the logits and the number of turns.

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

    def __init__(
        self, input_caps: int, input_dim: int, output_caps: int, output_dim: int, routing_module: nn.Module
    ) -> None:
        super().__init__()
        self.input_caps, self.input_dim = check_count("input_caps", input_caps), check_count("input_dim", input_dim)
        self.output_caps, self.output_dim = (
            check_count("output_caps", output_caps),
            check_count("output_dim", output_dim),
        )
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
        nn.init.uniform_(self.weights, -(self.input_caps**-0.5), self.input_caps**-0.5)

    def forward(self, caps_output: Tensor) -> Tensor:
        """Route.

        Parameters
        ----------
        caps_output : Tensor
            ``[batch, input_caps, input_dim]``.

        Returns
        -------
        Tensor
            ``[batch, output_caps, output_dim]``.
        """
        require_tensor(caps_output, "caps_output")
        if caps_output.dim() != 3 or caps_output.shape[1:] != (self.input_caps, self.input_dim):
            wanted = f"[batch, {self.input_caps}, {self.input_dim}]"
            raise ValueError(f"caps_output must be {wanted}, got {shape_text(caps_output)}")
        weight = self.weights.unflatten(2, (self.output_caps, self.output_dim)).movedim(2, 1)
        return route(caps_output, weight, self.routing_module)

    def extra_repr(self) -> str:
        names = ("input_caps", "input_dim", "output_caps", "output_dim")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
