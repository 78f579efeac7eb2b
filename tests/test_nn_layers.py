"""Every routing layer: the paper's procedure, layouts, state, copies, compilers, odd inputs, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nn_layers import FORMS, LAYERS, SIZE, Row, at, draw_for, expect, gradients, seen_by

import fastcaps
from fastcaps import nn
from fastcaps.functional import Explanation, Window

every = pytest.mark.parametrize("row", LAYERS, ids=str)
forms = pytest.mark.parametrize("form", FORMS)
VARIANTS = [(row, options, "dilated") for row in LAYERS for options in row.variants.values()]
FORMED = [(row, {}, form) for row in LAYERS for form in FORMS] + [(row, {"iterations": 1}, "set") for row in LAYERS]
name_of = lambda value: str(value).split(" at 0x")[0]  # noqa: E731


def same(found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("row", "options", "form"), [*FORMED, *VARIANTS], ids=name_of)
@torch.no_grad()
def test_the_layer_is_the_procedure(row: Row, options: dict[str, Any], form: str) -> None:
    layer = row.make(form, **options)
    children, numbers = draw_for(layer)
    *found, r = row.call(layer, children, numbers, return_coefficients=True)
    grid = layer.output_size(SIZE) or ()
    assert all(part.shape[: 2 + len(grid)] == (2, layer.out_capsules, *grid) for part in found)
    assert found[0].shape[-1] == layer.out_dim and not r.requires_grad
    window = Window(SIZE) if layer.whole_grid else layer.window
    rows, columns, _ = layer.pose_shape
    assert r.shape == (2, *grid, (window.positions if window else 1) * layer.in_capsules, layer.out_capsules)
    poses = children.unflatten(-1, (rows, columns))
    identities = torch.eye(columns, dtype=poses.dtype).expand(1, layer.out_capsules, -1, -1)
    weight = identities if layer.weight is None else layer.weight
    for place, seen in seen_by(window, poses, weight, layer.bias, numbers):
        wanted = row.loop(layer, seen, layer.iterations)
        for part, numbers_there in zip(found, wanted, strict=False):
            expect(at(part, layer.window, place), numbers_there)
        expect(at(r, layer.window, place, True)[seen.index], wanted[-1])
    same(row.call(layer, children, numbers), found)


@pytest.mark.parametrize(
    ("row", "options", "form"),
    [*((row, {}, "grid") for row in LAYERS), *(each for each in VARIANTS if "detach" not in each[1])],
    ids=name_of,
)
def test_gradients(row: Row, options: dict[str, Any], form: str) -> None:
    layer = row.make(form, **options)
    children, numbers = draw_for(layer)
    leaves = [children.requires_grad_(), numbers.requires_grad_(), *layer.parameters()]
    assert torch.autograd.gradcheck(lambda c, n, *_: row.call(layer, c, n), leaves, fast_mode=True)
    assert all(gradient.any() for gradient in gradients(row.call(layer, children, numbers), leaves))


@every
def test_results_parameters_and_their_start(row: Row) -> None:
    layer = row.kind(64, 32, 16, 16, kernel_size=3, bias=True)
    assert set(layer.state_dict()) == row.parameters
    assert layer.weight.shape == (576, 32, 4, 4) and layer.bias.shape == (576, 32, 4, 4)
    assert abs(layer.weight.std().item() / row.std(32, 4, 576) - 1) < 5 / (2 * layer.weight.numel()) ** 0.5
    others = {name: p for name, p in layer.named_parameters() if name not in ("weight", "norm.weight")}
    assert not any(parameter.any() for parameter in others.values())
    layer, children = row.kind(6, 3, 4, 4), torch.randn(2, 6, 4)
    plain, full = layer(children), layer(children, return_coefficients=True)
    assert type(plain) is row.results[0] and type(full) is row.results[1] and full[-1] is full.coefficients
    assert full[0] is full.poses and full[0].shape == (2, 3, 4)
    assert "bias" in layer._parameters  # as in nn.Linear: a parameter may be put there
    assert getattr(fastcaps, row.kind.__name__) is row.kind


@every
def test_grids_as_sets_and_sets_of_any_size(row: Row) -> None:
    """A set layer flattens a grid in the order n, h, w; a shared one takes any number of children, "all" any grid."""
    layer = row.kind(24, 5, 4, 4)
    grid, numbers = torch.randn(2, 2, 3, 4, 4), torch.rand(2, 2, 3, 4)
    each = [(n, h, w) for n in range(2) for h in range(3) for w in range(4)]
    flat = [torch.stack([given[:, n, h, w] for n, h, w in each], 1) for given in (grid, numbers)]
    same(row.call(layer, grid, numbers), row.call(layer, *flat))
    shared = row.make("rows")
    for count in (1, 9):
        assert row.call(shared, torch.randn(2, count, 6, dtype=torch.float64))[0].shape == (2, 3, 9)
    layer = row.make("all")
    assert layer.output_size((5, 4)) is None
    for size in ((1, 1), (6, 7)):
        window = row.make("all", kernel_size=size)
        window.load_state_dict(layer.state_dict())
        children = torch.randn(2, 2, *size, 4, dtype=torch.float64)
        same(row.call(layer, children), [part.squeeze((2, 3)) for part in row.call(window, children)])


@every
def test_any_number_of_children_and_of_parents(row: Row) -> None:
    layer = row.drawn(None, None, 4, 6, bias=True)
    for count in (2, 5):
        children = torch.randn(2, count, 4, dtype=torch.float64)
        assert row.call(layer, children)[0].shape == (2, count, 6)
        fixed = row.drawn(count, 3, 4, 6, bias=True, share=True)  # the same, written out
        with torch.no_grad():
            for name, parameter in fixed.named_parameters():
                tensor = layer.get_parameter(name)
                steps = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None, None]
                parameter.copy_(tensor + layer.bias_step * steps if name == "bias" else tensor)
        same(row.call(layer, children, out_capsules=3), row.call(fixed, children))
    with pytest.raises(ValueError, match="out_capsules must be None, as this layer has 3 parents; got 4"):
        fixed(children, out_capsules=4)
    grid = row.drawn(2, None, 4, 4, kernel_size=2)
    children = torch.randn(1, 2, 4, 3, 4, dtype=torch.float64)
    assert row.call(grid, children, out_capsules=5)[0].shape == (1, 5, 3, 2, 4)


@every
def test_what_a_call_may_change(row: Row) -> None:
    layer, once, other = row.make(iterations=3), row.make(iterations=1), row.make(iterations=3)
    children, numbers = draw_for(layer)
    assert all(map(torch.equal, row.call(layer, children, numbers, iterations=1), row.call(once, children, numbers)))
    assert not torch.allclose(row.call(layer, children, numbers)[0], row.call(once, children, numbers)[0])
    place = torch.randn(6, 1, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        other.bias.add_(place)
    same(row.call(layer, children, numbers, bias=place), row.call(other, children, numbers))


def test_arguments_are_shown_and_explained() -> None:
    bare = fastcaps.RoutingPool(6, 3, 4, 4, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in bare.parameters()} == {("meta", torch.float64)}
    assert repr(bare) == "RoutingPool(6, 3, 4, 4)" and not hasattr(bare, "kernel_size")  # torchinfo cannot read None
    window = {"kernel_size": (np.int32(3), 2), "stride": np.int64(2), "iterations": np.int64(2)}
    layer = fastcaps.DynamicRouting(np.int64(2), 3, 4, 4, pose="vector", share=True, matrices=False, **window)
    shown = "2, 3, 4, 4, pose='vector', kernel_size=(3, 2), stride=(2, 2), share=True, iterations=2, matrices=False"
    for prior, text in (("random", "prior='random'"), ("learned", "prior=True"), (True, "prior=True")):
        assert text in repr(fastcaps.DynamicRouting(2, 3, 4, 4, pose="vector", prior=prior))
    assert {*repr(layer)[15:-1].split(", ")} == {*shown.split(", ")} and type(layer.in_capsules) is int
    for row in LAYERS:
        for form in ("set", "grid", "all"):
            explained = fastcaps.explain(row.make(form))
            assert isinstance(explained, Explanation) and explained.backend in ("cpu", "reference") and explained.call


WRONG = [
    (nn.RoutingPool, (6, 3, 15, 15), {}, ValueError, "in_dim must be a square number.*15"),
    (nn.RoutingPool, (6, 3, 16, 25), {}, ValueError, "out_dim must be a multiple of the 4 rows.*25"),
    (nn.RoutingPool, (6, 3, 15, 10), {"matrices": False, "pose": 5}, ValueError, "out_dim must equal in_dim with matr"),
    (nn.RoutingPool, (6, 3, 16, 16), {"pose": "tensor"}, ValueError, "pose must be one of 'matrix', 'vector'"),
    (nn.RoutingPool, (None, 3, 4, 4), {"kernel_size": 3}, ValueError, "in_capsules must be an int with a kernel_size"),
    (nn.RoutingPool, (6, 3, 4, 4), {"dtype": torch.int32}, TypeError, "dtype must be a floating-.* got torch.int32"),
    (nn.ClassHead, (4,), {"dtype": "float32"}, TypeError, "dtype must be a .* such as torch.float32, got 'float32'"),
    (nn.EMRouting, (6, 3, 4, 4), {"share": "yes"}, TypeError, "share must be True or False, got 'yes'"),
    (nn.EMRouting, (6, 3, 4, 4), {"share": torch.ones(2)}, TypeError, "share must be True or False, got tensor"),
    (nn.RoutingPool, (6, 3, 4, 4), {"kernel_size": 3, "padding": 2**62}, ValueError, "padding must be"),
    (nn.RoutingPool, (6, 3, 4, 4), {"kernel_size": "some"}, ValueError, "kernel_size must be .*or None, got 'some'"),
    (nn.RoutingPool, (6, 3, 4, 4), {"kernel_size": "all"}, ValueError, "kernel_size='all' must have share=True"),
    (nn.RoutingPool, (6, 3, 4, 4), {"kernel_size": "all", "share": True, "padding": 1}, ValueError, "padding"),
    (nn.DynamicRouting, (6, 3, 4, 4), {"compete": "children", "leaky": True}, ValueError, "leaky must be False with c"),
    (nn.DynamicRouting, (6, 3, 4, 4), {"prior": True, "leaky": True}, ValueError, "leaky must be False with prior='le"),
    (nn.EMRouting, (2, 3, 4, 4), {"kernel_size": 3, "coordinates": True}, ValueError, "False without kernel_size='all"),
    (nn.EMRouting, (6, 3, 4, 4), {"inverse_temperature": [0.1]}, ValueError, "must have a value for each of the 3"),
    (nn.EMRouting, (3, 1, 4, 4), {"normalize_cost": True}, ValueError, "normalize_cost must be False for one parent"),
    (nn.InvertedAttentionRouting, (6, 3, 4, 4), {"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\)"),
]


@pytest.mark.parametrize(("kind", "sizes", "options", "error", "message"), WRONG)
def test_wrong_constructor_arguments(kind: Any, sizes: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        kind(*sizes, **options)


@every
def test_every_layer_names_its_own_wrong_arguments(row: Row) -> None:
    named = rf"{row.kind.__name__} has no argument iteration \(did you mean iterations\?\)"
    unknown = rf"{named}; there are: in_capsules.*pose"
    with pytest.raises(TypeError, match=unknown):
        row.kind(6, 3, 4, 4, iteration=2)
    with pytest.raises(RuntimeError, match=f"cannot compile {row.kind.__name__}; use torch.export.export"):
        torch.jit.script(torch.nn.Sequential(row.kind(6, 3, 4, 4)))
    assert row.kind(6, 3, 4, 4, stride=(1, 1), padding=(0, 0), dilation=(1, 1)).window is None
    for needless in ({"stride": 2}, {"padding": (0, 1)}, {"dilation": (2, 1)}):
        with pytest.raises(ValueError, match="stride, padding and dilation need an int or a pair as kernel_size"):
            row.kind(6, 3, 4, 4, **needless)
    for wrong in (torch.nan, -1.0):
        with pytest.raises(ValueError, match=f"{row.positive} must be a finite number >= 0"):
            row.kind(6, 3, 4, 4, **{row.positive: wrong})


@every
def test_wrong_inputs_are_named(row: Row) -> None:
    layer, grid = row.kind(6, 3, 4, 4), row.kind(2, 3, 4, 4, kernel_size=3)
    whole = row.kind(2, 3, 4, 4, kernel_size="all", share=True)
    good, name = torch.randn(2, 6, 4), "scores" if row.name == "heinsen" else "activations"
    other = "activations" if name == "scores" else "scores"
    cases = [
        (ValueError, r"children must be \[B, I, 4\], got \[2, 6, 5\]", lambda: layer(torch.randn(2, 6, 5))),
        (ValueError, "children must hold the 6 children.*got 7", lambda: layer(torch.randn(2, 7, 4))),
        (ValueError, "must hold the 2 child types.*got 3", lambda: grid(torch.randn(2, 3, 5, 5, 4))),
        (ValueError, r"children must be \[B, 2, H, W, 4\]", lambda: whole(good)),
        (ValueError, "window", lambda: grid(torch.randn(2, 2, 5, 2, 4))),
        (ValueError, name, lambda: row.call(layer, good, torch.rand(2, 5))),
        (TypeError, name, lambda: row.call(layer, good, torch.rand(2, 6).double())),
        (ValueError, "children must be a grid of at least one", lambda: whole(torch.randn(2, 2, 0, 5, 4))),
        (TypeError, r"a tuple of 2: pass its parts .*layer\(poses, \w+s\)", lambda: layer((good, torch.rand(2, 6)))),
        (TypeError, "weight and children must have the same dtype", lambda: layer(good.double())),
        (ValueError, "device", lambda: layer(good.to("meta"))),
        (TypeError, "has no argument sharp", lambda: layer(good, sharp=1.0)),
        (TypeError, f"takes {name} instead of {other}", lambda: layer(good, **{other: torch.rand(2, 6)})),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


@every
@pytest.mark.parametrize("form", ["set", "grid"])
def test_children_are_there_unless_told(row: Row, form: str) -> None:
    layer = row.make(form)
    children, numbers = draw_for(layer)
    certain = torch.full_like(numbers, torch.inf if layer.activity_name == "scores" else 1.0)
    same(row.call(layer, children), row.call(layer, children, certain))
