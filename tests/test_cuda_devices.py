"""Which device a call of the CUDA library uses, and which contexts it opens: launch.h over a runtime of two GPUs."""

from __future__ import annotations

import ctypes

import pytest
from cuda_on_cpu import build


@pytest.mark.parametrize("within", [-1, 0, 1])
@pytest.mark.parametrize("before", [-1, 0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_a_call_opens_no_context_but_its_own(device: int, before: int, within: int) -> None:
    """A thread that has no context yet (-1) has none afterwards either: the other GPU is left alone.

    A call on ``within``, in the midst of it, changes nothing for what comes after.
    """
    library = ctypes.CDLL(build.library(build.DEVICES)._name, mode=ctypes.RTLD_GLOBAL)
    found = (ctypes.c_int64 * 4)()
    library.devices_call(device, before, within, found)
    launched, multiprocessors, contexts, current = found
    assert (launched, multiprocessors) == (device, 100 + device)
    assert contexts == sum(1 << one for one in {device, before, within} if one >= 0)
    assert current == before
