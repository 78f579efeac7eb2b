"""What a PyTorch user would run instead: four alternatives, and this package itself, under one signature.

``reference``
    ``fastcaps.reference``, einsum over stored votes, eager.
``batched-matmul``
    Votes by one ``torch.bmm`` with a batch of children, and a layout of them that the following steps like best.
``reference-compiled``, ``batched-matmul-compiled``
    ``torch.compile`` of each, with static shapes and without graph breaks.

Every one takes ``(children, weight, parents, norm_weight, norm_bias)`` in public layout and returns the parents.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.workloads import EPS, Inputs, Workload
from fastcaps import functional, reference
from fastcaps.geometry import SET_WINDOW, from_op, to_op

__all__ = ["ALTERNATIVES", "OURS", "build", "eager", "is_compiled", "runner"]

Pass = Callable[..., Tensor]

OURS = "fastcaps"
ALTERNATIVES = ("reference", "batched-matmul", "reference-compiled", "batched-matmul-compiled")
_SUFFIX = "-compiled"


def is_compiled(name: str) -> bool:
    """Tell whether an implementation goes through torch.compile."""
    return name.endswith(_SUFFIX)


def ours(workload: Workload) -> Pass:
    """Return the package's own pass."""
    window = workload.window

    def run(
        children: Tensor, weight: Tensor, parents: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None
    ) -> Tensor:
        routed = functional.inverted_attention_routing(
            children,
            weight,
            parents,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=EPS,
            window=window,
            normalize=workload.normalize,
        )
        assert isinstance(routed, Tensor)
        return routed

    return run


def eager_reference(workload: Workload) -> Pass:
    """Return the reference under the functional contract: same signature and layout, votes stored."""
    window = workload.window
    spec = SET_WINDOW if window is None else window.spec
    scale = (workload.rows * workload.columns_out) ** -0.5

    def run(
        children: Tensor, weight: Tensor, parents: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None
    ) -> Tensor:
        query = None if parents is None else to_op(parents, window)
        result, _ = reference.attention_pass(
            to_op(children, window),
            weight,
            query,
            None,
            None,
            norm_weight,
            norm_bias,
            scale,
            EPS,
            workload.normalize,
            spec,
        )
        return from_op(result, window)

    return run


def _seen(children: Tensor, workload: Workload) -> Tensor:
    """Return a strided view of the children under each window, ``[ky, kx, N, B, Ho, Wo, C, D]``."""
    grid = to_op(children, workload.window)
    size, stride = workload.kernel_size, workload.stride
    return grid.unfold(1, size, stride).unfold(2, size, stride).permute(6, 7, 3, 0, 1, 2, 4, 5)


def _positions_last(seen: Tensor, weight: Tensor, query: Tensor, scale: float) -> Tensor:
    """Route with votes ``[I, M, E, C, BL]``: every step after the bmm is elementwise or a reduction with long rows.

    ``query`` and the result are ``[BL, M, C, E]``.
    """
    count, many, inner, columns = weight.shape
    total, _, rows, _ = query.shape
    right = seen.permute(0, 1, 2, 7, 6, 3, 4, 5).reshape(count, inner, rows * total)  # [I, D, C * BL]
    left = weight.transpose(2, 3).reshape(count, many * columns, inner)
    votes = torch.bmm(left, right).view(count, many, columns, rows, total)
    asked = (query * scale).permute(1, 3, 2, 0).contiguous()  # [M, E, C, BL]
    shares = torch.softmax((votes * asked).sum((2, 3)), 1)  # [I, M, BL]
    return (votes * shares[:, :, None, None]).sum(0).permute(3, 0, 2, 1)


