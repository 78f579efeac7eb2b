"""One call of a pass as its kernels see it: sizes, shared arguments, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .plan import CROWD, LIMITS, Crowd, Limits, MatrixPlan, Plan, largest_pose, matrix_plan, plan, power_of_two

__all__ = ["FROZEN_NEEDS", "Call", "Pass", "current", "kernel_name", "launch", "processors", "refusal", "watched"]

FROZEN_NEEDS = 1 << 30
"""Bit of ``needs`` that takes the coefficients for constants."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NORM_NUMBERS = 2048  # of a tile in the kernels that walk over poses


@dataclass(frozen=True)
class Pass:
    """What the host must know of a pass.

    Attributes
    ----------
    name
        As in the names of its ops.
    kernels
        The module with its functions (see :mod:`.forward`, :mod:`.backward`), by the names of the kernels' constants.
    gradients
        What the gradients of its parents are: "pose" for a parents tensor, "each" for a number a parent.
    competing
        Whether parents compete for a child, so that those of one tile must know of all others.
    silent
        Whether a gate of 0 makes a child absent.
    crowd
        How much its programs keep on chip.
    """

    name: str
    kernels: ModuleType
    gradients: tuple[str, ...]
    competing: bool = True
    silent: bool = True
    crowd: Crowd = CROWD


def refusal(
    which: Pass, device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int
) -> str | None:
    """Return why a pass's kernels cannot take a call with poses (C, D, E) and M parents, or None if they can."""
    if device.type in ("cpu", "meta"):
        return f"it runs on GPUs only, the tensors are on {device}"
    if dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, got {dtype}"
    padded, largest = power_of_two(pose[0]) * power_of_two(pose[2]), largest_pose(crowd=which.crowd)
    if padded > largest:
        return (
            f"a program holds poses of up to {largest} numbers, got C x E = {pose[0]} x {pose[2]}, "
            f"{padded} when padded to powers of two"
        )
    if parents * pose[0] * pose[2] >= 1 << 31 or pose[1] * pose[2] >= 1 << 31:
        return f"it takes M * C * E and D * E below 2**31, got M = {parents}, (C, D, E) = {pose}"
    return None


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


def kernel_name(kernel: Any, arguments: dict[str, Any]) -> str:
    """Return the name of a kernel; one of a skeleton gets that of the pass it is launched for."""
    own = str(kernel.__name__)
    return f"_{arguments['PASS']}{own}" if "PASS" in arguments else own


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
    """One call of a pass: its sizes, and the arguments that all its kernels share.

    ``tensors`` are the pass's own, in the order that its functions know them by; ``parents`` is M where no weights
    tell it.
    """

    def __init__(
        self,
        which: Pass,
        children: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        window: Sequence[int],
        tensors: Sequence[Tensor | None] = (),
        *,
        mode: int = 0,
        scale: float = 1.0,
        eps: float = 0.0,
        parents: int = 1,
        allow_tf32: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        kh, kw, sh, sw, ph, pw, dh, dw = window
        batch, self.height, self.width, self.types, rows, inner = children.shape
        self.groups, self.parents, _, columns = (1, parents, inner, inner) if weight is None else weight.shape
        ho = (self.height + 2 * ph - (kh - 1) * dh - 1) // sh + 1
        wo = (self.width + 2 * pw - (kw - 1) * dw - 1) // sw + 1
        self.which, self.device, self.dtype = which, children.device, children.dtype
        self.window, self.pose = tuple(window), (rows, inner, columns)
        self.positions, self.children, self.slots = batch * ho * wo, kh * kw * self.types, kh * kw
        self.shape = (batch, ho, wo, self.parents, rows, columns)
        self.poses = self.positions * self.parents
        self.limits = limits
        self.tensor_cores = allow_tf32 or self.dtype != torch.float32
        self.own = tuple(None if t is None else t.contiguous() for t in tensors)
        self.eps, self.identity = eps, weight is None
        self.operands: dict[str, Any] = {
            "children": children,
            "weight": weight,
            "bias": None if bias is None else bias.contiguous(),
        }
        self.gate = {"gate": gate, **self._strides("gs", "bhwn", gate), "SILENT": which.silent and gate is not None}
        own, per_parent = (0, 0) if bias is None else (bias.shape[0] > 1, bias.shape[1] > 1)
        self.arguments: dict[str, Any] = {
            **self.operands,
            "tensors": self.own,
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
        self.constants = {"MODE": mode, "PASS": which.name}

    @staticmethod
    def _strides(prefix: str, names: str, tensor: Tensor | None) -> dict[str, int]:
        return {f"{prefix}_{name}": 0 if tensor is None else tensor.stride(k) for k, name in enumerate(names)}

    def _cut(self) -> dict[str, Any]:
        return {
            "processors": processors(self.device),
            "limits": self.limits,
            "crowd": self.which.crowd,
            "competing": self.which.competing,
        }

    def plan(self, backward: bool, children: int | None = None) -> Plan:
        """Return the plan for this call, or for a launch over fewer children of it."""
        return plan(
            self.positions,
            self.children if children is None else children,
            self.parents,
            self.pose,
            backward=backward,
            tensor_cores=self.tensor_cores,
            products=False if self.identity else None,
            **self._cut(),
        )

    def matrix_plan(self) -> MatrixPlan:
        """Return the plan for dW, dbias and dbetas in a fixed order."""
        return matrix_plan(self.positions, self.children, self.groups, self.parents, self.pose, **self._cut())

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=torch.float32)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=torch.float32)

    def sums(self, kinds: Sequence[str], parts: int, make: Callable[..., Tensor]) -> list[Tensor]:
        """Return ``parts`` of what a pass sums up, by kind: numbers of a parents tensor, or one for each parent."""
        size = self.pose[0] * self.pose[2]
        return [make(parts, self.poses * (size if kind == "pose" else 1)) for kind in kinds]

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

    def pose_tile(self) -> tuple[dict[str, int], int]:
        """Return the tile of kernels that walk over poses of parents, and how many of its blocks there are."""
        rows, columns = power_of_two(self.pose[0]), power_of_two(self.pose[2])
        size = min(max(1, _NORM_NUMBERS // (rows * columns)), power_of_two(self.poses))
        warps = min(16, max(1, size * rows * columns // 512))
        tile = {"C": self.pose[0], "E": self.pose[2], "BL": size, "BC": rows, "BE": columns, "num_warps": warps}
        return tile, -(-self.poses // size)

    def launch(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Start a kernel of a skeleton: with the functions of the pass that it wants."""
        functions = {
            name: getattr(self.which.kernels, name.lower())
            for name in kernel.arg_names
            if name.isupper() and hasattr(self.which.kernels, name.lower())
        }
        launch(kernel, programs, **arguments, **self.constants, **functions)
