"""Run the CPU library's ops on the registry's cases, forward and backward: a program for ``test_guard_pages.py``."""

from __future__ import annotations

import faulthandler
import itertools
import sys

import torch
from cases import Case
from registry import every_case

import fastcaps.encapnet  # noqa: F401  (defines its op; the package loads the library)


def is_small(case: Case) -> bool:
    """Return whether a case takes a moment only, with memory that is guarded."""
    return case.layout == "plain" and case.seen * case.parents * case.pose[0] * case.pose[2] * case.batch < 1 << 18


def squash_sum(dim: int, width: int, dtype: torch.dtype) -> None:
    """Run squash_sum on two types of capsules, forward and backward, with both summands and with one."""
    print("squash_sum", dim, width, dtype, flush=True)
    x, y, grad = (torch.randn(1, 2 * dim, 3, width).to(dtype) for _ in range(3))
    a, b = (torch.randn(1, 2, 3, width).to(dtype) for _ in range(2))
    for given, needs in (((x, a, y, b), 15), ((x, None, None, None), 1)):
        torch.ops.fastcaps_cpu.squash_sum(*given, 2, True)
        torch.ops.fastcaps_cpu.squash_sum_backward(grad, *given, 2, True, needs)


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    for number, (routing, case) in enumerate(every_case(is_small)):
        if number % 3 != int(sys.argv[1]) and case.parents > 1:
            continue
        print(routing, case, flush=True)
        forward, backward = (
            getattr(torch.ops.fastcaps_cpu, name).default for name in (routing.name, f"{routing.name}_backward")
        )
        routing.call(case).forward(forward)
        routing.backward_call(case).results(backward, 0)
    for dtype, dim, width in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64), (1, 2, 4, 5, 17), (1, 3, 7, 8, 9, 17, 33)
    ):
        squash_sum(dim, width, dtype)
