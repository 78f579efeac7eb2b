"""The layer of Heinsen 2019: its procedure as loops, variable numbers, masks, its start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from functional_cases import at, expect, gradients, seen_by
from oracle_routings import heinsen
from torch import Tensor

from fastcaps import HeinsenRouting

FORMS: dict[str, Any] = {
    "set": ((6, 3, 4, 4), {"bias": True}),
    "vector": ((6, 3, 3, 5), {"pose": "vector", "model": "kmeans", "bias": True}),
    "variable": ((None, 3, 4, 4), {"bias": True}),
    "variable-both": ((None, None, 4, 4), {"break_symmetry": False, "bias": True}),
    "variable-out": ((6, None, 4, 4), {}),
    "variable-both-bias": ((None, None, 4, 6), {"bias": True}),
    "single-beta": ((6, 3, 4, 4), {"single_beta": True, "iterations": 2}),
    "grid": ((2, 3, 4, 4), {"kernel_size": (3, 2), "stride": 2}),
}


def make(form: str, **changes: Any) -> HeinsenRouting:
    sizes, arguments = FORMS[form]
    torch.manual_seed(0)
    layer = HeinsenRouting(*sizes, dtype=torch.float64, **{**arguments, **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def tables(layer: HeinsenRouting, many: int) -> tuple[Tensor, Tensor | None, list, list]:
    """Return weight, bias and betas written out for a number of parents."""
    weight = layer.weight.detach().expand(-1, many, -1, -1)
    bias = layer.bias
    if layer.bias_step is not None:
        steps = torch.stack([layer.bias_step[0, 0] * (2 * j / (many - 1) - 1) for j in range(many)])
        bias = steps[None] if bias is None else bias + steps
    betas = (layer.beta_use, layer.beta_use if layer.beta_ignore is None else layer.beta_ignore)
    use, ignore = (beta.expand(-1, many).tolist() for beta in betas)
    return weight, None if bias is None else bias.detach(), use, ignore


@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_procedure(form: str) -> None:
    layer = make(form)
    grid = (5, 4) if layer.window is not None else ()
    children = torch.randn(2, 2 if grid else 6, *grid, layer.in_dim, dtype=torch.float64)
    scores = torch.randn(children.shape[:-1], dtype=torch.float64)
    *found, r = layer(children, scores, return_coefficients=True)
    many = 6 if layer.out_capsules is None else 3
    weight, bias, use, ignore = tables(layer, many)
    rows, columns, _ = layer.pose_shape
    assert found[1].shape[:2] == (2, many)
    for place, seen in seen_by(layer.window, children.unflatten(-1, (rows, columns)), weight, bias, scores):
        inputs = [child.votes for child in seen], [child.gate for child in seen]
        wanted = heinsen(*inputs, use, ignore, layer.iterations, layer.model)
        wanted = (wanted[1], wanted[0], *wanted[2:])
        for tensor, numbers in zip(found, wanted, strict=False):
            expect(at(tensor, layer.window, place).detach(), numbers)
        expect(at(r, layer.window, place, True), wanted[3])


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
def test_samples_of_different_sizes_in_one_batch(model: str) -> None:
    layer = make("variable", model=model)
    children, scores = torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    alone = [layer(children[:1], scores[:1]), layer(children[1:, :4], scores[1:, :4])]
    scores[1, 4:], children[1, 4], children[1, 5] = -torch.inf, torch.nan, torch.inf
    leaves = [children.requires_grad_(), scores.requires_grad_(), *layer.parameters()]
    found = layer(children, scores)
    for k, tensor in enumerate(found):
        for b in range(2):
            torch.testing.assert_close(tensor[b], alone[b][k][0])
    by_leaf = gradients(found, leaves)
    assert all(gradient.isfinite().all() for gradient in by_leaf)
    assert (by_leaf[0][1, 4:] == 0).all() and (by_leaf[1][1, 4:] == 0).all()


def test_a_score_of_plus_infinity_is_certain() -> None:
    layer = make("set")
    children = torch.randn(2, 6, 4, dtype=torch.float64)
    scores = torch.full((2, 6), torch.inf, dtype=torch.float64, requires_grad=True)
    found = layer(children, scores)
    for got, want in zip(found, layer(children, torch.full((2, 6), 40.0, dtype=torch.float64)), strict=True):
        torch.testing.assert_close(got, want)
    assert (gradients(found, [scores])[0] == 0).all()


def test_numbers_of_parents() -> None:
    both = make("variable-both")
    for count in (1, 5, 9):
        children = torch.randn(2, count, 4, dtype=torch.float64)
        assert both(children).scores.shape == (2, count)
        assert both(children, out_capsules=3).poses.shape == (2, 3, 4)
    equal = both(torch.randn(2, 5, 4, dtype=torch.float64)).poses
    torch.testing.assert_close(equal, equal[:, :1].expand_as(equal))  # nothing tells them apart
    broken = HeinsenRouting(None, None, 4, 4)
    with torch.no_grad():
        broken.bias_step.normal_()
    poses = broken(torch.randn(2, 5, 4)).poses
    assert (poses[:, 0] - poses[:, 1]).abs().min() > 1e-4
    broken.bias_step.grad = None
    poses.square().sum().backward()
    assert broken.bias_step.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="out_capsules must be None, since this layer has 3 parents; got 4"):
        make("set")(torch.randn(2, 6, 4, dtype=torch.float64), out_capsules=4)
    with pytest.raises(ValueError, match="out_capsules must be an int >= 1"):
        both(children, out_capsules=0)


def test_initialisation_names_and_repr() -> None:
    layer = HeinsenRouting(100, 64, 16, 16, bias=True)
    assert abs(layer.weight.std().item() * 4 - 1) < 5 / math.sqrt(2 * layer.weight.numel())
    assert set(layer.state_dict()) == {"weight", "bias", "beta_use", "beta_ignore"}
    assert layer.beta_use.shape == (100, 64) and (layer.beta_use == 0).all() and (layer.bias == 0).all()
    assert set(make("single-beta").state_dict()) == {"weight", "beta_use"}
    variable = HeinsenRouting(None, None, 8, 8, pose="vector", bias=True)
    assert {name: tuple(p.shape) for name, p in variable.named_parameters()} == {
        "weight": (1, 1, 8, 8),
        "bias": (1, 1, 1, 8),
        "beta_use": (1, 1),
        "beta_ignore": (1, 1),
        "bias_step": (1, 1, 1, 8),
    }
    assert repr(variable) == "HeinsenRouting(None, None, 8, 8, pose='vector', share=True, bias=True)"
    assert repr(make("single-beta")) == "HeinsenRouting(6, 3, 4, 4, iterations=2, single_beta=True)"
    assert "break_symmetry=False" in repr(make("variable-both"))
    assert "model='kmeans'" in repr(make("vector"))


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="in_capsules must be an int with a kernel_size"):
        HeinsenRouting(None, 3, 4, 4, kernel_size=3)
    with pytest.raises(ValueError, match="model must be one of 'gaussian', 'kmeans', got 'skm'"):
        HeinsenRouting(6, 3, 4, 4, model="skm")
