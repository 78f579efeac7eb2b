"""The CUDA kernels of attention without matrices, all iterations in one launch: see ``csrc/cuda/plain.h``.

How they are run: ``cuda_target``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case, on_device
from cuda_target import Target, mixed_order, on_every_target
from registry import ATTENTION
from suite import hold_each_gradient_alone
from torch import Tensor

from bench.judge import Bar
from fastcaps import backends
from fastcaps.functional import dynamic_routing
from fastcaps.ops import products
from fastcaps.rules import Rule
from fastcaps.vectors import squash

autoused_order = pytest.fixture(autouse=True)(mixed_order)

SET: dict[str, Any] = {"batch": 3, "types": 37, "parents": 5, "pose": (1, 50, 50), "groups": "none"}
CASES = [
    Case("primes", Rule.SQUASH, **SET, iterations=3),
    Case("alike", Rule.SQUASH, **SET, iterations=3, start=False),
    Case("primes-gated", Rule.SQUASH, **SET, iterations=2, gate="some"),
    Case("layer-norm", Rule.LAYER_NORM, **SET, iterations=3),
    Case("layer-norm-broken", Rule.LAYER_NORM, **SET, iterations=2, gate="broken"),
    Case("replaced", Rule.PLAIN, **SET, iterations=2, gate="silent", start=False),
    Case("shut", Rule.SQUASH, **SET, iterations=2, gate="shut"),
    Case("bfloat16", Rule.SQUASH, **SET, iterations=3, dtype=torch.bfloat16, gate="some"),
    Case("bfloat16-even", Rule.LAYER_NORM, **SET, iterations=2, dtype=torch.bfloat16, start=False),
    Case("float16", Rule.LAYER_NORM, **SET, iterations=2, dtype=torch.float16, gate="broken"),
    Case("aligned", Rule.SQUASH, batch=2, types=50, parents=4, pose=(1, 64, 64), groups="none", iterations=3),
    Case("matrices", Rule.SQUASH, types=19, parents=8, pose=(4, 4, 4), groups="none", iterations=2),
    Case("32-parents", Rule.SQUASH, batch=1, types=40, parents=32, pose=(4, 8, 8), groups="none", iterations=2),
    Case("24-parents", Rule.PLAIN, batch=1, types=150, parents=24, pose=(1, 128, 128), groups="none", gate="some"),
    Case("24-bfloat16", Rule.PLAIN, batch=1, types=600, parents=24, pose=(1, 128, 128), groups="none",
         dtype=torch.bfloat16, iterations=2),
    Case("256-values", Rule.LAYER_NORM, batch=1, types=300, parents=11, pose=(1, 256, 256), groups="none",
         iterations=2),
    Case("250-values", Rule.SQUASH, batch=1, types=300, parents=7, pose=(1, 250, 250), groups="none", iterations=2,
         gate="silent"),
    Case("256-float16", Rule.PLAIN, batch=1, types=130, parents=11, pose=(1, 256, 256), groups="none", iterations=2,
         dtype=torch.float16),
    Case("many-children", Rule.SQUASH, batch=1, types=700, parents=3, pose=(1, 17, 17), groups="none", iterations=2),
    Case("one-value", Rule.PLAIN, types=9, parents=3, pose=(1, 1, 1), groups="none", iterations=2),
    Case("one-child", Rule.SQUASH, types=1, parents=3, pose=(1, 17, 17), groups="none", iterations=2),
    Case("one-parent", Rule.LAYER_NORM, types=20, parents=1, pose=(1, 17, 17), groups="none", iterations=2),
    Case("sixteen", Rule.SQUASH, batch=1, types=8, parents=6, pose=(1, 16, 16), groups="none", iterations=16),
    Case("grid", Rule.SQUASH, grid=(3, 5), types=8, parents=4, pose=(1, 16, 16), groups="none", iterations=2,
         gate="some"),
    Case("whole-grid", Rule.SQUASH, grid=(3, 5), types=3, parents=4, pose=(1, 16, 16), groups="none", iterations=2,
         gate="some", window=(3, 5, 1, 1, 0, 0, 1, 1)),
    Case("detached", Rule.SQUASH, **SET, iterations=3, gate="some", detach=True),
    Case("detached-even", Rule.PLAIN, **SET, start=False, gate="some", detach=True),
    Case("33-parents", Rule.SQUASH, batch=1, types=9, parents=33, pose=(1, 17, 17), groups="none", iterations=2),
    Case("260-values", Rule.SQUASH, batch=1, types=9, parents=3, pose=(4, 65, 65), groups="none", iterations=2),
    Case("large", Rule.PLAIN, **SET, iterations=2, size=30.0),
    Case("no-sample", Rule.PLAIN, **{**SET, "batch": 0}, gate="some"),
    *(Case(layout, Rule.SQUASH, **SET, iterations=2, gate="some", layout=layout)
      for layout in ("transposed", "interleaved", "offset", "expanded")),
    Case("half-interleaved", Rule.SQUASH, **SET, iterations=2, layout="interleaved", dtype=torch.bfloat16),
]  # fmt: skip


@on_every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case, target: Target) -> None:
    """Through all iterations by one launch each."""
    with target.guarded():
        found = target.reverse(ATTENTION.call(case))
    ATTENTION.bar(case).hold(found)


@on_every_target
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_iterations(case: Case, target: Target) -> None:
    """Each with a gradient of its own parents."""
    with target.guarded():
        found = target.backward(ATTENTION.backward_call(case))
    ATTENTION.backward_bar(case).hold(found)


@on_every_target
@pytest.mark.parametrize("name", ["layer-norm", "primes-gated"])
def test_only_the_gradients_asked_for(name: str, target: Target) -> None:
    case = next(case for case in CASES if case.name == name)
    hold_each_gradient_alone(target.backward, ATTENTION, replace(case, iterations=1), most=100)


@on_every_target
@pytest.mark.parametrize("name", ["primes-gated", "32-parents", "250-values", "bfloat16", "many-children"])
def test_the_same_bits_in_any_order(name: str, target: Target) -> None:
    """Of blocks and threads."""
    call = ATTENTION.call(next(case for case in CASES if case.name == name))
    target.set_order("forward")
    first = target.reverse(call)
    target.set_order("shuffled")
    for result, value in target.reverse(call).items():
        assert torch.equal(value, first[result]), result


@on_every_target
@pytest.mark.parametrize("parents", [3, 11, 19])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("name", ["children", "query", "gate"])
def test_what_is_not_finite_stays_where_it_is(name: str, number: float, parents: int, target: Target) -> None:
    """As in the reference: a child spoils all parents of its sample, a parent's query its children's coefficients."""
    case = Case("broken", Rule.PLAIN, types=21, parents=parents, pose=(1, 17, 17), groups="none", gate="some")
    call = ATTENTION.call(case)
    call.given[name].view(-1)[1] = number
    if name == "gate":  # gradients differ from formula to formula
        call.bar(training=False).hold(target.forward(call))
    else:
        call.bar().hold(target.reverse(call))


@on_every_target
@pytest.mark.parametrize("trash", [torch.inf, torch.nan, 3e38])
def test_a_gate_of_0_leaves_no_trace(trash: float, target: Target) -> None:
    call = ATTENTION.call(Case("silent", Rule.SQUASH, **SET, iterations=2, gate="some", scale=1.0))
    silent = torch.arange(37) % 3 == 1
    gate = call.given["gate"].masked_fill(silent, 0.0)
    children = [call.given["children"].masked_fill(silent[:, None, None], number) for number in (trash, 0.0)]
    found, wanted = (
        target.reverse(replace(call, given={**call.given, "gate": gate, "children": each})) for each in children
    )
    for name, value in wanted.items():
        if name == "dgate" and trash == 3e38:  # the gate's gradient is of that child
            continue
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6 * value.abs().max().item(), msg=name)
    assert (found["dchildren"][..., silent, :, :] == 0).all()


@on_every_target
def test_an_infinite_logit_stays_with_its_children(target: Target) -> None:
    """Of the places of a unit, some have no child; of the children, some are closed. A parent at -inf takes none."""
    case = Case("far", Rule.PLAIN, batch=1, types=9, parents=2, pose=(1, 1, 1), groups="none", gate="some", scale=1.0)
    call = ATTENTION.call(case)
    for name in ("children", "gate"):
        call.given[name].fill_(1.0)
    call.given["gate"].view(-1)[0] = 0.0
    call.given["query"].view(-1).copy_(torch.tensor([-torch.inf, 1.0]))
    assert target.forward(call)["parents"].flatten().tolist() == [0.0, 8.0]
    call.given["query"].view(-1)[0] = torch.nan
    dchildren = target.reverse(call)["dchildren"].flatten()
    assert dchildren[0] == 0.0 and dchildren[1:].isnan().all()


# ---- dynamic routing with a prior and an eps: ops of their own -------------------------------------------------------

WITH_PRIOR: dict[str, Any] = {**SET, "bias": "IM", "start": False, "scale": 1.0, "eps": 1e-3}
PRIORS = [
    Case("prior", Rule.SQUASH, **WITH_PRIOR, iterations=3),
    Case("gated", Rule.SQUASH, **WITH_PRIOR, iterations=3, gate="broken"),
    Case("once", Rule.SQUASH, **WITH_PRIOR, gate="some"),
    Case("of-parents", Rule.SQUASH, **{**WITH_PRIOR, "bias": "1M"}, iterations=2, layout="interleaved"),
    Case("query", Rule.SQUASH, **{**WITH_PRIOR, "start": True, "scale": None, "eps": 0.0}, iterations=2),
    Case("query-alone", Rule.SQUASH, **{**WITH_PRIOR, "start": True, "bias": None}, iterations=2),
    Case("eps", Rule.SQUASH, **{**WITH_PRIOR, "eps": 10.0}, iterations=3, gate="some"),
    Case("24", Rule.SQUASH, **{**WITH_PRIOR, "types": 50, "parents": 24, "pose": (1, 64, 64)}, iterations=3),
    Case(
        "256", Rule.SQUASH, **{**WITH_PRIOR, "batch": 1, "types": 150, "parents": 11, "pose": (4, 64, 64)}, iterations=2
    ),
    Case("bfloat16", Rule.SQUASH, **WITH_PRIOR, iterations=3, dtype=torch.bfloat16, gate="some"),
    Case("float16", Rule.SQUASH, **WITH_PRIOR, iterations=2, dtype=torch.float16),
    Case("one-child", Rule.SQUASH, **{**WITH_PRIOR, "types": 1}, iterations=3),
    Case("no-sample", Rule.SQUASH, **{**WITH_PRIOR, "batch": 0}, iterations=3, gate="some"),
]


NAMES = ("children", "gate", "prior", "query")


def tensors_of(case: Case) -> list[Tensor | None]:
    """Return children, gate, prior, query and the parents' gradient of a case."""
    votes, draw = case.votes(), case.generator(7)
    children, gate = votes["children"][:, 0, 0], None if votes["gate"] is None else votes["gate"][:, 0, 0]
    prior = None if case.bias is None else draw(1 if case.bias == "1M" else case.types, case.parents)
    pose = (case.batch, case.parents, case.pose[0], case.pose[2])
    query = draw(*pose) if case.start else None
    return [case.arranged(tensor) for tensor in (children, gate, prior, query, draw(*pose))]


