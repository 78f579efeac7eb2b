"""The four verbs of votes against votes that are stored, what PyTorch does with them, and what is wrong with a call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from features import Called, Largest, close, number
from stored_votes import APART, CASES, PADDED, Case, Stored, all_verbs, derivatives, made, rout, seen, verbs
from torch import Tensor, func
from torch._dynamo.utils import counters
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import fastcaps
from fastcaps import BackendError, Votes, Window, backend, backends, functional
from fastcaps.functional import Capsules
from fastcaps.ops import verbs as verb_ops

native = pytest.mark.skipif(not backends.native_serves("verbs"), reason="no native CPU kernels of the verbs")
WAYS = ("default", "cpu", "reference")
IN_BLOCKS = ("own", "two-groups", "no-matrix-own-bias", "empty", "grid-shared-over-space", "patches")


@contextmanager
def run_by(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run by a backend; "blocks": by the reference, in blocks of one child."""
    with (
        monkeypatch.context() as patch,
        nullcontext() if way == "default" else backend(way.replace("blocks", "reference")),
    ):
        if way == "blocks":
            patch.setattr("fastcaps.reference.verbs.BLOCK", 1)
        yield


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[native] if way == "cpu" else [])
        for name, way in (*product(CASES, WAYS), *product(IN_BLOCKS, ["blocks"]))
    ],
)
def test_results_and_two_derivatives(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    given = case.leaves()
    with run_by(way, monkeypatch):
        found = derivatives(lambda leaves: all_verbs(case, leaves), given)
    close(found, derivatives(lambda leaves: all_verbs(case, leaves, Stored), given))


@native
@pytest.mark.parametrize("compiled", [False, True])
def test_a_verbs_gradient_is_one_pull(compiled: bool) -> None:
    """Of children, weight and bias, and of all that the verb takes besides, also in a compiled graph."""
    case, called = CASES["own"], Called()
    leaves = {k: x.requires_grad_() for k, x in case.leaves().items()}
    parents, p, r = (leaves[name] for name in ("parents", "p", "r"))
    runs: list[Callable[[Votes], Tensor]] = [
        *(lambda votes: votes.agreement(parents), lambda votes: votes.distance(parents, p)),
        *(lambda votes: votes.sum(r), lambda votes: votes.square_sum(r, parents)),
    ]
    for run in runs:
        call: Any = lambda given, run=run: run(case.votes(Votes, given))  # noqa: E731
        found = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(leaves)
        with called:
            found.sum().backward()
    assert [name for name, _ in called.calls if name.startswith("fastcaps::")] == 4 * ["fastcaps::vote_pull"]


@pytest.mark.parametrize("name", ["own", "grid-shared-over-space", "patches"])
def test_derivatives_are_finite_differences(name: str) -> None:
    """In forward mode too, and over each other."""
    case = CASES[name]
    given = {key: x[:1] if key in ("children", "parents", "p", "r") else x for key, x in case.leaves().items()}

    def call(numbers: Tensor) -> Tensor:
        parts = numbers.split([x.numel() for x in given.values()])
        leaves = {key: part.view_as(x) for part, (key, x) in zip(parts, given.items(), strict=True)}
        return torch.cat([x.flatten() for x in all_verbs(case, leaves).values()])

    flat = torch.cat([x.flatten() for x in given.values()]).requires_grad_()
    assert torch.autograd.gradcheck(call, flat, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, flat, fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("way", ["default", "blocks"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["own", "one-group", "one-matrix", "grid"])
def test_half_precision(name: str, autocast: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes of rounded numbers, results in float32; gradients have the dtype of what they are of."""
    case = CASES[name]
    given = case.leaves(torch.float32 if autocast else torch.bfloat16)
    parts = ("children", "weight", "bias")
    rounded = {k: (x.bfloat16() if k in parts else x).double() for k, x in given.items()}
    leaves = {k: x.requires_grad_() for k, x in given.items()}
    with run_by(way, monkeypatch), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        found = all_verbs(case, leaves)
    gradients = torch.autograd.grad(number(found), list(leaves.values()))
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves.values()]
    wanted = derivatives(lambda leaves: all_verbs(case, leaves, Stored), rounded)
    for key, x in found.items():
        torch.testing.assert_close(x.double(), wanted[key], rtol=1e-5, atol=1e-5, msg=key)
    for key, x in zip(leaves, gradients, strict=True):
        exact = wanted[f"d{key}"]  # eight results have each a gradient that is rounded
        assert (x.double() - exact).abs().max() <= 8 * 2.0**-9 * exact.abs().max(), key


def test_the_gradient_of_one_matrix_that_is_a_leaf() -> None:
    """Its columns share memory, but each has its own gradient."""
    case, given = CASES["own"], CASES["own"].leaves()
    given["weight"] = given["weight"][:, :1].expand(-1, 3, -1, -1)
    close(derivatives(lambda x: all_verbs(case, x), given), derivatives(lambda x: all_verbs(case, x, Stored), given))


def test_the_sizes_of_votes() -> None:
    case = CASES["grid"]
    votes, given = case.votes(Votes, case.leaves()), case.leaves()
    assert (votes.count, votes.parents, votes.pose_shape) == (12, 3, (2, 2))
    assert votes.coefficients_shape == given["r"].shape and votes.parents_shape == given["parents"].shape
    described = "coefficients=[2, 3, 5, 12, 3], parents=[2, 3, 3, 5, 2, 2], dtype=torch.float64, device=cpu"
    assert repr(votes) == f"Votes({described})"
    assert (votes.dtype, votes.device) == (torch.float64, torch.device("cpu"))
    assert torch.equal(votes.present.expand(2, -1, -1, -1), ~case.votes(Stored, given).absent[..., 0])
    own = CASES["own"].votes(Votes, CASES["own"].leaves())
    assert own.present.all() and own.present.shape == (1, 3)


@pytest.mark.parametrize("more", [(), (3,), (3, 2)])
def test_fold_is_the_adjoint_of_unfold(more: tuple[int, ...]) -> None:
    case = CASES["grid"]
    votes = case.votes(Votes, case.leaves())
    x = torch.randn(*votes.children.shape[:4], *more, dtype=torch.float64, requires_grad=True)
    y = torch.randn(*votes.coefficients_shape[:4], *more, dtype=torch.float64, requires_grad=True)
    assert torch.equal(votes.unfold(x), seen(x, PADDED))
    torch.testing.assert_close((votes.unfold(x) * y).sum(), (x * votes.fold(y)).sum())
    (folded,) = torch.autograd.grad((seen(x, PADDED) * y).sum(), x)
    torch.testing.assert_close(votes.fold(y), folded)
    assert torch.autograd.gradgradcheck(votes.fold, y, fast_mode=True, check_fwd_over_rev=True)
    child = seen(torch.arange(x.numel()).view(x.shape) + 1, PADDED).flatten()  # whose number each one is
    highest = torch.full((x.numel() + 1,), -torch.inf, dtype=y.dtype).scatter_reduce(0, child, y.flatten(), "amax")
    assert torch.equal(votes.fold(y, "amax").flatten(), highest[1:])
    mapped = func.vmap(votes.fold)(torch.stack([y, 2 * y]))
    torch.testing.assert_close(mapped[1], 2 * folded)
    own = CASES["own"].votes(Votes, CASES["own"].leaves())
    values = torch.randn(*own.coefficients_shape[:-1], *more, dtype=torch.float64)
    assert own.fold(values) is values and own.unfold(values) is values  # a set has no windows


# ---- memory ----------------------------------------------------------------------------------------------------------


LARGE: dict[str, Any] = {"types": 2, "grid": (6, 6), "window": Window(3, 2), "parents": 12, "pose": (4, 4, 4)}
MANY = {
    "own": Case(types=32, parents=12, pose=(4, 4, 4)),
    "two-for-each-matrix": Case(types=32, groups=16, parents=12, pose=(4, 4, 4)),
    "no-matrix": Case(types=32, groups=0, parents=12, pose=(4, 4, 4), bias="1M"),
    "one-matrix": Case(types=32, groups=1, parents=12, pose=(4, 4, 4), expanded=True),
    "grid": Case(**LARGE, batch=4),
    "patches": Case(**{**LARGE, "window": Window(3, 3)}, groups=2, batch=8),
}


@pytest.mark.parametrize("way", ["default", "blocks"])
@pytest.mark.parametrize("name", [*MANY, "made"])
def test_no_tensor_has_the_size_of_the_votes(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of verbs and a user's routing, forward and backward: at most 4 numbers for each pair, of 16 in a vote."""
    case = MANY["own" if name == "made" else name]
    leaves = {k: x.requires_grad_() for k, x in case.leaves(torch.float32).items()}
    with run_by(way if backends.native_serves("verbs") else "blocks", monkeypatch), Largest() as largest, largest.hooks:
        votes = made(leaves, (2,), block=2) if name == "made" else case.votes(Votes, leaves)
        number(verbs(votes, leaves)).backward()
        number({"parents": rout(votes)}).backward()
    pairs = leaves["r"].numel()
    assert largest.numbers <= max(4 * pairs, *(x.numel() for x in leaves.values())), largest.numbers / pairs


# ---- what PyTorch does with them -------------------------------------------------------------------------------------

TRANSFORMED = ["own", "one-group", "grid"]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func(name: str) -> None:
    """vmap over everything, and the gradient of each of several calls."""
    case = CASES[name]
    stacked = {k: torch.stack([x, 0.5 * x]) for k, x in case.leaves().items()}
    found = func.vmap(lambda given: all_verbs(case, given))(stacked)
    slopes = func.vmap(func.grad(lambda given: number(all_verbs(case, given))))(stacked)
    for k in range(2):
        one = {key: x[k] for key, x in stacked.items()}
        wanted = derivatives(lambda leaves: all_verbs(case, leaves, Stored), one)
        close({key: x[k] for key, x in found.items()}, {key: wanted[key] for key in found})
        close({key: x[k] for key, x in slopes.items()}, {key: wanted[f"d{key}"] for key in slopes})
    made_once = func.grad(lambda x: number(verbs(made({**one, "children": x}, (2,), 1), one)))
    if name == "own":
        close({"dchildren": made_once(one["children"])}, {"dchildren": wanted["dchildren"]})


def test_a_checkpoint_and_hooks_that_move_what_is_saved() -> None:
    case = CASES["grid"]
    leaves = {k: x.requires_grad_() for k, x in case.leaves().items()}
    direct = torch.autograd.grad(number(all_verbs(case, leaves)), list(leaves.values()))
    with torch.autograd.graph.save_on_cpu():
        found = checkpoint(lambda given: number(all_verbs(case, given)), leaves, use_reentrant=False)
    for keep in (True, False):
        assert all(map(torch.equal, torch.autograd.grad(found, list(leaves.values()), retain_graph=keep), direct))


class Mine(fastcaps.nn.RoutingLayer):
    """A user's routing as a layer; ``extra`` are further results."""

    extra: Any = ()

    def route(self, votes: Votes, activations: Tensor | None, iterations: int) -> Any:
        parents = rout(votes, iterations)
        return (parents, *self.extra) if self.extra else parents


def small_layer() -> tuple[Mine, Tensor]:
    return Mine(2, 3, 4, 4, kernel_size=3, padding=1, bias=True), torch.randn(2, 2, 5, 4, 4)


@pytest.mark.parametrize("kind", ["made", "layer"])
def test_one_graph_for_all_sizes(kind: str) -> None:
    """Compiled and trained; a layer is exported too, and its ops stay ops."""
    torch._dynamo.reset()
    counters.clear()
    layer, _ = small_layer()

    def run(children: Tensor, weight: Tensor) -> Tensor:
        if kind == "layer":
            return layer(children.reshape(-1, 2, 5, 4, 4), iterations=1)
        votes = made({"children": children, "weight": weight}, (children.shape[0],), 5)
        return votes.sum(votes.agreement(votes.sum(1 / votes.parents)).softmax(-1))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    weight = torch.randn(10, 3, 4, 4) / 4
    for batch in (7, 9):
        children = torch.randn(batch, 10, 4, 4, requires_grad=True)
        results = compiled(children, weight), run(children, weight)
        both = [(y, *torch.autograd.grad(y.sum(), children)) for y in results]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1
    if kind == "made":
        return
    module = torch.nn.Module()
    module.forward = run  # type: ignore[method-assign]
    program = torch.export.export(module, (children, weight), dynamic_shapes=({0: Dim.AUTO}, None))
    torch.testing.assert_close(program.module()(children[:3], weight), run(children[:3], weight), rtol=1e-4, atol=1e-4)
    called = {str(node.target).partition("_")[0] for node in program.graph.nodes}
    assert "fastcaps.vote" in called


def test_a_layer_of_ones_own() -> None:
    layer, children = small_layer()
    other = copy.deepcopy(layer)
    assert layer(children).shape == (2, 3, 5, 4, 4) and torch.equal(other(children), layer(children))
    assert set(layer.state_dict()) == {"weight", "bias"}
    fresh = Mine(2, 3, 4, 4, kernel_size=3, padding=1, bias=True)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(children, iterations=1), layer(children, iterations=1))
    assert layer.bfloat16()(children.bfloat16()).dtype == torch.bfloat16
    other.extra = (children,)
    assert other(children)[1] is children
    whole = Mine(2, 3, 4, 4, kernel_size="all", share=True)
    assert whole(children).shape == (2, 3, 4)


class Scaled(fastcaps.nn.RoutingLayer):
    """A routing with one more parameter and option, and without activations and coefficients."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def route(self, votes: Votes, *, factor: float = 1.0, scores: float = 0.0) -> Tensor:
        return votes.sum(self.scale * factor + scores)


def test_a_layer_with_more_of_its_own() -> None:
    layer, children = Scaled(6, 3, 16, 16, bias=True), torch.randn(2, 6, 16)
    torch.testing.assert_close(layer(children, factor=2.0), 2 * layer(children))
    torch.testing.assert_close(layer(children, scores=1.0), 2 * layer(children))
    before = layer.weight.clone()
    torch.nn.init.ones_(layer.bias)
    layer.reset_parameters()
    assert layer.scale == 1 and not layer.bias.any() and not torch.equal(layer.weight, before)


def test_explanations() -> None:
    own, shared = (CASES[name].votes(Votes, CASES[name].leaves()) for name in ("own", "one-group"))
    explained = fastcaps.explain(rout, own)
    assert len(explained) == 9 and {one.backend for one in explained} <= {"cpu", "reference", "torch"}
    assert explained[0].call.startswith("batch 2, 3 children") and explained[0].call.endswith("vote_sums")
    assert fastcaps.explain(shared.sum, 1.0).backend == "torch"
    for run in (rout, functional.dynamic_routing):
        explained = fastcaps.explain(lambda run=run: run(made(CASES["own"].leaves(), (2,), 2)))
        assert {one.backend for one in (explained if isinstance(explained, tuple) else [explained])} == {"reference"}


def test_distributed_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        case = CASES["own"]
        given = case.leaves()
        for name in given:
            with pytest.raises(NotImplementedError, match="must be plain tensors, got DTensors"):
                all_verbs(case, given | {name: DTensor.from_local(given[name], mesh)})
    finally:
        dist.destroy_process_group()


# ---- what is wrong is named ------------------------------------------------------------------------------------------

GRID_POSES = torch.randn(2, 3, 5, 4, 2, 2)  # parents of the layer below
SET, ON_GRID, POSES = torch.randn(2, 6, 4, 4), torch.randn(2, 6, 5, 5, 4, 4), torch.randn(2, 3, 4, 4)
MATRICES, ONES = torch.randn(6, 3, 4, 4), torch.ones
NESTED = torch.nested.nested_tensor([SET[0], SET[1]])
VOTES, NO_MATRIX = Votes(SET, MATRICES), Votes(SET, None, parents=3)
WINDOWED = Votes(ON_GRID, MATRICES, window=APART)


def make(batch: int = 2, **options: Any) -> Any:
    return lambda i, j: torch.ones(batch, j - i, 3, 4, 4, **options)


MADE = Votes.in_blocks(make(), 6)
dynamic, pool, attention = functional.dynamic_routing, functional.routing_pool, functional.inverted_attention_routing
em: Any = functional.em_routing
RoutingLayer: Any = fastcaps.nn.RoutingLayer
heinsen: Any = functional.heinsen_routing


def pull(needs: int) -> Any:
    return verb_ops.vote_pull(
        SET, MATRICES, None, None, 3, (1, 1, 1, 1, 0, 0, 1, 1), ONES(2, 6, 3), POSES, None, False, needs
    )


def changing(then: Any) -> Tensor:
    calls = iter((make(), *[then] * 9))
    return Votes.in_blocks(lambda i, j: next(calls)(i, j), 4).sum(1.0)


def routed(found: Any, **options: Any) -> Any:
    class Wrong(Mine):
        def route(self, votes: Votes, activations: Tensor | None, iterations: int = 3) -> Any:
            return found

    return Wrong(2, 3, 4, 4, kernel_size=3, padding=1)(small_layer()[1], **options)


def define(route: Any) -> None:
    type("Own", (RoutingLayer,), {"route": route})


WRONG: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "children must be a torch.Tensor, got int", lambda: Votes(3, None)),
    (ValueError, "weight [G, M, D, E] must have a G that divides the 6", lambda: Votes(SET, MATRICES[:4])),
    (ValueError, "parents must be the M = 3 of weight", lambda: Votes(SET, MATRICES, parents=4)),
    (ValueError, "parents must broadcast to ... = [2, 3, 4, 4], got [2, 4, 4]", lambda: VOTES.agreement(POSES[:, 0])),
    (ValueError, "means must broadcast to [B, M, *grid, C, E] = [2, 3, 2, 2, 4, 4]", lambda: WINDOWED.distance(POSES)),
    (TypeError, "precisions must be a torch.Tensor or a number, got list", lambda: VOTES.distance(POSES, [1.0])),
    (TypeError, "means must be a torch.Tensor or a number, got NoneType", lambda: VOTES.square_sum(1.0, None)),
    (TypeError, "parents and children must have the same dtype", lambda: VOTES.agreement(POSES.double())),
    (TypeError, "parents must be a dense tensor, got a nested one", lambda: VOTES.agreement(NESTED)),
    (ValueError, "coefficients must broadcast to ... = [2, 6, 3], got [5]", lambda: VOTES.sum(ONES(5))),
    (TypeError, "coefficients must be a torch.Tensor or a number, got str", lambda: VOTES.sum("all")),
    (TypeError, "coefficients and children ... same dtype, got torch.int64", lambda: VOTES.sum(ONES(3).long())),
    (ValueError, "coefficients must be on the device of children", lambda: VOTES.sum(ONES(3, device="meta"))),
    (ValueError, "values must have shape [B, Ho, Wo, I, ...", lambda: WINDOWED.fold(SET)),
    (ValueError, "values must have shape [B, N, H, W, ...] = [2, 6, 5, 5, ...], got", lambda: WINDOWED.unfold(SET)),
    (ValueError, "[B, *space, I, ...] = [2, 6, ...], got [2, 7]", lambda: VOTES.unfold(ONES(2, 7))),
    (TypeError, "weight must be given beside children", lambda: functional.dynamic_routing(SET)),
    (TypeError, "weight must be given beside children", lambda: functional.inverted_attention_routing(SET)),
    (ValueError, "[B, *space, I, ...] = [2, 6, ...], got [2, 7]", lambda: MADE.fold(ONES(2, 7))),
    (ValueError, "reduce must be one of 'sum', 'amax', got 'mean'", lambda: WINDOWED.fold(SET, "mean")),
    (TypeError, "values ... for 'amax', got torch.int64", lambda: WINDOWED.fold(ONES(2, 2, 2, 24).long(), "amax")),
    (ValueError, "coefficients must be a number that torch.float32 holds", lambda: VOTES.sum(10**400)),
    (ValueError, "parents must be a number that torch.float32 holds", lambda: VOTES.agreement(1e300)),
    (TypeError, "make(0, 4) must be a dense tensor, got a nested one", lambda: changing(lambda i, j: NESTED)),
    (ValueError, "make(0, 4) ... layout torch.strided", lambda: changing(lambda i, j: make()(i, j).to_sparse())),
    (TypeError, "values must be a torch.Tensor, got int", lambda: WINDOWED.fold(1)),
    (TypeError, "weight must be None beside votes", lambda: dynamic(VOTES, MATRICES)),
    (TypeError, "window must be None beside votes", lambda: pool(MADE, window=APART)),
    (ValueError, "parents must be the M = 3 of the votes, got 4", lambda: pool(NO_MATRIX, parents=4)),
    (ValueError, "parents must have shape ... got [2, 5, 4, 4]", lambda: attention(NO_MATRIX, None, ONES(2, 5, 4, 4))),
    (ValueError, "beta_u must have shape [M] = [3], got [5]", lambda: em(MADE, None, None, *ONES(2, 5))),
    (ValueError, "beta_use ... 3 or 1], got [1, 5]", lambda: heinsen(NO_MATRIX, None, None, None, *ONES(2, 1, 5))),
    (ValueError, "gate ... [B, *space, I] = [2, 6], got [2, 5]", lambda: dynamic(MADE, gate=ONES(2, 5))),
    (TypeError, "scores ... got torch.bool", lambda: heinsen(MADE, ONES(2, 6).bool(), None, None, *ONES(2, 1, 1))),
    (ValueError, "prior must be None with votes that a function", lambda: dynamic(MADE, prior=ONES(6, 3))),
    (ValueError, "leaky must be False", lambda: dynamic(MADE, leaky=True)),
    (BackendError, "backend 'cuda' is forced", lambda: backend("cuda")(VOTES.agreement)(POSES)),
    (BackendError, "backend 'cuda' is forced", lambda: backend("cuda")(NO_MATRIX.sum)(1.0)),
    (BackendError, "backend 'cpu' is forced ... votes in blocks", lambda: backend("cpu")(MADE.agreement)(POSES)),
    (TypeError, "make must be a function make(i, j) of votes, got Tensor", lambda: Votes.in_blocks(SET, 3)),
    (ValueError, "count must be an int >= 1, got 0", lambda: Votes.in_blocks(make(), 0)),
    (TypeError, "count must be an int >= 1, got Tensor", lambda: Votes.in_blocks(make(), SET)),
    (ValueError, "block must be an int >= 1, got 0", lambda: Votes.in_blocks(make(), 6, block=0)),
    (ValueError, "make(0, 1) must return ... got [2, 3, 4, 4]", lambda: Votes.in_blocks(lambda i, j: POSES, 6)),
    (TypeError, "make must return float32, ... got torch.int64", lambda: Votes.in_blocks(make(dtype=torch.int64), 6)),
    (TypeError, "make must return a torch.Tensor, got NoneType", lambda: Votes.in_blocks(lambda i, j: None, 6)),
    (ValueError, "make(0, 4) ... shape [2, 4, 3, 4, 4], got [3, 4, 3, 4, 4]", lambda: changing(make(3))),
    (ValueError, "make(0, 4) ... dtype torch.float32, got torch.float64", lambda: changing(make(dtype=torch.float64))),
    (ValueError, "make(0, 4) ... device cpu, got meta", lambda: changing(make(device="meta"))),
    (ValueError, "route must return parents of shape [2, 3, 5, 4, 2, 2], got [2, 5]", lambda: routed(ONES(2, 5))),
    (ValueError, "route must return parents of shape ... got NoneType", lambda: routed(None)),
    (ValueError, "route must return parents of shape ... got list", lambda: routed([GRID_POSES])),
    (ValueError, "route must return result 3 as a tensor, got int", lambda: routed((GRID_POSES, GRID_POSES, 3))),
    (ValueError, "activations of shape [2, 3, 5, 4], got [2, 3]", lambda: routed(Capsules(GRID_POSES, ONES(2, 3)))),
    (ValueError, "activations of shape [2, 3, 5, 4], got int", lambda: routed(Capsules(GRID_POSES, 1))),
    (TypeError, "return_coefficients (and a network's return_trace) must be left out: Wrong.route",
     lambda: routed(None, return_coefficients=True)),
    (TypeError, "a call of Wrong has no argument iteration (did you mean", lambda: routed(None, iteration=3)),
    (TypeError, "got a parameter num_iterations", lambda: define(lambda self, votes, num_iterations: None)),
    (TypeError, "must define route(self, votes, ... got route(self)", lambda: define(lambda self: None)),
    (TypeError, "got route(votes, at)", lambda: define(staticmethod(lambda votes, at: None))),
    (TypeError, "got route(self, iterations, votes)", lambda: define(lambda self, iterations, votes: None)),
    (TypeError, "got route(self, activations, votes)", lambda: define(lambda self, activations, votes: None)),
    (TypeError, "iterations must be left out: Scaled.route", lambda: Scaled(6, 3, 16, 16, iterations=2)),
    (TypeError, "pass factor in the call", lambda: Scaled(6, 3, 16, 16, factor=2.0)),
    (TypeError, "Own must define ... got a parameter bias", lambda: define(lambda self, votes, bias=None: None)),
    (TypeError, "Own must define ... got a parameter at", lambda: define(lambda self, votes, at: None)),
    (TypeError, "Own must define ... got a parameter more", lambda: define(lambda self, votes, **more: None)),
    (TypeError, "activations must be left out: Scaled.route", lambda: Scaled(6, 3, 16, 16)(SET.flatten(2), ONES(2, 6))),
    (ValueError, "needs must be from 0 to 31, bits for children, ... scores, sums, got 33", lambda: pull(33)),
    (NotImplementedError, "RoutingLayer must define route", lambda: RoutingLayer(6, 3, 16, 16)(SET.flatten(2))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "run"), WRONG, ids=[says[:30] for _, says, _ in WRONG])
def test_what_is_wrong_is_named(error: type[Exception], says: str, run: Callable[[], Any]) -> None:
    pattern = ".*".join(re.escape(part) for part in says.split(" ... "))
    with pytest.raises(error, match=pattern) as caught:
        run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", verb_ops.ops.values(), ids=verb_ops.ops)
def test_a_raw_op_refuses_a_meta_tensor_beside_others(op: Any) -> None:
    """Its fake kernel would answer with memory that nothing has written."""
    tensors = {"children": torch.ones(2, 3, 1, 2), "weight": torch.ones(3, 4, 2, 2), "bias": torch.ones(3, 4, 1, 2)}
    tensors |= {"coefficients": torch.ones(2, 3, 4), "means": torch.ones(2, 4, 1, 2)}
    tensors |= {"targets": tensors["means"], "precisions": tensors["means"]}
    others = {"parents": 4, "window": (1, 1, 1, 1, 0, 0, 1, 1), "squared": True, "power": 2, "needs": 7, "gate": None}
    names = [argument.name for argument in op._schema.arguments]
    op(*((tensors | others)[name] for name in names))
    for wrong in [name for name in names if name in tensors and name != "children"]:
        changed = tensors | others | {wrong: tensors[wrong].to("meta")}
        with pytest.raises(ValueError, match=f"^{wrong} must be on cpu, got meta$"):
            op(*(changed[name] for name in names))


@pytest.mark.parametrize("name", ["own", "one-group", "one-matrix", "grid", "made"])
def test_meta_tensors_tell_shapes(name: str) -> None:
    case = CASES["own" if name == "made" else name]
    leaves = {k: x.to("meta").requires_grad_() for k, x in case.leaves().items()}
    votes = made(leaves, (2,), 2) if name == "made" else case.votes(Votes, leaves)
    parents = rout(votes)
    parents.sum().backward()
    assert parents.shape == votes.parents_shape and leaves["children"].grad is not None


def test_the_gradient_of_a_value_that_broadcasts_is_summed_in_float32() -> None:
    votes = Votes(torch.randn(2, 40, 2, 4).bfloat16(), torch.randn(40, 3, 4, 4).bfloat16())
    narrow = torch.randn(1, 1, 1, 4).bfloat16().requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    for means in (narrow, wide):
        votes.square_sum(torch.ones(2, 40, 3), means).sum().backward()
    torch.testing.assert_close(narrow.grad, wide.grad.bfloat16(), rtol=0, atol=0)
