"""Wrong arguments raise before anything runs and name what is wrong; odd but right ones work."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import features
import numpy as np
import pytest
import torch
from cases import Case
from features import ROUTINGS, NothingRuns
from registry import ATTENTION, Call, Routing
from suite import every_routing, native_only
from torch import Tensor

from fastcaps import BackendError, Window, backend, explain, functional
from fastcaps.rules import Rule
from fastcaps.training.run import is_out_of_memory

B, N, H, W, C, D, E, M = 2, 3, 6, 5, 2, 3, 4, 7
WINDOW = Window(3, stride=2, padding=1)  # Ho, Wo = 3, 3


def set_arguments() -> dict[str, object]:
    return {
        "children": torch.randn(B, N, C, D),
        "weight": torch.randn(N, M, D, E),
        "parents": torch.randn(B, M, C, E),
        "bias": torch.randn(N, M, C, E),
        "gate": torch.rand(B, N),
        "norm_weight": torch.randn(C * E),
        "norm_bias": torch.randn(C * E),
    }


def grid_arguments() -> dict[str, object]:
    return {
        **set_arguments(),
        "children": torch.randn(B, N, H, W, C, D),
        "weight": torch.randn(9 * N, M, D, E),
        "parents": torch.randn(B, M, 3, 3, C, E),
        "bias": torch.randn(9 * N, M, C, E),
        "gate": torch.rand(B, N, H, W),
        "window": WINDOW,
    }


def call(arguments: dict[str, object]) -> torch.Tensor:
    return functional.inverted_attention_routing(**arguments)


@pytest.fixture(autouse=True)
def _nothing_runs_on_error(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test expects an argument error, running the routing at all is a failure."""
    with NothingRuns() if "before_anything_runs" in request.keywords else nullcontext():
        yield


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("parents", [True, False])
def test_a_right_call_would_be_noticed(parents: bool) -> None:
    for arguments in (set_arguments(), grid_arguments()):
        with pytest.raises(AssertionError, match="ran"):
            call(arguments if parents else {**arguments, "parents": None})


def test_the_arguments_themselves_are_right() -> None:
    assert call(set_arguments()).shape == (B, M, C, E)
    assert call(grid_arguments()).shape == (B, M, 3, 3, C, E)


SHAPES = [  # argument, wrong shape, what the message must say: the symbols, what is wanted, what came
    ("children", (N, C, D), [r"\[B, I, C, D\]", r"\[3, 2, 3\]"]),
    ("children", (B, N, H, W, C, D), [r"\[B, I, C, D\]", "window=None"]),
    ("children", (B, 0, C, D), ["I >= 1"]),
    ("children", (B, N, 0, D), ["C >= 1"]),
    ("weight", (N, M, D), [r"\[G, M, D, E\]", r"\[3, 7, 3\]"]),
    ("weight", (N, M, D + 1, E), ["D = 3", r"\[3, 7, 4, 4\]"]),
    ("weight", (2, M, D, E), ["divides the 3 children"]),
    ("weight", (2 * N, M, D, E), ["divides the 3 children"]),
    ("weight", (0, M, D, E), ["G >= 1"]),
    ("weight", (N, 0, D, E), ["M >= 1"]),
    ("weight", (N, M, D, 0), ["E >= 1"]),
    ("parents", (B, M + 1, C, E), [r"\[B, M, C, E\] = \[2, 7, 2, 4\]", r"\[2, 8, 2, 4\]"]),
    ("parents", (1, M, C, E), [r"got \[1, 7, 2, 4\]"]),
    ("parents", (B, M, E, C), [r"\[2, 7, 4, 2\]"]),
    ("bias", (M, C, E), [r"\[3 or 1, 7 or 1, 2, 4\]", r"\[7, 2, 4\]"]),
    ("bias", (2, M, C, E), ["I or 1"]),
    ("bias", (N, 2, C, E), ["M or 1"]),
    ("bias", (N, M, C, 1), [r"\[3, 7, 2, 1\]"]),
    ("gate", (B, N, 1), [r"\[B, I\] = \[2, 3\]"]),
    ("gate", (N, B), [r"got \[3, 2\]"]),
    ("norm_weight", (C, E), [r"\[C \* E\] = \[8\]"]),
    ("norm_bias", (C * E + 1,), [r"got \[9\]"]),
]
GRID_SHAPES = [
    ("children", (B, N, C, D), [r"\[B, N, H, W, C, D\]", "window given"]),
    ("children", (B, N, H, 0, C, D), ["W >= 1"]),
    ("weight", (5, M, D, E), ["divides the 27 children"]),
    ("parents", (B, 3, 3, M, C, E), [r"\[B, M, Ho, Wo, C, E\] = \[2, 7, 3, 3, 2, 4\]"]),
    ("parents", (B, M, H, W, C, E), [r"\[2, 7, 6, 5, 2, 4\]"]),
    ("bias", (N, M, C, E), ["27 or 1"]),
    ("gate", (B, H, W, N), [r"\[B, N, H, W\] = \[2, 3, 6, 5\]"]),
]


