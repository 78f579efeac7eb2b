"""The CUDA kernels of attention without matrices, all iterations in one launch: see ``csrc/cuda/plain.h``.

How they are run: ``cuda_target``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from cuda_target import Target, mixed_order, on_every_target
from registry import ATTENTION

from fastcaps.rules import Rule

autoused_order = pytest.fixture(autouse=True)(mixed_order)

SET: dict[str, Any] = {"batch": 3, "types": 37, "parents": 5, "pose": (1, 50, 50), "groups": "none"}
CASES = [
    Case("primes", Rule.SQUASH, **SET, iterations=3),
    Case("alike", Rule.SQUASH, **SET, iterations=3, start=False),
    Case("primes-gated", Rule.SQUASH, **SET, iterations=2, gate="some"),
    Case("layer-norm", Rule.LAYER_NORM, **SET, iterations=3),
    Case("layer-norm-broken", Rule.LAYER_NORM, **SET, iterations=2, gate="broken"),
    Case("replaced", Rule.PLAIN, **SET, iterations=2, gate="silent", start=False),
    Case("shut", Rule.SQUASH, **SET, iterations=2, gate="shut"),
    Case("bfloat16", Rule.SQUASH, **SET, iterations=3, dtype=torch.bfloat16, gate="some"),
    Case("bfloat16-even", Rule.LAYER_NORM, **SET, iterations=2, dtype=torch.bfloat16, start=False),
    Case("float16", Rule.LAYER_NORM, **SET, iterations=2, dtype=torch.float16, gate="broken"),
    Case("aligned", Rule.SQUASH, batch=2, types=50, parents=4, pose=(1, 64, 64), groups="none", iterations=3),
    Case("matrices", Rule.SQUASH, types=19, parents=8, pose=(4, 4, 4), groups="none", iterations=2),
    Case("32-parents", Rule.SQUASH, batch=1, types=40, parents=32, pose=(4, 8, 8), groups="none", iterations=2),
    Case("24-parents", Rule.PLAIN, batch=1, types=150, parents=24, pose=(1, 128, 128), groups="none", gate="some"),
    Case("24-bfloat16", Rule.PLAIN, batch=1, types=600, parents=24, pose=(1, 128, 128), groups="none",
         dtype=torch.bfloat16, iterations=2),
    Case("256-values", Rule.LAYER_NORM, batch=1, types=300, parents=11, pose=(1, 256, 256), groups="none", iterations=2),
    Case("250-values", Rule.SQUASH, batch=1, types=300, parents=7, pose=(1, 250, 250), groups="none", iterations=2,
         gate="silent"),
    Case("256-float16", Rule.PLAIN, batch=1, types=130, parents=11, pose=(1, 256, 256), groups="none", iterations=2,
         dtype=torch.float16),
    Case("many-children", Rule.SQUASH, batch=1, types=700, parents=3, pose=(1, 17, 17), groups="none", iterations=2),
    Case("one-value", Rule.PLAIN, types=9, parents=3, pose=(1, 1, 1), groups="none", iterations=2),
    Case("one-child", Rule.SQUASH, types=1, parents=3, pose=(1, 17, 17), groups="none", iterations=2),
    Case("one-parent", Rule.LAYER_NORM, types=20, parents=1, pose=(1, 17, 17), groups="none", iterations=2),
    Case("sixteen", Rule.SQUASH, batch=1, types=8, parents=6, pose=(1, 16, 16), groups="none", iterations=16),
    Case("grid", Rule.SQUASH, grid=(3, 5), types=8, parents=4, pose=(1, 16, 16), groups="none", iterations=2,
         gate="some"),
    Case("whole-grid", Rule.SQUASH, grid=(3, 5), types=3, parents=4, pose=(1, 16, 16), groups="none", iterations=2,
         gate="some", window=(3, 5, 1, 1, 0, 0, 1, 1)),
    Case("large", Rule.PLAIN, **SET, iterations=2, size=30.0),
    Case("no-sample", Rule.PLAIN, **{**SET, "batch": 0}, gate="some"),
    *(Case(layout, Rule.SQUASH, **SET, iterations=2, gate="some", layout=layout)
      for layout in ("transposed", "interleaved", "offset", "expanded")),
    Case("half-interleaved", Rule.SQUASH, **SET, iterations=2, layout="interleaved", dtype=torch.bfloat16),
]  # fmt: skip



@on_every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case, target: Target) -> None:
    """Through all iterations by one launch each."""
    with target.guarded():
        found = target.reverse(ATTENTION.call(case))
    ATTENTION.bar(case).hold(found)


@on_every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_iterations(case: Case, target: Target) -> None:
    """Each with a gradient of its own parents."""
    with target.guarded():
        found = target.backward(ATTENTION.backward_call(case))
    ATTENTION.backward_bar(case).hold(found)
