"""Whether CUDA kernels are built, by which nvcc and for what: csrc/cuda/toolkit.cmake, run as a script."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_build import ROOT, make_torch

pytestmark = [
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA kernels are built on Linux only"),
]
Decide = Callable[..., str]
DEFAULT = "80-real;90-real;100-real;120"


@pytest.fixture
def decide(tmp_path: Path) -> Decide:
    """What toolkit.cmake says for a torch and an environment, in one line; `usual` stands for /usr/local/cuda."""
    torches = {cuda: make_torch(tmp_path / (cuda or "none"), cuda=cuda) for cuda in ("", "13.0")}
    cmake = shutil.which("cmake")

    def run(cuda: str = "13.0", usual: Path = tmp_path / "nowhere", **environ: str) -> str:
        command = [str(cmake), f"-DFASTCAPS_TORCH_DIR={torches[cuda]}", f"-Dusual_cuda={usual}"]
        script = str(ROOT / "csrc/cuda/toolkit.cmake")
        done = subprocess.run(
            [*command, "-P", script], env={"PATH": "/none", **environ}, capture_output=True, text=True, cwd=tmp_path
        )
        text = " ".join((done.stdout + done.stderr).split())
        assert ("CMake Error" in text) == (done.returncode != 0), text
        return text

    return run


def make_nvcc(folder: Path, version: str = "13.0", architectures: tuple[int, ...] = (75, 80, 86, 90, 100, 120)) -> Path:
    """A program that answers as nvcc does when it is asked what it is."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    known = "".join(f"compute_{number}\\n" for number in architectures)
    nvcc.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo 'Cuda compilation tools, release {version}, V{version}.77';;\n"
        f"--list-gpu-arch) printf '{known}';; esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize("place", ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "usual", "PATH"])
def test_a_toolkit_is_found(decide: Decide, tmp_path: Path, place: str) -> None:
    nvcc = make_nvcc(tmp_path / "toolkit")
    given = {place: str({"CUDACXX": nvcc, "PATH": nvcc.parent}.get(place, tmp_path / "toolkit"))}
    assert f"CUDA kernels: [{nvcc}] for [{DEFAULT}]" in decide(**given)


def test_a_torch_without_cuda_leaves_the_kernels_out_unless_they_are_asked_for(decide: Decide, tmp_path: Path) -> None:
    nvcc = make_nvcc(tmp_path / "toolkit")
    home = str(tmp_path / "toolkit")
    assert "[] for []torch has no CUDA (FASTCAPS_CUDA=1 builds them all the same)" in decide("", CUDA_HOME=home)
    for cuda in ("", "13.0"):
        assert f"[{nvcc}] for [{DEFAULT}]" in decide(cuda, CUDA_HOME=home, FASTCAPS_CUDA="1")
        assert "[] for []FASTCAPS_CUDA=0, when it was built" in decide(cuda, CUDA_HOME=home, FASTCAPS_CUDA="0")
    assert "Error" in (said := decide(FASTCAPS_CUDA="yes")) and "FASTCAPS_CUDA must be 0 or 1, got 'yes'" in said


def test_without_a_toolkit_there_are_no_kernels_and_every_place_is_named(decide: Decide, tmp_path: Path) -> None:
    given = {"CUDA_HOME": str(tmp_path / "empty")}
    looked = "CUDACXX (not set), CUDA_HOME (no nvcc), CUDA_PATH (not set), "
    looked += f"{tmp_path / 'nowhere'} (no nvcc), PATH (no nvcc)"
    why_not = f"no nvcc of CUDA 12.4 or later in {looked}"
    assert f"[] for []{why_not}, when it was built" in decide(**given)
    assert f"FASTCAPS_CUDA=1: {why_not}. Install a CUDA toolkit" in decide(**given, FASTCAPS_CUDA="1")


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("", DEFAULT),
        ("8.0;9.0+PTX", "80-real;90"),
        ("8.0 9.0a, 12.0", "80-real;90a-real;120-real"),
        ("10.0f+PTX", "100f"),
        ("9.0 9.0+PTX", "90"),
        ("Hopper;Ampere", "90;80-real;86"),
        ("7.0;7.5+PTX;8.0", "80-real"),
    ],
)
def test_architectures_are_written_as_for_torch(decide: Decide, tmp_path: Path, asked: str, chosen: str) -> None:
    nvcc = make_nvcc(tmp_path / "toolkit")
    assert f"for [{chosen}]" in decide(CUDACXX=str(nvcc), TORCH_CUDA_ARCH_LIST=asked)
