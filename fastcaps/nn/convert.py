"""Swap the layers of published capsule code inside a live model for ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.compat import ml_capsules

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
            return "fastcaps.convert: no layers named CapsuleFC or CapsuleCONV in this model"
        lines = [f"fastcaps.convert: {len(self.converted)} of {len(self.layers)} capsule layers converted"]
        width = max(len(layer.path) for layer in self.layers)
        for layer in self.layers:
            lines.append(
                f"  {layer.path:<{width}}  {'converted' if layer.converted else 'left     '}  {layer.old}: {layer.why}"
            )
        return "\n".join(lines)


def convert(model: nn.Module, *, check: bool = True, verbose: bool = True) -> ConversionReport:
    """Replace every ``CapsuleFC`` and ``CapsuleCONV`` of the authors' public code inside ``model`` by fastcaps' own.

    The new layers share the old ones' parameters, LayerNorm, Dropout and hooks: an optimizer that holds the
    parameters goes on working, and checkpoints keep their keys. Candidates are found by class name and attributes;
    one that does not fit is left alone.

    Parameters
    ----------
    model : Module
        Changed in place.
    check : bool
        Before a swap, run both layers on a small random input, without and with parents, and leave the old one if
        they differ. A layer that fails to run at all is swapped, and the report says so.
    verbose : bool
        Print the report.

    Returns
    -------
    ConversionReport
        What was converted, what was left, and why; ``report.model`` is the model.

    Examples
    --------
    >>> import torch
    >>> report = convert(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    fastcaps.convert: no layers named CapsuleFC or CapsuleCONV in this model
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    report = ConversionReport(model)
    swapped: dict[int, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        kind = _kind(module)
        if kind is None:
            continue
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        new = swapped.get(id(module))
        why = "the same layer as one above" if new is not None else _misfit(module, kind)
        if new is None and not why:
            new = _build(module, kind)
            difference, why = _compare(module, new) if check else (False, "not compared, as asked")
            new = None if difference else new
        report.layers.append(Conversion(path or "(the model)", name, new is not None, why))
        if new is None:
            continue
        swapped[id(module)] = new
        if path:
            above, _, last = path.rpartition(".")
            setattr(model.get_submodule(above), last, new)
        else:
            report.model = new
    if verbose:
        print(report)
    return report


def _kind(module: nn.Module) -> str | None:
    """The name of the authors' class that ``module`` says it is, or None."""
    name = type(module).__name__.removeprefix("Parametrized")
    return name if name in ("CapsuleFC", "CapsuleCONV") else None


def _misfit(module: nn.Module, kind: str) -> str:
    """Why ``module`` is not the authors' layer ``kind``; an empty string if it is."""
    if isinstance(module, (ml_capsules.CapsuleFC, ml_capsules.CapsuleCONV)):
        return "runs on fastcaps already"
    wanted = [
        "in_n_capsules",
        "in_d_capsules",
        "out_n_capsules",
        "out_d_capsules",
        "matrix_pose",
        "nonlinear_act",
        "drop",
    ]
    wanted += ["kernel_size", "stride"] if kind == "CapsuleCONV" else []
    missing = [name for name in wanted if not hasattr(module, name)]
    if missing:
        return f"has no attribute {', '.join(missing)}: not the layer of the authors' code"
    parameters = dict(module.named_parameters())
    if not isinstance(parameters.get("w"), nn.Parameter):
        return "w is not a plain parameter of the layer (is it parametrized?)"
    others = set(parameters) - {"w", "nonlinear_act.weight", "nonlinear_act.bias"}
    others |= {name for name, _ in module.named_buffers()}
    if others:
        return f"holds {', '.join(sorted(others))}, which the authors' layer does not"
    if not isinstance(module.nonlinear_act, nn.LayerNorm) or not isinstance(module.drop, nn.Dropout):
        return "nonlinear_act must be a LayerNorm and drop a Dropout"
    try:
        with torch.device("meta"):
            shape = tuple(_construct(module, kind).w.shape)
    except (TypeError, ValueError) as error:
        return f"its attributes do not make a layer: {error}"
    if shape != tuple(parameters["w"].shape):
        return f"w has shape {tuple(parameters['w'].shape)} where its attributes say {shape}"
    return ""


def _construct(old: Any, kind: str) -> ml_capsules.CapsuleFC | ml_capsules.CapsuleCONV:
    """A layer of ours from the old one's attributes, its numbers drawn anew."""
    names = ["in_n_capsules", "in_d_capsules", "out_n_capsules", "out_d_capsules", "matrix_pose"]
    arguments: dict[str, Any] = {name: getattr(old, name) for name in names}
    arguments["dp"] = old.drop.p
    if kind == "CapsuleFC":
        return ml_capsules.CapsuleFC(**arguments)
    arguments |= {"kernel_size": old.kernel_size, "stride": old.stride}
    return ml_capsules.CapsuleCONV(**arguments, coordinate_add=getattr(old, "coordinate_add", False))


def _build(old: Any, kind: str) -> ml_capsules.CapsuleFC | ml_capsules.CapsuleCONV:
    """The layer that takes the old one's place, with its parameters, submodules, hooks and mode."""
    with torch.device(
        "meta"
    ):  # no memory, and no draw from the random generator, for numbers that are replaced at once
        new = _construct(old, kind)
    new.w, new.nonlinear_act, new.drop = old.w, old.nonlinear_act, old.drop
    for name in ("weight_init_const", "dropout_rate", "scale"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))
    new.scale = float(new.scale)
    new.training = old.training
    for name, value in vars(old).items():
        if "_hook" in name:  # the dicts themselves, so that handles to the hooks still remove them
            new.__dict__[name] = value
    return new


@torch.no_grad()
def _compare(old: nn.Module, new: ml_capsules.CapsuleFC | ml_capsules.CapsuleCONV) -> tuple[bool, str]:
    """Whether two layers differ on a random input, and what to say of it."""
    w = new.w
    if w.device.type == "meta":
        return False, "not compared: it has no numbers yet"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device=w.device, dtype=w.dtype)

    conv = isinstance(new, ml_capsules.CapsuleCONV)
    grid = (new.kernel_size, new.kernel_size + new.stride) if isinstance(new, ml_capsules.CapsuleCONV) else ()
    children = draw(2, new.in_n_capsules, *grid, new.in_d_capsules)
    parents = draw(2, new.out_n_capsules, *((1, 2) if conv else ()), new.out_d_capsules)
    modes = {module: module.training for module in (*old.modules(), *new.modules())}
    worst = 0.0
    try:
        for module in modes:
            module.training = False
        for query in (None, parents):
            try:
                expected = old.forward(children, 0, query)
            except Exception as error:  # whatever a stranger's layer raises, it belongs in the report
                return False, f"not compared: the old layer failed with {type(error).__name__}: {error}"
            got = new.forward(children, 0, query)
            if not isinstance(expected, Tensor) or expected.shape != got.shape:
                return True, "its result has another shape than the authors' layer gives"
            size = max(float(expected.abs().max()), 1e-30)
            worst = max(worst, float((expected - got).abs().max()) / size)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not worst <= TOLERANCES.get(w.dtype, 1e-3):
        return True, f"its results differ from the authors' layer by {worst:.1e} of the largest"
    return False, f"results agree to {worst:.1e}"
