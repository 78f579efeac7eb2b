"""Squash capsules in channels, weigh them and add: what lies between EncapNet's convolutions, in one trip to memory.

The op is no routing: it has no votes, and nothing grows with children times parents. What it shares with the routings
is the border: the op and its backward are defined once, a backend runs each call, and the reference is one of them.

Workspace: none for contiguous arguments of one dtype; others are copied first. A call keeps its arguments for the
backward, which computes lengths and squashes anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import check_count, shape_text
from fastcaps.encapnet import reference
from fastcaps.ops.define import NATIVE, define, let_inductor_call, make_differentiable
from fastcaps.ops.watchers import is_transformed, listener
from fastcaps.reference.seen import recording

_GIVEN = "Tensor x, Tensor? a, Tensor? y, Tensor? b, SymInt types, bool relu"
NAMES = ("x", "a", "y", "b")


def squash_sum(
    x: Tensor,
    a: Tensor | None = None,
    y: Tensor | None = None,
    b: Tensor | None = None,
    *,
    types: int,
    relu: bool = False,
) -> Tensor:
    r"""Return :math:`a \, \mathrm{squash}(x) + b \, \mathrm{squash}(y)`, the squash over each capsule's numbers.

    .. math:: \mathrm{squash}(s) = \frac{\lVert s \rVert^2}{1 + \lVert s \rVert^2} \frac{s}{\lVert s \rVert}

    Parameters
    ----------
    x, y : Tensor
        Capsules in channels, ``[B, types * dim, H, W]``: those of type t are channels ``t * dim`` to
        ``t * dim + dim - 1``. Without y only the first summand is made.
    a, b : Tensor, optional
        ``[B, types, H, W]``: one number for each capsule and position; 1 if None.
    types : int
        Capsule types.
    relu : bool
        Take the ReLU of x and y first.

    Returns
    -------
    Tensor
        ``[B, types * dim, H, W]``, in the widest dtype of the arguments.

    Raises
    ------
    TypeError, ValueError
        Naming the argument whose type, shape or device does not fit.
    BackendError
        If a backend is forced that has no kernel for the call.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1)
    >>> squash_sum(x, types=1).flatten()  # of length 5, and then of 25 / 26
    tensor([0.5769, 0.7692])
    >>> squash_sum(x, torch.full((1, 1, 1, 1), 2.0), x, types=1).flatten()
    tensor([1.7308, 2.3077])
    """
    _check(x, a, y, b, types)
    given: list[Any] = [x, a, y, b]
    dtype = x.dtype
    for tensor in given:
        if tensor is not None and tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    x, a, y, b = [t if t is None or t.dtype == dtype else t.to(dtype) for t in given]
    if is_transformed():
        backends.refuse_unless_reference("squash_sum")
        return reference.squash_sum(x, a, y, b, types, relu)
    found: Tensor = torch.ops.fastcaps.squash_sum.default(x, a, y, b, types, relu)
    return found


def _check(x: Any, a: Any, y: Any, b: Any, types: int) -> None:
    """Raise unless the arguments fit each other."""
    check_count("types", types)
    if y is None and b is not None:
        raise ValueError("b must be None without y, whose coefficient it is")
    for name, value in zip(NAMES, (x, a, y, b), strict=True):
        if value is None and name != "x":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor{'' if name == 'x' else ' or None'}, got {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {value.dtype}")
        if name == "x" and value.dim() != 4:
            raise ValueError(f"x must be [B, types * dim, H, W], got {shape_text(x)}")
        if name == "x" and (x.shape[1] % types or x.shape[1] < types):
            raise ValueError(f"x must have a multiple of {types} channels, as there are types, got {shape_text(x)}")
        if value.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {value.device}")
        wanted = tuple(x.shape) if name in ("x", "y") else (x.shape[0], types, *x.shape[2:])
        if tuple(value.shape) != wanted:
            letters = "the shape of x" if name == "y" else "[B, types, H, W]"
            raise ValueError(f"{name} must have {letters}, {list(wanted)}, got {shape_text(value)}")


# ---- below the border ------------------------------------------------------------------------------------------------


def refusal(name: str, call: backends.Call) -> str | None:
    """Return why a backend cannot take a call, or None if it can."""
    problem = backends.refusal(name, call)
    if problem is None and name in NATIVE:
        key = call.device.type.upper()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastcaps_{name}::squash_sum", key):
            return "the library was built without squash_sum; build it again"
    return problem


def call_of(x: Tensor) -> backends.Call:
    """Return a call on ``x`` as :mod:`fastcaps.backends` asks about calls."""
    # the op has no votes, so pose and parents are placeholders, and its kernels have no options
    return backends.Call("squash_sum", x.device, x.dtype, pose=(1, 1, 1), parents=1, has_weight=False, options=0)


def choose(x: Tensor) -> str:
    """Return the name of the backend that runs a call on ``x``."""
    return backends.chosen(backends.forced(), call_of(x), refusal)


def _run(x: Tensor, *others: Any) -> Tensor:
    """Run a call, of whose arguments ``others`` are a, y, b, types and relu, by the backend that is chosen."""
    _check(x, *others[:4])
    chosen = choose(x)
    if chosen in NATIVE:
        run: Any = native["squash_sum"][chosen]
    elif chosen == "triton":
        run = backends.triton_kernels("squash_sum").squash_sum
    else:
        run = reference.squash_sum
    found: Tensor = run(x, *others)
    return found.contiguous()


def _run_backward(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, a, y and b; ``others`` end in the bits of those that are wanted."""
    _check(x, *others[:4])
    chosen = choose(x)
    if chosen in NATIVE:
        return tuple(native["squash_sum_backward"][chosen](grad, x, *others))
    if chosen == "triton":
        return tuple(backends.triton_kernels("squash_sum").squash_sum_backward(grad, x, *others))
    *coefficients, types, relu, needs = others
    wanted = [name for k, name in enumerate(NAMES) if needs >> k & 1]
    given = dict(zip(NAMES, (x, *coefficients), strict=True))
    found = _differentiate(grad, given, wanted, types, relu, create_graph=False)
    return tuple(found[name].contiguous() if name in found else x.new_empty(0) for name in NAMES)


