"""Whole routings as ops: against the oracle's loops, and as citizens of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from attention_cases import BY_NAME as ATTENTION
from gaussian_cases import BY_NAME as GAUSSIAN
from pass_cases import DTYPES, Judge, gradients_like
from pooling_cases import BY_NAME as POOLING
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastcaps import ops, reference
from fastcaps.ops.routing import Steps
from fastcaps.reference import routings
from fastcaps.vectors import squash, unit

SCHEDULE = [0.3, 0.5, 0.8]


GAUSSIANS = ("scores", "means", "variances", "counts", "all_means", "all_variances", "all_scores")
JUDGES = {
    "attention_routing": Judge(ops.ATTENTION_ROUTING, ("parents", "sums"), ("sums",), by_formulas=True),
    "pooling_routing": Judge(ops.POOLING_ROUTING, ("result", "sums", "logsumexp"), ("logsumexp",), by_formulas=True),
    "gaussian_routing": Judge(ops.GAUSSIAN_ROUTING, GAUSSIANS, GAUSSIANS, by_formulas=True),
}


@dataclass(frozen=True)
class Call:
    """One call of a routing's op."""

    name: str
    routing: ops.Routing
    tensors: tuple[Tensor | None, ...]
    settings: tuple[Any, ...]

    def arguments(self, dtype: torch.dtype = torch.float64, grad: bool = False) -> tuple[Any, ...]:
        wide = reference.accumulation_dtype(dtype)
        return (
            *(
                None if t is None else t.detach().to(wide if n in self.routing.wide else dtype).requires_grad_(grad)
                for n, t in zip(self.routing.tensors, self.tensors, strict=True)
            ),
            *self.settings,
        )

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        return getattr(ops, self.routing.name)(*arguments)


def attention(name: str, rule: int, iterations: int, frozen: bool = False, normalize: bool = True) -> Call:
    case = ATTENTION[name]
    tensors = case.tensors()
    normalize = normalize and rule == 0
    if not normalize:
        tensors[5:] = None, None
    settings = (0.7, 1e-5, normalize, rule, iterations, frozen, list(case.window))
    title = f"attention-{name}-{rule}-{iterations}{'-frozen' * frozen}{'-bare' * (rule == 0 and not normalize)}"
    return Call(title, ops.ATTENTION_ROUTING, tuple(tensors), settings)


def pooling(name: str, rule: int, iterations: int, frozen: bool = False, normalize: bool = True) -> Call:
    case = POOLING[name]
    children, weight, _, bias, gate = case.tensors()
    settings = (0.7, normalize, case.parents, rule, iterations, frozen, list(case.window))
    title = f"pooling-{name}-{rule}-{iterations}{'-frozen' * frozen}{'' if normalize else '-bare'}"
    return Call(title, ops.POOLING_ROUTING, (children, weight, bias, gate), settings)


def gaussian(name: str, model: int, iterations: int) -> Call:
    case = GAUSSIAN[name]
    children, weight, _, _, _, bias, gate = case.tensors()[:7]
    generator = torch.Generator().manual_seed(0)
    rows = {0: (), 1: (case.children,), 2: (1,)}[model]
    betas = (torch.randn((*rows, case.parents), generator=generator, dtype=torch.float64) for _ in range(2))
    settings = (SCHEDULE[:iterations], model, 1e-5, list(case.window))
    return Call(
        f"gaussian-{name}-{model}-{iterations}", ops.GAUSSIAN_ROUTING, (children, weight, bias, gate, *betas), settings
    )


CALLS = (
    *(attention(name, rule, 3) for name in ("primes", "padded", "no-query", "conv-shared") for rule in (0, 1)),
    *(attention("primes", rule, 1) for rule in (0, 1)),
    attention("padded", 0, 2, normalize=False),
    attention("padded-no-query", 0, 2, normalize=False),
    *(pooling(name, rule, 3) for name in ("primes", "padded", "silent-grid", "identity-bias") for rule in (0, 1)),
    *(pooling("identity-parents", rule, 2, normalize=False) for rule in (0, 1)),
    *(pooling("silent", rule, 3, frozen=True) for rule in (0, 1)),
    *(pooling("primes", rule, 1) for rule in (0, 1)),
    *(gaussian(name, model, 3) for name in ("primes", "padded", "silent-grid") for model in (0, 1, 2)),
    *(gaussian("groups-1", model, 1) for model in (0, 1, 2)),
)
TINY = (
    attention("one-child", 0, 2),
    attention("one-child", 1, 2),
    pooling("identity-conv", 0, 2),
    pooling("identity-bias", 1, 2),
    *(gaussian("one-child", model, 2) for model in (0, 1, 2)),
)
CITIZENS = (
    attention("padded", 0, 2),
    attention("primes", 1, 3),
    pooling("silent-grid", 0, 3),
    pooling("identity-bias", 1, 2),
    gaussian("padded", 0, 2),
    gaussian("primes", 1, 2),
    gaussian("primes", 2, 3),
)


