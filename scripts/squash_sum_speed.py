"""Time squash_sum against eager PyTorch and torch.compile, at the shapes of EncapNet v1: a table in Markdown.

    python scripts/squash_sum_speed.py [--batch 32] [--threads 2] [--seconds 1.0] [--dims 4 16] [--network]

What is timed is the chain between EncapNet's convolutions, from the results of BatchNorm on: ReLU and squash of both
branches, each times its coefficient, and their sum; then, for a training step, all gradients. The alternatives compute
the same by torch's own functions, with the textbook squash (a zero capsule's gradient is NaN there) and with ours.
Rounds go through all of them in turn, so that whatever else the machine does falls on all; medians and quartiles.
``--network``: a training step of li-encapnet-v1 with 8 types in place of 32, by the op and with the reference forced.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends, models, ops, reference
from fastcaps.losses import margin_loss
from fastcaps.ops.squash_sum import choose

SHAPES = [(32, 2, 32), (32, 4, 16), (32, 8, 8), (32, 16, 4)]  # types, dim, height and width


def textbook(x: Tensor, a: Tensor, y: Tensor, b: Tensor, types: int) -> Tensor:
    """The chain as one would write it."""

    def part(capsules: Tensor, coefficient: Tensor) -> Tensor:
        poses = capsules.relu().unflatten(1, (types, -1))
        squares = poses.square().sum(2, keepdim=True)
        return (poses * (squares.sqrt() / (1 + squares)) * coefficient.unsqueeze(2)).flatten(1, 2)

    return part(x, a) + part(y, b)


def ours(x: Tensor, a: Tensor, y: Tensor, b: Tensor, types: int) -> Tensor:
    """The op."""
    return ops.squash_sum(x, a, y, b, types=types, relu=True)


def plain(x: Tensor, a: Tensor, y: Tensor, b: Tensor, types: int) -> Tensor:
    """The op's reference."""
    return reference.squash_sum(x, a, y, b, types, True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each alternative and shape, at least")
    parser.add_argument("--dims", type=int, nargs="*", default=[dim for _, dim, _ in SHAPES], help="only these")
    parser.add_argument("--network", action="store_true", help="a whole network's training step instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.network:
        network(options)
        return
    ways: dict[str, Callable[..., Tensor]] = {
        "squash_sum": ours,
        "eager": textbook,
        "eager, safe": plain,
        "compiled": torch.compile(textbook, fullgraph=True, dynamic=False),
        "compiled, safe": torch.compile(plain, fullgraph=True, dynamic=False),
    }
    first = torch.randn(1, 2, 1, 1)
    print(
        f"batch {options.batch}, {options.threads} threads, float32, backend {choose(first)}, torch {torch.__version__}"
    )
    others = list(ways)[1:]
    print("| types × dim, map | | " + " | ".join(ways) + " | fastest other / ours |")
    print("|---" * (len(ways) + 3) + "|")
    for types, dim, size in (shape for shape in SHAPES if shape[1] in options.dims):
        for step in (False, True):
            times = measure(ways, options, types, dim, size, step)
            middle = {name: statistics.median(each) for name, each in times.items()}
            cells = [f"{quartiles(each)}" for each in times.values()]
            ratio = min(middle[name] for name in others) / middle["squash_sum"]
            what = "training step" if step else "forward"
            print(f"| {types} × {dim}, {size}² | {what} | " + " | ".join(cells) + f" | {ratio:.2f}× |", flush=True)


def clock(options: Any) -> float:
    """Return seconds: of the processor where there is one thread, which waits for nobody; else of the wall."""
    return time.thread_time() if options.threads == 1 else time.perf_counter()


def network(options: Any) -> None:
    """Print how long a training step of a whole network takes by the op, and by the reference."""
    torch.manual_seed(0)
    net = models.create("li-encapnet-v1", types=8)
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    images, labels = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    times: dict[str | None, list[float]] = {None: [], "reference": []}

    def once(name: str | None) -> float:
        start = clock(options)
        with nullcontext() if name is None else backends.backend(name):
            optimizer.zero_grad()
            margin_loss(net(images), labels).backward()
            optimizer.step()
        return 1e3 * (clock(options) - start)

    for name in times:
        once(name)
    end = time.perf_counter() + options.seconds * len(times)
    while time.perf_counter() < end or len(times[None]) < 5:
        for name, each in times.items():
            each.append(once(name))
    ratio = statistics.median(b / a for a, b in zip(times[None], times["reference"], strict=True))
    told = ", ".join(f"{name or 'squash_sum'} {quartiles(each)} ms" for name, each in times.items())
    print(f"batch {options.batch}, {options.threads} threads, {len(times[None])} rounds: {told}; {ratio:.2f}×")


def measure(
    ways: dict[str, Callable[..., Tensor]], options: Any, types: int, dim: int, size: int, step: bool
) -> dict[str, list[float]]:
    """Return the times of every way, in ms."""
    torch.manual_seed(0)
    x, y = (torch.randn(options.batch, types * dim, size, size) for _ in "xy")
    a, b = (torch.randn(options.batch, types, size, size) for _ in "ab")
    leaves = [tensor.requires_grad_(step) for tensor in (x, a, y, b)]
    grad = torch.randn_like(x)

    def once(way: Callable[..., Tensor]) -> float:
        start = clock(options)
        out = way(*leaves, types)
        if step:
            torch.autograd.grad(out, leaves, grad)
        return 1e3 * (clock(options) - start)

    for way in ways.values():
        for _ in range(3):
            once(way)
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + options.seconds * len(ways)
    while time.perf_counter() < end or len(times["eager"]) < 5:
        for name, way in ways.items():
            times[name].append(once(way))
    return times


def quartiles(times: list[float]) -> str:
    """The median, and where the middle half lies."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