def by_formula(case: Case, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return parents, the last S, and gradients: what a bar asks, in any dtype."""
    *given, grad = tensors
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in given]
    children, gate, prior, query = leaves
    assert children is not None and grad is not None
    wide = torch.promote_types(children.dtype, torch.float32)
    poses, asked = children.to(wide).flatten(2), None if query is None else query.to(wide).flatten(2)
    if gate is not None:
        poses = poses.masked_fill((gate == 0)[..., None] & ~poses.isfinite(), 0.0)
    for _ in range(case.iterations):
        logits = poses.new_zeros(case.types, case.parents) if prior is None else prior.to(wide)
        if asked is not None:
            logits = logits + case.factor * torch.einsum("bmk,bik->bim", asked, poses)
        shares = logits.softmax(-1).expand(len(poses), case.types, -1)
        if gate is not None:
            shares = shares * gate.to(wide).unsqueeze(-1)
        sums = torch.einsum("bim,bik->bmk", shares, poses)
        parents = squash(sums, -1, case.eps)
        # rounded as separate ops would, but not their gradients
        step = parents + (parents.to(children.dtype).to(wide) - parents).detach()
        asked = step if asked is None else asked + step
        asked = asked + (asked.to(children.dtype).to(wide) - asked).detach()
    wanted = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(parents, wanted, grad.to(wide).flatten(2)))
    named = {f"d{n}": next(gradients) for n, leaf in zip(NAMES, leaves, strict=True) if leaf is not None}
    if "dprior" in named:
        named["dprior"] = named["dprior"].to(wide)
    return {"parents": parents.to(children.dtype).view(grad.shape), "sums": sums.detach().view(grad.shape), **named}


def by_ops(case: Case, target: Target, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the same of the two ops."""
    *given, grad = (on_device(tensor, target.device) for tensor in tensors)
    assert grad is not None
    numbers = (case.factor, case.eps)
    with target.guarded():
        parents, sums = target.op("plain_routing")(*given, case.parents, *numbers, case.iterations)
        bits = sum(1 << k for k, tensor in enumerate(given) if tensor is not None)
        found = target.op("plain_routing_reverse")(grad.to(sums.dtype), *given, sums, *numbers, bits)
    named = {f"d{n}": x for n, x, leaf in zip(NAMES, found, given, strict=True) if leaf is not None}
    return {name: x.cpu() for name, x in {"parents": parents, "sums": sums[-1], **named}.items()}


@on_every_target
@pytest.mark.parametrize("case", PRIORS, ids=str)
def test_priors(case: Case, target: Target) -> None:
    tensors = tensors_of(case)
    Bar(partial(by_formula, case), tensors).hold(by_ops(case, target, tensors))


@on_every_target
def test_what_no_kernel_takes_is_refused(target: Target) -> None:
    forward, reverse = target.op("plain_routing"), target.op("plain_routing_reverse")
    children, prior = torch.randn(2, 9, 1, 20, device=target.device), torch.randn(9, 3, device=target.device)
    query = torch.randn(2, 3, 1, 20, device=target.device)
    parents, sums = forward(children, None, prior, query, 3, 1.0, 0.0, 2)
    reverse(parents, children, None, prior, query, sums, 1.0, 0.0, 15)
    for given in (
        (children.double(), None, prior, query, 3),
        (children, children[..., 0, 0].double(), prior, query, 3),
        (children, None, prior[1:], query, 3),
        (children, None, prior.double(), query, 3),
        (children, None, prior, query[1:], 3),
        (children, None, prior, query, 4),
        (children, None, None, None, 33),
        (children.repeat(1, 1, 13, 1), None, None, None, 3),
        (children.repeat(1, 1, 12, 1), None, None, None, 17),
        (children[:, :, :, :0], None, None, None, 3),
    ):
        with pytest.raises(RuntimeError, match="fastcaps"):
            forward(*given, 1.0, 0.0, 2)
    for changed in ((parents[1:], sums), (parents, sums[:, 1:]), (parents, sums.double())):
        with pytest.raises(RuntimeError, match="fastcaps"):
            reverse(changed[0], children, None, prior, query, changed[1], 1.0, 0.0, 15)


@on_every_target
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("case", PRIORS[:3], ids=str)
def test_dynamic_routing_is_one_launch_each_way(
    case: Case, detach: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public function on a GPU. What it returns on a CPU has been compared with the paper's procedure."""
    children, gate, prior, _, grad = tensors_of(case)
    leaves = [None if x is None else x.requires_grad_() for x in (children, gate, prior)]

    def run() -> list[Tensor]:
        given = {"parents": case.parents, "iterations": case.iterations, "detach": detach}
        parents = dynamic_routing(leaves[0], None, gate=leaves[1], prior=leaves[2], eps=case.eps, **given)
        return [parents, *torch.autograd.grad(parents, [x for x in leaves if x is not None], grad, allow_unused=True)]

    wanted, calls = run(), []
    monkeypatch.setattr(products, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(backends, "choose", lambda *_: ("cuda", 0))
    for name in ("plain_routing", "plain_routing_reverse"):

        def native(name: str, *arguments: Any) -> Any:
            calls.append(name)
            moved = [on_device(x, target.device) if isinstance(x, Tensor) else x for x in arguments]
            return [x.cpu() for x in target.op(name)(*moved)]

        monkeypatch.setattr(products, name, partial(native, name))
    for found, value in zip(run(), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    assert calls == ["plain_routing", "plain_routing_reverse"]
