"""The inputs of votes: children, weight, bias, gate and window, checked once in the function that the user calls.

In *public layout* a set of capsules is ``[B, I, C, D]``, a grid ``[B, N, H, W, C, D]``. In *op layout* a set is the
same, and a grid has channels last, ``[B, H, W, N, C, D]``. One is a view of the other, so nothing is copied. To a
kernel a set is a grid of one position with ``N = I`` types and a 1 x 1 window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.checks import check_count, check_pair, check_shape, check_tensor, is_tracing, refuse_nested, shape_text

POSE = (-2, -1)
"""The dimensions of a pose."""

SET_WINDOW: tuple[int, ...] = (1, 1, 1, 1, 0, 0, 1, 1)
"""The op's ``window`` for a set: kernel 1 x 1, stride 1, no padding, dilation 1."""


@dataclass(frozen=True)
class Window:
    """A rectangular window over a grid: one output position of a grid layer routes the children under it.

    Parameters
    ----------
    kernel_size, stride, padding, dilation
        As in :class:`torch.nn.Conv2d`: an int, or a (rows, columns) pair. Padded positions hold no children: they send
        no vote, not even a bias.

    Attributes
    ----------
    spec
        The eight values ``(kh, kw, sh, sw, ph, pw, dh, dw)`` that the ops take.

    Raises
    ------
    TypeError
        If an argument is not an int or a pair of ints.
    ValueError
        If an argument is below its minimum (1; padding: 0) or above 2**31.
    """

    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    spec: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = {
            name: check_pair(f"Window: {name}", getattr(self, name), least)
            for name, least in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))
        }
        for name, pair in pairs.items():
            object.__setattr__(self, name, pair)
        object.__setattr__(self, "spec", tuple(number for pair in pairs.values() for number in pair))

    @property
    def positions(self) -> int:
        """Positions in the window, kh * kw, which hold kh * kw * N children of N types."""
        return self.spec[0] * self.spec[1]

    @property
    def smallest_grid(self) -> tuple[int, int]:
        """The smallest grid (height, width) into which the window fits."""
        rows, columns = window_extent(self.spec)
        return max(1, rows - 2 * self.spec[4]), max(1, columns - 2 * self.spec[5])

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (Ho, Wo) for an H x W grid; a value below 1 means that the window does not fit."""
        return output_size(self.spec, height, width)


def window_extent(spec: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns from a window's first to its last position, dilation included."""
    kh, kw, _, _, _, _, dh, dw = spec
    return (kh - 1) * dh + 1, (kw - 1) * dw + 1


def output_size(spec: Sequence[int], height: int, width: int) -> tuple[int, int]:
    """Return the output grid (Ho, Wo) of ``spec`` over an H x W grid, as a convolution counts it."""
    _, _, sh, sw, ph, pw, _, _ = spec
    rows, columns = window_extent(spec)
    return (height + 2 * ph - rows) // sh + 1, (width + 2 * pw - columns) // sw + 1


def window_views(grid: Tensor, window: Sequence[int]) -> Tensor:
    """Return the windows of ``grid`` ``[B, H, W, N, ...]`` as ``[B, Ho, Wo, kh, kw, N, ...]``.

    They are a view; with padding, of a copy of the grid with zeros in padded positions.
    """
    _, _, sh, sw, ph, pw, dh, dw = window
    if ph or pw:
        grid = F.pad(grid, [0, 0] * (grid.dim() - 3) + [pw, pw, ph, ph])
    rows, columns = window_extent(window)
    seen = grid.unfold(1, rows, sh)[..., ::dh].unfold(2, columns, sw)[..., ::dw]  # [B, Ho, Wo, N, ..., kh, kw]
    return seen.movedim((-2, -1), (3, 4))


def windows(grid: Tensor, window: Sequence[int]) -> Tensor:
    """Return the same as ``[B, Ho, Wo, I, ...]``, with child ``i = (ky * kw + kx) * N + n``."""
    return window_views(grid, window).flatten(3, 5)


def hidden(children: Tensor, gate: Tensor) -> Tensor:
    """Return which children to skip: those with a gate of 0 and a NaN or infinity in their pose.

    A gate of 0 means that a child does not exist, whatever its values. If they are finite it still gets its ordinary
    gradient, so that its gate can open again. A skipped child gets no gradient, and has no effect on others'.
    """
    return (gate == 0) & ~children.isfinite().all(-1).all(-1)


def to_op(tensor: Tensor, window: Window | None) -> Tensor:
    """Return capsules, parents or gates of public layout in op layout, for a grid a view ``[B, H, W, N, ...]``."""
    return tensor if window is None else tensor.movedim(1, 3)


