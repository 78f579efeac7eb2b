"""Swap the layers of published capsule code in an existing model for their twins."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fastcaps.checks import accumulation_dtype, known_arguments, one_line
from fastcaps.compat import batch_averaged
from fastcaps.compat.dynamic import CapsLayer, CapsuleLayer, DenseCapsule, DigitCaps, DynamicTwin, RoutingCapsules
from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting
from fastcaps.compat.matrix_capsules import ConvCaps
from fastcaps.compat.ml_capsules import CapsuleCONV, CapsuleFC
from fastcaps.compat.slim_capsules import ConvSlimCapsule2D, ConvSlimCapsule3D, DeconvSlimCapsule2D, DeconvSlimCapsule3D
from fastcaps.compat.twin import PRIMARY, Twin

_KINDS = (
    *(CapsuleFC, CapsuleCONV, DenseCapsule, RoutingCapsules, CapsLayer, DigitCaps, CapsuleLayer, ConvCaps),
    GenerativeMatrixRouting,
    *(ConvSlimCapsule2D, ConvSlimCapsule3D, DeconvSlimCapsule2D, DeconvSlimCapsule3D),
)
TWINS: dict[str, tuple[type[Twin], ...]] = {kind.__name__: (kind,) for kind in _KINDS}
TWINS["DigitCaps"] += (RoutingCapsules, batch_averaged.DigitCaps)  # many copies of Havir's layer have this name
TWINS["CapsuleLayer"] += (batch_averaged.CapsuleLayer, batch_averaged.RoutedCapsuleLayer)
"""The twins by the names of the published classes; several implementations may use the same name."""

_one_at_a_time = threading.RLock()

TOLERANCES = {torch.float64: (1e-6, 1e-4), torch.float32: (1e-3, 5e-2)}
"""The largest difference between the results of a twin and the old layer, and between their gradients, relative to the
largest value: far above rounding, but below what another layer would give."""

CONVERTED = ("compared", "not compared")
"""Outcomes for a layer that was converted."""

UNCOUNTED = {"ours": "ran on fastcaps before", "no routing": "without routing"}
"""Outcomes for a layer that there is no reason to convert, and what the report's head says of them."""

HARMLESS = ("__init__", "__repr__", "__annotate__", "__annotate_func__")
"""Methods that a subclass of a published class may add."""


@dataclass(frozen=True)
class Conversion:
    """The outcome for one layer: its path in the model, its old class, what happened, and why.

    ``outcome`` is "compared" or "not compared" if the layer was converted, "ours" if it ran on fastcaps before, "no
    routing" if it is a layer of primary capsules, which is a convolution, "differs" if its results or gradients differ
    from the twin's, else "left".
    """

    path: str
    old: str
    outcome: str
    why: str

    @property
    def converted(self) -> bool:
        """Whether the layer was converted."""
        return self.outcome in CONVERTED


@dataclass
class ConversionReport:
    """The outcome of :func:`convert`.

    Attributes
    ----------
    model : Module
        The model itself.
    layers : list of Conversion
        One entry per candidate.
    """

    model: nn.Module
    layers: list[Conversion] = field(default_factory=list)

    @property
    def converted(self) -> list[str]:
        """Paths of the layers that now run on fastcaps."""
        return [layer.path for layer in self.layers if layer.converted]

    @property
    def left(self) -> list[str]:
        """Paths of the routing layers that still run the published code."""
        return [layer.path for layer in self.layers if layer.outcome not in (*CONVERTED, *UNCOUNTED)]

    def __str__(self) -> str:
        if not self.layers:
            hint = "for another class pass as_={TheirClass: fastcaps.compat.DenseCapsule}, or another twin"
            return f"fastcaps.convert: found no layer by its class's name; {hint}. Known names: {', '.join(TWINS)}"
        outcomes = [layer.outcome for layer in self.layers]
        others = sum(outcome not in UNCOUNTED for outcome in outcomes)
        head = f"{len(self.converted)} of {others} capsule layers converted" if others else "nothing to convert"
        head += f", {unseen} of them not compared" if (unseen := outcomes.count("not compared")) else ""
        head += "".join(f", {outcomes.count(one)} {said}" for one, said in UNCOUNTED.items() if one in outcomes)
        width = max(len(layer.path) for layer in self.layers)
        states = ["converted" if each in CONVERTED else each for each in outcomes]
        rows = zip(self.layers, states, strict=True)
        lines = (f"  {layer.path:<{width}}  {state:<10}  {layer.old}: {layer.why}" for layer, state in rows)
        return "\n".join((f"fastcaps.convert: {head}", *lines))


