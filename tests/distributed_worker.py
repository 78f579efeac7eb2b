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
from unittest import mock

import features
import nn_layers
import torch
import torch.distributed as dist
from cases import Case as OneCall
from registry import ATTENTION, ROUTINGS, Routing
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
PER_CHILD = ("weight", "bias", "beta_use", "beta_ignore")


@dataclass(frozen=True)
class Case:
    """A routing in shards: what each dimension of the mesh cuts, and whether all children share their matrices.

    ``plain``: tensors that are no DTensors, as a layer's own parameters are none. ``options`` go to the function.
    """

    row: features.Routing
    cuts: tuple[str, ...]
    share: bool = False
    plain: tuple[str, ...] = ()
    window: Window | None = None
    coefficients: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join((str(self.row), *self.cuts, *(["grid"] if self.window else [])))


def _numbers(case: Case) -> Tensors:
    """The tensors of a case, the same in every process."""
    row, grid = case.row, case.window is not None
    sizes = {"types": CHILDREN, "parents": PARENTS, "pose": (2, 3, 3), "grid": (4, 3)}
    found = row.tensors(case.window, torch.float32, BATCH, **sizes)
    rows = {"weight": 1 if case.share else CHILDREN, **dict.fromkeys(PER_CHILD[1:], 1 if case.share or grid else None)}
    found = {name: x[: rows.get(name)] / (2 if name in PER_CHILD else 1) for name, x in found.items()}
    if not grid:  # one sample has no children, another none of those that the first of two processes has
        found[row.child][0] = found[row.child][1, : -(-CHILDREN // 2)] = -torch.inf if row.child == "scores" else 0.0
        if row.function not in (functional.dynamic_routing, functional.inverted_attention_routing):
            found["children"][1, 0] = torch.nan  # an absent child may be anything
    return found


def _placement(case: Case, name: str, tensor: Tensor, cut: str) -> Placement:
    sampled = ("children", case.row.child)
    if cut == "batch":
        return Shard(0) if name in (*sampled, "parents") else Replicate()
    if cut == "children":
        rows = name in PER_CHILD and len(tensor) == CHILDREN
        return Shard(1) if name in sampled else Shard(0) if rows else Replicate()
    if name in (*sampled, "norm_weight", "norm_bias"):
        return Replicate()
    return Shard(0) if name in ("beta_u", "beta_a") else Shard(1)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _run(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """Results and gradients by name, as whole tensors."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    results = {n: _whole(x) for n, x in case.row.ours(leaves, case.window, case.coefficients, **case.options).items()}
    found = features.with_gradients({n: x for n, x in results.items() if x.requires_grad}, leaves)
    return {name: _whole(x).detach() for name, x in (results | found).items()}


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
        # eager adds up the gradient of a shared bias over the children, as shards do: both round that sum
        with fastcaps.backend("reference"), mock.patch("fastcaps.ops.gaussian._is_shared", lambda _: False):
            return _run(case, dict(zip(names, given, strict=True)))

    Bar(reference, [tensors[name] for name in names]).hold(found)


ROWS = [row for row in features.ROUTINGS if "weight" in row.leaves and "prior" not in row.leaves]
OF = features.BY_NAME
SET = [Case(row, ("children",), bool(k % 2), coefficients=k % 3 == 0) for k, row in enumerate(ROWS)]
SET += [
    Case(row, (("batch", "parents")[k % 2],), bool(k % 3 == 0), coefficients=k % 4 < 2) for k, row in enumerate(ROWS)
]
SET += [
    Case(OF["pool-weights"], ("batch",), plain=("weight", "bias")),
    Case(OF["attention-3"], ("batch",), window=Window(3, padding=1)),
    Case(OF["em"], ("children",), window=Window(2)),
    Case(OF["heinsen-kmeans"], ("parents",), share=True),
]
MESHES = [
    Case(OF["dynamic-parents"], ("batch", "children")),
    Case(OF["heinsen-gaussian"], ("children", "parents"), coefficients=True),
    Case(OF["pool-weights"], ("children", "parents")),
]
KNOWN = {str(case): case for case in (*SET, *MESHES)}


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
    found = {name: _whole(x) for name, x in network.named_parameters()}
    assert any(not torch.equal(found[name], x) for name, x in start.items())
    Bar(alone, [*data, *start.values()]).hold({name: x.detach() for name, x in found.items()})


def _fully(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(network.routing, mesh=mesh)
    return fully_shard(network, mesh=mesh)


# ---- what a user writes ----------------------------------------------------------------------------------------------


def check_ops(mesh: DeviceMesh) -> None:
    """The raw ops and their backwards by the rules that PyTorch keeps."""
    for routing, case, cut in OPS:
        call = routing.call(case)
        plain = call.training(lambda one: one.by_op())
        over = {"batch": ("children", "gate", *routing.state), "children": ("children", "gate")}[cut]
        dim = {"batch": 0, "children": 3}[cut]

        def placed(name: str, x: Tensor, over: Any = over, dim: int = dim) -> DTensor:
            split = Shard(0) if dim == 3 and name in ("weight", "bias") else Replicate()
            return distribute_tensor(x, mesh, [Shard(dim) if name in over else split])

        given = {name: placed(name, x) if isinstance(x, Tensor) else x for name, x in call.given.items()}
        grads = {name: placed(name, x, call.grads if cut == "batch" else ()) for name, x in call.grads.items()}
        found = dataclasses.replace(call, given=given, grads=grads).training(lambda one: one.by_op())
        assert found["dchildren"].placements == (Shard(dim),), found["dchildren"].placements  # type: ignore[attr-defined]
        assert found[routing.results[0]].placements == ((Shard(0) if cut == "batch" else Partial()),)  # type: ignore[attr-defined]
        for name, x in found.items():
            whole = x.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, plain[name], msg=lambda text, n=name, c=case: f"{c} {n}: {text}")


def check_errors(mesh: DeviceMesh) -> None:
    """What a routing cannot work on is refused, by name."""
    children, weight, grid = torch.randn(2, 12, 2, 3), torch.randn(5, 4, 3, 3), torch.randn(2, 4, 3, 3, 2, 3)
    whole = Replicate()
    for text, given, matrices, cut, other in (
        ("children must be sharded over the batch or the children", children, weight[:1], Shard(2), whole),
        ("children must be >= 1 on every process", children[:, :1], weight[:1], Shard(1), whole),
        ("parents must be >= 1 on every process", children, weight[:1, :1], whole, Shard(1)),
        ("weight [G, ...] must have a G of 12", children, torch.randn(4, 4, 3, 3), Shard(1), whole),
        ("parents must be whole if the children are a grid", grid, weight[:4], whole, Shard(1)),
    ):
        there, matrices = distribute_tensor(given, mesh, [cut]), distribute_tensor(matrices, mesh, [other])
        try:
            functional.dynamic_routing(there, matrices, window=Window(1) if given.dim() == 6 else None)
        except ValueError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")


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
    """What crosses in an iteration is what docs/distributed.md says: the parents' state, or two numbers a child."""
    iterations, pose = 3, 2 * 3
    state, child = BATCH * PARENTS, BATCH * CHILDREN
    for name, cut, forward, backward in (
        ("dynamic-parents", "batch", 0, 0),
        ("dynamic-parents", "children", iterations * state * pose, (iterations - 1) * state * pose),
        (
            "em",
            "children",
            iterations * state * (2 * pose + 2),
            (iterations - 1) * state * (2 * pose + 1) + iterations * state * pose,
        ),
        ("pool-weights", "children", iterations * state * (pose + 2), (iterations - 1) * state * pose),
        ("dynamic-parents", "parents", (iterations - 1) * 2 * child, (iterations - 1) * child),
        ("pool-weights", "parents", 0, 0),
    ):
        case = Case(OF[name], (cut,), share=True)
        tensors = _numbers(case)
        spread = {n: distribute_tensor(x, mesh, [_placement(case, n, x, cut)]) for n, x in tensors.items()}
        spread["children"].requires_grad_()
        with Traffic() as sent:
            found = case.row.ours(spread)
        assert sent.numbers == +Counter(all_reduce=forward), (name, cut, forward, sent.numbers)
        with Traffic() as sent:
            torch.stack([x.to_local().sum() for x in found.values()]).sum().backward()
        assert sent.numbers == +Counter(all_reduce=backward), (name, cut, backward, sent.numbers)


def _ops() -> list[tuple[Routing, OneCall, str]]:
    """One case of the raw ops for every rule, the batch in shards; and a sum over children in shards."""
    options: dict[str, Any] = {"batch": 5, "types": 7, "bias": "IM", "gate": "some"}
    found = [
        (routing, OneCall(f"{routing}-{rule.name}", rule, iterations=2, start=rule != Rule.SQUASH, **options), "batch")
        for routing in ROUTINGS
        for rule in sorted(routing.rules)
    ]
    return [*found, (ATTENTION, OneCall("children", Rule.PLAIN, **options), "children")]


OPS = _ops()
CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    "ops": check_ops,
    "errors": check_errors,
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
    wrong: dict[str, str] = {}
    for name in names:
        try:
            torch.manual_seed(0)
            if name in KNOWN:
                check_case(KNOWN[name], flat if len(KNOWN[name].cuts) == 1 else square)
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
