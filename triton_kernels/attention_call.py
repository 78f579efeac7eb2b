"""One call of the attention pass as its kernels see it: sizes, shared arguments, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .attention_forward import _attention_normalizer_kernel
from .attention_plan import Limits, Plan, plan, power_of_two

__all__ = ["Call", "current", "launch", "processors", "watched"]

_NORM_NUMBERS = 2048  # of a tile in the kernels that walk over poses


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132 if device.type == "meta" else 2  # an H200; the interpreter, where programs run in turn
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels start on a device and on its current stream."""
    return nullcontext() if device.type in ("cpu", "meta") else torch.get_device_module(device).device(device)


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Start a kernel, or hand it to whoever asked to see what would start."""
    if _watcher is None:
        kernel[(programs,)](**arguments)
    else:
        _watcher(kernel, programs, arguments)


_watcher: Callable[[Any, int, dict[str, Any]], None] | None = None


@contextmanager
def watched(watcher: Callable[[Any, int, dict[str, Any]], None]) -> Iterator[None]:
    """Inside, hand every launch (kernel, programs, arguments) to ``watcher`` instead of running it.

    With tensors on the meta device that tells what a call would launch, of any size, on a machine without a GPU.
    """
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


class Call:
    """One call of the pass: its sizes, and the arguments that all its kernels share."""

    def __init__(
        self,
        children: Tensor,
        weight: Tensor,
        query: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        scale: float,
        window: Sequence[int],
        allow_tf32: bool,
        limits: Limits,
    ) -> None:
        kh, kw, sh, sw, ph, pw, dh, dw = window
        batch, self.height, self.width, self.types, rows, inner = children.shape
        self.groups, self.parents, _, columns = weight.shape
        ho = (self.height + 2 * ph - (kh - 1) * dh - 1) // sh + 1
        wo = (self.width + 2 * pw - (kw - 1) * dw - 1) // sw + 1
        self.device, self.dtype = children.device, children.dtype
        self.window, self.pose = tuple(window), (rows, inner, columns)
        self.positions, self.children, self.slots = batch * ho * wo, kh * kw * self.types, kh * kw
        self.shape = (batch, ho, wo, self.parents, rows, columns)
        self.numbers = self.positions * self.parents * rows * columns
        self.limits = limits
        self.tensor_cores = allow_tf32 or self.dtype != torch.float32
        self.tensors: dict[str, Any] = {
            "children": children,
            "weight": weight,
            "query": None if query is None else query.contiguous(),
            "bias": None if bias is None else bias.contiguous(),
        }
        self.gate = {"gate": gate, **self._strides("gs", "bhwn", gate)}
        own, per_parent = (0, 0) if bias is None else (bias.shape[0] > 1, bias.shape[1] > 1)
        self.arguments: dict[str, Any] = {
            "count": self.positions,
            "length": ho * wo,
            "columns": wo,
            "height": self.height,
            "width": self.width,
            "types": self.types,
            "groups": self.groups,
            "many": self.parents,
            "seen_children": self.children,
            **self._strides("cs", "bhwncd", children),
            **self._strides("ws", "gmde", weight),
            "bs_i": 0 if bias is None or not own else bias.shape[1] * rows * columns,
            "bs_m": rows * columns if per_parent else 0,
            "scale": scale,
            **dict(zip(("KW", "SH", "SW", "PH", "PW", "DH", "DW"), (kw, sh, sw, ph, pw, dh, dw), strict=True)),
            "PADDED": bool(ph or pw),
            **dict(zip("CDE", self.pose, strict=True)),
            "PRECISION": "tf32" if self.tensor_cores and torch.version.hip is None else "ieee",
        }

    @staticmethod
    def _strides(prefix: str, names: str, tensor: Tensor | None) -> dict[str, int]:
        return {f"{prefix}_{name}": 0 if tensor is None else tensor.stride(k) for k, name in enumerate(names)}

    def plan(self, backward: bool, children: int | None = None) -> Plan:
        """Return the plan for this call, or for a launch over fewer children of it."""
        return plan(
            self.positions,
            self.children if children is None else children,
            self.parents,
            self.pose,
            backward=backward,
            tensor_cores=self.tensor_cores,
            processors=processors(self.device),
            limits=self.limits,
        )

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=torch.float32)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=torch.float32)

    @staticmethod
    def tile(chosen: Plan) -> dict[str, int]:
        return {
            "BL": chosen.positions,
            "BC": chosen.rows,
            "BM": chosen.parents,
            "BE": chosen.columns,
            "BK": chosen.depth,
            "blocks": chosen.blocks,
            "tiles": chosen.tiles,
            "num_warps": chosen.warps,
            "num_stages": 2,  # a third buffer costs more shared memory and registers than it hides
        }

    def pose_tile(self, poses: int) -> tuple[dict[str, int], int]:
        """Return the tile of kernels that walk over poses of parents, and how many of its blocks there are."""
        rows, columns = power_of_two(self.pose[0]), power_of_two(self.pose[2])
        size = min(max(1, _NORM_NUMBERS // (rows * columns)), power_of_two(poses))
        warps = min(16, max(1, size * rows * columns // 512))
        tile = {"C": self.pose[0], "E": self.pose[2], "BL": size, "BC": rows, "BE": columns, "num_warps": warps}
        return tile, -(-poses // size)

    def normalizer(self, chosen: Plan, slope: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sweep over all parents once: log-sum-exp of every (position, child), and hbar if there is a gradient."""
        normalizer = self.empty(self.positions, self.children)
        heard = None if slope is None else torch.empty_like(normalizer)
        wanted = self.limits.resident * processors(self.device) // (chosen.blocks * chosen.warps)
        ranges = min(self.children, max(1, wanted))
        per_split = -(-self.children // ranges)
        launch(
            _attention_normalizer_kernel,
            chosen.blocks * -(-self.children // per_split),
            **self.tensors,
            grad=slope,
            normalizer=normalizer,
            heard=heard,
            per_split=per_split,
            **self.arguments,
            **self.tile(chosen),
        )
        return normalizer, heard
