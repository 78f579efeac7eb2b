"""The CUDA kernel between the products of attention of shared matrices: see ``fastcaps/ops/folded.py``.

How it is run: ``cuda_target``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, on_device
from cuda_target import Target, mixed_order, on_every_target
from registry import ATTENTION, Call
from torch import Tensor

from fastcaps.ops import folded
from fastcaps.rules import Rule

autoused_order = pytest.fixture(autouse=True)(mixed_order)


@pytest.fixture
def fuses(target: Target, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Have products run every call of shared matrices, and the kernel what is between them; return its calls."""
    kernel = mock.Mock(wraps=target.op("folded"))
    monkeypatch.setattr(folded, "_SHARING", 1)
    monkeypatch.setattr(folded, "serves", folded.takes)
    monkeypatch.setattr(folded, "fuses", lambda votes: True)
    monkeypatch.setattr(folded, "_kernel", kernel)
    return kernel


def run(call: Call, target: Target) -> dict[str, Tensor]:
    moved = call.having([on_device(tensor, target.device) for tensor in call.tensors])
    with target.guarded():
        return {name: result.cpu() for name, result in moved.training(Call.by_op).items()}


PRIMES: dict[str, Any] = {"batch": 3, "types": 22, "parents": 11, "pose": (1, 8, 16), "groups": 2, "iterations": 2}
CASES = [
    Case("primes", Rule.LAYER_NORM, **PRIMES),
    Case("primes-gated", Rule.LAYER_NORM, **PRIMES, gate="some"),
    Case("primes-silent", Rule.SQUASH, **PRIMES, gate="silent", scale=1.0),
    Case("primes-broken", Rule.SQUASH, **PRIMES, gate="broken", scale=1.0, start=False),
    Case("detached", Rule.SQUASH, **PRIMES, gate="some", scale=1.0, detach=True),
    Case("interleaved", Rule.PLAIN, **PRIMES, gate="some", layout="interleaved"),
    Case("bfloat16", Rule.LAYER_NORM, **PRIMES, gate="silent", dtype=torch.bfloat16),
    Case("float16", Rule.LAYER_NORM, **PRIMES, dtype=torch.float16),
    Case("4x4", Rule.SQUASH, types=19, parents=37, pose=(4, 4, 4), groups="one", iterations=3, scale=1.0),
    Case("2x3", Rule.PLAIN, types=9, parents=70, pose=(2, 3, 2), groups="one", gate="silent"),
    Case("1x1", Rule.PLAIN, types=17, parents=3, pose=(1, 1, 3), groups="one"),
    Case("1x16", Rule.LAYER_NORM, batch=1, types=150, parents=5, pose=(1, 16, 4), groups="one", gate="some"),
    Case("all-warps", Rule.PLAIN, batch=1, types=20, parents=500, pose=(1, 5, 2), groups="one"),
    Case("all-warps-16", Rule.PLAIN, batch=1, types=9, parents=512, pose=(4, 4, 4), groups="one", gate="silent"),
    Case("one-child", Rule.PLAIN, types=2, parents=5, groups=2),
    Case("one-parent", Rule.PLAIN, types=9, parents=1, pose=(1, 8, 2), groups="one"),
    Case("far", Rule.PLAIN, **PRIMES, scale=300.0),
    Case("far-16", Rule.PLAIN, types=20, parents=90, pose=(4, 4, 4), groups="one", scale=100.0, gate="silent"),
    Case("grid", Rule.SQUASH, grid=(3, 5), types=8, gate="some", groups="one", iterations=2, scale=1.0),
    Case("no-sample", Rule.PLAIN, batch=0, types=8, groups="one", gate="some"),
]


@on_every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case, target: Target, fuses: mock.Mock) -> None:
    ATTENTION.bar(case).hold(run(ATTENTION.call(case), target))
    iterations = case.iterations - (not case.start) if case.batch else 0
    assert fuses.call_count == iterations * (1 if case.detach else 2)


@on_every_target
@pytest.mark.parametrize("name", ["primes-silent", "1x16", "far-16"])
def test_the_same_bits_in_any_order(name: str, target: Target, fuses: mock.Mock) -> None:
    """Of blocks and threads; there is one range of children, and there are several."""
    call = ATTENTION.call(next(case for case in CASES if case.name == name))
    target.set_order("forward")
    first = run(call, target)
    target.set_order("shuffled")
    for result, value in run(call, target).items():
        assert torch.equal(value, first[result]), result


