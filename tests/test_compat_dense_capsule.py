"""Guo's class layer under its own name, against the same procedure with stored votes; checkpoints."""

from __future__ import annotations

import copy
import inspect
import pickle

import nn_plain_routings
import pytest
import torch

import fastcaps.compat
from fastcaps.compat import DenseCapsule

SIZES = {"small": (6, 3, 4, 5), "one-parent": (5, 4, 1, 3), "numbers": (4, 1, 3, 1)}


def pair(sizes: tuple[int, ...], routings: int = 3, spread: float = 1.0):
    """Our layer and the plain one with the same parameters, in float64."""
    torch.manual_seed(0)
    plain = nn_plain_routings.DenseCapsule(*sizes, routings=routings).double()
    with torch.no_grad():
        plain.weight.copy_(spread * torch.randn_like(plain.weight))
    ours = DenseCapsule(*sizes, routings=routings).double()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("routings", [1, 2, 3, 5])
def test_results_and_gradients(name: str, routings: int) -> None:
    ours, plain = pair(SIZES[name], routings)
    children = torch.randn(3, *SIZES[name][:2], dtype=torch.float64, requires_grad=True)
    results = []
    for layer in (ours, plain):
        parents = layer(children)
        weights = torch.linspace(-1, 1, parents.numel(), dtype=torch.float64).view(parents.shape)
        results.append([parents, *torch.autograd.grad((parents * weights).sum(), [children, layer.weight])])
    for got, want in zip(*results, strict=True):  # their 1e-8 in the turns before the last moves logits by as much
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("spread", [1e-4, 1e-8, 1e-12])
def test_the_1e_8_of_their_squash_counts_for_tiny_capsules(spread: float) -> None:
    ours, plain = pair(SIZES["small"], 3, spread)
    children = torch.randn(3, 6, 3, dtype=torch.float64)
    parents = plain(children)
    torch.testing.assert_close(ours(children), parents, rtol=1e-7, atol=0)
    size = torch.linalg.vector_norm(parents, dim=-1)
    assert (size > 0).all() and size.max() < 1e-6


def test_zero_children_have_a_gradient() -> None:
    ours, _ = pair(SIZES["small"])
    children = torch.zeros(2, 6, 3, dtype=torch.float64, requires_grad=True)
    parents = ours(children)
    assert (parents == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(parents.sum(), [children, ours.weight]))


def test_initialisation_signature_and_parameters_are_the_authors() -> None:
    names = ["in_num_caps", "in_dim_caps", "out_num_caps", "out_dim_caps", "routings"]
    assert list(inspect.signature(DenseCapsule).parameters) == names
    assert inspect.signature(DenseCapsule).parameters["routings"].default == 3
    torch.manual_seed(3)
    layer = DenseCapsule(1152, 8, 10, 16)
    torch.manual_seed(3)
    assert torch.equal(layer.weight, 0.01 * torch.randn(10, 1152, 16, 8))
    assert list(layer.state_dict()) == ["weight"] and layer.routings == 3
    assert "in_num_caps=1152" in repr(layer) and "routings=3" in repr(layer)
    assert fastcaps.compat.dense_capsule.DenseCapsule is DenseCapsule


def test_copies_compiled_and_autocast() -> None:
    ours, _ = pair(SIZES["small"])
    children = torch.randn(2, 6, 3, dtype=torch.float64)
    wanted = ours(children)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(children), wanted)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="aot_eager")(children), wanted)
    single = ours.float()
    with torch.autocast("cpu", torch.bfloat16):
        parents = single(children.float())
    parents.float().sum().backward()
    assert single.weight.grad.isfinite().all()
    assert (parents.float() - wanted).abs().max() < 0.05


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="routings must be an int >= 1, got 0"):
        DenseCapsule(6, 3, 4, 5, routings=0)
    with pytest.raises(TypeError, match="in_num_caps must be an int"):
        DenseCapsule(6.0, 3, 4, 5)
    layer = DenseCapsule(6, 3, 4, 5)
    with pytest.raises(ValueError, match=r"x must be \[batch, 6, 3\], got \[2, 3, 6\]"):
        layer(torch.randn(2, 3, 6))
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        layer([1.0])
