"""The host code of the CUDA library as nvcc built it, over a runtime without a GPU (``cuda_stub``).

The runtime refuses what a device would: more shared memory than was asked for, a grid too large, a stream of another
device, an unknown kernel. So a call that comes through has launched what can be launched.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from cuda_stub.host import SHARED, STREAMS, Host
from cuda_target import OPTIONS
from registry import ATTENTION, GAUSSIAN, POOLING, ROUTINGS, Call, Routing, routing_of
from torch import Tensor

from fastcaps.rules import Rule

CASES = ("conv", "pose-4x4-10", "stay-float32", "padded", "same-4x4", "sweeps", "one-position", "broken-half")
LARGE = Case("large", Rule.LAYER_NORM, batch=512, types=16, parents=32, pose=(1, 16, 16))
"""A call whose blocks take more shared memory than a kernel has without asking."""
Op = Callable[[], list[Tensor]]


@pytest.fixture(scope="module")
def host(cuda_library: Path, nvcc: Path) -> Host:
    return Host(nvcc)


def ops_of(host: Host, routing: Routing, case: Case, option: str = "fast", device: int = 0) -> tuple[Op, Op]:
    """Return a case's forward and backward, ready to be called."""
    forward = getattr(torch.ops.fastcaps_cuda, routing.name).default
    backward = getattr(torch.ops.fastcaps_cuda, f"{routing.name}_backward").default
    given = Host.moved([*routing.call(case).given.values()], device)
    back = Host.moved([*routing.backward_call(case).given.values()], device)
    return (lambda: forward(*given, OPTIONS[option])), (lambda: backward(*back, OPTIONS[option]))


def reverse_of(host: Host, call: Call) -> Op:
    """Return the backward through all iterations of a call, with results that are zeros."""
    given, border = call.given, call.routing.border
    grads = [call.grads[name].float() for name in border.finals]
    results = call.by_op()
    history = {name.removeprefix("all_"): torch.zeros_like(results[name]) for name in border.history}
    op = getattr(torch.ops.fastcaps_cuda, f"{call.routing.name}_reverse").default
    taken = [argument.name for argument in op._schema.arguments]
    names = taken[taken.index("children") : taken.index("needs")]
    moved = Host.moved([*grads, *(history[name] if name in history else given[name] for name in names)], 0)
    return lambda: op(*moved, border.bits(call.names), 0)


def both(host: Host, name: str, **options: Any) -> tuple[Op, Op]:
    return ops_of(host, routing_of(name), routing_of(name).case("conv"), **options)


