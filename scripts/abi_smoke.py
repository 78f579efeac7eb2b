"""Try an installed fastcaps under whatever torch is here: every op, forward and backward, and every routing's layer.

``make abi-check TORCH=2.10.0`` runs this in an environment with another torch than the one the wheel was built against,
cibuildwheel in a fresh one. Exits with an error unless the compiled kernels run and agree with the float64 reference.
The cases are the tests' own, one for each rule, dtype, and set or grid, and bench/judge.py judges them; nothing but
torch is needed to run them.

With the argument ``triton`` it compiles the Triton kernels for an H100, which need not be there, with the installed
Triton; under TRITON_INTERPRET=1 it runs a few calls in Triton's interpreter. pytest is needed for that. ``make
versions`` does all three in environments with the oldest and the newest torch and Triton.
"""

from __future__ import annotations

import copy
import platform
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastcaps
from fastcaps import libraries

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path += [str(CHECKOUT), str(CHECKOUT / "tests")]  # for the cases; the package, another's, was imported before
import nn_layers  # noqa: E402

from tools import sanitize  # noqa: E402


class Verbs(fastcaps.nn.RoutingLayer[Tensor, Tensor]):
    """A routing over the verbs, whose ops no other layer calls."""

    def route(self, votes: fastcaps.Votes) -> Tensor:
        parents = votes.sum(1 / votes.parents)
        for _ in range(self.iterations):
            parents = votes.sum(votes.agreement(fastcaps.functional.unit(parents, (-2, -1))).softmax(-1))
        return parents


class Seen(TorchDispatchMode):
    """The names of the ops that were called."""

    names: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def layers() -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """Return a layer of every kind and option, with children, by name."""
    wanted = {}
    for row in nn_layers.LAYERS:
        for variant, options in {"": {}, **row.variants}.items():
            wanted[f"{row.kind.__name__} {variant}".strip()] = row.make("grid", **options)
    found = {name: (layer, nn_layers.draw_for(layer)[0]) for name, layer in wanted.items()}
    for share in (False, True):
        layer = Verbs(32, 10, 16, 16, share=share, dtype=torch.float64)
        found[f"Verbs share={share}"] = layer, torch.randn(3, 32, 16, dtype=torch.float64)
    return found


def compiled(layer: torch.nn.Module, children: Tensor) -> None:
    """Make a training step under torch.compile's front end: schemas, fake kernels and autograd under this torch."""
    torch._dynamo.reset()  # all layers share one forward, of which it compiles no more than eight kinds
    twin = copy.deepcopy(layer)
    for one in (layer, torch.compile(twin, backend="aot_eager", fullgraph=True)):
        result = one(children)
        poses = result if isinstance(result, Tensor) else result[0]
        (poses * torch.linspace(-1, 1, poses.numel()).view_as(poses)).sum().backward()
    for ours, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, ours.grad)


def differs(dtype: torch.dtype) -> bool:
    """Return whether results or gradients of the verbs' kernels differ from those of the float64 reference."""
    layer, children = Verbs(32, 10, 16, 16, dtype=dtype), torch.randn(3, 32, 16).to(dtype).requires_grad_()
    twin, exact = copy.deepcopy(layer).double(), children.detach().double().requires_grad_()
    found = []
    for name, one, given in (("cpu", layer, children), ("reference", twin, exact)):
        with fastcaps.backend(name):
            parents = one(given)
            found.append([parents, *torch.autograd.grad((parents.double() ** 2).sum(), (given, one.weight))])
    near = 0.05 if dtype == torch.bfloat16 else 1e-4
    return any((ours.double() - right).norm() > near * right.norm() for ours, right in zip(*found, strict=True))


def triton() -> list[str]:
    """Return what the Triton kernels do wrong: compile them, or run some in the interpreter."""
    import triton
    import triton_cases

    from fastcaps.triton_kernels import static

    print(f"Triton {triton.__version__} under torch {torch.__version__}")
    wrong = []
    for routing, name in () if triton_cases.JIT else triton_cases.SERVED:
        case = routing.case(name)
        wrong += routing.bar(case).judge(triton_cases.training(routing.stem, case)[0]).complaints
        print(f"ran    {routing} {name}", flush=True)
    for launch in triton_cases.every_decision() if triton_cases.JIT else ():
        try:
            print(f"ok     {static.compiled_for('sm_90', launch)}", flush=True)
        except Exception as error:
            wrong.append(f"{launch.name}: {type(error).__name__}: {error}")
    return wrong


def main() -> int:
    if sys.argv[1:] == ["triton"]:
        wrong = triton()
        print(*wrong or ["all checks passed"], sep="\n")
        return 1 if wrong else 0
    info, level = libraries.native_build_info(), fastcaps.backends.native_capability()
    print(f"fastcaps {info['version']} from {fastcaps.__file__}")
    print(f"built against torch {info['torch_version']} by {info['compiler']}, stable ABI {info['stable_abi_target']}")
    print(f"running under torch {torch.__version__}, Python {platform.python_version()}, level {level}")
    print(*fastcaps.backends.listing(), sep="\n")
    wrong = []
    with Seen():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            print(f"in {dtype}:")
            wrong += [f"{call} in {dtype}" for call in sanitize.run("cpu", "cpu", dtype, rows=())]
            wrong += [f"verbs in {dtype}"] * differs(dtype)
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastcaps::")}
    wrong += [f"{name} has no call here" for name in known - Seen.names]
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
