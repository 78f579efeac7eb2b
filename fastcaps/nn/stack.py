"""A stack of routing layers, routed concurrently or sequentially."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastcaps.checks import check_choice, check_count, check_pair, known_arguments, one_line, require_tensor
from fastcaps.nn.inverted_attention import InvertedAttentionRouting
from fastcaps.nn.layer import Pair, RoutingLayer
from fastcaps.nn.poses import arguments, arguments_repr
from fastcaps.results import Capsules, Gaussians, Routed

Parents = Tensor | Capsules | Gaussians
Read = tuple[Tensor, Tensor | None]
"""Poses, and their activations or scores."""
Parts = tuple[Tensor, Tensor | None, bool]
"""The same, and whether the second are scores."""


@dataclass(frozen=True)
class CapsuleSpec:
    """The arguments of a layer to build, except the sizes that follow from the layer below it.

    Attributes
    ----------
    capsules : int
        Parents of a set; parent types at one position of a grid.
    dim : int, optional
        Components of a parent's pose; None: as many as in a child's.
    kernel_size : int, pair or "all", optional
        None makes a set layer, which reads a grid below it as one set.
    stride, padding, dilation, share
        See :class:`~fastcaps.nn.layer.RoutingLayer`.
    types : int, optional
        For ``kernel_size="all"`` above a layer whose parents are a set: read the set as a row of positions with this
        many types; types vary slowest. The capsules of a type share its matrices.
    layer : type of RoutingLayer, optional
        Its class; None: the ``layer`` of :meth:`RoutingStack.build`.
    options : mapping
        Further arguments of this layer.
    """

    capsules: int
    dim: int | None = None
    kernel_size: Pair | str | None = None
    stride: Pair = 1
    padding: Pair = 0
    dilation: Pair = 1
    share: bool = False
    types: int | None = None
    layer: type[RoutingLayer[Any, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("capsules", self.capsules)
        if self.dim is not None:
            check_count("dim", self.dim)
        if self.layer is not None:
            _check_kind(self.layer)
        if self.types is not None:
            check_count("types", self.types)
        if not isinstance(self.options, Mapping):
            raise TypeError(f"options must be a mapping, got {one_line(self.options)}")


FOLLOWING = {
    "in_capsules", "out_capsules", "in_dim", "out_dim", "kernel_size", "stride", "padding", "dilation", "share",
    "device", "dtype",
}  # fmt: skip
"""Arguments of routing layers that follow from the network."""

CapsuleSpec.__init__ = known_arguments(CapsuleSpec.__init__, "; options={...} takes others of the layer")  # type: ignore[method-assign]


class RoutingTrace(NamedTuple):
    """The last state of every layer of a :class:`RoutingStack`.

    Attributes
    ----------
    poses : tuple of Tensor
        ``poses[0]`` are the stack's children, ``poses[k]`` the parents of layer k - 1.
    activations : tuple of (Tensor or None)
        The same for activations, or scores if a layer has scores.
    coefficients : tuple of Tensor
        ``coefficients[k]`` of layer k in its last iteration, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``; without gradient.
    """

    poses: tuple[Tensor, ...]
    activations: tuple[Tensor | None, ...]
    coefficients: tuple[Tensor, ...]


class RoutingStack(nn.Module):
    """Route capsules through several layers, for t iterations (Tsai et al., 2020, Procedure 2).

    The first iteration goes through the layers in order. In *concurrent* routing, each of the iterations 2..t updates
    all layers at once: every layer reads the previous iteration's values of itself and of the layer below.
    In *sequential* routing, the paper's ablation B, each layer finishes its t iterations before the next one starts.

    Between a grid layer and a set layer the grid is flattened in the order n, h, w: types slowest. A layer of
    ``kernel_size="all"`` above a set reads it as ``in_capsules`` types at one position, or at several in a row.

    In concurrent routing the last layer's result after t iterations depends on the layer k steps below it only
    up to iteration t - k. Later updates of that layer are skipped unless ``return_trace`` asks for every layer's last
    state; the result and all gradients are the same.

    Layers of any routing may be mixed. Layers that take no parents (dynamic, EM, Heinsen, pool) run all their
    iterations whenever their input has changed; t counts the iterations of the others. Activations and scores pass from
    layer to layer; if a layer needs the other kind, they are converted: a score is the logit of an activation.

    Parameters
    ----------
    layers : iterable of RoutingLayer
        Lowest first; ``stack[k]`` is one of them.
    iterations : int
        t, at least 1.
    routing : "concurrent" or "sequential"

    Examples
    --------
    >>> import torch
    >>> stack = RoutingStack.build(
    ...     [CapsuleSpec(16, kernel_size=3, stride=2), CapsuleSpec(10)],
    ...     in_capsules=8,
    ...     in_dim=16,
    ...     size=(9, 9),
    ...     iterations=3,
    ... )
    >>> stack.layers[1].in_capsules  # 16 types at 4 x 4 positions: computed
    256
    >>> stack(torch.randn(2, 8, 9, 9, 16)).shape
    torch.Size([2, 10, 16])
    >>> poses, trace = stack(torch.randn(1, 8, 9, 9, 16), return_trace=True)
    >>> [tuple(r.shape) for r in trace.coefficients]
    [(1, 4, 4, 72, 16), (1, 256, 10)]
    """

    @known_arguments
    def __init__(
        self, layers: Iterable[RoutingLayer[Any, Any]], *, iterations: int = 2, routing: str = "concurrent"
    ) -> None:
        super().__init__()
        if not isinstance(layers, Iterable):
            raise TypeError(f"layers must be a list of routing layers, got {type(layers).__name__}")
        layers = list(layers)
        if not layers:
            raise ValueError("layers must hold at least one routing layer, got none")
        _check_chain(layers)
        self.layers: Sequence[RoutingLayer[Any, Any]] = nn.ModuleList(layers)  # type: ignore[assignment]
        check_choice("routing", routing, ("concurrent", "sequential"), " (the class of the layers is layer=)")
        self.iterations = check_count("iterations", iterations)
        self.routing = routing

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> RoutingLayer[Any, Any]:
        return self.layers[index]

    @classmethod
    def build(
        cls,
        specs: Sequence[CapsuleSpec],
        *,
        in_capsules: int,
        in_dim: int,
        size: tuple[int, int] | None = None,
        iterations: int | None = None,
        routing: str = "concurrent",
        layer: type[RoutingLayer[Any, Any]] = InvertedAttentionRouting,
        **options: Any,
    ) -> RoutingStack:
        """Return a stack with the layers of ``specs``, and compute every number of children.

        Parameters
        ----------
        specs : sequence of CapsuleSpec
            Lowest first.
        in_capsules, in_dim : int
            Number of the stack's children (on a grid, of child types), and of components of a pose.
        size : (int, int), optional
            Height and width of the children's grid; None if they are a set.
        iterations : int, optional
            Of the stack (None: 2), and of each layer that runs all its iterations in one call (None: its own default).
        layer : type of RoutingLayer
            The class of a layer whose spec sets none.
        **options
            Further arguments of every layer: pose, bias, device, dtype, and others that all their classes take.

        Raises
        ------
        ValueError
            If a window is larger than its grid, or a grid layer follows a set layer.
        """
        layers = []
        size = None if size is None else check_pair("size", size, 1)
        for index, spec in enumerate(checked_specs("specs", specs, layer, options)):
            where = f"layer {index} (kernel_size {spec.kernel_size})"
            if spec.kernel_size is None and size is not None:
                in_capsules, size = in_capsules * size[0] * size[1], None
            elif spec.kernel_size is not None and size is None:
                if spec.kernel_size != "all" or spec.types is None:
                    raise ValueError(f"{where} needs a grid of children, but the layer below it returns a set")
                if in_capsules % check_count("types", spec.types):
                    raise ValueError(f"{where}: types, {spec.types}, must divide the {in_capsules} capsules below it")
                in_capsules = spec.types
            layer_class = spec.layer or layer
            counted = {"iterations": iterations} if iterations is not None and _counts_itself(layer_class) else {}
            try:
                made = layer_class(
                    in_capsules,
                    spec.capsules,
                    in_dim,
                    in_dim if spec.dim is None else spec.dim,
                    kernel_size=spec.kernel_size,
                    stride=spec.stride,
                    padding=spec.padding,
                    dilation=spec.dilation,
                    share=spec.share,
                    **{**counted, **options, **spec.options},
                )
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError  # a subclass may take other arguments
                raise kind(f"{where}: {error}") from error
            below, size = size, None if size is None else made.output_size(size)
            if size is not None and min(size) < 1:
                grid, least = (" x ".join(map(str, each)) for each in (below, made.window.smallest_grid))  # type: ignore[union-attr, arg-type]
                raise ValueError(
                    f"{where}: the window is larger than its grid of {grid} children and needs {least} or more: "
                    "enlarge size (of a CapsNet, image_size)"
                )
            layers.append(made)
            in_capsules, in_dim = spec.capsules, made.out_dim
        return cls(layers, iterations=2 if iterations is None else iterations, routing=routing)

    def forward(
        self,
        children: Tensor,
        activations: Tensor | None = None,
        *,
        iterations: int | None = None,
        return_trace: bool = False,
    ) -> Parents | tuple[Parents, RoutingTrace]:
        """Return what the last layer returns: a Tensor, Capsules or Gaussians.

        ``children``, ``[B, I, d]`` or ``[B, N, H, W, d]``, go into the lowest layer with their ``activations``,
        ``[B, I]`` or ``[B, N, H, W]`` (scores if that layer takes scores). ``iterations`` is t of this call, also for
        the layers that run all their iterations. ``return_trace`` adds a :class:`RoutingTrace`: every layer's last
        state.
        """
        require_tensor(children, "children")
        count = self.iterations if iterations is None else check_count("iterations", iterations)
        start = children, activations, self.layers[0].activity_name == "scores"
        found, coefficients = self._run(start, count, None if iterations is None else count, return_trace)
        if not return_trace:
            return found[-1]
        poses, activity, _ = zip(start, *map(parts_of, found), strict=True)
        return found[-1], RoutingTrace(poses, activity, tuple(coefficients))

    def _run(self, start: Parts, count: int, own: int | None, trace: bool) -> tuple[list[Parents], list[Tensor]]:
        """Return every layer's last result, and its coefficients for a trace.

        ``own``, if given, replaces the number of iterations of layers that run all of theirs in one call.
        """
        size = len(self.layers)
        rounds, each = (count, 1) if self.routing == "concurrent" else (1, count)
        results: list[Parents] = []
        coefficients: list[Tensor] = []
        inputs: list[Read] = []
        for index in range(size):
            inputs.append(self._read(index, *(parts_of(results[-1]) if index else start)))
            found, spread = self._step(index, inputs[index], None, trace and rounds == 1, own, each)
            results.append(found)
            coefficients += spread
        routed = list(inputs)  # what each layer read for its last result
        for iteration in range(2, rounds + 1):
            last = iteration == rounds
            # layers below this one can no longer change the result
            first = 0 if trace else max(0, size - 1 - (rounds - iteration))
            before, read = list(results), list(inputs)
            for index in range(first, size):
                same = read[index] is routed[index] and not self.layers[index].takes_parents
                if same and not (trace and last):
                    continue
                parents, *_ = parts_of(before[index])
                results[index], spread = self._step(index, read[index], parents, trace and last, own)
                routed[index] = read[index]
                coefficients += spread
                if index + 1 < size and not last and not same:
                    inputs[index + 1] = self._read(index + 1, *parts_of(results[index]))
        return results, coefficients

    def _read(self, index: int, poses: Tensor, activity: Tensor | None, scores: bool) -> Read:
        """Return what layer ``index`` reads of the layer below it. Called once per result, since it copies poses."""
        layer = self.layers[index]
        activity = converted(activity, scores, layer.activity_name == "scores")
        if not layer.on_grid and poses.dim() == 5:
            return poses.flatten(1, 3), None if activity is None else activity.flatten(1)
        if layer.on_grid and poses.dim() == 3:
            row: Any = (layer.in_capsules, 1, -1)
            return poses.unflatten(1, row), None if activity is None else activity.unflatten(1, row)
        return poses, activity

    def _step(
        self, index: int, read: Read, parents: Tensor | None, spread: bool, own: int | None, count: int = 1
    ) -> tuple[Parents, list[Tensor]]:
        layer = self.layers[index]
        if layer.takes_parents:
            found = layer(read[0], parents, read[1], iterations=count, return_coefficients=spread)
        else:
            found = layer(*read, iterations=own if _takes_iterations(layer) else None, return_coefficients=spread)
        if not spread:
            return found, []
        *parts, coefficients = found
        return parts[0] if isinstance(found, Routed) else (Capsules, Gaussians)[len(parts) - 2](*parts), [coefficients]

    extra_repr = arguments_repr


def parts_of(found: Parents) -> Parts:
    """Return the poses of a layer's result, its activations or scores, and whether they are scores."""
    if isinstance(found, Tensor):
        return found, None, False
    return found[0], found[1], isinstance(found, Gaussians)


