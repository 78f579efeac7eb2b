"""Every routing layer whose calls never wait for the device, on a GPU, against itself in float64 on the CPU; and
attention of shared matrices by products, which serve large calls there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import GPU_DTYPES, on_device
from features import number
from nn_layers import LAYERS, Row, draw_for
from registry import ATTENTION, Call
from torch import Tensor, nn

import fastcaps
from fastcaps import backends
from fastcaps.ops import folded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = [entry.name for entry in backends.listing()[:2] if entry.available]
every_layer = pytest.mark.parametrize(
    ("row", "options"),
    [
        pytest.param(row, options, id=f"{row}-{name}")
        for row in LAYERS
        for name, options in ({"": {}} | row.variants).items()
    ],
)


def step(layer: nn.Module, children: Tensor) -> dict[str, Tensor]:
    """Return the parents of a training step, and its gradients."""
    leaf = children.clone().requires_grad_()
    found = layer(leaf)
    results = found if isinstance(found, tuple) else (found,)
    number([result.cpu() for result in results]).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"children": leaf.grad}
    return {"parents": results[0].detach(), **gradients}


def parents_of(found: Any) -> Tensor:
    """Return the first result of a layer."""
    parents: Tensor = found[0] if isinstance(found, tuple) else found
    return parents


def hold(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in found.items():
        apart = (value.double().cpu() - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-12)
        assert apart < 0.02, (name, float(apart))  # float32 itself is 0.006 off in the gradient of learned first poses


def drawn(row: Row, options: dict[str, Any]) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """Return a layer and children on the GPU, in float32, and the float64 results of the same on the CPU."""
    layer = row.make("grid", **options)
    children = draw_for(layer)[0]
    return copy.deepcopy(layer).float().cuda(), children.float().cuda(), step(layer, children)


@every_layer
@pytest.mark.parametrize("backend", KERNELS)
def test_a_training_step(row: Row, options: dict[str, Any], backend: str) -> None:
    """On a stream of its own."""
    layer, children, wanted = drawn(row, options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), fastcaps.backend(backend):
        found = step(layer, children)
    torch.cuda.synchronize()
    hold(found, wanted)


@every_layer
@pytest.mark.parametrize("backend", KERNELS)
def test_a_cuda_graph(row: Row, options: dict[str, Any], backend: str) -> None:
    """No call waits for the device, and none copies from the CPU."""
    layer, children, wanted = drawn(row, options)
    with torch.no_grad(), fastcaps.backend(backend):
        layer(children)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(children)
        parents = parents_of(found)
        parents.zero_()
        graph.replay()
    hold({"parents": parents}, wanted)


@every_layer
@pytest.mark.parametrize("backend", KERNELS)
def test_two_streams_at_once(row: Row, options: dict[str, Any], backend: str) -> None:
    """Calls that run at the same time share no memory."""
    layer, children, _ = drawn(row, options)
    streams = [(torch.cuda.Stream(), one) for one in (children, -2 * children)]
    with torch.no_grad(), fastcaps.backend(backend):
        alone = [parents_of(layer(one)).double().cpu() for _, one in streams]
        found: list[list[Tensor]] = [[], []]
        for _ in range(4):
            for (stream, one), kept in zip(streams, found, strict=True):
                with torch.cuda.stream(stream):
                    kept.append(parents_of(layer(one)))
    torch.cuda.synchronize()
    for results, wanted in zip(found, alone, strict=True):
        for parents in results:
            hold({"parents": parents}, {"parents": wanted})


@pytest.mark.slow
@every_layer
def test_inductor(row: Row, options: dict[str, Any]) -> None:
    layer, children, wanted = drawn(row, options)
    torch._dynamo.reset()
    compiled = torch.compile(layer)
    found = step(compiled, children)
    hold({name.removeprefix("_orig_mod."): value for name, value in found.items()}, wanted)


@pytest.mark.parametrize(("block", "fuses"), [(300, False), (folded._BLOCK, False), (folded._BLOCK, True)])
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["folded-4x4", "folded-sharing-1x8", "folded-by-type", "broken-shared"])
def test_products_of_shared_matrices(
    name: str, dtype: torch.dtype, block: int, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, every gradient, and the same results in a CUDA graph; with the kernel between them, and without."""
    monkeypatch.setattr(folded, "serves", folded.takes)
    monkeypatch.setattr(folded, "_BLOCK", block)
    monkeypatch.setattr(folded, "fuses", lambda votes: fuses)
    case = replace(ATTENTION.case(name), dtype=dtype)
    call = ATTENTION.call(case)
    moved = call.having([on_device(tensor, "cuda") for tensor in call.tensors])
    found = moved.training(Call.by_op)
    ATTENTION.bar(case).hold({name: result.cpu() for name, result in found.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        again = moved.by_op()
    again["sums"].zero_()
    graph.replay()
    torch.testing.assert_close(again["sums"], found["sums"])
