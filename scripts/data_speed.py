"""Images a second of every generator and transform, against what a training step takes.

``python scripts/data_speed.py --data-dir path/to/data [--device cuda] [--batch-size 128]``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import DataLoader

from fastcaps import data, models
from fastcaps.data import Chain, ColorJitter, ImageDataset, Mixup, RandomCropFlip, ResizeCrop, ShuffledBatches


def images_a_second(step: Callable[[], object], batch_size: int, device: torch.device, seconds: float) -> float:
    """The best of five rounds."""

    def run(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    times = max(1, int(seconds / 5 / max(run(2) / 2, 1e-6)))
    return batch_size * times / min(run(times) for _ in range(5))


def training_step(name: str, images: torch.Tensor, targets: torch.Tensor, classes: int) -> Callable[[], object]:
    """Forward, backward and update of a network on the same batch again and again."""
    network = models.create(name, image_size=images.shape[2], in_channels=images.shape[1], classes=classes)
    network.to(images.device).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)

    def step() -> None:
        outputs = network(images)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        loss = torch.nn.functional.multilabel_soft_margin_loss(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def colours(count: int, size: int, channels: int = 3, **options: object) -> ImageDataset:
    """Noise: how fast bytes are moved does not depend on what they show."""
    images = np.random.RandomState(0).randint(0, 256, (count, channels, size, size)).astype(np.uint8)
    scale = {"mean": (0.5,) * channels, "std": (0.25,) * channels}
    return ImageDataset(images, np.arange(count) % 10, **scale, **options)  # type: ignore[arg-type]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder of MNIST's files, or one above it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument(
        "--step-batch-size", type=int, default=16, help="of the training step, whose rate hardly depends on it"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each row")
    args = parser.parse_args()
    device = torch.device(args.device)
    made = {name: data.load(name, args.data_dir).train for name in ("multimnist", "diverse-multimnist", "affnist")}
    made["affnist, test half"] = data.load("affnist", args.data_dir).test
    small, flips = RandomCropFlip(4, flip=True), {"augment": RandomCropFlip(4, flip=True)}
    made |= {
        "32×32×3, as they are": colours(2000, 32),
        "32×32×3, pad, crop, flip": colours(2000, 32, **flips),
        "32×32×3, resize to 34, crop": colours(2000, 32, augment=ResizeCrop(34, 32)),
        "32×32×3, crop, flip, colours": colours(2000, 32, augment=Chain(small, ColorJitter())),
        "32×32×3, crop, flip, mixup": colours(2000, 32, **flips, mixup=Mixup(10)),
        "96×96×2, pad 16, crop, mixup": colours(500, 96, 2, augment=RandomCropFlip(16), mixup=Mixup(10)),
    }
    networks = {
        "multimnist": ("mnist", "sabour-multimnist"),
        "diverse-multimnist": ("mnist", "tsai-dmm-matrix", "tsai-dmm-vector"),
        "affnist": ("mnist", "sabour-affnist", "zhao-affnist"),
        "32×32×3, pad, crop, flip": ("tsai-iar-simple-c10", "tsai-iar-resnet-c10", "zhao-cnn-average"),
        "96×96×2, pad 16, crop, mixup": ("heinsen-norb",),
    }
    print(f"batches of {args.batch_size}, {device}, {torch.get_num_threads()} threads; images a second")
    for name, dataset in made.items():
        dataset.to(device)
        batches = iter(list(ShuffledBatches(len(dataset), args.batch_size, 0)) * 10_000)
        speed = images_a_second(lambda d=dataset, b=batches: d.batch(next(b)), args.batch_size, device, args.seconds)  # type: ignore[misc]
        loader = iter(DataLoader(dataset, batch_sampler=[list(range(args.batch_size))] * 1_000_000))
        loaded = images_a_second(lambda items=loader: next(items), args.batch_size, device, args.seconds)  # type: ignore[misc]
        print(f"{name:32} made {speed:10,.0f}   through a loader {loaded:10,.0f}", flush=True)
        for network in networks.get(name, ()):
            images, _ = dataset.batch(range(args.step_batch_size))
            step = training_step(network, images, torch.randint(2, (len(images), 10), device=device).float(), 10)
            needed = images_a_second(step, args.step_batch_size, device, args.seconds)
            print(f"    {network:28} takes {needed:9,.0f}   data: {needed / loaded:6.1%} of a step", flush=True)


if __name__ == "__main__":
    main()
