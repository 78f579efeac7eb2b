"""Routing by agreement as functions of tensors.

Every tensor may have any strides, and nothing of size children x parents x pose is ever stored. A wrong argument raises
before anything runs: TypeError for what is not a tensor or has a dtype that cannot be taken, ValueError for shapes,
counts, devices and windows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps import backends, ops, reference
from fastcaps.explanation import Explanation, Explanations, explain_call
from fastcaps.geometry import SET_WINDOW, Window, from_op, output_size, to_op, window_extent

__all__ = ["Explanation", "Explanations", "Window", "explain", "inverted_attention_routing", "uniform_pass"]


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}"


def _check_tensor(name: str, value: Any, children: Tensor, cast: bool) -> None:
    """Raise if an argument is not a dense tensor of the children's device and, unless autocast casts it, dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.device != children.device:
        raise ValueError(f"{name} must be on the device of children, {children.device}, got {value.device}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if value.dtype != children.dtype and not (
        cast and value.is_floating_point() and torch.float64 not in (value.dtype, children.dtype)
    ):
        raise TypeError(f"{name} must have the dtype of children, {children.dtype}, got {value.dtype}")


def _check_shape(name: str, value: Tensor, wanted: tuple[Any, ...], symbols: str) -> None:
    if value.shape != wanted:
        raise ValueError(f"{name} must have shape [{symbols}] = {list(wanted)}, got {_shape(value)}")


def _check_children(children: Any, window: Window | None, cast: bool) -> None:
    """Raise unless children is a dense, floating-point, non-empty (but for the batch) set or grid of poses."""
    if not isinstance(children, Tensor):
        raise TypeError(f"children must be a torch.Tensor, got {type(children).__name__}")
    if window is not None and not isinstance(window, Window):
        raise TypeError(f"window must be a fastcaps.Window or None, got {type(window).__name__}")
    symbols = "B, I, C, D" if window is None else "B, N, H, W, C, D"
    if children.dim() != (4 if window is None else 6):
        kind = "a set (window=None)" if window is None else "a grid (window given)"
        raise ValueError(f"children of {kind} must have shape [{symbols}], got {_shape(children)}")
    if children.layout != torch.strided:
        raise TypeError(f"children must be a dense tensor, got layout {children.layout}")
    if not children.is_floating_point():
        raise TypeError(f"children must have a floating-point dtype, got {children.dtype}")
    dtypes = backends.default_dtypes(children.device.type)
    if children.dtype not in dtypes and not cast and backends.forced() is None:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"children on {children.device} must have one of the dtypes {allowed}; got {children.dtype}")
    for size, symbol in zip(children.shape[1:], symbols.split(", ")[1:], strict=True):
        if size < 1:
            raise ValueError(f"children [{symbols}] must have {symbol} >= 1, got {_shape(children)}")


def _check_weight(children: Tensor, weight: Tensor, window: Window | None) -> tuple[tuple[int, ...], int]:
    """Check ``weight`` and ``window`` against the children; return the output grid (Ho, Wo) and I."""
    if weight.dim() != 4:
        raise ValueError(f"weight must have shape [G, M, D, E], got {_shape(weight)}")
    for size, symbol in zip(weight.shape, "GMDE", strict=True):
        if size < 1:
            raise ValueError(f"weight [G, M, D, E] must have {symbol} >= 1, got {_shape(weight)}")
    if weight.shape[2] != children.shape[-1]:
        raise ValueError(
            f"weight [G, M, D, E] must have D = {children.shape[-1]}, the columns of a child's pose; "
            f"got {_shape(weight)}"
        )
    grid: tuple[int, ...] = ()
    count = children.shape[1]
    if window is not None:
        height, width = children.shape[2], children.shape[3]
        grid = output_size(window.spec, height, width)
        if grid[0] < 1 or grid[1] < 1:
            extent, (ph, pw) = window_extent(window.spec), window.spec[4:6]
            raise ValueError(
                f"window must fit into the grid: it spans {extent[0]} x {extent[1]} positions with its dilation, "
                f"children have H x W = {height} x {width}, with padding {height + 2 * ph} x {width + 2 * pw}"
            )
        count = count * window.positions
    if count % weight.shape[0] != 0:
        raise ValueError(
            f"weight [G, M, D, E] must have a G that divides the {count} children that one position sees; "
            f"got {_shape(weight)}"
        )
    return grid, count


