"""The layer that reads logits from class capsules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.checks import (
    check_choice,
    check_count,
    check_dtype,
    check_flag,
    check_parameters_dtype,
    known_arguments,
    require_tensor,
    shape_text,
)
from fastcaps.nn.poses import arguments_repr
from fastcaps.vectors import length

READS = ("linear", "length", "activations")


class ClassHead(nn.Module):
    r"""One linear read-out, shared by all class capsules: :math:`\hat y_m = \langle w, Q_m \rangle + b`.

    The read-out is shared, so classes differ only by their capsules, and the head works for any number of classes. Some
    routings need no read-out: the length of a pose (dynamic), an activation or score (EM, Heinsen) is the logit.

    Parameters
    ----------
    dim : int
        Components of a class capsule's pose.
    read : "linear", "length" or "activations"
        The logit of a capsule: the product of its pose and a learned vector; the length of its pose; its activation.
    bias : bool
        Whether the linear read-out has a bias (the same for every class).

    Examples
    --------
    >>> import torch
    >>> ClassHead(16)(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10])
    """

    @known_arguments
    def __init__(
        self,
        dim: int,
        *,
        read: str = "linear",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        self.dim = check_count("dim", dim)
        check_choice("read", read, READS)
        self.read = read
        self.bias = check_flag("bias", bias)
        self.linear = nn.Linear(self.dim, 1, bias=self.bias, device=device, dtype=dtype) if read == "linear" else None

    def reset_parameters(self) -> None:
        """Initialise the parameters, if there are any."""
        if self.linear is not None:
            self.linear.reset_parameters()

    def forward(self, poses: Tensor, activations: Tensor | None = None) -> Tensor:
        """Return logits ``[B, M]`` of class capsules ``[B, M, dim]``.

        With ``activations``, ``[B, M]``, the linear read-out multiplies each pose by its activation.
        """
        require_tensor(poses, "poses")
        if poses.dim() != 3 or poses.shape[-1] != self.dim:
            raise ValueError(f"poses must be [B, M, {self.dim}], got {shape_text(poses)}")
        if activations is not None and activations.shape != poses.shape[:2]:
            raise ValueError(
                f"activations must be {shape_text(poses[..., 0])} to fit the poses, got {shape_text(activations)}"
            )
        if self.read == "activations":
            if activations is None:
                raise ValueError("activations must be a tensor for a head with read='activations', got None")
            return activations
        if self.linear is None:
            return length(poses)
        check_parameters_dtype("poses", poses, getattr(self.linear, "weight", None))
        return self.linear(poses if activations is None else poses * activations.unsqueeze(-1)).squeeze(-1)

    extra_repr = arguments_repr
