"""What the layer of EM routing has of its own: places added to votes, schedules, its normalised cost, edges."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from functional_cases import draw, expect, gradients
from nn_layers import em
from oracle_routings import Child

from fastcaps import EMRouting, functional

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
WHOLE: dict[str, Any] = {"kernel_size": "all", "share": True}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pose", ["matrix", "vector"])
def test_the_class_layer_adds_coordinates(pose: str, normalize: bool) -> None:
    """Hinton et al. 2018: a child's place in the grid is added to the first two numbers of the right-hand column."""
    options = {"pose": pose, "coordinates": True, "normalize_cost": normalize, "eps": 1e-3}
    layer = EMRouting(2, 3, 4, 4, **options, **WHOLE, **DOUBLE)
    height, width = 3, 4
    children, activations = draw(2, 2, height, width, 4), torch.rand(2, 2, height, width, **DOUBLE)
    found = layer(children, activations, return_coefficients=True)
    rows, columns, _ = layer.pose_shape
    places = [(y, x, n) for y in range(height) for x in range(width) for n in range(2)]
    for b in range(2):
        seen = []
        for i, (y, x, n) in enumerate(places):
            votes = [children[b, n, y, x].view(rows, columns) @ layer.weight[n, m].detach() for m in range(3)]
            for vote in votes:
                first, second = ((0, 1), (1, 1)) if pose == "matrix" else ((0, 0), (0, 1))
                vote[first] += (y + 0.5) / height
                vote[second] += (x + 0.5) / width
            seen.append(Child(i, activations[b, n, y, x].item(), [vote.flatten().tolist() for vote in votes]))
        for part, numbers in zip(found, em(layer, seen, 3), strict=True):
            expect(part[b].detach(), numbers)


def test_coordinates_and_a_bias() -> None:
    layer = EMRouting(2, 3, 4, 4, coordinates=True, bias=True, **WHOLE, **DOUBLE)
    other = EMRouting(2, 3, 4, 4, bias=True, **WHOLE, **DOUBLE)
    other.load_state_dict(layer.state_dict())
    place, children = functional.coordinate_bias(3, 4, 2, 2, 2, **DOUBLE), draw(2, 2, 3, 4, 4)
    torch.testing.assert_close(tuple(layer(children)), tuple(other(children, bias=place)))
    more = draw(*place.shape, seed=3)
    torch.testing.assert_close(tuple(layer(children, bias=more)), tuple(other(children, bias=more + place)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", [[0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6], ids=str)
def test_the_edges_are_finite(dtype: torch.dtype, pattern: list[int]) -> None:
    """Votes that agree exactly, so that variances are the eps of 1e-12; activations of exactly 0 and 1."""
    layer = EMRouting(6, 3, 4, 4, share=True, eps=1e-12, inverse_temperature=10.0, dtype=dtype)
    with torch.no_grad():
        layer.beta_u.copy_(100 * torch.randn(3))
        layer.beta_a.copy_(100 * torch.randn(3))
    children = torch.randn(2, 1, 4, dtype=dtype).expand(-1, 6, -1).clone().requires_grad_()
    activations = torch.tensor(pattern, dtype=dtype).expand(2, 6).clone().requires_grad_()
    found = layer(children, activations)
    assert all(result.isfinite().all() for result in found)
    leaves = [children, activations, *layer.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients(found, leaves))


def hot(iteration: int) -> float:
    return 0.1 * (iteration + 1)


def test_schedules_may_change_and_travel() -> None:
    children = draw(2, 6, 4)
    layer = EMRouting(6, 3, 4, 4, **DOUBLE)
    before = layer(children)[1]
    for given in (0.5, [0.1, 0.1, 5.0], hot):
        wanted = layer(children, inverse_temperature=given)
        assert not torch.allclose(wanted[1], before)
        layer.inverse_temperature = given
        again = pickle.loads(pickle.dumps(layer))
        assert again.inverse_temperature == given and torch.equal(again(children)[1], wanted[1])
        layer.inverse_temperature = None


def test_wrong_options() -> None:
    for message, sizes, options in [
        ("coordinates must be False without kernel_size='all'", (2, 3), {"kernel_size": 3, "coordinates": True}),
        ("inverse_temperature must have a number for each of the 3", (6, 3), {"inverse_temperature": [0.1]}),
        ("normalize_cost must be False for one parent", (3, 1), {"normalize_cost": True}),
        ("first_coefficients must be one of", (6, 3), {"first_coefficients": "zeros"}),
    ]:
        with pytest.raises(ValueError, match=message):
            EMRouting(*sizes, 4, 4, **options)
    with pytest.raises(TypeError, match="inverse_temperature must be a number"):
        EMRouting(6, 3, 4, 4, inverse_temperature="hot")


def test_normalized_cost() -> None:
    layer = EMRouting(7, 4, 6, 6, pose=2, normalize_cost=True, bias=True, eps=1e-2, **DOUBLE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    given = draw(2, 7, 6).requires_grad_(), torch.rand(2, 7, **DOUBLE).requires_grad_(), *layer.parameters()
    assert torch.autograd.gradcheck(lambda children, gate, *_: tuple(layer(children, gate)), given, fast_mode=True)
    children, gate = torch.randn(2, 3, 4, 5, 4), torch.rand(2, 3, 4, 5)
    whole = EMRouting(3, 5, 4, 4, coordinates=True, normalize_cost=True, **WHOLE)
    assert whole(children, gate).activations.std(-1).min() > 0.1  # neither all 0 nor all 1
    window = EMRouting(3, 5, 4, 4, kernel_size=3, normalize_cost=True)
    found = window(children, gate, iterations=1, return_coefficients=True)
    window.normalize_cost = False
    plain = window(children, gate, iterations=1, return_coefficients=True)
    torch.testing.assert_close(found[::2], plain[::2])  # the first iteration's poses and shares know no cost
