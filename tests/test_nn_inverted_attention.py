"""What the layer of inverted attention has of its own: parents to go on from, dropout, activations, scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functional_cases import draw
from nn_layers import FORMS, LAYERS
from nn_layers import draw as given

from fastcaps import InvertedAttentionRouting

ATTENTION = LAYERS[0]
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def make(form: str = "set", **options: Any) -> InvertedAttentionRouting:
    return ATTENTION.make(form, **{"iterations": 1, **options})


@pytest.mark.parametrize("form", [*FORMS, "dropout"])
@pytest.mark.parametrize("start", [False, True])
def test_several_iterations_are_a_loop_of_calls(form: str, start: bool) -> None:
    layer = make(dropout=0.4) if form == "dropout" else make(form)
    children, gate = (tensor.requires_grad_() for tensor in given(layer))
    parents = torch.randn_like(layer(children)).requires_grad_() if start else None
    results = []
    for together in (True, False):
        torch.manual_seed(5)
        before = parents
        if not together:
            for _ in range(2):
                before = layer(children, before, gate)
        poses = layer(children, before, gate, iterations=3 if together else 1)
        leaves = [children, gate, *layer.parameters(), *([parents] if start else [])]
        weights = torch.linspace(-1, 1, poses.numel(), dtype=poses.dtype).view(poses.shape)
        results.append([poses, *torch.autograd.grad((poses * weights).sum(), leaves, allow_unused=True)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("norm", [True, False])
def test_dropout_stands_between_sum_and_layer_norm(norm: bool) -> None:
    layer, plain = make(dropout=0.4, layer_norm=norm), make(layer_norm=False)
    plain.load_state_dict(layer.state_dict(), strict=False)
    children, parents = draw(16, 6, 4), draw(16, 3, 4)
    torch.manual_seed(5)
    found = layer(children, parents)
    torch.manual_seed(5)
    dropped = F.dropout(plain(children, parents), 0.4)
    assert 0.25 < (dropped == 0).double().mean() < 0.55
    if norm:
        dropped = F.layer_norm(dropped, (4,), layer.norm.weight, layer.norm.bias)
    torch.testing.assert_close(found, dropped)
    layer.eval()
    whole = make(layer_norm=norm)
    whole.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(children, parents), whole(children, parents))


@pytest.mark.parametrize("form", ["set", "grid", "all"])
def test_activations_option_returns_poses_and_activations(form: str) -> None:
    layer, plain = make(form, activations=True), make(form)
    plain.load_state_dict(layer.state_dict(), strict=False)
    children, gate = given(layer)
    poses, activations, _ = layer(children, None, gate, return_coefficients=True)
    torch.testing.assert_close(poses, plain(children, None, gate))
    logits = torch.einsum("bm...d,md->bm...", poses, layer.activation_weight)
    bias = layer.activation_bias.view(-1, *[1] * (logits.dim() - 2))
    torch.testing.assert_close(activations, torch.sigmoid(logits + bias))
    torch.testing.assert_close(tuple(layer(children, None, gate)), (poses, activations))
    with pytest.raises(ValueError, match="activations=True"):
        plain.read_activations(poses)


def test_parents_scale_and_gate() -> None:
    layer = make()
    children, parents, gate = draw(2, 6, 4), draw(2, 3, 4), torch.rand(2, 6, **DOUBLE)
    assert layer.scale == 0.5
    wanted = layer(children, 2 * parents)
    layer.scale = 1.0  # the paper's, which writes none
    torch.testing.assert_close(layer(children, parents), wanted)
    gate[:, 4:] = 0  # not there
    shared = make("rows")
    children, parents = draw(2, 6, 6), draw(2, 3, 9)
    torch.testing.assert_close(shared(children, parents, gate), shared(children[:, :4], parents, gate[:, :4]))


@pytest.mark.parametrize("start", ["random", "learned"])
@pytest.mark.parametrize("form", ["set", "grid"])
def test_parents_start_where_the_layer_says(start: str, form: str) -> None:
    layer, plain = make(form, start=start), make(form)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "first_poses"})
    children, _ = given(layer)
    grid = (3, 3) if form == "grid" else ()
    first = layer.first_poses.view(1, 3, *(1 for _ in grid), -1).expand(2, 3, *grid, -1)
    for iterations in (1, 3):
        found = layer(children, iterations=iterations)
        torch.testing.assert_close(found, plain(children, first, iterations=iterations))
        assert not torch.allclose(found, plain(children, iterations=iterations))
    torch.testing.assert_close(layer(children, found), plain(children, found))  # going on is going on
    assert ("first_poses" in dict(layer.named_parameters())) == (start == "learned")
    if start == "learned":
        assert torch.autograd.grad(found.square().sum(), layer.first_poses)[0].any()
    before = layer.first_poses.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.first_poses, before)


def test_queries_tell_the_number_of_parents() -> None:
    keys = InvertedAttentionRouting(None, None, 4, 4, pose="vector", matrices=False, break_symmetry=False, **DOUBLE)
    assert keys.weight is None and list(dict(keys.named_parameters())) == ["norm.weight", "norm.bias"]
    queries, children = draw(2, 3, 4), draw(2, 7, 4, seed=1)
    poses, shares = keys(children, queries, return_coefficients=True)
    wanted = (torch.einsum("bmd,bid->bim", queries, children) / 2).softmax(-1)
    torch.testing.assert_close(shares, wanted)
    torch.testing.assert_close(poses, F.layer_norm(torch.einsum("bim,bid->bmd", wanted, children), (4,)))


def test_wrong_arguments_are_named() -> None:
    layer, grid = InvertedAttentionRouting(6, 3, 4, 4), InvertedAttentionRouting(2, 3, 4, 4, kernel_size=3)
    good, board = torch.randn(2, 6, 4), torch.randn(2, 2, 5, 5, 4)
    for error, message, call in [
        (ValueError, r"parents must be \[B, 3, 4\], got \[2, 4, 4\]", lambda: layer(good, torch.randn(2, 4, 4))),
        (ValueError, r"parents must be \[B, 3, Ho, Wo, 4\]", lambda: grid(board, torch.randn(2, 3, 4))),
        (ValueError, "parents", lambda: layer(good, torch.randn(3, 3, 4))),
        (ValueError, "parents", lambda: grid(board, torch.randn(2, 3, 3, 2, 4))),
        (TypeError, "parents", lambda: layer(good, torch.randn(2, 3, 4, dtype=torch.float64))),
        (ValueError, r"dropout must lie in \[0, 1\)", lambda: InvertedAttentionRouting(6, 3, 4, 4, dropout=1.0)),
        (ValueError, "start must be one of 'zero', ", lambda: InvertedAttentionRouting(4, 3, 4, 4, start="one")),
    ]:
        with pytest.raises(error, match=message):
            call()
