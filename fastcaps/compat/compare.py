"""Compare a published layer with its twin by results and gradients, and say what differs."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.checks import accumulation_dtype, one_line
from fastcaps.compat.twin import Twin

TOLERANCES = {torch.float64: (1e-6, 1e-4), torch.float32: (1e-3, 5e-2)}
"""The largest difference between results, and between gradients, relative to the largest value: far above rounding, far
below what another formula gives."""

ASKED = "; check=False converts it without a comparison"


class Different(Exception):
    """Says why a layer is not the one that its twin follows."""


def compare(old: nn.Module, new: Twin) -> str:
    """Return how closely the results of a layer and its twin agree; raise if these or the gradients differ.

    Copies of the two run, in training mode but without the twin's dropout, then in evaluation mode. Nothing of
    the layer changes.
    """
    weight = next(new.parameters())
    if weight.is_meta:
        raise Different(f"its parameters have no values yet{ASKED}")
    devices = [weight.device] if weight.is_cuda else []
    cast = torch.autocast(weight.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), cast, torch.random.fork_rng(devices):
        copies: dict[int, Any] = {}
        theirs, ours = copied(old, copies), copied(new, copies)
        calls = prepared(ours)
        far, why = difference(theirs, ours, calls)
        if not why:
            for module in (*theirs.modules(), *ours.modules()):
                module.training = False
            if why := difference(theirs, ours, calls)[1]:
                raise Different(f"agrees in training mode only: in evaluation mode {why}")
            return f"results agree to {far:.1e}"
        for name, values in ours._probes:
            published = getattr(ours, name)
            for value in values:
                setattr(ours, name, value)
                if value != published and not difference(theirs, ours, calls)[1]:
                    raise Different(f"computes what the twin does with {name}={value!r}, not {published!r}")
            setattr(ours, name, published)
        for module in theirs.modules():
            module.training = False
        if not difference(theirs, ours, calls)[1]:
            why = "agrees in evaluation mode only: does it drop values in training?"
        raise Different(why)


def copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a layer in training mode, or of a parameter or buffer, in float32 for half types.

    The gradients of half types are too coarse to compare, and inference tensors have none. ``copies`` holds earlier
    copies by the ids of the originals: layers that share parameters share their copies.
    """
    if value is None or id(value) in copies:
        return copies.get(id(value))
    if isinstance(value, nn.Module):
        made: Any = object.__new__(type(value))
        vars(made).update(vars(value), training=True)
        for held in ("_parameters", "_buffers", "_modules"):
            vars(made)[held] = {name: copied(each, copies) for name, each in vars(value)[held].items()}
    else:
        made = value.detach().to(accumulation_dtype(value.dtype), copy=True)
        made = nn.Parameter(made, made.is_floating_point()) if isinstance(value, nn.Parameter) else made
    copies[id(value)] = made
    return made


def prepared(ours: Twin) -> list[dict[str, Any]]:
    """Return random arguments of some calls for a twin's copy, after some changes of it.

    Equal biases, as before training, would hide what a formula does with them; dropout would differ.
    """
    weight, generator = next(ours.parameters()), torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int, size: float = 0.5) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cpu") * size).to(weight)

    for each in ours.parameters():
        if each.numel() and bool((each == each.flatten()[0]).all()):
            each.data += draw(*each.shape)
    for module in ours.modules():
        if type(module) is nn.Dropout:
            module.p = 0.0
    names = inspect.signature(ours.forward).parameters
    calls = [call for size in ours._sizes for call in ours._calls(partial(draw, size=0.5 * size))]
    return [dict(zip(names, call, strict=False)) for call in calls]


def difference(theirs: nn.Module, ours: Twin, calls: list[dict[str, Any]]) -> tuple[float, str]:
    """Return the largest difference between the results of two layers, relative to the largest value, and what differs
    by more than the tolerance, if anything."""
    parameters, most = dict(ours.named_parameters()), 0.0
    for number, arguments in enumerate(calls):
        wanted, got = (run(layer, arguments, parameters) for layer in (theirs, ours))
        shapes, published = ([[*each.shape] for each in found[0].values()] for found in (wanted, got))
        if shapes != published:
            return most, f"its results have shapes {shapes}, those of the published layer {published}"
        if not all(bool(each.isfinite().all()) for part in wanted for each in part.values()):
            if number == 0:
                return most, "its results or gradients hold NaN or infinity: nothing to compare"
            continue  # at a parent of 0 the derivative of a published squash is NaN
        for place, (a, b) in enumerate(zip(wanted, got, strict=True)):
            apart = {name: float((a[name] - b[name]).abs().max().nan_to_num(torch.inf)) for name in a}
            worst = max(apart, key=lambda name: apart[name])
            far = apart[worst] / max(1e-30, *(float(each.abs().max()) for each in a.values()))
            if not far <= TOLERANCES[next(ours.parameters()).dtype][place > 0]:
                return far, described(worst, a[worst], b[worst])
            most = most if place else max(most, far)
    return most, ""


def run(layer: nn.Module, arguments: dict[str, Any], parameters: dict[str, nn.Parameter]) -> list[dict[str, Tensor]]:
    """Return by name the results of a call, and the gradients of a weighted sum of them: for arguments, parameters."""
    given = {name: x.clone().requires_grad_() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    leaves = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    try:
        found = layer.forward(*given.values())
        found = {"result": found} if isinstance(found, Tensor) else found
        every = found.items() if isinstance(found, dict) else ((f"result {n}", each) for n, each in enumerate(found))
        results = dict(sorted(every))
        total: Any = sum(0 * x.sum() for x in leaves.values())  # results that are cut off have gradients of 0
        for row in map(torch.flatten, results.values()):
            total = total + row @ torch.linspace(-1, 1, len(row), device="cpu").to(row)
        gradients = iter(torch.autograd.grad(total, [*leaves.values(), *parameters.values()], materialize_grads=True))
    except Exception as error:  # an unknown layer may raise anything
        who, on = "its twin" if isinstance(layer, Twin) else "it", [[*each.shape] for each in leaves.values()]
        raise Different(f"running {who} on shapes {on} failed with {one_line(error)}{ASKED}") from error
    parts = [{f"gradient of {name}": next(gradients) for name in each} for each in (leaves, parameters)]
    return [{name: each.detach() for name, each in results.items()}, *parts]


def described(name: str, theirs: Tensor, ours: Tensor) -> str:
    """Return how a tensor differs from the twin's."""
    largest, ratio = float(theirs.abs().max()), float((theirs * ours).sum() / ours.square().sum())
    if float((theirs - ratio * ours).abs().max()) <= 1e-3 * largest:
        return f"its {name} is {ratio:.3g} times the published layer's"
    if float((theirs.flatten().sort()[0] - ours.flatten().sort()[0]).abs().max()) <= 1e-3 * largest:
        return f"its {name} holds the published layer's values in another order"
    far = float((theirs - ours).abs().max())
    return f"its {name} differs by up to {far:.1e} from the published layer's, whose largest value is {largest:.1e}"
