"""Arguments for the pooling and the Gaussian pass, made of the attention pass's cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from attention_cases import CASES, CONV, Case
from torch import Tensor

from fastcaps.geometry import output_size

IDENTITY = tuple(  # votes are the children themselves: no weights, E = D
    Case(f"identity-{name}", pose=(2, 3, 3), **options)
    for name, options in {
        "one-parent": {"parents": 1, "gate": True},
        "parents": {"parents": 4},
        "bias": {"parents": 3, "bias": "IM"},
        "conv": {"grid": (5, 4), "types": 3, "parents": 2, "window": CONV, "gate": True},
        "padded": {"grid": (3, 2), "types": 2, "window": (3, 3, 1, 1, 1, 1, 1, 1), "bias": "I1"},
        "no-query": {"parents": 1, "query": False},
        "empty-batch": {"batch": 0},
    }.items()
)
LARGE = ("many-parents", "many-children", "pose-1x64", "pose-8x8", "conv-8x8")  # add time, not meaning
POOLING = tuple(case for case in CASES if case.name not in LARGE) + IDENTITY
GAUSSIAN = tuple(replace(case, scale=None) for case in CASES if case.name not in LARGE)


def pooling_tensors(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """Return children, weight, query, bias and gate; gates are not negative."""
    children, weight, query, bias, gate = case.tensors(dtype)[:5]
    return [children, None if case in IDENTITY else weight, query, bias, None if gate is None else gate.abs()]


def pooling_settings(case: Case) -> tuple[float, bool, list[int]]:
    """Return scale, normalize and window."""
    scale, _, normalize, window = case.settings()
    return scale, normalize, window


def gaussian_tensors(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    """Return the nine tensors of the Gaussian pass; without a query there are no parents yet.

    Cases without an affine of LayerNorm have no variance, which is k-means; those with a bias have betas of its form.
    """
    children, weight, mean, bias, gate = case.tensors(dtype)[:5]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    variance = log_weight = beta_use = beta_ignore = None
    if mean is not None:
        log_weight = draw(*mean.shape[:4])
        size = case.pose[0] * case.pose[2]  # as wide as a pose is long: no child is quite sure of its parent
        variance = draw(*mean.shape).mul(0.5).exp() * size if case.affine else None
    if bias is not None:
        beta_use, beta_ignore = (draw(*bias.shape[:2]) for _ in range(2))
    gate = None if gate is None else gate.abs()
    return [children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore]


def gaussian_settings(case: Case) -> tuple[float, list[int]]:
    """Return eps and window."""
    return case.eps, list(case.window)


def parents_shape(case: Case) -> tuple[int, ...]:
    """Return ``[B, Ho, Wo, M, C, E]``."""
    return (case.batch, *output_size(case.window, *case.grid), case.parents, case.pose[0], case.pose[2])


def gradients_like(outputs: tuple[Tensor, ...], seed: int = 1) -> list[Tensor | None]:
    """Return a random gradient for every output; none for an empty one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        if output.dim() > 1
        else None
        for output in outputs
    ]


def autograd_gradients(
    run: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor | None], settings: tuple, grads: list[Tensor | None]
) -> list[Tensor | None]:
    """Return autograd's gradients of a pass for every tensor, zeros where nothing reaches it."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    outputs = run(*leaves, *settings)
    pairs = [(o, grad) for o, grad in zip(outputs, grads, strict=True) if grad is not None and o.requires_grad]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            [leaf for leaf in leaves if leaf is not None],
            [grad for _, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [None if leaf is None else next(found) for leaf in leaves]