@pytest.mark.before_anything_runs
@pytest.mark.parametrize(
    ("grid", "name", "shape", "says"),
    [(False, *row) for row in SHAPES] + [(True, *row) for row in GRID_SHAPES],
    ids=lambda value: str(value) if isinstance(value, (str, tuple, bool)) else "",
)
def test_wrong_shape(grid: bool, name: str, shape: tuple[int, ...], says: list[str]) -> None:
    arguments = grid_arguments() if grid else set_arguments()
    arguments[name] = torch.randn(shape)
    for words in [name, *says]:
        with pytest.raises(ValueError, match=words):
            call(arguments)
    if name != "parents":  # without parents another path runs: the checks are the same
        arguments.pop("parents")
        with pytest.raises(ValueError, match=name):
            call(arguments)


TENSORS = [name for name in set_arguments() if name != "children"]


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("name", TENSORS)
def test_wrong_kind_dtype_layout_device(name: str) -> None:
    good = set_arguments()
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        call({**good, name: [1.0]})
    for dtype in (torch.float64, torch.int64, torch.complex64, torch.bfloat16):
        with pytest.raises(
            TypeError, match=rf"{name} and children must have the same dtype, got {dtype} and torch.float32"
        ):
            call({**good, name: good[name].to(dtype)})
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor"):
        call({**good, name: good[name].to_sparse()})
    with pytest.raises(ValueError, match=f"{name} must be on the device of children, cpu, got meta"):
        call({**good, name: good[name].to("meta")})


@pytest.mark.before_anything_runs
def test_wrong_children() -> None:
    good = set_arguments()
    with pytest.raises(TypeError, match=r"children must be a torch\.Tensor, got NoneType"):
        call({**good, "children": None})
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"children must have one of the dtypes float32, float64, .* got {dtype}"):
            call({**good, "children": good["children"].to(dtype)})
    with pytest.raises(TypeError, match="children must be a dense tensor"):
        call({**good, "children": good["children"].to_sparse()})
    with pytest.raises(ValueError, match="weight must be on the device of children, meta, got cpu"):
        call({**good, "children": good["children"].to("meta")})


@pytest.mark.before_anything_runs
def test_wrong_settings() -> None:
    good = set_arguments()
    with pytest.raises(TypeError, match=r"window must be a fastcaps\.Window or None, got int"):
        call({**good, "window": 3})
    for name, least in (("eps", " >= 0"), ("scale", "")):
        for value in (float("nan"), float("inf"), -float("inf")):
            with pytest.raises(ValueError, match=f"{name} must be a finite number{least}, got {value}"):
                call({**good, name: value})
        with pytest.raises(TypeError, match=f"{name} must be a number, got '1'"):
            call({**good, name: "1"})
    with pytest.raises(ValueError, match="eps must be a finite number >= 0, got -1"):
        call({**good, "eps": -1})
    with pytest.raises(TypeError, match="eps must be a number, got None"):
        call({**good, "eps": None})
    with pytest.raises(ValueError, match="norm_weight must be None with normalize=False"):
        call({**good, "normalize": False})


