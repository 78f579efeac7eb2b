"""The ops as citizens of PyTorch: schema, fake kernels, autograd, compile, export, autocast.

Function transforms (``torch.vmap``, ``torch.func.jvp``) are not supported: no batching rule is registered. The ops take
a batch as it is.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from attention_cases import BY_NAME, CASES, DTYPES, Case, ids, results
from torch.utils._python_dispatch import TorchDispatchMode

from fastcaps import Window, backend, functional, ops, reference

CASE = BY_NAME["padded"]
WINDOW = Window(3, padding=1)


def _arguments(case: Case, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[object, ...]:
    tensors = [None if t is None else t.requires_grad_(grad) for t in case.tensors(dtype)]
    return (*tensors, *case.settings())


def _backward_arguments(case: Case, dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[object, ...]:
    tensors = case.tensors(dtype)
    sums = ops.attention_pass(*tensors, *case.settings())[1]
    inputs = [*case.grads(dtype), *tensors[:6], sums]
    inputs = [None if t is None else t.requires_grad_(grad) for t in inputs]
    return (*inputs, *case.settings(), 127)


@pytest.mark.parametrize("name", ["padded", "no-norm", "no-query", "pose-1x8-1x16"])
def test_opcheck(name: str) -> None:
    torch.library.opcheck(ops.attention_pass, _arguments(BY_NAME[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_dtypes(dtype: torch.dtype) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.attention_pass, _arguments(CASE, dtype), test_utils=checks)
    torch.library.opcheck(ops.attention_pass_backward, _backward_arguments(CASE, dtype), test_utils=checks)


@pytest.mark.parametrize("name", ["padded", "no-norm", "pose-1x8-1x16"])
def test_opcheck_backward(name: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.attention_pass_backward, _backward_arguments(BY_NAME[name]), test_utils=checks)
    arguments = _backward_arguments(BY_NAME[name], grad=False)
    torch.library.opcheck(ops.attention_pass_backward, arguments, test_utils="test_aot_dispatch_dynamic")


def test_opcheck_second_derivative_through_aot() -> None:
    case = Case("small", types=2, parents=2, pose=(1, 2, 2))
    torch.library.opcheck(ops.attention_pass_backward, _backward_arguments(case), test_utils="test_aot_dispatch_static")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_fake_kernels_tell_the_truth(case: Case, dtype: torch.dtype) -> None:
    """Shapes, dtypes and strides on the meta device are those of the real call, backward included."""

    def describe(arguments: tuple[object, ...], op: object) -> list[tuple[object, ...]]:
        return [(t.shape, t.dtype, t.stride()) for t in op(*arguments)]

    def meta(arguments: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments)

    for op, arguments in (
        (ops.attention_pass, _arguments(case, dtype, grad=False)),
        (ops.attention_pass_backward, _backward_arguments(case, dtype, grad=False)),
    ):
        assert describe(meta(arguments), op) == describe(arguments, op)


def test_fake_kernel_beyond_32_bits() -> None:
    children = torch.empty(100_000, 64, 16, 16, 4, 4, device="meta")
    routed = functional.inverted_attention_routing(
        children,
        torch.empty(576, 64, 4, 4, device="meta"),
        torch.empty(100_000, 64, 7, 7, 4, 4, device="meta"),
        window=Window(3, 2),
    )
    assert routed.numel() == 100_000 * 64 * 49 * 16 > 2**31


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["padded", "no-norm", "groups-1"])
def test_first_and_second_derivatives(name: str) -> None:
    case = BY_NAME[name]
    arguments = _arguments(case)
    present = [k for k in range(7) if arguments[k] is not None]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(arguments)
        for k, tensor in zip(present, tensors, strict=True):
            given[k] = tensor
        outputs = ops.attention_pass(*given)
        return outputs if case.normalize else outputs[:1]

    inputs = [arguments[k] for k in present]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_second_derivative_of_a_pass_in_a_network() -> None:
    """A gradient penalty on the children, through a pass whose query and children come from the same place."""

    def penalty(scale: torch.Tensor) -> torch.Tensor:
        children = (base * scale).requires_grad_()
        parents = functional.inverted_attention_routing(children, weight)
        routed = functional.inverted_attention_routing(children, weight, parents)
        (gradient,) = torch.autograd.grad(routed.square().sum(), children, create_graph=True)
        return gradient.square().sum()

    generator = torch.Generator().manual_seed(0)
    base, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 5, 2, 3), (5, 3, 3, 2)))
    scale = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(penalty(scale), scale)
    with backend("reference"):
        (expected,) = torch.autograd.grad(penalty(scale), scale)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_third_derivative() -> None:
    tensors = [t.requires_grad_() for t in BY_NAME["primes-plain"].tensors() if t is not None]
    settings = BY_NAME["primes-plain"].settings()

    def third(run: object) -> torch.Tensor:
        children, weight, query, norm_weight, norm_bias = tensors
        output = run(children, weight, query, None, None, norm_weight, norm_bias, *settings)[0].pow(3).sum()
        (first,) = torch.autograd.grad(output, children, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight, create_graph=True)
        return torch.autograd.grad(second.square().sum(), query)[0]

    found, expected = third(ops.attention_pass), third(reference.attention_pass)
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_no_graph_without_a_need_for_one() -> None:
    tensors = CASE.tensors()
    assert not ops.attention_pass(*tensors, *CASE.settings())[0].requires_grad
    tensors[1].requires_grad_()
    with torch.no_grad():
        assert not ops.attention_pass(*tensors, *CASE.settings())[0].requires_grad


def test_backward_asks_only_for_what_is_needed() -> None:
    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            asked.extend([args[-1]] if func is ops.attention_pass_backward else [])
            return func(*args, **(kwargs or {}))

    for k in range(7):
        tensors = CASE.tensors()
        tensors[k].requires_grad_()
        with Watch():
            ops.attention_pass(*tensors, *CASE.settings())[0].sum().backward()
        assert tensors[k].grad.shape == tensors[k].shape
    assert asked == [1 << k for k in range(7)]


# ---- compile and export ----------------------------------------------------------------------------------------------


def _layer(
    children: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Two iterations of a grid layer: uniform, then with parents."""
    first = functional.inverted_attention_routing(children, weight, bias=bias, gate=gate, window=WINDOW)
    return functional.inverted_attention_routing(
        children, weight, first, bias=bias, gate=gate, norm_weight=norm_weight, window=WINDOW
    )


