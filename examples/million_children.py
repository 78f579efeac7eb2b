"""Route a million children, distributed over processes, to 64 parents, and take training steps.

    torchrun --nproc-per-node 4 examples/million_children.py

Every process holds a quarter of the children. All votes would take 4.1 GB, but no process stores a vote. The processes
only exchange the parents' state, about 8 kB per iteration.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import fastcaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--children", type=int, default=1_000_000, help="for all processes together")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    mesh = dist.init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    rank, size = mesh.get_rank(), mesh.size()
    if options.children % size:
        parser.error(f"--children must be a multiple of the {size} processes, got {options.children}")

    torch.manual_seed(0)  # the same layer everywhere
    layer = fastcaps.HeinsenRouting(None, 64, 16, 16, pose="vector", bias=True).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    wanted = torch.randn(1, 64, 16, device=device)
    draw = torch.Generator(device).manual_seed(1 + rank)  # other children everywhere
    own = torch.randn(1, options.children // size, 16, generator=draw, device=device)
    children = DTensor.from_local(own, mesh, [Shard(1)])

    for step in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        parents = layer(children)  # the same on every process
        loss = (parents.poses.to_local() - wanted).square().mean()
        loss.backward()  # the layer's gradients, too, are the same on every process
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - start:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # kB on Linux
    print(f"process {rank}: {children.shape[1]} children, {own.shape[1]} of them here; peak memory {peak:.0f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
