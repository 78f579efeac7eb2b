"""``fastcaps.explain`` says what would run, of any call in its own settings, and touches nothing."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from features import FUNCTIONS, ROUTINGS, WINDOWS, Routing
from suite import native_only
from torch import Tensor, nn

import fastcaps
from fastcaps import Window, backend, backends, explain, functional

RUNS = "cpu" if backends.listing()[2].available else "reference"


class Network(nn.Module):
    """What an explanation could disturb: statistics, random numbers, counts, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.5))
        self.grid = fastcaps.InvertedAttentionRouting(4, 3, 4, 4, kernel_size=2, dropout=0.3)
        self.set = fastcaps.InvertedAttentionRouting(27, 5, 4, 4)
        self.calls = 0

    def forward(self, images: Tensor, gate: Tensor | None = None) -> Tensor:
        self.calls += 1
        maps = self.features(images)
        capsules = maps.unflatten(1, (4, 4)).movedim(2, -1)
        hidden = self.grid(capsules, activations=gate)
        return self.set(hidden, iterations=2).norm(dim=-1)


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 1, 6, 6)


def told_of(*arguments: Any, **options: Any) -> tuple[fastcaps.Explanation, ...]:
    found = explain(*arguments, **options)
    return (found,) if isinstance(found, functional.Explanation) else tuple(found)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_module_changes(training: bool) -> None:
    network = Network().train(training)
    fired: list[str] = []
    for name, module in network.named_modules():
        module.register_forward_hook(lambda *_, name=name: fired.append(name))
        module.register_forward_pre_hook(lambda *_, name=name: fired.append(name))
    before = copy.deepcopy(network.state_dict())
    versions = [tensor._version for tensor in (*network.parameters(), *network.buffers())]
    hooks = [len(module._forward_hooks) for module in network.modules()]
    given = images()
    state = torch.get_rng_state()
    assert len(told_of(network, given)) >= 2
    assert not fired and network.calls == 0
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    assert [tensor._version for tensor in (*network.parameters(), *network.buffers())] == versions
    assert [len(module._forward_hooks) for module in network.modules()] == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert network.training == training
    assert given._version == 0 and torch.is_grad_enabled()
    network(given)
    assert fired, "the hooks work as before"


@pytest.mark.parametrize("how", ["wrapped", "in place", "inside"])
def test_what_is_compiled_is_explained_as_it_was_written(how: str) -> None:
    """Compiled code would read the memory of tensors that have none."""
    network = Network().eval()
    wanted = [one.call for one in told_of(network, images())]
    if how == "wrapped":
        network = torch.compile(network, backend="eager")  # type: ignore[assignment]
    elif how == "in place":
        network.compile(backend="eager")
    else:
        network.set = torch.compile(network.set, backend="eager")  # type: ignore[assignment]
    assert [one.call for one in told_of(network, images())] == wanted
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_module_with_operators_of_higher_order() -> None:
    def call(children: Tensor) -> Tensor:
        children = torch.cond(torch.tensor(True), lambda x: 2 * x, lambda x: x + 1, (children,))
        return functional.dynamic_routing(children, torch.ones(3, 2, 4, 4))

    assert explain(call, torch.randn(2, 3, 1, 4)).backend == RUNS


def test_nothing_is_computed() -> None:
    """A terabyte of votes takes no time and no memory."""
    children = torch.zeros(()).expand(256, 1 << 20, 4, 4)
    weight = torch.zeros(()).expand(1 << 20, 64, 4, 4)
    parents = torch.zeros(()).expand(256, 64, 4, 4)
    (explained,) = told_of(children, weight, parents)
    assert explained.backend == RUNS and "1048576 children" in explained.call


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("routing", [row for row in ROUTINGS if row.ops or row.library], ids=str)
def test_every_function_in_its_settings(routing: Routing, window: Window | None) -> None:
    """An explanation fits the call: sizes, window, kind; the uniform iteration is the library's."""
    routing_calls: list[Any] = []

    def call(given: Any) -> Any:
        routing_calls.append(1)
        return routing.ours(given, window)

    explained = told_of(call, routing.tensors(window, torch.float32))
    assert len(routing_calls) == 1 and explained
    assert [one.backend for one in explained] == ["torch"] * routing.library + [RUNS] * routing.ops
    for one in explained:
        assert ("by 2x3 windows" in one.call) == (window is not None)
        assert "float32 on cpu" in one.call and "batch 3" in one.call
        if one.backend == "cpu":
            assert one.forward and one.backward


