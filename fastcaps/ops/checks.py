"""Checks of a raw call: do its arguments fit together, before a kernel that would broadcast them in silence runs.

They say what the native libraries say (``csrc/tensors.h``); what a user sees of wrong arguments is
:mod:`fastcaps.functional`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastcaps.geometry import output_size
from fastcaps.reference import accumulation_dtype

__all__ = ["Frame", "broadcast", "check", "check_call", "check_tensors", "frame_of"]


@dataclass(frozen=True)
class Frame:
    """The sizes of a call."""

    children: int  # I, that a position sees
    position: tuple[int, int, int]  # B, Ho, Wo
    parents: int
    pose: tuple[int, int]  # C, E

    @property
    def numbers(self) -> tuple[int, ...]:
        """The shape of a number for every parent, ``[B, Ho, Wo, M]``."""
        return (*self.position, self.parents)

    @property
    def poses(self) -> tuple[int, ...]:
        """The shape of the parents' poses, ``[B, Ho, Wo, M, C, E]``."""
        return (*self.numbers, *self.pose)


def frame_of(children: Tensor, weight: Tensor | None, parents: int, window: Sequence[int]) -> Frame:
    """Return the sizes of a call whose arguments fit together. ``parents`` counts where there is no weight."""
    ho, wo = output_size(window, children.shape[1], children.shape[2])
    many, columns = (parents, children.shape[5]) if weight is None else (weight.shape[1], weight.shape[3])
    count = window[0] * window[1] * children.shape[3]
    return Frame(count, (children.shape[0], ho, wo), many, (children.shape[4], columns))


def check(condition: bool, message: str) -> None:
    """Raise RuntimeError with the package's name and a message unless a condition holds."""
    if not condition:
        raise RuntimeError(f"fastcaps: {message}")


def _check_tensor(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    check(list(tensor.shape) == list(shape), f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    check(tensor.dtype == dtype, f"{name} has another dtype than the call")
    check(tensor.device == device, f"{name} is not on the device of children")


def check_tensors(given: Any, wide: bool, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check the shapes of some of a call's arguments, where they are given.

    Their dtype must be that of the children, or that of sums over them if ``wide``. Arguments that a call does not even
    have count as not given.
    """
    children = given.children
    dtype = accumulation_dtype(children.dtype) if wide else children.dtype
    for name, shape in shapes.items():
        tensor = getattr(given, name, None)
        if tensor is not None:
            _check_tensor(name, tensor, shape, dtype, children.device)


def check_call(
    children: Tensor,
    weight: Tensor | None,
    parents: int,
    bias: Tensor | None,
    gate: Tensor | None,
    window: Sequence[int],
) -> Frame:
    """Check what every pass is given and return its sizes. ``parents`` counts where there is no weight."""
    check(children.dim() == 6, f"children must be [B, H, W, N, C, D], got {list(children.shape)}")
    check(
        weight is None or weight.dim() == 4,
        f"weight must be [G, M, D, E], got {None if weight is None else list(weight.shape)}",
    )
    check(len(window) == 8, "window must be [kh, kw, sh, sw, ph, pw, dh, dw]")
    least = (1, 1, 1, 1, 0, 0, 1, 1)
    check(all(n >= m for n, m in zip(window, least, strict=True)), f"window is not valid: {list(window)}")
    sizes = [] if weight is None else list(weight.shape)
    check(
        min(*children.shape[1:], *sizes, parents if weight is None else 1) >= 1,
        f"children {list(children.shape)} and weight {sizes or None} must not have empty dimensions but the batch",
    )
    frame = frame_of(children, weight, parents, window)
    check(min(frame.position[1:]) >= 1, f"window {list(window)} is larger than children {list(children.shape)}")
    groups = 1 if weight is None else weight.shape[0]
    check(frame.children % groups == 0, f"weight has {groups} groups, which do not divide {frame.children} children")
    given = SimpleNamespace(children=children, weight=weight, bias=bias, gate=gate)
    check_tensors(given, False, {"weight": (groups, frame.parents, children.shape[5], frame.pose[1])})
    check_tensors(given, False, {"gate": children.shape[:4]})
    if bias is not None:
        check(bias.dim() == 4, "bias must be [I or 1, M or 1, C, E]")
        check_tensors(given, False, {"bias": (*broadcast(bias, frame), *frame.pose)})
    return frame


def broadcast(tensor: Tensor, frame: Frame) -> tuple[int, int]:
    """Return the leading sizes that a tensor ``[I or 1, M or 1, ...]`` ought to have."""
    return 1 if tensor.shape[0] == 1 else frame.children, 1 if tensor.shape[1] == 1 else frame.parents
