"""Every routing of the public functions, small and with odd sizes, beside its formulas in plain torch, votes stored.

The formulas follow the papers line by line and use nothing of the package. They are ordinary differentiable code, so
whatever torch can do with a function (forward mode, vmap, second derivatives, half precision) it does with them as it
should: what our ops do must be the same. One list, :data:`ROUTINGS`, serves all tests of such features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastcaps import Window
from fastcaps.functional import dynamic_routing, em_routing, heinsen_routing, inverted_attention_routing, routing_pool

WINDOWS = {"set": None, "grid": Window((2, 3), (2, 1), (1, 0), (1, 1))}
POSE = (2, 3, 5)  # C, D, E
BATCH, PARENTS, TYPES, GRID = 3, 3, 2, (4, 5)
COUNT = 5  # children of a set

Leaves = dict[str, Tensor]


# ---- the formulas ----------------------------------------------------------------------------------------------------


def seen(children: Tensor, window: Window | None) -> Tensor:
    """What every position sees: ``[B, I, ...]`` to ``[B, 1, I, ...]``, ``[B, N, H, W, ...]`` to ``[B, L, I, ...]``."""
    if window is None:
        return children[:, None]
    kh, kw, sh, sw, ph, pw, dh, dw = window.spec
    ho, wo = window.output_size(children.shape[2], children.shape[3])
    padded = F.pad(children, (*[0] * (2 * (children.dim() - 4)), pw, pw, ph, ph))
    taps = [
        padded[:, :, ky * dh : ky * dh + sh * (ho - 1) + 1 : sh, kx * dw : kx * dw + sw * (wo - 1) + 1 : sw]
        for ky in range(kh)
        for kx in range(kw)
    ]
    return torch.stack(taps, 1).movedim((1, 2), (3, 4)).flatten(3, 4).flatten(1, 2)  # B, K, N, Ho, Wo -> B, L, K * N


@dataclass
class Plain:
    """One call by the formulas: votes V ``[B, L, I, M, C, E]``, which children are there, their gates ``[B, L, I]``."""

    given: Leaves
    window: Window | None
    votes: Tensor = field(init=False)
    there: Tensor = field(init=False)
    gate: Tensor = field(init=False)

    def __post_init__(self) -> None:
        children, weight, bias = (self.given.get(name) for name in ("children", "weight", "bias"))
        poses = seen(children, self.window)
        self.votes = poses[:, :, :, None]
        if weight is not None:
            count = poses.shape[2]
            self.votes = torch.einsum("blicd,imde->blimce", poses, weight.repeat(count // weight.shape[0], 1, 1, 1))
        if bias is not None:
            self.votes = self.votes + bias
        self.there = seen(torch.ones_like(children[..., 0, 0]), self.window)
        gate = self.given.get("gate")
        self.gate = self.there if gate is None else seen(gate, self.window) * self.there
        self.parents = self.votes.shape[3]

    def even(self) -> Tensor:
        return torch.full_like(self.votes[..., 0, 0], 1 / self.parents)

    def sums(self, shares: Tensor) -> Tensor:
        return torch.einsum("bli,blim,blimce->blmce", self.gate, shares, self.votes)

    def agreement(self, query: Tensor, keys: Tensor | None = None) -> Tensor:
        return torch.einsum("blmce,blimce->blim", query, self.votes if keys is None else keys)

    def over_children(self, logits: Tensor) -> Tensor:
        """Softmax over i of the children that are there, with their gates inside."""
        logits = logits.masked_fill(self.there[..., None] == 0, -torch.inf)
        weights = self.gate[..., None] * (logits - logits.detach().amax(2, keepdim=True)).exp()
        return weights / weights.sum(2, keepdim=True)

    def public(self, parents: Tensor) -> Tensor:
        """``[B, L, M, ...]`` as users see it."""
        if self.window is None:
            return parents[:, 0]
        size = self.window.output_size(*self.given["children"].shape[2:4])
        return parents.unflatten(1, size).movedim(3, 1)

    def coefficients(self, shares: Tensor) -> Tensor:
        """``[B, L, I, M]`` as users see it: 0 for a child that is not there."""
        shares = (shares * self.there[..., None]).detach()
        if self.window is None:
            return shares[:, 0]
        return shares.unflatten(1, self.window.output_size(*self.given["children"].shape[2:4]))


def squashed(sums: Tensor, eps: float = 0.0) -> Tensor:
    square = sums.square().sum((-2, -1), keepdim=True)
    return sums * (square / (square + eps).sqrt() / (1 + square))


def plain_attention(given: Leaves, window: Window | None, *, iterations: int = 1, normalize: bool = True) -> Leaves:
    call = Plain(given, window)
    query = given.get("parents")
    query = query if query is None or window is None else query.movedim(1, 3).flatten(1, 2)
    query = query[:, None] if query is not None and window is None else query
    pose = call.votes.shape[-2:]
    shares = call.even()
    for _ in range(iterations):
        if query is not None:
            shares = (call.agreement(query) * pose.numel() ** -0.5).softmax(-1)
        query = call.sums(shares)
        if normalize:
            affine = given.get("norm_weight"), given.get("norm_bias")
            query = F.layer_norm(query.flatten(-2), [pose.numel()], *affine).unflatten(-1, pose)
    return {"poses": call.public(query), "coefficients": call.coefficients(shares)}


def plain_dynamic(
    given: Leaves,
    window: Window | None,
    *,
    iterations: int,
    compete: str = "parents",
    detach: bool = False,
    leaky: bool = False,
    eps: float = 0.0,
) -> Leaves:
    call = Plain(given, window)
    logits = torch.zeros_like(call.votes[..., 0, 0]) + given.get("prior", 0.0)
    for turn in range(iterations):
        if compete == "children":
            shares = call.over_children(logits)
        elif leaky:
            shares = F.pad(logits, (0, 1)).softmax(-1)[..., :-1]
        else:
            shares = logits.softmax(-1)
        shares = shares.detach() if detach else shares
        if compete == "children":  # their gates are in the shares
            parents = squashed(torch.einsum("blim,blimce->blmce", shares, call.votes), eps)
        else:
            parents = squashed(call.sums(shares), eps)
        if turn < iterations - 1:
            logits = logits + call.agreement(parents)
    return {"poses": call.public(parents), "coefficients": call.coefficients(shares)}


def plain_pool(given: Leaves, window: Window | None, *, iterations: int, sharpness: float) -> Leaves:
    call = Plain(given, window)
    keys = call.votes / call.votes.masked_fill(call.there[..., None, None, None] == 0, 1.0).norm(
        dim=(-2, -1), keepdim=True
    )
    logits = torch.zeros_like(call.votes[..., 0, 0])
    for turn in range(iterations + 1):
        shares = call.over_children(logits)
        sums = torch.einsum("blim,blimce->blmce", shares, call.votes)
        if turn < iterations:
            logits = logits + sharpness * call.agreement(sums / sums.norm(dim=(-2, -1), keepdim=True), keys)
    return {"poses": call.public(sums), "coefficients": call.coefficients(shares)}


def _moments(call: Plain, shares: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    used = call.gate[..., None] * shares
    counts = used.sum(2)
    normal = used / (counts[:, :, None] + eps)
    means = (normal[..., None, None] * call.votes).sum(2)
    variances = (normal[..., None, None] * (call.votes - means[:, :, None]).square()).sum(2) + eps
    return used, counts, means, variances


def _log_density(call: Plain, means: Tensor, variances: Tensor) -> Tensor:
    distance = ((call.votes - means[:, :, None]).square() / (2 * variances[:, :, None])).sum((-2, -1))
    return -distance - variances.sqrt().log().sum((-2, -1))[:, :, None]


def plain_em(given: Leaves, window: Window | None, *, iterations: int, heat: float, eps: float = 1e-8) -> Leaves:
    call = Plain(given, window)
    shares = call.even()
    logits = torch.zeros(())
    for turn in range(iterations):
        shares = shares if turn == 0 else logits.softmax(-1)
        _, counts, means, variances = _moments(call, shares, eps)
        log_sigma = variances.sqrt().log().sum((-2, -1))
        cost = (means.shape[-2] * means.shape[-1] * given["beta_u"] + log_sigma) * counts
        scores = heat * (given["beta_a"] - cost)
        logits = F.logsigmoid(scores)[:, :, None] + _log_density(call, means, variances)
    results = {"poses": call.public(means), "activations": call.public(scores.sigmoid())}
    return {**results, "coefficients": call.coefficients(shares)}


def plain_heinsen(given: Leaves, window: Window | None, *, iterations: int, model: str, eps: float = 1e-5) -> Leaves:
    call = Plain({**given, "gate": given["gate"].sigmoid()}, window)
    shares = call.even()
    logits = torch.zeros(())
    for turn in range(iterations):
        shares = shares if turn == 0 else logits.softmax(-1)
        used, _, means, variances = _moments(call, shares, eps)
        ignored = call.gate[..., None] - used
        scores = (given["beta_use"] * used - given["beta_ignore"] * ignored).sum(2)
        log_p = _log_density(call, means, variances)
        if model == "kmeans":
            log_p = -(call.votes - means[:, :, None]).square().sum((-2, -1))
        logits = F.logsigmoid(scores)[:, :, None] + log_p
    results = {"poses": call.public(means), "scores": call.public(scores), "variances": call.public(variances)}
    return {**results, "coefficients": call.coefficients(shares)}


# ---- the list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """A public function with some settings, and its formulas with the same.

    ``leaves``: the tensors that it is given. ``turns``: how often its votes are read; ``first``: whether the first of
    these turns has no query and no state.
    """

    name: str
    function: Callable[..., Any]
    formulas: Callable[..., Leaves]
    leaves: tuple[str, ...]
    settings: Mapping[str, Any]
    plain_settings: Mapping[str, Any]
    results: tuple[str, ...] = ("poses",)
    turns: int = 3
    first: bool = True

    def __str__(self) -> str:
        return self.name

    def ours(self, given: Leaves, window: Window | None = None, coefficients: bool = False, **other: Any) -> Leaves:
        """What the public function returns, by name."""
        renamed = {_ARGUMENTS.get((self.function, name), name): tensor for name, tensor in given.items()}
        settings = {**self.settings, **other}
        found = self.function(**renamed, window=window, return_coefficients=coefficients, **settings)
        return by_name(found, self.results + (("coefficients",) if coefficients else ()), self.function)

    def plain(self, given: Leaves, window: Window | None = None, coefficients: bool = False) -> Leaves:
        found = self.formulas(given, window, **self.plain_settings)
        return {name: found[name] for name in self.results + (("coefficients",) if coefficients else ())}

    def tensors(self, window: Window | None = None, dtype: torch.dtype = torch.float64, batch: int = BATCH) -> Leaves:
        """Return its tensors, drawn anew but always the same."""
        rows, depth, columns = POSE
        draw = torch.Generator().manual_seed(7)
        grid = () if window is None else GRID
        types = COUNT if window is None else TYPES
        count = types * (1 if window is None else window.positions)
        size = () if window is None else window.output_size(*GRID)
        columns = columns if "weight" in self.leaves else depth
        shapes = {
            "children": (batch, types, *grid, rows, depth),
            "weight": (count, PARENTS, depth, columns),
            "bias": (count, PARENTS, rows, columns),
            "gate": (batch, types, *grid),
            "parents": (batch, PARENTS, *size, rows, columns),
            "norm_weight": (rows * columns,),
            "norm_bias": (rows * columns,),
            "beta_u": (PARENTS,),
            "beta_a": (PARENTS,),
            "beta_use": (count, PARENTS),
            "beta_ignore": (count, PARENTS),
            "prior": (count, PARENTS),
        }
        given = {name: torch.randn(shapes[name], generator=draw, dtype=torch.float64) for name in self.leaves}
        if "gate" in given and self.function is not heinsen_routing:  # elsewhere gates are no logits
            given["gate"] = given["gate"].sigmoid()
        return {name: tensor.to(dtype) for name, tensor in given.items()}


_ARGUMENTS = {(em_routing, "gate"): "activations", (heinsen_routing, "gate"): "scores"}
_TODAY = {heinsen_routing: ("scores", "poses", "variances", "coefficients")}


def by_name(found: Any, names: tuple[str, ...], function: Any = None) -> Leaves:
    """Return results by name, whether they come as a tensor, as a named tuple (poses first) or as a plain tuple."""
    if isinstance(found, Tensor):
        found = (found,)
    if hasattr(found, "poses"):
        return {name: getattr(found, name) for name in names}
    order = tuple(name for name in _TODAY.get(function, names) if name in names)
    given = dict(zip(order, found, strict=True))
    return {name: given[name] for name in names}


VOTES = ("children", "weight", "bias", "gate")
AFFINE = ("norm_weight", "norm_bias")


def _row(
    name: str, function: Any, formulas: Any, leaves: Any, settings: Any, plain: Any = None, **other: Any
) -> Routing:
    return Routing(name, function, formulas, tuple(leaves), settings, settings if plain is None else plain, **other)


def _attention(name: str, leaves: Any, **settings: Any) -> Routing:
    first, turns = "parents" not in leaves, settings.get("iterations", 1)
    return _row(name, inverted_attention_routing, plain_attention, leaves, settings, turns=turns, first=first)


def _dynamic(name: str, *more: str, **settings: Any) -> Routing:
    return _row(name, dynamic_routing, plain_dynamic, (*VOTES, *more), {"iterations": 3, **settings})


def _heinsen(model: str) -> Routing:
    settings = {"iterations": 3, "model": model}
    leaves, results = (*VOTES, "beta_use", "beta_ignore"), ("poses", "scores", "variances")
    return _row(f"heinsen-{model}", heinsen_routing, plain_heinsen, leaves, settings, results=results)


_POOL = {"iterations": 2, "sharpness": 0.7}
ROUTINGS = [
    _attention("attention-uniform", (*VOTES, *AFFINE)),
    _attention("attention-1", (*VOTES, "parents", *AFFINE)),
    _attention("attention-3", (*VOTES, *AFFINE), iterations=3),
    _attention("attention-3-plain", (*VOTES, "parents"), iterations=3, normalize=False),
    _dynamic("dynamic-parents"),
    _dynamic("dynamic-children", compete="children"),
    _dynamic("dynamic-detach", detach=True),
    _dynamic("dynamic-children-detach", compete="children", detach=True),
    _dynamic("dynamic-leaky", leaky=True),
    _dynamic("dynamic-prior", "prior", eps=1e-3),
    _dynamic("dynamic-children-prior", "prior", compete="children", eps=1e-3),
    _row("pool", routing_pool, plain_pool, ("children", "gate"), _POOL),
    _row("pool-weights", routing_pool, plain_pool, VOTES, _POOL),
    _row(
        "em",
        em_routing,
        plain_em,
        (*VOTES, "beta_u", "beta_a"),
        {"iterations": 3, "inverse_temperature": 0.3},
        {"iterations": 3, "heat": 0.3},
        results=("poses", "activations"),
    ),
    _heinsen("gaussian"),
    _heinsen("kmeans"),
]
BY_NAME = {routing.name: routing for routing in ROUTINGS}


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 1e-8, atol: float = 1e-9) -> None:
    """Assert that two sets of results are equal, name by name."""
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, wanted[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


class NothingRuns(TorchDispatchMode):
    """Within it no routing and no product of the library may start: what is wrong must be said before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastcaps" or func.overloadpacket in _PRODUCTS:
            raise AssertionError(f"{func} ran")
        return func(*args, **(kwargs or {}))


_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "native_layer_norm")
}


def number(results: Mapping[str, Tensor]) -> Tensor:
    """Return one number that depends on all results, in different ways."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in results.values():
        slope = torch.linspace(-1, 2, tensor.numel(), dtype=torch.float64).view(tensor.shape)
        total = total + (tensor.double() * slope).sum()
    return total


__all__ = ["BY_NAME", "ROUTINGS", "WINDOWS", "Leaves", "NothingRuns", "Routing", "by_name", "close", "number"]
