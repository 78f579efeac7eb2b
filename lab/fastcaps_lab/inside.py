"""The calls of a network's capsule layers during one forward, for :func:`fastcaps_lab.diagnose` and the pictures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps import Votes
from fastcaps.nn import RoutingLayer, RoutingPool2d


def seen(layer: RoutingLayer[Any, Any], children: Tensor, gates: Tensor) -> Tensor:
    """Return the gates of the children in each window, in the order of coefficients: ``[B, Ho, Wo, I]``."""
    call = layer.prepare(children, gates)
    assert call.activity is not None
    votes = Votes(call.children, call.weight, call.bias, call.window, parents=call.parent_count)
    gates = votes.unfold(call.activity)
    return gates if call.window is not None else gates[:, None, None]


@dataclass(frozen=True)
class Inside:
    """The last call of one capsule layer."""

    path: str  # of the layer in the model
    layer: Any
    given: dict[str, Any]  # the call's arguments by name
    result: Any

    @property
    def returned(self) -> list[Tensor]:
        """The returned tensors that require a gradient."""
        found = [self.result] if isinstance(self.result, Tensor) else list(self.result)
        return [each for each in found if each.requires_grad]

    @property
    def parents(self) -> Tensor:
        """The parents' poses ``[B, M, places, d]``."""
        poses, layer = self.result if isinstance(self.result, Tensor) else self.result[0], self.layer
        if isinstance(layer, RoutingPool2d):
            poses = poses.unflatten(1, (-1, layer.out_dim or layer.dim)).movedim(2, -1)
        return poses.flatten(2, -2) if poses.dim() > 3 else poses[:, :, None]

    @property
    def activations(self) -> Tensor | None:
        """The parents' activations, or the sigmoid of their scores, ``[B, M, places]``; None if they have none."""
        found = getattr(self.result, "activations", None)
        scores = getattr(self.result, "scores", None)
        found = found if scores is None else scores.sigmoid()
        return None if found is None else found.reshape(*found.shape[:2], -1)

    @property
    def routes(self) -> bool:
        """Whether the layer can return coefficients."""
        return isinstance(self.layer, RoutingPool2d) or self.layer.returns_coefficients

    @torch.no_grad()
    def coefficients(self) -> Tensor:
        """Return the last iteration's coefficients, ``[B, Ho, Wo, I, M]``, by another call of the layer."""
        found = self.layer.forward(**{**self.given, "return_coefficients": True})[-1]
        return found if found.dim() == 5 else found[:, None, None]

    @torch.no_grad()
    def gates(self) -> Tensor | None:
        """Return the children's gates in the order of coefficients, ``[B, Ho, Wo, I]``; None if all are 1."""
        if not isinstance(self.layer, RoutingLayer):
            return None
        children, activity = self.given["children"], self.given.get(self.layer.activity_name)
        if activity is None:
            return None
        return seen(self.layer, children, activity.sigmoid() if self.layer.activity_name == "scores" else activity)

    def votes(self) -> Tensor:
        """Return the votes for a set of parents, ``[B, I, M, d]``, over all positions of a grid."""
        call = self.layer.prepare(self.given["children"], None)
        poses = call.children if call.window is None else call.children.movedim(1, 3).flatten(1, 3)  # [B, I, C, D]
        if call.weight is None:
            votes = poses[:, :, None].expand(-1, -1, call.parent_count, -1, -1)
        else:
            votes = torch.einsum("bjgcd,gmde->bjgmce", poses.unflatten(1, (-1, len(call.weight))), call.weight)
            votes = votes.flatten(1, 2)
        return (votes if call.bias is None else votes + call.bias).flatten(-2)


@contextmanager
def watched(model: nn.Module) -> Iterator[Callable[[], list[Inside]]]:
    """Watch the routing layers of ``model``, in evaluation mode inside a ``with`` block.

    The block's value is a function that returns the last call of every layer so far, in the order in which they ended.
    Modes and hooks are restored at the end.
    """
    last: dict[str, Inside] = {}
    modes = {module: module.training for module in model.modules()}

    def keep(path: str) -> Callable[..., None]:
        def hook(layer: Any, given: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
            named = dict(zip(inspect.signature(layer.forward).parameters, given, strict=False)) | options
            named.pop("return_coefficients", None)
            last.pop(path, None)
            last[path] = Inside(path, layer, named, result)

        return hook

    handles = [
        module.register_forward_hook(keep(path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, (RoutingLayer, RoutingPool2d))
    ]
    try:
        model.eval()
        yield lambda: list(last.values())
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
