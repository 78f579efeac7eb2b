"""The ops of the package: schemas, fake kernels, autograd, autocast.

Each schema is defined once, here; native libraries only implement it. Where none serves the CPU the reference does; on
a GPU :mod:`fastcaps.dispatch` chooses for each call. Layout and meaning of every argument: :mod:`fastcaps.reference`.

Workspace
---------
Beside their outputs the CPU kernels use, with "parents" short for the B * L * M * C * E numbers of one parents tensor:

``attention_pass``: at most 16 MiB of partial sums where positions are too few to keep the threads busy, and about
0.5 MiB for each thread (the parents and votes of one block; with very many parents, the parents of 16 positions a few
times).

``attention_pass_backward``: two parents (query and dL/dS turned to lanes), one parents more for each range of children
and one ``dweight`` and ``dbias`` for each group of samples that the call is cut into (``csrc/cpu/cut.cpp`` keeps their
sum small), and about 1 MiB for each thread.

The CUDA kernels use

``attention_pass``: one parents for each range of children, where positions are too few to fill the device (each range
has at least 8 children); 2 * B * L * I numbers where the parents do not fit into one block and, for 64 x 64 weights,
from 33 positions on; the weights once more where they are rounded to TF32.

``attention_pass_backward``: one parents (dL/dS), one parents for each range of children if there are several,
3 * B * L * I numbers as above; in the deterministic mode about 64 MiB of parts of ``dweight`` and ``dbias``, or four of
them if they are larger.

Nothing grows with children times parents. The reference, being the oracle, stores the votes of the whole call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.geometry import output_size

__all__ = [
    "attention_pass",
    "attention_pass_backward",
    "autocast_dtype",
    "check_backward",
    "check_pass",
    "implement",
    "serve_by_reference",
]

_LIBRARY = torch.library.Library("fastcaps", "DEF")
_LIBRARY.define(
    "attention_pass(Tensor children, Tensor weight, Tensor? query, Tensor? bias, Tensor? gate, Tensor? norm_weight, "
    "Tensor? norm_bias, float scale, float eps, bool normalize, int[] window) -> (Tensor parents, Tensor sums)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "attention_pass_backward(Tensor? grad_parents, Tensor? grad_sums, Tensor children, Tensor weight, Tensor? query, "
    "Tensor? bias, Tensor? gate, Tensor? norm_weight, Tensor sums, float scale, float eps, bool normalize, "
    "int[] window, int needs) -> (Tensor dchildren, Tensor dweight, Tensor dquery, Tensor dbias, Tensor dgate, "
    "Tensor dnorm_weight, Tensor dnorm_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention_pass = torch.ops.fastcaps.attention_pass.default
attention_pass_backward = torch.ops.fastcaps.attention_pass_backward.default

_TENSORS = 7  # the leading arguments of attention_pass that are tensors, in the order of reference.NEEDS


def implement(key: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Register Python functions as the kernels of both ops under a dispatch key, ``"CPU"`` or ``"CUDA"``."""
    _LIBRARY.impl("attention_pass", forward, key)
    _LIBRARY.impl("attention_pass_backward", backward, key)


def serve_by_reference(key: str) -> None:
    """Register the reference as the kernel of both ops under a dispatch key."""

    def forward(*arguments: Any) -> Any:
        check_pass(*arguments)
        return reference.attention_pass(*arguments)

    def backward(*arguments: Any) -> Any:
        check_backward(*arguments)
        return reference.attention_pass_backward(*arguments)

    implement(key, forward, backward)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"fastcaps: {message}")


