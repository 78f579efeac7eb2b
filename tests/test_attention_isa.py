"""Every instruction set that this build and this processor have runs the tests of the attention pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attention_cases import native_only

from fastcaps import backends

LEVELS = ("default", "avx2", "avx512")
TESTS = Path(__file__).resolve().parent


def _run(level: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FASTCAPS_CPU_CAPABILITY": level}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False
    )


@native_only
@pytest.mark.parametrize("level", LEVELS)
def test_forced_level_passes_the_kernel_tests(level: str) -> None:
    if level == backends.native_capability():
        pytest.skip(f"{level} is what test_attention_pass.py runs on here")
    seen = _run(level, "-c", "from fastcaps import backends as b; print(b.native_capability())").stdout.strip()
    if seen == "None":
        pytest.skip(f"{level} is not built, or this processor does not have it")
    assert seen == level
    selected = "test_forward_and_every_gradient or test_random_shapes"
    done = _run(
        level,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(TESTS / "test_attention_pass.py"),
        "-k",
        selected,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@native_only
def test_unknown_level_is_refused_not_replaced() -> None:
    script = """
import torch, fastcaps
cpu = fastcaps.backends.listing()[2]
assert not cpu.available and "sse9" in cpu.detail, cpu
children, weight, parents = torch.randn(1, 3, 2, 2), torch.randn(3, 2, 2, 2), torch.randn(1, 2, 2, 2)
try:
    with fastcaps.backend("cpu"):
        fastcaps.functional.inverted_attention_routing(children, weight, parents)
except fastcaps.BackendError as error:
    assert "sse9" in str(error), error
else:
    raise SystemExit("the forced backend ran")
try:
    fastcaps.functional.inverted_attention_routing(children, weight, parents)
except (RuntimeError, ValueError) as error:
    assert "FASTCAPS_CPU_CAPABILITY" in str(error), error
else:
    raise SystemExit("a level that does not exist ran")
"""
    done = _run("sse9", "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
