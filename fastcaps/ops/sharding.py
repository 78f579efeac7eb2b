"""Sharded ops: which dimension of each tensor an axis cuts, and the rules for PyTorch's registry.

A rule lists the placements of one op's tensors on a mesh. Calls that need several ops and communication between two
iterations are in :mod:`fastcaps.distributed`. Importing this module registers the rules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fastcaps.ops import ROUTINGS, Routing, attention_routing
from fastcaps.rules import Rule

AXES = ("batch", "children", "parents")
Placements = list[Placement | None]
"""The placement of each tensor along one dimension of a mesh; None for other arguments."""


def cuts_of(axis: str, given: dict[str, Any], routing: Routing) -> dict[str, int]:
    """Return the dimension of each argument of an op or its backward that an axis cuts, without uncut arguments."""
    shapes = {name: tuple(value.shape) for name, value in given.items() if hasattr(value, "shape")}
    place, rule = len(shapes["children"]) - 3, given.get("rule")
    heads = [name for name in shapes if name.startswith("grad")]
    kept = [name for name in ("sums", "logsumexp", "counts", "means", "variances") if name in shapes]
    of_parents = [*heads, *kept, *(name for name in routing.state if name in shapes)]
    tables = [name for name in ("bias", "beta_use", "beta_ignore") if name in shapes]
    if axis == "batch":
        cuts = dict.fromkeys(("children", "gate", *of_parents), 0)
    elif axis == "children":
        of_parents = []
        cuts = dict.fromkeys(("children", "gate"), place)
        cuts |= {name: 0 for name in tables if len(shapes[name]) > 1 and shapes[name][0] > 1}
        if "weight" in shapes and shapes["weight"][0] == shapes["children"][place] > 1:
            cuts["weight"] = 0
    else:
        cuts = dict.fromkeys(of_parents, place) | {"weight": 1}
        cuts |= {name: 1 for name in tables if len(shapes[name]) > 1 and shapes[name][1] > 1}
        cuts |= {name: 0 for name in tables if rule == Rule.EM and len(shapes[name]) == 1}
    if heads:  # in a backward, their first dimension is the iteration
        cuts |= {name: cuts[name] + 1 for name in of_parents if name in routing.stacked or name in heads}
    return {name: dim for name, dim in cuts.items() if name in shapes}


def acceptable(routing: Routing, backward: bool, *arguments: Any) -> list[tuple[Placements, Placements]]:
    """Return possible placements along one dimension of a mesh, of an op's (or its backward's) results and arguments.

    The batch can always be cut, the children if an iteration of attention is only a sum over them. A rule cannot cut
    the parents, as it cannot change the argument M.
    """
    names = routing.backward_names if backward else routing.names
    given = dict(zip(names, arguments, strict=True))
    axes: list[str | None] = [None, "batch"]
    if routing is attention_routing:
        types = given["children"].shape[-3]
        plain = given["sums"] is None if backward else (given["rule"], given["iterations"]) == (Rule.PLAIN, 1)
        rows = [given[name].shape[0] for name in ("weight", "bias") if given[name] is not None]
        if plain and all(count in (1, types) for count in rows):
            axes.append("children")
    found: list[tuple[Placements, Placements]] = []
    for axis in axes:
        cuts = {} if axis is None else cuts_of(axis, given, routing)
        inputs = [lying(cuts.get(name)) if hasattr(given[name], "shape") else None for name in names]
        results = _gradients(routing, given, axis, cuts) if backward else _results(routing, given, axis)
        found.append((results, inputs))
    return found


def lying(dim: int | None) -> Placement:
    """Return the placement of a tensor that is cut in a dimension, or whole (None)."""
    return Replicate() if dim is None else Shard(dim)


def _results(routing: Routing, given: dict[str, Any], axis: str | None) -> Placements:
    place, finals, history = len(given["children"].shape) - 3, len(routing.finals), len(routing.history)
    shares = lying({None: None, "batch": 0, "children": place}[axis] if given["coefficients"] else None)
    if axis == "children":
        return [*[Partial()] * (finals + history), shares]
    batch, later = (None, None) if axis is None else (0, 1)  # in the history, the first dimension is the iteration
    return [*[lying(batch)] * finals, *[lying(later)] * history, shares]


def _gradients(routing: Routing, given: dict[str, Any], axis: str | None, cuts: dict[str, int]) -> Placements:
    """Return the placements of a backward's results; absent or unneeded ones are empty tensors."""
    found: Placements = []
    for k, name in enumerate(routing.tensors):
        absent = routing.gradient_shape(name, given) is None
        if axis is None or absent or not given["needs"] >> k & 1:
            found.append(Replicate())
        elif name in cuts:
            found.append(Shard(cuts[name] - (name in routing.stacked)))
        else:
            found.append(Partial())
    return found


for _routing in ROUTINGS:
    register_sharding(_routing.op)(partial(acceptable, _routing, False))
    register_sharding(_routing.backward_op)(partial(acceptable, _routing, True))
