"""The base class of the routing layers: arguments, sizes and parameters, checks of flat poses, results."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar, overload

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps.checks import check_count, check_dtype, check_flag, is_tracing, refuse_unknown, require_tensor, shape_text
from fastcaps.functional.em import InverseTemperature
from fastcaps.functional.verbs import Votes, inputs_of
from fastcaps.nn.poses import arguments, arguments_repr, pose_shape, shape_hint
from fastcaps.votes import Window, autocast_dtype

Pair = int | tuple[int, int]
_OF_ROUTE = ("iterations", "return_coefficients")
_ROUTE = "route(self, votes, activations, iterations), of which it may leave out the last two, with defaults for others"
Plain = TypeVar("Plain")  # what a call returns without coefficients
Full = TypeVar("Full")  # and with them


class LayerOptions(TypedDict, total=False):
    """Keyword arguments of every routing layer except ``iterations``; :class:`RoutingLayer` describes them."""

    pose: str | int
    kernel_size: Pair | str | None
    stride: Pair
    padding: Pair
    dilation: Pair
    share: bool
    matrices: bool
    bias: bool
    break_symmetry: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class CallOptions(TypedDict, total=False):
    """Keyword arguments of calls; the class of each layer says which of them it takes."""

    parents: Tensor | None
    activations: Tensor | None
    scores: Tensor | None
    out_capsules: int | None
    bias: Tensor | None
    iterations: int | None
    inverse_temperature: InverseTemperature | None
    sharpness: float | None


class LayerCall(NamedTuple):
    """A checked call, as the functions take it: C x D poses, their activations or scores, M parents."""

    children: Tensor
    activity: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    parent_count: int
    window: Window | None


def _ordered(result: Tensor) -> Tensor:
    """Return the same values; Inductor fails if a graph ends in a view of a grid of free sizes, not in arithmetic."""
    return result.neg().neg() if is_tracing() and result.dim() > 3 and result.is_floating_point() else result


def _checked(found: Any, votes: Votes) -> Tensor:
    """Return the poses of what a ``route`` returned; raise unless it is parents, or a tuple that starts with them."""
    poses, pairs = votes.parents_shape, votes.coefficients_shape
    shapes = {"parents": poses, "variances": poses, "coefficients": pairs}
    shapes |= dict.fromkeys(("activations", "scores"), poses[:-2])
    results = found if isinstance(found, tuple) and found else (found,)
    names = getattr(found, "_fields", [f"result {k + 1}" for k in range(len(results))])
    for name, result in zip(("parents", *names[1:]), results, strict=True):
        shape = shapes.get(name)
        if not isinstance(result, Tensor) or (shape is not None and tuple(result.shape) != shape):
            wanted = "as a tensor" if shape is None else f"of shape {list(shape)}"
            got = shape_text(result) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"route must return {name} {wanted}, got {got}")
    return results[0]


class RoutingLayer(nn.Module, Generic[Plain, Full]):
    """Base class of the routing layers, which add keyword arguments to the ones here.

    Parameters
    ----------
    in_capsules : int or None
        Number of children of a set, or of child types at one position of a grid. None, for a set: any number of
        children, which share their parameters. To batch samples of different sizes, pad them and give the padding an
        activation of 0 (a score of minus infinity).
    out_capsules : int or None
        Number of parents of a set, or of parent types at one position of a grid. None: any number of parents, which
        share their parameters; a call may set it, and by default it is the number of children.
    in_dim, out_dim : int
        Components of a child's pose (d = C * D) and of a parent's (d' = C * E): a child's pose is a C x D matrix, a
        weight D x E, a parent's pose C x E.
    pose : "matrix", "vector" or int
        The number of rows C, which must divide d and d'. "matrix" is ``sqrt(d)``, "vector" is 1.
    kernel_size : int, pair, "all" or None
        None routes a set; otherwise a window of that size slides over a grid. "all" is one window over the whole grid
        of children, whatever its size: it needs ``share=True``, and the parents are a set.
    stride, padding, dilation : int or pair
        As in a convolution. Padded positions hold no children and vote for nothing.
    share : bool
        False: every child of a set (of a window) has its own matrices. True: all children of a set share one set of
        matrices, so their number may differ between calls; on a grid, all children of one type share theirs.
    matrices : bool
        False: a child's votes are its pose, and d' = d. Then biases, or the parents that an attention layer starts
        from, tell parents apart.
    bias : bool
        Learn a bias of the votes, one per child and parent (one per parent if ``share``); zero at the start.
    break_symmetry : bool
        For ``out_capsules=None``, where all parents would be equal: learn one more pose, zero at the start. Parent j
        adds it to its votes times a factor; the factors are evenly spaced from -1 to 1.
    iterations : int
        Number of weighted sums, at least 1; the first has equal coefficients (without a start or prior). Pooling does
        not count the first, so it allows 0.
    device, dtype : optional
        As in PyTorch's own layers.

    Calls
    -----
    ``layer(children, activations)`` returns the parents' poses, then each parent's activation or score if the routing
    computes one, then the coefficients if asked for. Some layers take scores instead of activations; None means that
    all children exist. :meth:`forward` lists the keyword arguments. Children are ``[B, I, d]`` for a set, ``[B, N, H,
    W, d]`` for a grid; a set layer also takes a grid and reads it as the set ``[B, N*H*W, d]``, n slowest. Their
    activations are ``[B, I]`` or ``[B, N, H, W]``. Parents are ``[B, M, d']`` or ``[B, M, Ho, Wo, d']``, their
    activations and scores the same without d', the coefficients of the last iteration ``[B, I, M]`` or ``[B, Ho, Wo, I,
    M]``, without gradient. A wrong shape, dtype or device raises ValueError or TypeError naming the argument.

    Your own routing
    ----------------
    A subclass defines ``route(self, votes, activations, iterations)`` with the verbs of :class:`~fastcaps.Votes`; it
    inherits poses, windows, matrices, biases, sharing and checks. All but the votes are passed by name, and ``route``
    may leave them out: a call that sets one of these then raises. ``activations`` is the call's second argument, ``[B,
    I]`` or ``[B, N, H, W]`` (``votes.unfold`` cuts it into windows), or None. ``iterations`` is the call's or the
    layer's. Further parameters have defaults, and calls may set them; with ``return_coefficients`` among them
    coefficients come last in the result. ``route`` returns the parents in the layout of ``votes.sum``, or a tuple that
    starts with them, such as :class:`~fastcaps.functional.Capsules`; the layer returns the same with flat poses. The
    page "Your own routing" (docs/routings/your-own.md) has examples.

    The package's own layers define ``run(call, iterations, return_coefficients)`` and their call options instead.

    Attributes
    ----------
    weight : Parameter or None
        ``[G, M or 1, D, E]`` with G the number of weight groups.
    bias : Parameter or None
        ``[I or 1, M or 1, C, E]``.
    bias_step : Parameter or None
        ``[1, 1, C, E]``, for ``break_symmetry``.
    """

    _fields = ("__init__", "forward", "output_size", "reset_parameters")  # help() begins with these
    activity_name = "activations"  # a call's second argument: "activations" in [0, 1], or "scores", any real values
    head = "linear"  # what ClassHead reads of the parents; "activations" needs activations of the children, too
    compete = "parents"  # the softmax runs over "parents" for each child, or over "children" for each parent
    takes_parents = False  # whether a call may continue from the parents that an earlier call returned
    call_options: tuple[str, ...] = ()  # keyword arguments of calls, beside those that all layers take
    fewest_iterations = 1
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    bias_step: nn.Parameter | None
    route: Callable[..., Any]  # a subclass defines it
    route_options: tuple[str, ...] | None = None  # its parameters beside votes and activations; None: no route
    route_takes_activity = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "route" not in vars(cls):
            return
        takes = [*inspect.signature(cls.route).parameters.values()]
        usual, reserved = {cls.activity_name, *_OF_ROUTE}, {"children", "activations", "out_capsules", "bias"}
        if [x.name for x in takes[1:2]] != ["votes"]:
            raise TypeError(f"{cls.__name__} must define {_ROUTE}, got route({', '.join(x.name for x in takes)})")
        for x in takes[2:]:
            by_name = x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
            if x.name not in usual and (not by_name or x.default is x.empty or x.name in reserved):
                raise TypeError(f"{cls.__name__} must define {_ROUTE}, got a parameter {x.name}")
        names = [x.name for x in takes[2:]]
        cls.route_takes_activity = cls.activity_name in names
        cls.route_options = tuple(name for name in names if name != cls.activity_name)

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        pose: str | int = "matrix",
        kernel_size: Pair | str | None = None,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        share: bool = False,
        matrices: bool = True,
        bias: bool = False,
        break_symmetry: bool = True,
        iterations: int = 3,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        route_takes = self.route_options
        for name in unknown.keys() & (route_takes or ()):
            raise TypeError(f"{type(self).__name__} has no argument {name}, its route has: pass {name} in the call")
        refuse_unknown(type(self).__name__, unknown, arguments(type(self)))  # Python would name this class
        if route_takes is not None and "iterations" not in route_takes and iterations != 3:  # the default
            raise TypeError(f"iterations must be left out: {type(self).__name__}.route does not take it")
        check_dtype(dtype)
        if in_capsules is None and kernel_size is not None:
            raise ValueError("in_capsules must be an int with a kernel_size, the number of child types, got None")
        self.in_capsules = None if in_capsules is None else check_count("in_capsules", in_capsules)
        self.out_capsules = None if out_capsules is None else check_count("out_capsules", out_capsules)
        self.in_dim, self.out_dim = check_count("in_dim", in_dim), check_count("out_dim", out_dim)
        self.pose = pose
        self.pose_shape = pose_shape(self.in_dim, self.out_dim, pose)
        self.share = check_flag("share", share) or in_capsules is None
        self.matrices = check_flag("matrices", matrices)
        self.break_symmetry = check_flag("break_symmetry", break_symmetry)
        self.iterations = check_count("iterations", iterations, self.fewest_iterations)
        self._set_window(kernel_size, stride, padding, dilation)
        if not matrices and in_dim != out_dim:
            raise ValueError(
                f"out_dim must equal in_dim with matrices=False, got in_dim {in_dim} and out_dim {out_dim}"
            )
        rows, columns, out_columns = self.pose_shape
        parent_count = self.out_capsules or 1
        self._place: dict[str, Any] = {"device": device, "dtype": dtype}  # for parameters that subclasses add
        self._drawn: list[str] = []  # what reset_parameters draws
        self.new_parameter("weight", (self.groups, parent_count, columns, out_columns), self.matrices)
        self.new_parameter("bias", (self.own_children, parent_count, rows, out_columns), check_flag("bias", bias))
        self.new_parameter("bias_step", (1, 1, rows, out_columns), out_capsules is None and self.break_symmetry)
        if self.route_options is not None:  # such a class need not have a constructor
            RoutingLayer.reset_parameters(self)

    def _set_window(self, kernel_size: Pair | str | None, stride: Pair, padding: Pair, dilation: Pair) -> None:
        """Set the window's attributes. A set layer has no ``kernel_size``: torchinfo reads it, and cannot read None."""
        self.whole_grid = isinstance(kernel_size, str) and kernel_size == "all"
        if isinstance(kernel_size, str) and not self.whole_grid:
            raise ValueError(f"kernel_size must be an int, a pair of ints, 'all' or None, got {kernel_size!r}")
        if self.whole_grid and not self.share:
            raise ValueError("kernel_size='all' must have share=True: there cannot be matrices for every size of grid")
        slides = kernel_size is not None and not self.whole_grid
        if not slides and (stride not in (1, (1, 1)) or padding not in (0, (0, 0)) or dilation not in (1, (1, 1))):
            raise ValueError(
                "stride, padding and dilation need an int or a pair as kernel_size; "
                + ("a window over all of a grid has none" if self.whole_grid else "kernel_size=None routes a set")
            )
        self.window = Window(kernel_size, stride, padding, dilation) if slides else None  # type: ignore[arg-type]
        spec = self.window or Window(1)
        self.stride, self.padding, self.dilation = spec.stride, spec.padding, spec.dilation
        if kernel_size is not None:
            self.kernel_size = "all" if self.window is None else self.window.kernel_size

    if TYPE_CHECKING:  # nn.Module's own returns Any

        @overload
        def __call__(
            self,
            children: Tensor,
            *activity: Tensor | None,
            return_coefficients: Literal[False] = False,
            **options: Unpack[CallOptions],
        ) -> Plain: ...
        @overload
        def __call__(
            self,
            children: Tensor,
            *activity: Tensor | None,
            return_coefficients: Literal[True],
            **options: Unpack[CallOptions],
        ) -> Full: ...
        @overload
        def __call__(
            self, children: Tensor, *activity: Tensor | None, return_coefficients: bool, **options: Unpack[CallOptions]
        ) -> Plain | Full: ...
        def __call__(self, *arguments: Any, **options: Any) -> Any: ...

    def new_parameter(self, name: str, shape: tuple[int, ...], start: bool | str = True) -> None:
        """Register a parameter (``start``: True or "learned"), buffer ("random") or None; reset_parameters fills it."""
        if start == "random":
            self.register_buffer(name, torch.empty(shape, **self._place))
        else:
            wanted = start not in (False, "zero")
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **self._place)) if wanted else None)
            self._drawn += [name] * wanted

    def first_std(self) -> float:
        """Return the standard deviation of the initial matrices."""
        return math.sqrt((self.out_capsules or 1) / (self.pose_shape[1] * self.children_per_position))

    def reset_parameters(self) -> None:
        """Initialise the parameters: matrices from a normal distribution, all else 0.

        Parameters that a subclass assigns itself keep their values; it may extend this method.
        """
        for name in self._drawn:
            parameter = getattr(self, name)
            if name == "weight":
                nn.init.normal_(parameter, std=self.first_std())
            else:
                nn.init.zeros_(parameter)

    @property
    def children_per_position(self) -> int:
        """I, the children in one window (for "all", at one position of the grid; 1 for any number of them)."""
        return (1 if self.window is None else self.window.positions) * (self.in_capsules or 1)

    @property
    def groups(self) -> int:
        """G, the number of different sets of matrices; child i uses group i mod G."""
        if not self.share:
            return self.children_per_position
        return self.in_capsules or 1 if self.on_grid else 1

    @property
    def own_children(self) -> int:
        """Rows of the tables beside the weights: I, or 1 if the children share."""
        return 1 if self.share else self.children_per_position

    @property
    def on_grid(self) -> bool:
        """Whether children come as a grid ``[B, N, H, W, d]``."""
        return self.window is not None or self.whole_grid

    def output_size(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """Return the parents' grid (height, width) for children on a grid of ``size``; None if parents are a set."""
        return None if self.window is None else self.window.output_size(*size)

    def __prepare_scriptable__(self) -> None:  # torch.jit.script calls it first
        raise RuntimeError(f"torch.jit.script cannot compile {type(self).__name__}; use torch.export.export")

    def forward(
        self,
        children: Tensor,
        activations: Tensor | None = None,
        *,
        out_capsules: int | None = None,
        bias: Tensor | None = None,
        iterations: int | None = None,
        return_coefficients: bool = False,
        **options: Any,
    ) -> Any:
        """Return the parents, and whatever else the class lists under *Calls*.

        Parameters
        ----------
        children : Tensor
            Poses ``[B, I, d]`` of a set, ``[B, N, H, W, d]`` of a grid.
        activations, scores : Tensor, optional
            How active the children are, ``[B, I]`` or ``[B, N, H, W]``; None: all are active.
        parents : Tensor, optional
            The result of an earlier call, for another iteration.
        out_capsules : int, optional
            The number of parents, for a layer with ``out_capsules=None``.
        bias : Tensor, optional
            ``[I or 1, M or 1, C, E]``, added to the votes in addition to the layer's bias.
        iterations : int, optional
            Number of iterations of this call, instead of the layer's.
        return_coefficients : bool
            Also return the coefficients.
        """
        self.check_options(options)
        call = self.prepare(children, activations, out_capsules, bias)
        count = self.iterations if iterations is None else check_count("iterations", iterations, self.fewest_iterations)
        return self.with_flat_poses(self.run(call, count, return_coefficients, **options))

    def run(self, call: LayerCall, iterations: int, return_coefficients: bool, *_: Any, **options: Any) -> Any:
        """Return the result of ``route`` for a checked call."""
        takes = self.route_options
        if takes is None:
            raise NotImplementedError(f"{type(self).__name__} must define {_ROUTE}")
        if call.activity is not None and not self.route_takes_activity:
            raise TypeError(f"{self.activity_name} must be left out: {type(self).__name__}.route does not take them")
        usual = {"iterations": self.iterations, "return_coefficients": False}
        given: dict[str, Any] = {"iterations": iterations, "return_coefficients": return_coefficients}
        for name, value in given.items():
            if name not in takes and value != usual[name]:
                also = " (and a network's return_trace)" * (name == "return_coefficients")
                raise TypeError(f"{name}{also} must be left out: {type(self).__name__}.route does not take it")
        votes = Votes(call.children, call.weight, call.bias, call.window, parents=call.parent_count)
        inputs_of(votes, None, None, call.activity, None, gate_name=self.activity_name)  # checks the activity
        given = {name: value for name, value in given.items() if name in takes}
        if self.route_takes_activity:
            given[self.activity_name] = call.activity
        found = self.route(votes, **given, **options)
        poses = _checked(found, votes)
        dtype = autocast_dtype(votes.device.type) or votes.dtype
        if votes.dtype == torch.float64 or poses.dtype == dtype:
            return found
        poses = poses.to(dtype)
        if isinstance(found, Tensor):
            return poses
        return found._replace(**{found._fields[0]: poses}) if hasattr(found, "_fields") else (poses, *found[1:])

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise TypeError for a keyword argument that calls of this layer do not take."""
        if not options:
            return
        common = ("children", self.activity_name, "out_capsules", "bias", "iterations", "return_coefficients")
        known = dict.fromkeys((*common, *self.call_options, *(self.route_options or ())))
        what = f"a call of {type(self).__name__}"
        for other in {"activations", "scores"} & options.keys() - known.keys():
            raise TypeError(
                f"{what} takes {self.activity_name} instead of {other}: a score is the logit of an activation"
            )
        refuse_unknown(what, options, known)

    @property
    def returns_coefficients(self) -> bool:
        """Whether calls may ask for the coefficients; not every ``route`` takes ``return_coefficients``."""
        return self.route_options is None or "return_coefficients" in self.route_options

    def prepare(
        self, children: Tensor, activity: Tensor | None, out_capsules: int | None = None, bias: Tensor | None = None
    ) -> LayerCall:
        """Return a checked call: flat poses of the right length, and as many children and parents as the layer was
        built for. A set layer flattens a grid."""
        whole: object = children
        if isinstance(whole, tuple):
            raise TypeError(
                f"children must be a tensor, got a tuple of {len(whole)}: pass its parts one by one, "
                f"layer(poses, {self.activity_name}); nn.Sequential does not, fastcaps.CapsNet does"
            )
        require_tensor(children, "children")
        if activity is not None:
            require_tensor(activity, self.activity_name)
        given = children
        if not self.on_grid and children.dim() == 5:
            children, activity = children.flatten(1, 3), None if activity is None else activity.flatten(1)
        if children.dim() != (5 if self.on_grid else 3) or children.shape[-1] != self.in_dim:
            wanted = f"[B, {self.in_capsules}, H, W, {self.in_dim}]" if self.on_grid else f"[B, I, {self.in_dim}]"
            hint = shape_hint(children, self.in_dim)
            raise ValueError(f"children must be {wanted}, got {shape_text(children)}{hint}")
        if (self.on_grid or not self.share) and children.shape[1] != self.in_capsules:
            what = "child types at a position" if self.on_grid else "children"
            also = "" if self.on_grid else " as a set (kernel_size routes grids; another image size needs a new layer)"
            raise ValueError(
                f"children must hold the {self.in_capsules} {what} that this layer was built for, "
                f"got {children.shape[1]} in {shape_text(given)}{also}"
            )
        if self.whole_grid and 0 in children.shape[2:4]:
            raise ValueError(f"children must be a grid of at least one position, got {shape_text(children)}")
        window = Window((children.shape[2], children.shape[3])) if self.whole_grid else self.window
        weight: Tensor | None = self.weight
        layer_bias: Tensor | None = self.bias
        if self.out_capsules is not None:
            parent_count = self.out_capsules
            if out_capsules is not None and out_capsules != parent_count:
                raise ValueError(
                    f"out_capsules must be None, as this layer has {parent_count} parents; got {out_capsules}"
                )
        else:
            parent_count = children.shape[1] * (1 if window is None else window.positions)
            parent_count = parent_count if out_capsules is None else check_count("out_capsules", out_capsules)
            weight = None if weight is None else weight.expand(-1, parent_count, -1, -1)
            if self.bias_step is not None:
                places = torch.linspace(-1, 1, parent_count, device=self.bias_step.device, dtype=self.bias_step.dtype)
                steps = self.bias_step * places[:, None, None]
                layer_bias = steps if layer_bias is None else layer_bias + steps
        if layer_bias is not None:
            bias = layer_bias if bias is None else layer_bias + bias
        poses = children.view(*children.shape[:-1], *self.pose_shape[:2])  # unflatten takes several times as long
        return LayerCall(poses, activity, weight, bias, parent_count, window)

    def with_flat_poses(self, found: Any) -> Any:
        """Return the result of ``run`` with flat poses, and without the single position of a whole grid."""
        if isinstance(found, Tensor):
            return _ordered((found.squeeze((2, 3)) if self.whole_grid else found).flatten(-2))
        names = getattr(found, "_fields", ["poses", *["more"] * (len(found) - 1)])
        results = []
        for name, tensor in zip(names, found, strict=True):
            if self.whole_grid:  # coefficients [B, 1, 1, I, M], all else [B, M, 1, 1, ...]
                tensor = tensor.squeeze((1, 2) if name == "coefficients" else (2, 3))
            results.append(_ordered(tensor.flatten(-2) if name in ("poses", "variances") else tensor))
        return type(found)(*results) if hasattr(found, "_fields") else tuple(results)

    def smallest_inputs(self) -> list[Tensor]:
        """Return children, and parents if the layer takes them, of its smallest call: batch 1, one position."""
        grid = (self.window or Window(1)).smallest_grid if self.on_grid else ()
        like = next(self.parameters(), torch.empty(0))
        inputs = [like.new_zeros((1, self.in_capsules or 1, *grid, self.in_dim))]
        if self.takes_parents:
            place = () if self.window is None else (1, 1)
            inputs.append(like.new_zeros((1, self.out_capsules or 1, *place, self.out_dim)))
        return inputs

    extra_repr = arguments_repr
