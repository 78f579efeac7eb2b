"""The ops of the pooling and the Gaussian pass as citizens of PyTorch: schema, fake kernels, autograd, compile, export,
autocast. What is the attention pass's alone, and the functional calls, are in ``test_ops``."""

from __future__ import annotations

from typing import Any

import gaussian_cases
import pooling_cases
import pytest
import torch
import torch._dynamo.testing
from gaussian_cases import GaussianCase
from pass_cases import DTYPES, Judge, gradients_like
from pooling_cases import PoolingCase
from torch import Tensor

from fastcaps import ops, reference

Case = PoolingCase | GaussianCase
BOTH = [(pooling_cases.JUDGE, case) for case in pooling_cases.CASES] + [
    (gaussian_cases.JUDGE, case) for case in gaussian_cases.CASES
]
FEW = [
    *((pooling_cases.JUDGE, pooling_cases.BY_NAME[name]) for name in ("padded", "silent", "identity-bias")),
    *((gaussian_cases.JUDGE, gaussian_cases.BY_NAME[name]) for name in ("padded", "silent", "k-means", "no-query")),
]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def name_of(value: Any) -> str:
    return value.one.stem if isinstance(value, Judge) else value.name


few = pytest.mark.parametrize(("judge", "case"), FEW, ids=name_of)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def op_of(judge: Judge) -> Any:
    return getattr(ops, judge.one.name)


def backward_of(judge: Judge) -> Any:
    return getattr(ops, judge.one.name + "_backward")


def arguments_of(case: Case, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Any, ...]:
    tensors = [None if t is None else t.requires_grad_(grad) for t in case.tensors(dtype)]
    return (*tensors, *case.settings())


