"""The verbs of votes that are stored, and the small calls that the suites of verbs hold to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from cases import LAYOUTS, alike
from features import Leaves, number
from torch import Tensor

from fastcaps import Votes, Window
from fastcaps.checks import accumulation_dtype
from fastcaps.votes import SET_WINDOW, VoteInputs

Tensors = Any  # children, weight, bias, coefficients, targets, precisions, in op layout
PADDED = Window((3, 2), (2, 1), (2, 1), (1, 2))  # dilated; some positions see padding alone
APART = Window(2, 2)  # every child under one window at most: the library's products


class Stored:
    """Votes as everybody stores them, ``[B, *grid, I, M, C, E]``, with the verbs of :class:`fastcaps.Votes`."""

    def __init__(self, children: Any, weight: Any, bias: Any = None, window: Any = None, *, parents: int = 1) -> None:
        poses, there = children, children.new_ones(children.shape[:2])
        if window is not None:
            poses, there = seen(children, window), seen(children.new_ones(children.shape[:4]), window)
        if weight is None:
            votes = poses.unsqueeze(-3).expand(*poses.shape[:-2], parents, -1, -1)
        else:
            own = weight.repeat(poses.shape[-3] // len(weight), 1, 1, 1)
            votes = torch.einsum("...icd,imde->...imce", poses, own)
        self.absent = there[..., None] == 0
        self.votes = (votes if bias is None else votes + bias).masked_fill(self.absent[..., None, None], 0.0)
        self.parents = votes.shape[-3]

    @classmethod
    def of(cls, votes: Tensor) -> Stored:
        stored = cls.__new__(cls)
        stored.votes, stored.parents = votes, votes.shape[-3]
        stored.absent = torch.zeros_like(votes[..., :1, 0, 0], dtype=torch.bool)
        return stored

    def agreement(self, parents: Tensor) -> Tensor:
        return (self.votes * parents.movedim(1, -3).unsqueeze(-4)).sum((-2, -1)).masked_fill(self.absent, 0.0)

    def offsets(self, means: Any) -> Tensor:
        return self.votes - (means.movedim(1, -3).unsqueeze(-4) if isinstance(means, Tensor) else means)

    def distance(self, means: Any, precisions: Tensor | None = None) -> Tensor:
        squares = self.offsets(means).square()
        p = 1 if precisions is None else precisions.movedim(1, -3).unsqueeze(-4)
        return (p * squares).sum((-2, -1)).masked_fill(self.absent, 0.0)

    def sum(self, coefficients: Any, means: Any = 0.0, power: int = 1) -> Tensor:
        r = torch.as_tensor(coefficients, dtype=self.votes.dtype).expand(self.votes.shape[:-2])
        r = r.masked_fill(self.absent, 0.0)[..., None, None]
        return (r * self.offsets(means) ** power).sum(-4).movedim(-3, 1)

    def square_sum(self, coefficients: Any, means: Any) -> Tensor:
        return self.sum(coefficients, means, 2)


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
    """Sizes and forms of the votes, and how the tensors of a call lie.

    ``groups``: 0 is no matrix, None own matrices for every child; ``expanded``: one for all parents; ``pairs``: the
    layout of the coefficients, ``layout`` that of all other tensors; ``limits``, ``options``: of the Triton kernels.
    """

    pose: tuple[int, int, int] = (2, 3, 2)
    parents: int = 3
    types: int = 3
    batch: int = 2
    grid: tuple[int, ...] = ()
    window: Window | None = None
    groups: int | None = None
    bias: str = ""
    dtype: torch.dtype = torch.float32
    pairs: str = "plain"
    layout: str = "plain"
    expanded: bool = False
    limits: dict[str, Any] | None = None
    options: int = 0

    def tensors(self, seed: int = 0) -> Tensors:
        """Return the tensors of a raw call, always the same for a seed."""
        draws, (rows, inner, columns) = torch.Generator().manual_seed(seed), self.pose
        seen, wide = self.types * (self.window or Window(1)).positions, accumulation_dtype(self.dtype)

        def draw(*shape: int, dtype: torch.dtype = self.dtype, layout: str = self.layout) -> Tensor:
            lie = alike if layout == "alike" else LAYOUTS[layout]
            return lie(torch.randn(*shape, generator=draws).to(dtype))

        children, weight, bias = draw(self.batch, *self.grid, self.types, rows, inner), None, None
        if self.groups != 0:
            shape = self.groups or seen, 1 if self.expanded else self.parents, inner, columns
            weight = LAYOUTS[self.layout](draw(*shape, layout="plain") / inner**0.5)
        if self.bias:
            bias = draw(seen if self.bias[0] == "I" else 1, self.parents if self.bias[1] == "M" else 1, rows, columns)
        votes = self.inputs((children, weight, bias))
        pairs = draw(*votes.coefficients_shape, dtype=wide, layout=self.pairs)
        targets, precisions = (draw(*votes.poses, dtype=wide) for _ in range(2))
        return [children, weight, bias, pairs, targets, LAYOUTS[self.layout](precisions.abs())]

    def inputs(self, tensors: Tensors) -> VoteInputs:
        """Return the votes of a raw call."""
        return VoteInputs(*tensors[:3], None, self.parents, SET_WINDOW if self.window is None else self.window.spec)

    def leaves(self, dtype: torch.dtype = torch.float64) -> Leaves:
        """Return the tensors in public layout: children, weight and bias, coefficients, parents and precisions."""
        names = ("children", "weight", "bias", "r", "parents", "p")
        given = zip(names, replace(self, dtype=dtype).tensors(), strict=True)
        moved = ("children", "parents", "p")
        return {name: x.movedim(-3, 1) if name in moved else x for name, x in given if x is not None}

    def votes(self, kind: Any, given: Leaves) -> Any:
        """Return :class:`fastcaps.Votes` or :class:`Stored` of tensors in public layout."""
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
    "own-matrix-for-all-parents": Case(expanded=True),
    "one-parent": Case(parents=1, bias="I1"),
    "one-child": Case(types=1, groups=1, parents=5),
    "single": Case(batch=1, types=1, groups=1, parents=1, pose=(1, 1, 1)),
    "primes": Case(batch=3, types=11, parents=7, pose=(5, 3, 7)),
    "empty": Case(batch=0, bias="IM"),
    "empty-grid": Case(**GRID, batch=0, groups=2),
    "strided": Case(layout="interleaved", pairs="interleaved", bias="IM"),
    "grid": Case(**GRID, bias="IM"),
    "grid-shared-over-space": Case(**GRID, groups=2, bias="1M"),
    "grid-one-group": Case(**GRID, groups=1, bias="I1", parents=2),
    "grid-no-matrix": Case(**GRID, groups=0, pose=(1, 2, 2), bias="11"),
    "grid-bare": Case(**GRID, groups=0, pose=(1, 2, 2)),
    "grid-one-matrix": Case(**GRID, groups=2, expanded=True, bias="1M"),
    "grid-strided": Case(**GRID, layout="transposed", pairs="transposed"),
    "patches": Case(**PATCHES, groups=2, bias="IM"),
    "patches-no-matrix": Case(**PATCHES, groups=0, pose=(1, 2, 2), bias="1M"),
}


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
        "square_sum of one": votes.square_sum(r[..., :1], p[:, :1]),
        "length": votes.distance(0.0),
    }


def all_verbs(case: Case, given: Leaves, kind: Any = Votes) -> Leaves:
    return verbs(case.votes(kind, given), given)


def derivatives(run: Callable[[Leaves], Leaves], given: Leaves) -> Leaves:
    """Return results, first derivatives of a number made of them, and second ones of a number made of these."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    found, every = run(leaves), list(leaves.values())
    alone = torch.autograd.grad(number(found), every, retain_graph=True)
    first = torch.autograd.grad(number(found), every, create_graph=True)
    found |= {f"d{name}": x for name, x in zip(leaves, first, strict=True)}
    found |= {f"d{name} without a graph": x for name, x in zip(leaves, alone, strict=True)}
    second = torch.autograd.grad(number(first), every)
    return found | {f"dd{name}": x for name, x in zip(leaves, second, strict=True)}