@pytest.mark.before_anything_runs
@pytest.mark.parametrize(
    ("window", "says"),
    [
        (Window(7), "spans 7 x 7 .* H x W = 6 x 5"),
        (Window((2, 6)), "spans 2 x 6"),
        (Window(3, dilation=3), "spans 7 x 7 positions with its dilation"),
        (Window(9, padding=1), "with padding 8 x 7"),
    ],
)
def test_window_larger_than_the_grid(window: Window, says: str) -> None:
    arguments = {"children": torch.randn(B, N, H, W, C, D), "weight": torch.randn(1, M, D, E), "window": window}
    with pytest.raises(ValueError, match=f"window must fit into the grid.*{says}"):
        call(arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((0,), ValueError, "kernel_size must be an int or a pair of ints from 1 to 2\\*\\*31, got 0"),
        ((3, 0), ValueError, "stride"),
        ((3, 1, -1), ValueError, "padding must be an int or a pair of ints from 0"),
        ((3, 1, 0, 0), ValueError, "dilation"),
        (((3, 0),), ValueError, "kernel_size"),
        ((3.0,), TypeError, "kernel_size must be an int or a pair of ints from 1 to 2\\*\\*31, got 3.0"),
        ((True,), TypeError, "kernel_size"),
        (((3, 3, 3),), TypeError, "kernel_size"),
        ((3, "2"), TypeError, "stride"),
        ((3, 1, 2**62), ValueError, "padding"),
        ((2**62,), ValueError, "kernel_size"),
        ((3, (1, 2**63)), ValueError, "stride"),
        ((3, 1, 0, 2**62), ValueError, "dilation"),
        (((3, 2.5),), TypeError, "kernel_size"),
    ],
)
def test_wrong_window(arguments: tuple[object, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"Window: .*{says}"):
        Window(*arguments)


def test_window_is_a_value() -> None:
    assert Window(3, 2) == Window((3, 3), (2, 2)) and hash(Window(3)) == hash(Window([3, 3]))
    assert Window((3, 2), 2, 1, 2).spec == (3, 2, 2, 2, 1, 1, 2, 2)
    assert Window((3, 2)).positions == 6 and Window(3, 2).output_size(16, 16) == (7, 7)
    with pytest.raises(AttributeError):
        Window(3).stride = 2  # type: ignore[misc]


def test_numpy_numbers_are_numbers() -> None:
    assert Window(np.int64(3), (np.int32(2), 1), np.int8(1)) == Window(3, (2, 1), 1)
    good = set_arguments()
    found = call({**good, "iterations": np.int64(2), "eps": np.float32(0.5), "scale": np.float64(0.25)})
    assert torch.equal(found, call({**good, "iterations": 2, "eps": 0.5, "scale": 0.25}))
    for wrong in (np.float64(2), np.bool_(True)):
        with pytest.raises(TypeError, match="iterations must be an int"):
            call({**good, "iterations": wrong})


@pytest.mark.parametrize("wrong", [True, 1.0, "1"], ids=repr)
def test_a_right_call_does_not_let_a_wrong_one_pass(wrong: object) -> None:
    """What was found right is remembered: a setting that equals it is not, nor is what looks like a tensor."""
    children = torch.randn(2, 4, 1, 3)
    assert functional.routing_pool(children, parents=1).shape == (2, 1, 1, 3)
    with pytest.raises(TypeError, match="parents must be an int >= 1, got"):
        functional.routing_pool(children, parents=wrong)  # type: ignore[arg-type]
    look_alike = SimpleNamespace(
        shape=children.shape, dtype=torch.float32, device=children.device, layout=torch.strided
    )
    with pytest.raises(TypeError, match=r"children must be a torch\.Tensor, got SimpleNamespace"):
        functional.routing_pool(look_alike, parents=1)  # type: ignore[arg-type]


def test_the_largest_numbers_of_a_window_overflow_nothing() -> None:
    children, weight = torch.randn(1, 1, 1, 1, 1, 2), torch.randn(1, 2, 2, 2)
    with pytest.raises(ValueError, match="window must fit into the grid"):
        functional.inverted_attention_routing(children, weight, window=Window(2, dilation=2**31))
    far = Window(1, stride=2**31, padding=2**31)  # positions far to the left, on the grid, far to the right
    assert far.output_size(1, 1) == (3, 3)
    parents = torch.randn(1, 2, 3, 3, 1, 2)
    found = functional.inverted_attention_routing(children, weight, parents, window=far, normalize=False)
    assert found[:, :, 1, 1].abs().sum() > 0 and found.abs().sum() == found[:, :, 1, 1].abs().sum()


ALL_ALIKE = torch.zeros(1, 1, 1, 1)
TOO_LARGE = {
    "iterations": (lambda: functional.dynamic_routing(*_small(2), iterations=2**40),
                   f"sums of shape [{2**40}, 2, 5, 1, 6]: 263882791 MB"),
    "children": (lambda: functional.routing_pool(ALL_ALIKE.expand(2**50, 3, 1, 1), parents=1),
                 f"parents of shape [{2**50}, 1, 1, 1]: 4503599628 MB"),
    "parents": (lambda: functional.routing_pool(_small(2)[0], parents=2**62),
                f"votes of children [2, 12, 1, 8] for {2**62} parents"),
    "parents-of-none": (lambda: functional.routing_pool(_small(0)[0], parents=2**59),
                        f"votes of children [0, 12, 1, 8] for {2**59} parents"),
    "votes": (lambda: functional.routing_pool(ALL_ALIKE.expand(1, 2**40, 1, 1), parents=2**17),
              f"votes of children [1, {2**40}, 1, 1] for {2**17} parents"),
}  # fmt: skip


def _small(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 12, 1, 8), torch.randn(12, 5, 8, 6)


@native_only
@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_no_memory_holds_is_named(what: str) -> None:
    """Results that cannot be allocated, and sizes whose products leave 64 bits: nothing runs, no division fails."""
    call, says = TOO_LARGE[what]
    with pytest.raises(RuntimeError) as caught:
        call()
    assert str(caught.value) == f"fastcaps: no memory for {says}"
    assert is_out_of_memory(caught.value)


@native_only
def test_a_call_too_large_to_run_is_explained() -> None:
    children, weight = _small(2)
    told = str(explain(functional.dynamic_routing, children, weight, iterations=2**40))
    assert f"{2**40} turns" in told and "forward: kernel for any pose" in told
    told = str(explain(functional.routing_pool, ALL_ALIKE.expand(1, 2**40, 1, 1), parents=2**17))
    assert "forward: no memory for a call of this size" in told
    with pytest.raises(RuntimeError) as caught:
        explain(functional.routing_pool, children, parents=2**62)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if row.name != "attention-uniform"], ids=str)
