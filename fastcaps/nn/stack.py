"""Several routing layers on top of each other, routed concurrently or one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastcaps.nn.inverted_attention import InvertedAttentionRouting
from fastcaps.nn.poses import flatten_gate, flatten_grid, positive, require_tensor

ROUTINGS = ("concurrent", "sequential")


@dataclass(frozen=True)
class CapsuleSpec:
    """A layer to be built, without the numbers that follow from the layer below it.

    Attributes
    ----------
    capsules : int
        Parents of a set; parent types at one position of a grid.
    dim : int, optional
        Numbers in a parent's pose; as many as the children have if None.
    kernel_size : int or pair, optional
        None makes a set layer, which reads a grid below it as one set.
    stride, padding, dilation : int or pair
        The window's.
    share : bool
        As :class:`InvertedAttentionRouting` has it.
    """

    capsules: int
    dim: int | None = None
    kernel_size: int | tuple[int, int] | None = None
    stride: int | tuple[int, int] = 1
    padding: int | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    share: bool = False


class Capsules(NamedTuple):
    """A layer's state: poses, and activations where the layer has them."""

    poses: Tensor
    activations: Tensor | None


class RoutingTrace(NamedTuple):
    """Everything a :class:`RoutingStack` ended with.

    Attributes
    ----------
    poses : tuple of Tensor
        ``poses[0]`` are the stack's children, ``poses[k]`` the parents of layer k - 1.
    activations : tuple of (Tensor or None)
        Likewise.
    coefficients : tuple of Tensor
        ``coefficients[k]``: how layer k's children spread over its parents in the last iteration, ``[B, I, M]`` or
        ``[B, Ho, Wo, I, M]``; without gradient.
    """

    poses: tuple[Tensor, ...]
    activations: tuple[Tensor | None, ...]
    coefficients: tuple[Tensor, ...]