def made(given: Leaves, places: tuple[int, ...], block: int | None = None, also: Any = lambda x: x) -> Votes:
    """Return the votes of a set as a function makes them, the batch laid out as ``places``."""
    children, weight, bias = given["children"], given.get("weight"), given.get("bias")

    def make(i: int, j: int) -> Tensor:
        some = children[:, i:j].unsqueeze(2)
        votes = some if weight is None else some @ weight[i:j]
        return also((votes if bias is None else votes + bias[i:j]).unflatten(0, places))

    return Votes.in_blocks(make, children.shape[1], block=block)


def rout(votes: Any, iterations: int = 2) -> Tensor:
    """Route by agreement and squared distance: parents of a routing that the package does not have."""
    parents = votes.sum(1 / votes.parents)
    for _ in range(iterations):
        r = (votes.agreement(parents) - votes.distance(parents)).softmax(-1)
        parents = votes.sum(r) - votes.square_sum(r, parents)
    return parents


# ---- raw calls of the ops --------------------------------------------------------------------------------------------

OPS: dict[str, tuple[str, Callable[..., tuple[Any, ...]]]] = {
    "dots": ("vote_scores", lambda r, y, p, needs: (y, None, False)),
    "distances": ("vote_scores", lambda r, y, p, needs: (y, None, True)),
    "distances p": ("vote_scores", lambda r, y, p, needs: (y, p, True)),
    "sums": ("vote_sums", lambda r, y, p, needs: (r, None, 1)),
    "sums about": ("vote_sums", lambda r, y, p, needs: (r, y, 1)),
    "squares": ("vote_sums", lambda r, y, p, needs: (r, None, 2)),
    "squares about": ("vote_sums", lambda r, y, p, needs: (r, y, 2)),
    "pull": ("vote_pull", lambda r, y, p, needs: (r, y, None, False, needs & 31)),
    "stretch": ("vote_pull", lambda r, y, p, needs: (r, y, None, True, needs)),
    "stretch p": ("vote_pull", lambda r, y, p, needs: (r, y, p, True, needs)),
}
PULLS = {
    "pull": ("dots", "sums"),
    "stretch": ("distances", "sums about", "squares about"),
    "stretch p": ("distances p", "sums about", "squares about"),
}
"""And what these return beside gradients of children, weight and bias."""


