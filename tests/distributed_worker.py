"""What the processes of the distributed tests run: each case in shards, and the same in one process.

Every process makes all numbers by the same seed. Nothing here needs pytest: what went wrong comes back as text.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import nn_layers
import torch
import torch.distributed as dist
from cases import Case as OneCall
from registry import ATTENTION, GAUSSIAN, POOLING, Routing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fastcaps.distributed  # the rules of the raw ops
from fastcaps import Window, functional
from fastcaps._testing.judge import Bar
from fastcaps.rules import Rule

Tensors = dict[str, Tensor]

MINUTE = timedelta(minutes=1)
BATCH, CHILDREN, PARENTS = 5, 11, 7  # none of them divides evenly


@dataclass(frozen=True)
class Case:
    """A routing in shards.

    ``cuts`` names what each dimension of the mesh cuts, which may have several; ``options`` go to the function.
    """

    name: str
    routing: str
    cuts: tuple[str, ...]
    groups: int = CHILDREN
    options: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    """Tensors that are no DTensors: a layer's own parameters."""
    sizes: tuple[int, int, int] = (BATCH, CHILDREN, PARENTS)
    coefficients: bool = False


def _function(routing: str) -> Callable[..., Any]:
    def em(children: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, **rest: Any) -> Any:
        return functional.em_routing(
            children, gate, weight, rest.pop("beta_u"), rest.pop("beta_a"), bias=bias, inverse_temperature=0.5, **rest
        )

    def heinsen(children: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, **rest: Any) -> Any:
        betas = rest.pop("beta_use"), rest.pop("beta_ignore")
        return functional.heinsen_routing(children, gate, weight, bias, *betas, **rest)

    def pool(children: Tensor, **rest: Any) -> Any:
        return functional.routing_pool(children, sharpness=2.0, **rest)

    def attention(children: Tensor, weight: Tensor, **rest: Any) -> Any:
        return functional.inverted_attention_routing(children, weight, **rest)

    def dynamic(children: Tensor, weight: Tensor, **rest: Any) -> Any:
        return functional.dynamic_routing(children, weight, **rest)

    return {"em": em, "heinsen": heinsen, "pool": pool, "attention": attention, "dynamic": dynamic}[routing]