@pytest.mark.parametrize("name", [None, "cpu", "reference"])
def test_float16_on_the_cpu(name: str | None, routing: features.Routing) -> None:
    """The kernels of the CPU take none, and say so where they are forced; so the reference serves, sums in float32."""
    given = {key: 0.5 * tensor for key, tensor in routing.tensors(dtype=torch.float16).items()}
    with backend(name) if name else nullcontext():
        if name == "cpu":
            with pytest.raises(BackendError, match="float32, float64 and bfloat16, got float16"):
                routing.ours(given)
            return
        found = routing.ours(given)
    exact = routing.plain({key: tensor.double() for key, tensor in given.items()})
    for key, tensor in found.items():
        assert tensor.dtype == torch.float16
        assert (tensor.double() - exact[key]).abs().max().item() <= 2e-2 * exact[key].abs().max().item(), key


# ---- what is odd but right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [set_arguments, grid_arguments])
@pytest.mark.parametrize("with_parents", [True, False])
def test_empty_batch_forward_and_backward(make: object, with_parents: bool) -> None:
    arguments = make()
    if not with_parents:
        arguments.pop("parents")
    for name in ("children", "parents", "gate"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            value.requires_grad_()
    routed = call(arguments)
    assert routed.shape[0] == 0
    routed.sum().backward()
    assert arguments["weight"].grad.abs().sum() == 0 and arguments["bias"].grad.shape == arguments["bias"].shape


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("with_parents", [True, False])
def test_nan_and_infinity_come_out_where_they_went_in(value: float, with_parents: bool) -> None:
    """One bad child spoils its own sample, and no other; one bad query its own sample too."""
    for make in (set_arguments, grid_arguments):
        arguments = make()
        if not with_parents:
            arguments.pop("parents")
        clean = call(arguments)
        bad = arguments["children"].clone()
        bad.select(0, 1).reshape(-1)[0] = value
        routed = call({**arguments, "children": bad})
        assert torch.equal(routed[0], clean[0])
        assert not torch.isfinite(routed[1]).all()
    if with_parents:
        bad = arguments["parents"].clone()
        bad[1, 0, 0, 0] = value
        routed = call({**arguments, "parents": bad})
        assert torch.equal(routed[0], clean[0])
        assert not torch.isfinite(routed[1, :, 0, 0]).all()
        assert torch.equal(routed[1, :, 1:], clean[1, :, 1:]), "another position reads another query"


def test_infinite_agreement_behaves_as_in_the_reference() -> None:
    """Where agreements overflow the softmax gives what PyTorch's gives, NaN included; where they do not, one-hots."""
    case = Case("large", Rule.PLAIN, batch=1, types=4, parents=5, pose=(2, 2, 2))
    call = ATTENTION.call(case)
    for size in (1e38, 1e5):
        large = replace(call, given={**call.given, "query": call.given["query"] * size})
        found, wanted = large.by_op()["parents"], large.by_loop()["parents"]
        assert bool(torch.isfinite(found).all()) == (size < 1e38)
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_nan_in_the_gradient_stays_in_its_sample() -> None:
    arguments = set_arguments()
    children = arguments["children"].requires_grad_()
    routed = call(arguments)
    grad = torch.randn_like(routed)
    grad[1, 0, 0, 0] = torch.nan
    (found,) = torch.autograd.grad(routed, children, grad)
    assert torch.isfinite(found[0]).all() and torch.isnan(found[1]).any()


def test_public_calls_take_any_strides() -> None:
    """Expanded children, parents transposed in memory, a stepped weight, the gradient of a sum."""
    good = grid_arguments()
    odd = {
        "children": good["children"][:1].expand(B, -1, -1, -1, -1, -1),
        "weight": torch.randn(9 * N, M, D, 2 * E)[..., ::2],
        "parents": torch.randn(E, C, 3, 3, M, B).permute(5, 4, 2, 3, 1, 0),
        "bias": torch.randn(1, 1, C, E).expand(9 * N, M, C, E),
        "gate": torch.rand(()).expand(B, N, H, W),
        "window": WINDOW,
    }
    for names in (odd, {name: value for name, value in odd.items() if name != "parents"}):
        plain = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in names.items()}
        results = []
        for arguments in (names, plain):
            leaves = {k: v.detach().requires_grad_() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
            routed = call({**arguments, **leaves})
            results.append([routed, *torch.autograd.grad(routed.sum() + routed[0, 0].pow(2).sum(), leaves.values())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ---- sizes beyond 2^31 -----------------------------------------------------------------------------------------------


def _far_apart(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in address space that the system commits only where it is written; skip where there is none."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    try:
        memory = mmap.mmap(-1, extent * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no address space of {extent * dtype.itemsize / 2**30:.0f} GB: {error}")
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def _same_bits(call: Call, far: Call) -> None:
    """Assert that results and gradients do not depend on where tensors lie."""
    found, wanted = far.training(Call.by_op), call.training(Call.by_op)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    gc.collect()


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is committed on first use")
@every_routing
@pytest.mark.parametrize("dimension", range(6), ids=["batch", "row", "column", "type", "pose-row", "pose-column"])
def test_children_whose_extent_exceeds_32_bits(routing: Routing, dimension: int) -> None:
    """Real offsets beyond 2^31 numbers: the stride of one dimension after another is 2^30 + 1."""
    sizes = {"grid": (3, 3), "types": 3, "pose": (3, 3, 2), "window": (2, 2, 1, 1, 0, 0, 1, 1)}
    call = routing.call(Case("far", routing.cases[0].rule, 3, parents=4, dtype=torch.bfloat16, **sizes))
    shape = tuple(call.given["children"].shape)
    strides = [0] * 6
    step = 1
    for k in (k for k in reversed(range(6)) if k != dimension):
        strides[k], step = step, step * shape[k]
    strides[dimension] = 2**30 + 1
    assert max((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) > 2**31
    far = _far_apart(shape, tuple(strides), torch.bfloat16).copy_(call.given["children"])
    _same_bits(call, replace(call, given={**call.given, "children": far}))


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is committed on first use")
@every_routing
def test_state_gate_and_gradients_whose_extent_exceeds_32_bits(routing: Routing) -> None:
    call = routing.call(Case("far", routing.cases[0].rule, 3, parents=4, gate="some", dtype=torch.bfloat16))

    def apart(tensor: Tensor) -> Tensor:
        return _far_apart(tuple(tensor.shape), (2**30 + 1, *tensor.stride()[1:]), tensor.dtype).copy_(tensor)

    moved = ("gate", *routing.state)
    given = {n: apart(v) if n in moved and v is not None else v for n, v in call.given.items()}
    _same_bits(call, replace(call, given=given, grads={n: apart(v) for n, v in call.grads.items()}))


@native_only
def test_more_children_than_32_bits_count() -> None:
    """Stride-0 children whose virtual extent passes 2^31 numbers; 2^27 + 1 children of 16, all alike."""
    count = 2**27 + 1
    child = torch.randn(1, 1, 1, 16).bfloat16()
    weight, parents = torch.randn(1, 1, 16, 1).bfloat16(), torch.randn(1, 1, 1, 1).bfloat16()
    children = child.expand(1, count, 1, 16)
    assert children.numel() > 2**31
    routed = functional.inverted_attention_routing(children, weight, parents)
    # one parent takes every child whole: the sum is the vote times the count
    vote = (child.double() @ weight[0].double()).item()
    assert routed.shape == (1, 1, 1, 1)
    torch.testing.assert_close(routed.double().item(), vote * count, rtol=2**-7, atol=0.0)