@known_arguments
def convert(
    model: nn.Module,
    *,
    as_: Mapping[type[nn.Module], type[Twin]] | None = None,
    check: bool = True,
    verbose: bool = False,
) -> ConversionReport:
    """Make the layers of published capsule code inside ``model`` run on fastcaps' kernels; return a report.

    :mod:`fastcaps.compat` lists the layers. A layer stays the same object and changes its class: parameters,
    submodules, hooks and attributes stay, so optimizers and checkpoints keep working. Candidates are found by the name
    of their class or of a base class, and by their attributes. A candidate that does not fit, or whose class adds
    methods, is left unchanged. Layers that the model holds only in a plain list are not found. A stored reference to
    the old ``forward`` method still runs the published code, and fails if that calls other methods of its class. If a
    layer has several public versions, the one whose results agree is used.

    Parameters
    ----------
    model : Module
        Changed in place.
    as_ : mapping of type to type, optional
        Twins for classes with other names than the published ones, such as ``{TheirClass: DenseCapsule}``. The
        attributes must have the published names, except for :class:`DenseCapsule`: its sizes are guessed from the
        layer's only parameter, with dimensions in the order mied, imed, imde or mide (i children, m parents, d and e
        numbers of their poses), and its gradient may flow through all iterations. A guess is compared even with
        ``check=False``, and a layer that fails to run is left unchanged.
    check : bool
        First compare the layer and its twin on random inputs (small and large; without and with parents if it takes
        them; half types in float32), and leave it unchanged if results or gradients differ. A layer that cannot run is
        converted, and the report says so. Both run in evaluation mode, so a call of ``F.dropout`` that a copy added is
        lost. False uses the version that the layer's authors maintain.
    verbose : bool
        Print the report.

    Returns
    -------
    ConversionReport
        The layers that were converted, or were not, and why; ``report.model`` is the model.

    Examples
    --------
    >>> import torch
    >>> print(convert(torch.nn.Sequential(torch.nn.Linear(3, 4))))
    fastcaps.convert: found no layer by its class's name; for another class pass \
as_={TheirClass: fastcaps.compat.DenseCapsule}, or another twin. Known names: CapsuleFC, CapsuleCONV, DenseCapsule, \
RoutingCapsules, CapsLayer, DigitCaps, CapsuleLayer, ConvCaps, GenerativeMatrixRouting, ConvSlimCapsule2D, \
ConvSlimCapsule3D, DeconvSlimCapsule2D, DeconvSlimCapsule3D
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    given = {} if as_ is None else as_
    if not isinstance(given, Mapping):
        raise TypeError(f"as_ must map classes to classes of fastcaps.compat, got {one_line(as_)}")
    for theirs, kind in given.items():
        if not (isinstance(theirs, type) and isinstance(kind, type) and issubclass(kind, Twin)):
            raise TypeError(f"as_ must map classes to classes of fastcaps.compat, got {theirs!r}: {kind!r}")
    report = ConversionReport(model)
    with _one_at_a_time:  # comparisons change modes and biases, and put them back
        _convert(model, given, check, report)
    if verbose:
        print(report)
    return report


def _convert(model: nn.Module, given: Mapping[type, type[Twin]], check: bool, report: ConversionReport) -> None:
    """Convert the layers of ``model``, and add what became of each candidate to the report."""
    for path, module in list(model.named_modules()):
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        try:
            found = _candidate(module, given)
            if found is None:
                continue
            new, outcome, why = _replacement(module, *found, check)
            if new is not None:  # give the layer the twin's class, and the attributes that the twin reads
                module.__class__ = type(new)
                vars(module).update({key: value for key, value in vars(new).items() if key not in vars(nn.Module())})
        except Exception as error:  # a property of an unknown layer may raise anything
            outcome, why = "left", f"reading or running it failed with {_named(error)}"
        report.layers.append(Conversion(path or "(the model)", name, outcome, why))


def _candidate(module: nn.Module, given: Mapping[type, type[Twin]]) -> tuple[type[Twin], list[str]] | None:
    """Return the twin of a layer's class or base class, and the methods that the class adds."""
    added: set[str] = set()
    for each in type(module).__mro__:
        if each in given:
            return given[each], sorted(added)
        if found := TWINS.get(each.__name__.removeprefix("Parametrized")):
            return next((kind for kind in found if not _missing(module, kind)), found[0]), sorted(added)
        for name, value in vars(each).items():
            harmless = name.startswith("__") and (name in HARMLESS or not isinstance(value, FunctionType))
            added |= set() if harmless and name != "__call__" else {name}
    return None


