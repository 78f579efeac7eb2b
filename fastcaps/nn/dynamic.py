"""The layer of dynamic routing, for sets and grids of capsules."""

from __future__ import annotations

from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps import functional
from fastcaps.checks import check_choice, check_finite, check_flag
from fastcaps.nn.layer import LayerCall, LayerOptions, RoutingLayer
from fastcaps.results import Routed


class DynamicRouting(RoutingLayer[Tensor, Routed]):
    r"""Route child capsules to parents by dynamic routing (Sabour et al., 2017, Procedure 1).

    The equation is that of :func:`fastcaps.functional.dynamic_routing`: the softmax runs over the **parents**, unless
    ``compete="children"``. The length of a parent's pose, below 1, is the probability that the parent exists
    (:func:`fastcaps.functional.length`); the children should be squashed, too. The kernels store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias,
    break_symmetry, iterations, device, dtype
        See :class:`~fastcaps.nn.layer.RoutingLayer`; the paper's poses are ``pose="vector"``.
    compete, detach, leaky, eps
        See :func:`fastcaps.functional.dynamic_routing`.
    prior : "zero", "learned", "random" or bool
        The logits that every iteration starts from, the paper's log prior probabilities, ``[G, M or 1]``: one for each
        parent and each of the G groups of matrices. "zero" (False) is the paper's choice; "learned" (True) starts
        learning at zero; "random" draws them from N(0, 1) once and keeps them. All three are in Table 5 of Li et al.
        (2018), which does not say when to draw. :meth:`reset_parameters` draws, so a network is deterministic.
    std : float, optional
        Standard deviation of the initial weights; by default ``sqrt(M / (D * I))``, I the children in one window
        (child types, for "all"). A squash almost squares short lengths, so the gradients of a stack of such layers
        vanish. There use ``0.75 * M / (l * sqrt(I * E))`` (with ``compete="children"`` I instead of M), E the columns
        of a parent's pose and l the children's mean length, 0.5 for those of a layer that starts like this: parents'
        lengths are then from 0.5 to 0.98, and the gradients of all layers similar. Before a margin loss use half of it
        in the last layer: that loss first pushes down classes whose lengths are all near 1, and can stop there.

    Calls
    -----
    ``activations`` gate the children's votes: 0 for a child that does not exist.

    Examples
    --------
    >>> import torch
    >>> layer = DynamicRouting(1152, 10, 8, 16, pose="vector")  # the class layer of the paper
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    >>> shared = DynamicRouting(32, 64, 8, 16, pose="vector", kernel_size="all", share=True)  # shared over space
    >>> shared(torch.randn(2, 32, 6, 6, 8)).shape
    torch.Size([2, 64, 16])
    >>> parents, r = DynamicRouting(5, 3, 4, 4)(torch.randn(2, 5, 4), return_coefficients=True)
    >>> r.shape, bool((r.sum(-1) - 1).abs().max() < 1e-6)
    (torch.Size([2, 5, 3]), True)
    """

    head = "length"
    prior: Tensor | None

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 3,
        compete: str = "parents",
        detach: bool = False,
        leaky: bool = False,
        prior: bool | str = False,
        eps: float = 0.0,
        std: float | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_capsules, out_capsules, in_dim, out_dim, iterations=iterations, **options)
        check_choice("compete", compete, ("parents", "children"))
        self.compete = compete
        self.detach = check_flag("detach", detach)
        self.leaky = check_flag("leaky", leaky)
        if self.leaky and compete == "children":
            raise ValueError("leaky must be False with compete='children': a child cannot leak from a parent's softmax")
        self.eps = check_finite("eps", eps, 0.0)
        start = ("learned" if prior else "zero") if isinstance(prior, bool) else prior
        check_choice("prior", start, ("zero", "learned", "random"))
        if self.leaky and start != "zero":
            raise ValueError(f"leaky must be False with prior={start!r}: the prior has no column for the leak")
        self.new_parameter("prior", (self.groups, self.out_capsules or 1), start)
        self.std = None if std is None else check_finite("std", std, 0.0)
        self.reset_parameters()

    def first_std(self) -> float:
        """``std``, or ``sqrt(M / (D * I))``."""
        return super().first_std() if self.std is None else self.std

    def reset_parameters(self) -> None:
        """Initialise the parameters, and draw a random prior."""
        super().reset_parameters()
        if self.prior is not None and not isinstance(self.prior, nn.Parameter):
            nn.init.normal_(self.prior)

    def run(self, call: LayerCall, iterations: int, return_coefficients: bool) -> Tensor | Routed:
        """Return the routing of a checked call."""
        prior = self.prior
        if prior is not None:
            seen = call.children.shape[1] * (1 if call.window is None else call.window.positions)
            rows = 1 if len(prior) == 1 else seen // len(prior)  # child i has the logits of group i mod G
            prior = prior.expand(-1, call.parent_count).repeat(rows, 1)
        return functional.dynamic_routing(
            call.children,
            call.weight,
            parents=call.parent_count,
            iterations=iterations,
            bias=call.bias,
            gate=call.activity,
            compete=self.compete,
            detach=self.detach,
            leaky=self.leaky,
            prior=prior,
            eps=self.eps,
            window=call.window,
            return_coefficients=return_coefficients,
        )
