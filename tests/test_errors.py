"""Wrong arguments of every routing function raise before anything runs, and name what is wrong, came and is wanted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from features import FUNCTIONS, NothingRuns
from suite import native_only
from torch import Tensor

import fastcaps
from fastcaps import Window, functional

B, N, H, W, C, D, E, M = 2, 3, 6, 5, 2, 3, 4, 7
WINDOW = Window(3, stride=2, padding=1)  # Ho, Wo = 3, 3
every_function = pytest.mark.parametrize("name", FUNCTIONS)
before_anything_runs = pytest.mark.before_anything_runs


def right(name: str = "inverted_attention_routing", grid: bool = False) -> dict[str, Any]:
    """Return right arguments of a function, all of its tensors among them."""
    row, window = FUNCTIONS[name], WINDOW if grid else None
    sizes = {"batch": B, "types": N, "grid": (H, W), "parents": M, "pose": (C, D, E)}
    return row.tensors(window, torch.float32, **sizes) | ({"window": window} if grid else {})


def call(name: str, given: dict[str, Any]) -> Any:
    return getattr(functional, name)(**given)


@pytest.fixture(autouse=True)
def _nothing_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    with NothingRuns() if "before_anything_runs" in request.keywords else nullcontext():
        yield


DIMENSIONS = {"children": (), "weight": (0, 2)}
"""Those of which a wrong size is the argument's own fault; of all others every one."""


@before_anything_runs
@pytest.mark.parametrize("grid", [False, True])
@every_function
def test_wrong_shapes(name: str, grid: bool) -> None:
    """A dimension too many or too few, or another size: the argument is named, and what it got."""
    good = right(name, grid)
    for argument, value in good.items():
        if not isinstance(value, Tensor):
            continue
        shape = list(value.shape)
        wrong = [shape[:-1], [*shape, 1], *([0, *shape[1:]] for _ in range(argument == "weight"))]
        for k in DIMENSIONS.get(argument, range(len(shape))):
            wrong.append([*shape[:k], shape[k] + 1, *shape[k + 1 :]])
        for other in wrong:
            for given in (good, {key: tensor for key, tensor in good.items() if key != "parents"}):
                if argument in given:
                    with pytest.raises(ValueError, match=rf"\b{argument}\b.*{re.escape(str(other))}"):
                        call(name, given | {argument: torch.randn(other)})
        if argument in ("children", "weight"):
            for k in range(1, len(shape)):
                with pytest.raises(ValueError, match=r"[A-Z] >= 1"):
                    call(name, good | {argument: torch.randn([*shape[:k], 0, *shape[k + 1 :]])})


def nested(*shape: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(shape), torch.randn(shape)])


@before_anything_runs
@every_function
def test_wrong_tensors(name: str) -> None:
    """Every tensor argument as something else, of another dtype or layout, on another device."""
    good = right(name)
    children = good["children"]
    for wrong in (None, [1.0], 3):
        with pytest.raises(TypeError, match=rf"children must be a torch\.Tensor, got {type(wrong).__name__}"):
            call(name, good | {"children": wrong})
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"children must have one of the dtypes float32, float64, .* got {dtype}"):
            call(name, good | {"children": children.to(dtype)})
    with pytest.raises(ValueError, match="must be on the device of children, meta, got cpu"):
        call(name, good | {"children": children.to("meta")})
    for argument, value in good.items():
        with pytest.raises(TypeError, match=f"{argument}.* must be a dense tensor"):
            call(name, good | {argument: value.to_sparse()})
        with pytest.raises(TypeError, match=f"{argument}.* must be a dense tensor, got a nested one"):
            call(name, good | {argument: nested(*value.shape[1:])})
        if argument == "children":
            continue
        with pytest.raises(TypeError, match=rf"{argument}.* must be a torch\.Tensor, got list"):
            call(name, good | {argument: [1.0]})
        for dtype in (torch.float64, torch.int64, torch.complex64, torch.bfloat16):
            with pytest.raises(TypeError, match=rf"{argument} .*must have .*dtype.*, got {dtype}"):
                call(name, good | {argument: value.to(dtype)})
        with pytest.raises(ValueError, match=f"{argument}.* must be on the device of children, cpu, got meta"):
            call(name, good | {argument: value.to("meta")})