def as_scores(activations: Tensor) -> Tensor:
    """Return the logits of activations; for 0 and 1, minus and plus infinity with gradient 0."""
    inside = (activations > 0) & (activations < 1)
    edges = torch.where(activations > 0, torch.inf, -torch.inf).to(activations.dtype)
    return activations.where(inside, 0.5).logit().where(inside, edges)


def converted(activity: Tensor | None, scores: bool, wanted: bool) -> Tensor | None:
    """Return activations as scores where these are ``wanted``, or scores as activations."""
    if activity is None or scores == wanted:
        return activity
    return as_scores(activity) if wanted else activity.sigmoid()


def _takes_iterations(layer: RoutingLayer[Any, Any] | type[RoutingLayer[Any, Any]]) -> bool:
    return layer.route_options is None or "iterations" in layer.route_options


def _counts_itself(kind: type[RoutingLayer[Any, Any]]) -> bool:
    """Return whether layers of a class run all their own iterations, as many as their constructor says."""
    return _takes_iterations(kind) and not kind.takes_parents and "iterations" in arguments(kind)


def _check_kind(layer: Any) -> None:
    """Raise unless ``layer`` is a class of routing layers."""
    if not (isinstance(layer, type) and issubclass(layer, RoutingLayer)):
        got = layer.__name__ if isinstance(layer, type) else one_line(layer)
        raise TypeError(f"layer must be a class of routing layers, such as fastcaps.DynamicRouting, got {got}")


