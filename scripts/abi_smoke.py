"""Try an installed fastcaps under whatever torch is here: every op, forward and backward, and every routing's layer.

``make abi-check TORCH=2.10.0`` runs this in an environment with another torch than the one the wheel was built against,
``make wheel`` in fresh ones. Exits with an error unless the compiled kernels run and agree with the float64 reference.
The cases are the tests' own, one for each rule, dtype, and set or grid; nothing but torch is needed to run them.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import fastcaps
from fastcaps import encapnet, libraries, ops

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path += [str(CHECKOUT), str(CHECKOUT / "tests")]  # for the cases; the package, another's, was imported before
from tools import sanitize  # noqa: E402


def op(make: Callable[[torch.dtype], sanitize.Checked], dtype: torch.dtype) -> str:
    """Hold an op and its backward to the rule of the tests; return how near they came to what they may err."""
    run, bar = make(dtype)
    with fastcaps.backend("cpu"):
        verdict = bar.judge(run("cpu"))
    if verdict.complaints:
        raise AssertionError("; ".join(verdict.complaints))
    worst = max((error / verdict.allowed[name] for name, error in verdict.errors.items() if error), default=0.0)
    return f"the largest error is {worst:.0%} of its limit"


class Squash(torch.nn.Module):
    """A layer of ``squash_sum`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(2, 8, 5, 5))

    def forward(self, capsules: Tensor) -> Tensor:
        return encapnet.squash_sum(capsules, self.a, types=8, relu=True)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "InvertedAttentionRouting": lambda: fastcaps.InvertedAttentionRouting(8, 4, 16, 16, kernel_size=3, iterations=2),
    "EquilibriumRouting": lambda: fastcaps.EquilibriumRouting(8, 4, 16, 16, kernel_size=3, iterations=3),
    "DynamicRouting": lambda: fastcaps.DynamicRouting(8, 4, 16, 16, kernel_size=3),
    "DynamicRouting, children compete": lambda: fastcaps.DynamicRouting(
        8, 4, 16, 16, kernel_size=3, compete="children"
    ),
    "EMRouting": lambda: fastcaps.EMRouting(8, 4, 16, 16, kernel_size=3),
    "HeinsenRouting": lambda: fastcaps.HeinsenRouting(8, 4, 16, 16, kernel_size=3),
    "HeinsenRouting, k-means": lambda: fastcaps.HeinsenRouting(8, 4, 16, 16, kernel_size=3, model="kmeans"),
    "RoutingPool": lambda: fastcaps.RoutingPool(8, 4, 16, 16, kernel_size=3),
    "squash_sum": Squash,
}


def compiled(make: Callable[[], torch.nn.Module], shape: tuple[int, ...]) -> str:
    """One training step under torch.compile's front end: schemas, fake kernels and autograd under this torch."""
    torch.manual_seed(0)
    layer, children = make(), torch.randn(shape)
    twin = copy.deepcopy(layer)
    for one in (layer, torch.compile(twin, backend="aot_eager", fullgraph=True)):
        result = one(children)
        poses = result if isinstance(result, Tensor) else result[0]
        (poses * torch.linspace(-1, 1, poses.numel()).view_as(poses)).sum().backward()
    for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad)
    return "gradients equal to eager's"


def check(name: str, test: Callable[[], str]) -> bool:
    """Run one check; print how it went."""
    try:
        detail = test()
    except Exception as error:
        print(f"  FAILED  {name}: {type(error).__name__}: {error}")
        return False
    print(f"  ok      {name}: {detail}")
    return True


def every_op_is_covered() -> str:
    """By torch's own list: an op without a check here fails."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastcaps::")}
    checked = {f"fastcaps::{name}{end}" for name in (*(routing.name for routing in ops.ROUTINGS), "squash_sum")
               for end in ("", "_backward")}  # fmt: skip
    if registered != checked:
        raise AssertionError(f"registered, but not checked: {sorted(registered - checked)}")
    return f"{len(checked)} ops"


def checks() -> dict[str, Callable[[], str]]:
    """All checks by name."""
    found: dict[str, Callable[[], str]] = {"every op is covered": every_op_is_covered}
    for name, make in sanitize.calls(rows=()).items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = partial(op, make, dtype)
    for name, make in LAYERS.items():
        shape = (2, 32, 5, 5) if name == "squash_sum" else (2, 8, 5, 5, 16)
        found[f"{name} under torch.compile"] = partial(compiled, make, shape)
    return found


def main() -> int:
    info = libraries.native_build_info()
    print(f"fastcaps {info['version']} from {fastcaps.__file__}")
    print(
        f"built against torch {info['torch_version']} by {info['compiler']} for stable ABI {info['stable_abi_target']}"
    )
    level = fastcaps.backends.native_capability()
    print(f"running under torch {torch.__version__}, Python {platform.python_version()}, level {level}")
    fastcaps.backends.show()
    done = [check(name, test) for name, test in checks().items()]
    print(f"{sum(done)} of {len(done)} checks passed")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