def _numbers(case: Case) -> Tensors:
    """The tensors of a case, the same in every process."""
    draw = torch.Generator().manual_seed(7)
    batch, children, parents = case.sizes
    grid = (4, 3) if "window" in case.options else ()

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    found = {
        "children": randn(batch, children, *grid, 2, 3),
        "weight": randn(case.groups, parents, 3, 3) / 2,
        "bias": randn(1 if case.groups == 1 or grid else children, parents, 2, 3) / 4,
        "gate": torch.rand((batch, children, *grid), generator=draw),
    }
    if case.routing == "attention" and not grid:
        found |= {"parents": randn(batch, parents, 2, 3), "norm_weight": 1 + randn(6) / 8, "norm_bias": randn(6) / 8}
    if case.routing == "em":
        found |= {"beta_u": randn(parents), "beta_a": randn(parents)}
    if case.routing == "heinsen":
        rows = 1 if case.groups == 1 else children
        found |= {"beta_use": randn(rows, parents), "beta_ignore": randn(rows, parents), "gate": randn(batch, children)}
    if not grid:  # nobody is there in one sample, in another nobody whom the first of two processes has
        silent = -torch.inf if case.routing == "heinsen" else 0.0
        found["gate"][0], found["gate"][1, : -(-children // 2)] = silent, silent
        if case.routing in ("em", "heinsen", "pool"):  # whoever is not there may be anything
            found["children"][1, 0] = torch.nan
    return found


def _placement(case: Case, name: str, tensor: Tensor, cut: str) -> Placement:
    whole = name in ("norm_weight", "norm_bias")
    if cut == "batch":
        return Shard(0) if name in ("children", "gate", "parents") else Replicate()
    if cut == "children":
        rows = name in ("weight", "bias", "beta_use", "beta_ignore") and len(tensor) == case.sizes[1]
        return Shard(1) if name in ("children", "gate") else Shard(0) if rows else Replicate()
    if whole or name in ("children", "gate"):
        return Replicate()
    return Shard(0) if name in ("beta_u", "beta_a") else Shard(1)


def _run(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Results and gradients by name, as whole tensors."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = _function(case.routing)(**leaves, **case.options, return_coefficients=case.coefficients)
    names = getattr(found, "_fields", ("poses",))
    results = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}
    draw = torch.Generator().manual_seed(8)
    loss = sum((x * torch.randn(x.shape, generator=draw).to(x.dtype)).sum() for x in whole.values() if x.requires_grad)
    loss.backward()  # type: ignore[union-attr]
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            whole[f"d{name}"] = leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad
    return {name: x.detach() for name, x in whole.items()}


def check_case(case: Case, mesh: DeviceMesh) -> None:
    """Hold a case in shards to the rule that every backend is held to."""
    tensors = _numbers(case)
    spread = {
        name: x
        if name in case.plain
        else distribute_tensor(x, mesh, [_placement(case, name, x, cut) for cut in case.cuts])
        for name, x in tensors.items()
    }
    found = _run(case, spread)
    names = list(tensors)

    def reference(given: Any) -> dict[str, Tensor]:
        with fastcaps.backend("reference"):
            return _run(case, dict(zip(names, given, strict=True)))

    Bar(reference, [tensors[name] for name in names]).hold(found)


SET = (
    Case("dynamic-batch", "dynamic", ("batch",), coefficients=True),
    Case("attention-batch", "attention", ("batch",), groups=1, options={"iterations": 2}),
    Case("em-batch", "em", ("batch",)),
    Case("pool-batch-plain", "pool", ("batch",), plain=("weight", "bias")),
    Case("grid-batch", "attention", ("batch",), options={"window": Window(3, padding=1), "iterations": 2}),
    Case("dynamic-children", "dynamic", ("children",), coefficients=True),
    Case("dynamic-children-detach", "dynamic", ("children",), groups=1, options={"detach": True}),
    Case("attention-children", "attention", ("children",), groups=1, options={"iterations": 2}),
    Case("em-children", "em", ("children",), coefficients=True),
    Case("heinsen-children", "heinsen", ("children",), options={"eps": 0.1}, plain=("gate",)),
    Case("kmeans-children", "heinsen", ("children",), groups=1, options={"model": "kmeans"}),
    Case("pool-children", "pool", ("children",), coefficients=True),
    Case("pool-children-detach", "pool", ("children",), groups=1, options={"detach": True}, plain=("weight", "bias")),
    Case("dynamic-compete-children", "dynamic", ("children",), options={"compete": "children"}),
    Case("grid-children", "em", ("children",), options={"window": Window(2)}),
    Case("dynamic-parents", "dynamic", ("parents",), coefficients=True),
    Case("attention-parents", "attention", ("parents",), groups=1, options={"iterations": 2}, plain=("children",)),
    Case("em-parents", "em", ("parents",), coefficients=True),
    Case("heinsen-parents", "heinsen", ("parents",)),
    Case("kmeans-parents", "heinsen", ("parents",), groups=1, options={"model": "kmeans"}),
    Case("pool-parents", "pool", ("parents",), coefficients=True),
)
MESHES = (
    Case("dynamic-batch-children", "dynamic", ("batch", "children")),
    Case("heinsen-children-parents", "heinsen", ("children", "parents"), coefficients=True),
    Case("pool-children-parents", "pool", ("children", "parents")),
)


# ---- networks: DDP and FSDP2 -----------------------------------------------------------------------------------------


class Network(nn.Module):
    """Features to children, children to classes: the least capsule network that trains all parts of a layer."""

    def __init__(self, routing: str) -> None:
        super().__init__()
        self.poses, self.gates = nn.Linear(8, 6 * 4), nn.Linear(8, 6)
        self.routing = LAYERS[routing]()

    def forward(self, features: Tensor) -> Tensor:
        children, gates = self.poses(features).unflatten(-1, (6, 4)), self.gates(features)
        if self.routing.activity_name == "activations":
            gates = gates.sigmoid()
        named = {self.routing.activity_name: gates}
        found = self.routing(children, **named)
        poses = found if isinstance(found, Tensor) else found[0]
        return fastcaps.losses.length(poses)


LAYERS = {row.name: partial(row.kind, 6, 3, 4, 4, bias=True, **row.options) for row in nn_layers.LAYERS}


def _train(network: nn.Module, features: Tensor, targets: Tensor) -> None:
    """Two steps on all that is given."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        (network(features) - targets).square().mean().backward()
        optimizer.step()


def check_training(wrap: Callable[[nn.Module, DeviceMesh], nn.Module], routing: str, mesh: DeviceMesh) -> None:
    """Hold the parameters after two steps, on a part of the batch a process, to those of one process."""
    torch.manual_seed(3)
    network = Network(routing)
    start = {name: x.detach().clone() for name, x in network.named_parameters()}
    batch = 4 * mesh.size()
    data = torch.randn(batch, 8), torch.rand(batch, 3)

    def alone(given: Any) -> Tensors:
        single = Network(routing).to(given[0].dtype)
        with torch.no_grad():
            for parameter, x in zip(single.parameters(), given[2:], strict=True):
                parameter.copy_(x)
        with fastcaps.backend("reference"):
            _train(single, *given[:2])
        return {name: x.detach() for name, x in single.named_parameters()}

    wrapped = wrap(network, mesh)
    _train(wrapped, *(x.chunk(mesh.size())[mesh.get_local_rank()] for x in data))
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in network.named_parameters()}
    assert any(not torch.equal(found[name], x) for name, x in start.items())
    Bar(alone, [*data, *start.values()]).hold({name: x.detach() for name, x in found.items()})


def _fully(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(network.routing, mesh=mesh)
    return fully_shard(network, mesh=mesh)


# ---- what a user writes ----------------------------------------------------------------------------------------------


def check_layer(mesh: DeviceMesh) -> None:
    """Only the children are distributed; the layer's own parameters, and their gradients, are the same everywhere."""
    layer = fastcaps.DynamicRouting(CHILDREN, PARENTS, 4, 6, pose="vector", share=True)
    whole = torch.randn(BATCH, CHILDREN, 4)
    for dim in (0, 1):
        layer.zero_grad()
        layer(distribute_tensor(whole, mesh, [Shard(dim)])).full_tensor().square().sum().backward()
        assert layer.weight is not None and type(layer.weight.grad) is Tensor
        found, layer.weight.grad = layer.weight.grad, None
        layer(whole).square().sum().backward()
        torch.testing.assert_close(found, layer.weight.grad)


def check_ops(mesh: DeviceMesh) -> None:
    """The raw ops and their backwards by the rules that PyTorch keeps."""
    for routing, case, cut in OPS:
        call = routing.call(case)
        plain = call.training(lambda one: one.by_op())
        over = {"batch": ("children", "gate", *routing.state), "children": ("children", "gate")}[cut]
        dim = {"batch": 0, "children": 3}[cut]

        def placed(name: str, x: Tensor, over: Any = over, dim: int = dim) -> DTensor:
            own = Shard(0) if dim == 3 and name in ("weight", "bias") else Replicate()
            return distribute_tensor(x, mesh, [Shard(dim) if name in over else own])

        given = {name: placed(name, x) if isinstance(x, Tensor) else x for name, x in call.given.items()}
        grads = {name: placed(name, x, call.grads if cut == "batch" else ()) for name, x in call.grads.items()}
        found = dataclasses.replace(call, given=given, grads=grads).training(lambda one: one.by_op())
        assert found["dchildren"].placements == (Shard(dim),), found["dchildren"].placements  # type: ignore[attr-defined]
        assert found[routing.results[0]].placements == ((Shard(0) if cut == "batch" else Partial()),)  # type: ignore[attr-defined]
        for name, x in found.items():
            whole = x.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, plain[name], msg=lambda text, n=name, c=case: f"{c} {n}: {text}")


def check_second_derivatives(mesh: DeviceMesh) -> None:
    """They are refused where they would be wrong."""
    children = distribute_tensor(torch.randn(2, 6, 2, 3), mesh, [Shard(1)]).requires_grad_()
    (first,) = torch.autograd.grad(functional.routing_pool(children).full_tensor().sum(), children, create_graph=True)
    try:
        first.full_tensor().square().sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error), error
    else:
        raise AssertionError("not refused")


