"""A few calls of one workload, for a profiler to look at; or torch's own profile of them where there is no other.

ncu --clock-control none --kernel-name regex:forward_kernel python tools/profile_target.py --device cuda
python tools/profile_target.py --device cuda --table
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.alternatives import OURS, build, runner
from bench.runner import PRECISIONS
from bench.workloads import find

__all__ = ["main"]


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Training steps of one workload, to be profiled.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workload", default="tsai-c10-conv1")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--precision", default="fp32", choices=tuple(PRECISIONS))
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print torch's own profile: time by kernel")
    given = parser.parse_args(None if arguments is None else list(arguments))
    workload, precision = find(given.workload), PRECISIONS[given.precision]
    inputs = workload.inputs(given.batch).to(torch.device(given.device)).to(precision.dtype)
    step = runner(build(OURS, workload), inputs, training=True)

    def calls() -> None:
        for _ in range(given.calls):
            step()
        if given.device == "cuda":
            torch.cuda.synchronize()

    precision.use()
    if not given.table:
        calls()
        return 0
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if given.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        calls()
    by = "self_device_time_total" if given.device == "cuda" else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=90))
    return 0


if __name__ == "__main__":
    sys.exit(main())