def in_new_thread(body: Callable[..., None], *arguments: Any) -> None:
    """Run in a thread that has asked a device for nothing yet."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(body, *arguments).result()


every_op = pytest.mark.parametrize("name", [routing.stem for routing in ROUTINGS])


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_device_takes_every_launch(host: Host, routing: Routing, case: str, device: int) -> None:
    """On the device and stream of its tensors, in no more threads and shared memory than the kernel may have."""
    for option in OPTIONS:
        for op in ops_of(host, routing, routing.case(case), option, device):
            host.begin()
            results = op()
            launches = host.launches()
            assert launches
            for launch in launches:
                assert (launch.device, launch.stream) == (device, STREAMS[device])
                assert launch.threads <= launch.bounds and launch.shared <= SHARED[device]
            assert all(result.device == torch.device("cuda", device) for result in results)


@every_op
@pytest.mark.parametrize("before", [-1, 0, 1])
def test_the_threads_context_is_put_back(host: Host, name: str, before: int) -> None:
    for op in both(host, name, device=1):
        host.begin(before)
        op()
        assert host.context == before
        assert host.contexts == sum(1 << one for one in {before, 1} if one >= 0)


@every_op
def test_a_call_may_be_captured(host: Host, name: str) -> None:
    """Its launches are all that reaches a stream, they go to the captured one, and again they are the same."""
    for op in both(host, name):
        host.begin(0, captured=True)
        op()
        first = host.launches()
        host.forget()
        op()
        assert first and all(launch.captured for launch in first)
        assert host.launches() == first


def test_sums_are_set_to_zero_by_few_blocks(host: Host) -> None:
    """Four for each of the 132 multiprocessors, behind as many that work on the parents."""
    host.begin()
    ops_of(host, ATTENTION, replace(LARGE, batch=4096))[1]()
    (first, *_) = host.launches()
    assert (first.name, first.x, first.y) == ("prepare_kernel", 2 * 4 * 132, 1)


FIRST, PASS, LAST = "prepare_kernel", "backward_kernel", "add_up_kernel"
FORWARD, FINISH = "forward_kernel", "finish_kernel"
SET = Case("set", Rule.LAYER_NORM, batch=1, types=800, parents=10, pose=(4, 4, 4))
GRID = Case(
    "grid",
    Rule.LAYER_NORM,
    batch=128,
    grid=(16, 16),
    types=1,
    parents=32,
    pose=(4, 4, 4),
    window=(3, 3, 2, 2, 0, 0, 1, 1),
)
LAUNCHES = {
    "set": (ATTENTION, SET, [FORWARD, FINISH], [FIRST, PASS, LAST], 8),
    "one-range": (ATTENTION, GRID, [FORWARD, FINISH], [FIRST, PASS, LAST], 8),
    "without-parents": (ATTENTION, replace(GRID, start=False), [FORWARD], [FIRST, PASS, LAST], 8),
    "with-bias": (ATTENTION, replace(GRID, bias="11"), [FORWARD], [FIRST, PASS, LAST], 8),
    "plain": (ATTENTION, replace(SET, rule=Rule.PLAIN), [FORWARD, FINISH], [FIRST, PASS, LAST], 8),
    "half": (ATTENTION, replace(SET, dtype=torch.bfloat16), [FORWARD, FINISH], [FIRST, PASS, LAST], 8),
    "dynamic": (ATTENTION, replace(SET, rule=Rule.SQUASH, start=False, iterations=3), [FORWARD, FINISH] * 3,
                [FIRST, PASS] * 3, 8),
    "dynamic-fused": (ATTENTION, replace(SET, rule=Rule.SQUASH, types=20, iterations=3), [FORWARD],
                      [FIRST, PASS] * 3 + [LAST], 8),
    "pooling": (POOLING, replace(SET, rule=Rule.UNIT), [FORWARD, FINISH], [FIRST, PASS, LAST], 6),
    "gaussian": (GAUSSIAN, replace(SET, rule=Rule.EM), [FORWARD, "gaussian_join_kernel"],
                 ["torch zero_", "gaussian_prepare_kernel", PASS, PASS, LAST], 11),
    "em": (GAUSSIAN, replace(SET, rule=Rule.EM, start=False, iterations=3), [FORWARD, "gaussian_join_kernel"] * 3,
           ["torch zero_", *["gaussian_prepare_kernel", PASS, PASS] * 3, LAST], 12),
    "pooling-split": (POOLING, replace(SET, rule=Rule.UNIT, start=False, iterations=3), [FORWARD, FINISH] * 3,
                      [FIRST, PASS] * 3, 12),
}  # fmt: skip
"""Of each call: the launches forward and backward, and how often the backward allocates memory."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_call(host: Host, name: str) -> None:
    """As docs/algebra.md lists them, and none of torch."""
    routing, case, forward, backward, most = LAUNCHES[name]
    call = routing.call(case)
    ops = [*ops_of(host, routing, case)]
    if routing is not GAUSSIAN or not case.start:
        ops[1] = reverse_of(host, call)
    found = []
    for op in ops:
        op()
        host.begin(0)
        op()
        found.append([launch.name for launch in host.launches()])
    assert found == [forward, backward]
    assert host.calls("allocation") <= most


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_an_empty_batch_only_makes_zeros(host: Host, routing: Routing, option: str) -> None:
    case = replace(routing.case("pose-4x4-20"), batch=0)
    for op in (*ops_of(host, routing, case, option), reverse_of(host, routing.call(replace(case, start=False)))):
        host.begin()
        op()
        assert {launch.name for launch in host.launches()} <= {"torch zero_"}


def test_a_thread_asks_once_for_shared_memory(host: Host) -> None:
    """Above 48 KB a kernel has none without asking; where that fails, the next call asks again."""
    forward = ops_of(host, ATTENTION, LARGE)[0]

    def asked() -> int:
        host.begin(0)
        forward()
        assert max(launch.shared for launch in host.launches()) > 48 << 10
        return host.calls("cudaFuncSetAttribute")

    def body() -> None:
        host.begin(0)
        host.fail("cudaFuncSetAttribute", 46)
        with pytest.raises(RuntimeError, match="fastcaps: cudaFuncSetAttribute: error 46"):
            forward()
        assert [asked(), asked()] == [1, 0]

    in_new_thread(body)


@every_op
@pytest.mark.parametrize("function", ["cudaSetDevice", "cudaDeviceGetAttribute", "cudaLaunchKernelExC"])
def test_what_fails_is_an_error_and_leaves_nothing_behind(host: Host, name: str, function: str) -> None:
    def body(op: Op) -> None:
        host.begin(1)
        host.fail(function, 46)
        with pytest.raises(RuntimeError, match=r"fastcaps: .*: error 46"):
            op()
        assert host.context == 1 and {launch.name for launch in host.launches()} <= {"torch zero_"}
        host.fail("", 0)
        op()
        assert host.launches()

    for op in both(host, name):
        in_new_thread(body, op)  # a thread asks for attributes once


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_a_thread_asks_once_for_attributes(host: Host, routing: Routing) -> None:
    def body(ops: list[tuple[Op, Op]]) -> None:
        for device, both_of_device in enumerate(ops):
            for k, op in enumerate(both_of_device * 2):
                host.begin()
                op()
                assert host.calls("cudaDeviceGetAttribute") == (2 if k == 0 else 0)  # of each device
                assert {launch.stream for launch in host.launches()} == {STREAMS[device]}

    in_new_thread(body, [both(host, routing.stem, device=device) for device in (0, 1)])
