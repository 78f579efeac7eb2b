"""The examples, each as a user runs it, at a small size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SMALL = ["--images", "128", "--epochs", "2"]

pytestmark = pytest.mark.slow  # every process imports torch


def run(*arguments: str) -> str:
    """Return what an example prints."""
    variables = (
        os.environ | {"PYTHONPATH": str(ROOT)} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    )
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_loss(printed: str) -> str:
    return re.findall(r"loss ([0-9.]+)", printed)[-1]


def test_ddp_fsdp_and_lightning_learn_the_same() -> None:
    every = [
        run(*TORCHRUN, "2", "examples/data_parallel.py", *SMALL),
        run(*TORCHRUN, "2", "examples/data_parallel.py", *SMALL, "--fsdp"),
        run("examples/lightning_parallel.py", *SMALL),
    ]
    losses = [float(last_loss(printed)) for printed in every]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-3)
    assert losses[0] < 2.3  # ln 10, what guessing costs


def test_a_set_over_several_processes_is_the_set_of_one() -> None:
    printed = run(*TORCHRUN, "3", "examples/million_children.py", "--children", "3000")
    assert len(re.findall(r"1000 of them here", printed)) == 3
    assert "step 1" in printed