def _missing(module: nn.Module, kind: type[Twin]) -> list[str]:
    """Return the attributes of a published layer that ``module`` lacks."""
    return [name for name in kind._known_by if not hasattr(module, name)]


def _replacement(module: nn.Module, kind: type[Twin], added: list[str], check: bool) -> tuple[Twin | None, str, str]:
    """Return the twin that replaces a layer, or None, the outcome and why; ``added``: methods that its class adds."""
    if isinstance(module, Twin):
        return None, "ours", "runs on fastcaps already"
    renamed = kind._renamed(module) if _missing(module, kind) else []
    said = []
    for options in renamed or kind._versions:
        new = _twin(module, kind, options)
        if isinstance(new, str):
            return None, "no routing" if new is PRIMARY else "left", new
        if added:
            return None, "left", f"its class has {', '.join(added)} of its own"
        new._adopt(module)
        if not check and not renamed:
            return new, "not compared", "not compared, as asked"
        outcome, why = _compare(module, new, guessed=bool(renamed))
        if outcome in CONVERTED:
            return new, outcome, ", ".join([why, *(f"{name}={value}" for name, value in options.items())])
        said.append((outcome, why))
    # with a wrong guess of the dimensions the layer's own error says nothing of interest
    outcome, why = min(said, key=lambda each: (each[0] != "differs", each[1].startswith("not compared")))
    if renamed and outcome != "differs":
        name, orders = renamed[0]["stored"][0], dict.fromkeys(each["stored"][1].strip("1") for each in renamed)
        shape = [*module.get_parameter(name).shape]
        why = f"none of the orders {', '.join(orders)} fits its {name} {shape} ({_AXES}): {why}"
    return None, outcome, why


_AXES = "i children, m parents, d and e numbers of their poses"


def _unnamed(module: nn.Module) -> str:
    """Return why a layer without the published attributes cannot be a :class:`DenseCapsule`."""
    shapes = [f"{name} {[*each.shape]}" for name, each in module.named_parameters()]
    if len(shapes) == 1:
        return f"its {shapes[0].replace(' ', ' has shape ', 1)}, want four dimensions, for {_AXES}"
    several = f"{len(shapes)} parameters, {' and '.join([', '.join(shapes[:-1]), shapes[-1]])}" if shapes else ""
    return f"has {several or 'no parameters'}; DenseCapsule has one"