def _check(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    window: Window | None,
    normalize: bool,
) -> None:
    """Raise TypeError or ValueError for whatever is wrong with the arguments of a routing call."""
    cast = isinstance(children, Tensor) and ops.autocast_dtype(children.device.type) is not None
    _check_children(children, window, cast)
    _check_tensor("weight", weight, children, cast)
    grid, count = _check_weight(children, weight, window)
    batch, rows = children.shape[0], children.shape[-2]
    _, many, _, columns = weight.shape
    if parents is not None:
        _check_tensor("parents", parents, children, cast)
        _check_shape(
            "parents", parents, (batch, many, *grid, rows, columns), "B, M, Ho, Wo, C, E" if grid else "B, M, C, E"
        )
    if bias is not None:
        _check_tensor("bias", bias, children, cast)
        if (
            bias.dim() != 4
            or bias.shape[0] not in (1, count)
            or bias.shape[1] not in (1, many)
            or bias.shape[2:] != (rows, columns)
        ):
            wanted = f"[{count} or 1, {many} or 1, {rows}, {columns}]"
            raise ValueError(f"bias must have shape [I or 1, M or 1, C, E] = {wanted}, got {_shape(bias)}")
    if gate is not None:
        _check_tensor("gate", gate, children, cast)
        _check_shape("gate", gate, tuple(children.shape[:-2]), "B, N, H, W" if grid else "B, I")
    for name, affine in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if affine is not None:
            if not normalize:
                raise ValueError(f"{name} must be None with normalize=False, got a tensor")
            _check_tensor(name, affine, children, cast)
            _check_shape(name, affine, (rows * columns,), "C * E")
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0, got {eps}")


