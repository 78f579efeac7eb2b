"""A user's type checker knows what every layer returns."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_results_are_typed() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(HERE / "nn_types.py")]
    found = run(command, cwd=HERE.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