def _twin(module: Any, kind: type[Twin], options: dict[str, Any]) -> Twin | str:
    """Return a twin of ``module``, newly initialised; or why that is not the published layer with such ``options``."""
    given = {name: value for name, value in vars(module).items() if name != "_compiled_call_impl"}  # it recompiles
    replaced = [name for name, value in given.items() if callable(value) and hasattr(kind, name)]
    if replaced:
        return f"its {', '.join(replaced)} was replaced on the layer itself"
    if (missing := _missing(module, kind)) and not options.keys() >= {*missing}:
        if kind is DenseCapsule:
            return _unnamed(module)
        note = f"; for dynamic routing of your own pass as_={{{type(module).__name__}: fastcaps.compat.DenseCapsule}}"
        dynamic = issubclass(kind, DynamicTwin)
        return f"has no attribute {', '.join(missing)}: not the layer of the authors' code{note * dynamic}"
    if wrong := kind._unfit(module):
        return wrong
    try:
        with torch.device("meta"):  # no memory and no random draw for values that are replaced at once
            twin = kind._like(module, **options)
    except (AttributeError, TypeError, ValueError) as error:
        return f"its attributes do not fit a layer: {error}"
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, wanted in twin.named_parameters(recurse=False, remove_duplicate=False):
        if name not in parameters:
            return f"has no plain parameter {name} (is it parametrized?)"
        if parameters[name].shape != wanted.shape:
            return f"{name} has shape {tuple(parameters[name].shape)} where its attributes say {tuple(wanted.shape)}"
    drops = [name for name, each in module.named_modules() if isinstance(each, _DropoutNd) and each.p > 0]
    if drops := [name for name in drops if name.partition(".")[0] not in twin._modules]:
        return f"holds {', '.join(drops)}: dropout, which the authors' layer does not have"
    for name in twin._modules:
        inner = getattr(module, name)
        # the twin reads what it holds, and never calls it
        if any(each._forward_hooks or each._forward_pre_hooks for each in inner.modules()):
            return f"{name} has hooks, which would not be called"
    others = {name for name in parameters if name.partition(".")[0] not in (*twin._parameters, *twin._modules)}
    others |= {name for name, _ in module.named_buffers()} - {*twin._buffers}
    return f"holds {', '.join(sorted(others))}, which the authors' layer does not" if others else twin


class _Verdict(Exception):
    """Ends a comparison early: the outcome and why."""