def as_grid(tensor: Tensor) -> Tensor:
    """Return a set's tensor as that of a grid of one position, with H and W behind the batch."""
    return tensor.unsqueeze(1).unsqueeze(1)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the ops' dtype under autocast for a device type; None if autocast is off.

    It is autocast's dtype, except that float16 on the CPU becomes float32: the CPU kernels do not take float16.
    """
    # Not torch.amp.is_autocast_available: torch 2.10's compiler cannot trace it. Other devices have no rule below.
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return torch.float32 if device_type == "cpu" and dtype == torch.float16 else dtype


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a block in which autocast is off; meta tensors have no autocast."""
    if device_type == "meta" or (device_type in ("cpu", "cuda") and not torch.is_autocast_enabled(device_type)):
        return nullcontext()  # it is off: a block of torch's would take several microseconds
    return torch.autocast(device_type, enabled=False)


class VoteInputs(NamedTuple):
    """The inputs of the votes ``V[b, l, i, m] = P[b, l, i] W[i mod G, m] + bias[i or 1, m or 1]``, in op layout.

    They are the first arguments of every op, in this order: ``op(*votes, ...)``.

    Attributes
    ----------
    children
        P, ``[B, H, W, N, C, D]``; of a set ``[B, I, C, D]``.
    weight
        W, ``[G, M, D, E]``, or None: a child's vote for every parent is its pose, and ``E = D``.
    bias
        ``[I or 1, M or 1, C, E]``, or None.
    gate
        g, ``[B, H, W, N]`` or ``[B, I]``; None for 1. Users may give booleans.
    parents
        M.
    window
        kh, kw, sh, sw, ph, pw, dh, dw.
    """

    children: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    parents: int
    window: Sequence[int]

    @property
    def grid(self) -> tuple[int, int]:
        """Ho, Wo."""
        return (1, 1) if self.is_set else output_size(self.window, *self.children.shape[1:3])

    @property
    def seen(self) -> int:
        """I, the children in one window."""
        return seen_of(self)

    @property
    def groups(self) -> int:
        """G."""
        return 1 if self.weight is None else self.weight.shape[0]

    @property
    def pose(self) -> tuple[int, int, int]:
        """C, D, E: a child's pose is C x D, a parent's C x E."""
        return pose_of(self)

    @property
    def parent_values_shape(self) -> tuple[int, ...]:
        """The shape of one value for each parent, ``[B, Ho, Wo, M]`` or ``[B, M]``."""
        return (*positions_of(self), self.parents)

    @property
    def poses(self) -> tuple[int, ...]:
        """The shape of the parents' poses, ``[B, Ho, Wo, M, C, E]`` or ``[B, M, C, E]``."""
        rows, _, columns = self.pose
        return (*positions_of(self), self.parents, rows, columns)

    @property
    def coefficients_shape(self) -> tuple[int, ...]:
        """The shape of the coefficients, ``[B, Ho, Wo, I, M]`` or ``[B, I, M]``."""
        return (*positions_of(self), self.seen, self.parents)

    @property
    def is_set(self) -> bool:
        """Whether the children are a set, without positions."""
        return self.children.dim() == 4

    def to_op(self, tensor: Tensor) -> Tensor:
        """Return parents' poses or scores of public layout in op layout, as a view."""
        return tensor if self.children.dim() == 4 else tensor.movedim(1, 3)

    def from_op(self, tensor: Tensor) -> Tensor:
        """Return them in public layout; the inverse of :meth:`to_op`."""
        return tensor if self.children.dim() == 4 else tensor.movedim(3, 1)

    def pairs_to_op(self, tensor: Tensor) -> Tensor:
        """Return coefficients of public layout in op layout: the same, unless a function makes the votes."""
        return tensor

    def pairs_from_op(self, tensor: Tensor) -> Tensor:
        """Return them in public layout."""
        return tensor

    def public_poses(self) -> tuple[int, ...]:
        """Return the shape of the parents' poses in public layout, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``."""
        (batch, *grid), (rows, _, columns) = positions_of(self), pose_of(self)
        return (batch, self.parents, *grid, rows, columns)

    def public_pairs(self) -> tuple[int, ...]:
        """Return the shape of the coefficients in public layout."""
        return (*positions_of(self), seen_of(self), self.parents)

    def on_grid(self) -> VoteInputs:
        """Return the same votes with a set as a grid of one position."""
        if not self.is_set:
            return self
        gate = None if self.gate is None else as_grid(self.gate)
        return self._replace(children=as_grid(self.children), gate=gate)

    @property
    def sizes(self) -> tuple[int, ...]:
        """B H W N C D Ho Wo M E G and the window's eight values; G is 0 without matrices."""
        groups = 0 if self.weight is None else self.groups
        batch, *where = self.children.shape[:-3]
        return (
            *(batch, *(where or (1, 1)), *self.children.shape[-3:]),
            *(*self.grid, self.parents, self.pose[2], groups, *self.window),
        )

    @property
    def autocasts(self) -> bool:
        """Whether autocast, which allows mixed dtypes, is on for the children's device."""
        return autocast_dtype(self.children.device.type) is not None

    @classmethod
    def of(
        cls,
        children: Any,
        weight: Any,
        bias: Any,
        gate: Any,
        window: Window | None,
        parents: Any = None,
        *,
        gate_name: str = "gate (a layer's activations)",
        others: tuple[Any, ...] = (),
        parents_at: int | None = None,
        check: Callable[..., None] | None = None,
    ) -> VoteInputs:
        """Check the user's arguments, in public layout, and return them in op layout; every call is checked here.

        Arguments that passed once are not checked again if shapes, dtypes, devices, layouts, settings and autocast are
        the same, so a check may not depend on anything else.

        ``parents`` is M, by default that of ``weight``, else of ``bias``, else 1. Messages call the gate ``gate_name``.
        ``others`` are a routing's other arguments (tensors, None or booleans), which ``check(votes, *others)`` checks;
        dimension ``parents_at`` of one of them may be M if neither ``parents`` nor the weight is.
        """
        parents = None if parents is None else check_count("parents", parents)
        settings = (window, parents, gate_name, parents_at, check)
        parent_count = _once((children, weight, bias, gate, *others), settings)
        return cls.unchecked(children, weight, bias, gate, window, parent_count)

    @classmethod
    def unchecked(
        cls,
        children: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        window: Window | None,
        parents: int,
    ) -> VoteInputs:
        """Return valid arguments of public layout in op layout."""
        spec = SET_WINDOW if window is None else window.spec
        if gate is not None and gate.dtype == torch.bool:
            gate = gate.to(children.dtype)
        return cls(to_op(children, window), weight, bias, None if gate is None else to_op(gate, window), parents, spec)

    def check(self) -> None:
        """Raise if the parts do not fit together, in raw calls of the ops: kernels in Python would broadcast."""
        votes = self.on_grid()
        gate = votes.gate if votes.gate is None or votes.gate.dim() != 4 else votes.gate.movedim(3, 1)
        pairs = [tuple(self.window[k : k + 2]) for k in range(0, 8, 2)]
        window = Window(*pairs)  # type: ignore[arg-type]
        VoteInputs.of(votes.children.movedim(3, 1), self.weight, self.bias, gate, window, self.parents)


