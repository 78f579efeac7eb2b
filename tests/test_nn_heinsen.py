"""What the layer of Heinsen 2019 has of its own: scores that mask, parents that nothing tells apart."""

from __future__ import annotations

import pytest
import torch
from functional_cases import draw, gradients

from fastcaps import HeinsenRouting


def make(*sizes, **options) -> HeinsenRouting:
    layer = HeinsenRouting(*sizes, 4, 4, bias=True, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
def test_samples_of_different_sizes_in_one_batch(model: str) -> None:
    layer = make(None, 3, model=model)
    children, scores = draw(2, 6, 4), draw(2, 6, seed=1)
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
    layer, children = make(6, 3), draw(2, 6, 4)
    scores = torch.full((2, 6), torch.inf, dtype=torch.float64, requires_grad=True)
    found = layer(children, scores)
    torch.testing.assert_close(tuple(found), tuple(layer(children, torch.full_like(scores, 40.0))))
    assert (gradients(found, [scores])[0] == 0).all()


def test_what_tells_parents_apart() -> None:
    equal = make(None, None, break_symmetry=False)(draw(2, 5, 4)).poses
    torch.testing.assert_close(equal, equal[:, :1].expand_as(equal))
    broken = make(None, None)
    poses = broken(draw(2, 5, 4)).poses
    assert (poses[:, 0] - poses[:, 1]).abs().min() > 1e-4
    poses.square().sum().backward()
    assert broken.bias_step.grad.abs().sum() > 0
    for name, parameter in broken.named_parameters():
        assert parameter.shape == ((1, 1) if name.startswith("beta") else (1, 1, 2, 2))
    assert set(HeinsenRouting(6, 3, 4, 4, single_beta=True).state_dict()) == {"weight", "beta_use"}
    with pytest.raises(ValueError, match="model must be one of 'gaussian', 'kmeans', got 'skm'"):
        HeinsenRouting(6, 3, 4, 4, model="skm")