def _check_tensor(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    _check(list(tensor.shape) == list(shape), f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    _check(tensor.dtype == dtype, f"{name} has another dtype than the call")
    _check(tensor.device == device, f"{name} is not on the device of children")


def check_pass(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
) -> None:
    """Raise RuntimeError unless the arguments of ``attention_pass`` fit together.

    For kernels in Python, which would broadcast a size of 1 in silence. It says what the native libraries say
    (``csrc/tensors.h``); what a user sees of wrong arguments is :mod:`fastcaps.functional`'s.
    """
    _check(children.dim() == 6, f"children must be [B, H, W, N, C, D], got {list(children.shape)}")
    _check(weight.dim() == 4, f"weight must be [G, M, D, E], got {list(weight.shape)}")
    _check(len(window) == 8, "window must be [kh, kw, sh, sw, ph, pw, dh, dw]")
    least = (1, 1, 1, 1, 0, 0, 1, 1)
    _check(all(n >= m for n, m in zip(window, least, strict=True)), f"window is not valid: {list(window)}")
    _check(
        min(*children.shape[1:], *weight.shape) >= 1,
        f"children {list(children.shape)} and weight {list(weight.shape)} must not have empty dimensions but the batch",
    )
    ho, wo = output_size(window, children.shape[1], children.shape[2])
    _check(ho >= 1 and wo >= 1, f"window {list(window)} is larger than children {list(children.shape)}")
    count = window[0] * window[1] * children.shape[3]
    groups, many, _, columns = weight.shape
    _check(count % groups == 0, f"weight has {groups} groups, which do not divide {count} children")
    batch, rows = children.shape[0], children.shape[4]
    pose = [rows * columns]
    shapes: list[tuple[str, Tensor | None, list[int]]] = [
        ("weight", weight, [groups, many, children.shape[5], columns]),
        ("query", query, [batch, ho, wo, many, rows, columns]),
        ("gate", gate, list(children.shape[:4])),
        ("norm_weight", norm_weight, pose),
        ("norm_bias", norm_bias, pose),
    ]
    if bias is not None:
        _check(bias.dim() == 4, "bias must be [I or 1, M or 1, C, E]")
        first, second = (1 if size == 1 else full for size, full in zip(bias.shape[:2], (count, many), strict=True))
        shapes.append(("bias", bias, [first, second, rows, columns]))
    for name, tensor, shape in shapes:
        if tensor is not None:
            _check_tensor(name, tensor, shape, children.dtype, children.device)


def check_backward(
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> None:
    """Raise RuntimeError unless the arguments of ``attention_pass_backward`` fit together; see :func:`check_pass`."""
    check_pass(children, weight, query, bias, gate, norm_weight, None, scale, eps, normalize, window)
    shape, accumulated = _pass_shape(children, weight, window), reference.accumulation_dtype(children.dtype)
    checked = [("grad_parents", grad_parents, children.dtype), ("grad_sums", grad_sums, accumulated)]
    checked += [("sums", sums, accumulated)] if normalize else []
    for name, tensor, dtype in checked:
        if tensor is not None:
            _check_tensor(name, tensor, shape, dtype, children.device)


def _pass_shape(children: Tensor, weight: Tensor, window: Sequence[int]) -> tuple[Any, ...]:
    """Return the shape of the parents, ``[B, Ho, Wo, M, C, E]``."""
    ho, wo = output_size(window, children.shape[1], children.shape[2])
    return (children.shape[0], ho, wo, weight.shape[1], children.shape[4], weight.shape[3])


@torch.library.register_fake("fastcaps::attention_pass", lib=_LIBRARY)
def _attention_pass_fake(
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
) -> tuple[Tensor, Tensor]:
    shape = _pass_shape(children, weight, window)
    parents = children.new_empty(shape)
    sums = children.new_empty(shape if normalize else (0,), dtype=reference.accumulation_dtype(children.dtype))
    return parents, sums


@torch.library.register_fake("fastcaps::attention_pass_backward", lib=_LIBRARY)
def _attention_pass_backward_fake(
    grad_parents: Tensor | None,
    grad_sums: Tensor | None,
    children: Tensor,
    weight: Tensor,
    query: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    sums: Tensor,
    scale: float,
    eps: float,
    normalize: bool,
    window: Sequence[int],
    needs: int,
) -> tuple[Tensor, ...]:
    pose = (children.shape[4] * weight.shape[3],)
    shapes: list[Any] = [children.shape, weight.shape]
    shapes += [None if tensor is None else tensor.shape for tensor in (query, bias, gate)]
    shapes += [pose if normalize and grad_parents is not None else None] * 2
    return tuple(
        children.new_empty(shape if shape is not None and needs >> k & 1 else (0,)) for k, shape in enumerate(shapes)
    )


def _save_pass(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    children, weight, query, bias, gate, norm_weight, _, scale, eps, normalize, window = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(children, weight, query, bias, gate, norm_weight, output[1])
    ctx.settings = (scale, eps, normalize, list(window))


def _differentiate_pass(ctx: Any, grad_parents: Tensor | None, grad_sums: Tensor | None) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:_TENSORS])
    gradients: list[Tensor | None] = [None] * _TENSORS
    if not ctx.settings[2]:  # without LayerNorm the second output is empty
        grad_sums = None
    if not ctx.settings[2] or grad_parents is None:  # nothing reached its affine
        needed[5:7] = False, False
    needs = sum(1 << k for k, need in enumerate(needed) if need)
    if needs and not (grad_parents is None and grad_sums is None):
        results = attention_pass_backward(grad_parents, grad_sums, *ctx.saved_tensors, *ctx.settings, needs)
        gradients = [result if need else None for result, need in zip(results, needed, strict=True)]
    return (*gradients, None, None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9])
    ctx.settings = inputs[9:]


def _differentiate_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Differentiate the backward op through the reference's formulas; a third derivative goes through autograd."""
    gradients: list[Tensor | None] = [None] * 9
    with torch.enable_grad():
        # fresh nodes, so that the derivative stops at the op's own arguments (sums depends on children, for one)
        inputs: list[Any] = [
            None if tensor is None else (tensor.view_as(tensor) if tensor.requires_grad else tensor)
            for tensor in ctx.saved_tensors
        ]
        results = reference.attention_pass_backward(*inputs, *ctx.settings)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
    wanted = [k for k in range(9) if ctx.needs_input_grad[k]]
    if pairs and wanted:
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [inputs[k] for k in wanted],
            [grad for _, grad in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        for k, gradient in zip(wanted, found, strict=True):
            gradients[k] = gradient
    return (*gradients, *([None] * len(ctx.settings)))


torch.library.register_autograd("fastcaps::attention_pass", _differentiate_pass, setup_context=_save_pass, lib=_LIBRARY)
torch.library.register_autograd(
    "fastcaps::attention_pass_backward", _differentiate_backward, setup_context=_save_backward, lib=_LIBRARY
)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype in which the ops run under the autocast that is on for a device type; None where it is off.

    That is autocast's own dtype, except that float16 on the CPU becomes float32: the CPU kernels take no float16, and
    float32 loses nothing of what was asked for.
    """
    # Not torch.amp.is_autocast_available: torch 2.10's compiler cannot trace it. Other devices have no rule below.
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return torch.float32 if device_type == "cpu" and dtype == torch.float16 else dtype


def _register_autocast(device_type: str, key: torch.DispatchKey) -> None:
    """Give ``attention_pass`` an autocast kernel: tensors to the dtype of :func:`autocast_dtype`, float64 left alone.

    The backward op has none: autograd calls it with what the forward saved, which is right as it is.
    """
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*args: Any) -> tuple[Tensor, Tensor]:
        dtype = autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if dtype is not None:
                tensors = [
                    tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)
                    for tensor in args[:_TENSORS]
                ]
                args = (*tensors, *args[_TENSORS:])
            return attention_pass(*args)

    _LIBRARY.impl("attention_pass", kernel, key.name)


_register_autocast("cpu", torch._C.DispatchKey.AutocastCPU)
_register_autocast("cuda", torch._C.DispatchKey.AutocastCUDA)