# functions, as torch 2.10's compiler traces a named tuple's fields and methods but not its properties


def pose_of(votes: VoteInputs) -> tuple[int, int, int]:
    """Return :attr:`VoteInputs.pose`."""
    rows, depth = votes.children.shape[-2:]
    return rows, depth, depth if votes.weight is None else votes.weight.shape[3]


def positions_of(votes: VoteInputs) -> tuple[int, ...]:
    """Return B; for grids B, Ho, Wo."""
    batch, *grid = votes.children.shape[:-3]
    return (batch, *output_size(votes.window, *grid)) if grid else (batch,)


def seen_of(votes: VoteInputs) -> int:
    """Return :attr:`VoteInputs.seen`."""
    return votes.window[0] * votes.window[1] * votes.children.shape[-3]


_found_right: dict[Any, int] = {}  # M of the kinds of calls that passed the check


def _once(given: tuple[Any, ...], settings: tuple[Any, ...]) -> int:
    """Return M of the arguments of :meth:`VoteInputs.of`, after a check unless the same kind of call passed before."""
    key: Any = None
    if not (is_tracing() or torch._C._is_tracing()):  # a compiler would guard every entry
        try:
            kinds = [
                t if t is None or type(t) is bool else (type(t), t.shape, t.dtype, t.device, t.layout) for t in given
            ]
            key = (*settings, autocast_dtype(given[0].device.type), *kinds)
            found = _found_right.get(key)
            if found is not None:
                return found
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or a setting of a wrong type: _check raises
            key = None
    found = _check(given, *settings)
    if key is not None and len(_found_right) < 4096:
        _found_right[key] = found
    return found


