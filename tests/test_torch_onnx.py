"""ONNX export decomposes the ops to the reference's formulas: a free batch, no backend forced, right in onnxruntime."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from features import BY_NAME, Leaves, Routing
from torch import Tensor, nn
from torch.export import Dim

import fastcaps

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


class Network(nn.Module):
    """A routing function whose other tensors are its parameters."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        given = routing.tensors(dtype=torch.float32)
        self.inputs = [name for name in ("children", "gate", "parents") if name in given]
        self.rest = nn.ParameterDict({name: nn.Parameter(t) for name, t in given.items() if name not in self.inputs})

    def forward(self, *sampled: Tensor) -> tuple[Tensor, ...]:
        given: Leaves = dict(zip(self.inputs, sampled, strict=True)) | dict(self.rest.items())
        # EM with no variance near 0, where the last bit of float32 decides: another runtime has another last bit
        return tuple(self.routing.ours(given, **({"eps": 1e-2} if "beta_u" in given else {})).values())

    def draw(self, batch: int) -> tuple[Tensor, ...]:
        given = self.routing.tensors(dtype=torch.float32, batch=batch)
        return tuple(given[name] for name in self.inputs)


def exported(module: nn.Module, inputs: tuple[Tensor, ...], dims: Any, path: Any) -> Any:
    """Return a session that runs what was exported."""
    torch.onnx.export(module.eval(), inputs, path, dynamo=True, dynamic_shapes=dims, external_data=False)
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def results(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        found = module(*inputs)
    return (found,) if isinstance(found, Tensor) else tuple(found)


def check(session: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Assert that an exported program errs against float64 as little as float32 here does, and rounding."""
    exact = results(copy.deepcopy(module).double(), tuple(tensor.double() for tensor in inputs))
    ours = results(module, inputs)
    names = [given.name for given in session.get_inputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
    assert len(found) == len(exact)
    for got, here, want in zip(found, ours, exact, strict=True):
        limit = 8 * (here.double() - want).abs().max().item() + 1e-5 * (1 + want.abs().max().item())
        assert (torch.from_numpy(got).double() - want).abs().max().item() <= limit


ROWS = ["attention-1", "attention-3", "dynamic-parents", "dynamic-children", "dynamic-leaky", "pool-weights", "em"]


@pytest.mark.parametrize("routing", [BY_NAME[name] for name in (*ROWS, "heinsen-gaussian", "heinsen-kmeans")], ids=str)
def test_function_with_a_free_batch(routing: Routing, tmp_path: Any) -> None:
    network = Network(routing)
    batch = Dim("batch", min=1, max=64)
    inputs = network.draw(3)
    session = exported(network, inputs, ((*[{0: batch}] * len(inputs),),), tmp_path / "routing.onnx")
    for size in (1, 3, 8):
        check(session, network, network.draw(size))


LAYERS = {
    "attention-grid": (lambda: fastcaps.InvertedAttentionRouting(2, 3, 4, 4, kernel_size=3, stride=2), (2, 6, 5, 4)),
    "pool": (lambda: fastcaps.RoutingPool2d(4), (8, 5, 4)),
    "cap-conv": (lambda: fastcaps.CapConv2d(3, 1, 2, stride=2, skip=True), (3, 5, 4)),
    "pool-window": (lambda: fastcaps.RoutingPool2d(4, kernel_size=2), (8, 6, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_with_a_free_batch(layer: str, tmp_path: Any) -> None:
    make, shape = LAYERS[layer]
    module = make()
    dims = ({0: Dim("batch", min=1, max=64)},)
    session = exported(module, (torch.randn(3, *shape),), dims, tmp_path / "layer.onnx")
    for size in (1, 3, 8):
        check(session, module, (torch.randn(size, *shape),))


def test_em_over_a_whole_grid(tmp_path: Any) -> None:
    layer = fastcaps.EMRouting(2, 3, 4, 4, kernel_size="all", share=True, coordinates=True)
    batch = Dim("batch", min=1, max=64)
    inputs = torch.randn(3, 2, 4, 5, 4), torch.rand(3, 2, 4, 5)
    session = exported(layer, inputs, ({0: batch}, {0: batch}), tmp_path / "em.onnx")
    for size in (1, 7):
        check(session, layer, (torch.randn(size, 2, 4, 5, 4), torch.rand(size, 2, 4, 5)))
