"""The networks of Heinsen (2019), An Algorithm for Routing Capsules in All Domains: Figures 3 and 5.

lab/docs/networks.md lists our choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps.nn import CapsuleSpec, HeinsenRouting, RoutingStack, RoutingTrace
from fastcaps_lab.models.layers import Conv, Coordinates
from fastcaps_lab.models.networks import Config, NetworkConfig


class TextCapsNet(nn.Module):
    r"""Classify sequences by routing the embeddings of their tokens in all layers of a transformer (Figure 5).

    .. math:: \mu = \mathrm{swish}(A\,\mathrm{LayerNorm}(x + depth))

    The transformer has ``layers`` l, with ``embedding`` m values in an embedding; a mapped embedding's pose has ``dim``
    values. ``parts`` is the number of capsules below the class capsules, whose poses have two values.

    Examples
    --------
    >>> import torch
    >>> net = TextCapsNet(layers=3, embedding=20, classes=5)
    >>> mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])  # a sequence of four tokens, and one of two
    >>> net(torch.randn(2, 4, 3, 20), mask).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, layers: int, embedding: int, classes: int, *, parts: int = 64, dim: int = 64, iterations: int = 3
    ) -> None:
        super().__init__()
        self.layers, self.embedding = layers, embedding
        self.depth = nn.Parameter(torch.zeros(layers, embedding))
        self.norm = nn.LayerNorm(embedding)
        self.affine = nn.Linear(embedding, dim)
        self.routing = RoutingStack.build(
            [
                CapsuleSpec(parts, dim=2, share=True, options={"iterations": iterations}),
                CapsuleSpec(classes, options={"iterations": iterations}),
            ],
            in_capsules=1,
            in_dim=dim,
            layer=HeinsenRouting,
            pose="vector",
            bias=True,
        )
        nn.init.kaiming_normal_(self.affine.weight)
        nn.init.zeros_(self.affine.bias)

    def forward(
        self, embeddings: Tensor, mask: Tensor | None = None, *, return_trace: bool = False
    ) -> Tensor | tuple[Tensor, RoutingTrace]:
        """Return scores ``[B, classes]``, which are logits, and with ``return_trace`` the RoutingTrace.

        Embeddings are ``[B, n, l, m]``, of n tokens in l layers. The mask ``[B, n]`` is 1 or True for a token, 0 for
        padding, a value between for their mixup; None: all are tokens.
        """
        if embeddings.dim() != 4 or embeddings.shape[2:] != self.depth.shape:
            raise ValueError(
                f"embeddings must be [B, n, {self.layers}, {self.embedding}], got {list(embeddings.shape)}"
            )
        poses = F.silu(self.affine(self.norm(embeddings + self.depth))).flatten(1, 2)
        scores = None
        if mask is not None:
            scores = mask.to(poses.dtype).logit().unsqueeze(-1).expand(-1, -1, self.layers).flatten(1)
        found: Any = self.routing(poses, scores, return_trace=return_trace)
        return (found[0].scores, found[1]) if return_trace else found.scores


@dataclass(frozen=True)
class TextConfig:
    """The configuration of a :class:`TextCapsNet`; the attributes are its arguments."""

    classes: int
    layers: int = 37
    embedding: int = 1280
    parts: int = 64
    dim: int = 64
    iterations: int = 3

    def build(self) -> TextCapsNet:
        """Return the network with new weights."""
        return TextCapsNet(**vars(self))


NETWORKS: dict[str, Config] = {
    "heinsen-norb": NetworkConfig(
        (Coordinates, *(Conv(64, 3, stride=stride, order="norm layer swish") for stride in (1, 2, 1, 2, 1, 2))),
        capsules=64,
        dim=16,
        hidden=(CapsuleSpec(64, share=True),),
        classes=5,
        image_size=96,
        in_channels=2,
        layer=HeinsenRouting,
        iterations=3,
        primary={"normalize": None, "batch_norm": True},
        options={"bias": True},
        kaiming=True,
    ),
    "heinsen-sst5": TextConfig(5),
    "heinsen-sst2": TextConfig(2),
}