@before_anything_runs
@every_function
def test_wrong_windows(name: str) -> None:
    for wrong, says in (
        (Window(7), "spans 7 x 7 .* H x W = 6 x 5"),
        (Window((2, 6)), "spans 2 x 6"),
        (Window(3, dilation=3), "spans 7 x 7 positions with its dilation"),
        (Window(9, padding=1), "with padding 8 x 7"),
    ):
        with pytest.raises(ValueError, match=f"window must fit into the grid.*{says}"):
            call(name, {k: v for k, v in right(name, grid=True).items() if k != "parents"} | {"window": wrong})
    with pytest.raises(TypeError, match=r"window must be a fastcaps\.Window or None, got int"):
        call(name, right(name) | {"window": 3})
    with pytest.raises(ValueError, match="divides the 12 children"):
        call(name, right(name, grid=True) | {"window": Window(2)})


ANY = tuple(FUNCTIONS)
DYNAMIC, POOL, EM, HEINSEN, ATTENTION = (
    ("dynamic_routing",), ("routing_pool",), ("em_routing",), ("heinsen_routing",), ("inverted_attention_routing",),
)  # fmt: skip
EPS = (*EM, *HEINSEN, *ATTENTION, *DYNAMIC)
WRONG = [
    (TypeError, "iterations must be an int", ANY, {"iterations": 2.0}),
    (TypeError, "iterations must be an int", ANY, {"iterations": True}),
    (TypeError, "iterations must be an int", ANY, {"iterations": np.bool_(True)}),
    (ValueError, "iterations must be an int >= [01], got -1", ANY, {"iterations": -1}),
    (ValueError, r"iterations must be an int <= 2\*\*63 - 2", ANY, {"iterations": 2**63}),
    (ValueError, "iterations must be an int >= 1, got 0", DYNAMIC, {"iterations": 0}),
    (ValueError, "eps must be a finite number >= 0, got nan", EPS, {"eps": math.nan}),
    (ValueError, "eps must be a finite number >= 0, got -1", EPS, {"eps": -1}),
    (TypeError, "eps must be a number, got None", EPS, {"eps": None}),
    (ValueError, "scale must be a finite number, got nan", ATTENTION, {"scale": math.nan}),
    (ValueError, "scale must be a finite number, got -inf", ATTENTION, {"scale": -math.inf}),
    (ValueError, "norm_weight must be None with normalize=False", ATTENTION, {"normalize": False}),
    (ValueError, "compete must be one of 'parents', 'children', got 'both'", DYNAMIC, {"compete": "both"}),
    (ValueError, "leaky must be False with", DYNAMIC, {"compete": "children", "leaky": True}),
    (ValueError, "leaky must be False with a prior", DYNAMIC, {"prior": torch.zeros(N, M), "leaky": True}),
    (ValueError, r"prior must have shape \[I or 1, M\] = \[3 or 1, 7\], got \[3, 4\]", DYNAMIC,
     {"prior": torch.zeros(N, 4)}),
    (ValueError, "sharpness must be a finite number >= 0, got -1", POOL, {"sharpness": -1.0}),
    (ValueError, "activation must be one of 'relu'", POOL, {"activation": "swish"}),
    (TypeError, "activation must be a function, a name or None, got int", POOL, {"activation": 1}),
    (ValueError, "parents must be the M = 7 of weight", POOL, {"parents": 3}),
    (ValueError, "parents must be an int >= 1, got 0", POOL, {"parents": 0}),
    (ValueError, r"bias must have shape .* = \[3 or 1, 7 or 1, 2, 3\]", POOL, {"weight": None}),
    (TypeError, r"beta_a must be a torch\.Tensor, got float", EM, {"beta_a": 0.0}),
    (ValueError, "inverse_temperature must have a value for each of the 3 iterations, got 2", EM,
     {"inverse_temperature": np.array([0.1, 0.2])}),
    (TypeError, "inverse_temperature must be a number, got tensor", EM, {"inverse_temperature": torch.ones(3)}),
    (ValueError, "inverse_temperature must be a finite number >= 0, got nan", EM, {"inverse_temperature": math.nan}),
    (TypeError, "inverse_temperature must be a number", EM, {"inverse_temperature": lambda iteration: "hot"}),
    (ValueError, "model must be one of 'gaussian', 'kmeans', got 'skm'", HEINSEN, {"model": "skm"}),
]  # fmt: skip


