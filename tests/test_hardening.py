"""What looks for faults finds them: guard pages, the fuzzer, the planted faults, the calls for a sanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from registry import ROUTINGS, Call
from suite import native_only, python

from fastcaps import backends
from fastcaps.rules import Rule
from tools import faults, fuzz, sanitize
from tools.native import environment, guarded, guarded_library

ROOT = Path(__file__).resolve().parents[1]
LEVEL = "avx2" if backends.native_capability() in ("avx2", "avx512") else "default"
"""The instruction set of the library with guard pages."""


@native_only
def test_the_fuzzer_sees_a_wrong_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing in a library that is right; the same seed draws the same calls."""
    assert fuzz.run_seed(3, ["op"], 2)
    right = Call.by_op

    def wrong(call: Call) -> dict[str, torch.Tensor]:
        return {name: 1.01 * result for name, result in right(call).items()}

    monkeypatch.setattr(Call, "by_op", wrong)
    assert not fuzz.run_seed(3, ["op"], 4)
    assert "WRONG op" in capsys.readouterr().out


@native_only
@pytest.mark.parametrize("kind", ["backward", "broken", "wrong", "public"])
def test_a_few_calls_of_every_other_kind(kind: str) -> None:
    assert fuzz.run_seed(0, [kind], 2)


def test_the_calls_for_the_sanitizer_are_held_to_the_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = " ".join(sanitize.calls())
    assert all(name in names for name in (*Rule.__members__, *sanitize.ROWS))
    few = ["--device", "cpu", "--only", "pose-2x3"]
    assert sanitize.main(few) == 0 and "ok     attention LAYER_NORM pose-2x3, free" in capsys.readouterr().out
    right = Call.by_op
    monkeypatch.setattr(Call, "by_op", lambda call: {name: 1.01 * result for name, result in right(call).items()})
    assert sanitize.main(few) == 1
    assert "WRONG  attention LAYER_NORM pose-2x3, free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "  if (a < b && c) x[k] += y - 1;",
            {
                "  if (a <= b && c) x[k] += y - 1;": "  if ( (FASTCAPS_FAULT(@) ? (a <= b && c) : (a < b && c))) "
                "x[k] += y - 1;",
                "  if (a < b && c) x[k] = y - 1;": "if (FASTCAPS_FAULT(@)) {   if (a < b && c) x[k] = y - 1; } "
                "else {   if (a < b && c) x[k] += y - 1; }",
            },
        ),
        ("    barrier();", {"": "if (!FASTCAPS_FAULT(@)) {     barrier(); }"}),
        ("    copy_wait<1>();", {"": "if (!FASTCAPS_FAULT(@)) {     copy_wait<1>(); }"}),
        ("  int k = 0;", {"  int k = 1;": "  int k = (FASTCAPS_FAULT(@) ? ( 1) : ( 0));"}),
        ("      + a * b,", {}),  # cut off on the left
        ("  f<A, 1, K / 2>(x);", {}),  # known to the compiler
        ("  // a < b", {}),
        ('  STD_TORCH_CHECK(a < b, "a");', {}),
    ],
)
def test_faults_of_a_line_of_cpp(line: str, wanted: dict[str, str]) -> None:
    found = dict(faults.faults_of_line(line))
    assert wanted.items() <= found.items() and bool(found) == bool(wanted) and line not in found


def test_faults_are_the_same_for_a_seed_and_never_two_in_a_line() -> None:
    everything = faults.faults(ROOT, ["csrc/cpu/forward.h", "csrc/cuda/stage.h", "triton_kernels/tiles.py"])
    some = faults.drawn(everything, 90, seed=1)
    assert some == faults.drawn(everything, 90, seed=1) != faults.drawn(everything, 90, seed=2)
    assert len({(one.path, one.line) for one in some}) == 90


# ---- guard pages -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which a guard page lies behind all aligned memory."""
    return guarded(tmp_path_factory.mktemp("guard")) or pytest.skip("needs Linux and a C compiler")


@native_only
@pytest.mark.slow
def test_no_kernel_leaves_its_memory(guard: dict[str, str]) -> None:
    """Guard pages lie behind scratch memory and tensors: a third of the registry's small cases, and verbs."""
    variables = {**environment(guarded_library(ROOT / "build" / f"guards-{LEVEL}", LEVEL)), **guard}
    done = python("guard_worker.py", "0", "3", "1", cwd=ROOT / "tests", **variables)
    assert done.returncode == 0, done.stdout.splitlines()[-1] + done.stderr[-3000:]


@native_only
@pytest.mark.slow
@pytest.mark.skipif(LEVEL == "default", reason="vectors are too short for some kernels")
def test_every_schedule_and_kernel_has_a_case() -> None:
    """By what the test build says of itself."""
    variables = environment(guarded_library(ROOT / "build" / f"guards-{LEVEL}", LEVEL))
    done = python("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", "has_a_case", "test_kernels.py",
                  cwd=ROOT / "tests", **variables)  # fmt: skip
    assert done.returncode == 0 and f"{len(ROUTINGS) + 1} passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("beyond", [0, 1, 64])
def test_the_guard_sees_a_step_too_far(guard: dict[str, str], beyond: int) -> None:
    """One number behind a tensor's end, and one behind the room that its alignment leaves."""
    script = f"""if True:
        import ctypes
        library = ctypes.CDLL(None)
        library.aligned_alloc.restype = ctypes.c_void_p
        memory = library.aligned_alloc(64, 12)
        ctypes.memset(memory + 12 + {beyond} - 1, 1, {beyond} > 0)
        library.free(ctypes.c_void_p(memory))
    """
    assert (python(script, **guard).returncode < 0) == (beyond > 0)
