"""No kernel reads or writes outside its scratch memory or a tensor: guard pages lie behind all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from suite import native_only

from tools.native import LEVELS, ROOT, guarded

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which a guard page lies behind all aligned memory."""
    return guarded(tmp_path_factory.mktemp("guard")) or pytest.skip("needs Linux and a C compiler")


def _run(guard: dict[str, str], *command: str, level: str = "default") -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "FASTCAPS_CPU_CAPABILITY": level, **guard}
    return subprocess.run([sys.executable, *command], env=variables, cwd=TESTS, capture_output=True, text=True)


@native_only
@pytest.mark.parametrize("level", LEVELS)
def test_no_kernel_leaves_its_memory(guard: dict[str, str], level: str) -> None:
    """A third of the registry's small cases at each instruction set, all that have one parent, and squash_sum."""
    script = "from fastcaps import backends as b; print(b.native_capability())"
    if _run(guard, "-c", script, level=level).stdout.strip() != level:
        pytest.skip(f"{level} is not built, or this processor does not have it")
    done = _run(guard, "guard_worker.py", str(LEVELS.index(level)), "3", "1", level=level)
    assert done.returncode == 0, done.stdout.splitlines()[-1] + done.stderr[-3000:]


@pytest.mark.parametrize("beyond", [1, 64])
def test_the_guard_sees_a_step_too_far(guard: dict[str, str], beyond: int) -> None:
    """One number behind a tensor's end, and one behind the room that its alignment leaves."""
    script = f"import torch, ctypes; x = torch.zeros(3); ctypes.memset(x.data_ptr() + 12 + {beyond} - 1, 1, 1); del x"
    assert _run(guard, "-c", script).returncode < 0
