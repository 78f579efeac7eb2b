"""An object that represents votes without storing them, and its four verbs, from which any routing is made."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any, Literal

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype, check_choice, check_count, check_tensor, shape_text
from fastcaps.made import MadeVotes, Maker
from fastcaps.ops import verbs as ops
from fastcaps.reference.verbs import present
from fastcaps.votes import VoteInputs, Window, to_op, windows


class Votes:
    r"""The votes of children for parents, :math:`V_{im} = P_i W_{i \bmod G, m} + \text{bias}_{im}`, never stored.

    The constructor computes nothing. A routing needs only the four verbs; between them (a softmax over those that
    compete, a squash, a loss) it is plain PyTorch on one value for each child and parent. Verbs have derivatives of any
    order in all arguments. Their results, and their gradients of coefficients and parents, are in the accumulation
    dtype: float32 for half-precision votes. Parents and coefficients may be floats or tensors that broadcast to the
    full shape.

    Parameters
    ----------
    children : Tensor
        Poses P, a set ``[B, I, C, D]`` or, with a ``window``, a grid ``[B, N, H, W, C, D]``. B may be 0.
    weight : Tensor or None
        W, ``[G, M, D, E]``; None: the votes are the children's poses. G divides the number of children that a position
        sees (I, or kh * kw * N). Child i, counted as (ky, kx, n) with n fastest, uses group i mod G: G = I for separate
        matrices, G = N shared over the window, G = 1 shared by all. ``weight.expand(-1, M, -1, -1)`` shares one matrix
        among parents.
    bias : Tensor, optional
        Added to votes, ``[I or 1, M or 1, C, E]``.
    window : Window, optional
        For a grid. A padded position holds no child: its agreement and distance are 0, and sums skip it.
    parents : int, optional
        M, if neither weight nor bias sets it.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, device, shape, count or window; the message names it.

    Examples
    --------
    >>> import torch
    >>> votes = Votes(torch.randn(2, 6, 4, 4), torch.randn(6, 3, 4, 4))
    >>> parents = votes.sum(1 / votes.parents)  # r = 1 / M
    >>> r = votes.agreement(parents).softmax(-1)  # the parents compete for each child
    >>> votes.sum(r).shape, r.shape
    (torch.Size([2, 3, 4, 4]), torch.Size([2, 6, 3]))
    """

    def __init__(
        self,
        children: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        window: Window | None = None,
        *,
        parents: int | None = None,
    ) -> None:
        self.children, self.weight, self.bias, self.window = children, weight, bias, window
        self._inputs = VoteInputs.of(children, weight, bias, None, window, parents)

    @classmethod
    def in_blocks(cls, make: Callable[[int, int], Tensor], count: int, *, block: int | None = None) -> Votes:
        """Return votes that a function makes, a block of children at a time.

        Only one block is in memory; in the backward the function makes it again, with the same random numbers. This
        method calls it once, for the first child, to learn shape, dtype and device. Create new votes in every forward,
        as the function must return the same votes in every call. Under :func:`torch.compile` blocks may be kept, and
        each verb draws its own random numbers; under torch.func blocks are kept too.

        Parameters
        ----------
        make : callable
            ``make(i, j)`` returns the votes of children i to j - 1, ``[B, j - i, M, C, E]``, on a grid of parents
            ``[B, *space, j - i, M, C, E]`` for any number of spatial dimensions. Gradients reach tensors that it uses.
        count : int
            I, the children that each position sees.
        block : int, optional
            Children in a block; by default as many as have 4 MB of votes.

        Raises
        ------
        TypeError, ValueError
            If ``make`` returns something else; later, if a block has another shape, dtype or device, or the votes made
            again differ.
        """
        votes = cls.__new__(cls)
        votes.children = votes.weight = votes.bias = votes.window = None  # type: ignore[assignment]
        step = None if block is None else check_count("block", block)
        votes._inputs = MadeVotes.by(Maker(make, check_count("count", count), step))
        return votes

    def __repr__(self) -> str:
        pairs, poses = list(self.coefficients_shape), list(self.parents_shape)
        return f"Votes(coefficients={pairs}, parents={poses}, dtype={self.dtype}, device={self.device})"

    # ---- sizes -------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """I, the children that a position sees."""
        return self._inputs.seen

    @property
    def parents(self) -> int:
        """M."""
        return self._inputs.parents

    @property
    def pose_shape(self) -> torch.Size:
        """C, E: the shape of a vote and of a parent's pose."""
        rows, _, columns = self._inputs.pose
        return torch.Size((rows, columns))

    @property
    def coefficients_shape(self) -> tuple[int, ...]:
        """``[B, I, M]``, on grids ``[B, Ho, Wo, I, M]``."""
        return tuple(self._inputs.public_pairs())

    @property
    def parents_shape(self) -> tuple[int, ...]:
        """``[B, M, C, E]``, on grids ``[B, M, Ho, Wo, C, E]``."""
        return tuple(self._inputs.public_poses())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the votes' parts; verbs return its accumulation dtype."""
        return self._inputs.children.dtype

    @property
    def device(self) -> torch.device:
        """Where the votes are."""
        return self._inputs.children.device

    @property
    def present(self) -> Tensor:
        """Booleans, False in padding: ``[1, Ho, Wo, I]``; ``[1, I]`` of True where no window reaches into padding."""
        found = present(self._inputs)
        if found is None:
            return torch.ones((1, self.count), dtype=torch.bool, device=self.device)
        return found != 0

    def zero_logits(self) -> Tensor:
        """Return zeros in the coefficients' shape and the accumulation dtype: the logits that a routing starts with."""
        children = self._inputs.children
        return children.new_zeros(self.coefficients_shape, dtype=accumulation_dtype(children.dtype))

    # ---- verbs -------------------------------------------------------------------------------------------------------

    def agreement(self, parents: Tensor | float) -> Tensor:
        r"""Return :math:`\langle Q_m, V_{im} \rangle` for parents Q: ``[B, I, M]``, on grids ``[B, Ho, Wo, I, M]``."""
        votes = self._inputs
        return votes.pairs_from_op(ops.scores(votes, self._poses("parents", parents)))

    def distance(self, means: Tensor | float, precisions: Tensor | float | None = None) -> Tensor:
        r"""Return :math:`\sum_{ce} p_m (V_{im} - \mu_m)^2`, as ``[B, I, M]``, on grids ``[B, Ho, Wo, I, M]``.

        Precisions p are 1 by default. For means of 0 it is the squared length of the votes.
        """
        p = None if precisions is None else self._poses("precisions", precisions)
        votes = self._inputs
        return votes.pairs_from_op(ops.scores(votes, self._poses("means", means), p, squared=True))

    def sum(self, coefficients: Tensor | float) -> Tensor:
        r"""Return :math:`\sum_i r_{im} V_{im}`, as ``[B, M, C, E]``, on grids ``[B, M, Ho, Wo, C, E]``.

        Coefficients are ``[B, I, M]``, on grids ``[B, Ho, Wo, I, M]``; a float usually needs one matmul or convolution.
        """
        votes, given = self._inputs, self._coefficients(coefficients)
        if isinstance(coefficients, (int, float)):
            return votes.from_op(ops.even_sums(votes, coefficients, given))
        return votes.from_op(ops.sums(votes, given))

    def square_sum(self, coefficients: Tensor | float, means: Tensor | float) -> Tensor:
        r"""Return :math:`\sum_i r_{im} (V_{im} - \mu_m)^2`, in the layout of :meth:`sum`."""
        r, mean = self._coefficients(coefficients), self._poses("means", means)
        return self._inputs.from_op(ops.sums(self._inputs, r, mean, power=2))

    # ---- from children to windows and back ---------------------------------------------------------------------------

    def unfold(self, values: Tensor) -> Tensor:
        """Return what every position sees of values of children: ``[B, N, H, W, ...]`` as ``[B, Ho, Wo, I, ...]``.

        Padding holds 0. Values of a set, ``[B, I, ...]``, stay as they are, and so do ``[B, *space, I, ...]`` of votes
        made in blocks.
        """
        if self.window is None:
            return self._as_they_are(values)
        self._check_leading("values", values, (*self.children.shape[:4],), "B, N, H, W")
        return windows(to_op(values, self.window), self.window.spec)

    def fold(self, values: Tensor, reduce: Literal["sum", "amax"] = "sum") -> Tensor:
        """Return for every child the sum over the windows that hold it, or the largest.

        Values are ``[B, Ho, Wo, I, ...]``, results ``[B, N, H, W, ...]``; a child that no window holds has 0, or minus
        infinity. Values of a set, or of votes made in blocks, stay as they are.
        """
        check_choice("reduce", reduce, ("sum", "amax"))
        if self.window is None:
            return self._as_they_are(values)
        self._check_leading("values", values, tuple(self._inputs.coefficients_shape[:-1]), "B, Ho, Wo, I")
        if reduce == "amax" and not values.is_floating_point():
            raise TypeError(f"values must be floating-point numbers for 'amax', got {values.dtype}")
        batch, types, height, width = self.children.shape[:4]
        kh, kw, sh, sw, ph, pw, dh, dw = self.window.spec
        shape = (batch, height + 2 * ph, width + 2 * pw, types, *values.shape[4:])
        padded = values.new_full(shape, 0.0 if reduce == "sum" else -torch.inf)
        rows, columns = (sh * (values.shape[1] - 1) + 1, sw * (values.shape[2] - 1) + 1)
        parts = values.unflatten(3, (kh, kw, types))
        for y in range(kh):
            for x in range(kw):  # at one place in all windows no child occurs twice
                place = padded[:, y * dh : y * dh + rows : sh, x * dw : x * dw + columns : sw]
                part = parts[:, :, :, y, x]
                if reduce == "sum":
                    place.add_(part)
                else:
                    place.copy_(torch.maximum(place.clone(), part))
        return padded[:, ph : ph + height, pw : pw + width].movedim(3, 1)

    # ---- arguments of verbs ------------------------------------------------------------------------------------------

    def _poses(self, name: str, value: Any) -> Tensor:
        """Return a tensor of the parents' shape as the ops take it."""
        return self._inputs.to_op(self._given(name, value, self.parents_shape, "B, M, *grid, C, E"))

    def _coefficients(self, value: Any) -> Tensor:
        """Return coefficients as the ops take them."""
        return self._inputs.pairs_to_op(self._given("coefficients", value, self.coefficients_shape, "B, *grid, I, M"))

    def _given(self, name: str, value: Any, shape: tuple[int, ...], symbols: str) -> Tensor:
        """Return a tensor or a number, checked, in a shape that it broadcasts to and in the accumulation dtype."""
        children = self._inputs.children
        wide = accumulation_dtype(children.dtype)
        if isinstance(value, (int, float)):
            try:
                value = children.new_full((), float(value), dtype=wide)
            except (OverflowError, RuntimeError):
                raise ValueError(f"{name} must be a number that {wide} holds, got one of more than it") from None
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor or a number, got {type(value).__name__}")
        check_tensor(name, value, children, self._inputs.autocasts, (wide,))
        try:
            return value.to(accumulation_dtype(value.dtype)).expand(shape)  # its gradient is summed in that dtype, too
        except RuntimeError:
            raise ValueError(f"{name} must broadcast to [{symbols}] = {list(shape)}, got {shape_text(value)}") from None

    def _as_they_are(self, values: Tensor) -> Tensor:
        """Return values of a set, checked."""
        self._check_leading("values", values, self.coefficients_shape[:-1], "B, *space, I")
        return values

    def _check_leading(self, name: str, value: Any, shape: tuple[int, ...], symbols: str) -> None:
        check_tensor(name, value, self._inputs.children, True, (value.dtype,) if isinstance(value, Tensor) else ())
        if tuple(value.shape[: len(shape)]) != shape:
            sizes = ", ".join(map(str, shape))
            raise ValueError(f"{name} must have shape [{symbols}, ...] = [{sizes}, ...], got {shape_text(value)}")


