"""The examples: those for several processes each as a user runs it, at a small size; notebooks as they are."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import python
from torch import Tensor

from fastcaps import Votes

ROOT = Path(__file__).parents[1]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SMALL = ["--images", "128", "--epochs", "2"]

slow = pytest.mark.slow  # every process imports torch; a compiler runs for half a minute


def run(*arguments: str) -> str:
    """Return what an example prints."""
    done = python(*arguments, **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}))
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def last_loss(printed: str) -> str:
    return re.findall(r"loss ([0-9.]+)", printed)[-1]


@slow
def test_ddp_and_fsdp_learn_the_same() -> None:
    every = [
        run(*TORCHRUN, "2", "examples/data_parallel.py", *SMALL),
        run(*TORCHRUN, "2", "examples/data_parallel.py", *SMALL, "--fsdp"),
    ]
    losses = [float(last_loss(printed)) for printed in every]
    assert losses == pytest.approx([losses[0]] * 2, abs=1e-3)
    assert losses[0] < 2.3  # ln 10, what guessing costs


@slow
def test_a_set_over_several_processes_is_the_set_of_one() -> None:
    """Parents, and the gradients of children and matrices: the second step's loss depends on these."""
    one, three = (run(*TORCHRUN, count, "examples/million_children.py", "--children", "5000") for count in ("1", "3"))
    assert sorted(re.findall(r": (\d+) children", three)) == ["1000", "2000", "2000"]
    found, wanted = (
        [float(x) for x in re.findall(r"(?:loss|dchildren\|) ([0-9.e+-]+)", text)] for text in (three, one)
    )
    assert len(wanted) == 6 and found == pytest.approx(wanted, rel=1e-5) and len({*wanted}) == 6


# ---- notebooks: what their text says ---------------------------------------------------------------------------------


def names(example: str) -> dict[str, Any]:
    """Run a notebook here, and return its names."""
    return runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")


@slow
def test_one_import_is_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    found = names("swap_one_import.py")
    assert found["losses"]["after"] == pytest.approx(found["losses"]["before"], rel=1e-5)
    assert len(set(found["losses"]["before"])) == 3
    assert "1 of 1 layers converted" in capsys.readouterr().out


def test_texts_of_any_length(capsys: pytest.CaptureFixture[str]) -> None:
    found = names("texts_of_any_length.py")
    assert found["together"].abs().max() > 0.1  # not one logit of 0 beside another
    assert (found["alone"] - found["together"]).abs().max() <= 1e-5
    printed = capsys.readouterr().out
    assert "same bits: True" in printed and "gradient of padding: 0.0" in printed
    short, long = (int(share) for share in re.findall(r"(\d+)% right", printed))
    assert 50 < short < long


@slow
@pytest.mark.usefixtures("one_thread")  # which the example asks for, and which must not stay
def test_pooling_in_a_resnet(capsys: pytest.CaptureFixture[str]) -> None:
    found = names("pooling_resnet.py")
    assert "in every bit: True" in capsys.readouterr().out
    assert min(found["accuracy"].values()) > 0.9
    assert found["share"] < 1 / 16 and found["moved"]["routing"] < found["moved"]["average"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernel_size": 3, "padding": 1, "share": True, "bias": True},
        {"kernel_size": "all", "share": True},
        {"matrices": False, "bias": True},
    ],
    ids=str,
)
def test_a_fixed_point_and_its_gradient_are_those_of_many_iterations(options: dict[str, Any]) -> None:
    found = names("equilibrium_routing.py")
    assert found["saved"][50] == found["saved"][200] > 0

    class Unrolled(found["EquilibriumRouting"]):  # type: ignore[misc]
        def route(self, votes: Votes, activations: Tensor, iterations: int) -> Tensor:
            parents, gate = votes.sum(0.0), votes.unfold(activations)[..., None]
            for _ in range(iterations):
                parents = self.step(votes, gate, parents)
            return parents

    given: dict[str, Any] = {"pose": 2, "dtype": torch.float64, **options}
    solved = found["EquilibriumRouting"](6, 5, 8, 8, iterations=400, tolerance=1e-14, **given)
    if solved.bias is not None:
        torch.nn.init.uniform_(solved.bias)
    unrolled = Unrolled(6, 5, 8, 8, iterations=200, **given)
    unrolled.load_state_dict(solved.state_dict())
    solved.scale = unrolled.scale = 0.2 * solved.scale  # so that parents come to rest soon
    grid = (5, 5) if "kernel_size" in options else ()
    children = torch.randn(2, 6, *grid, 8, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(2, 6, *grid, dtype=torch.float64, requires_grad=True)
    parents, wanted = solved(children, gate), unrolled(children, gate)
    torch.testing.assert_close(wanted, unrolled(children, gate, iterations=201), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(parents, wanted, rtol=1e-10, atol=1e-11)
    head = torch.randn_like(parents)
    got, right = (
        torch.autograd.grad((x * head).sum(), (children, gate, *layer.parameters()))
        for x, layer in ((parents, solved), (wanted, unrolled))
    )
    torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-9)


@slow
def test_a_loop_of_ones_own() -> None:
    found = names("custom_loop.py")
    losses, right = zip(*(found[name] for name in ("plain", "mixed", "both")), strict=True)
    assert [run[0] for run in losses] == pytest.approx([losses[0][0]] * 3, rel=0.01)
    assert list(right) == pytest.approx([right[0]] * 3, abs=0.03) and right[0] > 0.9


@slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="AOTInductor needs a compiler")
def test_what_is_exported_gives_the_same_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = names("export.py")
    worst = dict(re.findall(r"(\S+) in a new process: differs by (\S+)", found["done"].stdout))
    assert set(worst) == {"torch.export", "AOTInductor"} | (
        {"ONNX"} if (found["folder"] / "net.onnx").exists() else set()
    )
    assert all(float(number) <= 1e-6 for number in worst.values())