class RoutingStack(nn.Module):
    """Run routing layers for t iterations (Tsai et al., 2020, Procedure 2).

    The first iteration goes through the layers in order. Then, *concurrent* routing lets every layer read, in each of
    the iterations 2..t, the previous iteration's values of the layer below and of itself: all layers move at once.
    *Sequential* routing, the paper's ablation B, has each layer finish its t iterations before the next one starts.

    Between a grid layer and a set layer the grid is flattened in the order n, h, w: types slowest.

    In concurrent routing the last layer's value after t iterations depends on the layer k below it only up to
    iteration t - k, so later updates of that layer cannot reach the result. They are left out unless ``return_trace``
    asks for every layer's last state; the result, and every gradient, is the same.

    Parameters
    ----------
    layers : iterable of Module
        Routing layers as :class:`InvertedAttentionRouting`, lowest first.
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

    def __init__(self, layers: Iterable[nn.Module], *, iterations: int = 2, routing: str = "concurrent") -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        if not len(self.layers):
            raise ValueError("layers must hold at least one routing layer, got none")
        if routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {', '.join(map(repr, ROUTINGS))}, got {routing!r}")
        self.iterations = positive(iterations, "iterations")
        self.routing = routing
        _check_chain(self.layers)

    @classmethod
    def build(
        cls,
        specs: Sequence[CapsuleSpec],
        *,
        in_capsules: int,
        in_dim: int,
        size: tuple[int, int] | None = None,
        iterations: int = 2,
        routing: str = "concurrent",
        **options: Any,
    ) -> RoutingStack:
        """Build the layers of ``specs``, computing every number of children.

        Parameters
        ----------
        specs : sequence of CapsuleSpec
            Lowest first.
        in_capsules, in_dim : int
            The stack's children: how many (types of them, on a grid) and the numbers in a pose.
        size : (int, int), optional
            Height and width of the children's grid; None if they are a set.
        **options
            Further arguments of every :class:`InvertedAttentionRouting`: pose, bias, dropout, layer_norm,
            activations, eps, device, dtype.

        Raises
        ------
        ValueError
            If a window is larger than its grid, or a grid layer is to follow a set layer.
        """
        layers: list[nn.Module] = []
        for index, spec in enumerate(specs):
            where = f"layer {index} (kernel_size {spec.kernel_size})"
            if spec.kernel_size is None and size is not None:
                in_capsules, size = in_capsules * size[0] * size[1], None
            elif spec.kernel_size is not None and size is None:
                raise ValueError(f"{where} wants a grid of children, but what lies below it is a set")
            layer = InvertedAttentionRouting(
                in_capsules,
                spec.capsules,
                in_dim,
                in_dim if spec.dim is None else spec.dim,
                kernel_size=spec.kernel_size,
                stride=spec.stride,
                padding=spec.padding,
                dilation=spec.dilation,
                share=spec.share,
                **options,
            )
            if size is not None:
                out = layer.output_size(size)
                if out is None or min(out) < 1:
                    raise ValueError(f"{where}: the window is larger than its grid of {size[0]} x {size[1]} children")
                size = out
            layers.append(layer)
            in_capsules, in_dim = layer.out_capsules, layer.out_dim
        return cls(layers, iterations=iterations, routing=routing)

    def forward(
        self,
        children: Tensor,
        activations: Tensor | None = None,
        *,
        iterations: int | None = None,
        return_trace: bool = False,
    ) -> Tensor | tuple[Any, ...]:
        """Route ``children`` up through all layers.

        Parameters
        ----------
        children : Tensor
            The lowest layer's children: ``[B, I, d]`` or ``[B, N, H, W, d]``.
        activations : Tensor, optional
            Their activations, ``[B, I]`` or ``[B, N, H, W]``.
        iterations : int, optional
            Another t for this call.
        return_trace : bool
            Also return a :class:`RoutingTrace`: every layer's last poses, activations and coefficients.

        Returns
        -------
        Tensor or tuple
            The last layer's poses; then its activations if it has them; then the trace if asked for.
        """
        require_tensor(children, "children")
        turns = self.iterations if iterations is None else positive(iterations, "iterations")
        start = Capsules(children, activations)
        run = self._concurrent if self.routing == "concurrent" else self._sequential
        states, coefficients = run(start, turns, return_trace)

        result: tuple[Any, ...] = (states[-1].poses,)
        if states[-1].activations is not None:
            result += (states[-1].activations,)
        if return_trace:
            every = [start, *states]
            result += (
                RoutingTrace(tuple(s.poses for s in every), tuple(s.activations for s in every), tuple(coefficients)),
            )
        return result if len(result) > 1 else result[0]

    def _concurrent(self, start: Capsules, turns: int, trace: bool) -> tuple[list[Capsules], list[Tensor]]:
        count = len(self.layers)
        states: list[Capsules] = []
        coefficients: list[Tensor] = []
        inputs = [self._read(0, start)]
        for index in range(count):
            state, spread = self._step(index, inputs[index], None, trace and turns == 1)
            states.append(state)
            coefficients += spread
            if index + 1 < count:
                inputs.append(self._read(index + 1, state))
        for turn in range(2, turns + 1):
            last = turn == turns
            first = (
                0 if trace else max(0, count - 1 - (turns - turn))
            )  # what lies below cannot reach the result any more
            before, read = list(states), list(inputs)
            for index in range(first, count):
                states[index], spread = self._step(index, read[index], before[index].poses, trace and last)
                coefficients += spread
                if index + 1 < count and not last:
                    inputs[index + 1] = self._read(index + 1, states[index])
        return states, coefficients

    def _sequential(self, start: Capsules, turns: int, trace: bool) -> tuple[list[Capsules], list[Tensor]]:
        states: list[Capsules] = []
        coefficients: list[Tensor] = []
        below = start
        for index in range(len(self.layers)):
            read = self._read(index, below)
            below, spread = self._step(index, read, None, trace, turns)
            coefficients += spread
            states.append(below)
        return states, coefficients

    def _read(self, index: int, state: Capsules) -> Capsules:
        """A state as layer ``index`` reads it. Flattening copies a grid's poses, so it is done once a state and not
        once a pass."""
        if self.layers[index].kernel_size is None and state.poses.dim() == 5:
            return Capsules(flatten_grid(state.poses), flatten_gate(state.activations))
        return state

    def _step(
        self, index: int, read: Capsules, parents: Tensor | None, spread: bool, turns: int = 1
    ) -> tuple[Capsules, list[Tensor]]:
        layer = self.layers[index]
        options: dict[str, Any] = {"return_coefficients": spread}
        if turns > 1 and isinstance(layer, InvertedAttentionRouting):
            options["iterations"] = turns
        elif turns > 1:
            parents = self._step(index, read, parents, False, turns - 1)[0].poses
        result = layer(read.poses, parents, read.activations, **options)
        parts = list(result) if isinstance(result, tuple) else [result]
        coefficients = [parts.pop()] if spread else []
        return Capsules(parts[0], parts[1] if len(parts) > 1 else None), coefficients

    def extra_repr(self) -> str:
        """How the layers are run."""
        return f"iterations={self.iterations}, routing={self.routing!r}"


def _check_chain(layers: nn.ModuleList) -> None:
    """Raise ValueError where a layer cannot read the one below it."""
    for index in range(1, len(layers)):
        below, layer = layers[index - 1], layers[index]
        if not (isinstance(below, InvertedAttentionRouting) and isinstance(layer, InvertedAttentionRouting)):
            continue
        where = f"layers[{index}]"
        if layer.in_dim != below.out_dim:
            raise ValueError(
                f"{where}.in_dim must be {below.out_dim}, the out_dim of the layer below it, got {layer.in_dim}"
            )
        if layer.window is not None and below.window is None:
            raise ValueError(
                f"{where} routes a grid (kernel_size {layer.kernel_size}), but the layer below it makes a set"
            )
        if (layer.window is None) == (below.window is None):
            fits = layer.in_capsules == below.out_capsules
        else:
            fits = layer.in_capsules % below.out_capsules == 0
        if not fits and not (layer.window is None and layer.share):
            raise ValueError(
                f"{where}.in_capsules, {layer.in_capsules}, does not fit the {below.out_capsules} capsules below it"
            )
