"""One warmed training step of a workload, for Nsight Compute to look at; the times of its kernels are in the map.

ncu --profile-from-start off python -m bench.profiled tsai-c10-conv1
"""

from __future__ import annotations

import argparse

import torch

from bench.alternatives import OURS, build, runner
from bench.workloads import find


def main() -> None:
    parser = argparse.ArgumentParser(description="One warmed training step of a workload, to be profiled.")
    parser.add_argument("workload", type=find)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=128)
    given = parser.parse_args()
    step = runner(build(OURS, given.workload), given.workload.inputs(given.batch).to(torch.device(given.device)), True)
    for _ in range(3):
        step()
    if given.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    step()
    if given.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
