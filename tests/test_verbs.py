"""The four verbs of votes, and routings over votes that a function makes, against votes that are stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from features import ROUTINGS, Leaves, Routing, close, number, training
from torch import Tensor, func
from torch.export import Dim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fastcaps
from fastcaps import Votes, Window, backend, backends, functional

PADDED = Window((3, 2), (2, 1), (2, 1), (1, 2))  # dilated; some positions see padding alone
APART = Window(2, 2)  # every child under one window at most: the library's products


class Stored:
    """Votes as everybody stores them, ``[B, *grid, I, M, C, E]``, with the verbs of :class:`fastcaps.Votes`."""

    def __init__(self, children: Any, weight: Any, bias: Any = None, window: Any = None, *, parents: int = 1) -> None:
        poses, there = children, children.new_ones(children.shape[:2])
        if window is not None:
            poses, there = seen(children, window), seen(children.new_ones(children.shape[:4]), window)
        every = [parents * [pose] if weight is None else [pose @ w for w in weight[i % len(weight)]]
                 for i, pose in enumerate(poses.unbind(-3))]  # fmt: skip
        votes = torch.stack([torch.stack(each, -3) for each in every], -4)
        self.there = there[..., None]
        self.votes = (votes if bias is None else votes + bias) * self.there[..., None, None]
        self.parents = votes.shape[-3]

    @classmethod
    def of(cls, votes: Tensor) -> Stored:
        stored = cls.__new__(cls)
        stored.votes, stored.there, stored.parents = votes, torch.ones_like(votes[..., :1, 0, 0]), votes.shape[-3]
        return stored

    def agreement(self, parents: Tensor) -> Tensor:
        return (self.votes * parents.movedim(1, -3).unsqueeze(-4)).sum((-2, -1))

    def distance(self, means: Tensor, precisions: Tensor | None = None) -> Tensor:
        squares = (self.votes - means.movedim(1, -3).unsqueeze(-4)).square()
        p = 1 if precisions is None else precisions.movedim(1, -3).unsqueeze(-4)
        return (p * squares).sum((-2, -1)) * self.there

    def sum(self, coefficients: Any) -> Tensor:
        r = torch.as_tensor(coefficients, dtype=self.votes.dtype).expand(self.votes.shape[:-2])
        return (r[..., None, None] * self.votes).sum(-4).movedim(-3, 1)

    def square_sum(self, coefficients: Any, means: Tensor) -> Tensor:
        r = (torch.as_tensor(coefficients) * self.there)[..., None, None]
        return (r * (self.votes - means.movedim(1, -3).unsqueeze(-4)).square()).sum(-4).movedim(-3, 1)


def seen(values: Tensor, window: Window) -> Tensor:
    """Return ``[B, N, H, W, ...]`` as ``[B, Ho, Wo, I, ...]``, one position under the window after another."""
    kh, kw, sh, sw, ph, pw, dh, dw = window.spec
    ho, wo = window.output_size(*values.shape[2:4])
    grid = F.pad(values.movedim(1, 3), [0, 0] * (values.dim() - 3) + [pw, pw, ph, ph])
    rows = [[y * sh + ky * dh for y in range(ho)] for ky in range(kh)]
    columns = [[x * sw + kx * dw for x in range(wo)] for kx in range(kw)]
    return torch.cat([grid[:, down][:, :, across] for down in rows for across in columns], 3)


@dataclass(frozen=True)
class Case:
    """Sizes and forms of the votes; ``groups``: 0 is no matrix, ``expanded`` one for all parents."""

    batch: int = 2
    types: int = 3
    grid: tuple[int, ...] = ()
    window: Window | None = None
    parents: int = 3
    pose: tuple[int, int, int] = (2, 3, 2)
    groups: int = 3
    bias: str = ""
    expanded: bool = False
    strided: bool = False

    def leaves(self, dtype: torch.dtype = torch.float64) -> Leaves:
        """Return children, weight and bias, parents, precisions and coefficients."""
        rows, depth, columns = self.pose
        seen = self.types * (1 if self.window is None else self.window.positions)
        places = () if self.window is None else self.window.output_size(*self.grid)
        poses = (self.batch, self.parents, *places, rows, columns if self.groups else depth)
        shapes = {"children": (self.batch, self.types, *self.grid, rows, depth)}
        if self.groups:
            shapes["weight"] = (self.groups, 1 if self.expanded else self.parents, depth, columns)
        if self.bias:
            lead = (seen if self.bias[0] == "I" else 1, self.parents if self.bias[1] == "M" else 1)
            shapes["bias"] = (*lead, *poses[-2:])
        shapes |= {"parents": poses, "p": poses, "r": (self.batch, *places, seen, self.parents)}
        draw = torch.Generator().manual_seed(7)
        given = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
        wide = torch.promote_types(dtype, torch.float32)
        given = {name: x.to(wide if name in ("parents", "p", "r") else dtype) for name, x in given.items()}
        if self.strided:  # the dimensions in reverse order, every stride doubled
            for name, x in given.items():
                room = x.new_full([2 * size for size in reversed(x.shape)], torch.nan)
                view = room[(slice(None, None, 2),) * x.dim()].permute(*reversed(range(x.dim())))
                given[name] = view.copy_(x)
        return given

    def votes(self, kind: Any, given: Leaves) -> Any:
        weight = given.get("weight")
        if weight is not None and self.expanded:
            weight = weight.expand(-1, self.parents, -1, -1)
        return kind(given["children"], weight, given.get("bias"), self.window, parents=self.parents)


GRID: dict[str, Any] = {"grid": (4, 5), "types": 2, "window": PADDED}
PATCHES: dict[str, Any] = {"grid": (4, 5), "types": 2, "window": APART}
CASES = {
    "own": Case(bias="IM"),
    "one-group": Case(groups=1, types=8, bias="1M"),
    "two-groups": Case(groups=2, types=6, bias="I1", pose=(1, 2, 3)),
    "no-matrix": Case(groups=0, types=5, bias="11", pose=(2, 3, 3)),
    "no-matrix-own-bias": Case(groups=0, types=5, bias="IM", pose=(2, 3, 3)),
    "one-matrix": Case(groups=1, types=5, expanded=True, bias="IM"),
    "own-matrix-for-all-parents": Case(groups=3, expanded=True),
    "one-parent": Case(parents=1, bias="I1"),
    "one-child": Case(types=1, groups=1, parents=5),
    "single": Case(batch=1, types=1, groups=1, parents=1, pose=(1, 1, 1)),
    "primes": Case(batch=3, types=11, groups=11, parents=7, pose=(5, 3, 7)),
    "empty": Case(batch=0, bias="IM"),
    "empty-grid": Case(**GRID, batch=0, groups=2),
    "strided": Case(strided=True, bias="IM"),
    "grid": Case(**GRID, groups=12, bias="IM"),
    "grid-shared-over-space": Case(**GRID, groups=2, bias="1M"),
    "grid-one-group": Case(**GRID, groups=1, bias="I1", parents=2),
    "grid-no-matrix": Case(**GRID, groups=0, pose=(1, 2, 2), bias="11"),
    "grid-one-matrix": Case(**GRID, groups=2, expanded=True, bias="1M"),
    "grid-strided": Case(**GRID, groups=12, strided=True),
    "patches": Case(**PATCHES, groups=2, bias="IM"),
    "patches-no-matrix": Case(**PATCHES, groups=0, pose=(1, 2, 2), bias="1M"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
native = pytest.mark.skipif(not backends.native_serves("verbs"), reason="no native CPU kernels of the verbs")
every_way = pytest.mark.parametrize("way", ["default", pytest.param("cpu", marks=native), "reference", "blocks"])


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


def verbs(votes: Any, given: Leaves) -> Leaves:
    """Return what all verbs return; coefficients broadcast, parents of two kinds."""
    parents, p, r = (given[name] for name in ("parents", "p", "r"))
    return {
        "agreement": votes.agreement(parents),
        "distance": votes.distance(parents),
        "weighted distance": votes.distance(p, parents),
        "sum": votes.sum(r),
        "mean": votes.sum(1 / votes.parents),
        "sum of one": votes.sum(r[:, ..., :1, :]),
        "square_sum": votes.square_sum(r, parents),
        "square_sum of one": votes.square_sum(r[..., :1], p),
    }


def all_verbs(case: Case, given: Leaves, kind: Any = Votes) -> Leaves:
    return verbs(case.votes(kind, given), given)


def derivatives(run: Callable[[Leaves], Leaves], given: Leaves) -> Leaves:
    """Return results, first derivatives of a number made of them, and second ones of a number made of these."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    found, every = run(leaves), list(leaves.values())
    first = torch.autograd.grad(number(found), every, create_graph=True)
    found |= {f"d{name}": x for name, x in zip(leaves, first, strict=True)}
    second = torch.autograd.grad(number({str(k): x for k, x in enumerate(first)}), every)
    return found | {f"dd{name}": x for name, x in zip(leaves, second, strict=True)}


