"""What PyTorch does with modules: each of ours compiled whole, exported, copied, under autocast, of odd batches."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from nn_layers import LAYERS, Row, draw_for, gradients
from torch import Tensor, nn

from fastcaps import CapsNet, ClassHead, PrimaryCapsules, RoutingPool2d, RoutingStack, compat
from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting
from fastcaps.compat.ml_capsules import CapsuleCONV, CapsuleFC
from fastcaps.nn import CapsuleSpec, EMRouting

pytestmark = pytest.mark.usefixtures("one_thread")
Made = tuple[nn.Module, tuple[Tensor, ...]]


def of_layer(row: Row) -> Made:
    """A routing layer, and all that it takes."""
    layer = row.make("grid")
    children, numbers = draw_for(layer)
    parents = (layer(children).detach(),) if layer.takes_parents else ()
    return layer, (children, *parents, numbers)


def of(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Made:
    """A module in float64 as it runs after training, every parameter random, and tensors of these shapes."""
    torch.manual_seed(0)
    module = make().double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    return module, tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def stack() -> nn.Module:
    specs = [CapsuleSpec(4, kernel_size=2, stride=2), CapsuleSpec(3, layer=EMRouting), CapsuleSpec(5)]
    return RoutingStack.build(specs, in_capsules=2, in_dim=4, size=(5, 6), iterations=3)


def network() -> nn.Module:
    sizes = {"in_channels": 1, "image_size": 8, "capsules": 4, "dim": 4, "classes": 3}
    options: dict[str, Any] = {"hidden": [CapsuleSpec(4, kernel_size=3)], "decoder": (8,), **sizes}
    return CapsNet.build(nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU()), **options)


MODULES: dict[str, Callable[[], Made]] = {
    **{row.name: partial(of_layer, row) for row in LAYERS},
    "stack": lambda: of(stack, (2, 2, 5, 6, 4)),
    "primary": lambda: of(lambda: PrimaryCapsules(5, 3, 4, kernel_size=3, activations=True), (2, 5, 6, 7)),
    "head": lambda: of(lambda: ClassHead(4), (2, 5, 4), (2, 5)),
    "pool-2d": lambda: of(lambda: RoutingPool2d(3, sharpness=5.0, activation="squash"), (2, 6, 5, 4)),
    "pool-several": lambda: of(lambda: RoutingPool2d(3, parents=4, in_channels=6, kernel_size=2), (2, 6, 5, 4)),
    "tsai-fc": lambda: of(lambda: CapsuleFC(12, 9, 5, 9, True, 0.0), (2, 12, 9)),
    "tsai-conv": lambda: of(lambda: CapsuleCONV(3, 4, 5, 4, 3, 2, True, 0.0), (2, 3, 7, 5, 4)),
    "guo": lambda: of(lambda: compat.DenseCapsule(6, 3, 4, 5), (2, 6, 3)),
    "heinsen-matrix": lambda: of(lambda: GenerativeMatrixRouting(6, 3, 2, 3, 4), (2, 6), (2, 6, 2, 3)),
    "network": lambda: of(network, (2, 1, 8, 8)),
}
TRACED = [name for name in MODULES if name not in ("attention", "dynamic", "em", "pool")]
every = pytest.mark.parametrize("name", MODULES)
traced = pytest.mark.parametrize("name", TRACED)


def call(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The parts of what a module returns; the twins of Tsai's layers take a number besides."""
    more = (0,) if isinstance(module, (CapsuleFC, CapsuleCONV)) else ()
    found = module(*given, *more)
    return tuple(found) if isinstance(found, tuple) else (found,)


@traced  # the layers left out are traced in test_torch_compile.py
def test_compiled_whole(name: str) -> None:
    torch._dynamo.reset()
    module, given = MODULES[name]()
    compiled = torch.compile(partial(call, module), fullgraph=True, backend="aot_eager")
    leaves = [given[0].requires_grad_(), *module.parameters()]
    found, wanted = compiled(given), call(module, given)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradients(found, leaves), gradients(wanted, leaves))


@traced
def test_exported_with_a_dynamic_batch(name: str) -> None:
    module, given = MODULES[name]()
    if isinstance(module, (CapsuleFC, CapsuleCONV)):
        given = (*given, 0)  # type: ignore[assignment]
    batch = {0: torch.export.Dim("batch", max=64)}
    shapes = tuple(batch if isinstance(value, Tensor) else None for value in given)
    saved = io.BytesIO()
    torch.export.save(torch.export.export(module, given, dynamic_shapes=shapes), saved)
    saved.seek(0)
    more = [torch.cat([value] * 3) if isinstance(value, Tensor) else value for value in given]
    torch.testing.assert_close(torch.export.load(saved).module()(*more), module(*more))


@every
def test_state_copies_and_pickles(name: str) -> None:
    module, given = MODULES[name]()
    other, _ = MODULES[name]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved))
    for copied in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(map(torch.equal, call(copied, given), call(module, given))) and repr(copied) == repr(module)
        assert not {*map(id, copied.parameters())} & {*map(id, module.parameters())}


@every
def test_bfloat16_autocast(name: str) -> None:
    module, given = MODULES[name]()
    module, given = module.float(), tuple(tensor.float() for tensor in given)
    exact = call(module, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(module, (given[0].requires_grad_(), *given[1:]))
    for got, want in zip(found, exact, strict=True):
        assert (got.float() - want).abs().mean() < 0.1 * want.abs().mean() + 0.02
    leaves = [given[0], *module.parameters()]
    for gradient, leaf in zip(gradients(found, leaves), leaves, strict=True):
        assert gradient.dtype == leaf.dtype == torch.float32 and gradient.isfinite().all()


@every
def test_odd_batches_and_strides(name: str) -> None:
    module, given = MODULES[name]()
    wanted = call(module, given)
    wide = tuple(tensor.repeat_interleave(2, -1)[..., ::2] for tensor in given)
    torch.testing.assert_close(call(module, wide), wanted)
    torch.testing.assert_close(call(module, tuple(t[:1] for t in given)), tuple(part[:1] for part in wanted))
    spread = call(module, tuple(tensor[:1].expand_as(tensor) for tensor in given))
    torch.testing.assert_close(spread, tuple(part[:1].expand_as(part) for part in wanted))
    empty = [tensor[:0] for tensor in given]
    results = call(module, (empty[0].requires_grad_(), *empty[1:]))
    assert [part.shape for part in results] == [(0, *want.shape[1:]) for want in wanted]
    for gradient in gradients(results, [empty[0], *module.parameters()]):
        assert not gradient.any()
