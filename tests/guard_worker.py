"""Run the CPU library's ops on the registry's cases: a program for guard pages and sanitizers.

python tests/guard_worker.py PART OF THREADS  # one case of so many, each in so many Python threads at once
"""

from __future__ import annotations

import faulthandler
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from cases import Case
from registry import Routing, every_case
from test_verbs_cpu import kernels, sample


def is_small(case: Case) -> bool:
    """Return whether a case takes a moment only, with memory that is guarded."""
    return case.layout == "plain" and case.seen * case.parents * case.pose[0] * case.pose[2] * case.batch < 1 << 18


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
    for number in range(part, 44, of):
        verbs(number)