def op_results(call: Callable[..., Any], tensors: Tensors, needs: int = 7, only: Iterable[str] = OPS) -> Leaves:
    """Return what ``call(op, *what it takes behind the votes)`` returns; a pull's are "pull 0" to "pull 5"."""
    found = {}
    for name in only:
        op, own = OPS[name]
        result = call(op, *own(*tensors[3:], needs))
        if isinstance(result, Tensor):
            found[name] = result
            continue
        there = [*(x is not None for x in tensors[:3]), *(True for _ in PULLS[name])]
        for k, part in enumerate(result):
            if needs >> k & 1 and k < len(there) and there[k]:
                found[f"{name} {k}"] = part
            else:
                assert part.numel() == 0, "unwanted"
    return found


def op_formulas(case: Case, tensors: Tensors, needs: int = 7, only: Iterable[str] = OPS) -> Leaves:
    """Return the same from stored votes, by autograd."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors[:3]]
    wide = accumulation_dtype(leaves[0].dtype)
    given = {n: x.to(wide) for n, x in zip(("children", "weight", "bias"), leaves, strict=True) if x is not None}
    votes = case.votes(Stored, given | {"children": given["children"].movedim(-3, 1)})
    r, (y, p) = tensors[3].masked_fill(votes.absent, 0.0), (x.movedim(-3, 1) for x in tensors[4:])
    every = {"dots": votes.agreement(y), "distances": votes.distance(y), "distances p": votes.distance(y, p)}
    for name, *about in (("sums", 0.0), ("sums about", y), ("squares", 0.0, 2), ("squares about", y, 2)):
        every[name] = votes.sum(r, *about).movedim(1, -3)
    found = {}
    for name in only:
        if name not in PULLS:
            found[name] = every[name]
            continue
        found |= {f"{name} {k}": every[other] for k, other in enumerate(PULLS[name], 3) if needs >> k & 1}
        wanted = {k: x for k, x in enumerate(leaves) if x is not None and needs >> k & 1}
        if wanted:
            total = (r * every[PULLS[name][0]]).sum()
            gradients = torch.autograd.grad(total, [*wanted.values()], retain_graph=True)
            found |= {f"{name} {k}": x for k, x in zip(wanted, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}