@before_anything_runs
@pytest.mark.parametrize(("error", "message", "names", "wrong"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_wrong_settings(error: type[Exception], message: str, names: tuple[str, ...], wrong: dict[str, Any]) -> None:
    for name in names:
        with pytest.raises(error, match=message):
            call(name, right(name) | wrong)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((0,), ValueError, r"kernel_size must be an int or a pair of ints from 1 to 2\*\*31, got 0"),
        ((3, 0), ValueError, "stride"),
        ((3, 1, -1), ValueError, "padding must be an int or a pair of ints from 0"),
        ((3, 1, 0, 0), ValueError, "dilation"),
        (((3, 2.5),), TypeError, "kernel_size"),
        ((3, 1, 0, 2**62), ValueError, "dilation"),
    ],
)
def test_wrong_window(arguments: tuple[object, ...], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"Window: .*{says}"):
        Window(*arguments)


@pytest.mark.parametrize("wrong", [True, 1.0, "1"], ids=repr)
def test_a_right_call_does_not_let_a_wrong_one_pass(wrong: object) -> None:
    """What was found right is remembered: a setting that equals it is not, nor is what looks like a tensor."""
    children = torch.randn(2, 4, 1, 3)
    assert functional.routing_pool(children, parents=1).shape == (2, 1, 1, 3)
    with pytest.raises(TypeError, match="parents must be an int >= 1, got"):
        functional.routing_pool(children, parents=wrong)  # type: ignore[arg-type]
    look_alike = SimpleNamespace(
        shape=children.shape, dtype=torch.float32, device=children.device, layout=torch.strided
    )
    with pytest.raises(TypeError, match=r"children must be a torch\.Tensor, got SimpleNamespace"):
        functional.routing_pool(look_alike, parents=1)  # type: ignore[arg-type]


# ---- what no memory holds --------------------------------------------------------------------------------------------

ALL_ALIKE = torch.zeros(1, 1, 1, 1)


def small(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 12, 1, 8), torch.randn(12, 5, 8, 6)


TOO_LARGE: dict[str, tuple[Callable[[], Any], str]] = {
    "iterations": (lambda: functional.dynamic_routing(*small(2), iterations=2**40),
                   f"sums of shape [{2**40}, 2, 5, 1, 6]: 263882791 MB"),
    "children": (lambda: functional.routing_pool(ALL_ALIKE.expand(2**50, 3, 1, 1), parents=1),
                 f"parents of shape [{2**50}, 1, 1, 1]: 4503599628 MB"),
    "parents": (lambda: functional.routing_pool(small(2)[0], parents=2**62),
                f"votes of children [2, 12, 1, 8] for {2**62} parents"),
    "parents-of-none": (lambda: functional.routing_pool(small(0)[0], parents=2**59),
                        f"votes of children [0, 12, 1, 8] for {2**59} parents"),
    "votes": (lambda: functional.routing_pool(ALL_ALIKE.expand(1, 2**40, 1, 1), parents=2**17),
              f"votes of children [1, {2**40}, 1, 1] for {2**17} parents"),
}  # fmt: skip


@native_only
@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_no_memory_holds_is_named(what: str) -> None:
    """Results that cannot be allocated, and sizes whose products leave 64 bits: nothing runs, no division fails."""
    run, says = TOO_LARGE[what]
    with pytest.raises(RuntimeError) as caught:
        run()
    assert str(caught.value) == f"fastcaps: no memory for {says}"


def test_the_largest_numbers_of_a_window_overflow_nothing() -> None:
    children, weight = torch.randn(1, 1, 1, 1, 1, 2), torch.randn(1, 2, 2, 2)
    with pytest.raises(ValueError, match="window must fit into the grid"):
        functional.inverted_attention_routing(children, weight, window=Window(2, dilation=2**31))
    far = Window(1, stride=2**31, padding=2**31)  # positions far to the left, on the grid, far to the right
    assert far.output_size(1, 1) == (3, 3)
    parents = torch.randn(1, 2, 3, 3, 1, 2)
    found = functional.inverted_attention_routing(children, weight, parents, window=far, normalize=False)
    assert found[:, :, 1, 1].abs().sum() > 0 and found.abs().sum() == found[:, :, 1, 1].abs().sum()


