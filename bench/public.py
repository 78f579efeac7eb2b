"""A training step of public capsule programs, as published and with their layers on fastcaps: time and peak memory.

git clone https://github.com/XifengGuo/CapsNet-Pytorch FOLDER/CapsNet-Pytorch        # and others of CASES
python -m bench.public FOLDER --write  # measures those in FOLDER, in ten minutes; python -m bench.report --write shows

A program is its authors' unmodified source with their sizes; ours is a copy after `fastcaps.convert`. A row is refused
if results or gradients differ by more than 1e-6 in float64, or if ours err more in float32 than :data:`BAR` allows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

import fastcaps
from bench import record, report
from bench.judge import largest, largest_error
from bench.process import Remote, WorkerError
from bench.timing import FULL, KEEPING, peak_growth, set_allocator, take_turns

BAR = 3, 1e-5  # times the error of the published code in float32, and besides a share of a tensor's largest number
NOTHING = 1e-6  # a gradient this share of the largest is zero but for rounding: of a bias in front of a BatchNorm, say
PATIENCE = 300.0  # seconds until a process is given up
randn, rand = torch.randn, torch.rand


class _TwoIterations(nn.Sequential):
    def forward(self, children: Tensor) -> Any:
        return self[0](children, 1, self[0](children, 0))


def _yl() -> nn.Module:
    return import_module("model.capsules").capsules(A=64, B=8, C=16, D=16, E=10, iters=2)


def _tsai() -> nn.Module:
    settings = json.loads(Path(sys.path[0], "configs/resnet_backbone_CIFAR10.json").read_text())
    return import_module("src.capsule_model").CapsModel(32, settings, "resnet", 0.0, 2, sequential_routing=False)


CASES = (
    ("XifengGuo/CapsNet-Pytorch", "`DenseCapsule`, 1,152 to 10", 100,
     lambda: import_module("capsulelayers").DenseCapsule(1152, 8, 10, 16), lambda b: [0.3 * randn(b, 1152, 8)]),
    ("yl-1993/Matrix-Capsules-EM-PyTorch", "`ConvCaps`, 14² × 8 to 6² × 16", 32,
     lambda: _yl().conv_caps1, lambda b: [torch.cat([randn(b, 14, 14, 8 * 16), rand(b, 14, 14, 8)], -1)]),
    ("glassroom/heinsen_routing", "`GenerativeMatrixRouting`, 100 to 10", 128,
     lambda: import_module("heinsen_routing").GenerativeMatrixRouting(d_cov=4, d_inp=4, d_out=4, n_inp=100, n_out=10),
     lambda b: [randn(b, 100), randn(b, 100, 4, 4)]),
    ("apple/ml-capsules-inverted-attention-routing", "`CapsuleCONV`, 16² × 32 to 7² × 32", 4,
     lambda: _TwoIterations(_tsai().capsule_layers[0]), lambda b: [randn(b, 32, 16, 16, 16)]),
    ("VinAIResearch/3D-UCaps", "`ConvSlimCapsule3D`, 16³ × 16 to 16³ × 16", 1,  # the second of a patch of 32³
     lambda: import_module("layers").ConvSlimCapsule3D(3, 16, 16, 8, 8, stride=1, padding=1),
     lambda b: [randn(b, 16, 8, 16, 16, 16)]),
    ("XifengGuo/CapsNet-Pytorch", "`CapsuleNet`, MNIST", 100,
     lambda: import_module("capsulenet").CapsuleNet([1, 28, 28], classes=10, routings=3),
     lambda b: [rand(b, 1, 28, 28), torch.eye(10)[torch.arange(b) % 10]]),
    ("yl-1993/Matrix-Capsules-EM-PyTorch", "`CapsNet`, MNIST", 32, _yl, lambda b: [rand(b, 1, 28, 28)]),
    ("yaohungt/Capsules-Inverted-Attention-Routing", "`CapsModel`, CIFAR-10", 4, _tsai,
     lambda b: [randn(b, 3, 32, 32)]),
)  # fmt: skip
"""Repositories on GitHub, what is run of them (the last three are networks), the batch, the module, and its inputs."""
NETWORKS = range(5, len(CASES))


def _step(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Run a training step, and return results and the gradients of all that requires them."""
    found = module(*inputs)
    results = [found] if isinstance(found, Tensor) else [*found]
    leaves = [tensor for tensor in (*module.parameters(), *inputs) if tensor.requires_grad]
    weights = [torch.linspace(-1, 1, each.numel()).view(each.shape) for each in results]
    return [each.detach() for each in results] + [*torch.autograd.grad(results, leaves, weights)]


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the largest error in each tensor, as a share of its largest number."""
    least = NOTHING * max(map(largest, exact))
    return [largest_error(one, right) / max(largest(right), least) for one, right in zip(found, exact, strict=True)]


class Program:
    """One case in a separate process, in which its authors' CUDA calls run on the CPU."""

    def __init__(self, folder: str, case: int) -> None:
        (_, _, self.batch, *self.make), self.network = CASES[case], case in NETWORKS
        sys.path.insert(0, folder)
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
        torch.cuda.FloatTensor = torch.empty  # type: ignore[assignment, misc]
        sys.modules.setdefault("torchvision", MagicMock())  # a training script takes its images from there

    def _sides(self, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[nn.Module, list[Tensor]]]:
        """Return the published module and its converted copy, each with the inputs; those of a layer need gradients."""
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        theirs, inputs = self.make[0](), self.make[1](batch)
        torch.set_default_dtype(dtype)  # of every tensor that their code makes
        theirs, inputs = theirs.to(dtype), [each.to(dtype).requires_grad_(not self.network) for each in inputs]
        ours = deepcopy(theirs)
        converted = fastcaps.convert(ours)
        if converted.left or not converted.converted:
            raise ValueError(f"not converted: {converted}")
        return {"theirs": (theirs, inputs), "ours": (ours, inputs)}

    def check(self) -> dict[str, float]:
        """Return how far results and gradients lie from the published code's in float64: ours, and both in float32."""
        exact, ours = (_step(*side) for side in self._sides(self.batch, torch.float64).values())
        far = {"float64": _errors(ours, exact)}
        far |= {name: _errors(_step(*side), exact) for name, side in self._sides(self.batch).items()}
        allowed = [BAR[0] * theirs + BAR[1] for theirs in far["theirs"]]
        if not max(far["float64"]) <= 1e-6 or not all(a <= b for a, b in zip(far["ours"], allowed, strict=True)):
            raise ValueError(f"results or gradients differ: {far}")
        return {name: max(each) for name, each in far.items()}

    def time(self, compiled: bool) -> dict[str, Any]:
        """Time steps alternately: both, and the published module compiled."""
        set_allocator(KEEPING)
        sides = self._sides(self.batch)
        if compiled:
            sides["compiled"] = torch.compile(deepcopy(sides["theirs"][0]), dynamic=False), sides["theirs"][1]
            far = max(_errors(_step(*sides["compiled"]), _step(*sides["theirs"])))
            if not far <= 1e-2:  # float32 alone moves some gradients by a tenth of it
                raise ValueError(f"wrong result: differs by {far:.1e}")
        return take_turns({name: partial(_step, *side) for name, side in sides.items()}, FULL)

    def memory(self, name: str) -> int:
        """Return the bytes that a step adds at its peak to a process that holds the module and its inputs."""
        _step(*self._sides(min(2, self.batch))[name])  # has the code loaded, and threads started
        return peak_growth(partial(_step, *self._sides(self.batch)[name]))[0]


