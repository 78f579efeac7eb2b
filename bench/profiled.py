"""A few training steps of one workload, for a profiler to look at; or torch's own profile of them: time by kernel.

ncu --profile-from-start off python -m bench.profiled tsai-c10-conv1
python -m bench.profiled tsai-c10-conv1 --table
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from bench.alternatives import OURS, build, runner
from bench.workloads import find


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Training steps of one workload, to be profiled.")
    parser.add_argument("workload", type=find)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--table", action="store_true", help="print torch's own profile")
    given = parser.parse_args(None if arguments is None else list(arguments))
    inputs = given.workload.inputs(given.batch).to(torch.device(given.device))
    step, on_cuda = runner(build(OURS, given.workload), inputs, training=True), given.device == "cuda"
    wait = torch.cuda.synchronize if on_cuda else int
    for _ in range(3):
        step()
    wait()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
    with profile(activities=activities) if given.table else nullcontext() as found:
        if on_cuda:  # a profiler that waits for it sees one step, warmed up
            torch.cuda.profiler.start()
        for _ in range(3 if given.table else 1):
            step()
        wait()
        if on_cuda:
            torch.cuda.profiler.stop()
    if not given.table:
        return
    by = f"self_{'device' if on_cuda else 'cpu'}_time_total"
    print(found.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=90))


if __name__ == "__main__":
    main()
