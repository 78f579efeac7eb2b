"""Wrong arguments of whole routings raise before anything runs and name what is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from features import NothingRuns

import fastcaps
from fastcaps import Window, functional

B, N, H, W, C, D, E, M = 2, 3, 6, 5, 2, 3, 4, 7


def arguments(name: str, grid: bool = False) -> dict[str, object]:
    """Return right arguments of a routing."""
    count = 9 * N if grid else N
    lead = (B, N, H, W) if grid else (B, N)
    given: dict[str, object] = {"children": torch.randn(*lead, C, D), "weight": torch.randn(count, M, D, E)}
    given["bias"] = torch.randn(count, M, C, E)
    given |= {"window": Window(3, 2, 1)} if grid else {}
    if name in ("dynamic_routing", "routing_pool"):
        return given | {"gate": torch.rand(lead)}
    if name == "em_routing":
        return given | {"activations": torch.rand(lead), "beta_u": torch.randn(M), "beta_a": torch.randn(M)}
    return given | {
        "scores": torch.randn(lead),
        "beta_use": torch.randn(count, M),
        "beta_ignore": torch.randn(count, M),
    }


NAMES = ("dynamic_routing", "routing_pool", "em_routing", "heinsen_routing")
NUMBERS = {"dynamic_routing": "gate", "routing_pool": "gate", "em_routing": "activations", "heinsen_routing": "scores"}


@pytest.fixture(autouse=True)
def _nothing_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    with NothingRuns() if "before_anything_runs" in request.keywords else nullcontext():
        yield


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("name", NAMES)
def test_a_right_call_would_be_noticed(name: str) -> None:
    with pytest.raises(AssertionError, match="ran"):
        getattr(functional, name)(**arguments(name))


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_themselves_are_right(name: str, grid: bool) -> None:
    found = getattr(functional, name)(**arguments(name, grid))
    shape = (B, M, 3, 3, C, E) if grid else (B, M, C, E)
    assert shape in {result.shape for result in (found if isinstance(found, tuple) else (found,))}


SHAPES = [
    ("children", (N, C, D), [r"\[B, I, C, D\]", r"\[3, 2, 3\]"]),
    ("children", (B, N, H, W, C, D), ["window=None"]),
    ("children", (B, 0, C, D), ["I >= 1"]),
    ("weight", (N, M, D), [r"\[G, M, D, E\]", r"\[3, 7, 3\]"]),
    ("weight", (N, M, D + 1, E), ["D = 3", r"\[3, 7, 4, 4\]"]),
    ("weight", (2, M, D, E), ["divides the 3 children"]),
    ("weight", (N, 0, D, E), ["M >= 1"]),
    ("bias", (M, C, E), [r"\[3 or 1, 7 or 1, 2, 4\]", r"\[7, 2, 4\]"]),
    ("bias", (N, M + 1, C, E), [r"\[3, 8, 2, 4\]"]),
]


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("argument", "shape", "says"), SHAPES, ids=str)
def test_wrong_shapes(name: str, argument: str, shape: tuple[int, ...], says: list[str]) -> None:
    given = arguments(name) | {argument: torch.randn(shape)}
    for words in (argument, *says):
        with pytest.raises(ValueError, match=words):
            getattr(functional, name)(**given)


def nested(*shape: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(shape), torch.randn(shape)])


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_for_one_parent_beside_others_is_what_is_wrong(name: str) -> None:
    given = arguments(name) | {"weight": torch.randn(1, 1, D, E), "bias": None}
    given |= {"parents": M} if name in ("dynamic_routing", "routing_pool") else {}
    with pytest.raises(ValueError, match=r"weight \[G, M, D, E\] must have M = 7, .* got \[1, 1, 3, 4\]"):
        getattr(functional, name)(**given)
    poses = torch.randn(B, M, C, E)
    with pytest.raises(ValueError, match=r"weight \[G, M, D, E\] must have M = 7"):
        functional.inverted_attention_routing(given["children"], given["weight"], poses)


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("name", NAMES)
def test_wrong_tensors(name: str) -> None:
    call, numbers = getattr(functional, name), NUMBERS[name]
    right = arguments(name)
    cases: list[tuple[type[Exception], str, dict[str, object]]] = [
        (TypeError, r"children must be a torch\.Tensor, got list", {"children": [1.0]}),
        (
            TypeError,
            "children must have one of the dtypes float32, .*got torch.int64",
            {"children": torch.ones(B, N, C, D).long()},
        ),
        (TypeError, "weight and children must have the same dtype", {"weight": torch.randn(N, M, D, E).double()}),
        (TypeError, r"weight must be a torch\.Tensor, got int", {"weight": 3}),
        (ValueError, "weight must be on the device of children", {"weight": torch.randn(N, M, D, E, device="meta")}),
        (ValueError, rf"{numbers} must have shape \[B, I\] = \[2, 3\], got \[2, 4\]", {numbers: torch.rand(B, N + 1)}),
        (TypeError, f"{numbers} and children must have the same dtype", {numbers: torch.rand(B, N).double()}),
        (TypeError, r"window must be a fastcaps\.Window or None, got int", {"window": 3}),
        (TypeError, "iterations must be an int", {"iterations": 2.0}),
        (TypeError, "iterations must be an int", {"iterations": True}),
        (ValueError, "iterations must be an int >= [01], got -1", {"iterations": -1}),
        (ValueError, r"iterations must be an int <= 2\*\*63 - 2", {"iterations": 2**63}),
        (TypeError, "children must be a dense tensor", {"children": torch.randn(B, N, C, D).to_sparse()}),
        (TypeError, "children must be a dense tensor, got a nested one", {"children": nested(N, C, D)}),
        (TypeError, f"{numbers} must be a dense tensor, got a nested one", {numbers: nested(N)}),
    ]
    for error, message, wrong in cases:
        with pytest.raises(error, match=message):
            call(**(right | wrong))


@pytest.mark.before_anything_runs
@pytest.mark.parametrize("name", NAMES)
def test_wrong_grids(name: str) -> None:
    call, right = getattr(functional, name), arguments(name, grid=True)
    with pytest.raises(ValueError, match="window must fit into the grid: it spans 9 x 9"):
        call(**(right | {"window": Window(9)}))
    with pytest.raises(ValueError, match=rf"{NUMBERS[name]} must have shape \[B, N, H, W\]"):
        call(**(right | {NUMBERS[name]: torch.rand(B, N)}))
    with pytest.raises(ValueError, match="divides the 12 children"):
        call(**(right | {"window": Window(2)}))


@pytest.mark.parametrize("name", NAMES)
def test_numpy_numbers_are_numbers(name: str) -> None:
    """What comes out of a numpy array or a search over settings."""
    numbers = {"iterations": np.int64(2)}
    numbers |= {"eps": np.float32(1e-3)} if name in ("em_routing", "heinsen_routing") else {}
    numbers |= {"sharpness": np.float64(0.5), "parents": np.int32(M)} if name == "routing_pool" else {}
    given = arguments(name)
    found, wanted = (
        getattr(functional, name)(**given, **settings)
        for settings in (numbers, {key: value.item() for key, value in numbers.items()})
    )
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(TypeError, match="iterations must be an int"):
        getattr(functional, name)(**given, iterations=np.float64(2.0))
    with pytest.raises(TypeError, match="iterations must be an int"):
        getattr(functional, name)(**given, iterations=np.bool_(True))


def with_(name: str, **wrong: object) -> Callable[[], object]:
    return lambda: getattr(functional, name)(**(arguments(name) | wrong))


WRONG = [
    (ValueError, "compete must be one of 'parents', 'children', got 'both'", "dynamic_routing", {"compete": "both"}),
    (ValueError, "leaky must be False with", "dynamic_routing", {"compete": "children", "leaky": True}),
    (ValueError, "iterations must be an int >= 1, got 0", "dynamic_routing", {"iterations": 0}),
    (ValueError, "sharpness must be a finite number >= 0, got -1", "routing_pool", {"sharpness": -1.0}),
    (ValueError, "sharpness must be a finite number", "routing_pool", {"sharpness": math.inf}),
    (TypeError, "sharpness must be a number, got '1'", "routing_pool", {"sharpness": "1"}),
    (ValueError, "activation must be one of 'relu'", "routing_pool", {"activation": "swish"}),
    (TypeError, "activation must be a function, a name or None, got int", "routing_pool", {"activation": 1}),
    (ValueError, "parents must be the M = 7 of weight", "routing_pool", {"parents": 3}),
    (ValueError, "parents must be an int >= 1, got 0", "routing_pool", {"parents": 0}),
    (ValueError, r"bias must have shape .* = \[3 or 1, 7 or 1, 2, 3\]", "routing_pool", {"weight": None}),
    (ValueError, r"beta_u must have shape \[M\] = \[7\], got \[3\]", "em_routing", {"beta_u": torch.zeros(3)}),
    (TypeError, r"beta_a must be a torch\.Tensor, got float", "em_routing", {"beta_a": 0.0}),
    (ValueError, "inverse_temperature must have a number for each of the 3 iterations, got 2", "em_routing",
     {"inverse_temperature": np.array([0.1, 0.2])}),
    (TypeError, "inverse_temperature must be a number, got tensor", "em_routing",
     {"inverse_temperature": torch.ones(3)}),
    (ValueError, "inverse_temperature must be a finite number >= 0, got nan", "em_routing",
     {"inverse_temperature": math.nan}),
    (TypeError, "inverse_temperature must be a number", "em_routing", {"inverse_temperature": lambda turn: "hot"}),
    (ValueError, "eps must be a finite number >= 0, got -1", "em_routing", {"eps": -1.0}),
    (ValueError, r"beta_use must have shape \[I or 1, M or 1\] = \[3 or 1, 7 or 1\], got \[7\]", "heinsen_routing",
     {"beta_use": torch.zeros(M)}),
    (ValueError, "beta_ignore must have shape", "heinsen_routing", {"beta_ignore": torch.zeros(2, M)}),
    (ValueError, "model must be one of 'gaussian', 'kmeans', got 'skm'", "heinsen_routing", {"model": "skm"}),
    (ValueError, "eps must be a finite number >= 0, got nan", "heinsen_routing", {"eps": math.nan}),
    (ValueError, "eps must be a finite number >= 0, got inf", "heinsen_routing", {"eps": math.inf}),
    (ValueError, "eps must be a finite number >= 0, got inf", "em_routing", {"eps": math.inf}),
    (TypeError, "eps must be a number, got None", "em_routing", {"eps": None}),
    (TypeError, "eps must be a number, got None", "heinsen_routing", {"eps": None}),
    (ValueError, "sharpness must be a finite number >= 0, got nan", "routing_pool", {"sharpness": math.nan}),
]  # fmt: skip


@pytest.mark.before_anything_runs
@pytest.mark.parametrize(("error", "message", "name", "wrong"), WRONG, ids=[str(k) for k in range(len(WRONG))])
def test_wrong_settings(error: type[Exception], message: str, name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(error, match=message):
        with_(name, **wrong)()


def test_wrong_coordinates() -> None:
    with pytest.raises(ValueError, match="columns must be at least 2"):
        functional.coordinate_bias(3, 3, 2, 1, 1)
    with pytest.raises(ValueError, match="height must be an int >= 1, got 0"):
        functional.coordinate_bias(0, 3, 2, 2, 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_backend_that_cannot_take_the_call(name: str) -> None:
    with fastcaps.backend("cuda"), pytest.raises(fastcaps.BackendError, match=re.escape("backend 'cuda' is forced")):
        getattr(functional, name)(**arguments(name))


@pytest.mark.parametrize("name", ["em_routing", "heinsen_routing"])
def test_tables_may_be_wider_than_half_precision(name: str) -> None:
    given = {
        key: value.bfloat16() if isinstance(value, torch.Tensor) and "beta" not in key else value
        for key, value in arguments(name).items()
    }
    with fastcaps.backend("reference"):
        found = getattr(functional, name)(**given)
        narrow = {key: value.bfloat16() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        rounded = getattr(functional, name)(**narrow)
    assert all(result.dtype == torch.bfloat16 and result.isfinite().all() for result in (*found, *rounded))
