"""Run the CPU library's ops on the registry's cases, forward and backward: a program for ``test_guard_pages.py``."""

from __future__ import annotations

import faulthandler
import sys

import torch
from cases import Case
from registry import every_case

import fastcaps  # noqa: F401  (loads the library)


def is_small(case: Case) -> bool:
    """Return whether a case takes a moment only, with memory that is guarded."""
    return case.layout == "plain" and case.seen * case.parents * case.pose[0] * case.pose[2] * case.batch < 1 << 18


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
