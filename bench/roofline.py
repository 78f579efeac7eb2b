"""What a device reaches itself: copy bandwidth, matrix products, launches. The ceilings for kernels.

python bench/roofline.py --device cuda --output roofline.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.device_timing import Clock, latency, replayed, timed
from bench.precision import PRECISIONS

__all__ = ["main", "measure_rates", "three_launches"]

_SIZES = {"cuda": (2**30, 8192), "cpu": (2**22, 256)}
"""Bytes of the copied tensor, and the matrices' size."""


def measure_rates(clock: Clock, seconds: float) -> dict[str, float]:
    """Return ``copy`` in bytes a second (read and written), and the operations a second of a product by precision.

    Random numbers, never zeros: the device's clock depends on them.
    """
    device = clock.device
    count, size = _SIZES[device.type]
    rates = {}
    own = Clock(device, seconds)
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    rates["copy"] = 2 * count / timed(own, partial(target.copy_, source))["median"]
    del source, target
    for name, precision in PRECISIONS.items():
        left, right = (torch.randn(size, size, device=device, dtype=precision.dtype) for _ in range(2))
        out = torch.empty_like(left)
        with precision.active():
            rates[name] = 2 * size**3 / timed(own, partial(torch.mm, left, right, out=out))["median"]
    return rates


def three_launches(clock: Clock) -> dict[str, float]:
    """Return what three of the smallest launches take in a row: until the device is done, and in a graph's replay."""
    x = torch.zeros(32, device=clock.device)

    def launches() -> dict[str, torch.Tensor]:
        x.add_(1)
        x.add_(1)
        return {"x": x.add_(1)}

    found = {"latency": latency(clock, launches)["median"]}
    with contextlib.suppress(RuntimeError):  # no graphs here
        found["graph"] = replayed(clock, launches)["median"]
    return found


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Measure a device's own rates.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=0.3, help="timed calls of each measurement together")
    parser.add_argument("--output", type=Path, help="a JSON file to write")
    given = parser.parse_args(None if arguments is None else list(arguments))
    device = torch.device(given.device)
    clock = Clock(device, given.seconds)
    found: dict[str, Any] = {"device": "cpu", "rates": measure_rates(clock, given.seconds)}
    found["three_launches"] = three_launches(clock)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
    rates = found["rates"]
    print(f"{found['device']}: copy {rates['copy'] / 1e12:.2f} TB/s (read and written)")
    print("products: " + ", ".join(f"{name} {rates[name] / 1e12:.1f} TFLOP/s" for name in PRECISIONS))
    print(f"three launches: {found['three_launches']['latency'] * 1e6:.1f} us until the device is done")
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