def _check(
    given: tuple[Any, ...],
    window: Window | None,
    parents: Any,
    gate_name: str,
    parents_at: int | None,
    check: Callable[..., None] | None,
) -> int:
    children, weight, bias, gate, *others = given
    for name, value in zip(("children", "weight", "bias", gate_name), given, strict=False):  # they have no shape
        if isinstance(value, Tensor):
            refuse_nested(name, value)
    if parents is None and parents_at is not None:
        tables = [x for x in others if isinstance(x, Tensor) and not x.is_nested and x.dim() > parents_at]
        # a weight for one parent does not decide: with more parents it is a mistake, which _check_weight reports
        if tables and not (isinstance(weight, Tensor) and (weight.dim() != 4 or weight.shape[1] != 1)):
            sizes = [x.shape[parents_at] for x in tables]
            sizes += [bias.shape[1]] if isinstance(bias, Tensor) and bias.dim() == 4 else []
            parents = check_count("parents", next((size for size in sizes if size != 1), 1))
    _check_children(children, window)
    cast = autocast_dtype(children.device.type) is not None
    table = weight if weight is not None else bias
    parent_count = table.shape[1] if isinstance(table, Tensor) and table.dim() == 4 else 1
    if weight is None and parents is not None:
        parent_count = parents
    if weight is not None:
        check_tensor("weight", weight, children, cast)
        _check_weight(weight, children, parents)
    spec = SET_WINDOW if window is None else window.spec
    votes = VoteInputs(to_op(children, window), weight, bias, None, parent_count, spec)
    _check_window(votes, children, window)
    if bias is not None:
        check_tensor("bias", bias, children, cast)
        rows, _, columns = pose_of(votes)
        check_shape("bias", bias, ((seen_of(votes), 1), (parent_count, 1), rows, columns), "I or 1, M or 1, C, E")
    if gate is not None:
        check_tensor(gate_name, gate, children, cast, () if gate_name == "scores" else (torch.bool,))
        check_shape(gate_name, gate, tuple(children.shape[:-2]), "B, I" if window is None else "B, N, H, W")
    if check is not None:
        check(votes, *others)
    return parent_count


def _check_children(children: Any, window: Any) -> None:
    """Raise unless children is a dense, floating-point set or grid of poses, non-empty except for the batch."""
    if not isinstance(children, Tensor):
        raise TypeError(f"children must be a torch.Tensor, got {type(children).__name__}")
    if window is not None and not isinstance(window, Window):
        raise TypeError(f"window must be a fastcaps.Window or None, got {type(window).__name__}")
    symbols = "B, I, C, D" if window is None else "B, N, H, W, C, D"
    if children.dim() != (4 if window is None else 6):
        kind, last = ("a set (window=None)", 2) if window is None else ("a grid (window given)", 4)
        hint = f"; for vectors, which are poses of one row, pass children.unsqueeze({last})"
        hint = hint if children.dim() == last + 1 else ""
        raise ValueError(f"children of {kind} must have shape [{symbols}], got {shape_text(children)}{hint}")
    if children.layout != torch.strided:
        raise TypeError(f"children must be a dense tensor, got layout {children.layout}")
    if not children.is_floating_point() or children.element_size() == 1:
        allowed = "float32, float64, bfloat16, float16"
        raise TypeError(f"children must have one of the dtypes {allowed}, got {children.dtype}")
    if not is_tracing() and 0 in children.shape[1:]:
        letters = symbols.split(", ")
        symbol = next(letters[k] for k in range(1, children.dim()) if children.shape[k] == 0)
        raise ValueError(f"children [{symbols}] must have {symbol} >= 1, got {shape_text(children)}")


def _check_weight(weight: Tensor, children: Tensor, parents: Any) -> None:
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape [G, M, D, E], got {shape_text(weight)}")
    if is_tracing():
        return
    for size, symbol in zip(weight.shape, "GMDE", strict=True):
        if size < 1:
            raise ValueError(f"weight [G, M, D, E] must have {symbol} >= 1, got {shape_text(weight)}")
    if weight.shape[2] != children.shape[-1]:
        raise ValueError(
            f"weight [G, M, D, E] must have D = {children.shape[-1]}, the columns of a child's pose; "
            f"got {shape_text(weight)}"
        )
    if parents is not None and weight.shape[1] == 1 != parents:
        raise ValueError(
            f"weight [G, M, D, E] must have M = {parents}, the number of parents (weight.expand(-1, {parents}, -1, -1) "
            f"shares one matrix), got {shape_text(weight)}"
        )
    if parents is not None and parents != weight.shape[1]:
        raise ValueError(f"parents must be the M = {weight.shape[1]} of weight [G, M, D, E], got {parents}")


def _check_window(votes: VoteInputs, children: Tensor, window: Window | None) -> None:
    """Raise if the window does not fit into the grid, or G does not divide the children in a window."""
    if is_tracing():
        return
    if window is not None and min(votes.grid) < 1:
        (height, width), extent, (ph, pw) = children.shape[2:4], window_extent(window.spec), window.spec[4:6]
        raise ValueError(
            f"window must fit into the grid: it spans {extent[0]} x {extent[1]} positions with its dilation, "
            f"children have H x W = {height} x {width}, with padding {height + 2 * ph} x {width + 2 * pw}"
        )
    if votes.seen % votes.groups != 0:
        raise ValueError(
            f"weight [G, M, D, E] must have a G that divides the {votes.seen} children in one window, "
            f"got {shape_text(votes.weight)}"  # type: ignore[arg-type]
        )
