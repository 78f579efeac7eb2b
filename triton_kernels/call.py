"""One call of a routing as its kernels see it: the inputs of its votes, sizes, schedules, launches."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastcaps.backends import ALLOW_TF32, DETERMINISTIC, TF32X3
from fastcaps.votes import VoteInputs

from .forward import Algebra
from .schedule import ATTENTION, LIMITS, Facts, Limits, Schedule, Traits, largest_pose, power_of_two, schedule
from .tiles import INTERPRETED, Tile, Votes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_POSE_NUMBERS = 2048  # values of a tile in the kernels that walk over poses


@dataclass(frozen=True)
class Routing:
    """A routing as the host sees it.

    ``sums``: the kinds of its sums over a range of children, "pose" for a parents tensor, "each" for a value for each
    parent. Empty if it has none: then there is nothing to join.
    """

    name: str  # as in the names of its ops
    algebra: Algebra
    sums: tuple[str, ...]
    gradients: tuple[str, ...] = ()  # the kinds of its parents' gradients
    traits: Traits = ATTENTION

    def refusal(
        self,
        device: torch.device,
        dtype: torch.dtype,
        pose: tuple[int, int, int],
        parents: int,
        has_weight: bool = True,
    ) -> str | None:
        """Return why the kernels cannot take a call with poses (C, D, E) and M parents, or None if they can."""
        if refused := tensor_refusal(device, dtype):
            return refused
        padded, largest = power_of_two(pose[0]) * power_of_two(pose[2]), largest_pose(self.traits)
        if padded > largest:
            return (
                f"a program holds poses of up to {largest} numbers, got C x E = {pose[0]} x {pose[2]}, "
                f"{padded} when padded to powers of two"
            )
        if parents * pose[0] * pose[2] >= 1 << 31 or pose[1] * pose[2] >= 1 << 31:
            return f"it takes M * C * E and D * E below 2**31, got M = {parents}, (C, D, E) = {pose}"
        return None


def served_devices() -> tuple[str, ...]:
    """Return the types of devices that the kernels serve."""
    return ("cpu", "cuda") if INTERPRETED.value else ("cuda", "xpu")


def tensor_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot take a call's tensors, or None if they can."""
    if device.type not in served_devices():
        return f"it runs on GPUs only (or with TRITON_INTERPRET=1), the tensors are on {device}"
    if dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, got {dtype}"
    return None


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has."""
    if device.type in ("meta", "cpu"):
        return 132 if device.type == "meta" else 2  # an H200; the interpreter, where programs run one after another
    properties = torch.get_device_module(device).get_device_properties(device)
    # Intel's GPUs have subslices (Xe cores), which torch's compiler counts as multiprocessors too
    return int(properties.gpu_subslice_count if device.type == "xpu" else properties.multi_processor_count)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels start on a device and on its current stream."""
    return nullcontext() if device.type in ("cpu", "meta") else torch.get_device_module(device).device(device)


@dataclass(frozen=True)
class Launch:
    """One start of a kernel: how many programs, and the arguments by name."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name as compiled for the routing: ``attention_forward_kernel``."""
        return f"{self.arguments.get('ROUTING', '')}{self.kernel.__name__}"


