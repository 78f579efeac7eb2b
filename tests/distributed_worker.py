"""What the processes of the distributed tests run: each case in shards, and the same in one process.

Every process makes all numbers by the same seed. Nothing here needs pytest: what went wrong comes back as text.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import fastcaps
from fastcaps import Window, functional
from tools.judge import Bar

Tensors = dict[str, Tensor]

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
    loss = sum(
        (x * torch.randn(x.shape, generator=draw).to(x.dtype)).sum() for x in whole.values() if x.requires_grad
    )
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
    Case("heinsen-children", "heinsen", ("children",), plain=("gate",)),
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


def work(rank: int, world: int, folder: str, names: list[str]) -> None:
    """Run the named checks as one of several processes, and leave what went wrong in a file."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
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
        except Exception:
            wrong[name] = traceback.format_exc()
    torch.save(wrong, Path(folder, f"found-{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}