def check_errors(mesh: DeviceMesh) -> None:
    """What a routing cannot work on is refused, by name."""
    children, weight = torch.randn(2, 12, 2, 3), torch.randn(5, 4, 3, 3)
    whole = Replicate()

    def refused(text: str, cut: Placement, other: Placement, **changes: Tensor) -> None:
        given = {"children": children, "weight": weight, **changes}
        window = Window(1) if given["children"].dim() == 6 else None
        try:
            functional.dynamic_routing(
                distribute_tensor(given["children"], mesh, [cut]),
                distribute_tensor(given["weight"], mesh, [other]),
                window=window,
            )
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")

    refused("children must be sharded over the batch or the children", Shard(2), whole, weight=weight[:1])
    refused("children must leave every process one", Shard(1), whole, children=children[:, :1], weight=weight[:1])
    refused("parents must leave every process one", whole, Shard(1), weight=weight[:1, :1])
    refused("weight [G, ...] must have a G of 12", Shard(1), whole, weight=torch.randn(4, 4, 3, 3))
    grid = torch.randn(2, 4, 3, 3, 2, 3)
    refused(
        "parents must be whole where the children are a grid", Replicate(), Shard(1), children=grid, weight=weight[:4]
    )


class Traffic(TorchDispatchMode):
    """Counts the numbers that a process sends into collectives, by the kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("_c10d_functional.") and not any(word in name for word in ("wait", "wrap")):
            self.numbers[name.split(".")[1]] += args[0].numel()
        return func(*args, **(kwargs or {}))


def check_traffic(mesh: DeviceMesh) -> None:
    """What crosses in a turn is what docs/distributed.md says: the parents' state, or two numbers a child."""
    turns, pose = 3, 2 * 3
    state, child = BATCH * PARENTS, BATCH * CHILDREN
    for routing, cut, forward, backward in (
        ("dynamic", "batch", 0, 0),
        ("dynamic", "children", turns * state * pose, (turns - 1) * state * pose),
        ("em", "children", turns * state * (2 * pose + 2), (turns - 1) * state * (2 * pose + 1) + turns * state * pose),
        ("pool", "children", turns * state * (pose + 2), (turns - 1) * state * pose),
        ("dynamic", "parents", (turns - 1) * 2 * child, (turns - 1) * child),
        ("pool", "parents", 0, 0),
    ):
        case = Case("", routing, (cut,), groups=1, options={"iterations": turns - (routing == "pool")})
        tensors = _numbers(case)
        spread = {n: distribute_tensor(x, mesh, [_placement(case, n, x, cut)]) for n, x in tensors.items()}
        spread["children"].requires_grad_()
        with Traffic() as sent:
            found = _function(routing)(**spread, **case.options)
        assert sent.numbers == +Counter(all_reduce=forward), (routing, cut, forward, sent.numbers)
        with Traffic() as sent:
            torch.stack(
                [x.to_local().sum() for x in ([found] if isinstance(found, Tensor) else found)]
            ).sum().backward()
        assert sent.numbers == +Counter(all_reduce=backward), (routing, cut, backward, sent.numbers)


