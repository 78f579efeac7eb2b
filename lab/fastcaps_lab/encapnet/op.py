"""The op between EncapNet's convolutions: a weighted sum of squashed capsules in channels, in one pass over memory.

It is not a routing and has no votes. As for the routings, the op and its backward are defined once, and a backend,
which may be the reference, runs each call.

Workspace: none for contiguous arguments of one dtype; others are copied first. A call stores its arguments for the
backward, which computes lengths and squashes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends
from fastcaps.checks import check_count, shape_text
from fastcaps.ops.define import NATIVE, define, let_inductor_call, make_differentiable
from fastcaps.watchers import is_transformed, listener
from fastcaps_lab.encapnet import reference

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
    r"""Return :math:`a \, \mathrm{squash}(x) + b \, \mathrm{squash}(y)`, squashed over each capsule's values.

    .. math:: \mathrm{squash}(s) = \frac{\lVert s \rVert^2}{1 + \lVert s \rVert^2} \frac{s}{\lVert s \rVert}

    Parameters
    ----------
    x, y : Tensor
        Capsules in channels, ``[B, types * dim, H, W]``: those of type t are channels ``t * dim`` to
        ``t * dim + dim - 1``. Without y only the first summand.
    a, b : Tensor, optional
        ``[B, types, H, W]``: one value for each capsule and position; 1 if None.
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
        For an argument of a wrong type, shape or device; the message names it.
    BackendError
        If a forced backend has no kernel for the call.

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
    check_count("types", types)
    if y is None and b is not None:
        raise ValueError("b, the coefficient of y, must be None without y")
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
            raise ValueError(f"x must have a multiple of {types} channels, the types, got {shape_text(x)}")
        if value.device != x.device:
            raise ValueError(f"{name} must be on the device of x, {x.device}, got {value.device}")
        wanted = tuple(x.shape) if name in ("x", "y") else (x.shape[0], types, *x.shape[2:])
        if tuple(value.shape) != wanted:
            letters = "the shape of x" if name == "y" else "[B, types, H, W]"
            raise ValueError(f"{name} must have {letters}, {list(wanted)}, got {shape_text(value)}")


# ---- below the border ------------------------------------------------------------------------------------------------


def call_of(x: Tensor) -> backends.Call:
    """Return the properties of a call on ``x`` for :mod:`fastcaps.backends`."""
    # without votes, pose and parents are placeholders, and the kernels have no options
    return backends.Call("squash_sum", x.device, x.dtype, pose=(1, 1, 1), parents=1, has_weight=False, options=0)


def _kernel(name: str, x: Tensor) -> Callable[..., Any]:
    """Return the chosen backend's kernel for an op on ``x``; its name is the same everywhere."""
    chosen = backends.choose(call_of(x))
    if chosen in NATIVE:
        return native[name][chosen]
    kernels = backends.triton_kernels("squash_sum") if chosen == "triton" else reference
    return getattr(kernels, name)


def _run(x: Tensor, *others: Any) -> Tensor:
    """Run a call; ``others`` are a, y, b, types and relu."""
    _check(x, *others[:4])
    found: Tensor = _kernel("squash_sum", x)(x, *others)
    return found.contiguous()


def _run_backward(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, a, y and b; ``others`` end with the bits of those that are needed."""
    _check(x, *others[:4])
    return tuple(_kernel("squash_sum_backward", x)(grad, x, *others))


# ---- fake kernels, autograd, FLOPs -----------------------------------------------------------------------------------


def _fake(x: Tensor, a: Tensor | None, y: Tensor | None, b: Tensor | None, types: int, relu: bool) -> Tensor:
    """Return an empty tensor of the op's result, and report the call to a listening :func:`fastcaps.explain`."""
    _check(x, a, y, b, types)
    let_inductor_call(torch.ops.fastcaps.squash_sum.default)
    if (explainer := listener.get()) is not None:
        explainer.other(call_of(x), _describe(x, a, y, b, types))
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
    saved, wanted = ctx.saved_tensors, [k for k in range(4) if ctx.needs_input_grad[k]]
    if torch.is_grad_enabled():  # a second derivative: through the reference, which is ordinary code
        given: Any = [x.view_as(x) if k in wanted else x for k, x in enumerate(saved)]  # one may depend on another
        result = reference.squash_sum(given[0], given[1], given[2], given[3], ctx.types, ctx.relu)
        found = torch.autograd.grad(result, [given[k] for k in wanted], grad, create_graph=True)
        gradients = dict(zip(wanted, found, strict=True))
    else:
        needs = sum(1 << k for k in wanted)
        with backends.under(ctx.blocks):
            every = torch.ops.fastcaps.squash_sum_backward.default(grad, *saved, ctx.types, ctx.relu, needs)
        gradients = {k: every[k] for k in wanted}
    return (*(gradients.get(k) for k in range(4)), None, None)


def _flops(x: Any, a: Any, y: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the multiplications and additions: square, sum, scale, weigh, add; arguments are the tensors' shapes."""
    summands = 1 if y is None else 2
    return int(prod(x) * (3 * summands + sum(c is not None for c in (a, b)) + summands - 1))


def _backward_flops(grad: Any, x: Any, a: Any, y: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return those of the backward: two sums over the values and three terms for each summand."""
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
