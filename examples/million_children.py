"""Route a million children, distributed over processes, to 64 parents, and take training steps.

    torchrun --nproc-per-node 4 examples/million_children.py

Every process holds a part of the children. Their votes would take 4.1 GB, but no process stores one. In each iteration
the processes add their parts of the parents' sums, 4 kB. Parents and gradients are those of a single process.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

from fastcaps import Votes
from fastcaps.functional import squash

BLOCK = 1000  # children that are drawn together, so that they do not depend on the number of processes


class AddUp(torch.autograd.Function):
    """The sum over processes. Every process reads it, so that its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return AddUp.forward(ctx, grad)


def dynamic_routing(votes, iterations=3):
    """Return the parents of all processes' children: each process has the votes of its own."""
    parents = squash(AddUp.apply(votes.sum(1 / votes.parents)), (-2, -1))
    logits = 0.0
    for _ in range(iterations - 1):
        logits = logits + votes.agreement(parents)  # parents compete for a child, which a process has alone
        parents = squash(AddUp.apply(votes.sum(logits.softmax(-1))), (-2, -1))
    return parents


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--children", type=int, default=1_000_000, help=f"for all processes, a multiple of {BLOCK}")
    options = parser.parse_args()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    drawn = (torch.Generator().manual_seed(k) for k in range(rank, options.children // BLOCK, size))
    blocks = [torch.randn(1, BLOCK, 1, 16, generator=each) for each in drawn]
    children = torch.cat(blocks, 1).to(device).requires_grad_()
    torch.manual_seed(0)  # the same parameters and targets everywhere
    weight = (0.01 * torch.randn(1, 64, 16, 16)).to(device).requires_grad_()  # one set of matrices for all children
    wanted = torch.randn(1, 64, 1, 16).to(device)
    for step in range(3):
        start = time.perf_counter()
        parents = dynamic_routing(Votes(children, weight))
        loss = (parents - wanted).square().sum() / size  # the share of a process: backward adds up those of all
        dchildren, dweight = torch.autograd.grad(loss, (children, weight))
        for x in (loss, norm := dchildren.square().sum(), dweight):  # of a process's own children
            dist.all_reduce(x.detach())
        with torch.no_grad():
            weight -= dweight / dweight.abs().max() * 1e-3
        if rank == 0:
            took = time.perf_counter() - start
            print(f"step {step}: loss {loss.item():.6f}, |dchildren| {norm.sqrt():.5e}, {took:.2f} s")
    print(f"process {rank}: {children.shape[1]} children")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
