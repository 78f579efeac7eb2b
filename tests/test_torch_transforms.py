"""torch.func, forward mode, second derivatives and checkpoints: as of the plain formulas, or refused by name.

A call that cannot be transformed must say so in words of ours: what the feature is, and that fastcaps has it not. It
must never return zeros, nor the error of some machinery within torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from features import ROUTINGS, WINDOWS, Leaves, Routing, close, number
from torch import Tensor, func
from torch.utils.checkpoint import checkpoint

import fastcaps
from fastcaps import Window

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
every_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


def right_or_refused(feature: str, ours: Callable[[], Any], plain: Callable[[], Any]) -> None:
    """Assert that a computation equals that of the formulas, or raises an error that names us and the feature."""
    wanted = plain()
    try:
        found = ours()
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        assert "fastcaps" in text and feature in text, f"the refusal does not name {feature}: {text}"
        return
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def tangents(given: Leaves) -> Leaves:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(t.shape, generator=draw, dtype=t.dtype) for name, t in given.items()}


def of(call: Callable[..., Leaves], window: Window | None) -> Callable[[Leaves], Leaves]:
    return lambda given: call(given, window)


def one_number(call: Callable[..., Leaves], window: Window | None, rest: Leaves) -> Callable[[Leaves], Tensor]:
    """Return a loss of some tensors, the others being fixed."""
    return lambda given: number(call({**rest, **given}, window))


@every_window
@every_routing
def test_jvp(window: Window | None, routing: Routing) -> None:
    given = routing.tensors(window)
    direction = tangents(given)
    ours, plain = of(routing.ours, window), of(routing.plain, window)
    right_or_refused(
        "forward-mode",
        lambda: func.jvp(ours, (given,), (direction,)),
        lambda: func.jvp(plain, (given,), (direction,)),
    )


@every_routing
@pytest.mark.parametrize("name", ["children", "weight", "gate"])
def test_dual_numbers(name: str, routing: Routing) -> None:
    given = routing.tensors()
    if name not in given:
        pytest.skip(f"{routing} has no {name}")
    direction = tangents(given)[name]

    def derivative(call: Callable[..., Leaves]) -> Leaves:
        with forward_ad.dual_level():
            found = call({**given, name: forward_ad.make_dual(given[name], direction)})
            pairs = {key: forward_ad.unpack_dual(value) for key, value in found.items()}
            none = {key: torch.zeros_like(pair.primal) for key, pair in pairs.items()}  # of what does not depend on it
            return {key: none[key] if pair.tangent is None else pair.tangent.clone() for key, pair in pairs.items()}

    right_or_refused("forward-mode", lambda: derivative(routing.ours), lambda: derivative(routing.plain))


@every_routing
def test_jacobian_in_forward_mode(routing: Routing) -> None:
    given = routing.tensors(batch=1)
    rest = {name: given[name] for name in given if name != "children"}

    def jacobian(call: Callable[..., Leaves]) -> Leaves:
        return func.jacfwd(lambda children: call({"children": children, **rest}))(given["children"])

    right_or_refused("forward-mode", lambda: jacobian(routing.ours), lambda: jacobian(routing.plain))


@every_window
@every_routing
def test_gradients(window: Window | None, routing: Routing) -> None:
    given = routing.tensors(window)
    ours, plain = (func.grad(one_number(call, window, {})) for call in (routing.ours, routing.plain))
    right_or_refused("torch.func.grad", lambda: ours(given), lambda: plain(given))


@every_routing
def test_vjp(routing: Routing) -> None:
    given = routing.tensors()

    def pulled_back(call: Callable[..., Leaves]) -> Leaves:
        found, back = func.vjp(call, given)
        return back(tangents(found))[0]

    right_or_refused("torch.func", lambda: pulled_back(routing.ours), lambda: pulled_back(routing.plain))


@every_routing
def test_jacobian_in_reverse_mode(routing: Routing) -> None:
    given = routing.tensors(batch=1)

    def jacobian(call: Callable[..., Leaves]) -> Leaves:
        return func.jacrev(lambda changed: call({**given, "children": changed}))(given["children"])

    right_or_refused("vmap", lambda: jacobian(routing.ours), lambda: jacobian(routing.plain))


@every_routing
def test_hessian(routing: Routing) -> None:
    given = routing.tensors(batch=1)
    children = given.pop("children")

    def hessian(call: Callable[..., Leaves]) -> Tensor:
        return func.hessian(lambda changed: number(call({"children": changed, **given})))(children)

    right_or_refused("forward-mode", lambda: hessian(routing.ours), lambda: hessian(routing.plain))


@every_window
@every_routing
def test_vmap_over_children(window: Window | None, routing: Routing) -> None:
    given = routing.tensors(window)
    many = torch.stack([given.pop("children"), 0.5 * routing.tensors(window)["children"]])

    def mapped(call: Callable[..., Leaves]) -> Leaves:
        return func.vmap(lambda children: call({"children": children, **given}, window))(many)

    def one_by_one() -> Leaves:
        found = [routing.plain({"children": children, **given}, window) for children in many]
        return {name: torch.stack([results[name] for results in found]) for name in found[0]}

    right_or_refused("vmap", lambda: mapped(routing.ours), one_by_one)


@every_routing
def test_vmap_over_parameters(routing: Routing) -> None:
    """An ensemble: the same children, several sets of all other tensors; the result's new dimension is the last."""
    given = routing.tensors()
    children = given.pop("children")
    many = {name: torch.stack([tensor, tensor.flip(0), 0.3 * tensor]) for name, tensor in given.items()}

    def mapped() -> Leaves:
        return func.vmap(lambda rest: routing.ours({"children": children, **rest}), out_dims=-1)(many)

    def one_by_one() -> Leaves:
        alone = [{name: tensor[k] for name, tensor in many.items()} for k in range(3)]
        found = [routing.plain({"children": children, **rest}) for rest in alone]
        return {name: torch.stack([results[name] for results in found], -1) for name in found[0]}

    right_or_refused("vmap", mapped, one_by_one)