def _differentiate(
    grad: Tensor, given: dict[str, Tensor | None], wanted: Sequence[str], types: int, relu: bool, create_graph: bool
) -> dict[str, Tensor]:
    """Return the gradients of those arguments that are wanted by name, by the reference."""
    with recording():
        leaves = {}
        for name, tensor in given.items():  # fresh nodes: one argument may be, or depend on, another
            if name in wanted and tensor is not None:
                leaves[name] = tensor.view_as(tensor) if create_graph else tensor.detach().requires_grad_()
        x, a, y, b = (leaves.get(name, given[name]) for name in NAMES)
        assert x is not None
        found = reference.squash_sum(x, a, y, b, types, relu)
        made = torch.autograd.grad(found, [leaves[name] for name in wanted], grad, create_graph=create_graph)
    return dict(zip(wanted, made, strict=True))


# ---- what PyTorch asks for -------------------------------------------------------------------------------------------


def _fake(x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int, relu: bool) -> Tensor:
    """Return an empty tensor of the op's result; if :func:`fastcaps.explain` is listening, tell it of the call."""
    _check(x, a, y, b, types)
    let_inductor_call(torch.ops.fastcaps.squash_sum.default)
    if (hears := listener.get()) is not None:
        hears.other(call_of(x), lambda: _describe(x, a, y, b, types), refusal)
    return x.new_empty(x.shape)


def _describe(x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int) -> str:
    batch, channels, height, width = x.shape
    summands = [("squash(x)", a, "a "), *([] if y is None else [("squash(y)", b, "b ")])]
    formula = " + ".join((weight if given is not None else "") + name for name, given, weight in summands)
    return (
        f"batch {batch}, {formula} of {height}x{width} x {types} capsules of {channels // types}, "
        f"{str(x.dtype).removeprefix('torch.')} on {x.device}"
    )


def _fake_backward(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    given, needs = (x, *others[:3]), others[-1]
    return tuple(x.new_empty(tensor.shape if needs >> k & 1 else (0,)) for k, tensor in enumerate(given))


def _save(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.types, ctx.relu = inputs[4:]
    ctx.blocks = backends.settings()


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    wanted = [name for k, name in enumerate(NAMES) if ctx.needs_input_grad[k]]
    if torch.is_grad_enabled():  # a graph of the backward itself: through the reference, which is ordinary code
        given = dict(zip(NAMES, saved, strict=True))
        found = _differentiate(grad, given, wanted, ctx.types, ctx.relu, create_graph=True)
        return (*(found.get(name) for name in NAMES), None, None)
    needs = sum(1 << NAMES.index(name) for name in wanted)
    with backends.under(ctx.blocks):
        gradients = torch.ops.fastcaps.squash_sum_backward.default(grad, *saved, ctx.types, ctx.relu, needs)
    return (*(g if name in wanted else None for name, g in zip(NAMES, gradients, strict=True)), None, None)


def _flops(x: Any, a: Any, y: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Multiplications and additions: square and sum, scale, weigh, add; tensors come as their shapes."""
    summands = 1 if y is None else 2
    return int(prod(x) * (3 * summands + sum(c is not None for c in (a, b)) + summands - 1))


def _backward_flops(grad: Any, x: Any, a: Any, y: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two sums over the numbers and three terms, of each summand."""
    return int(prod(x) * 9 * (1 if y is None else 2))


_op, _below = define("squash_sum", _GIVEN, "Tensor", _run, _fake, _flops)
_, _below_backward = define(
    "squash_sum_backward",
    f"Tensor grad, {_GIVEN}, int needs",
    "(Tensor dx, Tensor da, Tensor dy, Tensor db)",
    *(_run_backward, _fake_backward, _backward_flops),
)
native = {"squash_sum": _below, "squash_sum_backward": _below_backward}
"""The ops of the native libraries, by name and library."""
make_differentiable(_op, _backward, _save, reference.squash_sum, _fake)
