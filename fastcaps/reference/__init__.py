"""The oracle: every op of the package in plain, eager, differentiable PyTorch.

Arguments, layouts and results are those of the ops (see :mod:`fastcaps.ops`): children ``[B, H, W, N, C, D]``, weight
``[G, M, D, E]``, query ``[B, Ho, Wo, M, C, E]``, bias ``[I | 1, M | 1, C, E]``, gate ``[B, H, W, N]``, and a window of
eight numbers. Clarity comes first here: votes are stored, all B * Ho * Wo * I * M * C * E of them. Every backend is
tested against it, and it against the papers' procedures as plain loops (``tests/oracle.py``,
``tests/oracle_routings.py``).

Half-precision inputs are computed in float32 and rounded once, at the end; float32 and float64 in themselves.

The attention pass is found here under its own name; ``pooling``, ``gaussian`` and ``routings`` are modules, and
``sight`` is what the passes share.
"""

from fastcaps.reference.attention import NEEDS, attention_pass, attention_pass_backward, coefficients
from fastcaps.reference.sight import FROZEN, accumulation_dtype, votes, windows, windows_adjoint

__all__ = [
    "FROZEN",
    "NEEDS",
    "accumulation_dtype",
    "attention_pass",
    "attention_pass_backward",
    "coefficients",
    "votes",
    "windows",
    "windows_adjoint",
]