def measure(case: int, folder: Path, threads: int) -> dict[str, Any]:
    """Return the row of a case whose repository is in a folder; ``refused`` says why it has no figures."""
    row: dict[str, Any] = dict(zip(("repository", "what", "batch"), CASES[case], strict=False))
    row |= {"network": case in NETWORKS, "load": os.getloadavg()[0]}
    git, remote = ["git", "-C", str(folder)], Remote(threads, Program, str(folder), case)
    row["commit"] = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    try:
        if subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"]):
            raise WorkerError("its source is modified")
        row["equal"] = remote.call(PATIENCE, "check")
        try:
            row |= remote.call(PATIENCE, "time", not row["network"])
        except WorkerError as error:
            row |= {"compiled": {"failed": str(error)}} | remote.call(PATIENCE, "time", False)
        row["memory"] = {}
        for name in ("theirs", "ours"):
            remote.close()  # the next call starts a fresh process
            row["memory"][name] = remote.call(PATIENCE, "memory", name)
    except WorkerError as error:
        row["refused"] = str(error)
    finally:
        remote.close()
    return row


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Public capsule programs, as published and on fastcaps.")
    parser.add_argument("folder", type=Path, help="holds clones, each under its repository's name or as owner+name")
    parser.add_argument("--write", action="store_true", help="keep the record in bench/results")
    parser.add_argument("--only", default="", metavar="WORD", help="repositories whose names hold this word")
    given = parser.parse_args(None if arguments is None else list(arguments))
    threads = min(2, os.cpu_count() or 1)
    machine, rows = record.describe(threads), []
    for case, (repository, *_) in enumerate(CASES):
        places = [given.folder / name for name in (repository.replace("/", "+"), repository.partition("/")[2])]
        for place in places if given.only in repository else ():
            if place.is_dir():
                rows.append(measure(case, place, threads))
                print(report.public([{**rows[-1], "machine": machine}]), flush=True)
                if given.write:  # a run that is stopped leaves what it has
                    print(f"written: {record.write(record.RESULTS, machine, rows, 'public')}")
    if not rows:
        parser.exit(1, f"public: no repository of {', '.join(sorted({one[0] for one in CASES}))} in {given.folder}\n")
    return int(any("refused" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
