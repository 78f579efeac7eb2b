"""Swap the layers of published capsule code inside a live model for ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.nn.published import Published, published

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far a swapped layer's result may lie from the old one's, relative to the largest: this tells another layer, not
a rounding."""


@dataclass(frozen=True)
class Conversion:
    """What happened to one layer: its path in the model, its old class, whether it was converted, and why."""

    path: str
    old: str
    converted: bool
    why: str


@dataclass
class ConversionReport:
    """What :func:`convert` did.

    Attributes
    ----------
    model : Module
        The model, its layers swapped in place; a new module only if the model itself is such a layer.
    layers : list of Conversion
        One entry a layer that looked like a candidate.
    """

    model: nn.Module
    layers: list[Conversion] = field(default_factory=list)

    @property
    def converted(self) -> list[str]:
        """Paths of the layers that now run on fastcaps."""
        return [layer.path for layer in self.layers if layer.converted]

    @property
    def left(self) -> list[str]:
        """Paths of the candidates that were left as they were."""
        return [layer.path for layer in self.layers if not layer.converted]

    def __str__(self) -> str:
        if not self.layers:
            return f"fastcaps.convert: this model has none of {', '.join(published())}"
        lines = [f"fastcaps.convert: {len(self.converted)} of {len(self.layers)} capsule layers converted"]
        width = max(len(layer.path) for layer in self.layers)
        for layer in self.layers:
            lines.append(
                f"  {layer.path:<{width}}  {'converted' if layer.converted else 'left     '}  {layer.old}: {layer.why}"
            )
        return "\n".join(lines)


def convert(model: nn.Module, *, check: bool = True, verbose: bool = False) -> ConversionReport:
    """Replace the layers of published capsule code inside ``model`` by fastcaps' own.

    :mod:`fastcaps.compat` lists them. The new layers share the old ones' parameters, submodules and hooks: an optimizer
    that holds the parameters goes on working, and checkpoints keep their keys. Candidates are found by class name, the
    layer's or that of a class it is made from, and by attributes; one that does not fit, or has methods of its own, is
    left alone.

    Parameters
    ----------
    model : Module
        Changed in place.
    check : bool
        Before a swap, run both layers on a small random input (without and with parents, where a layer takes them),
        and leave the old one if they differ. A layer that fails to run at all is swapped, and the report says so.
    verbose : bool
        Print the report, which is also what is returned.

    Returns
    -------
    ConversionReport
        What was converted, what was left, and why; ``report.model`` is the model.

    Examples
    --------
    >>> import torch
    >>> print(convert(torch.nn.Sequential(torch.nn.Linear(3, 4))))
    fastcaps.convert: this model has none of CapsuleFC, CapsuleCONV, DenseCapsule, RoutingCapsules, CapsLayer, \
DigitCaps, CapsuleLayer, ConvCaps, GenerativeMatrixRouting
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = ConversionReport(model)
    swapped: dict[int, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        found = _published_layer(module)
        if found is None:
            continue
        known, own = found
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        above, _, last = path.rpartition(".")
        new, why = swapped.get(id(module)), "the same layer as one above"
        if last == "_orig_mod":  # what torch.compile made keeps the layer's forward, whatever stands in its place
            new, why = None, "torch.compile would go on calling it: convert first, then compile"
        elif new is None:
            why = _misfit(module, known)
        if own and not why:
            why = f"its class has {', '.join(own)} of its own"
        if new is None and not why:
            new = _build(module, known)
            difference, why = _compare(module, new, known) if check else (False, "not compared, as asked")
            new = None if difference else new
        report.layers.append(Conversion(path or "(the model)", name, new is not None, why))
        if new is None:
            continue
        swapped[id(module)] = new
        if path:
            setattr(model.get_submodule(above), last, new)
        else:
            report.model = new
    if verbose:
        print(report)
    return report


def _published_layer(module: nn.Module) -> tuple[Published, list[str]] | None:
    """The published layer of a layer's class or of one that it is made from, and what the class has that the published
    one has not."""
    own: set[str] = set()
    for each in type(module).__mro__:
        found = published().get(each.__name__.removeprefix("Parametrized"))
        if found is not None:
            fitting = (known for known in found if not known.missing(module))
            return next(fitting, found[0]), sorted(name for name in own if not name.startswith("__"))
        own |= set(vars(each))
    return None


def _misfit(module: Any, known: Published) -> str:
    """Why ``module`` is not the published layer; an empty string if it is."""
    if isinstance(module, known.ours):
        return "runs on fastcaps already"
    missing = known.missing(module)
    if missing:
        return f"has no attribute {', '.join(missing)}: not the layer of the authors' code"
    wrong = known.unfit(module)
    if wrong:
        return wrong
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in known.held(module):
        if not hasattr(module, name):
            return f"has no parameter {name}: not the layer of the authors' code"
        if not isinstance(parameters.get(name), nn.Parameter):
            return f"{name} is not a plain parameter of the layer (is it parametrized?)"
    for name in known.submodules:
        inner = getattr(module, name)
        if inner._forward_hooks or inner._forward_pre_hooks:  # the twin reads what it holds, and never calls it
            return f"{name} has hooks, which nobody would call"
    others = {name for name in parameters if name.partition(".")[0] not in (*known.parameters, *known.submodules)}
    others |= {name for name, _ in module.named_buffers()} - set(known.buffers)
    if others:
        return f"holds {', '.join(sorted(others))}, which the authors' layer does not"
    try:
        with torch.device("meta"):
            wanted = dict(known.construct(module).named_parameters(remove_duplicate=False))
    except (TypeError, ValueError) as error:
        return f"its attributes do not make a layer: {error}"
    for name in known.held(module):
        shape, found = tuple(wanted[name].shape), tuple(parameters[name].shape)
        if shape != found:
            return f"{name} has shape {found} where its attributes say {shape}"
    return ""


def _build(old: nn.Module, known: Published) -> nn.Module:
    """The layer that takes the old one's place, with its parameters, submodules, hooks and mode."""
    with torch.device("meta"):  # no memory, and no draw of random numbers, for numbers that are replaced at once
        new = known.construct(old)
    known.adopt(old, new)
    new.training = old.training
    for name, value in vars(old).items():
        if "_hook" in name:  # the dicts themselves, so that handles to the hooks still remove them
            new.__dict__[name] = value
    return new


