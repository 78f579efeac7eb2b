"""What PyTorch does with every routing function: torch.func, derivatives, checkpoints, autocast, FLOP counts.

torch's own checks hold derivatives to finite differences, in forward and reverse mode, over each other and mapped; what
vmap does must be what a call for each entry does. Under autocast the dtype and the rounding are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from features import BY_NAME, ROUTINGS, WINDOWS, Called, Leaves, Routing, close, number, training, with_gradients
from nn_layers import LAYERS, Row
from suite import every_backend
from torch import Tensor, func, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastcaps
from fastcaps import Votes, Window, backend, compat
from fastcaps.compat import slim_capsules

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
every_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
SAMPLED = ("children", "gate", "activations", "scores", "parents")


@pytest.mark.parametrize("window", [None, pytest.param(WINDOWS["grid"], marks=pytest.mark.slow)], ids=WINDOWS)
@pytest.mark.parametrize("routing", [row for row in ROUTINGS if "detach" not in row.name], ids=str)
def test_derivatives(routing: Routing, window: Window | None) -> None:
    """Of all tensors; where coefficients are constants to the gradient, but not to differences, none can be held."""
    given = routing.tensors(window, batch=1)

    def call(numbers: Tensor) -> Tensor:
        parts = numbers.split([tensor.numel() for tensor in given.values()])
        leaves = {name: part.view_as(tensor) for part, (name, tensor) in zip(parts, given.items(), strict=True)}
        return torch.cat([result.flatten() for result in routing.ours(leaves, window).values()])

    flat = torch.cat([tensor.flatten() for tensor in given.values()]).requires_grad_()
    assert torch.autograd.gradcheck(call, flat, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, flat, fast_mode=True, check_fwd_over_rev=True)


# ---- second derivatives ----------------------------------------------------------------------------------------------


class Twice(NamedTuple):
    """A call whose graph has a backward of ours, its tensors, and the class that refuses a second derivative."""

    call: Callable[[Leaves], Tensor]
    given: Leaves
    refused: str = ""


def of_routing(name: str) -> Twice:
    def call(leaves: Leaves) -> Tensor:
        return torch.cat([x.flatten() for x in BY_NAME[name].ours(leaves).values()])

    return Twice(call, BY_NAME[name].tensors(batch=1))


def of_shards(name: str) -> Twice:
    def call(leaves: Leaves) -> Tensor:
        mesh = init_device_mesh("cpu", (1,))
        spread = {"children": DTensor.from_local(leaves["children"], mesh, [Shard(0)])}
        found = BY_NAME[name].ours({**leaves, **spread})
        return torch.cat([x.full_tensor().flatten() for x in found.values()])  # type: ignore[attr-defined]

    return Twice(call, BY_NAME[name].tensors(batch=1), "A routing of DTensors")


def of_layer(layer: nn.Module, *shape: int, refused: str = "") -> Twice:
    layer = layer.double()
    given = {"poses": torch.randn(shape, dtype=torch.float64), **dict(layer.named_parameters())}
    return Twice(lambda leaves: func.functional_call(layer, leaves, leaves["poses"]), given, refused)


def of_verb(run: Callable[[Votes, Tensor], Tensor], *shape: int) -> Twice:
    given = {"children": torch.randn(2, 4, 2, 3), "weight": torch.randn(4, 3, 3, 2), "other": torch.randn(shape)}
    given = {name: tensor.double() for name, tensor in given.items()}
    return Twice(lambda leaves: run(Votes(leaves["children"], leaves["weight"]), leaves["other"]), given)


def slim(kind: Any, **options: Any) -> nn.Module:
    return kind(3, 2, 2, 2, 2, stride=1, **options)


TWICE: dict[str, Callable[[], Twice]] = {
    "ConvSlimCapsule2D": lambda: of_layer(slim(compat.ConvSlimCapsule2D, padding=1), 2, 2, 2, 4, 3),
    "ConvSlimCapsule3D": lambda: of_layer(slim(compat.ConvSlimCapsule3D, share_weight=False), 1, 2, 2, 4, 3, 3),
    "DeconvSlimCapsule2D": lambda: of_layer(slim(compat.DeconvSlimCapsule2D), 1, 2, 2, 3, 2),
    "DeconvSlimCapsule3D": lambda: of_layer(slim(compat.DeconvSlimCapsule3D), 1, 2, 2, 2, 2, 1),
    **{name: lambda name=name: of_routing(name) for name in ("attention-3", "pool-weights", "em")},
    **{f"{name}, op": lambda name=name: of_routing(name) for name in ("attention-3", "pool-weights", "em")},
    **{f"{name}, DTensor": lambda name=name: of_shards(name) for name in ("attention-3", "pool-weights", "em")},
    "agreement": lambda: of_verb(Votes.agreement, 2, 3, 2, 2),
    "agreement, op": lambda: of_verb(Votes.agreement, 2, 3, 2, 2),
    "sum, op": lambda: of_verb(Votes.sum, 2, 4, 3),
    "dynamic, products": lambda: Twice(
        lambda leaves: fastcaps.functional.dynamic_routing(leaves["children"], None, prior=leaves["prior"]),
        {"children": torch.randn(2, 4, 1, 3).double(), "prior": torch.randn(4, 3).double()},
    ),
    "distance": lambda: of_verb(Votes.distance, 2, 3, 2, 2),
    "sum": lambda: of_verb(Votes.sum, 2, 4, 3),
    "square_sum": lambda: of_verb(lambda votes, r: votes.square_sum(r, votes.sum(r)), 2, 4, 3),
}


def backwards(graph: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the names of all nodes of a graph."""
    if graph is not None and graph not in seen:
        seen.add(graph)
        yield graph.name()
        for below, _ in graph.next_functions:
            yield from backwards(below, seen)