@every_routing
def test_gradients_of_every_sample(routing: Routing) -> None:
    """vmap(grad): what differential privacy and influence functions ask for."""
    given = routing.tensors()
    sampled = {name: tensor for name, tensor in given.items() if name in ("children", "gate", "parents")}
    shared = {name: tensor for name, tensor in given.items() if name not in sampled} or {
        "children": given["children"][0]
    }
    sampled = {name: tensor for name, tensor in sampled.items() if name not in shared}

    def gradient(call: Callable[..., Leaves]) -> Callable[[Leaves, Leaves], Leaves]:
        def loss(parameters: Leaves, sample: Leaves) -> Tensor:
            batch = {name: tensor[None] for name, tensor in sample.items()}
            alone = {name: t[None] if name == "children" else t for name, t in parameters.items()}
            return number(call({**alone, **batch}))

        return func.grad(loss)

    def one_by_one() -> Leaves:
        each = [gradient(routing.plain)(shared, {k: t[b] for k, t in sampled.items()}) for b in range(3)]
        return {name: torch.stack([sample[name] for sample in each]) for name in each[0]}

    right_or_refused("vmap", lambda: func.vmap(gradient(routing.ours), (None, 0))(shared, sampled), one_by_one)


@every_window
@every_routing
def test_second_derivatives(window: Window | None, routing: Routing) -> None:
    """Reverse over reverse, of all tensors at once, against the formulas: a gradient penalty."""
    given = routing.tensors(window)

    def penalty(call: Callable[..., Leaves]) -> Leaves:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        values = list(leaves.values())
        first = torch.autograd.grad(
            number(call(leaves, window)), values, create_graph=True, allow_unused=True, materialize_grads=True
        )
        total = number(dict(zip(leaves, first, strict=True)))
        second = torch.autograd.grad(total, values, allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, second, strict=True))

    right_or_refused("second derivative", lambda: penalty(routing.ours), lambda: penalty(routing.plain))


@every_routing
def test_second_derivatives_by_differences(routing: Routing) -> None:
    given = {
        name: tensor[:1] if name in ("children", "gate", "parents") else tensor
        for name, tensor in routing.tensors().items()
    }
    children = given.pop("children").requires_grad_()
    if "detach" in routing.name:  # their gradient is not that of the function: constants stay constants
        pytest.skip("coefficients are constants to the gradient, but not to differences")
    call = lambda poses: tuple(routing.ours({"children": poses, **given}).values())  # noqa: E731
    assert torch.autograd.gradcheck(call, (children,), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (children,), fast_mode=True)


@every_window
@every_routing
def test_checkpoint_without_reentry(window: Window | None, routing: Routing) -> None:
    """Twice over the same graph too: ``retain_graph`` unpacks what was saved once more."""
    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors(window).items()}
    values = list(leaves.values())
    wanted = routing.plain(leaves, window)
    expected = torch.autograd.grad(number(wanted), values, allow_unused=True)
    found = checkpoint(lambda given: routing.ours(given, window), leaves, use_reentrant=False)
    close(found, wanted)
    for keep in (True, False):
        gradients = torch.autograd.grad(number(found), values, retain_graph=keep, allow_unused=True)
        for got, want in zip(gradients, expected, strict=True):
            got, want = (torch.zeros(()) if t is None else t for t in (got, want))
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, check_dtype=False)


@every_routing
def test_saved_tensor_hooks_see_each_tensor_once(routing: Routing) -> None:
    """What checkpoints, offloading to the CPU and ``save_on_cpu`` rest on: each packed tensor is unpacked once."""
    unpacked: list[int] = []
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    def unpack(place: int) -> Tensor:
        unpacked.append(place)
        return packed[place]

    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors().items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = number(routing.ours(leaves))
    loss.backward()
    assert len(unpacked) == len(set(unpacked))


def test_an_ensemble_of_primary_capsules() -> None:
    """The recipe of torch.func for several models at once: their parameters stacked, and vmap over them."""
    models = [fastcaps.PrimaryCapsules(3, 4, 8, kernel_size=3, activations=True) for _ in range(3)]
    features = torch.randn(2, 3, 6, 5)

    def run(state: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Any:
        return func.functional_call(models[0], state, (features,))

    for found, wanted in zip(
        func.vmap(run)(func.stack_module_state(models)), zip(*(m(features) for m in models), strict=True), strict=True
    ):
        torch.testing.assert_close(found, torch.stack(wanted))
