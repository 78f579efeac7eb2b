"""Run the CPU library's ops on the registry's cases: a program for guard pages and sanitizers.

python tests/guard_worker.py PART OF THREADS  # one case of so many, each in so many Python threads at once
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from cases import Case
from registry import Routing, every_case
from test_verbs_cpu import kernels, sample

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


def run(routing: Routing, case: Case, threads: int) -> None:
    """Run a case forward and backward in so many Python threads at once."""
    print(routing, case, flush=True)
    forward, backward = (getattr(torch.ops.fastcaps_cpu, f"{routing.name}{end}").default for end in ("", "_backward"))
    call, back = routing.call(case), routing.backward_call(case)
    with ThreadPoolExecutor(threads) as pool:
        both = [pool.submit(lambda: (call.forward(forward), back.results(backward, 0))) for _ in range(threads)]
    for one in both:
        one.result()


def verbs(number: int) -> None:
    """Run the verbs on one of their cases."""
    case = sample(44, 2)[number]
    print("verbs", case, flush=True)
    kernels(case, case.tensors())


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)  # under ThreadSanitizer the library's own threads are those of parallel_threads.cpp
    part, of, threads = map(int, sys.argv[1:])
    for number, (routing, case) in enumerate(every_case(is_small)):
        if number % of == part or (threads == 1 and (case.parents == 1 or case.name.startswith("narrow"))):
            run(routing, case, threads)
    widths = (1, 3, 7, 8, 9, 17, 33) if threads == 1 else (33,)
    for dtype, dim, width in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64), (1, 2, 4, 5, 17), widths
    ):
        squash_sum(dim, width, dtype)
    for number in range(part, 44, of):
        verbs(number)