@every_way
@every_case
def test_results_and_two_derivatives(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case.leaves()
    with run_by(way, monkeypatch):
        found = derivatives(lambda leaves: all_verbs(case, leaves), given)
    close(found, derivatives(lambda leaves: all_verbs(case, leaves, Stored), given))


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


def test_the_sizes_of_votes() -> None:
    case = CASES["grid"]
    votes, given = case.votes(Votes, case.leaves()), case.leaves()
    assert (votes.count, votes.parents, votes.pose_shape) == (12, 3, (2, 2))
    assert votes.coefficients_shape == given["r"].shape and votes.parents_shape == given["parents"].shape
    assert (votes.dtype, votes.device) == (torch.float64, torch.device("cpu"))
    assert torch.equal(votes.present.expand(2, -1, -1, -1), case.votes(Stored, given).there[..., 0] > 0)
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
    mapped = func.vmap(votes.fold)(torch.stack([y, 2 * y]))
    torch.testing.assert_close(mapped[1], 2 * folded)
    own = CASES["own"].votes(Votes, CASES["own"].leaves())
    assert own.fold(y) is y and own.unfold(x) is x  # a set has no windows


# ---- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Sees how many numbers the largest tensor has that anything makes, or that autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.see, lambda x: x)

    def see(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            self.see(x)
        return result


LARGE: dict[str, Any] = {"types": 8, "grid": (9, 9), "window": Window(3, 2), "parents": 12, "pose": (4, 4, 4)}
MANY = {
    "own": Case(types=96, groups=96, parents=24, pose=(4, 4, 4)),
    "two-for-each-matrix": Case(types=96, groups=48, parents=24, pose=(4, 4, 4)),
    "no-matrix": Case(types=96, groups=0, parents=24, pose=(4, 4, 4), bias="1M"),
    "one-matrix": Case(types=96, groups=1, parents=24, pose=(4, 4, 4), expanded=True),
    "grid": Case(**LARGE, groups=72, batch=4),
    "patches": Case(**{**LARGE, "window": Window(3, 3)}, groups=8, batch=8),
}


@pytest.mark.parametrize("way", ["default", "blocks"])
@pytest.mark.parametrize("name", [*MANY, "made"])
def test_no_tensor_has_the_size_of_the_votes(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of verbs and a routing of one's own, forward and backward: at most 4 numbers for each pair, of 16 in a vote."""
    case = MANY["own" if name == "made" else name]
    leaves = {k: x.requires_grad_() for k, x in case.leaves(torch.float32).items()}
    with run_by(way if backends.native_serves("verbs") else "blocks", monkeypatch), Largest() as largest, largest.hooks:
        votes = made(leaves, (2,), block=2) if name == "made" else case.votes(Votes, leaves)
        number(verbs(votes, leaves)).backward()
        number({"parents": rout(votes)}).backward()
    pairs = leaves["r"].numel()
    assert largest.numbers <= max(4 * pairs, *(x.numel() for x in leaves.values())), largest.numbers / pairs


def made(given: Leaves, places: tuple[int, ...], block: int | None = None, also: Any = lambda x: x) -> Votes:
    """Return the votes of a set as a function makes them, the batch laid out as ``places``."""
    children, weight, bias = given["children"], given.get("weight"), given.get("bias")

    def make(i: int, j: int) -> Tensor:
        some = children[:, i:j].unsqueeze(2)
        votes = some if weight is None else some @ weight[i:j]
        return also((votes if bias is None else votes + bias[i:j]).unflatten(0, places))

    return Votes.in_blocks(make, children.shape[1], block=block)


def rout(votes: Any, iterations: int = 2) -> Tensor:
    """A routing of one's own."""
    parents = votes.sum(1 / votes.parents)
    for _ in range(iterations):
        r = (votes.agreement(parents) - votes.distance(parents)).softmax(-1)
        parents = votes.sum(r) - votes.square_sum(r, parents)
    return parents


# ---- votes that a function makes -------------------------------------------------------------------------------------

PLACES = [(4,), (2, 2), (1, 2, 2), (2, 1, 2, 1)]
MAKEABLE = [row for row in ROUTINGS if "prior" not in row.leaves and "leaky" not in row.name]


def at_places(x: Tensor, places: tuple[int, ...], of_children: bool) -> Tensor:
    """Return what a call on ``[B * space, ...]`` is given or returns, as that on ``[B, *space, ...]`` has it."""
    x = x.unflatten(0, places)
    return x if of_children else x.movedim(len(places), 1)


@pytest.mark.parametrize("block", [1, 2, None])
@pytest.mark.parametrize("places", PLACES, ids=str)
def test_verbs_of_made_votes(places: tuple[int, ...], block: int | None) -> None:
    case = Case(batch=4, types=5, groups=5, bias="IM")
    given = {k: at_places(x, places, k == "r") if k in ("parents", "p", "r") else x for k, x in case.leaves().items()}
    votes = made(given, places, block)
    assert votes.coefficients_shape == given["r"].shape and votes.parents_shape == given["parents"].shape
    found = derivatives(lambda leaves: verbs(made(leaves, places, block), leaves), given)

    def stored(leaves: Leaves) -> Leaves:
        whole = leaves["children"].unsqueeze(2) @ leaves["weight"] + leaves["bias"]
        return verbs(Stored.of(whole.unflatten(0, places)), leaves)

    close(found, derivatives(stored, given))


@pytest.mark.parametrize(("places", "block"), list(zip(PLACES, (1, 2, 3, None), strict=True)), ids=str)
@pytest.mark.parametrize("routing", MAKEABLE, ids=str)
def test_routings_of_made_votes(routing: Routing, places: tuple[int, ...], block: int | None) -> None:
    """They return, and pass back, what they do for the same votes made by matrices."""
    given, flat = routing.tensors(batch=prod(places)), len(places) - 1
    leaves = {k: x.requires_grad_() for k, x in given.items()}
    placed: dict[str, Any] = {k: x for k, x in leaves.items() if k not in ("children", "weight", "bias")} | {
        "weight": None
    }
    placed |= {k: at_places(leaves[k], places, k != "parents") for k in (routing.child, "parents") if k in leaves}
    placed |= {"bias": None} if "bias" in leaves else {}
    result = routing.function(made(leaves, places, block), **placed, **routing.settings, return_coefficients=True)
    close({"r": result.coefficients.flatten(0, flat)}, {"r": routing.ours(given, coefficients=True)["coefficients"]})
    found = {name: getattr(result, name).movedim(1, flat + 1).flatten(0, flat) for name in routing.results}
    every = list(leaves.values())
    gradients = torch.autograd.grad(number(found), every, materialize_grads=True, allow_unused=True)
    close(found | {f"d{k}": x for k, x in zip(leaves, gradients, strict=True)}, training(routing, given))


def test_random_votes_are_the_same_in_every_verb() -> None:
    """On the way back too; and the generator moves on once, by what the blocks draw."""
    given = {k: x.requires_grad_() for k, x in Case(types=5, groups=5, batch=4).leaves().items()}
    kept: dict[Any, list[Tensor]] = {}

    def dropped(x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5)
        kept.setdefault(x.shape[1], []).append(x.detach())
        return x

    votes = made(given, (4,), 3, dropped)
    kept.clear()
    torch.manual_seed(0)
    number(verbs(votes, given)).backward()
    after = torch.rand(2)
    assert set(kept) == {3, 2} and all(torch.equal(one, each[0]) for each in kept.values() for one in each)
    assert len(kept[3]) > 8  # made again
    torch.manual_seed(0)
    for block in (kept[3], kept[2]):
        F.dropout(block[0], 0.5)
    assert torch.equal(after, torch.rand(2))


def test_what_make_raises_leaves_the_generator_alone() -> None:
    calls = []

    def make(i: int, j: int) -> Tensor:
        calls.append(torch.rand(3))
        if len(calls) > 2:
            raise OSError("disk")
        return torch.ones(2, j - i, 3, 1, 2)

    votes = Votes.in_blocks(make, 4)
    first = votes.sum(1.0)
    state = torch.get_rng_state()
    with pytest.raises(OSError, match="disk"):
        votes.agreement(first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_convolution_makes_votes_of_an_empty_batch() -> None:
    convolutions = torch.nn.ModuleList(torch.nn.Conv3d(2, 3 * 4, 3, padding=1) for _ in range(5))
    for batch in (2, 0):
        x = torch.randn(batch, 5, 2, 3, 4, 2)

        def make(i: int, j: int, x: Tensor = x) -> Tensor:
            every = [
                convolutions[k](x[:, k]).unflatten(1, (3, 1, 4)).movedim((1, 2, 3), (-3, -2, -1)) for k in range(i, j)
            ]
            return torch.stack(every, -4)

        votes = Votes.in_blocks(make, 5, block=2)
        parents, r = functional.dynamic_routing(votes, return_coefficients=True)
        assert parents.shape == (batch, 3, 3, 4, 2, 1, 4) and r.shape == (batch, 3, 4, 2, 5, 3)
        parents.sum().backward()
    assert all(c.weight.grad is not None for c in convolutions)


# ---- what PyTorch does with them -------------------------------------------------------------------------------------

TRANSFORMED = ["own", "one-group", "grid"]


@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func(name: str) -> None:
    """vmap over everything, and the gradient of each of several calls."""
    case = CASES[name]
    many = {k: torch.stack([x, 0.5 * x]) for k, x in case.leaves().items()}
    found = func.vmap(lambda given: all_verbs(case, given))(many)
    slopes = func.vmap(func.grad(lambda given: number(all_verbs(case, given))))(many)
    for k in range(2):
        one = {key: x[k] for key, x in many.items()}
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
    """A routing of one's own as a layer; ``extra`` is what it returns besides."""

    extra: Any = ()

    def route(self, votes: Votes, activity: Tensor | None, iterations: int) -> Any:
        parents = rout(votes, iterations)
        return (parents, *self.extra) if self.extra else parents


def small_layer() -> tuple[Mine, Tensor]:
    return Mine(2, 3, 4, 4, kernel_size=3, padding=1, bias=True), torch.randn(2, 2, 5, 4, 4)


@pytest.mark.parametrize("kind", ["ops", "library", "made", "layer"])
def test_one_graph_for_all_sizes(kind: str) -> None:
    """Compiled, trained, and exported; the ops stay ops."""
    torch._dynamo.reset()
    layer, _ = small_layer()

    def run(children: Tensor, weight: Tensor) -> Tensor:
        if kind == "layer":
            return layer(children.reshape(-1, 2, 5, 4, 4))
        return rout(
            made({"children": children, "weight": weight}, (len(children),), 4)
            if kind == "made"
            else Votes(children, weight)
        )

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    weight = torch.randn(1 if kind == "library" else 10, 3, 4, 4) / 4
    for batch in (4, 6, 8):
        children = torch.randn(batch, 10, 4, 4, requires_grad=True)
        for one in (compiled, run):
            found = one(children, weight.requires_grad_())
            results = (found, *torch.autograd.grad(found.square().sum(), children))
            wanted = results if one is compiled else wanted
        torch.testing.assert_close(wanted, results, rtol=1e-4, atol=1e-4)
    module = torch.nn.Module()
    module.forward = run  # type: ignore[method-assign]
    program = torch.export.export(module, (children, weight), dynamic_shapes=({0: Dim.AUTO}, None))
    torch.testing.assert_close(program.module()(children[:6], weight), run(children[:6], weight), rtol=1e-4, atol=1e-4)
    assert (kind == "made") != any(str(node.target).startswith("fastcaps.vote") for node in program.graph.nodes)


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


def test_explanations() -> None:
    given = CASES["own"].leaves()
    told = fastcaps.explain(rout, CASES["own"].votes(Votes, given))
    assert len(told) == 8 and {one.backend for one in told} <= {"cpu", "reference"}
    assert "vote_sums of [2, 3, 3] pairs" in told[0].call
    assert (
        fastcaps.explain(lambda: CASES["one-group"].votes(Votes, CASES["one-group"].leaves()).sum(1.0)).backend
        == "torch"
    )
    for run in (rout, functional.dynamic_routing):
        told = fastcaps.explain(lambda run=run: run(made(given, (2,), 2)))
        assert {one.backend for one in (told if isinstance(told, tuple) else [told])} == {"reference"}


def test_distributed_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        case = CASES["own"]
        given = case.leaves()
        for name in given:
            with pytest.raises(NotImplementedError, match="Votes .* must be plain tensors, got DTensors"):
                all_verbs(case, given | {name: DTensor.from_local(given[name], mesh)})
    finally:
        dist.destroy_process_group()
