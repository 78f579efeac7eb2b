"""Several processes against one: DDP, FSDP2, and calls whose tensors are DTensors, over gloo on the CPU.

All checks of a number of processes are one start of them (tests/distributed_worker.py), since a start costs seconds.
The processes are forks of a server that has imported torch once.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from distributed_worker import CHECKS, MESHES, SET, work
from suite import python
from torch.multiprocessing import start_processes

Found = dict[str, str]

CASES = [str(case) for case in SET]


def _run(world: int, folder: Path, names: list[str]) -> Found:
    """Return what went wrong in each check, in whichever process: empty text for nothing."""
    get_context("forkserver").set_forkserver_preload(["distributed_worker"])
    with pytest.MonkeyPatch.context() as patch:  # before Python 3.12 the server does not take over sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        start_processes(work, (world, str(folder), names), nprocs=world, start_method="forkserver")  # type: ignore[no-untyped-call]
    every = [torch.load(folder / f"found-{rank}.pt") for rank in range(world)]
    return {name: "\n".join(filter(None, (one.get(name, "did not run") for one in every))) for name in names}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return _run(2, tmp_path_factory.mktemp("two"), [*CHECKS, *CASES])


@pytest.mark.parametrize("name", [*CHECKS, *CASES])
def test_two_processes_do_what_one_does(name: str, two: Found) -> None:
    assert not two[name], two[name]


@pytest.mark.slow
def test_more_processes_do_what_one_does(tmp_path: Path) -> None:
    names = [*CASES, *map(str, MESHES)]
    wrong = {name: text for name, text in _run(4, tmp_path, names).items() if text}
    assert not wrong, wrong


VALIDATION = """
import sys, types, unittest
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # which torch's helpers import
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._ops.strategy_validation import validate_aten_combination as validate
from cases import Case
from registry import ROUTINGS as ROWS
from fastcaps.ops import ROUTINGS
from fastcaps.ops.sharding import acceptable

dist.init_process_group("fake", rank=0, world_size=2)
tried = 0
for routing, ours in zip(ROWS, ROUTINGS, strict=True):
    for rule in routing.rules:
        for iterations in (1, 2):
            case = Case("", rule, batch=4, types=6, parents=4, bias="IM", gate="some", iterations=iterations)
            there, back = routing.call(case).arguments(True), list(routing.backward_call(case).given.values())
            for op, given, backward in ((routing.op, there, False), (routing.backward_op, back, True)):
                for results, arguments in acceptable(ours, backward, *given):
                    lies = tuple(one for one in arguments if one is not None), tuple(results)
                    with LocalTensorMode(2):
                        mesh = init_device_mesh("cpu", (2,))
                        right, why = validate(op, tuple(given), {}, list(op(*given)), lies, 2, mesh)
                    assert right, (op, rule, iterations, lies, why)
                    tried += 1
print(tried)
"""


@pytest.mark.slow
def test_torchs_own_validation_accepts_every_rule() -> None:
    """In a separate process: it takes a process group, and imports much of torch's test helpers."""
    done = python(VALIDATION)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 64, done.stdout
