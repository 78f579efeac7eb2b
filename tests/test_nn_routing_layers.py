"""What the iterative routing layers have in common: layouts, state, copies, compilation, autocast, odd inputs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from functional_cases import gradients
from torch import Tensor, nn

import fastcaps
from fastcaps import DynamicRouting, EMRouting, HeinsenRouting, functional
from fastcaps.nn import RoutingPool

LAYERS: dict[str, Any] = {"dynamic": DynamicRouting, "em": EMRouting, "heinsen": HeinsenRouting, "pool": RoutingPool}
FORMS = {
    "set-matrix": ((6, 3, 4, 4), {"pose": "matrix"}),
    "set-vector": ((6, 3, 3, 5), {"pose": "vector", "bias": True}),
    "set-share": ((6, 3, 4, 4), {"pose": "matrix", "share": True, "bias": True}),
    "grid-matrix": ((2, 4, 4, 4), {"pose": "matrix", "kernel_size": 3, "stride": 2}),
    "grid-padded": ((2, 3, 3, 2), {"pose": "vector", "kernel_size": (3, 2), "padding": 1, "bias": True}),
    "grid-share": ((2, 3, 4, 4), {"pose": "matrix", "kernel_size": 3, "share": True, "bias": True}),
    "grid-all": ((2, 3, 4, 4), {"pose": "matrix", "kernel_size": "all", "share": True}),
}
EVERY = [(kind, form) for kind in LAYERS for form in FORMS]
every = pytest.mark.parametrize(("kind", "form"), EVERY)
some = pytest.mark.parametrize(("kind", "form"), [e for e in EVERY if e[1] in ("set-vector", "grid-padded")])


def make(kind: str, form: str, **changes: Any) -> nn.Module:
    """The layer in float64, every parameter random so that none is invisible."""
    sizes, options = FORMS[form]
    torch.manual_seed(0)
    layer = LAYERS[kind](*sizes, dtype=torch.float64, **{**options, **changes})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def draw(layer: Any, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Children, and numbers for each that serve as activations and as scores."""
    generator = torch.Generator().manual_seed(1)
    grid = (5, 4) if layer.on_grid else ()
    children = torch.randn((batch, layer.in_capsules, *grid, layer.in_dim), generator=generator, dtype=torch.float64)
    return children, torch.rand(children.shape[:-1], generator=generator, dtype=torch.float64)


