"""Very long and very short poses, and calls that torch's own kernels do not survive: right numbers or a clear error."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from features import BY_NAME, ROUTINGS, WINDOWS, Routing
from suite import native_only

from fastcaps import Window, backend
from fastcaps.functional import dynamic_routing, inverted_attention_routing, routing_pool
from fastcaps.vectors import squash

LENGTHS = {  # up to the longest vector of four equal numbers that the dtype holds, down to where lengths are normal
    torch.float16: [1e-3, 1.0, 255.0, 300.0, 6e4],
    torch.bfloat16: [1e-30, 1e-3, 1.0, 300.0, 2e19, 1e38],
    torch.float32: [1e-30, 1e-3, 1.0, 300.0, 2e19, 1e38],
    torch.float64: [1e-150, 1.0, 1e19, 1e160, 1e300],
}


@pytest.mark.parametrize(("dtype", "length"), [(dtype, at) for dtype, some in LENGTHS.items() for at in some], ids=str)
def test_squash_of_any_length(dtype: torch.dtype, length: float) -> None:
    direction = torch.tensor([0.5, -0.5, 0.5, 0.5], dtype=torch.float64)
    vector = (length * direction).to(dtype).requires_grad_()
    size = vector.detach().double().norm().item()
    exact = direction * ((size / (1 + size * size)) * size if size < 1e100 else 1.0)
    found = squash(vector)
    error = (found.detach().double() - exact).abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps * exact.abs().max().item() + 2 * torch.finfo(dtype).tiny
    (gradient,) = torch.autograd.grad(found[0], vector)
    assert gradient.isfinite().all()


def test_gradient_of_squash_at_every_length() -> None:
    direction = torch.tensor([0.6, -0.8, 0.0], dtype=torch.float64)
    for length in (1e-3, 0.1, 1.0, 30.0, 1e4):
        assert torch.autograd.gradcheck(squash, ((length * direction).requires_grad_(),), eps=1e-7 * length, atol=1e-6)


SCALES = [10.0**k for k in (-30, -25, -20, -15, -5, 5, 15, 19, 22, 26, 30)]


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("window", [None, Window(2)], ids=["set", "grid"])
@pytest.mark.parametrize("scale", SCALES)
def test_pooling_knows_no_scale(scale: float, window: Window | None, name: str) -> None:
    """Keys and proposals are unit vectors: poses a million times as long are pooled a million times as long."""
    shape = (2, 7, 1, 5) if window is None else (2, 3, 4, 3, 1, 5)
    children = torch.randn(shape, dtype=torch.float64)
    wanted, shares = routing_pool(children, window=window, sharpness=2.0, return_coefficients=True)
    given = (scale * children).float().requires_grad_()
    with backend(name):
        found, told = routing_pool(given, window=window, sharpness=2.0, return_coefficients=True)
        (gradient,) = torch.autograd.grad(found.sum(), given)
    torch.testing.assert_close(found.double() / scale, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(told.double(), shares, rtol=2e-5, atol=2e-6)
    exact = children.clone().requires_grad_()
    (slope,) = torch.autograd.grad(routing_pool(exact, window=window, sharpness=2.0).sum(), exact)
    torch.testing.assert_close(gradient.double(), slope, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1e8])
def test_pooling_with_weights_knows_no_scale(scale: float, name: str) -> None:
    routing = BY_NAME["pool-weights"]
    given = {k: t for k, t in routing.tensors().items() if k != "bias"}
    wanted = routing.ours(given)["poses"]
    small = {**given, "children": scale * given["children"]}
    with backend(name):
        found = routing.ours({k: t.float() for k, t in small.items()})["poses"]
    torch.testing.assert_close(found.double() / scale, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if row.function is dynamic_routing], ids=str)
@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_coefficients_err_no_more_than_twice_eager(window: Window | None, name: str, routing: Routing) -> None:
    """In the upper quarter of many draws: where agreements are large, one draw magnifies a rounding at random."""
    eager, ours = [], []
    for seed in range(48):
        torch.manual_seed(seed)
        given = {key: torch.randn_like(t) if key != "gate" else t for key, t in routing.tensors(window).items()}
        given["children"] *= 10.0 ** (seed % 3 - 1)
        single = {key: tensor.float() for key, tensor in given.items()}
        wide = {key: tensor.double() for key, tensor in single.items()}
        exact = routing.plain(wide, window, coefficients=True)["coefficients"]
        plain = routing.plain(single, window, coefficients=True)["coefficients"]
        with backend(name):
            found = routing.ours(single, window, coefficients=True)["coefficients"]
        eager.append((plain.double() - exact).abs().max())
        ours.append((found.double() - exact).abs().max())
    upper = [torch.stack(errors).quantile(0.75).item() for errors in (ours, eager)]
    assert upper[0] <= 2 * upper[1] + torch.finfo(torch.float32).eps


def test_coefficients_of_the_published_size_err_no_more_than_twice_eager() -> None:
    children, weight = torch.randn(2, 288, 1, 8), 0.3 * torch.randn(288, 10, 8, 16)
    options = {"compete": "children", "detach": True, "return_coefficients": True}

    def eager(children: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        votes = torch.einsum("bicd,imde->bimce", children, weight)
        logits = torch.zeros(votes.shape[:3], dtype=votes.dtype)
        for turn in range(3):
            shares = logits.softmax(1)
            parents = squash((shares[..., None, None] * votes).sum(1), (-2, -1))
            logits = logits + torch.einsum("bimce,bmce->bim", votes, parents) if turn < 2 else logits
        return shares

    exact = eager(children.double(), weight.double())
    limit = 2 * (eager(children, weight).double() - exact).abs().max().item() + 1e-9
    shares = dynamic_routing(children, weight, **options)[1]
    assert (shares.double() - exact).abs().max().item() <= limit


# ---- a first turn that torch's own convolution does not survive ------------------------------------------------------

FATAL = [  # grid, kernel, stride, padding, dilation: no output column sees an input column
    ((4, 1), (3, 1), (3, 3), (5, 2), (2, 2)),
    ((3, 1), (1, 1), (3, 2), (7, 1), (2, 2)),
    ((2, 2), (1, 1), (1, 4), (0, 2), (2, 4)),
    ((1, 1), (1, 2), (1, 2), (5, 5), (3, 2)),
    ((8, 1), (1, 3), (2, 2), (5, 5), (1, 2)),
    ((4, 3), (3, 1), (1, 4), (1, 9), (2, 4)),
]
_SCRIPT = """
import torch
from fastcaps import Window
from fastcaps.functional import inverted_attention_routing
for grid, *window in {cases}:
    for types, pose in ((1, 4), (3, 1), (16, 4)):
        window_ = Window(*window)
        count = types * window_.positions
        children = torch.randn(2, types, *grid, pose, pose)
        leaves = [children, torch.randn(count, 3, pose, pose), torch.randn(count, 3, pose, pose)]
        gate = torch.rand(2, types, *grid)
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            given = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (*leaves, gate)]
            routed = inverted_attention_routing(
                *given[:2], bias=given[2], gate=given[3], window=window_, normalize=False
            )
            found.append([routed, *torch.autograd.grad(routed.sum(), given)])
        for half, exact in zip(*found, strict=True):
            torch.testing.assert_close(half.double(), exact, rtol=0.05, atol=0.05 * (1 + exact.abs().max().item()))