def name_of(call: Call) -> str:
    return call.name


def present(arguments: Sequence[Any]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]


def gradients_of(call: Call, run: Any, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Return all results, and the gradients of the tensors for random gradients of those results that have some."""
    arguments = call.arguments(dtype, grad=True)
    results = list(run(*arguments))
    generator = torch.Generator().manual_seed(1)
    leading = results[: call.routing.results]
    grads = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in leading]
    found = torch.autograd.grad(leading, present(arguments), grads, materialize_grads=True)
    return results, list(found)


@contextmanager
def summed_at_once(routing: ops.Routing, at_once: bool) -> Iterator[None]:
    """Have the CPU's backward sum over turns in one call, or turn by turn, whatever serves it here."""
    looped = routing.one.looped
    before = set(looped)
    (looped.discard if at_once else looped.add)("CPU")
    try:
        yield
    finally:
        looped.clear()
        looped.update(before)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_results_history_and_gradients_are_those_of_the_loop(call: Call) -> None:
    """The explicit backward against autograd through the loop of the reference's passes."""
    found, gradients = gradients_of(call, call.run)
    wanted, others = gradients_of(call, call.routing.by_reference)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
        assert one.is_contiguous() and one.dtype == other.dtype
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    differentiable = [result.requires_grad for result in found]
    assert differentiable == [k < call.routing.results for k in range(len(found))]


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", ["primes", "padded"])
def test_dynamic_routing_is_the_oracles(name: str, detach: bool) -> None:
    if detach and "frozen" not in str(ops.attention_pass._schema):
        pytest.skip("the attention pass cannot freeze its coefficients yet")
    children, weight, _, bias, gate = (t.requires_grad_() for t in ATTENTION[name].tensors()[:5])
    window = list(ATTENTION[name].window)
    found = ops.attention_routing(
        children, weight, None, bias, gate, None, None, 1.0, 0.0, False, 1, 3, detach, window
    )[0]
    wanted, _ = routings.dynamic_routing(children, weight, bias, gate, detach=detach, window=window)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    grad = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (children, weight, bias, gate), grad),
        torch.autograd.grad(wanted, (children, weight, bias, gate), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("name", ["primes", "padded"])
def test_dynamic_routing_with_competing_children_is_the_oracles(name: str, detach: bool) -> None:
    children, weight, _, bias, gate = POOLING[name].tensors()
    leaves = [t.requires_grad_() for t in (children, weight, bias)]
    window, parents = list(POOLING[name].window), weight.shape[1]
    found = ops.pooling_routing(children, weight, bias, gate, 1.0, False, parents, 1, 3, detach, window)[0]
    wanted, _ = routings.dynamic_routing(children, weight, bias, gate, compete="children", detach=detach, window=window)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    grad = torch.randn_like(found)
    pairs = (torch.autograd.grad(result, leaves, grad) for result in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["primes", "padded", "identity-conv", "identity-one-parent"])
def test_vector_normed_pooling_is_the_oracles(name: str) -> None:
    case = POOLING[name]
    children, weight, _, bias, gate = case.tensors()
    window = list(case.window)
    if weight is None and case.parents > 1:  # the oracle has as many parents as the bias
        bias = torch.zeros(1, case.parents, *case.pose[::2], dtype=torch.float64)
    found = ops.pooling_routing(children, weight, bias, gate, 0.5, True, case.parents, 0, 4, False, window)[0]
    wanted, _ = routings.routing_pool(children, weight, bias, gate, iterations=3, sharpness=0.5, window=window)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["primes", "padded", "silent-grid"])
