"""The calls of the pooling pass that every test of it runs over: those of the attention pass, and identity votes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from attention_cases import CASES as ATTENTION_CASES
from attention_cases import CONV, Case, random_cases
from hypothesis import strategies as st
from pass_cases import Judge, Run, Tensors
from torch import Tensor

from fastcaps import ops
from fastcaps.reference import accumulation_dtype

JUDGE = Judge(ops.POOLING, ("parents", "logsumexp"), ("logsumexp",), by_formulas=True)
GRADIENTS = JUDGE.gradients
results = JUDGE.results


@dataclass(frozen=True)
class PoolingCase(Case):
    """One call of the op. ``normalize`` tells whether keys are unit vectors."""

    identity: bool = False  # votes are the children themselves: no weights, E = D
    silent: bool = False  # a third of the gates is 0

    def settings(self) -> tuple[float, bool, list[int]]:
        """Return scale, normalize and window."""
        scale, _, normalize, window = super().settings()
        return scale, normalize, window

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor | None]:
        """Return children, weight, query, bias and gate; gates are not negative."""
        children, weight, query, bias, gate = super().tensors(dtype, seed)[:5]
        return [children, None if self.identity else weight, query, bias, gates(gate, self.silent)]

    def grads(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Tensor | None]:
        """Return gradients for the two outputs."""
        generator = torch.Generator().manual_seed(seed)
        shapes = ((self.shape, dtype), (self.shape[:4], accumulation_dtype(dtype)))
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(kind) for s, kind in shapes]


def gates(gate: Tensor | None, silent: bool) -> Tensor | None:
    """Return gates that are not negative, every third of them 0 if some are to be silent."""
    if gate is None or not silent:
        return gate if gate is None else gate.abs()
    third = torch.arange(gate.numel()).reshape(gate.shape) % 3 == 1
    return gate.abs().masked_fill(third, 0.0)


def as_pooling(case: Case, **changes: object) -> PoolingCase:
    """Return the call of this pass that is most like one of the attention pass."""
    given = {field.name: getattr(case, field.name) for field in fields(Case)}
    return PoolingCase(**{**given, **changes})


IDENTITY = tuple(
    PoolingCase(f"identity-{name}", identity=True, **{"pose": (2, 3, 3), **options})
    for name, options in {
        "one-parent": {"parents": 1, "gate": True},
        "parents": {"parents": 4},
        "bias": {"parents": 3, "bias": "IM"},
        "bias-1M": {"parents": 3, "bias": "1M", "query": False},
        "conv": {"grid": (5, 4), "types": 3, "parents": 2, "window": CONV, "gate": True},
        "padded": {"grid": (3, 2), "types": 2, "window": (3, 3, 1, 1, 1, 1, 1, 1), "bias": "I1"},
        "no-query": {"parents": 1, "query": False},
        "no-norm": {"parents": 2, "normalize": False, "gate": True},
        "empty-batch": {"batch": 0},
        "silent": {"parents": 3, "gate": True, "silent": True},
        "pool-16": {"types": 64, "parents": 1, "pose": (1, 16, 16)},
        "pool-4x4": {"types": 37, "parents": 3, "pose": (4, 4, 4), "gate": True, "bias": "11"},
        "many-parents": {"batch": 1, "types": 3, "parents": 70, "pose": (1, 5, 5)},
    }.items()
)
LARGE = ("many-parents", "many-children", "pose-1x64", "pose-8x8", "conv-8x8")
"""Cases that add time, not meaning, to a test of the reference."""
BARE = ("primes", "pose-4x4", "pose-1x8-1x16", "padded", "conv-4x4-m32", "many-parents", "groups-1", "sharp")
CASES = (
    *(as_pooling(case) for case in ATTENTION_CASES),
    *(as_pooling(case, name=f"{case.name}-bare", normalize=False) for case in ATTENTION_CASES if case.name in BARE),
    *IDENTITY,
    PoolingCase("silent", types=11, parents=4, gate=True, silent=True, bias="IM"),
    PoolingCase("silent-grid", grid=(5, 4), types=3, window=CONV, gate=True, silent=True, normalize=False),
    PoolingCase("one-parent-many-children", types=67, parents=1, pose=(1, 8, 8), groups=1, gate=True),
)
BY_NAME = {case.name: case for case in CASES}
REFERENCE_CASES = tuple(case for case in CASES if case.name.removesuffix("-bare") not in LARGE)


@st.composite
def random_pooling_cases(draw: st.DrawFn) -> PoolingCase:
    """Draw small calls of every kind."""
    case = draw(random_cases())
    identity = draw(st.integers(0, 3)) == 0
    rows, depth, columns = case.pose
    parents = case.parents
    if identity and not case.query:  # the bias tells M, or there is one parent
        parents = case.parents if case.bias is not None and case.bias[1] == "M" else 1
    return as_pooling(
        replace(case, parents=parents, pose=(rows, depth, depth if identity else columns)),
        identity=identity,
        silent=draw(st.booleans()),
    )


def assert_honest(
    found: dict[str, Tensor], tensors: Tensors, settings: tuple, grads: Tensors, tf32: bool = False
) -> None:
    """Assert that a kernel's results err at most what the bar allows."""
    JUDGE.bar(tensors, settings, grads, tf32).hold(found)


def check_op(
    tensors: Tensors,
    settings: tuple,
    grads: Tensors,
    run: Run = ops.pooling_pass,
    *,
    device: str = "cpu",
    tf32: bool = False,
) -> None:
    """Run an op with these arguments on a device and hold forward and every gradient to :func:`assert_honest`."""
    JUDGE.check(tensors, settings, grads, run, device=device, tf32=tf32)
