"""Swap the layers of published capsule code in an existing model for their twins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fastcaps.checks import known_arguments, one_line
from fastcaps.compat import batch_averaged, dynamic, heinsen_routing, matrix_capsules, ml_capsules, slim_capsules
from fastcaps.compat.compare import Different, compare
from fastcaps.compat.twin import Twin

_KINDS = (
    *(dynamic.DenseCapsule, dynamic.RoutingCapsules, dynamic.CapsLayer, ml_capsules.CapsuleFC, ml_capsules.CapsuleCONV),
    *(matrix_capsules.ConvCaps, heinsen_routing.GenerativeMatrixRouting, slim_capsules.ConvSlimCapsule2D),
    *(slim_capsules.ConvSlimCapsule3D, slim_capsules.DeconvSlimCapsule2D, slim_capsules.DeconvSlimCapsule3D),
)
TWINS: dict[str, tuple[type[Twin], ...]] = {
    **{kind.__name__: (kind,) for kind in _KINDS},
    "DigitCaps": (dynamic.DigitCaps, dynamic.RoutingCapsules, batch_averaged.DigitCaps),
    "CapsuleLayer": (dynamic.CapsuleLayer, batch_averaged.CapsuleLayer, batch_averaged.RoutedCapsuleLayer),
}
"""The twins by the names of the published classes; attributes tell apart those of one name."""


@dataclass
class ConversionReport:
    """The outcome of :func:`convert` for every layer of a known class: reasons by the layers' paths in the model.

    Attributes
    ----------
    converted : dict of str to str
        Layers that now run on fastcaps, with their old classes.
    left : dict of str to str
        Layers left alone, which still run the published code.
    needless : dict of str to str
        Layers that run on fastcaps already, or route nothing.
    absent : list of str
        The classes named by hand of which the model holds no layer.
    """

    model: nn.Module
    converted: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        states = {"converted": self.converted, "left alone": self.left, "no need": self.needless}
        layers, count = {**self.converted, **self.left, **self.needless}, len(self.converted) + len(self.left)
        head = f"{len(self.converted)} of {count} layers converted" if count else "nothing to convert"
        head += "" if layers else f"; as_={{Class: its twin}} adds a class to {', '.join(TWINS)}"
        width = max(map(len, layers), default=0)
        every = ((path, state, why) for state, each in states.items() for path, why in each.items())
        rows = [f"  {path:<{width}}  {state:<10}  {why}" for path, state, why in every]
        rows += [f"  as_ names {name}, but the model holds no layer of this class" for name in self.absent]
        return "\n".join((f"fastcaps.convert: {head}", *rows))


@known_arguments
def convert(
    model: nn.Module, *, as_: Mapping[type[nn.Module], type[Twin]] | None = None, check: bool = True
) -> ConversionReport:
    """Make the layers of published capsule code inside ``model`` run on fastcaps' kernels; return a report.

    :mod:`fastcaps.compat` lists the layers. They are found by the name of their class or of a base class, and by their
    attributes; not in a plain list. Each layer and its twin first run on random inputs, small and large, with copies of
    the parameters (half types in float32). A layer whose results or gradients differ, or that cannot run, is left
    alone. Then each of the others changes its class, and stays the same object: parameters, submodules, hooks and
    attributes stay, so optimizers and checkpoints keep working. A stored reference to the old ``forward`` method still
    runs the published code, and fails if that calls other methods of its class.

    Parameters
    ----------
    model : Module
        Changed in place.
    as_ : mapping of type to type, optional
        Twins for classes with other names than the published ones, such as ``{TheirClass: DenseCapsule}``. Attributes
        and parameters must have the published names.
    check : bool
        False converts without running, also layers that fail to run, or are on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    given = {} if as_ is None else as_
    pairs: Any = [*given.items()] if isinstance(given, Mapping) else [(None, None)]
    if not all(isinstance(one, type) and isinstance(kind, type) and issubclass(kind, Twin) for one, kind in pairs):
        raise TypeError(f"as_ must map classes to classes of fastcaps.compat, got {one_line(as_)}")
    table: dict[Any, tuple[type[Twin], ...]] = {**TWINS, **{one: (kind,) for one, kind in pairs}}
    report, swaps = ConversionReport(model), []
    for path, module in model.named_modules():
        mro = type(module).__mro__
        known = [(each, table[key]) for each in mro for key in (each, each.__name__) if key in table]
        if not known:
            continue
        published, twins = known[0]
        try:
            if isinstance(module, Twin):
                found, why = report.needless, "runs on fastcaps already"
            elif any(not _missing(module, kind) and not kind._routes(module) for kind in twins):
                found, why = report.needless, "makes primary capsules by convolutions, routes nothing"
            else:
                kind = min(twins, key=lambda kind: len(_missing(module, kind)))
                twin, why = _agreeing(module, kind, mro[: mro.index(published)], check)
                found = report.converted
                swaps.append((module, twin))
        except Exception as error:  # a property of an unknown layer may raise anything
            found = report.left
            why = str(error) if isinstance(error, Different) else f"reading it failed with {one_line(error)}"
        found[path or "(the model)"] = f"{type(module).__module__}.{type(module).__qualname__}: {why}"
    held = {each for module in model.modules() for each in type(module).__mro__}
    report.absent = [each.__qualname__ for each in given if each not in held]
    for module, twin in swaps:  # give the layer the twin's class, and the attributes that the twin reads
        module.__class__ = type(twin)
        vars(module).update({key: value for key, value in vars(twin).items() if key not in vars(nn.Module())})
    return report


