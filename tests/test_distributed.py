"""Two processes against one, over gloo on the CPU: DTensors in shards of the batch, DDP and FSDP2.

All checks are one start of the processes, since a start costs seconds: forks of a server that has imported torch once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import features
import nn_layers
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

import fastcaps
from fastcaps import Window, functional

SAMPLED = ("children", "gate", "activations", "scores", "parents")


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_shards(row: features.Routing, window: Window | None, batch: int, mesh: DeviceMesh) -> None:
    """Hold results and gradients of a batch in shards, uneven or with a process without samples, to those of one."""

    def run(tensors: features.Leaves) -> features.Leaves:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        found = {name: whole(x) for name, x in row.ours(leaves, window, coefficients=True).items()}
        made = features.with_gradients({name: x for name, x in found.items() if x.requires_grad}, leaves)
        return {name: whole(x).detach() for name, x in (found | made).items()}

    tensors = row.tensors(window, batch=batch)
    placed = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    spread = {name: distribute_tensor(x, mesh, placed) if name in SAMPLED else x for name, x in tensors.items()}
    if row.child in spread:  # whole: a process takes the part of its samples
        spread[row.child] = distribute_tensor(tensors[row.child], mesh, [Replicate()] * mesh.ndim)
    features.close(run(spread), run(tensors))
    ours = row.ours(spread, window)
    assert {x.placements for x in ours.values()} == {tuple(placed)}  # type: ignore[attr-defined]


def check_refusals(mesh: DeviceMesh) -> None:
    """Other shards are refused by name, and so are second derivatives; nothing is silently wrong."""
    children, weight = torch.randn(2, 12, 2, 3), torch.randn(12, 4, 3, 3)
    placed = partial(distribute_tensor, device_mesh=mesh)
    part = DTensor.from_local(children, mesh, [Partial()])
    shards = [placed(x, placements=[Shard(k)]) for x, k in ((children, 1), (weight, 0), (weight, 1))]
    for text, call in (
        ("children must be whole .* or sharded over the batch, got Shard", (shards[0], weight)),
        ("children must be whole .* or sharded over the batch, got Partial", (part, weight)),
        ("weight must be whole on every process, got Shard", (children, shards[1])),
        ("weight must be whole on every process, got Shard", (children, shards[2])),
    ):
        with pytest.raises(ValueError, match=text):
            functional.dynamic_routing(*call)
    leaf = placed(children, placements=[Shard(0)]).requires_grad_()
    parents = functional.dynamic_routing(leaf, weight)
    with pytest.raises(RuntimeError, match="A routing of DTensors has no second derivatives"):
        torch.autograd.grad(parents.to_local().sum(), leaf, create_graph=True)  # type: ignore[attr-defined]


class Network(nn.Module):
    """Features to children, children to classes: the least capsule network that trains all parts of a layer."""

    def __init__(self, row: nn_layers.Row) -> None:
        super().__init__()
        self.poses, self.gates = nn.Linear(8, 6 * 4), nn.Linear(8, 6)
        self.routing = row.kind(6, 3, 4, 4, bias=True, **row.options)

    def forward(self, features: Tensor) -> Tensor:
        gates = self.gates(features)
        active = {self.routing.activity_name: gates.sigmoid()}
        found = self.routing(self.poses(features).unflatten(-1, (6, 4)), **active)
        return fastcaps.functional.length(found if isinstance(found, Tensor) else found[0])


def check_training(row: nn_layers.Row, full: bool, mesh: DeviceMesh) -> None:
    """Hold the parameters after two steps, on a part of the batch a process, to those of one process."""
    torch.manual_seed(3)
    alone, network = Network(row).double(), Network(row).double()
    network.load_state_dict(alone.state_dict())
    batch, targets = torch.randn(8, 8).double(), torch.rand(8, 3).double()
    if full:
        fully_shard(network.routing, mesh=mesh)
        wrapped: nn.Module = fully_shard(network, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(network)
    rank, start = mesh.get_local_rank(), {name: x.detach().clone() for name, x in alone.named_parameters()}
    for one, *data in ((alone, batch, targets), (wrapped, batch.chunk(2)[rank], targets.chunk(2)[rank])):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            (one(data[0]) - data[1]).square().mean().backward()
            optimizer.step()
    wanted = {name: x.detach() for name, x in alone.named_parameters()}
    assert not all(torch.equal(x, start[name]) for name, x in wanted.items())
    features.close({name: whole(x).detach() for name, x in network.named_parameters()}, wanted)


def checks() -> dict[str, Callable[[DeviceMesh], None]]:
    found: dict[str, Callable[[DeviceMesh], None]] = {"refusals": check_refusals}
    for k, row in enumerate(row for row in features.ROUTINGS if "prior" not in row.leaves):
        found[f"{row}"] = partial(
            check_shards, row, features.WINDOWS["grid" if k % 2 else "set"], 1 if k % 3 == 0 else 5
        )
    for row in nn_layers.LAYERS:
        found |= {f"{kind}-{row.name}": partial(check_training, row, kind == "fsdp") for kind in ("ddp", "fsdp")}
    return found


def work(rank: int, folder: str) -> None:
    """Run all checks as one of two processes, and leave what went wrong in a file."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    wrong: dict[str, str] = {}
    for k, (name, check) in enumerate(checks().items()):
        try:
            check(square if name in features.BY_NAME and k % 4 == 1 else line)
            wrong[name] = ""
        except AssertionError:
            wrong[name] = traceback.format_exc()
        except BaseException:
            wrong[name] = traceback.format_exc()
            break  # the others may be waiting within a collective
    torch.save(wrong, Path(folder, f"found-{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return what went wrong in each check and process: empty text for nothing."""
    folder = tmp_path_factory.mktemp("two")
    get_context("forkserver").set_forkserver_preload(["test_distributed"])
    with pytest.MonkeyPatch.context() as patch:  # before Python 3.12 the server does not take over sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        start_processes(work, (str(folder),), nprocs=2, start_method="forkserver")  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", [*checks()])
def test_two_processes_do_what_one_does(name: str, found: list[dict[str, Any]]) -> None:
    assert not any(wrong := [one.get(name, "did not run") for one in found]), "\n".join(wrong)
