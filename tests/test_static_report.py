"""The static report reads compilers right; and no CUDA kernel compiled for one pose keeps anything in local memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from registry import ROUTINGS

from fastcaps import libraries
from tools import static_report
from tools.static_report import collect, spilled

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = libraries.library_path("cuda")
NO_TOOL = "" if static_report.tool("cuobjdump") else "no cuobjdump: neither a CUDA toolkit that has it nor Triton"
NO_LIBRARY = "" if LIBRARY.is_file() else "the CUDA kernels are not built"
NO_TRITON = libraries.triton_kernels()[1] or NO_TOOL


@pytest.mark.skipif(bool(NO_TOOL or NO_LIBRARY), reason=NO_TOOL or NO_LIBRARY)
def test_no_specialised_kernel_of_the_library_spills() -> None:
    found = collect([LIBRARY])
    assert {"FixedPose<4, 4, 4", "FixedPose<8, 8, 8", "TensorPose1x64", "FreePose"} <= {
        pose for one in found for pose in re.findall(r"FixedPose<\d+, \d+, \d+|TensorPose1x64|FreePose", one.name)
    }
    assert not spilled(found)


def test_what_a_native_library_is_asked_it_answers() -> None:
    """A name that it does not have would be answered by None, and nobody would notice."""
    sources = "".join(path.read_text() for kind in ("*.cu", "*.cpp", "*.in") for path in (ROOT / "csrc").rglob(kind))
    paths = [path for room in ("fastcaps", "tools", "bench") for path in (ROOT / room).rglob("*.py")]
    asked = {name for path in paths for name in re.findall(r'\bask\(\s*f?"([^"]*)"', path.read_text())}
    assert "fastcaps_cuda_schedule" in asked and not [name for name in asked if f" {name}(" not in sources]


@pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)
def test_the_compiler_of_triton_says_what_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("registry.ROUTINGS", ROUTINGS[:1])
    monkeypatch.setattr(static_report, "LAYERS", ("pose-4x4-10",))
    head, *lines = static_report.triton_table("sm_90")
    assert [line[1] for line in lines] == ["attention_forward_kernel", "attention_backward_kernel"]
    for line in lines:
        said = dict(zip(head, line, strict=True))
        assert 0 < int(said["registers"]) <= 255 and float(said["shared, KB"]) > 0 and not said["words spilled"]