def test_em_routing_is_the_oracles(name: str) -> None:
    call = gaussian(name, 0, 3)
    children, weight, bias, gate, beta_u, beta_a = call.tensors
    scores, means, *_ = call.run(*call.arguments())
    poses, activations, _ = routings.em_routing(
        children, gate, weight, beta_u, beta_a, bias, inverse_temperature=lambda turn: SCHEDULE[turn], eps=1e-5,
        window=call.settings[-1],
    )  # fmt: skip
    torch.testing.assert_close(means, poses, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(scores.sigmoid(), activations, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
@pytest.mark.parametrize("name", ["primes", "padded", "silent-grid"])
def test_heinsen_routing_is_the_oracles(name: str, model: str) -> None:
    call = gaussian(name, 1 if model == "gaussian" else 2, 3)
    children, weight, bias, gate, beta_use, beta_ignore = call.tensors
    found = call.run(children, weight, bias, gate.clamp(max=1.0), beta_use, beta_ignore, *call.settings)
    wanted = routings.heinsen_routing(
        children, gate.clamp(max=1.0).logit(), weight, bias, beta_use, beta_ignore, model=model, eps=1e-5,
        window=call.settings[-1],
    )  # fmt: skip
    for one, other in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("call", TINY, ids=name_of)
def test_first_and_second_derivatives(call: Call) -> None:
    arguments = call.arguments(grad=True)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        filled = [next(given) if isinstance(argument, Tensor) else argument for argument in arguments]
        return call.run(*filled)[: call.routing.results]

    inputs = present(arguments)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_a_gradient_of_one_result_alone() -> None:
    for model in (0, 1, 2):
        call = gaussian("padded", model, 2)
        for which in range(3):
            arguments = call.arguments(grad=True)
            pairs = (run(*arguments)[which].square().sum() for run in (call.run, call.routing.by_reference))
            found = (torch.autograd.grad(loss, present(arguments), materialize_grads=True) for loss in pairs)
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("run", [squash, unit])
def test_formulas_between_the_turns(run: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors, grad = (torch.randn(5, 2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    vectors[1], vectors[2], vectors[3] = 0.0, vectors[2] * 1e-6, vectors[3] * 1e4
    vectors.requires_grad_()
    value = run(vectors, (-2, -1))
    (wanted,) = torch.autograd.grad(value, vectors, grad)
    steps = Steps(vectors.detach()[None], run is squash)
    torch.testing.assert_close(steps.vectors[0], value.detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(steps.backward(grad, 0), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_the_shares_of_turns_add_up(call: Call) -> None:
    with summed_at_once(call.routing, True):
        _, wanted = gradients_of(call, call.run)
    with summed_at_once(call.routing, False):
        _, found = gradients_of(call, call.run)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_dtypes(call: Call, dtype: torch.dtype) -> None:
    """The bar is that of the passes, and the eager reference the loop, which rounds parents between turns as well."""
    arguments = call.arguments(dtype)
    outputs = call.run(*arguments)
    count = len(call.routing.tensors)
    grads = [*gradients_like(outputs[: call.routing.results]), *[None] * (len(outputs) - call.routing.results)]
    judge = JUDGES[call.routing.name]
    given = (arguments[:count], arguments[count:], grads)
    judge.bar(*given).hold(judge.results(call.run, *given))
    gradients = gradients_of(call, call.run, dtype)[1]
    arguments = present(call.arguments(dtype))
    assert [g.dtype for g in gradients] == [argument.dtype for argument in arguments]


@pytest.mark.parametrize("call", CITIZENS, ids=name_of)
def test_an_empty_batch(call: Call) -> None:
    batched = {"children", "query", "gate"}
    tensors = tuple(
        t if t is None or n not in batched else t[:0] for n, t in zip(call.routing.tensors, call.tensors, strict=True)
    )
    empty = Call(call.name, call.routing, tensors, call.settings)
    found, gradients = gradients_of(empty, empty.run)
    assert found[0].shape[0] == 0 and all((gradient == 0).all() for gradient in gradients)


# ---- citizens of PyTorch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CITIZENS, ids=name_of)
def test_opcheck(call: Call) -> None:
    torch.library.opcheck(getattr(ops, call.routing.name), call.arguments(grad=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_fake_kernels_tell_the_truth(call: Call, dtype: torch.dtype) -> None:
    arguments = call.arguments(dtype)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
    for one, other in zip(call.run(*meta), call.run(*arguments), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("call", CITIZENS, ids=name_of)
def test_compile_with_a_dynamic_batch_and_export(call: Call) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        filled = [None if t is None else next(given) for t in call.tensors]
        return sum(result.square().sum() for result in call.run(*filled, *call.settings)[: call.routing.results])

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for batch in (2, 3, 5):
        inputs = []
        for name, tensor in zip(call.routing.tensors, call.tensors, strict=True):
            if tensor is not None:
                grown = tensor[:1].expand(batch, *[-1] * (tensor.dim() - 1)) * 1.0
                kept = grown if name in ("children", "query", "gate") else tensor
                inputs.append(kept.detach().clone().requires_grad_())
        found, wanted = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found, inputs, materialize_grads=True),
            torch.autograd.grad(wanted, inputs, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count <= 2

    class Layer(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return layer(*tensors)

    inputs = [tensor.detach() for tensor in inputs]
    program = torch.export.export(Layer(), tuple(inputs))
    assert any(call.routing.name in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


@pytest.mark.parametrize("at_once", (True, False))
def test_a_backward_asks_a_turn_once_and_for_no_more_than_is_needed(at_once: bool) -> None:
    """Turns are asked for what they were given, then all (``"all"``) for the rest; or for their share of it as well."""

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.needs: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith("fastcaps.") and str(func).endswith("_backward.default"):
                self.needs += ["all"] * ("_turns_" in str(func)) + [args[-1]]
            return func(*args, **(kwargs or {}))

    frozen = reference.FROZEN
    for call, argument, wanted in (
        (attention("padded", 0, 3), 1, [4, 4, "all", 2]),
        (attention("padded", 0, 2), 2, [4, 4]),
        (attention("padded", 0, 1), 2, [4]),
        (attention("no-query", 1, 3), 0, [4, 4, "all", 1]),
        (attention("padded", 0, 3, frozen=True), 0, [1 | frozen]),
        (attention("padded", 0, 3, frozen=True), 2, []),
        (pooling("padded", 0, 3), 0, [4, 4, "all", 1]),
        (pooling("padded", 0, 1), 0, [1]),
        (pooling("padded", 1, 3, frozen=True), 1, [2 | frozen]),
        (pooling("padded", 1, 3, frozen=True), 3, []),
        (gaussian("padded", 0, 2), 2, [4 + 8 + 16, "all", 32]),
        (gaussian("padded", 0, 2), 4, [4 + 8 + 16]),
        (gaussian("padded", 0, 1), 4, []),
        (gaussian("padded", 1, 1), 4, [128]),
        (gaussian("primes", 2, 2), 4, [4 + 16, "all", 128]),
    ):
        if "all" in wanted and not at_once:
            *own, _, summed = wanted
            wanted = [*(needs | summed for needs in own), summed]
        arguments = list(call.arguments())
        arguments[argument].requires_grad_()
        with summed_at_once(call.routing, at_once), Watch() as watch:
            sum(result.sum() for result in call.run(*arguments)[: call.routing.results]).backward()
        assert watch.needs == wanted, call.name


@pytest.mark.parametrize("call", CITIZENS, ids=name_of)
def test_autocast(call: Call) -> None:
    arguments = call.arguments(torch.float32, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = call.run(*arguments)
    wanted = call.run(*call.arguments(torch.bfloat16))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    sum(result.float().sum() for result in found[: call.routing.results]).backward()
    assert all(t.grad is None or t.grad.dtype == torch.float32 for t in present(arguments))


def test_wrong_calls() -> None:
    def refused(call: Call, position: int, value: Any, says: str) -> None:
        arguments = list(call.arguments())
        arguments[position] = value
        with pytest.raises(RuntimeError, match=says):
            call.run(*arguments)

    sequential, dynamic = attention("padded", 0, 2), attention("padded", 1, 2)
    refused(sequential, 1, sequential.tensors[1][:4], "weight has 4 groups")
    refused(sequential, 10, 2, "rule must be 0 .*or 1.*, got 2")
    refused(sequential, 11, 0, "iterations must be at least 1, got 0")
    refused(dynamic, 9, True, "no LayerNorm")
    refused(dynamic, 5, sequential.tensors[5], "no LayerNorm")
    pool = pooling("padded", 0, 2)
    refused(pool, 6, 4, "for 4 parents")
    refused(pool, 6, 0, "parents must be at least 1")
    refused(pool, 7, -1, "rule must be 0 .*or 1")
    em, heinsen = gaussian("padded", 0, 2), gaussian("padded", 1, 2)
    refused(em, 4, em.tensors[4][:1], "beta_a has shape")
    refused(heinsen, 4, em.tensors[4], r"must be \[I or 1, M or 1\]")
    refused(em, 6, [], "schedule must have a number for every turn")
    refused(em, 7, 3, "model must be 0, 1 or 2")