RULES = {
    ATTENTION: (Rule.LAYER_NORM, Rule.PLAIN, Rule.SQUASH),
    POOLING: (Rule.UNIT, Rule.SQUASH),
    GAUSSIAN: (Rule.EM, Rule.HEINSEN, Rule.KMEANS),
}
"""What each op may do between two turns."""


def _ops() -> list[tuple[Routing, OneCall, str]]:
    """One case of the raw ops for every rule, the batch in shards; and a sum over children in shards."""
    options: dict[str, Any] = {"batch": 5, "types": 7, "bias": "IM", "gate": "some"}
    found = [
        (routing, OneCall(f"{routing}-{rule.name}", rule, turns=2, start=rule != Rule.SQUASH, **options), "batch")
        for routing, rules in RULES.items()
        for rule in rules
    ]
    return [*found, (ATTENTION, OneCall("children", Rule.PLAIN, **options), "children")]


OPS = _ops()
CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    "layer": check_layer,
    "ops": check_ops,
    "errors": check_errors,
    "second": check_second_derivatives,
    "traffic": check_traffic,
    **{
        f"ddp-{name}": partial(check_training, lambda network, _: DistributedDataParallel(network), name)
        for name in LAYERS
    },
    **{f"fsdp-{name}": partial(check_training, _fully, name) for name in LAYERS},
}


def work(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run the named checks as one of several processes, and leave what went wrong in a file."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=MINUTE)
    flat = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else flat
    known = {case.name: case for case in (*SET, *MESHES)}
    wrong: dict[str, str] = {}
    for name in names:
        try:
            torch.manual_seed(0)
            if name in known:
                check_case(known[name], flat if len(known[name].cuts) == 1 else square)
            else:
                CHECKS[name](flat)
            wrong[name] = ""
        except AssertionError:
            wrong[name] = traceback.format_exc()
        except Exception:
            wrong[name] = traceback.format_exc()
            break  # the others may be waiting within a collective
    torch.save(wrong, Path(folder, f"found-{rank}.pt"))
    dist.destroy_process_group()
