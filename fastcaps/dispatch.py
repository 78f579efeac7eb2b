"""What runs the ops on a GPU: chosen for each call, when it runs.

The kernel of ``fastcaps::attention_pass`` under the dispatch key CUDA is the Python function here. It asks
:func:`fastcaps.backends.choose` (the CUDA library, then Triton, then the reference, unless one is forced) and hands the
arguments on, with what the user has set for the whole process: deterministic algorithms, and whether float32 products
may round to TF32. Whoever comes through torch reaches this function: eager calls, autograd, a compiled or exported
program, the capture of a CUDA graph. It allocates nothing and waits for nothing.

A backward is chosen anew when it runs, by the same rules. All backends save the same tensors (the sums over children,
in the accumulation dtype), so one may differentiate what another computed: a backend forced around a forward alone
does not bind the backward, and one forced around the backward is obeyed or raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcaps import backends, libraries, ops, reference

__all__ = ["ALLOW_TF32", "DETERMINISTIC", "attention_pass", "attention_pass_backward", "options"]

DETERMINISTIC = 1
"""Bit of ``options``: the same input must give the same bits."""
ALLOW_TF32 = 2
"""Bit of ``options``: float32 matrix products may round their factors to TF32."""


def options() -> int:
    """Return the settings of the process that the GPU kernels heed, as bits."""
    bits = DETERMINISTIC if torch.are_deterministic_algorithms_enabled() else 0
    return bits | ALLOW_TF32 if backends.tf32_allowed() else bits


def _choose(children: Tensor, weight: Tensor) -> str | None:
    """Return the backend of a call; None where the arguments are not even of the right rank."""
    if children.dim() != 6 or weight.dim() != 4:
        return None
    pose = (children.shape[4], weight.shape[2], weight.shape[3])
    return backends.choose(children.device, children.dtype, pose, weight.shape[1])


def _by_triton(function: str, *arguments: Any) -> Any:
    bits = options()
    run = getattr(libraries.triton_kernels()[0], function)
    return run(*arguments, deterministic=bool(bits & DETERMINISTIC), allow_tf32=bool(bits & ALLOW_TF32))


def attention_pass(children: Tensor, weight: Tensor, *others: Any) -> Any:
    """Run ``fastcaps::attention_pass`` on a GPU by the backend that is forced or comes first."""
    chosen = _choose(children, weight)
    if chosen == "cuda":  # checks its arguments itself
        return torch.ops.fastcaps_cuda.attention_pass.default(children, weight, *others, options())
    ops.check_pass(children, weight, *others)
    if chosen == "triton":
        return _by_triton("attention_pass", children, weight, *others)
    return reference.attention_pass(children, weight, *others)


def attention_pass_backward(
    grad_parents: Tensor | None, grad_sums: Tensor | None, children: Tensor, weight: Tensor, *others: Any
) -> Any:
    """Run ``fastcaps::attention_pass_backward`` on a GPU by the backend that is forced or comes first."""
    chosen = _choose(children, weight)
    arguments = (grad_parents, grad_sums, children, weight, *others)
    if chosen == "cuda":
        return torch.ops.fastcaps_cuda.attention_pass_backward.default(*arguments, options())
    ops.check_backward(*arguments)
    if chosen == "triton":
        return _by_triton("attention_pass_backward", *arguments)
    return reference.attention_pass_backward(*arguments)


ops.implement("CUDA", attention_pass, attention_pass_backward)
