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
from registry import ATTENTION, ROUTINGS, Routing, routing_of
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
    iterations = (
        case.iterations if case.parents <= 32 else 1
    )  # so many parents take several blocks, and iterations several calls
    given = Host.moved([*routing.call(replace(case, iterations=iterations)).given.values()], device)
    back = Host.moved([*routing.backward_call(case).given.values()], device)
    return (lambda: forward(*given, OPTIONS[option])), (lambda: backward(*back, OPTIONS[option]))


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


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_an_empty_batch_only_makes_zeros(host: Host, routing: Routing, option: str) -> None:
    case = replace(routing.case("pose-4x4-20"), batch=0)
    for op in ops_of(host, routing, case, option):
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
