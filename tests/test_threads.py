"""Threads, forks and signals: calls and explanations at once, workers forked after a call, Ctrl-C in a long call."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from suite import native_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fastcaps
from fastcaps.functional import dynamic_routing


def call(seed: int) -> list[Tensor]:
    """Parents and gradients of a call with its own tensors."""
    draws = torch.Generator().manual_seed(seed)
    children = torch.randn(4, 96, 1, 8, generator=draws).requires_grad_()
    weight = torch.randn(96, 10, 8, 16, generator=draws).requires_grad_()
    parents = dynamic_routing(children, weight, iterations=3)[0]
    return [parents.detach(), *torch.autograd.grad(parents.square().sum(), (children, weight))]


def test_threads_route_and_explain_at_once() -> None:
    wanted = [call(seed) for seed in range(4)]
    explained = str(
        fastcaps.explain(fastcaps.DynamicRouting(96, 10, in_dim=8, out_dim=16, pose="vector"), torch.ones(4, 96, 8))
    )

    def work(number: int) -> bool:
        if number % 3 == 0:
            layer = fastcaps.DynamicRouting(96, 10, in_dim=8, out_dim=16, pose="vector")
            return str(fastcaps.explain(layer, torch.ones(4, 96, 8))) == explained
        return all(map(torch.equal, call(number % 4), wanted[number % 4]))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(60)))


class Routed(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return call(index)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="no fork to speak of")
def test_workers_forked_after_a_call_route(threads_kept: None) -> None:
    torch.set_num_threads(2)
    wanted = [call(index)[0] for index in range(4)]  # torch's threads are running now, and do not outlive a fork
    loader: Any = DataLoader(Routed(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert all(torch.equal(found, want) for found, want in zip(loader, wanted, strict=True))


# ---- a signal whose handler raises ends a long call of the CPU library, on the main thread alone ---------------------


def stoppable(test: Any) -> Any:
    """Skip a test without native kernels or such timers."""
    return native_only(pytest.mark.skipif(sys.platform == "win32", reason="no such timers")(test))


class Enough(Exception):
    pass


@pytest.fixture
def alarm(one_thread: None) -> Iterator[Any]:
    """Have a handler called every so many seconds of this process's own time: others may keep it waiting."""
    before = signal.getsignal(signal.SIGPROF)

    def begin(seconds: float, handler: Any) -> None:
        signal.signal(signal.SIGPROF, handler)
        signal.setitimer(signal.ITIMER_PROF, seconds, seconds)

    yield begin
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


class EnoughOfOneCall:
    """A handler that raises where it is called a second time: only a call that asks for signals comes back to it.

    One that raised at once would now and then meet the Python code before the kernel, which proves nothing.
    """

    place: object = None

    def __call__(self, _: int, frame: Any) -> None:
        before, self.place = self.place, (id(frame), frame.f_lasti)
        if self.place == before:
            signal.setitimer(signal.ITIMER_PROF, 0)
            raise Enough


def long_call(batch: int, iterations: int, parents: int = 10) -> Tensor:
    """All iterations are one call of the library going forward, and one each going backward."""
    children, weight = torch.randn(batch, 1152, 1, 8), torch.randn(1152, parents, 8, 16, requires_grad=True)
    return fastcaps.functional.dynamic_routing(children, weight, iterations=iterations)[0]


@stoppable
@pytest.mark.parametrize("backward", [False, True])
def test_a_call_gives_way(alarm: Any, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        # an iteration backward is a second or so: one that is short may end before it is asked twice
        run = long_call(2048, 2, 50).sum().backward if backward else lambda: long_call(32, 5000)
        alarm(0.15, EnoughOfOneCall())
        with pytest.raises(Enough) as caught:
            run()
    assert "raise_signal" in [entry.name for entry in caught.traceback]  # from within the call, not after it
    long_call(1, 1).sum().backward()  # nothing is left of it


@stoppable
def test_a_verb_gives_way(alarm: Any) -> None:
    """Backward: the pull is one call of the library."""
    children = torch.randn(1, 400_000, 8, 8, requires_grad=True)
    found = fastcaps.Votes(children, torch.randn(1, 50, 8, 8)).distance(0.0).sum()
    alarm(0.15, EnoughOfOneCall())
    with pytest.raises(Enough):
        found.backward()


@stoppable
def test_a_handler_that_returns_does_not_stop_a_call(alarm: Any) -> None:
    seen: list[int] = []
    alarm(0.15, lambda number, _: seen.append(number))
    with torch.no_grad():
        torch.manual_seed(1)
        disturbed = long_call(64, 200)
        assert set(seen) == {signal.SIGPROF}
        torch.manual_seed(1)
        assert torch.equal(disturbed, long_call(64, 200))


@stoppable
def test_ctrl_c_stops_the_main_thread_alone(one_thread: None) -> None:
    """Others compute, rightly, and wrong calls of theirs raise what they should."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    over = threading.Event()
    children, weight = torch.randn(1, 40, 1, 4), torch.randn(40, 3, 4, 5)
    expected = fastcaps.functional.dynamic_routing(children, weight)[0]

    def work() -> int:
        calls = 0
        while not over.is_set():
            assert torch.equal(fastcaps.functional.dynamic_routing(children, weight)[0], expected)
            with pytest.raises(RuntimeError, match="no memory for"):
                fastcaps.functional.dynamic_routing(children, weight, iterations=2**40)
            calls += 1
        return calls

    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work) for _ in range(3)]
        timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                long_call(32, 5000)
        finally:
            timer.join()
            over.set()
            signal.signal(signal.SIGINT, before)
        assert all(one.result() > 0 for one in working)
