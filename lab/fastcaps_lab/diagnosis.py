""":func:`fastcaps_lab.diagnose`: dead capsules, routing entropy and gradient norms of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps.nn import DynamicRouting, InvertedAttentionRouting
from fastcaps_lab.inside import Inside, watched


@dataclass(frozen=True)
class LayerDiagnosis:
    """The diagnosis of one layer; :func:`diagnose` has the equations."""

    path: str  # in the model
    layer: str  # its class
    measured_by: str  # a parent's strength: "activation", "length", "relative length" or "share"
    strengths: tuple[float, ...]  # the maximum over batch and positions, of each parent (type, on a grid)
    dead: tuple[int, ...]  # the parents whose strength is below the threshold, or NaN
    compete: str  # "parents" or "children", over which coefficients add up to 1; empty without coefficients
    entropy: float | None  # of the coefficients: 0 if each child goes to one, 1 if all are equal; None without a choice
    weight_gradient: float | None  # norms of the loss's gradients; None without a loss or without gradients
    parent_gradient: float | None


@dataclass(frozen=True)
class Diagnosis:
    """The result of :func:`diagnose`. It prints as a table, and ``dataclasses.asdict`` returns it for ``json.dumps``.

    In the table, "by" is the measure of a parent's strength, and "grad θ" and "grad v" are the norms of the gradients
    of the layer's parameters and results.
    """

    layers: tuple[LayerDiagnosis, ...]  # in the order in which they ran
    samples: int  # in the batch
    threshold: float  # of dead parents
    loss: float | None = None  # of the batch

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        title = f"{self.samples} sample{'' if self.samples == 1 else 's'}{loss}; dead: below {self.threshold:g}"
        rows = [("layer", "class", "parents", "dead", "by", "entropy", "grad θ", "grad v")]
        for each in self.layers:
            values = (each.entropy, ".3f"), (each.weight_gradient, ".2e"), (each.parent_gradient, ".2e")
            entropy, *gradients = ("" if value is None else format(value, form) for value, form in values)
            counts = str(len(each.strengths)), str(len(each.dead))
            rows.append((each.path, each.layer, *counts, each.measured_by, entropy, gradients[0], gradients[1]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([title, *lines])


def diagnose(
    model: nn.Module, batch: Any, *, loss: Callable[[Any, Any], Tensor] | None = None, threshold: float = 0.01
) -> Diagnosis:
    r"""Return dead capsules, routing entropy and gradient norms of every capsule layer of ``model`` in one batch.

    Let m be a parent (on a grid, a parent type at any position l), i its children, :math:`g_i` their gates (their
    activations, the sigmoid of their scores, or 1) and :math:`r_{im}` the coefficients of the last iteration.

    **Dead capsules.** A parent is dead if its strength is NaN, or stays below the threshold in the whole batch,

    .. math:: \max_{b,l}\; \text{strength}_{blm} < \text{threshold}.

    The strength is the *activation* if the layer returns one (or the sigmoid of the score); else, if poses are
    squashed, their *length* :math:`\lVert v_m \rVert`, which the routing reads as a probability. Inverted attention
    normalises its poses, so their lengths say nothing: the strength is the parent's *share* of the children,
    :math:`M \sum_i g_i r_{im} / \sum_i g_i`, which is 1 if all parents get the same. Otherwise (routing as pooling,
    whose lengths have no bound, and attention without LayerNorm) it is the *relative length*,
    :math:`\lVert v_m \rVert` over the longest of the layer.

    **Routing entropy.** If parents compete for a child: the mean over samples, positions and children, weighted by
    their gates, of

    .. math:: H_i = -\frac{1}{\ln M} \sum_m r_{im} \ln r_{im};

    in a leaky routing the leak counts as one more parent. If children compete for a parent: the mean over samples,
    positions and parents of :math:`H_m = -\sum_i r_{im} \ln r_{im} / \ln n`, where n children have a coefficient above
    0. 1 means that all coefficients are equal, 0 means a tree. None if there is only one to choose, and for layers
    without coefficients.

    **Gradient norms.** :math:`\lVert \partial L / \partial \theta \rVert_2` over all parameters of the layer, and
    :math:`\lVert \partial L / \partial v \rVert_2` over its last results, poses and activations (scores) together.

    The model has layers of :mod:`fastcaps.nn`, or is one, and runs in evaluation mode. Each layer runs once more for
    its coefficients, which take one value per pair of child and parent. Modes, hooks and ``.grad`` are restored. The
    batch is the model's inputs, a tensor or a tuple of several, or these and the loss's target. ``loss(output,
    target)`` returns a scalar; by default it is cross-entropy if there is a target, and without either there are no
    gradients. Parents below ``threshold`` are dead. ValueError if no capsule layer runs, or the batch has no sample.

    Examples
    --------
    >>> import torch, fastcaps_lab
    >>> net = fastcaps_lab.models.create("digits")
    >>> found = fastcaps_lab.diagnose(net, (torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])))
    >>> [(layer.path, len(layer.strengths), layer.compete) for layer in found.layers]
    [('routing.layers.0', 8, 'parents'), ('routing.layers.1', 10, 'parents')]
    """
    inputs, target = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    if loss is None and target is not None:
        loss = F.cross_entropy
    given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if (samples := next(len(each) for each in given if isinstance(each, Tensor))) == 0:
        raise ValueError("batch must hold a sample, got none")
    with watched(model) as calls:
        with torch.set_grad_enabled(loss is not None):
            found = model(*given)
            value = None if loss is None else loss(found, target)
        seen = calls()
        if not seen:
            raise ValueError(f"model must have a capsule layer of fastcaps.nn that runs, got {type(model).__name__}")
        gradients = _gradients(value, seen)
        layers = tuple(_look(each, threshold, gradients) for each in seen)
    return Diagnosis(layers, samples, threshold, None if value is None else float(value.detach()))


def _gradients(value: Tensor | None, seen: list[Inside]) -> dict[Tensor, Tensor]:
    """Return the loss's gradients of the layers' parameters and results, 0 for those that it does not depend on."""
    wanted = [each for one in seen for each in (*one.layer.parameters(), *one.returned) if each.requires_grad]
    if value is None or not wanted or not value.requires_grad:
        return {}
    return dict(zip(wanted, torch.autograd.grad(value, wanted, materialize_grads=True), strict=True))


def _norm(gradients: dict[Tensor, Tensor], tensors: Iterable[Tensor]) -> float | None:
    """Return the norm of the gradients of several tensors together; None if there are none."""
    found = [gradients[each].double() for each in tensors if each in gradients]
    return float(torch.nn.utils.get_total_norm(found)) if found else None


@torch.no_grad()
def _look(one: Inside, threshold: float, gradients: dict[Tensor, Tensor]) -> LayerDiagnosis:
    compete, entropy, gated = "", None, None
    if one.routes:
        shares, given = one.coefficients().double(), one.gates()
        gates = (shares.sum(-1) != 0).double() if given is None else given.double().expand(shares.shape[:-1])
        compete, gated = one.layer.compete, shares * gates[..., None]
        entropy = _entropy(shares, gates, compete, bool(getattr(one.layer, "leaky", False)))
    measured_by, strength = _strength(one, gated)
    greatest = strength.amax((0, 2)).tolist()
    return LayerDiagnosis(
        one.path or "(the model)",
        type(one.layer).__name__,
        measured_by,
        tuple(greatest),
        tuple(index for index, each in enumerate(greatest) if not each >= threshold),  # NaN, too
        compete,
        entropy,
        _norm(gradients, one.layer.parameters()),
        _norm(gradients, one.returned),
    )


def _strength(one: Inside, gated: Tensor | None) -> tuple[str, Tensor]:
    """Return the measure of a parent's strength and the strengths ``[B, M, places]``, from coefficients times gates."""
    if one.activations is not None:
        return "activation", one.activations
    layer = one.layer
    if isinstance(layer, InvertedAttentionRouting) and layer.norm is not None:
        assert gated is not None
        there = gated.sum((-2, -1))[..., None].clamp_min(torch.finfo(gated.dtype).tiny)
        return "share", (gated.sum(-2) * gated.shape[-1] / there).flatten(1, 2).transpose(1, 2)
    lengths = one.parents.double().norm(dim=-1)
    squashed = isinstance(layer, DynamicRouting) or getattr(layer, "activation", None) == "squash"
    if squashed:
        return "length", lengths
    return "relative length", lengths / lengths.nan_to_num(0.0).amax().clamp_min(torch.finfo(lengths.dtype).tiny)


def _entropy(shares: Tensor, gates: Tensor, compete: str, leaky: bool) -> float | None:
    """Return the mean entropy of coefficients ``[B, Ho, Wo, I, M]``, divided by its maximum."""
    if compete == "children":
        choices = (shares != 0).sum(-2)  # [B, Ho, Wo, M]; a NaN shows in the result
        entropy = -torch.special.xlogy(shares, shares).sum(-2) / choices.clamp_min(2).log()
        return float(entropy[choices > 1].mean()) if bool((choices > 1).any()) else None
    if leaky:
        shares = torch.cat([shares, (1 - shares.sum(-1, keepdim=True)).clamp_min(0)], dim=-1)
    if shares.shape[-1] == 1 or bool(gates.sum() == 0):
        return None
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(shares.shape[-1])
    return float((entropy * gates).sum() / gates.sum())
