"""A long call of the CPU library gives way to a signal whose handler raises, and to no other."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from suite import native_only
from torch import Tensor

import fastcaps

pytestmark = [native_only, pytest.mark.skipif(sys.platform == "win32", reason="no such timers")]


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


def call(batch: int, turns: int, parents: int = 10) -> Tensor:
    """All turns are one call of the library going forward, and one each going backward."""
    children, weight = torch.randn(batch, 1152, 1, 8), torch.randn(1152, parents, 8, 16, requires_grad=True)
    return fastcaps.functional.dynamic_routing(children, weight, iterations=turns)[0]


def test_a_forward_gives_way(alarm: Any) -> None:
    alarm(0.15, EnoughOfOneCall())
    began = time.process_time()
    with pytest.raises(Enough) as caught, torch.no_grad():
        call(32, 5000)  # many seconds
    assert "raise_signal" in [entry.name for entry in caught.traceback]  # from within the call, not after it
    assert time.process_time() - began < 2


def test_a_backward_gives_way(alarm: Any) -> None:
    parents = call(2048, 2, 50)  # a turn backward is a second or so: one that is short may end before it is asked twice
    alarm(0.15, EnoughOfOneCall())
    with pytest.raises(Enough) as caught:
        parents.sum().backward()
    assert "raise_signal" in [entry.name for entry in caught.traceback]  # from within the call, not after it
    call(1, 1).sum().backward()  # nothing is left of it


def test_a_handler_that_returns_does_not_stop_a_call(alarm: Any) -> None:
    seen: list[int] = []
    alarm(0.15, lambda number, _: seen.append(number))
    with torch.no_grad():
        torch.manual_seed(1)
        disturbed = call(64, 200)
        assert set(seen) == {signal.SIGPROF}
        torch.manual_seed(1)
        assert torch.equal(disturbed, call(64, 200))
