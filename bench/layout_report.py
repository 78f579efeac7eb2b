"""Which layout of the votes serves the batched-matmul alternative best: the choice in ``Routing.layout`` was made so.

python bench/layout_report.py --workload sabour-mnist hinton-conv --training
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.alternatives import eager, runner
from bench.workloads import WORKLOADS, Workload, find

__all__ = ["LAYOUTS", "main", "seconds"]

LAYOUTS = ("imecp", "imcep", "pimce", "pmice", "pmcei", "picme", "mecip", "mecpi")


def seconds(workload: Workload, layout: str, batch: int, training: bool, compiled: bool, calls: int = 3) -> float:
    """Return the least time of a few calls over votes in ``layout``."""
    run = eager("batched-matmul", workload, layout)
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, dynamic=False, fullgraph=True)
    call = runner(run, workload.inputs(batch), training)
    call()
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Times of the batched matmul by the layout of its votes.")
    parser.add_argument("--workload", nargs="+", default=[], help="only these")
    parser.add_argument("--layout", nargs="+", default=LAYOUTS, help="only these")
    parser.add_argument("--batch", type=int, help="instead of the default")
    parser.add_argument("--training", action="store_true", help="training steps instead of forward calls")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(None if arguments is None else list(arguments))
    torch.set_num_threads(given.threads)
    for name in given.workload or WORKLOADS:
        workload = find(name)
        batch = given.batch or workload.batch
        found = {
            layout: seconds(workload, layout, batch, given.training, given.compiled) * 1e3 for layout in given.layout
        }
        best = min(found, key=lambda layout: found[layout])
        told = ", ".join(f"{layout} {value:.1f}" for layout, value in found.items())
        print(f"{name} batch {batch}: {told} ms; best {best}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
