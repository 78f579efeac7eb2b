"""Routing to a fixed point: where it comes to rest, its gradient and memory, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_layers import draw
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fastcaps import RoutingStack, explain
from fastcaps.nn import CapsuleSpec, EquilibriumRouting, InvertedAttentionRouting

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 3, "padding": 1, "share": True, "bias": True},
        {"kernel_size": "all", "share": True, "start": "random"},
        {"layer_norm": False},
        {"matrices": False, "bias": True},
    ],
    ids=str,
)
def test_the_fixed_point_is_what_many_iterations_come_to(options: dict[str, Any]) -> None:
    endless = EquilibriumRouting(6, 5, 8, 8, pose=2, iterations=500, tolerance=1e-14, **options, **DOUBLE)
    plain = InvertedAttentionRouting(6, 5, 8, 8, pose=2, **options, **DOUBLE)
    with torch.no_grad():
        if endless.bias is not None:
            endless.bias.copy_(torch.linspace(-1, 1, endless.bias.numel(), **DOUBLE).view_as(endless.bias))
        if not endless.layer_norm:
            endless.weight.mul_(0.3)
    plain.load_state_dict(endless.state_dict())
    endless.scale = plain.scale = 0.2 * plain.scale  # so that parents come to rest soon
    grid = (5, 5) if "kernel_size" in options else ()
    children, gate = draw(2, 6, *grid, 8).requires_grad_(), torch.rand(2, 6, *grid, **DOUBLE).requires_grad_()
    found, shares = endless(children, gate, return_coefficients=True)
    wanted = plain(children, None, gate, iterations=300)
    torch.testing.assert_close(wanted, plain(children, None, gate, iterations=301), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(shares, plain(children, wanted, gate, return_coefficients=True)[1])
    head = torch.randn_like(found)
    got = torch.autograd.grad((found * head).sum(), (children, gate, *endless.parameters()))
    unrolled = torch.autograd.grad((wanted * head).sum(), (children, gate, *plain.parameters()))
    torch.testing.assert_close(got, unrolled, rtol=1e-8, atol=1e-9)


def kept(layer: Any, children: torch.Tensor, iterations: int) -> int:
    """How many numbers autograd keeps of a call."""
    sizes = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        assert layer(children, iterations=iterations).requires_grad
    return sum(sizes.values())


def test_memory_does_not_depend_on_iterations() -> None:
    children = torch.randn(3, 20, 16, requires_grad=True)
    endless = EquilibriumRouting(20, 5, 16, 16, tolerance=0.0)
    sizes = {kept(endless, children, iterations) for iterations in (3, 20, 40)}
    assert len(sizes) == 1 and sizes.pop() > 0
    plain = InvertedAttentionRouting(20, 5, 16, 16)
    assert kept(plain, children, 40) > kept(plain, children, 20)


def test_it_stops_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, children = EquilibriumRouting(20, 5, 16, 16, iterations=500, tolerance=1e-3), torch.randn(3, 20, 16)
    counted, amax = [], torch.Tensor.amax
    monkeypatch.setattr(torch.Tensor, "amax", lambda *arguments: counted.append(1) or amax(*arguments))
    layer(children).sum().backward()
    assert 4 <= len(counted) < 200


def test_stacks_and_explanation() -> None:
    layer, children = EquilibriumRouting(6, 5, 16, 16), torch.randn(2, 6, 16)
    assert "attention_routing" in str(explain(layer, children))
    options = {"in_capsules": 2, "in_dim": 4, "size": (4, 4), "iterations": 3, "layer": EquilibriumRouting}
    stack = RoutingStack.build([CapsuleSpec(4, kernel_size=2), CapsuleSpec(3)], **options)
    grid = torch.randn(2, 2, 4, 4, 4)
    torch.testing.assert_close(stack(grid), stack[1](stack[0](grid)))


def test_checkpoints_and_what_is_refused_by_name() -> None:
    layer, children = EquilibriumRouting(8, 3, 4, 4), torch.randn(2, 8, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(children).sum(), children)
    (found,) = torch.autograd.grad(checkpoint(layer, children, use_reentrant=False).sum(), children)
    torch.testing.assert_close(found, wanted)
    children = children.detach()
    runs = [torch.func.grad(lambda x: layer(x).sum()), torch.func.jacrev(layer), torch.func.jacfwd(layer)]
    for run in (*runs, lambda x: torch.func.vmap(layer)(x[None])):
        with pytest.raises(RuntimeError, match=r"fastcaps\.EquilibriumRouting does not support torch\.func"):
            run(children)
    torch.distributed.init_process_group("fake", rank=0, world_size=1)
    try:
        spread = distribute_tensor(children, init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(RuntimeError, match=r"fastcaps\.EquilibriumRouting has no gradients for DTensors"):
            layer(spread)
        with torch.no_grad():
            torch.testing.assert_close(layer(spread).full_tensor(), layer(children))
    finally:
        torch.distributed.destroy_process_group()


def test_parents_are_found_and_not_given() -> None:
    layer, children = EquilibriumRouting(4, 3, 4, 4), torch.ones(1, 4, 4)
    assert layer(children, iterations=1).shape == (1, 3, 4)
    with pytest.raises(TypeError, match="parents"):
        layer(children, parents=torch.ones(1, 3, 4))
