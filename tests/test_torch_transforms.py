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
Call = Callable[[Leaves], Leaves]  # ours or the formulas, of tensors by name
SAMPLED = ("children", "gate", "parents")


def tangents(given: Leaves) -> Leaves:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(t.shape, generator=draw, dtype=t.dtype) for name, t in given.items()}


def of_children(call: Call, given: Leaves) -> tuple[Callable[[Tensor], Leaves], Tensor]:
    """Return the call as a function of one sample's children, the rest fixed, and those."""
    alone = {name: tensor[:1] if name in SAMPLED else tensor for name, tensor in given.items()}
    return lambda children: call({**alone, "children": children}), alone["children"]


def dual_numbers(call: Call, given: Leaves) -> list[Leaves]:
    results = []
    for name in ("children", "weight", "gate"):
        if name not in given:
            continue
        with forward_ad.dual_level():
            found = call({**given, name: forward_ad.make_dual(given[name], tangents(given)[name])})
            pairs = {key: forward_ad.unpack_dual(value) for key, value in found.items()}
            none = {key: torch.zeros_like(pair.primal) for key, pair in pairs.items()}  # of what does not depend on it
            results.append({k: none[k] if pair.tangent is None else pair.tangent.clone() for k, pair in pairs.items()})
    return results


def pulled_back(call: Call, given: Leaves) -> Leaves:
    found, back = func.vjp(call, given)
    return back(tangents(found))[0]


def jacobian(how: Callable[..., Any]) -> Callable[[Call, Leaves], Any]:
    def derivative(call: Call, given: Leaves) -> Any:
        run, children = of_children(call, given)
        return how(run)(children)

    return derivative


def hessian(call: Call, given: Leaves) -> Tensor:
    run, children = of_children(call, given)
    return func.hessian(lambda changed: number(run(changed)))(children)


def ensemble(*fixed: str) -> Callable[[Call, Leaves], Leaves]:
    """Several sets of all tensors but ``fixed``; the new dimension of the results is the last."""

    def mapped(call: Call, given: Leaves) -> Leaves:
        rest = {name: given[name] for name in fixed}
        many = {name: torch.stack([t, t.flip(0), 0.3 * t]) for name, t in given.items() if name not in fixed}
        return func.vmap(lambda changed: call({**rest, **changed}), out_dims=-1)(many)

    return mapped


def of_every_sample(call: Call, given: Leaves) -> Leaves:
    """vmap(grad): what differential privacy and influence functions ask for."""
    shared, sampled = ({k: t for k, t in given.items() if (k in SAMPLED) == is_sampled} for is_sampled in (False, True))

    def loss(parameters: Leaves, sample: Leaves) -> Tensor:
        return number(call({**parameters, **{name: tensor[None] for name, tensor in sample.items()}}))

    return func.vmap(func.grad(loss, argnums=(0, 1)), (None, 0))(shared, sampled)


def penalty(call: Call, given: Leaves) -> Leaves:
    """Reverse over reverse, of all tensors at once: a gradient penalty."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    values, options = list(leaves.values()), {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(number(call(leaves)), values, create_graph=True, **options)
    second = torch.autograd.grad(number(dict(zip(leaves, first, strict=True))), values, **options)
    return dict(zip(leaves, second, strict=True))


FEATURES: dict[str, tuple[str, Callable[[Call, Leaves], Any]]] = {  # what a refusal must name; the transformed call
    "jvp": ("forward-mode", lambda call, given: func.jvp(call, (given,), (tangents(given),))),
    "dual-numbers": ("forward-mode", dual_numbers),
    "jacfwd": ("forward-mode", jacobian(func.jacfwd)),
    "jacrev": ("vmap", jacobian(func.jacrev)),
    "hessian": ("forward-mode", hessian),
    "grad": ("torch.func.grad", lambda call, given: func.grad(lambda leaves: number(call(leaves)))(given)),
    "vjp": ("torch.func", pulled_back),
    "vmap-children": ("vmap", lambda call, given: ensemble(*[n for n in given if n != "children"])(call, given)),
    "vmap-parameters": ("vmap", ensemble("children")),
    "vmap-grad": ("vmap", of_every_sample),
    "penalty": ("second derivative", penalty),
}
ON_GRIDS = ("jvp", "grad", "vmap-children", "penalty")


@pytest.mark.parametrize(
    ("feature", "window"),
    [(name, WINDOWS["set"]) for name in FEATURES] + [(name, WINDOWS["grid"]) for name in ON_GRIDS],
    ids=lambda value: value if isinstance(value, str) else "set" if value is None else "grid",
)
@every_routing
def test_right_or_refused(routing: Routing, feature: str, window: Window | None) -> None:
    named, transformed = FEATURES[feature]
    given = routing.tensors(window)
    wanted = transformed(lambda leaves: routing.plain(leaves, window), given)
    try:
        found = transformed(lambda leaves: routing.ours(leaves, window), given)
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        assert "fastcaps" in text and named in text, f"the refusal does not name {named}: {text}"
        return
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if "detach" not in row.name], ids=str)
def test_second_derivatives_by_differences(routing: Routing) -> None:
    """Where coefficients are constants to the gradient, but not to differences, there is nothing to compare."""
    run, children = of_children(routing.ours, routing.tensors())
    call = lambda poses: tuple(run(poses).values())  # noqa: E731
    assert torch.autograd.gradcheck(call, (children.requires_grad_(),), fast_mode=True)
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
