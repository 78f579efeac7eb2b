"""What native kernels owe beyond right numbers, in the pooling pass, the Gaussian pass and whole routings.

The same bits on any number of threads, right numbers on every instruction set, memory that does not grow with votes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import native_only
from torch import Tensor

from fastcaps import backends, functional, reference
from fastcaps.functional import Window

ROOT = Path(__file__).resolve().parents[1]
LEVELS = ("default", "avx2", "avx512")
SHAPES = {
    # batch, grid, types, parents, (C, D, E), groups, window: lanes are positions, children, children of one type
    "positions": (16, (1, 1), 60, 10, (1, 8, 16), 60, None),
    "children": (2, (1, 1), 70, 9, (4, 4, 4), 70, None),
    "sharing": (1, (1, 1), 500, 30, (1, 16, 16), 1, None),
    "sharing-by-type": (2, (6, 6), 3, 20, (1, 8, 16), 3, Window(6)),
    "grid": (2, (5, 6), 4, 8, (4, 4, 4), 36, Window(3, 2, 1)),
    "few-numbers": (20, (1, 1), 40, 7, (1, 64, 2), 1, None),
}


def arguments(shape: tuple[Any, ...], dtype: torch.dtype) -> dict[str, Tensor | Window | None]:
    """Return children, weight, gates and what each routing has besides, in public layout."""
    batch, grid, types, parents, (rows, depth, columns), groups, window = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    place = (types,) if window is None else (types, *grid)
    return {
        "children": draw(batch, *place, rows, depth),
        "weight": draw(groups, parents, depth, columns) * depth**-0.5,
        "scores": draw(batch, *place),
        "betas": draw(2, parents),
        "window": window,
    }


def dynamic(given: dict[str, Any]) -> tuple[Tensor, ...]:
    return (functional.dynamic_routing(given["children"], given["weight"], window=given["window"]),)


def dynamic_children(given: dict[str, Any]) -> tuple[Tensor, ...]:
    routed = functional.dynamic_routing(given["children"], given["weight"], compete="children", window=given["window"])
    return (routed,)


def em(given: dict[str, Any]) -> tuple[Tensor, ...]:
    activations = given["scores"].sigmoid()
    return functional.em_routing(
        given["children"], activations, given["weight"], *given["betas"], window=given["window"]
    )[:2]


def heinsen(given: dict[str, Any]) -> tuple[Tensor, ...]:
    uses, ignores = given["betas"][:, None]
    flat = given["children"].flatten(1, -3), given["scores"].flatten(1)
    weight = given["weight"][:1] if given["window"] is not None else given["weight"]
    return functional.heinsen_routing(*flat, weight, None, uses, ignores)[:3]


ROUTINGS: dict[str, Callable[[dict[str, Any]], tuple[Tensor, ...]]] = {
    "dynamic": dynamic,
    "dynamic-children": dynamic_children,
    "em": em,
    "heinsen": heinsen,
}


def step(name: str, shape: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the results of a routing and its gradients to everything it is given."""
    given = arguments(SHAPES[shape], dtype)
    leaves = [value.requires_grad_() for value in given.values() if isinstance(value, Tensor)]
    results = ROUTINGS[name](given)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(dtype) for r in results]
    gradients = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    return [*(r.detach() for r in results), *(g for g in gradients if g is not None)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@native_only
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_same_bits_for_any_number_of_threads(name: str, shape: str) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(step(name, shape, torch.float32))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def deviations() -> Iterator[tuple[str, float]]:
    """Yield how far every routing and shape is from the reference in float64, relative to its largest number."""
    for name in ROUTINGS:
        for shape in SHAPES:
            found = step(name, shape, torch.float32)
            with backends.backend("reference"):
                exact = step(name, shape, torch.float64)
            for one, other in zip(found, exact, strict=True):
                scale = other.abs().max().clamp_min(1e-3)
                yield f"{name} {shape}", ((one.double() - other).abs().max() / scale).item()


@native_only
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_computes_the_same(level: str) -> None:
    environment = {**os.environ, "FASTCAPS_CPU_CAPABILITY": level}
    script = """
import sys
sys.path.insert(0, "tests")
from fastcaps import backends
print(backends.native_capability())
if backends.native_capability() is not None:
    import test_routings_native as here
    wrong = [(name, error) for name, error in here.deviations() if not error < 2e-4]
    assert not wrong, wrong
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout.strip() == "None":
        pytest.skip(f"{level} is not built, or this processor does not have it")
    assert done.stdout.strip() == level


MEASURE = """
import torch
from fastcaps import functional

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

def run(many, parents):
    children = torch.randn(1, many, 1, 16, requires_grad=True)
    weight = torch.randn(1, parents, 16, 16).mul_(0.25).requires_grad_()
    scores = torch.randn(1, many, requires_grad=True)
    uses, ignores = torch.randn(1, parents), torch.randn(1, parents)
    inputs = children, weight, scores
    torch.ones(1).add_(1)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status("VmRSS")
    found = functional.heinsen_routing(children, scores, weight, None, uses, ignores, iterations=2)[:3]
    gradients = torch.autograd.grad(found, inputs, [torch.ones_like(x) for x in found])
    kept = sum(t.numel() * t.element_size() for t in (*found, *gradients)) / 2**20
    return status("VmHWM") - before - kept

run(100, 3)  # libraries, thread pools, code that is read on first use
print(run({many}, {parents}))
"""


@native_only
@pytest.mark.unpoisoned
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory cannot be reset on this system")
@pytest.mark.parametrize(("many", "parents"), [(200_000, 32), (1000, 10_000)], ids=["children", "parents"])
def test_a_step_does_not_grow_with_the_votes(many: int, parents: int) -> None:
    """Votes would be 390 and 610 MB; a step may keep some copies of children and parents."""
    script = MEASURE.format(many=many, parents=parents)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    inputs = 4 * 16 * (many + 16 * parents) / 2**20
    assert float(done.stdout) <= 3 * inputs + 64, f"grew by {float(done.stdout):.0f} MB"


@native_only
def test_variances_of_votes_far_from_zero_and_of_tight_clusters() -> None:
    """Votes at 1e4 with a spread of 1, and one cluster 1e-3 wide a spread of 1 away: float32 agrees to 1e-3."""
    generator = torch.Generator().manual_seed(0)
    children = torch.randn(3, 1, 1, 600, 1, 4, generator=generator, dtype=torch.float64)
    children[:, :, :, 300:] = 0.7 + 1e-3 * children[:, :, :, 300:]
    weight = torch.eye(4, dtype=torch.float64).expand(1, 2, 4, 4)
    mean = torch.tensor([0.0, 0.7], dtype=torch.float64).view(1, 1, 1, 2, 1, 1).expand(3, 1, 1, 2, 1, 4)
    variance = torch.tensor([1.0, 1e-6], dtype=torch.float64).view(1, 1, 1, 2, 1, 1).expand(3, 1, 1, 2, 1, 4)
    log_weight = -0.5 * variance.log().sum((-2, -1))
    for shift in (0.0, 1e4):
        # float32 has 1e4 + x to 5e-4 only: the wide cluster alone is asked for there
        bias = torch.full((1, 1, 1, 4), shift, dtype=torch.float64)
        first = (children, weight, None, None, None, bias, None, None, None)
        later = (children, weight, mean + shift, variance, log_weight, bias, None, None, None)
        for tensors, parents in ((first, (0, 1)), (later, (0, 1) if shift == 0 else ())):
            exact = reference.gaussian.gaussian_pass(*tensors, 0.0, [1, 1, 1, 1, 0, 0, 1, 1])[2]
            single = [None if t is None else t.float() for t in tensors]
            found = torch.ops.fastcaps.gaussian_pass(*single, 0.0, [1, 1, 1, 1, 0, 0, 1, 1])[2].double()
            for m in parents:
                torch.testing.assert_close(found[:, :, :, m], exact[:, :, :, m], rtol=1e-3, atol=0)