@native_only
def test_products_of_votes_without_matrices() -> None:
    """Where they are faster than the kernels: in the backward, and forward where children are many and poses long."""
    large, small = torch.randn(64, 1024, 1, 128), torch.randn(256, 50, 1, 64)
    for options in ({}, {"prior": torch.randn(1, 24)}):
        explained = explain(functional.dynamic_routing, large, None, parents=24, **options)
        assert explained.backend == "torch" and "make no votes" in explained.how
    explained = explain(functional.dynamic_routing, small, None, parents=4)
    assert explained.backend == "cpu" and explained.backward.startswith("torch: ")
    with backend("cpu"):
        assert explain(functional.dynamic_routing, large, None, parents=24).backend == "cpu"


@pytest.mark.parametrize("routing", FUNCTIONS.values(), ids=str)
def test_a_forced_backend_that_cannot_take_the_call_is_part_of_the_answer(routing: Routing) -> None:
    given = routing.tensors(dtype=torch.float32)
    for name in ("cuda", "triton"):
        if backends.listing()[backends.NAMES.index(name)].available:
            continue
        with backend(name):
            (call,) = told_of(lambda leaves: routing.ours(leaves), given)
            with pytest.raises(fastcaps.BackendError):
                routing.ours(given)
        assert call.backend is None and call.reasons[name] and f"{name!r} is forced" in call.how
    with backend("reference"):
        (call,) = told_of(lambda leaves: routing.ours(leaves), given)
    # nobody asks why kernels of another device do not run
    on_cpu = {"cpu", *["triton"] * (os.environ.get("TRITON_INTERPRET") == "1")}
    assert call.backend == "reference" and call.how == "forced" and set(call.reasons) == on_cpu
    (call,) = told_of(lambda leaves: routing.ours(leaves), given)
    assert set(call.reasons) == {"reference", *on_cpu} - {RUNS}


def test_an_error_leaves_no_trace() -> None:
    network = Network()
    with pytest.raises((ValueError, RuntimeError)):
        explain(network, torch.randn(2, 1, 1, 1))
    expected = network.eval()(given := images())
    assert torch.equal(network(given), expected) and expected.abs().sum() > 0
    with pytest.raises(TypeError, match="Linear must be given with its inputs"):
        explain(nn.Linear(2, 2))


def test_a_module_whose_way_depends_on_numbers_says_so() -> None:
    class Choosing(Network):
        def forward(self, images: Tensor, gate: Tensor | None = None) -> Tensor:
            return super().forward(images if images.sum() > 0 else -images)

    with pytest.raises(ValueError, match="what Choosing does depends on the numbers in its tensors"):
        explain(Choosing(), images())
    with pytest.raises(ValueError, match="what <lambda> does depends on the numbers"):
        explain(lambda x: x[x > 0], torch.randn(3))  # a shape that depends on them


def test_a_reason_is_told_once() -> None:
    """Of all calls of a network, and of the verbs of a routing written here, whose equal calls share a line."""

    class Own(fastcaps.nn.RoutingLayer):
        def route(self, votes: fastcaps.Votes, activations: Tensor | None) -> Tensor:
            parents = votes.sum(1 / votes.parents)
            for _ in range(3):
                parents = votes.sum(votes.agreement(parents))
            return parents

    assert explain(Own(6, 3, 4, 4))[0].how.startswith("equal coefficients: one matrix product")
    for explained in (explain(Network(), images()), explain(Own(6, 3, 4, 4))):
        lines = str(explained).splitlines()
        heads = [line.partition("]")[0].strip("[").split(", ") for line in lines if line.startswith("[")]
        assert sorted(int(k) for head in heads for k in head) == [*range(len(explained))]
        assert len({(one.how, one.call, one.forward) for one in explained}) == len(heads)
        why_not = [line.partition(": ")[2] for line in lines if line.startswith("  not ")]
        reasons = {reason for one in explained for reason in one.reasons.values() if reason != one.how}
        assert reasons and sorted(why_not) == sorted(reasons)