def _tensors(result: Any) -> list[Tensor] | None:
    """The tensors that a layer returned, alone, in a tuple or in a dict by name; None if it returned something else."""
    if isinstance(result, dict):
        result = [result[name] for name in sorted(result)]
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    return found if all(isinstance(tensor, Tensor) for tensor in found) else None


@torch.no_grad()
def _compare(old: nn.Module, new: nn.Module, known: Published) -> tuple[bool, str]:
    """Whether two layers differ on random input, and what to say of it."""
    weight: Tensor = getattr(new, known.parameters[0])
    if weight.device.type == "meta":
        return False, "not compared: it has no numbers yet"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator, device="cpu")  # whatever the default device
        return numbers.to(device=weight.device, dtype=weight.dtype)

    modes = {module: module.training for module in (*old.modules(), *new.modules())}
    worst = 0.0
    try:
        for module in modes:
            module.training = False
        for arguments in known.calls(new, draw):
            try:
                expected = _tensors(old.forward(*arguments))
            except Exception as error:  # whatever a stranger's layer raises, it belongs in the report
                return False, f"not compared: the old layer failed with {type(error).__name__}: {error}"
            got = _tensors(new.forward(*arguments))
            if expected is None or got is None or [t.shape for t in expected] != [t.shape for t in got]:
                return True, "its result has another shape than the authors' layer gives"
            if not all(tensor.isfinite().all() for tensor in expected):
                return False, "not compared: the old layer's results are not finite"
            for theirs, ours in zip(expected, got, strict=True):
                if not ours.isfinite().all():
                    return True, "its results are not finite where the authors' layer's are"
                size = max(float(theirs.abs().max()), 1e-30)
                worst = max(worst, float((theirs - ours).abs().max()) / size)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not worst <= TOLERANCES.get(weight.dtype, 1e-3):
        return True, f"its results differ from the authors' layer by {worst:.1e} of the largest"
    return False, f"results agree to {worst:.1e}"