@before_anything_runs
@every_function
def test_the_nearest_name_is_told(name: str) -> None:
    """Of an argument of a function or of a class, and of what the package has."""
    with pytest.raises(TypeError, match=rf"{name} has no argument windw \(did you mean window\?\); there are"):
        call(name, right(name) | {"windw": None})
    with pytest.raises(TypeError, match=r"RoutingPool2d has no argument sharpnes \(did you mean sharpness\?\)"):
        fastcaps.RoutingPool2d(3, sharpnes=4.0)
    with pytest.raises(AttributeError, match=r"has no attribute 'DynamicRoutng' \(did you mean DynamicRouting\?\)"):
        fastcaps.DynamicRoutng  # noqa: B018
    with pytest.raises(AttributeError, match=r"fastcaps.nn' has no attribute 'EmRouting' \(did you mean EMRouting\?\)"):
        fastcaps.nn.EmRouting  # noqa: B018
    with pytest.raises(TypeError, match=r"margin_loss has no argument margin; there are: lengths, target, upper"):
        fastcaps.losses.margin_loss(torch.rand(2, 3), torch.tensor([0, 1]), margin=0.9)
    with pytest.raises(AttributeError, match=r"has no attribute 'margin_loss' \(it is fastcaps\.losses\.margin_loss\)"):
        fastcaps.margin_loss  # noqa: B018


class Layer(fastcaps.nn.RoutingLayer):  # type: ignore[type-arg]
    pass


class Own(fastcaps.nn.RoutingLayer[Any, Any]):
    """A user's routing."""

    def route(self, votes: fastcaps.Votes, iterations: int) -> torch.Tensor:
        return votes.sum(1.0)


def built(backbone: Any, **options: Any) -> Any:
    sizes = {"in_channels": 2, "image_size": 5, "capsules": 3, "dim": 4, "classes": 7}
    return fastcaps.CapsNet.build(backbone, **{**sizes, **options})


