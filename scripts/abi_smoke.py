"""Try an installed fastcaps under whatever torch is here: every op, forward and backward, and every routing's layer.

``make abi-check TORCH=2.10.0`` runs this in an environment with another torch than the one the wheel was built against,
cibuildwheel in a fresh one. Exits with an error unless the compiled kernels run and agree with the float64 reference.
The cases are the tests' own, one for each rule, dtype, and set or grid; nothing but torch is needed to run them.
"""

from __future__ import annotations

import copy
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

import fastcaps
from fastcaps import encapnet, libraries, ops

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path += [str(CHECKOUT), str(CHECKOUT / "tests")]  # for the cases; the package, another's, was imported before
import nn_layers  # noqa: E402

from tools import sanitize  # noqa: E402


class Squash(torch.nn.Module):
    """A layer of ``squash_sum`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(2, 8, 5, 5))

    def forward(self, capsules: Tensor) -> Tensor:
        return encapnet.squash_sum(capsules, self.a, types=8, relu=True)


def layers() -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """Return a layer of every kind and option, with children, by name."""
    wanted = {"EquilibriumRouting": fastcaps.EquilibriumRouting(2, 3, 16, 16, kernel_size=3, dtype=torch.float64)}
    for row in nn_layers.LAYERS:
        for variant, options in {"": {}, **row.variants}.items():
            wanted[f"{row.kind.__name__} {variant}".strip()] = row.make("grid", **options)
    found = {name: (layer, nn_layers.draw(layer)[0]) for name, layer in wanted.items()}
    return found | {"squash_sum": (Squash(), torch.randn(2, 32, 5, 5))}


def compiled(layer: torch.nn.Module, children: Tensor) -> None:
    """Make a training step under torch.compile's front end: schemas, fake kernels and autograd under this torch."""
    torch._dynamo.reset()  # all layers share one forward, of which it compiles no more than eight kinds
    twin = copy.deepcopy(layer)
    for one in (layer, torch.compile(twin, backend="aot_eager", fullgraph=True)):
        result = one(children)
        poses = result if isinstance(result, Tensor) else result[0]
        (poses * torch.linspace(-1, 1, poses.numel()).view_as(poses)).sum().backward()
    for own, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad)


def unchecked() -> set[str]:
    """Return the ops that torch has of this package and no call here is of."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastcaps::")}
    names = (*(routing.name for routing in ops.ROUTINGS), "squash_sum")
    return registered - {f"fastcaps::{name}{end}" for name in names for end in ("", "_backward")}


def main() -> int:
    info = libraries.native_build_info()
    print(f"fastcaps {info['version']} from {fastcaps.__file__}")
    print(
        f"built against torch {info['torch_version']} by {info['compiler']} for stable ABI {info['stable_abi_target']}"
    )
    level = fastcaps.backends.native_capability()
    print(f"running under torch {torch.__version__}, Python {platform.python_version()}, level {level}")
    fastcaps.backends.show()
    wrong = [f"{name} has no call here" for name in unchecked()]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        print(f"in {dtype}:")
        wrong += [f"{call} in {dtype}" for call in sanitize.run("cpu", "cpu", dtype, rows=())]
    for name, (layer, children) in layers().items():
        try:
            compiled(layer, children)
        except Exception as error:
            wrong.append(f"{name} under torch.compile: {type(error).__name__}: {error}")
        else:
            print(f"ok     {name} under torch.compile")
    print(*wrong or ["all checks passed"], sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