def inverted_attention_routing(
    children: Tensor,
    weight: Tensor,
    parents: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    scale: float | None = None,
    window: Window | None = None,
    normalize: bool = True,
    return_coefficients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Route children to parents once, by inverted dot-product attention (Tsai et al. 2020, Procedure 1).

    .. math::
        V_{im} = P_i W_{i \bmod G, m} + b_{im}, \quad
        a_{im} = s \langle Q_m, V_{im} \rangle, \quad
        r_{im} = \operatorname{softmax}_m a_{im}, \quad
        Q'_m = \operatorname{LayerNorm}\Bigl(\sum_i g_i r_{im} V_{im}\Bigr)

    The parents compete for each child: the softmax runs over m. Without ``parents`` this is the first iteration, in
    which ``r = 1 / M``; before LayerNorm the result is then linear in the children, made by a convolution or matmul
    (:func:`uniform_pass`) except where copying large weights for that would be most of the work.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    weight : Tensor
        W, ``[G, M, D, E]``; G divides the number of children that a position sees (I, or kh * kw * N). Child i, counted
        as (ky, kx, n) with n fastest, uses group i mod G: G = I for own matrices, G = N shared over the window, G = 1.
    parents : Tensor, optional
        Q, the parents' poses of the last iteration, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``.
    bias : Tensor, optional
        Added to votes, ``[I or 1, M or 1, C, E]``. Padded positions send none.
    gate : Tensor, optional
        g, the children's activations, ``[B, I]`` or ``[B, N, H, W]``.
    norm_weight, norm_bias : Tensor, optional
        Affine of LayerNorm, ``[C * E]``, shared by all parents.
    eps : float
        Of LayerNorm.
    scale : float, optional
        s; ``1 / sqrt(C * E)`` by default.
    window : Window, optional
        Makes the call one over a grid.
    normalize : bool
        False leaves LayerNorm out; so does a pose of one number.
    return_coefficients : bool
        Also return r.

    Returns
    -------
    parents : Tensor
        ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; the latter lies in memory as B, Ho, Wo, M, C, E.
    coefficients : Tensor
        r, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``, without gradient; 0 for a padded child. Only with
        ``return_coefficients``.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, device, shape, count or window; the message names it.
    BackendError
        If a forced backend cannot take the call.
    """
    _check(children, weight, parents, bias, gate, norm_weight, norm_bias, eps, window, normalize)
    if _watching is not None:
        return _watch(children, weight, parents, window, return_coefficients)
    pose = children.shape[-2] * weight.shape[3]
    scale = pose**-0.5 if scale is None else scale
    normalize = normalize and pose != 1
    spec = SET_WINDOW if window is None else window.spec
    grid = to_op(children, window)
    query = None if parents is None else to_op(parents, window)
    op_gate = None if gate is None else to_op(gate, window)
    chosen = backends.forced()
    if chosen is not None:
        reason = _refusal(chosen, children, weight)
        if reason is not None:
            raise backends.BackendError(f"backend {chosen!r} is forced and cannot take this call: {reason}")
    if query is None and chosen != "reference" and not _kernel_beats_library(grid, weight, spec):
        result = uniform_pass(grid, weight, bias, op_gate, norm_weight, norm_bias, eps, normalize, spec)
    else:
        tensors = (grid, weight, query, bias, op_gate, norm_weight, norm_bias)
        run: Any = ops.attention_pass
        if chosen == "reference":
            tensors, run = _autocast(children.device.type, *tensors), reference.attention_pass
        result = run(*tensors, scale, eps, normalize, spec)[0]
    routed = from_op(result, window)
    if not return_coefficients:
        return routed
    shares = reference.coefficients(grid, weight, query, bias, scale, spec)
    return routed, shares if window is not None else shares.squeeze((1, 2))


def _refusal(name: str, children: Tensor, weight: Tensor) -> str | None:
    """Return why a backend cannot take a call on children and weight, public or of the op, or None if it can.

    While ``torch.compile`` traces, sizes may be symbols: then limits of poses are left to the op, which sees numbers.
    """
    dtype = ops.autocast_dtype(children.device.type) or children.dtype
    if torch.compiler.is_compiling():
        return backends.refusal(name, children.device, dtype)
    pose = (children.shape[-2], children.shape[-1], weight.shape[3])
    return backends.refusal(name, children.device, dtype, pose, weight.shape[1])


_LARGE = 1 << 23  # numbers: 32 MB, which the system hands out page by page at every call


def _kernel_beats_library(children: Tensor, weight: Tensor, window: tuple[int, ...]) -> bool:
    """Return whether the compiled kernel should run a uniform pass after all, rather than the library.

    The library needs the weights in another order. Copying them is little beside the convolution itself, except where
    they are large: with a 3 x 3 window of 16 types of 1 x 64 poses it takes 50 ms, and the kernel, which reads them as
    they lie, 17. Where children share weights, summing them first wins. On a GPU the library's convolution may round
    float32 to TF32 though its matmul, whose setting is the one that counts here, may not: then our kernel runs. Nothing
    but shapes and settings decides, so that the same numbers give the same bits with and without gradients.
    """
    if children.device.type == "cuda":
        dtype = ops.autocast_dtype("cuda") or children.dtype
        convolution = window != SET_WINDOW and children.shape[3] % weight.shape[0] != 0
        return (
            convolution
            and dtype == torch.float32
            and backends.convolution_rounds()
            and any(_refusal(name, children, weight) is None for name in ("cuda", "triton"))
        )
    own = weight.shape[0] == window[0] * window[1] * children.shape[3]
    return own and weight.numel() >= _LARGE and children.device.type == "cpu" and backends.native_serves()


def _autocast(device_type: str, *tensors: Tensor | None) -> Any:
    """Return the tensors in the dtype that autocast wants, where it is on; float64 stays."""
    dtype = ops.autocast_dtype(device_type)
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def uniform_pass(
    children: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    normalize: bool,
    window: tuple[int, ...],
) -> Tensor:
    """Route with r = 1 / M: the first iteration, as the library's convolution or matmul.

    ``S_m = 1/M sum_i g_i (P_i W_im + b_im)`` is linear in the children: a convolution with the rows C of a pose folded
    into the batch, N * D input and M * E output channels. Where the children of a position share matrices (G divides
    N), they are summed first and one matmul is left.

    Arguments are those of the op (:mod:`fastcaps.reference`). Workspace: the children once, S twice.

    Returns
    -------
    Tensor
        Parents, contiguous ``[B, Ho, Wo, M, C, E]``.
    """
    device_type = children.device.type
    if ops.autocast_dtype(device_type) is not None:
        children, weight, bias, gate, norm_weight, norm_bias = _autocast(
            device_type, children, weight, bias, gate, norm_weight, norm_bias
        )
        with torch.autocast(device_type, enabled=False):
            return uniform_pass(children, weight, bias, gate, norm_weight, norm_bias, eps, normalize, window)
    many = weight.shape[1]
    gated = children if gate is None else children * gate[..., None, None]
    if window == SET_WINDOW or children.shape[3] % weight.shape[0] == 0:
        sums = _uniform_matmul(gated, weight, window)
    else:
        sums = _uniform_convolution(gated, weight, window)
    if bias is not None:
        sums = sums + _uniform_bias(children, bias, gate, window)
    if not normalize:
        return (sums / many).contiguous()
    # LayerNorm(S / M; eps) = LayerNorm(S; eps M^2), which saves a pass over S
    flat = F.layer_norm(sums.flatten(-2), [sums.shape[-2] * sums.shape[-1]], norm_weight, norm_bias, eps * many**2)
    return flat.view(sums.shape)


def _window_sum(grid: Tensor, window: tuple[int, ...]) -> Tensor:
    """Return each window's sum over its positions: ``[B, H, W, ...]`` to ``[B, Ho, Wo, ...]``, rows, then columns."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    ho, wo = output_size(window, grid.shape[1], grid.shape[2])
    if ph or pw:
        grid = F.pad(grid, [0, 0] * (grid.dim() - 3) + [pw, pw, ph, ph])
    rows = grid[:, : sh * (ho - 1) + 1 : sh]
    for ky in range(1, kh):
        rows = rows + grid[:, ky * dh : ky * dh + sh * (ho - 1) + 1 : sh]
    total = rows[:, :, : sw * (wo - 1) + 1 : sw]
    for kx in range(1, kw):
        total = total + rows[:, :, kx * dw : kx * dw + sw * (wo - 1) + 1 : sw]
    return total


def _uniform_matmul(children: Tensor, weight: Tensor, window: tuple[int, ...]) -> Tensor:
    """Return ``sum_i P_i W_im`` ``[B, Ho, Wo, M, C, E]`` where G divides N: children summed by group, then a matmul."""
    groups, many, depth, columns = weight.shape
    types = children.shape[3]
    if types != groups:
        children = children.unflatten(3, (types // groups, groups)).sum(3)
    if window != SET_WINDOW:
        children = _window_sum(children, window)
    left = children.transpose(3, 4).flatten(-2)  # [B, Ho, Wo, C, G * D]
    right = weight.transpose(1, 2).reshape(groups * depth, many * columns)
    return (left @ right).unflatten(-1, (many, columns)).transpose(3, 4)


def _uniform_convolution(children: Tensor, weight: Tensor, window: tuple[int, ...]) -> Tensor:
    """Return ``sum_i P_i W_im`` ``[B, Ho, Wo, M, C, E]`` by a convolution over the grid."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    groups, many, depth, columns = weight.shape
    batch, height, width, types, rows, _ = children.shape
    count = kh * kw * types
    if groups != count:
        weight = weight.repeat(count // groups, 1, 1, 1)
    # both operands channels last, the layout that convolutions like best: [M, E, kh, kw, N, D] and [B, C, H, W, N, D]
    kernel = weight.view(kh, kw, types, many, depth, columns).permute(3, 5, 0, 1, 2, 4)
    kernel = kernel.reshape(many * columns, kh, kw, types * depth).movedim(-1, 1)
    images = children.movedim(4, 1).reshape(batch * rows, height, width, types * depth).movedim(-1, 1)
    result = F.conv2d(images, kernel, None, (sh, sw), (ph, pw), (dh, dw))
    ho, wo = result.shape[2:]
    return result.movedim(1, -1).reshape(batch, rows, ho, wo, many, columns).movedim(1, 4)


def _uniform_bias(children: Tensor, bias: Tensor, gate: Tensor | None, window: tuple[int, ...]) -> Tensor:
    """Return ``sum_i g_i b_im`` over the children that exist, to be added to ``[B, Ho, Wo, M, C, E]``."""
    kh, kw, sh, sw, ph, pw, dh, dw = window
    types = children.shape[3]
    if gate is None and not (ph or pw):
        return bias.sum(0) if bias.shape[0] > 1 else bias[0] * (kh * kw * types)
    if gate is None:
        gate = children.new_ones((1, *children.shape[1:4]))
    if bias.shape[0] == 1:
        return _window_sum(gate.sum(-1), window)[..., None, None, None] * bias[0]
    if window == SET_WINDOW:
        return torch.tensordot(gate, bias, dims=1)
    kernel = bias.unflatten(0, (kh, kw, types)).flatten(3).permute(3, 2, 0, 1)  # [M * C * E, N, kh, kw]
    result = F.conv2d(gate.movedim(-1, 1), kernel, None, (sh, sw), (ph, pw), (dh, dw))
    return result.movedim(1, -1).unflatten(-1, bias.shape[1:])


_watching: list[Explanation] | None = None  # while a module is explained: what its calls would do


def explain(
    children: Tensor | torch.nn.Module,
    weight: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    scale: float | None = None,
    window: Window | None = None,
    normalize: bool = True,
    return_coefficients: bool = False,
) -> Explanation | Explanations:
    """Say which backend, kernel and tile would run a routing call, and why not the others.

    Called with the arguments of :func:`inverted_attention_routing`, or with a module and its inputs: ``explain(layer,
    children, parents)``, ``explain(network, images)``. A routing layer may be given alone; it is then explained for a
    batch of 1 (on a grid, the smallest), with parents.

    No routing is computed; the other parts of a module (convolutions, say) do run. Raises what the call itself would
    raise for wrong arguments, but not :class:`~fastcaps.BackendError`: that a forced backend cannot take the call is
    part of the answer.

    Returns
    -------
    Explanation or Explanations
        The latter, a tuple, for a module that makes any other number of calls than one. Both print as text.
    """
    if isinstance(children, torch.nn.Module):
        given = [argument for argument in (weight, parents) if argument is not None]
        return _explain_module(children, *(given or _smallest_inputs(children)))
    if weight is None:
        raise TypeError("weight must be a torch.Tensor, got NoneType")
    _check(children, weight, parents, bias, gate, norm_weight, norm_bias, eps, window, normalize)
    return _explain_call(children, weight, parents, window)


def _explain_call(children: Tensor, weight: Tensor, parents: Tensor | None, window: Window | None) -> Explanation:
    """Explain a call whose arguments are right."""
    grid, spec = to_op(children, window), SET_WINDOW if window is None else window.spec
    dtype = ops.autocast_dtype(children.device.type) or children.dtype
    library_first = not _kernel_beats_library(grid, weight, spec)
    return explain_call(grid, weight, spec, dtype, parents is not None, library_first)


def _explain_module(module: torch.nn.Module, *inputs: Tensor) -> Explanation | Explanations:
    """Run a module with its routing calls replaced by their explanations."""
    global _watching
    before, _watching = _watching, []
    try:
        with torch.no_grad():
            module(*inputs)
        found = _watching
    finally:
        _watching = before
    return found[0] if len(found) == 1 else Explanations(found)


def _smallest_inputs(layer: Any) -> list[Tensor]:
    """Return children and parents of the smallest call that a routing layer takes."""
    if not hasattr(layer, "in_capsules") or not hasattr(layer, "window"):
        raise TypeError(f"explain: a {type(layer).__name__} must be given with its inputs: explain(module, inputs)")
    window = layer.window
    extent, padding = ((), ()) if window is None else (window_extent(window.spec), window.spec[4:6])
    grid = [max(1, size - 2 * pad) for size, pad in zip(extent, padding, strict=True)]
    parents_grid = [] if window is None else window.output_size(*grid)
    weight: Tensor = layer.weight
    return [
        weight.new_zeros((1, layer.in_capsules, *grid, layer.in_dim)),
        weight.new_zeros((1, layer.out_capsules, *parents_grid, layer.out_dim)),
    ]


def _watch(
    children: Tensor, weight: Tensor, parents: Tensor | None, window: Window | None, return_coefficients: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Note what a call would do; return zeros of the shapes that it would return."""
    assert _watching is not None
    _watching.append(_explain_call(children, weight, parents, window))
    many = weight.shape[1]
    spatial = () if window is None else window.output_size(children.shape[2], children.shape[3])
    batch, count = children.shape[0], children.shape[1] * (1 if window is None else window.positions)
    dtype = ops.autocast_dtype(children.device.type) or children.dtype
    routed = children.new_zeros((batch, many, *spatial, children.shape[-2], weight.shape[3]), dtype=dtype)
    return (routed, children.new_zeros((batch, *spatial, count, many))) if return_coefficients else routed