def _parents_batched(seen: Tensor, weight: Tensor, query: Tensor, scale: float) -> Tensor:
    """Route with votes ``[BL * M, I, C * E]``: agreement and sum are a bmm each. Arguments as above."""
    count, many, inner, columns = weight.shape
    total, _, rows, _ = query.shape
    left = seen.reshape(count, total * rows, inner)
    right = weight.transpose(1, 2).reshape(count, inner, many * columns)
    votes = torch.bmm(left, right).view(count, total, rows, many, columns)
    votes = votes.permute(1, 3, 0, 2, 4).reshape(total * many, count, rows * columns)
    agreement = torch.bmm(votes, (query * scale).reshape(total * many, rows * columns, 1))
    shares = torch.softmax(agreement.view(total, many, count), 1)
    return torch.bmm(shares.view(total * many, 1, count), votes).view(total, many, rows, columns)


def _uniform(seen: Tensor, weight: Tensor) -> Tensor:
    """Return ``1/M sum_i P_i W_im`` as one matmul with the inner dimension I * D, ``[BL, M, C, E]``."""
    count, many, inner, columns = weight.shape
    left = seen.permute(3, 4, 5, 6, 0, 1, 2, 7).reshape(-1, count * inner)  # [BL * C, I * D]
    right = weight.transpose(1, 2).reshape(count * inner, many * columns)
    rows = seen.shape[6]
    return (left @ right).view(-1, rows, many, columns).transpose(1, 2) / many


def batched_matmul(workload: Workload) -> Pass:
    """Return the pass as batched matmuls over stored votes, the children being the batch.

    Two layouts of the votes were tried on every workload. With positions last, nothing is copied and everything after
    the votes vectorises; with parents in the batch, the votes are copied once and two more bmm do the rest. The first
    is faster for matrix poses on a grid, the second for sets and for vector poses, and each is used there. Each child
    has its own matrices in every workload (G = I); the bmm needs it.
    """
    window = workload.window
    scale = (workload.rows * workload.columns_out) ** -0.5
    route = _positions_last if workload.rows > 1 and workload.positions > 1 else _parents_batched

    def run(
        children: Tensor, weight: Tensor, parents: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None
    ) -> Tensor:
        seen = _seen(children, workload)
        many, columns = weight.shape[1], weight.shape[3]
        batch, height, width, rows = seen.shape[3:7]
        if parents is None:
            sums = _uniform(seen, weight)
        else:
            query = to_op(parents, window).reshape(-1, many, rows, columns)
            sums = route(seen, weight, query, scale)
        sums = sums.reshape(batch, height, width, many, rows * columns)
        if workload.normalize:
            sums = F.layer_norm(sums, [rows * columns], norm_weight, norm_bias, EPS)
        return from_op(sums.view(batch, height, width, many, rows, columns), window)

    return run


def eager(name: str, workload: Workload) -> Pass:
    """Return the implementation ``name`` of a workload's pass, without the compilation that its name may ask for."""
    makers = {OURS: ours, "reference": eager_reference, "batched-matmul": batched_matmul}
    plain = name.removesuffix(_SUFFIX)
    if name not in (OURS, *ALTERNATIVES):
        raise ValueError(f"unknown implementation {name!r}; there are: {', '.join((OURS, *ALTERNATIVES))}")
    return makers[plain](workload)


def build(name: str, workload: Workload) -> Pass:
    """Return the implementation ``name`` of a workload's pass; compiled ones compile at their first call."""
    run = eager(name, workload)
    return torch.compile(run, dynamic=False, fullgraph=True) if is_compiled(name) else run


def runner(run: Pass, inputs: Inputs, training: bool) -> Callable[[], dict[str, Tensor]]:
    """Return what is timed: one forward pass without gradients, or one training step.

    A training step is the forward pass and the backward from a random gradient of the parents to children, weight,
    parents and the affine of LayerNorm, each into a tensor of its own. The result holds ``parents`` and, of a training
    step, ``d`` + the name of each argument.
    """
    if not training:
        arguments = inputs.arguments()

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"parents": run(*arguments)}

        return forward

    inputs.require_grad()
    arguments, present = inputs.arguments(), inputs.present()

    def step() -> dict[str, Tensor]:
        result = run(*arguments)
        gradients = torch.autograd.grad(result, tuple(present.values()), inputs.grad)
        named = {f"d{name}": gradient for name, gradient in zip(present, gradients, strict=True)}
        return {"parents": result.detach(), **named}

    return step
