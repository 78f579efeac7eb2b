"""Run the CPU library's ops on the registry's cases from two Python threads at once: a program for ThreadSanitizer."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from guard_worker import is_small, squash_sum
from registry import BackwardCall, Call, every_case

from fastcaps import backends

if __name__ == "__main__":
    every = int(sys.argv[1])  # one case of so many
    torch.set_num_threads(1)  # the library's own threads are those of parallel_threads.cpp
    assert backends.native_serves()

    for number, (routing, case) in enumerate(every_case(is_small)):
        if number % every:
            continue
        print(routing, case, flush=True)
        forward, backward = (
            getattr(torch.ops.fastcaps_cpu, name).default for name in (routing.name, f"{routing.name}_backward")
        )
        call, back = routing.call(case), routing.backward_call(case)

        def both(
            call: Call = call, back: BackwardCall = back, forward: Any = forward, backward: Any = backward
        ) -> None:
            call.forward(forward)
            back.results(backward, 0)

        threads = [threading.Thread(target=both) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    squash_sum(4, 33, torch.float32)
