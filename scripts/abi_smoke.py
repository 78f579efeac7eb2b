"""Try an installed fastcaps under whatever torch is here: import, route, differentiate, compare with the reference.

``make abi-check TORCH=2.10.0`` runs this in an environment with another torch than the one the wheel was built against.
Exits with an error unless the compiled kernels run and agree with the float64 reference.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastcaps
from fastcaps import _C, Window

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the rule alone: the package was imported before
from tools.judge import Bar

Case = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Window | None]

CASES: list[Case] = [
    # name, children, weight [G, M, D, E], parents, window
    ("set, 4x4 poses", (3, 40, 4, 4), (40, 10, 4, 4), (3, 10, 4, 4), None),
    ("grid, 4x4 poses, 3x3 window", (2, 8, 9, 9, 4, 4), (72, 16, 4, 4), (2, 16, 4, 4, 4, 4), Window(3, stride=2)),
    ("grid, vector poses, padded", (2, 3, 5, 5, 1, 7), (3, 5, 7, 11), (2, 5, 5, 5, 1, 11), Window(3, padding=1)),
]


def arguments(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of one case, the same numbers in every dtype."""
    _, children, weight, parents, _ = case
    generator = torch.Generator().manual_seed(0)

    def leaf(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(torch.bfloat16).to(dtype)  # exact in every dtype

    numbers = weight[-1] * children[-2]
    return {
        "children": leaf(children),
        "weight": leaf(weight, 0.5),
        "parents": leaf(parents),
        "gate": leaf(children[:-2]),
        "norm_weight": leaf((numbers,)),
        "norm_bias": leaf((numbers,)),
    }


def run(case: Case, tensors: Sequence[torch.Tensor | None], backend: str = "reference") -> dict[str, torch.Tensor]:
    """The parents and every gradient."""
    names = ("children", "weight", "parents", "gate", "norm_weight", "norm_bias")
    given = {name: one.detach().requires_grad_() for name, one in zip(names, tensors, strict=True) if one is not None}
    with fastcaps.backend(backend):
        parents = fastcaps.functional.inverted_attention_routing(**given, window=case[4])
        # A cotangent without a trend: LayerNorm's gradient takes its mean away, and would leave rounding alone.
        cotangent = torch.randn(parents.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = torch.autograd.grad(parents, tuple(given.values()), cotangent.to(parents.dtype))
    return {"result": parents.detach(), **{f"d{name}": one for name, one in zip(given, gradients, strict=True)}}


def check(name: str, test: Callable[[], Any]) -> bool:
    """Run one check; print how it went."""
    try:
        detail = test()
    except Exception as error:
        print(f"  FAILED  {name}: {type(error).__name__}: {error}")
        return False
    print(f"  ok      {name}: {detail}")
    return True


def numbers(case: Case, dtype: torch.dtype) -> str:
    """Hold the kernels to the rule of the tests."""
    tensors = list(arguments(case, dtype).values())
    verdict = Bar(partial(run, case), tensors).judge(run(case, tensors, "cpu"))
    if verdict.complaints:
        raise AssertionError("; ".join(verdict.complaints))
    worst = max(error / verdict.allowed[name] for name, error in verdict.errors.items())
    return f"the largest error is {worst:.0%} of its limit"


def compiled() -> str:
    """One training step under torch.compile's front end: the op's schema, fake and autograd under this torch."""
    layer = fastcaps.InvertedAttentionRouting(8, 4, 16, 16, kernel_size=3)
    children = torch.randn(2, 8, 5, 5, 16)
    parents = layer(children).detach()
    twin = copy.deepcopy(layer)
    layer(children, parents).sum().backward()
    torch.compile(twin, backend="aot_eager", fullgraph=True)(children, parents).sum().backward()
    torch.testing.assert_close(twin.weight.grad, layer.weight.grad)
    return "gradient equal to eager's"


def main() -> int:
    info = _C.build_info()
    print(f"fastcaps {info['version']} from {fastcaps.__file__}")
    print(
        f"built against torch {info['torch_version']} by {info['compiler']} for stable ABI {info['stable_abi_target']}"
    )
    print(f"running under torch {torch.__version__}, Python {platform.python_version()}, level {_C.capability()}")
    fastcaps.backends.show()
    done = [
        check(f"{case[0]}, {str(dtype).removeprefix('torch.')}", lambda case=case, dtype=dtype: numbers(case, dtype))
        for case in CASES
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    done.append(check("torch.compile", compiled))
    print(f"{sum(done)} of {len(done)} checks passed")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