def run(layer: Any, children: Tensor, numbers: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    found = layer(children, numbers, **options)
    return found if isinstance(found, tuple) else (found,)


def by_functional(layer: Any, children: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
    """What the layer should return, by the functional API on poses cut by hand."""
    rows, columns, _ = layer.pose_shape
    poses = children.reshape(*children.shape[:-1], rows, columns)
    window = functional.Window((5, 4)) if layer.whole_grid else layer.window
    found: Any
    if isinstance(layer, DynamicRouting):
        found = functional.dynamic_routing(poses, layer.weight, bias=layer.bias, gate=numbers, window=window)
    elif isinstance(layer, EMRouting):
        betas = (layer.beta_u, layer.beta_a)
        found = functional.em_routing(poses, numbers, layer.weight, *betas, bias=layer.bias, window=window)
    elif isinstance(layer, HeinsenRouting):
        tables = (layer.weight, layer.bias, layer.beta_use, layer.beta_ignore)
        found = functional.heinsen_routing(poses, numbers, *tables, window=window)
    else:
        found = functional.routing_pool(poses, weight=layer.weight, bias=layer.bias, gate=numbers, window=window)
    kept = 4 if layer.window is not None else 2  # B, M and, of a small window, Ho, Wo
    flat = [t.reshape(*t.shape[:kept], -1) for t in (found if isinstance(found, tuple) else (found,))]
    return tuple(t if t.shape[-1] > 1 else t.squeeze(-1) for t in flat)


@every
def test_results_gradients_and_shapes(kind: str, form: str) -> None:
    layer = make(kind, form)
    children, numbers = draw(layer)
    leaves = [children.requires_grad_(), numbers.requires_grad_(), *layer.parameters()]
    found, wanted = run(layer, children, numbers), by_functional(layer, children, numbers)
    grid = layer.output_size((5, 4)) or ()
    numbers_shape = (2, layer.out_capsules, *grid)
    shapes = {"dynamic": "p", "em": "pn", "heinsen": "pnp", "pool": "p"}[kind]
    for got, want, what in zip(found, wanted, shapes, strict=True):
        assert got.shape == (numbers_shape if what == "n" else (*numbers_shape, layer.out_dim))
        torch.testing.assert_close(got, want)
    pairs = zip(gradients(found, leaves), gradients(wanted, leaves), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want)
        assert got.shape == want.shape and got.abs().sum() > 0


@every
def test_coefficients(kind: str, form: str) -> None:
    layer = make(kind, form)
    children, numbers = draw(layer)
    *found, r = run(layer, children, numbers, return_coefficients=True)
    count = 2 * 5 * 4 if layer.whole_grid else layer.children_per_position
    assert r.shape == (2, *(layer.output_size((5, 4)) or ()), count, layer.out_capsules) and not r.requires_grad
    total = r.sum(-2 if kind == "pool" else -1)
    assert ((total - 1).abs().lt(1e-9) | total.eq(0)).all() and total.sum() > 0
    for got, want in zip(found, run(layer, children, numbers), strict=True):
        assert torch.equal(got, want)


@every
def test_state_deepcopy_and_pickle(kind: str, form: str) -> None:
    layer = make(kind, form)
    children, numbers = draw(layer)
    wanted = run(layer, children, numbers)
    other = make(kind, form)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    for copied in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for got, want in zip(run(copied, children, numbers), wanted, strict=True):
            assert torch.equal(got, want)
        assert copied.weight is not layer.weight


@some
def test_compiled_whole(kind: str, form: str) -> None:
    torch._dynamo.reset()
    layer = make(kind, form)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        children, numbers = draw(layer, batch)
        leaves = [children.requires_grad_(), *layer.parameters()]
        found, wanted = run(compiled, children, numbers), run(layer, children, numbers)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)
        for got, want in zip(gradients(found, leaves), gradients(wanted, leaves), strict=True):
            torch.testing.assert_close(got, want)


@some
def test_exports_with_a_dynamic_batch(kind: str, form: str) -> None:
    layer = make(kind, form)
    given = draw(layer)
    batch = {0: torch.export.Dim("batch")}
    name = "scores" if kind == "heinsen" else "activations"
    program = torch.export.export(layer, given, dynamic_shapes={"children": batch, name: batch})
    more = [torch.cat([tensor, tensor, tensor]) for tensor in given]
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    found = torch.export.load(saved).module()(*more)
    for got, want in zip(found if isinstance(found, tuple) else (found,), run(layer, *more), strict=True):
        torch.testing.assert_close(got, want)


@some
def test_bfloat16_autocast(kind: str, form: str) -> None:
    layer = make(kind, form).float()
    children, numbers = (tensor.float() for tensor in draw(layer))
    exact = run(layer, children, numbers)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer, children.requires_grad_(), numbers)
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.bfloat16 and got.isfinite().all()
        assert (got.float() - want).abs().mean() < 0.1 * want.abs().mean() + 0.02
    for gradient, leaf in zip(gradients(found, list(layer.parameters())), layer.parameters(), strict=True):
        assert gradient.dtype == leaf.dtype == torch.float32 and gradient.isfinite().all()


