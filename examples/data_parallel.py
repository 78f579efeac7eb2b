"""Train a capsule network on scikit-learn's digits; each process trains on a part of every batch.

    torchrun --nproc-per-node 2 examples/data_parallel.py          # DDP: every process holds all parameters
    torchrun --nproc-per-node 2 examples/data_parallel.py --fsdp   # FSDP2: every process holds a shard of them

Capsule layers are ordinary modules: nothing here is specific to them.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fastcaps import CapsNet
from fastcaps.nn import CapsuleSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images per step, for all processes together")
    parser.add_argument("--images", type=int, default=None, help="train only on the first images")
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = dist.init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    train(options, mesh, device)
    dist.destroy_process_group()  # when no network is left: DDP, if it holds a process group last, can wait for ever


def train(options: argparse.Namespace, mesh: dist.DeviceMesh, device: str) -> None:
    torch.manual_seed(0)
    network: nn.Module = CapsNet.build(
        nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        in_channels=1,
        image_size=8,
        capsules=8,
        dim=16,
        hidden=[CapsuleSpec(8, kernel_size=3)],
        classes=10,
    ).to(device)
    if options.fsdp:
        network.to(memory_format=torch.contiguous_format)  # FSDP2 does not support channels-last convolutions
        for child in network.children():
            fully_shard(child, mesh=mesh)
        fully_shard(network, mesh=mesh)
    else:
        network = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)

    digits = load_digits()
    pixels, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
    images = TensorDataset(pixels[: options.images], labels[: options.images])
    sampler = DistributedSampler(images)
    loader = DataLoader(images, options.batch // mesh.size(), sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if mesh.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / (len(loader) * mesh.size()):.4f}")


if __name__ == "__main__":
    main()