def _layer_inputs(batch: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = ((batch, 2, 4, 5, 2, 2), (18, 3, 2, 2), (18, 1, 2, 2), (batch, 2, 4, 5), (4,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def test_compile_fullgraph_with_a_dynamic_batch() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_layer, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 8, 30):
        # a weight shared over the window: torch's own convolution would ask for new graphs at some batch sizes
        children, weight, *_ = _layer_inputs(batch)
        inputs, others = ([t.detach().clone().requires_grad_() for t in (children, weight[:2])] for _ in range(2))
        found, expected = compiled(*inputs), _layer(*others)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        found.backward(grad)
        expected.backward(grad)
        for one, other in zip(inputs, others, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 2, "one graph for the first batch, one for every other"


def test_compile_fullgraph_with_the_librarys_convolution() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (3, 8):
        inputs = _layer_inputs(batch)
        torch.testing.assert_close(compiled(*inputs), _layer(*inputs), rtol=1e-5, atol=1e-5)


def test_compile_with_inductor() -> None:
    """The real thing, C++ code included: no graph break, same numbers; a set, without gradients."""
    torch._dynamo.reset()

    def run(children: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parents = functional.inverted_attention_routing(children, weight)
        return functional.inverted_attention_routing(children, weight, parents) * 2

    children, weight = torch.randn(3, 5, 2, 2), torch.randn(5, 3, 2, 2)
    with torch.no_grad():
        found = torch.compile(run, fullgraph=True)(children, weight)
    torch.testing.assert_close(found, run(children, weight), rtol=1e-5, atol=1e-5)


def test_compile_raises_the_same_errors() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(functional.inverted_attention_routing, backend="eager")
    with pytest.raises(ValueError, match="weight"):
        compiled(torch.randn(2, 5, 2, 2), torch.randn(4, 3, 2, 2))


def test_compile_respects_a_forced_backend() -> None:
    torch._dynamo.reset()
    seen = []

    def watching(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.append(any("attention_pass" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    run = torch.compile(functional.inverted_attention_routing, fullgraph=True, backend=watching)
    arguments = torch.randn(2, 5, 2, 2), torch.randn(5, 3, 2, 2), torch.randn(2, 3, 2, 2)
    run(*arguments)
    with backend("reference"):
        run(*arguments)
    assert seen == [True, False]


def test_export_with_a_dynamic_batch() -> None:
    class Layer(torch.nn.Module):
        def forward(self, children: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return _layer(children, weight)

    children, weight = (t.detach() for t in _layer_inputs(3)[:2])
    batch = torch.export.Dim("batch")
    program = torch.export.export(Layer(), (children, weight), dynamic_shapes=({0: batch}, None))
    assert any("fastcaps.attention_pass" in str(node.target) for node in program.graph.nodes)
    for size in (2, 3, 7):
        children = _layer_inputs(size)[0].detach()
        torch.testing.assert_close(program.module()(children, weight), _layer(children, weight))


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("autocast", "wanted"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_autocast_runs_in_its_dtype(autocast: torch.dtype, wanted: torch.dtype) -> None:
    """float16 becomes float32 on the CPU, whose kernels have no float16."""
    inputs = _layer_inputs(2)
    with torch.autocast("cpu", dtype=autocast):
        routed = _layer(*inputs)
        alone = functional.inverted_attention_routing(inputs[0], inputs[1], window=WINDOW)
    expected = _layer(*(t.detach().to(wanted) for t in inputs))
    assert routed.dtype == alone.dtype == wanted
    assert torch.equal(routed, expected)
    routed.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in inputs)


def test_autocast_at_the_op_itself() -> None:
    tensors = CASE.tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parents, sums = ops.attention_pass(*tensors, *CASE.settings())
    expected = ops.attention_pass(*(t.bfloat16() for t in tensors), *CASE.settings())
    assert torch.equal(parents, expected[0]) and torch.equal(sums, expected[1])


def test_autocast_mixes_dtypes_and_leaves_float64() -> None:
    children, weight = _layer_inputs(2)[:2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = _layer(children.bfloat16(), weight)
        wide = _layer(children.double(), weight.double())
        with torch.autocast("cpu", enabled=False):
            outside = _layer(children, weight)
        with pytest.raises(TypeError, match="weight must have the dtype of children"):
            _layer(children.double(), weight)
    assert (mixed.dtype, wide.dtype, outside.dtype) == (torch.bfloat16, torch.float64, torch.float32)


def test_autocast_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_layer, fullgraph=True, backend="aot_eager")
    inputs = _layer_inputs(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(*inputs), _layer(*inputs)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_autocast_reaches_the_forced_reference() -> None:
    inputs = _layer_inputs(2)
    with backend("reference"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert _layer(*inputs).dtype == torch.bfloat16


def test_results_are_those_of_the_registered_kernel() -> None:
    """The functional call adds nothing to what the op computes."""
    tensors = CASE.tensors(torch.float32)
    settings = CASE.settings()
    expected = results(ops.attention_pass, tensors, settings, CASE.grads(torch.float32))["parents"]
    children, weight, query, bias, gate, norm_weight, norm_bias = tensors
    found = functional.inverted_attention_routing(
        children.movedim(3, 1),
        weight,
        query.movedim(3, 1),
        bias=bias,
        gate=gate.movedim(3, 1),
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        window=WINDOW,
    )
    assert torch.equal(found.movedim(1, 3).double(), expected)