def checked_specs(name: str, specs: Any, layer: Any, options: Iterable[str] = ()) -> list[CapsuleSpec]:
    """Return specs as a list; raise unless all are CapsuleSpecs, ``layer`` is a class of routing layers, and no option
    is one that the network sets."""
    found: list[Any] = list(specs) if isinstance(specs, Iterable) else [None]
    if not all(isinstance(each, CapsuleSpec) for each in found):
        raise TypeError(f"{name} must be a list of CapsuleSpecs, such as [CapsuleSpec(16)], got {one_line(specs)}")
    _check_kind(layer)
    for option in FOLLOWING.intersection(options) - {"device", "dtype"}:
        raise TypeError(f"options cannot set {option}: a CapsuleSpec sets it, or it follows from the sizes")
    return found


def _check_chain(layers: Sequence[RoutingLayer[Any, Any]]) -> None:
    """Raise if an element is not a routing layer, or does not fit the one below it."""
    for index, layer in enumerate(layers):
        where, below = f"layers[{index}]", layers[index - 1]
        if not isinstance(layer, RoutingLayer):
            raise TypeError(f"{where} must be a routing layer, got {type(layer).__name__}")
        if index == 0:
            continue
        if layer.in_dim != below.out_dim:
            raise ValueError(
                f"{where}.in_dim must be {below.out_dim}, the out_dim of the layer below it, got {layer.in_dim}"
            )
        active = below.head == "activations" or getattr(below, "activations", False)
        if layer.route_options is not None and not layer.route_takes_activity and active:
            raise TypeError(
                f"{where}: {type(layer).__name__}.route takes no activations, but {type(below).__name__} below it "
                "returns them; give route a parameter activations"
            )
        if layer.on_grid and below.window is None:
            if layer.whole_grid and None not in (layer.in_capsules, below.out_capsules):
                if below.out_capsules % layer.in_capsules:  # type: ignore[operator]
                    raise ValueError(
                        f"{where}.in_capsules, {layer.in_capsules}, must divide the {below.out_capsules} capsules below"
                    )
                continue
            raise ValueError(
                f"{where} routes a grid (kernel_size {layer.kernel_size}), but the layer below it returns a set"
            )
        if None in (layer.in_capsules, below.out_capsules) or (layer.share and not layer.on_grid):
            continue
        flattened = not layer.on_grid and below.window is not None  # to a set of a size that the layers do not know
        wanted, found = below.out_capsules, layer.in_capsules
        if found % wanted if flattened else found != wanted:  # type: ignore[operator]
            raise ValueError(f"{where}.in_capsules, {found}, does not fit the {wanted} capsules below it")
