"""From class capsules to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.nn.poses import positive, require_tensor, shape_of


class ClassHead(nn.Module):
    r"""One linear read-out, shared by all class capsules: :math:`\hat y_j = \langle w, p_j \rangle + b`.

    Sharing it means that a class is told from another by its capsule alone, and that the head works for any number of
    classes.

    Parameters
    ----------
    dim : int
        Numbers in a class capsule's pose.
    bias : bool
        Whether the read-out has a bias (the same for every class).

    Examples
    --------
    >>> import torch
    >>> ClassHead(16)(torch.randn(1, 10, 16)).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        dim: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = positive(dim, "dim")
        self.linear = nn.Linear(dim, 1, bias=bias, device=device, dtype=dtype)

    def forward(self, poses: Tensor, activations: Tensor | None = None) -> Tensor:
        """Read the logits.

        Parameters
        ----------
        poses : Tensor
            ``[B, M, dim]``, the class capsules.
        activations : Tensor, optional
            ``[B, M]``: a capsule counts as much as it is active.

        Returns
        -------
        Tensor
            ``[B, M]``, whatever B (nothing is squeezed but the last dimension).
        """
        require_tensor(poses, "poses")
        if poses.dim() != 3 or poses.shape[-1] != self.dim:
            raise ValueError(f"poses must be [B, M, {self.dim}], got {shape_of(poses)}")
        if activations is not None:
            if activations.shape != poses.shape[:2]:
                raise ValueError(
                    f"activations must be {shape_of(poses[..., 0])} as the poses, got {shape_of(activations)}"
                )
            poses = poses * activations.unsqueeze(-1)
        return self.linear(poses).squeeze(-1)
