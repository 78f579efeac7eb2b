"""Attention by products, of votes without matrices and of votes that share them, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import DENSE, Case, strides
from features import Largest
from registry import ATTENTION, votes_of
from suite import by_op, hold_training_and_backward
from torch import Tensor

from fastcaps.functional import dynamic_routing
from fastcaps.ops import folded, products
from fastcaps.rules import Rule
from fastcaps.votes import SET_WINDOW

WITHOUT_MATRICES = [
    replace(case, groups="none", bias=None, pose=(case.pose[0], case.pose[2], case.pose[2]), gate=case.gate or gate)
    for case in ATTENTION.pairs
    if case.window == SET_WINDOW
    for gate in (None, "broken")
]
WITHOUT_MATRICES.append(replace(WITHOUT_MATRICES[0], rule=Rule.LAYER_NORM, gate="shut", eps=0.0, start=True))


@pytest.mark.parametrize("case", WITHOUT_MATRICES, ids=str)
def test_products_of_votes_without_matrices(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of some children, or some samples, and as they are."""
    for name in ("_SMALL", "_LARGE", "_LONG"):
        monkeypatch.setattr(products, name, 0)
    called = mock.Mock(wraps=products.sums), mock.Mock(wraps=products.gradients)
    monkeypatch.setattr(products, "sums", called[0])
    monkeypatch.setattr(products, "gradients", called[1])
    for block in (50, products._BLOCK):
        monkeypatch.setattr(products, "_BLOCK", block)
        hold_training_and_backward(ATTENTION, case)
    assert all(one.called for one in called) or not (case.start or case.iterations > 1)  # torch runs the first one


WITH_SHARED_MATRICES = [
    replace(case, name=f"{case.name}-{groups}-{gate}", groups=groups, bias=None, gate=gate)
    for case in (
        *ATTENTION.pairs,
        *ATTENTION.table.lanes,
        ATTENTION.make("positions", grid=(3, 5), types=8, gate="some", iterations=2),
        ATTENTION.make("detached", types=8, gate="some", iterations=2, detach=True),
        ATTENTION.make("grid", grid=(3, 4), types=4, window=(3, 4, 1, 1, 0, 0, 1, 1), gate="some", layout="transposed"),
    )
    if case.window == SET_WINDOW or (case.window[:2] == case.grid and case.window[4:] == SET_WINDOW[4:])
    if case.products < 1e5 and case.groups != "none"
    for groups in (1, case.seen // 2 if case.seen % 2 == 0 else case.seen)
    for gate in dict.fromkeys((case.gate, "broken"))
]


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> tuple[mock.Mock, mock.Mock]:
    """Have products run attention of shared matrices, as on a GPU; return the calls of both directions."""
    monkeypatch.setattr(folded, "_SHARING", 1)
    monkeypatch.setattr(folded, "serves", folded.takes)
    called = mock.Mock(wraps=folded.sums), mock.Mock(wraps=folded.gradients)
    monkeypatch.setattr(folded, "sums", called[0])
    monkeypatch.setattr(folded, "gradients", called[1])
    return called


@pytest.mark.parametrize("case", WITH_SHARED_MATRICES, ids=str)
def test_products_of_votes_with_shared_matrices(
    case: Case, folds: tuple[mock.Mock, mock.Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of some children, or some samples, and as they are."""
    for block in (50, folded._BLOCK):
        monkeypatch.setattr(folded, "_BLOCK", block)
        hold_training_and_backward(ATTENTION, case)
    assert all(one.called for one in folds) or not (case.start or case.iterations > 1)  # torch runs the first one
    if case.layout in DENSE:
        call = ATTENTION.call(case)
        assert strides(call.training(by_op)["dweight"]) == strides(call.given["weight"])


@pytest.mark.parametrize("trash", [torch.inf, 3e38])
def test_a_gate_of_0_leaves_no_trace_in_products(trash: float, folds: tuple[mock.Mock, mock.Mock]) -> None:
    call = ATTENTION.call(ATTENTION.make("shared", types=12, groups=2, gate="some", scale=8.0, iterations=2)).as_set()
    silent = torch.arange(12) % 3 == 1
    gate = call.given["gate"].masked_fill(silent, 0.0)
    children = [call.given["children"].masked_fill(silent[:, None, None], number) for number in (trash, 0.0)]
    found, wanted = (
        replace(call, given={**call.given, "gate": gate, "children": each}).training(by_op) for each in children
    )
    assert all(one.called for one in folds)
    assert (found["dchildren"][:, silent] == 0).all() and (found["dgate"][:, silent] == 0).all()
    for name, value in wanted.items():
        kept = ..., ~silent, *[slice(None)] * (value.dim() - 2)
        one, value = (x[kept] if name in ("dchildren", "dgate") else x for x in (found[name], value))
        torch.testing.assert_close(one, value, rtol=1e-6, atol=1e-6 * value.abs().max().item(), msg=name)


@pytest.mark.parametrize("weight", [None, torch.randn(2, 3, 4, 4)], ids=["none", "shared"])
def test_autocast_around_a_backward_alone_rounds_no_product(
    weight: Tensor | None, folds: tuple[mock.Mock, mock.Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_SMALL", 0)
    children, found = torch.randn(2, 16, 1, 4, requires_grad=True), []
    for autocasts in (False, True):
        parents = dynamic_routing(children, weight, parents=3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            found += torch.autograd.grad(parents, children, torch.ones_like(parents))
    assert torch.equal(*found)


@pytest.mark.parametrize("gate", [None, "some"])
def test_products_store_a_block_of_coefficients(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``li-capnet-dynamic``'s 134 million at batch 128, and no value more for each child and group."""
    sizes: dict[str, Any] = {"batch": 128, "types": 2048, "parents": 512, "pose": (1, 8, 16), "groups": 32}
    with torch.device("meta"):
        call = ATTENTION.call(Case("large", Rule.SQUASH, gate=gate, **sizes))
    votes, grad = votes_of(call.given), call.grads["parents"]
    needs = {"children", "weight", "query", *(["gate"] if gate else [])}
    for query in (None, call.given["query"]):
        with Largest() as made:
            folded.sums(votes, query, 1.0)
            folded.gradients(votes, query, 1.0, grad, needs if query is not None else needs - {"query"})
        assert made.numbers <= folded._BLOCK // 2
    monkeypatch.setattr(folded, "fuses", lambda votes: True)  # no kernel takes detached gradients
    with Largest() as made:
        folded.gradients(votes, call.given["query"], 1.0, grad, needs, detach=True)
    assert made.numbers <= folded._BLOCK // 2


@pytest.mark.parametrize("sizes", [(2, 64, 64, 8), (1, 2001, 64, 8), (8, 1024, 16, 24)], ids=str)
def test_same_bits_of_products_for_any_number_of_threads(sizes: tuple[int, ...], threads_kept: None) -> None:
    batch, count, columns, parents = sizes
    children = torch.randn(batch, count, 1, columns, requires_grad=True)
    for prior in (None, torch.randn(count, parents, requires_grad=True)):
        found: list[list[Tensor]] = []
        leaves = [one for one in (children, prior) if one is not None]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            routed = dynamic_routing(children, None, parents=parents, prior=prior)
            found.append([routed, *torch.autograd.grad(routed.sum(), leaves)])
        assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