def ours(kind: Any = torch.autograd.function._SingleLevelFunction) -> set[str]:
    """Return the names of our backwards: of every subclass of Function, and of every op."""
    found = {each for below in kind.__subclasses__() for each in ours(below)}
    mine = kind.__module__.startswith("fastcaps.") or kind.__name__.startswith("GeneratedBackwardFor_fastcaps_")
    return found | {f"{kind.__name__}Backward"} if mine else found


def test_second_derivatives_are_right_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plain sum, too, whose own gradient needs none; the calls reach every backward of ours."""
    monkeypatch.setattr(slim_capsules, "SLAB", 256)
    reached: set[str] = set()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, row in TWICE.items():
            torch.manual_seed(0)
            call, given, refused = row()

            around: Any = Called if name.endswith(", op") else nullcontext

            def gradients(*tensors: Tensor, call: Any = call, given: Leaves = given, around: Any = around) -> Tensor:
                with around():
                    found = call(dict(zip(given, tensors, strict=True))).sum()
                    reached.update(backwards(found.grad_fn, set()))
                    first = torch.autograd.grad(found, tensors, create_graph=True)
                return torch.cat([x.flatten() for x in first])

            leaves = tuple(x.detach().clone().requires_grad_() for x in given.values())
            if refused:
                with pytest.raises(RuntimeError, match=f"{refused} has no second derivatives"):
                    gradients(*leaves)
                continue
            first = gradients(*leaves)
            assert first.requires_grad, name
            reached.update(backwards(first.grad_fn, set()))
            assert torch.autograd.gradcheck(gradients, leaves, fast_mode=True), name
    finally:
        dist.destroy_process_group()
    assert ours() <= reached


@every_routing
def test_several_gradients_at_once(routing: Routing) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors().items()}
    found = torch.cat([result.flatten() for result in routing.ours(leaves).values()])
    grad = partial(torch.autograd.grad, found, [*leaves.values()], retain_graph=True, allow_unused=True)
    heads = torch.randn(3, *found.shape, dtype=found.dtype)
    batched = grad(heads, is_grads_batched=True)
    for k, head in enumerate(heads):
        for many, single in zip(batched, grad(head), strict=True):
            torch.testing.assert_close(None if many is None else many[k], single)


@every_window
@every_routing
def test_the_mapped_call_is_a_call_for_each(routing: Routing, window: Window | None) -> None:
    """Over other children, and over several sets of all else."""
    given = routing.tensors(window)
    for changes in (["children"], [name for name in given if name != "children"]):
        rest = {name: tensor for name, tensor in given.items() if name not in changes}
        stacked = {name: torch.stack([t, t.flip(0), 0.3 * t]) for name, t in given.items() if name in changes}
        found = func.vmap(lambda some, rest=rest: routing.ours({**rest, **some}, window))(stacked)
        for k in range(3):
            one = {**rest, **{name: tensor[k] for name, tensor in stacked.items()}}
            close({name: result[k] for name, result in found.items()}, routing.ours(one, window))


@every_routing
def test_gradients_of_every_sample(routing: Routing) -> None:
    """vmap(grad): what differential privacy and influence functions ask for."""
    given = routing.tensors()
    shared, sampled = ({k: t for k, t in given.items() if (k in SAMPLED) == is_sampled} for is_sampled in (False, True))

    def loss(parameters: Leaves, sample: Leaves) -> Tensor:
        return number(routing.ours({**parameters, **{name: tensor[None] for name, tensor in sample.items()}}))

    found = func.vmap(func.grad(loss, argnums=(0, 1)), (None, 0))(shared, sampled)
    for b in range(3):
        wanted = training(routing, shared | {name: tensor[b : b + 1] for name, tensor in sampled.items()})
        for name in given:
            one = found[0][name][b] if name in shared else found[1][name][b][None]
            torch.testing.assert_close(one, wanted[f"d{name}"], rtol=1e-7, atol=1e-9)


@every_window
@every_routing
def test_checkpoint_without_reentry(window: Window | None, routing: Routing) -> None:
    """Twice over the same graph too: ``retain_graph`` unpacks what was saved once more, each tensor once."""
    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors(window).items()}
    wanted = training(routing, leaves, window)
    unpacked: list[int] = []
    packed: list[Tensor] = []
    hooks = lambda t: packed.append(t) or len(packed) - 1, lambda place: unpacked.append(place) or packed[place]
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        direct = number(routing.ours(leaves, window))
    direct.backward()
    assert len(unpacked) == len(set(unpacked))
    found = checkpoint(lambda given: routing.ours(given, window), leaves, use_reentrant=False)
    for keep in (True, False):
        close(with_gradients(found, leaves, retain_graph=keep), wanted)


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


# ---- half precision --------------------------------------------------------------------------------------------------


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def as_cast(routing: Routing, given: Leaves) -> Leaves:
    """What autocast makes of the arguments, in float64. Betas enter sums and keep their numbers; of Heinsen's scores it
    is their sigmoid that is cast."""
    cast = {k: t.double() if k.startswith("beta") else t.bfloat16().double() for k, t in given.items()}
    if routing.child == "scores":
        cast["scores"] = given["scores"].sigmoid().bfloat16().double().logit()
    return cast


@every_backend
@every_window
@every_routing
def test_results_err_no_more_than_what_is_rounded(routing: Routing, window: Window | None, name: str) -> None:
    """The tensors, and the poses after each iteration; coefficients are those that the call used."""
    given = routing.tensors(window, torch.float32)
    with backend("reference"):
        exact = routing.ours(as_cast(routing, given), window, coefficients=True)
        eager = routing.ours({key: t.bfloat16() for key, t in given.items()}, window, coefficients=True)
    with backend(name), autocast():
        found = routing.ours(given, window, coefficients=True)
    assert {found[key].dtype for key in routing.results} == {torch.bfloat16}
    for key, tensor in found.items():
        limit = 2 * (eager[key].double() - exact[key]).abs().max() + 2.0**-8 * exact[key].abs().max()
        assert (tensor.double() - exact[key]).abs().max() <= limit, key


@every_backend
@pytest.mark.parametrize(
    ("row", "options"), [*((row, {}) for row in LAYERS), (LAYERS[0], {"dropout": 0.4, "bias": True})], ids=str
)
def test_layers_return_one_dtype_in_training_and_in_eval(row: Row, options: dict[str, Any], name: str) -> None:
    module, children = row.kind(5, 3, 4, 4, **options), torch.randn(3, 5, 4)
    found = []
    for mode in (True, False):
        with backend(name), autocast():
            results = module.train(mode)(children)
        found.append([tensor.dtype for tensor in ((results,) if isinstance(results, Tensor) else results)])
    assert found[0] == found[1] and found[0][0] == torch.bfloat16


# ---- operations ------------------------------------------------------------------------------------------------------


def sizes(routing: Routing, window: Window | None) -> tuple[int, int]:
    """Operations of one product with all matrices, and of one sum of all votes or of their agreement."""
    given = routing.tensors(window)
    batch, types, *grid, rows, depth = given["children"].shape
    columns, parents = (given["weight"].shape[3], given["weight"].shape[1]) if "weight" in given else (depth, 1)
    places = (1, 1) if window is None else window.output_size(*grid)
    seen = types * (1 if window is None else window.positions)
    one = 2 * batch * places[0] * places[1] * seen * rows * columns
    one *= parents + ("leaky" in routing.name)
    return (one * depth if "weight" in given else 0), one


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if "prior" not in row.leaves], ids=str)  # has wider votes
@every_window
@every_backend
def test_forward_is_counted(name: str, window: Window | None, routing: Routing) -> None:
    """Every iteration computes votes; with a query also agreement and sums; else it is linear except for moments."""
    with backend(name), FlopCounterMode(display=False) as counter, torch.no_grad():
        routing.ours(routing.tensors(window, torch.float32), window)
    votes, one = sizes(routing, window)
    wanted = routing.first * (votes + (2 * one if routing.moments == 2 else 0))
    wanted += (routing.iterations - routing.first) * (votes + (1 + routing.moments) * one)
    # another convolution for the bias of the votes
    more = one if routing.library else 0
    assert counter.get_total_flops() in (wanted, wanted + more)


@every_routing
def test_backward_is_counted(routing: Routing) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in routing.tensors(dtype=torch.float32).items()}
    loss = number(routing.ours(leaves))
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    votes, one = sizes(routing, None)
    iterations = 1 if "detach" in routing.name else routing.iterations
    # an iteration runs twice if a separate call sums the gradients of children and weights over iterations
    assert (
        0 < 2 * iterations * votes <= counter.get_total_flops() <= routing.iterations * (4 * votes + 8 * one)
        or not votes
    )