FIRST_STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "backbone": (lambda: built(None), r"backbone must be a torch\.nn\.Module, got None"),
    "hidden": (lambda: built(torch.nn.ReLU(), hiden=[]), r"build has no argument hiden \(did you mean hidden\?\)"),
    "head": (lambda: built(torch.nn.ReLU(), head="norm"), "head must be one of 'linear', 'length', 'activations', got"),
    "image size": (lambda: built(torch.nn.ReLU(), image_size="28"), "image_size must be an int or a pair of ints"),
    "map": (lambda: fastcaps.DynamicRouting(3, 7, 4, 4)(torch.randn(2, 3, 5, 5)), "; PrimaryCapsules turns a feature"),
    "normalize": (lambda: fastcaps.PrimaryCapsules(2, 3, 4, normalize="no"), "'layer_norm', 'squash', None, got 'no'"),
    "flag": (lambda: fastcaps.PrimaryCapsules(2, 3, 4, activations="no"), "activations must be True or False, got"),
    "head bias": (lambda: fastcaps.nn.ClassHead(4, bias="no"), "bias must be True or False, got 'no'"),
    "head dtype": (lambda: fastcaps.nn.ClassHead(4)(torch.zeros(2, 3, 4).double()), "poses must be torch.float32, the"),
    "decoder dtype": (lambda: fastcaps.losses.ReconstructionDecoder(3, 4, (1, 5, 5))(torch.zeros(2, 3, 4).double()),
                      "capsules must be torch.float32, the dtype of the layer's parameters, got torch.float64"),
    "class layer": (lambda: built(torch.nn.ReLU(), class_dim=4), "no argument class_dim; classes=CapsuleSpec"),
    "vectors": (lambda: fastcaps.functional.squash(1.5), "vectors must be a tensor, got float"),
    "squash": (lambda: fastcaps.functional.squash(torch.ones(2), eps=-1), "eps must be a finite number >= 0, got -1"),
    "number": (lambda: fastcaps.DynamicRouting(3, 7, 4, 4)(torch.randn(2, 3, 4), 3), "^activations must be a tensor,"),
    "spec": (lambda: built(torch.nn.ReLU(), hidden=[fastcaps.nn.CapsuleSpec(8, 15)]), "^layer 0 .*, got 15"),
    "routing": (lambda: built(torch.nn.ReLU(), routing="dynamic"), r"'dynamic' \(the class of the layers is layer="),
    "unknown": (lambda: built(torch.nn.ReLU(), reconstruction=1), "build has no argument reconstruction; there are"),
    "primary": (lambda: built(torch.nn.ReLU(), primary="squash"), "primary must be a mapping, .*, got 'squash'"),
    "set twice": (lambda: built(torch.nn.ReLU(), primary={"dim": 3}), "primary cannot set dim"),
    "labels": (lambda: built(torch.nn.ReLU())(torch.randn(1, 2, 5, 5), reconstruct=[1]), "reconstruct, if no tensor"),
    "decoder": (lambda: fastcaps.losses.ReconstructionDecoder(3, 4, 5), "image_shape must be a sequence of ints, got"),
    "one sample": (lambda: fastcaps.EMRouting(3, 7, 4, 4)(torch.randn(3, 4)), "of one sample pass .*unsqueeze"),
    "flattened": (lambda: fastcaps.EMRouting(3, 7, 4, 4)(torch.randn(2, 12)), r"\[2, 12\]; leave out nn.Flatten"),
    "vectors of 8": (lambda: fastcaps.DynamicRouting(32, 10, 8, 16), r"square number .* got 8 \(pass pose='vector'"),
    "vectors of 9": (lambda: fastcaps.DynamicRouting(32, 10, 9, 16), r"3 rows of a pose, got 16 \(pass pose='vector'"),
    "flat set": (lambda: functional.dynamic_routing(torch.randn(2, 6, 8), torch.randn(6, 3, 8, 4)),
                 r"children\.unsqueeze\(2\)"),
    "flat grid": (lambda: functional.dynamic_routing(torch.randn(2, 3, 5, 5, 4), torch.randn(27, 3, 4, 4),
                  window=WINDOW), r"children\.unsqueeze\(4\)"),
    "verbs": (lambda: fastcaps.Votes(torch.randn(2, 6, 8), torch.randn(6, 3, 8, 4)), r"children\.unsqueeze\(2\)"),
    "matrices": (lambda: fastcaps.DynamicRouting(3, 7, 4, 4)(torch.randn(2, 3, 2, 2)), r"children\.flatten\(2\)"),
    "grid of matrices": (lambda: fastcaps.DynamicRouting(3, 7, 4, 4, kernel_size=2)(torch.randn(2, 3, 5, 5, 2, 2)),
                         r"children\.flatten\(4\)"),
    "route": (lambda: type("Mine", (Layer,), {"route": lambda self, votes, iteration: None}),
              r"must define route\(.*got a parameter iteration"),
    "no iteration": (lambda: Own(3, 7, 4, 4)(torch.randn(2, 3, 4), iterations=0), "^iterations must be an int >= 1"),
    "iterations": (lambda: Own(3, 7, 4, 4)(torch.randn(2, 3, 4), iterations="x"), "^iterations must be an int >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", FIRST_STEPS)
def test_a_first_step_that_fails_says_what_to_do(what: str) -> None:
    run, says = FIRST_STEPS[what]
    with pytest.raises((TypeError, ValueError, AttributeError), match=says):
        run()


def test_layers_whose_linear_maps_were_replaced_run_on() -> None:
    """As quantization does: there is no parameter to compare a dtype with."""
    head, decoder = fastcaps.nn.ClassHead(4), fastcaps.losses.ReconstructionDecoder(3, 4, (1, 5, 5))
    head.linear, decoder.layers = torch.nn.Sequential(torch.nn.AvgPool1d(4)), torch.nn.AdaptiveAvgPool1d(25)
    for layer in (head, decoder):
        assert layer(torch.zeros(2, 3, 4).double()).dtype == torch.float64