print("survived")
"""


def test_first_turn_where_no_window_sees_a_column() -> None:
    """In a process of its own: oneDNN's bfloat16 convolution reads a null pointer there."""
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(cases=FATAL)], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout.strip() == "survived", f"ended with {run.returncode}: {run.stderr[-2000:]}"


def test_such_windows_are_right_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        children, weight = torch.randn(2, 2, 4, 1, 2, 2, dtype=dtype), torch.randn(6, 3, 2, 2, dtype=dtype)
        window = Window((3, 1), (3, 3), (5, 2), (2, 2))
        found = inverted_attention_routing(children, weight, window=window, normalize=False)
        assert found.shape == (2, 3, 4, 2, 2, 2) and math.isclose(found.abs().sum().item(), 0.0)


@native_only
@pytest.mark.parametrize("number", [0.0, 1e-30, 1e30, math.nan])
def test_an_odd_vote_changes_no_bit_of_other_samples(number: float) -> None:
    """Samples share the lanes of a vector; a vote whose square leaves the range of float32 is measured apart."""
    weight, children = torch.randn(6, 3, 4, 4), torch.randn(16, 6, 4, 4)
    found = []
    for odd in (False, True):
        given = children.clone()
        if odd:
            given[0, 2] = number
        given.requires_grad_()
        routed = routing_pool(given, weight=weight, sharpness=1.5)
        (gradient,) = torch.autograd.grad(routed.square().sum(), given)
        found.append((routed[1:], gradient[1:]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("compete", ["parents", "children"])
def test_a_length_beyond_the_dtype_leaves_gradients_finite(compete: str, name: str) -> None:
    """S is finite where its length is not: squashed, it is a unit vector, whose gradient is nothing."""
    children = torch.ones(2, 1, 2, 2)
    children[1] = 3e38
    weight = torch.eye(2)[None, None].clone().requires_grad_()
    with backend(name):
        parents = dynamic_routing(children, weight, iterations=1, compete=compete)
        alone = dynamic_routing(children[:1], weight, iterations=1, compete=compete)
        found, wanted = (torch.autograd.grad(p.sum(), weight)[0] for p in (parents, alone))
    torch.testing.assert_close(found, wanted)
