"""Routing of DTensors in shards of the batch: every process routes its own samples, without communication.

Tensors that are not DTensors, such as a layer's own parameters, must be the same on every process. The backward adds
their gradients over the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fastcaps.checks import refuse_second_derivatives
from fastcaps.ops.signature import Signature
from fastcaps.votes import VoteInputs


def route(
    signature: Signature, run: Callable[..., Sequence[Any]], votes: VoteInputs, own: Any
) -> tuple[DTensor | None, ...]:
    """Return the results of a call as DTensors in shards of the batch, with None for the history of iterations.

    ``run(votes, own)`` routes the samples of a process. ValueError for other shards than of the batch.
    """
    given = dict(zip(signature.names, (*votes, *own), strict=True))
    spread = {name: x for name, x in given.items() if isinstance(x, DTensor)}
    sampled = {"children", "gate", *signature.state}
    mesh = next(iter(spread.values())).device_mesh
    cut = [False] * mesh.ndim
    for name, x in spread.items():
        if x.device_mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of the others, {mesh}, got {x.device_mesh}")
        allowed: tuple[Placement, ...] = (Replicate(), Shard(0)) if name in sampled else (Replicate(),)
        for k, placement in enumerate(x.placements):
            if placement not in allowed:
                raise ValueError(
                    f"{name} must be whole on every process{' or sharded over the batch' * (len(allowed) == 2)}, got "
                    f"{placement!r}: a routing has no other shards (docs/distributed.md routes children over processes)"
                )
            cut[k] |= placement == Shard(0)
    batch: list[Placement] = [Shard(0) if one else Replicate() for one in cut]
    partial: list[Placement] = [Partial() if one else Replicate() for one in cut]
    for name in signature.tensors:
        if given[name] is not None:
            one: Any = spread.get(name)
            if one is None:
                one = DTensor.from_local(given[name], mesh, [Replicate()] * mesh.ndim, run_check=False)
            if name in signature.constant and given.get("detach"):
                one = one.detach()  # torch's backward of a redistribution fails without a gradient
            if name not in sampled:
                given[name] = one.to_local(grad_placements=partial)
            else:
                given[name] = one.redistribute(placements=batch).to_local()
    results = run(*signature.given([*given.values()]))

    def wrapped(local: Tensor, shape: Sequence[int]) -> DTensor:
        size, stride = torch.Size(shape), tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
        found = DTensor.from_local(local.contiguous(), mesh, batch, run_check=False, shape=size, stride=stride)
        if found.requires_grad:  # PyTorch's backward of a shard loses the graph
            found.register_hook(lambda _: refuse_second_derivatives("A routing of DTensors"))
        return found

    shapes = {len(shape): shape for shape in (votes.poses, votes.parent_values_shape)}
    finals = [wrapped(x, shapes[x.dim()]) for x in results[: len(signature.finals)]]
    shares = wrapped(results[-1], votes.coefficients_shape) if own.coefficients else None
    return (*finals, *(None for _ in signature.history), shares)