def inputs_of(
    children: Tensor | Votes,
    weight: Tensor | EllipsisType | None,
    bias: Tensor | None,
    gate: Tensor | None,
    window: Window | None,
    parents: int | None = None,
    *,
    gate_name: str = "gate (a layer's activations)",
    others: tuple[Any, ...] = (),
    parents_at: int | None = None,
    check: Callable[..., None] | None = None,
) -> VoteInputs:
    """Return the votes of a routing function's arguments, children and weight or votes alone, checked, in op layout.

    The arguments are those of :meth:`VoteInputs.of`.
    """
    checks: dict[str, Any] = {"gate_name": gate_name, "others": others, "check": check}
    if isinstance(weight, EllipsisType):  # left out
        if not isinstance(children, Votes):
            raise TypeError("weight must be given beside children; None makes the votes the children's own poses")
        weight = None
    if not isinstance(children, Votes):
        return VoteInputs.of(children, weight, bias, gate, window, parents, parents_at=parents_at, **checks)
    for name, value in (("weight", weight), ("bias", bias), ("window", window)):
        if value is not None:
            raise TypeError(f"{name} must be None beside votes, which have their own")
    given, votes = children, children._inputs
    many = votes.parents if parents is None else check_count("parents", parents)
    if many != votes.parents:
        raise ValueError(f"parents must be the M = {votes.parents} of the votes, got {many}")
    if not isinstance(votes, MadeVotes):
        return VoteInputs.of(given.children, given.weight, given.bias, gate, given.window, many, **checks)
    if check is not None:
        check(votes, *others)
    return votes.with_gate(gate, gate_name)