_watched: list[Launch] | None = None


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Start a kernel; inside :func:`watched` only record the launch."""
    if _watched is None:
        kernel[(programs,)](**arguments)
    else:
        _watched.append(Launch(kernel, programs, arguments))


@contextmanager
def watched() -> Iterator[list[Launch]]:
    """Return a context in which no kernel runs: its launches are recorded in the list.

    With meta tensors this shows the launches of a call of any size, on a machine without a GPU.
    """
    global _watched
    before, _watched = _watched, []
    try:
        yield _watched
    finally:
        _watched = before


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()


def table_strides(table: Tensor | None) -> tuple[int, int]:
    """Return the strides of children and of parents in a table of both; 0 if all share an entry."""
    i, m = (0 if table is None or table.shape[k] == 1 else table.stride(k) for k in (0, 1))
    return i, m


class Call:
    """One call of a routing: its sizes, and the arguments that all its kernels share.

    To the kernels a set is a grid of one position; results have the ``shape`` of the call's parents.
    """

    def __init__(self, routing: Routing, votes: Sequence[Any], options: int = 0, limits: Limits = LIMITS) -> None:
        given: Any = VoteInputs(*votes)
        children, weight, bias, gate, parents, window = given.on_grid()
        kh, kw, sh, sw, ph, pw, dh, dw = window
        batch, height, width, types, rows, inner = children.shape
        self.groups: int = given.groups
        (ho, wo), columns = given.grid, given.pose[2]
        self.routing, self.device, self.dtype = routing, children.device, children.dtype
        self.window, self.pose, self.types = tuple(window), (rows, inner, columns), types
        self.positions, self.children, self.parents = batch * ho * wo, kh * kw * types, parents
        self.shape = given.poses
        self.poses = self.positions * parents
        self.deterministic = bool(options & DETERMINISTIC)
        self.tensors = (children, weight, bias, gate)
        bias = None if bias is None else bias.contiguous()
        self.votes = Votes(
            *(children, weight, bias, gate, *children.stride(), *_strides(weight, 4), *table_strides(bias)),
            *_strides(gate, 4),
            *map(tl.constexpr, (kw, sh, sw, ph, pw, dh, dw, tl.int32 if self._reach() < 1 << 31 else tl.int64)),
        )
        self.sizes = {
            "positions": self.positions, "H": height, "W": width, "N": types, "Ho": ho, "Wo": wo,
            "I": self.children, "M": parents, "G": self.groups,
        }  # fmt: skip
        tensor_cores = bool(options & ALLOW_TF32) or self.dtype != torch.float32
        of_three = bool(options & TF32X3) and self.dtype == torch.float32
        rounded = "tf32x3" if of_three else "tf32"
        self.precision = rounded if tensor_cores and torch.version.hip is None else "ieee"
        self.facts = Facts(
            *(self.positions, self.children, parents, self.pose, self.groups, None if weight is not None else False),
            *(tensor_cores, processors(self.device), limits, routing.traits),
        )

    def _reach(self) -> int:
        """Return the largest offset in children, gates, the matrices of a group, and their gradients."""
        children, weight, _, gate = self.tensors
        batch, height, width, *others = children.shape
        high, wide = (2 * pad for pad in self.window[4:6])  # windows begin in the padding
        cells = (batch, height + high, width + wide, *others)
        reaches = [(cells, children.stride())]
        reaches += [] if gate is None else [(cells, gate.stride())]
        reaches += [] if weight is None else [(weight.shape[1:], weight.stride()[1:])]
        dense = max(math.prod(sizes) for sizes, _ in reaches)
        return max(dense, *(sum(map(operator.mul, *reach)) for reach in reaches))

    def schedule(self, backward: bool, children: int | None = None) -> Schedule:
        """Return the schedule of this call, or of a launch over fewer children of it."""
        return schedule(self.facts if children is None else replace(self.facts, children=children), backward=backward)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=torch.float32)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=torch.float32)

    def parts(self, kind: str, count: int) -> tuple[int, int]:
        """Return the shape of ``count`` parts of sums: "pose" for poses, "each" for a value for each parent."""
        return count, self.poses * (self.pose[0] * self.pose[2] if kind == "pose" else 1)

    def tile(self, chosen: Schedule, depth: int | None = None) -> dict[str, Any]:
        """Return a kernel's arguments for its tile; ``depth`` replaces the schedule's."""
        shape = (chosen.positions, chosen.rows, chosen.parents, chosen.columns, chosen.votes)
        numbers = (*shape, chosen.depth if depth is None else depth, *self.pose, self.precision)
        return {
            "tile": Tile(*(tl.constexpr(number) for number in numbers)),
            "num_warps": chosen.warps,
            "num_stages": 2,  # a third buffer costs more shared memory and registers than it hides
        }

    def pose_tile(self, poses: int) -> tuple[dict[str, Any], int]:
        """Return the tile of kernels that walk over poses of parents, and how many of its blocks there are."""
        rows, columns = power_of_two(self.pose[0]), power_of_two(self.pose[2])
        size = min(max(1, _POSE_NUMBERS // (rows * columns)), power_of_two(poses))
        warps = min(16, max(1, size * rows * columns // 512))
        return self.tile(Schedule(size, rows, 1, columns, *(0,) * 6, warps)), -(-poses // size)

    def launch(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Start a kernel of this call."""
        launch(kernel, programs, **arguments, ROUTING=self.routing.name)

    def walk(self, kernel: Any, programs: int, **arguments: Any) -> None:
        """Start a kernel of this call that walks over its children."""
        self.launch(kernel, programs, votes=self.votes, algebra=self.routing.algebra, **self.sizes, **arguments)
