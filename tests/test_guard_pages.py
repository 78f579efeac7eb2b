"""No kernel reads or writes outside its scratch memory or a tensor: guard pages lie behind all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from suite import native_only, python

from tools.native import LEVELS, guarded

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which a guard page lies behind all aligned memory."""
    return guarded(tmp_path_factory.mktemp("guard")) or pytest.skip("needs Linux and a C compiler")


@native_only
@pytest.mark.parametrize("level", LEVELS)
def test_no_kernel_leaves_its_memory(guard: dict[str, str], level: str) -> None:
    """A third of the registry's small cases at each instruction set, and at all: one parent, narrow matrices (the only
    ones that AMX has kernels of its own for, so it has no third) and squash_sum."""
    variables = {"FASTCAPS_CPU_CAPABILITY": level, **guard}
    script = "from fastcaps import backends as b; print(b.native_capability())"
    if python(script, **variables).stdout.strip() != level:
        pytest.skip(f"{level} is not built, or this processor does not have it")
    done = python("guard_worker.py", str(LEVELS.index(level)), "3", "1", cwd=TESTS, **variables)
    assert done.returncode == 0, done.stdout.splitlines()[-1] + done.stderr[-3000:]


@pytest.mark.parametrize("beyond", [1, 64])
def test_the_guard_sees_a_step_too_far(guard: dict[str, str], beyond: int) -> None:
    """One number behind a tensor's end, and one behind the room that its alignment leaves."""
    script = f"import torch, ctypes; x = torch.zeros(3); ctypes.memset(x.data_ptr() + 12 + {beyond} - 1, 1, 1); del x"
    assert python(script, **guard).returncode < 0