def backward_arguments(judge: Judge, case: Case, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple:
    arguments = arguments_of(case, dtype, grad=False)
    outputs = op_of(judge)(*arguments)
    inputs = [*gradients_like(outputs), *judge.one.kept(arguments, outputs)]
    inputs = [None if t is None else t.detach().clone().requires_grad_(grad) for t in inputs]
    return (*inputs, *case.settings(), (1 << len(judge.one.tensors)) - 1)


@few
def test_opcheck(judge: Judge, case: Case) -> None:
    torch.library.opcheck(op_of(judge), arguments_of(case))


@few
@dtypes
def test_opcheck_backward(judge: Judge, case: Case, dtype: torch.dtype) -> None:
    torch.library.opcheck(backward_of(judge), backward_arguments(judge, case, dtype), test_utils=CHECKS)
    arguments = backward_arguments(judge, case, dtype, grad=False)
    torch.library.opcheck(backward_of(judge), arguments, test_utils="test_aot_dispatch_dynamic")


@dtypes
@pytest.mark.parametrize(("judge", "case"), BOTH, ids=name_of)
def test_fake_kernels_tell_the_truth(judge: Judge, case: Case, dtype: torch.dtype) -> None:
    """Shapes, dtypes and strides on the meta device are those of the real call, backward included."""
    for op, arguments in (
        (op_of(judge), arguments_of(case, dtype, grad=False)),
        (backward_of(judge), backward_arguments(judge, case, dtype, grad=False)),
    ):
        meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
        for one, other in zip(op(*meta), op(*arguments), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert one.stride() == other.stride() or not other.numel()


# ---- derivatives -----------------------------------------------------------------------------------------------------


TINY = [
    (pooling_cases.JUDGE, PoolingCase("weights", types=3, parents=2, pose=(1, 2, 2), gate=True, bias="IM")),
    (pooling_cases.JUDGE, PoolingCase("bare", types=3, parents=2, pose=(2, 1, 2), normalize=False)),
    (pooling_cases.JUDGE, PoolingCase("identity", types=3, parents=2, pose=(1, 3, 3), identity=True, gate=True)),
    (gaussian_cases.JUDGE, GaussianCase("all", types=3, parents=2, pose=(1, 2, 2), gate=True, bias="IM")),
    (gaussian_cases.JUDGE, GaussianCase("k-means", types=3, parents=2, pose=(2, 1, 2), affine=False)),
    (gaussian_cases.JUDGE, GaussianCase("first", types=3, parents=2, pose=(1, 2, 2), query=False, gate=True)),
]


@pytest.mark.parametrize(("judge", "case"), TINY, ids=name_of)
def test_first_and_second_derivatives(judge: Judge, case: Case) -> None:
    arguments = arguments_of(case)
    inputs = [argument for argument in arguments if isinstance(argument, Tensor)]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        outputs = op_of(judge)(*(next(given) if isinstance(a, Tensor) else a for a in arguments))
        return tuple(output for output in outputs if output.dim() > 1)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize(("judge", "case"), [TINY[0], TINY[3]], ids=name_of)
def test_third_derivative(judge: Judge, case: Case) -> None:
    arguments = arguments_of(case)

    def third(run: Any) -> Tensor:
        output = run(*arguments)[0 if judge.one is ops.POOLING else 1].pow(3).sum()
        (first,) = torch.autograd.grad(output, arguments[0], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), arguments[1], create_graph=True)
        return torch.autograd.grad(second.square().sum(), arguments[2])[0]

    found, expected = third(op_of(judge)), third(judge.one.by_reference)
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


@few
def test_no_graph_without_a_need_for_one(judge: Judge, case: Case) -> None:
    arguments = arguments_of(case, grad=False)
    assert not op_of(judge)(*arguments)[0].requires_grad
    arguments[0].requires_grad_()
    with torch.no_grad():
        assert not op_of(judge)(*arguments)[0].requires_grad


def test_a_second_derivative_under_autocast_is_as_exact_as_the_first() -> None:
    """Autocast does not reach into the formulas that differentiate a backward."""
    judge, case = TINY[0]
    arguments = arguments_of(case)
    (first,) = torch.autograd.grad(op_of(judge)(*arguments)[0].square().sum(), arguments[0], create_graph=True)
    (wanted,) = torch.autograd.grad(first.square().sum(), arguments[1], retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(first.square().sum(), arguments[1])
    assert torch.equal(found, wanted)


# ---- compile and export ----------------------------------------------------------------------------------------------


@few
def test_compile_with_a_dynamic_batch_and_export(judge: Judge, case: Case) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    tensors = case.tensors()
    present = [k for k, tensor in enumerate(tensors) if tensor is not None]
    batched = ("children", "query", "mean", "variance", "log_weight", "gate")

    def layer(*given: Tensor) -> Tensor:
        arguments: list[Tensor | None] = [None] * len(tensors)
        for k, tensor in zip(present, given, strict=True):
            arguments[k] = tensor
        outputs = op_of(judge)(*arguments, *case.settings())
        return sum(output.square().sum() for output in outputs if output.dim() > 1)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for batch in (2, 3, 5):
        inputs = []
        for k in present:
            tensor = tensors[k]
            if judge.one.tensors[k] in batched:
                tensor = torch.cat([tensor] * 3)[:batch]
            inputs.append(tensor.detach().clone().requires_grad_())
        found, wanted = compiled(*inputs), layer(*inputs)
        torch.testing.assert_close(found, wanted)
        for one, other in zip(
            torch.autograd.grad(found, inputs, materialize_grads=True),
            torch.autograd.grad(wanted, inputs, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count <= 2, "one graph for the first batch, one for every other"

    class Layer(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return layer(*given)

    inputs = [tensor.detach() for tensor in inputs]
    program = torch.export.export(Layer(), tuple(inputs))
    assert any(f"fastcaps.{judge.one.name}" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


# ---- autocast --------------------------------------------------------------------------------------------------------


@few
@pytest.mark.parametrize(
    ("autocast", "wanted"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_autocast_runs_in_its_dtype(judge: Judge, case: Case, autocast: torch.dtype, wanted: torch.dtype) -> None:
    """float16 becomes float32 on the CPU, whose kernels have no float16; a Gaussian's state stays in float32."""
    arguments = arguments_of(case, torch.float32)
    with torch.autocast("cpu", dtype=autocast):
        found = op_of(judge)(*arguments)
    names = zip(judge.one.tensors, arguments, strict=False)
    accumulated = reference.accumulation_dtype(wanted)
    cast = [None if t is None else t.detach().to(accumulated if n in judge.one.wide else wanted) for n, t in names]
    for one, other in zip(found, op_of(judge)(*cast, *case.settings()), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    sum(output.float().sum() for output in found).backward()
    assert all(t.grad is None or t.grad.dtype == torch.float32 for t in arguments if isinstance(t, Tensor))


@few
def test_autocast_leaves_float64(judge: Judge, case: Case) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = op_of(judge)(*arguments_of(case, grad=False))
    assert all(output.dtype == torch.float64 for output in found)