def _compare(old: nn.Module, new: Twin, guessed: bool = False) -> tuple[str, str]:
    """Return the outcome of comparing two layers' results on random inputs, and why.

    A guessed layer is left if they cannot be compared.
    """
    weight = next(new.parameters())
    if weight.device.type == "meta":
        return "left" if guessed else "not compared", "not compared: its parameters have no values yet"
    modes = {module: module.training for module in (*old.modules(), *new.modules())}
    generator, far = torch.Generator("cpu"), 0.0

    def draw(*shape: int, size: float = 0.5) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cpu") * size).to(weight)

    # published layers call it, and are compared without a GPU, too; other threads' calls go on as usual
    moved, here = Tensor.cuda, None if torch.cuda.is_available() else threading.get_ident()

    def cuda(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return tensor if threading.get_ident() == here else moved(tensor, *arguments, **options)

    around = ExitStack()
    try:
        around.enter_context(torch.inference_mode(False))
        around.enter_context(_copied_parameters(modes))
        weight = next(new.parameters())
        around.enter_context(mock.patch.object(Tensor, "cuda", cuda))
        around.enter_context(torch.autocast(weight.device.type, enabled=False))
        around.enter_context(torch.random.fork_rng([weight.device] if weight.is_cuda else []))
        for module in modes:
            module.training = False
        # before training biases are equal, which hides what a formula does with them: they are compared with noise, too
        flat = [each for each in new.parameters() if each.numel() and bool((each == each.flatten()[0]).all())]
        for noisy in (False, True) if flat else (False,):
            if noisy:
                generator.manual_seed(0)
                for each in flat:
                    each.data += draw(*each.shape).to(each)
            for size in new._sizes:
                generator.manual_seed(0)
                for arguments in new._calls(partial(draw, size=size)):
                    far = max(far, _apart(old, new, weight.dtype, arguments, not noisy and size == new._sizes[0]))
    except _Verdict as verdict:
        outcome, why = verdict.args
        return "left" if guessed and outcome in CONVERTED else outcome, why
    finally:
        around.close()
        for module, mode in modes.items():
            module.training = mode
    return "compared", f"results agree to {far:.1e}"


@contextmanager
def _copied_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules use copies of their parameters and buffers, which have no hooks; those of half types in float32.

    The gradients of half types are too coarse to compare, and inference tensors have none.
    """
    holders = [holder for module in modules for holder in (module._parameters, module._buffers)]
    kept: list[dict[str, Any]] = [dict(holder) for holder in holders]
    copies: dict[int, Any] = {}
    for holder in kept:
        for value in holder.values():
            if isinstance(value, Tensor) and id(value) not in copies:
                wide = value.detach().to(accumulation_dtype(value.dtype), copy=True)
                copies[id(value)] = nn.Parameter(wide, value.requires_grad) if isinstance(value, nn.Parameter) else wide
    try:
        for holder, values in zip(holders, kept, strict=True):
            holder.update({name: copies.get(id(value)) for name, value in values.items()})
        yield
    finally:
        for holder, values in zip(holders, kept, strict=True):
            holder.update(values)


def _apart(old: nn.Module, new: nn.Module, dtype: torch.dtype, arguments: tuple[Any, ...], finite: bool) -> float:
    """Return the largest difference between the results of one call, relative to the largest value."""
    with torch.no_grad():
        try:
            expected = _tensors(old.forward(*arguments))
        except Exception as error:  # an unknown layer may raise anything, which belongs in the report
            on = ", ".join(str([*each.shape]) for each in arguments if isinstance(each, Tensor))
            why = f"not compared: its forward failed with {_named(error)}, on {on}"
            raise _Verdict("not compared", why) from error
        got = _tensors(new.forward(*arguments))
    if expected is None or got is None or [t.shape for t in expected] != [t.shape for t in got]:
        theirs, ours = (", ".join(str([*one.shape]) for one in each or ()) or "none" for each in (expected, got))
        raise _Verdict("left", f"its result has shape {theirs}, that of the authors' layer {ours}")
    if not all(bool(tensor.isfinite().all()) for tensor in expected):
        if finite:
            raise _Verdict("left", "its results hold NaN or infinity: nothing to compare")
        return 0.0
    far = max(_distance([a], [b]) for a, b in zip(expected, got, strict=True))
    limit, gradient_limit = TOLERANCES[dtype]
    if not far <= limit:
        raise _Verdict("differs", f"its results differ from the authors' layer by {far:.1e} of the largest")
    try:
        shared = [each for each in new.parameters() if each.requires_grad]
        wanted = _gradients(old, arguments, shared)
    except Exception as error:
        raised = f"its gradients failed with {_named(error)}"
        raise _Verdict("compared", f"results agree to {far:.1e}; {raised}") from error
    if not finite and not all(bool(tensor.isfinite().all()) for tensors in wanted for tensor in tensors):
        return far  # at a parent of 0 the derivative of a published squash is NaN
    apart = max(map(_distance, wanted, _gradients(new, arguments, shared)))
    if not apart <= gradient_limit:
        raise _Verdict("differs", f"its gradients differ from the authors' layer by {apart:.1e} of the largest")
    return far


def _named(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _tensors(result: Any) -> list[Tensor] | None:
    """Return the tensors of a result, which may be one, a tuple, or a dict; None if it holds anything else."""
    if isinstance(result, dict):
        result = [result[name] for name in sorted(result)]
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    return found if all(isinstance(tensor, Tensor) for tensor in found) else None


def _distance(theirs: list[Tensor], ours: list[Tensor]) -> float:
    """Return the largest difference between tensors, relative to their largest value; infinity for a NaN."""
    far = [float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True)]
    if any(map(math.isnan, far)):  # max would ignore it
        return math.inf
    return max(far, default=0.0) / max([1e-30, *(float(tensor.abs().max()) for tensor in theirs)])


def _gradients(layer: nn.Module, arguments: tuple[Any, ...], shared: list[nn.Parameter]) -> tuple[list[Tensor], ...]:
    """Return the gradients of a weighted sum of a layer's results: for tensors among its arguments, and parameters."""
    with torch.enable_grad():
        copies = [each.clone().requires_grad_() if isinstance(each, Tensor) else each for each in arguments]
        leaves = [each for each in copies if isinstance(each, Tensor)]
        rows = [result.flatten() for result in _tensors(layer.forward(*copies)) or []]
        total = torch.stack([row @ torch.linspace(-1, 1, len(row), device="cpu").to(row) for row in rows]).sum()
        found = torch.autograd.grad(total, [*leaves, *shared], materialize_grads=True)
    return [*found[: len(leaves)]], [*found[len(leaves) :]]