@every
def test_odd_batches_and_strides(kind: str, form: str) -> None:
    layer = make(kind, form)
    children, numbers = draw(layer)
    wanted = run(layer, children, numbers)
    wide = torch.zeros(*children.shape[:-1], 2 * children.shape[-1], dtype=torch.float64)
    wide[..., ::2] = children
    for got, want in zip(run(layer, wide[..., ::2], numbers), wanted, strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(run(layer, children[:1], numbers[:1]), wanted, strict=True):
        torch.testing.assert_close(got, want[:1])
    empty = children[:0].requires_grad_()
    results = run(layer, empty, numbers[:0])
    assert all(result.shape == (0, *want.shape[1:]) for result, want in zip(results, wanted, strict=True))
    sum(result.sum() for result in results).backward()
    assert empty.grad.shape == empty.shape and (layer.weight.grad == 0).all()


@every
def test_without_numbers_all_children_are_there(kind: str, form: str) -> None:
    layer = make(kind, form)
    children, numbers = draw(layer)
    certain = torch.full_like(numbers, torch.inf) if kind == "heinsen" else torch.ones_like(numbers)
    for got, want in zip(run(layer, children, None), run(layer, children, certain), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_set_layer_flattens_a_grid_in_the_order_n_h_w(kind: str) -> None:
    layer = LAYERS[kind](24, 5, 4, 4, pose="matrix")
    grid, numbers = torch.randn(2, 2, 3, 4, 4), torch.rand(2, 2, 3, 4)
    rows = [grid[:, n, h, w] for n in range(2) for h in range(3) for w in range(4)]
    each = [numbers[:, n, h, w] for n in range(2) for h in range(3) for w in range(4)]
    flat = run(layer, torch.stack(rows, 1), torch.stack(each, 1))
    for got, want in zip(run(layer, grid, numbers), flat, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [*LAYERS, "primary", "pool2d"])
def test_torchinfo_finds_a_size_of_kernel_or_none(kind: str) -> None:
    """It reads the attribute if there is one, and raises unless that is an int or can be iterated over."""
    others = {
        "primary": lambda: fastcaps.PrimaryCapsules(12, 3, 4, kernel_size=None),
        "pool2d": lambda: fastcaps.RoutingPool2d(4),
    }
    layer = others[kind]() if kind in others else make(kind, "set-vector")
    assert not hasattr(layer, "kernel_size")
    assert ("kernel_size=None" in repr(layer)) == (kind == "primary")
    assert kind in others or tuple(make(kind, "grid-padded").kernel_size) == (3, 2)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_shared_set_takes_any_number_of_children(kind: str) -> None:
    layer = make(kind, "set-share")
    assert layer.groups == 1
    for count in (1, 9):
        children = torch.randn(2, count, 4, dtype=torch.float64)
        assert run(layer, children, None)[0].shape[:2] == (2, 3)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_window_over_all_takes_any_grid(kind: str) -> None:
    layer = make(kind, "grid-all")
    assert layer.groups == 2 and layer.kernel_size == "all" and layer.output_size((5, 4)) is None
    for grid in ((1, 1), (3, 2), (6, 7)):
        children = torch.randn(2, 2, *grid, 4, dtype=torch.float64)
        window = make(kind, "grid-share", kernel_size=grid, bias=False)
        window.weight = layer.weight
        for name, parameter in layer.named_parameters():
            setattr(window, name, parameter)
        for got, want in zip(run(layer, children, None), run(window, children, None), strict=True):
            torch.testing.assert_close(got, want.squeeze((2, 3)))


@every
def test_iterations_of_a_call(kind: str, form: str) -> None:
    once, thrice = make(kind, form, iterations=1), make(kind, form)
    children, numbers = draw(once)
    for got, want in zip(run(thrice, children, numbers, iterations=1), run(once, children, numbers), strict=True):
        assert torch.equal(got, want)
    assert not torch.allclose(run(thrice, children, numbers)[0], run(once, children, numbers)[0])


@every
def test_meta_device_repr_and_explain(kind: str, form: str) -> None:
    sizes, options = FORMS[form]
    layer = LAYERS[kind](*sizes, device="meta", dtype=torch.float64, **options)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}
    text = repr(layer)
    assert f"({sizes[0]}, {sizes[1]}, {sizes[2]}, {sizes[3]}" in text
    assert ("pose='vector'" in text) == (options["pose"] == "vector") and "iterations" not in text
    assert ("share=True" in text) == ("share" in options) and ("kernel_size" in text) == ("kernel_size" in options)
    told = fastcaps.explain(make(kind, form))
    assert isinstance(told, functional.Explanation) and told.backend in ("cpu", "reference") and told.call


@every
def test_training_step_learns(kind: str, form: str) -> None:
    layer = make(kind, form).float()
    layer.reset_parameters()
    children, numbers = (tensor.float() for tensor in draw(layer))
    target = torch.zeros_like(run(layer, children, numbers)[0])
    optimizer = torch.optim.Adam(layer.parameters(), 0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (run(layer, children, numbers)[0] - target - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


WRONG = [
    ((6, 3, 15, 15), {"pose": "matrix"}, ValueError, "in_dim must be a square number.*15"),
    ((6, 3, 16, 25), {"pose": "matrix"}, ValueError, "out_dim must be a multiple of the 4 rows.*25"),
    ((6, 3, 15, 10), {"pose": 2}, ValueError, "in_dim must be a multiple of the 2 rows.*15"),
    ((6, 3, 15, 10), {"matrices": False, "pose": 5}, ValueError, "out_dim must equal in_dim with matrices=False"),
    ((6, 3, 16, 16), {"pose": "tensor"}, ValueError, "pose must be one of 'matrix', 'vector'"),
    ((0, 3, 16, 16), {}, ValueError, "in_capsules must be an int >= 1"),
    ((6, 3.0, 16, 16), {}, TypeError, "out_capsules must be an int"),
    ((6, 3, 0, 16), {}, ValueError, "in_dim must be an int >= 1"),
    ((6, 3, 16, 16), {"iterations": -1}, ValueError, "iterations must be an int >="),
    ((6, 3, 16, 16), {"stride": 2}, ValueError, "stride.*kernel_size"),
    ((6, 3, 16, 16), {"kernel_size": 0}, ValueError, "kernel_size"),
    ((6, 3, 16, 16), {"kernel_size": "some"}, ValueError, "kernel_size must be .*, 'all' or None, got 'some'"),
    ((6, 3, 16, 16), {"kernel_size": "all"}, ValueError, "kernel_size='all' must have share=True"),
    ((6, 3, 16, 16), {"kernel_size": "all", "share": True, "padding": 1}, ValueError, "padding"),
]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("sizes", "options", "error", "message"), WRONG)
def test_wrong_constructor_arguments(kind: str, sizes: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        LAYERS[kind](*sizes, **options)


@pytest.mark.parametrize("kind", LAYERS)
def test_an_unknown_argument_is_told_by_the_layer_that_was_called(kind: str) -> None:
    with pytest.raises(
        TypeError, match=f"turns is no argument of {LAYERS[kind].__name__}, which takes in_.*iterations"
    ):
        LAYERS[kind](6, 3, 4, 4, turns=2)


@pytest.mark.parametrize("kind", LAYERS)
def test_wrong_inputs_are_named(kind: str) -> None:
    layer, grid = LAYERS[kind](6, 3, 4, 4), LAYERS[kind](2, 3, 4, 4, kernel_size=3)
    whole = LAYERS[kind](2, 3, 4, 4, kernel_size="all", share=True)
    good, name = torch.randn(2, 6, 4), {"heinsen": "scores", "em": "activations"}.get(kind, "gate")
    cases = [
        (ValueError, r"children must be \[B, I, 4\], got \[2, 6, 5\]", lambda: layer(torch.randn(2, 6, 5))),
        (ValueError, "children must hold the 6 children.*got 7", lambda: layer(torch.randn(2, 7, 4))),
        (ValueError, "must hold the 2 child types.*got 3", lambda: grid(torch.randn(2, 3, 5, 5, 4))),
        (ValueError, r"children must be \[B, 2, H, W, 4\]", lambda: grid(good)),
        (ValueError, r"children must be \[B, 2, H, W, 4\]", lambda: whole(good)),
        (ValueError, "window", lambda: grid(torch.randn(2, 2, 5, 2, 4))),
        (ValueError, name, lambda: layer(good, torch.rand(2, 5))),
        (TypeError, name, lambda: layer(good, torch.rand(2, 6).double())),
        (ValueError, "children must be a grid of at least one", lambda: whole(torch.randn(2, 2, 0, 5, 4))),
        (TypeError, "children must be a tensor, got list", lambda: layer([1.0])),
        (TypeError, r"a tuple of 2: hand its parts .*layer\(poses, \w+s\)", lambda: layer((good, torch.rand(2, 6)))),
        (TypeError, "weight and children must have the same dtype", lambda: layer(good.double())),
        (ValueError, "device", lambda: layer(good.to("meta"))),
        (ValueError, "iterations", lambda: layer(good, iterations=-1)),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def test_exported_at_the_top() -> None:
    for name in ("DynamicRouting", "EMRouting", "HeinsenRouting", "RoutingPool2d"):
        assert getattr(fastcaps, name) is getattr(fastcaps.nn, name) and name in dir(fastcaps)
