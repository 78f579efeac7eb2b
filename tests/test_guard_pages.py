"""No kernel reads or writes outside its scratch memory or a tensor: guard pages lie behind all of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from suite import native_only

TESTS = Path(__file__).resolve().parent
LEVELS = ("default", "avx2", "avx512")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that puts a guard page behind all aligned memory."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    source = TESTS / "guard_pages.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def _run(library: Path, *command: str, level: str = "default") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": str(TESTS.parent),
        "FASTCAPS_CPU_CAPABILITY": level,
        "FASTCAPS_GUARD_SCRATCH": "1",
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=TESTS, capture_output=True, text=True, check=False
    )


@native_only
@pytest.mark.parametrize("level", LEVELS)
def test_no_kernel_leaves_its_memory(guard: Path, level: str) -> None:
    """A third of the registry's small cases at each instruction set, all that have one parent, and squash_sum."""
    script = "from fastcaps import backends as b; print(b.native_capability())"
    if _run(guard, "-c", script, level=level).stdout.strip() != level:
        pytest.skip(f"{level} is not built, or this processor does not have it")
    done = _run(guard, str(TESTS / "guard_worker.py"), str(LEVELS.index(level)), "3", "1", level=level)
    assert done.returncode == 0, done.stdout.splitlines()[-1] + done.stderr[-3000:]


@pytest.mark.parametrize("beyond", [1, 64])
def test_the_guard_sees_a_step_too_far(guard: Path, beyond: int) -> None:
    """One number behind a tensor's end, and one behind the room that its alignment leaves."""
    script = f"import torch, ctypes; x = torch.zeros(3); ctypes.memset(x.data_ptr() + 12 + {beyond} - 1, 1, 1); del x"
    assert _run(guard, "-c", script).returncode < 0
