"""Threads and forks: calls and explanations at once, and workers forked after a call."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fastcaps
from fastcaps.functional import dynamic_routing


def call(seed: int) -> list[Tensor]:
    """Parents and gradients of a call with its own tensors."""
    draws = torch.Generator().manual_seed(seed)
    children = torch.randn(4, 96, 1, 8, generator=draws).requires_grad_()
    weight = torch.randn(96, 10, 8, 16, generator=draws).requires_grad_()
    parents = dynamic_routing(children, weight, iterations=3)[0]
    return [parents.detach(), *torch.autograd.grad(parents.square().sum(), (children, weight))]


def test_threads_route_and_explain_at_once() -> None:
    wanted = [call(seed) for seed in range(4)]
    explained = str(
        fastcaps.explain(fastcaps.DynamicRouting(96, 10, in_dim=8, out_dim=16, pose="vector"), torch.ones(4, 96, 8))
    )

    def work(number: int) -> bool:
        if number % 3 == 0:
            layer = fastcaps.DynamicRouting(96, 10, in_dim=8, out_dim=16, pose="vector")
            return str(fastcaps.explain(layer, torch.ones(4, 96, 8))) == explained
        return all(map(torch.equal, call(number % 4), wanted[number % 4]))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(60)))


class Routed(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return call(index)[0]


@pytest.mark.skipif(sys.platform != "linux", reason="no fork to speak of")
def test_workers_forked_after_a_call_route(threads_kept: None) -> None:
    torch.set_num_threads(2)
    wanted = [call(index)[0] for index in range(4)]  # torch's threads are running now, and do not outlive a fork
    loader: Any = DataLoader(Routed(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert all(torch.equal(found, want) for found, want in zip(loader, wanted, strict=True))