def _missing(module: nn.Module, kind: type[Twin]) -> list[str]:
    """Return the attributes of a published layer that ``module`` lacks."""
    return [name for name in kind._known_by if not hasattr(module, name)]


def _agreeing(module: nn.Module, kind: type[Twin], made: tuple[type, ...], check: bool) -> tuple[Twin, str]:
    """Return the twin that agrees with a layer, and how closely; ``made``: classes made from the published one."""
    refused = []
    for options in kind._versions:
        twin, version = _twin(module, kind, made, options), [f"{name}={value}" for name, value in options.items()]
        try:
            return twin, ", ".join([compare(module, twin) if check else "not compared", *version])
        except Different as difference:
            refused.append(difference)
    raise refused[0]


def _twin(module: Any, kind: type[Twin], made: tuple[type, ...], options: dict[str, Any]) -> Twin:
    """Return a twin with a layer's parameters; raise if the layer does not hold what the published one does."""
    if missing := _missing(module, kind):
        raise Different(f"has no attribute {', '.join(missing)}: not the layer that {kind.__name__} follows")
    try:
        with torch.device("meta"):  # no memory and no random draw for values that are replaced at once
            twin = kind._like(module, **options)
    except (AttributeError, TypeError, ValueError) as error:
        raise Different(f"its attributes do not fit a layer: {error}") from error
    held = dict(module.named_parameters(remove_duplicate=False))
    wanted = dict(twin.named_parameters(recurse=False, remove_duplicate=False))
    known = (*twin._parameters, *twin._modules, *twin._buffers)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    attributes = [(name, value) for each in made for name, value in vars(each).items()]
    added = {name for name, value in attributes if isinstance(value, FunctionType) or not name.startswith("__")}
    for why, names in {
        "parameter {} is absent (is it parametrized?)": [name for name in wanted if name not in held],
        "shape of {}": [
            f"{name} is {[*held[name].shape]}, where its attributes say {[*wanted[name].shape]}"
            for name in wanted
            if held.get(name, wanted[name]).shape != wanted[name].shape
        ],
        "it holds {}, which the published layer does not": [
            name for name in (*held, *dict(module.named_buffers())) if name.partition(".")[0] not in known
        ],
        "it has {} of its own, which would hide the twin's": [
            name
            for name in vars(module).keys() - vars(twin).keys() - {"_compiled_call_impl"}  # which compiles again
            if hasattr(kind, name) and not isinstance(getattr(kind, name), property)
        ],
        "its {} has hooks, which the twin would not call": [
            name for name, each in module.named_modules() if name and any(getattr(each, hook) for hook in hooks)
        ],
        "its class adds {}, which the twin would lose": sorted(
            added - {"__init__", "__repr__", "__annotate__", "__annotate_func__"}
        ),
    }.items():
        if names:
            raise Different(why.format(", ".join(names)))
    twin._adopt(module)
    return twin
