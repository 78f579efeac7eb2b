"""Every routing layer: the paper's procedure as loops, layouts, state, copies, compilers, odd inputs, errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from functional_cases import at, expect, gradients, seen_by
from nn_layers import FORMS, LAYERS, SIZE, Row, draw

import fastcaps
from fastcaps.functional import Explanation, Window

every = pytest.mark.parametrize("row", LAYERS, ids=str)
forms = pytest.mark.parametrize("form", FORMS)
VARIANTS = [(row, {}, form) for row in LAYERS for form in FORMS]
VARIANTS += [(row, {"iterations": 1}, "set") for row in LAYERS]
VARIANTS += [(row, options, "set") for row in LAYERS for options in row.variants.values()]


def same(found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("row", "options", "form"), VARIANTS, ids=lambda value: str(value).split(" at 0x")[0])
def test_the_layer_is_the_procedure(row: Row, options: dict[str, Any], form: str) -> None:
    layer = row.make(form, **options)
    children, numbers = draw(layer)
    *found, r = row.call(layer, children, numbers, return_coefficients=True)
    grid = layer.output_size(SIZE) or ()
    assert all(part.shape[: 2 + len(grid)] == (2, layer.out_capsules, *grid) for part in found)
    assert found[0].shape[-1] == layer.out_dim and not r.requires_grad
    window = Window(SIZE) if layer.whole_grid else layer.window
    rows, columns, _ = layer.pose_shape
    assert r.shape == (2, *grid, (window.positions if window else 1) * layer.in_capsules, layer.out_capsules)
    poses = children.unflatten(-1, (rows, columns))
    for place, seen in seen_by(window, poses, layer.weight.detach(), layer.bias, numbers):
        wanted = row.loop(layer, seen, layer.iterations)
        for part, numbers_there in zip(found, wanted, strict=False):
            expect(at(part, layer.window, place).detach(), numbers_there)
        expect(at(r, layer.window, place, True)[[child.index for child in seen]], wanted[-1])
    same(row.call(layer, children, numbers), found)


@every
@pytest.mark.parametrize("form", ["rows", "grid"])
def test_gradients(row: Row, form: str) -> None:
    layer = row.make(form)
    children, numbers = draw(layer)
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
def test_state_copies_and_pickles(row: Row) -> None:
    layer, other = row.make("grid"), row.make("grid")
    children, numbers = draw(layer)
    wanted = row.call(layer, children, numbers)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    for copied in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(map(torch.equal, row.call(copied, children, numbers), wanted)) and repr(copied) == repr(layer)
        assert copied.weight is not layer.weight


@every
def test_compiled_whole(row: Row) -> None:
    torch._dynamo.reset()
    layer = row.make("grid")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        children, numbers = draw(layer, batch)
        leaves = [children.requires_grad_(), *layer.parameters()]
        found, wanted = row.call(compiled, children, numbers), row.call(layer, children, numbers)
        same(found, wanted)
        same(gradients(found, leaves), gradients(wanted, leaves))


@every
def test_exports_with_a_dynamic_batch(row: Row) -> None:
    layer = row.make("vector")
    given: tuple[Any, ...] = draw(layer)
    if layer.takes_parents:
        given = given[0], layer(given[0]).detach(), given[1]
    batch = {0: torch.export.Dim("batch")}
    names = ("children", *(("parents",) if layer.takes_parents else ()), layer.activity_name)
    program = torch.export.export(layer, given, dynamic_shapes=dict.fromkeys(names, batch))
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    more = [torch.cat([tensor, tensor, tensor]) for tensor in given]
    found, wanted = torch.export.load(saved).module()(*more), layer(*more)
    same(*((result if isinstance(result, tuple) else (result,)) for result in (found, wanted)))


@every
def test_bfloat16_autocast(row: Row) -> None:
    layer = row.make("grid").float()
    children, numbers = (tensor.float() for tensor in draw(layer))
    exact = row.call(layer, children, numbers)
    with torch.autocast("cpu", torch.bfloat16):
        found = row.call(layer, children.requires_grad_(), numbers)
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.bfloat16 and (got.float() - want).abs().mean() < 0.1 * want.abs().mean() + 0.02
    for gradient, leaf in zip(gradients(found, list(layer.parameters())), layer.parameters(), strict=True):
        assert gradient.dtype == leaf.dtype == torch.float32 and gradient.isfinite().all()


@every
@pytest.mark.parametrize("form", ["set", "grid"])
def test_odd_batches_strides_and_numbers(row: Row, form: str) -> None:
    layer = row.make(form)
    children, numbers = draw(layer)
    wanted = row.call(layer, children, numbers)
    wide = torch.zeros(*children.shape[:-1], 2 * children.shape[-1], dtype=torch.float64)
    wide[..., ::2] = children
    same(row.call(layer, wide[..., ::2], numbers), wanted)
    same(row.call(layer, children[:1], numbers[:1]), [part[:1] for part in wanted])
    spread = row.call(layer, children[:1].expand_as(children), numbers[:1].expand_as(numbers))
    same(spread, [part[:1].expand_as(part) for part in wanted])
    broken = children.clone()
    broken[0, 0, ..., 0] = torch.nan
    parts = row.call(layer, broken, numbers)
    assert parts[0][0].isnan().any()
    same([part[1] for part in parts], [part[1] for part in wanted])
    empty = children[:0].requires_grad_()
    results = row.call(layer, empty, numbers[:0])
    assert all(result.shape == (0, *want.shape[1:]) for result, want in zip(results, wanted, strict=True))
    sum(result.sum() for result in results).backward()
    assert empty.grad.shape == empty.shape and (layer.weight.grad == 0).all()
    certain = torch.full_like(numbers, torch.inf if layer.activity_name == "scores" else 1.0)
    same(row.call(layer, children), row.call(layer, children, certain))  # all children are there


@every
def test_grids_as_sets_and_sets_of_any_size(row: Row) -> None:
    """A set layer flattens a grid in the order n, h, w; a shared one takes any number of children, "all" any grid."""
    layer = row.kind(24, 5, 4, 4)
    grid, numbers = torch.randn(2, 2, 3, 4, 4), torch.rand(2, 2, 3, 4)
    each = [(n, h, w) for n in range(2) for h in range(3) for w in range(4)]
    flat = [torch.stack([given[:, n, h, w] for n, h, w in each], 1) for given in (grid, numbers)]
    same(row.call(layer, grid, numbers), row.call(layer, *flat))
    shared = row.make("rows")
    assert shared.groups == 1
    for count in (1, 9):
        children = torch.randn(2, count, 6, dtype=torch.float64)
        assert row.call(shared, children)[0].shape == (2, 3, 9)
    votes = torch.einsum("bncd,mde->bmce", children[:, :1].unflatten(-1, (3, 2)), shared.weight[0]) + shared.bias[0]
    if row.name == "pool":  # of one child the parent is its vote
        torch.testing.assert_close(shared(children[:, :1]), votes.flatten(-2))
    layer = row.make("all")
    assert layer.groups == 2 and layer.kernel_size == "all" and layer.output_size((5, 4)) is None
    for size in ((1, 1), (6, 7)):
        window = row.make("all", kernel_size=size)
        window.load_state_dict(layer.state_dict())
        children = torch.randn(2, 2, *size, 4, dtype=torch.float64)
        same(row.call(layer, children), [part.squeeze((2, 3)) for part in row.call(window, children)])


@every
def test_any_number_of_children_and_of_parents(row: Row) -> None:
    layer = row.drawn(None, None, 4, 6, bias=True)
    assert layer.weight.shape == (1, 1, 2, 3) and layer.bias.shape == (1, 1, 2, 3) and layer.bias_step is not None
    for count in (2, 5):
        children = torch.randn(2, count, 4, dtype=torch.float64)
        assert row.call(layer, children)[0].shape == (2, count, 6)
        fixed = row.drawn(count, 3, 4, 6, bias=True, share=True)  # the same, written out
        with torch.no_grad():
            for name, parameter in fixed.named_parameters():
                own = layer.get_parameter(name)
                steps = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[:, None, None]
                parameter.copy_(own + layer.bias_step * steps if name == "bias" else own)
        same(row.call(layer, children, out_capsules=3), row.call(fixed, children))
    with pytest.raises(ValueError, match="out_capsules must be None, since this layer has 3 parents; got 4"):
        fixed(children, out_capsules=4)
    with pytest.raises(ValueError, match="out_capsules must be an int >= 1"):
        layer(children, out_capsules=0)
    grid = row.drawn(2, None, 4, 4, kernel_size=2)
    children = torch.randn(1, 2, 4, 3, 4, dtype=torch.float64)
    assert row.call(grid, children, out_capsules=5)[0].shape == (1, 5, 3, 2, 4)


@every
def test_votes_without_matrices_are_those_of_identities(row: Row) -> None:
    for window in ({}, {"kernel_size": 2}):
        layer = row.drawn(2, 3, 4, 4, matrices=False, bias=True, share=True, **window)
        other = row.drawn(2, 3, 4, 4, bias=True, share=True, **window)
        with torch.no_grad():
            other.weight.copy_(torch.eye(2, dtype=torch.float64).expand_as(other.weight))
        other.load_state_dict(layer.state_dict(), strict=False)
        children = torch.randn(2, 2, *((3, 4) if window else ()), 4, dtype=torch.float64)
        same(*(row.call(each, children, return_coefficients=True) for each in (layer, other)))
    bare = row.kind(6, 3, 4, 4, matrices=False)
    assert row.call(bare, torch.randn(2, 6, 4))[0].shape == (2, 3, 4) and "matrices=False" in repr(bare)


@every
def test_what_a_call_may_change(row: Row) -> None:
    layer, once, other = row.make(iterations=3), row.make(iterations=1), row.make(iterations=3)
    children, numbers = draw(layer)
    assert all(map(torch.equal, row.call(layer, children, numbers, iterations=1), row.call(once, children, numbers)))
    assert not torch.allclose(row.call(layer, children, numbers)[0], row.call(once, children, numbers)[0])
    place = torch.randn(6, 1, 2, 2, dtype=torch.float64)
    with torch.no_grad():
        other.bias.add_(place)
    same(row.call(layer, children, numbers, bias=place), row.call(other, children, numbers))


@every
def test_arguments_are_shown_and_explained(row: Row) -> None:
    layer = row.kind(6, 3, 4, 4, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}
    assert repr(layer).splitlines()[0].startswith(f"{row.kind.__name__}(") and "6, 3, 4, 4" in repr(layer)
    assert "=" not in repr(layer).split("(norm)")[0] and not hasattr(layer, "kernel_size")  # torchinfo cannot read None
    layer = row.kind(2, 3, 4, 4, pose="vector", kernel_size=(3, 2), stride=2, share=True, iterations=2)
    assert "2, 3, 4, 4, pose='vector', kernel_size=(3, 2), stride=(2, 2), share=True, iterations=2" in repr(layer)
    assert layer.kernel_size == (3, 2) and layer.stride == (2, 2) and layer.padding == (0, 0)
    for form in ("set", "grid", "all"):
        told = fastcaps.explain(row.make(form))
        assert isinstance(told, Explanation) and told.backend in ("cpu", "reference") and told.call


def test_integers_may_be_numpys() -> None:
    six, three, four = (np.int64(n) for n in (6, 3, 4))
    window = {"kernel_size": (np.int32(3), 3), "stride": np.int64(2)}
    layer = fastcaps.DynamicRouting(six, three, four, four, iterations=np.int64(2), **window)
    assert type(layer.in_capsules) is int and layer.iterations == 2


WRONG = [
    ((6, 3, 15, 15), {}, ValueError, "in_dim must be a square number.*15"),
    ((6, 3, 16, 25), {}, ValueError, "out_dim must be a multiple of the 4 rows.*25"),
    ((6, 3, 15, 10), {"pose": 2}, ValueError, "in_dim must be a multiple of the 2 rows.*15"),
    ((6, 3, 15, 10), {"matrices": False, "pose": 5}, ValueError, "out_dim must equal in_dim with matrices=False"),
    ((6, 3, 16, 16), {"pose": "tensor"}, ValueError, "pose must be one of 'matrix', 'vector'"),
    ((0, 3, 16, 16), {}, ValueError, "in_capsules must be an int >= 1"),
    ((None, 3, 4, 4), {"kernel_size": 3}, ValueError, "in_capsules must be an int with a kernel_size"),
    ((6, 3.0, 16, 16), {}, TypeError, "out_capsules must be an int"),
    ((6, True, 16, 16), {}, TypeError, "out_capsules must be an int"),
    ((6, 3, 0, 16), {}, ValueError, "in_dim must be an int >= 1"),
    ((6, 3, 16, 16), {"iterations": -1}, ValueError, "iterations must be an int >="),
    ((6, 3, 16, 16), {"dtype": torch.int32}, TypeError, "dtype must be a floating-point type, got torch.int32"),
    ((6, 3, 16, 16), {"stride": 2}, ValueError, "stride.*kernel_size"),
    ((6, 3, 16, 16), {"kernel_size": 0}, ValueError, "kernel_size"),
    ((6, 3, 16, 16), {"kernel_size": 3, "padding": 2**62}, ValueError, "padding must be"),
    ((6, 3, 16, 16), {"kernel_size": "some"}, ValueError, "kernel_size must be .*, 'all' or None, got 'some'"),
    ((6, 3, 16, 16), {"kernel_size": "all"}, ValueError, "kernel_size='all' must have share=True"),
    ((6, 3, 16, 16), {"kernel_size": "all", "share": True, "padding": 1}, ValueError, "padding"),
]


@pytest.mark.parametrize(("sizes", "options", "error", "message"), WRONG)
def test_wrong_constructor_arguments(sizes: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fastcaps.RoutingPool(*sizes, **options)


@every
def test_every_layer_names_its_own_wrong_arguments(row: Row) -> None:
    unknown = rf"{row.kind.__name__} has no argument iteration \(did you mean iterations\?\): in_capsules.*pose"
    with pytest.raises(TypeError, match=unknown):
        row.kind(6, 3, 4, 4, iteration=2)
    with pytest.raises(ValueError, match="stride, padding and dilation need a kernel_size"):
        row.kind(6, 3, 4, 4, stride=2)
    name = "sharpness" if row.name == "pool" else "eps"
    for wrong in (torch.inf, torch.nan, -1.0):
        with pytest.raises(ValueError, match=f"{name} must be a finite number >= 0"):
            row.kind(6, 3, 4, 4, **{name: wrong})
    with pytest.raises(TypeError, match=f"{name} must be a number, got None"):
        row.kind(6, 3, 4, 4, **{name: None})


@every
def test_wrong_inputs_are_named(row: Row) -> None:
    layer, grid = row.kind(6, 3, 4, 4), row.kind(2, 3, 4, 4, kernel_size=3)
    whole = row.kind(2, 3, 4, 4, kernel_size="all", share=True)
    good, name = torch.randn(2, 6, 4), {"heinsen": "scores", "em": "activations"}.get(row.name, "gate")
    cases = [
        (ValueError, r"children must be \[B, I, 4\], got \[2, 6, 5\]", lambda: layer(torch.randn(2, 6, 5))),
        (ValueError, r"children must be \[B, I, 4\], got \[6, 4\]", lambda: layer(good[0])),
        (ValueError, "children must hold the 6 children.*got 7", lambda: layer(torch.randn(2, 7, 4))),
        (ValueError, "must hold the 2 child types.*got 3", lambda: grid(torch.randn(2, 3, 5, 5, 4))),
        (ValueError, r"children must be \[B, 2, H, W, 4\]", lambda: grid(good)),
        (ValueError, r"children must be \[B, 2, H, W, 4\]", lambda: whole(good)),
        (ValueError, "window", lambda: grid(torch.randn(2, 2, 5, 2, 4))),
        (ValueError, name, lambda: row.call(layer, good, torch.rand(2, 5))),
        (TypeError, name, lambda: row.call(layer, good, torch.rand(2, 6).double())),
        (ValueError, "children must be a grid of at least one", lambda: whole(torch.randn(2, 2, 0, 5, 4))),
        (TypeError, "children must be a tensor, got list", lambda: layer([1.0])),
        (TypeError, r"a tuple of 2: hand its parts .*layer\(poses, \w+s\)", lambda: layer((good, torch.rand(2, 6)))),
        (TypeError, "weight and children must have the same dtype", lambda: layer(good.double())),
        (ValueError, "device", lambda: layer(good.to("meta"))),
        (ValueError, "iterations", lambda: layer(good, iterations=-1)),
        (TypeError, "has no argument sharp", lambda: layer(good, sharp=1.0)),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
