"""The precisions that a device is measured in: the dtype of the tensors, and what the matrix units may round to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["PRECISIONS", "Precision"]


@dataclass(frozen=True)
class Precision:
    """One precision.

    Attributes
    ----------
    name
        ``fp32``, ``tf32`` or ``bf16``.
    dtype
        Of all tensors.
    tf32
        Whether float32 matrix products may round their operands to 10 bits of mantissa.
    epsilon
        One unit in the last place of what is multiplied: what the gate calls rounding.
    """

    name: str
    dtype: torch.dtype
    tf32: bool
    epsilon: float

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let matrix products and convolutions of this process run so inside a ``with`` block."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


PRECISIONS: dict[str, Precision] = {
    entry.name: entry
    for entry in (
        Precision("fp32", torch.float32, False, torch.finfo(torch.float32).eps),
        Precision("tf32", torch.float32, True, 2.0**-10),
        Precision("bf16", torch.bfloat16, False, torch.finfo(torch.bfloat16).eps),
    )
}