@on_every_target
def test_what_no_kernel_takes_is_refused(target: Target) -> None:
    op, children = target.op("folded"), torch.zeros(2, 3, 9, 2, 4, device=target.device)
    pulled = torch.zeros(5, 2, 2, 3, 4, device=target.device)
    op(children, None, pulled, pulled)
    for arguments in (
        (children.double(), None, pulled, None),
        (children, None, pulled.double(), None),
        (children, None, pulled.mT, None),
        (children, None, pulled[:, :1], None),
        (children, None, pulled, pulled[1:]),
        (children, children[..., 0, 0].double(), pulled, None),
        (children[..., :0], None, pulled[..., :0], None),
        (children.repeat(1, 1, 1, 3, 1), None, pulled.repeat(1, 1, 3, 1, 1), None),
        (children, None, pulled.repeat(103, 1, 1, 1, 1), None),
    ):
        with pytest.raises(RuntimeError, match="fastcaps"):
            op(*arguments)


@on_every_target
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("name", ["children", "query"])
def test_what_is_not_finite_stays_where_it_is(name: str, number: float, target: Target, fuses: mock.Mock) -> None:
    """As in the reference: a child spoils all parents of its sample, a parent's query its children's coefficients."""
    call = ATTENTION.call(Case("broken", Rule.PLAIN, types=9, parents=5, pose=(1, 2, 2), groups="one"))
    call.given[name].view(-1)[1] = number
    call.bar().hold(run(call, target))


@on_every_target
@pytest.mark.parametrize(("logit", "size"), [(25.0, 2.0**95), (-25.0, 2.0**-95)], ids=["large", "small"])
def test_gradients_of_any_size(logit: float, size: float, target: Target, fuses: mock.Mock) -> None:
    """What a child's gains add up to neither overflows nor vanishes, though its logits are all far from 0."""
    call = ATTENTION.call(
        Case("size", Rule.PLAIN, batch=1, types=9, parents=2, pose=(1, 1, 1), groups="one", scale=1.0)
    )
    call.given["children"].fill_(1.0)
    call.given["query"].copy_(logit / call.given["weight"].view_as(call.given["query"]))
    found = run(call, target)
    for name, value in run(replace(call, grads={"parents": size * call.grads["parents"]}), target).items():
        if name.startswith("d"):
            torch.testing.assert_close(value / size, found[name], rtol=1e-4, atol=1e-4 * float(found[name].abs().max()))


@on_every_target
def test_an_infinite_logit_stays_with_its_children(target: Target, fuses: mock.Mock) -> None:
    """Of the places of a tile, some have no child; of the children, some are closed."""
    case = Case("far", Rule.PLAIN, batch=1, types=9, parents=2, pose=(1, 1, 1), groups="one", gate="some", scale=1.0)
    call = ATTENTION.call(case)
    for name in ("children", "weight", "gate"):
        call.given[name].fill_(1.0)
    call.given["gate"].view(-1)[0] = 0.0
    call.given["query"].view(-1).copy_(torch.tensor([-torch.inf, 1.0]))
    assert run(call, target)["parents"].flatten().tolist() == [0.0, 8.0]
    call.given["query"].view(-1)[0] = torch.nan
    dchildren = run(call, target)["dchildren"].flatten()
    assert dchildren[0] == 0.0 and dchildren[1:].isnan().all()


@on_every_target
@pytest.mark.parametrize("trash", [torch.inf, 3e38])
def test_a_gate_of_0_leaves_no_trace(trash: float, target: Target, fuses: mock.Mock) -> None:
    call = ATTENTION.call(Case("shared", Rule.PLAIN, types=20, groups=2, gate="some", scale=8.0, iterations=2))
    silent = torch.arange(20) % 3 == 1
    gate = call.given["gate"].masked_fill(silent, 0.0)
    children = [call.given["children"].masked_fill(silent[:, None, None], number) for number in (trash, 0.0)]
    found, wanted = (
        run(replace(call, given={**call.given, "gate": gate, "children": each}), target) for each in children
    )
    for name, value in wanted.items():
        kept = silent if name in ("dchildren", "dgate") else None
        one, value = (x if kept is None else x.flatten(1, 2)[:, 0][:, ~silent] for x in (found[name], value))
        torch.testing.assert_close(one, value, rtol=1e-6, atol=1e-6 * value.abs().max().item(), msg=name)
    assert (found["dchildren"][..., silent, :, :] == 0).all() and (found["dgate"][..., silent] == 0).all()
