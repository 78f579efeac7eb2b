"""``GenerativeMatrixRouting`` of the heinsen_routing package, the code of Heinsen (2019).

What differs:

- a child with a score of minus infinity has no effect even if it is NaN or infinite;
- ``return_dict=True`` is refused: it returns votes, which are never stored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_choice, check_count, require_tensor, shape_text
from fastcaps.compat.twin import Draw, Twin

MODELS = {"gaussian": "gaussian", "skm": "kmeans"}


class GenerativeMatrixRouting(Twin):
    """Heinsen routing of capsules with scores, with the author's names.

    A child's pose is d_cov x d_inp, a parent's d_cov x d_out. ``W``, ``[n_inp or 1, n_out, d_inp, d_out]``, is drawn
    from N(0, 1) / d_inp; ``B``, ``[n_inp or 1, n_out, d_cov, d_out]``, and ``beta_use`` and ``beta_ign``, ``[n_inp or
    1, n_out]``, are zero at the start. The buffer ``CONST_one`` is in the author's checkpoints, and unused here.

    Parameters
    ----------
    n_inp : int
        Children; -1 for any number of them, which then share their parameters.
    n_out : int
        Parents, at least 2.
    n_iters : int
        Iterations.
    single_beta : bool
        ``beta_use`` and ``beta_ign`` are one parameter.
    p_model : "gaussian" or "skm"
        The probability of a vote: Gaussians, or soft k-means.
    eps : float
        Added to the sums of coefficients and to the variances.
    return_dict : bool
        False: all intermediate results as a dict would hold the votes.

    Examples
    --------
    >>> import torch
    >>> layer = GenerativeMatrixRouting(n_inp=100, n_out=10, d_cov=4, d_inp=4, d_out=4)
    >>> a_out, mu_out, sig2_out = layer(torch.randn(2, 100), torch.randn(2, 100, 4, 4))
    >>> a_out.shape, mu_out.shape, sig2_out.shape
    (torch.Size([2, 10]), torch.Size([2, 10, 4, 4]), torch.Size([2, 10, 4, 4]))
    """

    CONST_one: Tensor
    d_cov: int
    d_inp: int
    n_iters: int
    _known_by = ("n_inp", "n_out", "d_cov", "d_inp", "d_out", "n_iters", "single_beta", "p_model", "eps", "return_dict")
    _probes = (("n_iters", range(1, 7)), ("p_model", tuple(MODELS)))

    def __init__(
        self,
        n_inp: int,
        n_out: int,
        d_cov: int,
        d_inp: int,
        d_out: int,
        n_iters: int = 3,
        single_beta: bool = False,
        p_model: str = "gaussian",
        eps: float = 1e-5,
        return_dict: bool = False,
    ) -> None:
        super().__init__()
        self.n_inp = -1 if n_inp == -1 else check_count("n_inp", n_inp)
        self._count(n_out=n_out, d_cov=d_cov, d_inp=d_inp, d_out=d_out, n_iters=n_iters)
        if n_out < 2:
            raise ValueError(f"n_out must be at least 2, got {n_out}")
        check_choice("p_model", p_model, tuple(MODELS))
        if return_dict:
            raise ValueError("return_dict must be False, got True: it returns votes, which are not stored")
        self.single_beta, self.p_model, self.eps, self.return_dict = single_beta, p_model, eps, return_dict
        rows = max(1, self.n_inp)
        self.register_buffer("CONST_one", torch.tensor(1.0))
        self.W = nn.Parameter(torch.empty(rows, n_out, d_inp, d_out))
        self.B = nn.Parameter(torch.empty(rows, n_out, d_cov, d_out))
        self.beta_use = nn.Parameter(torch.empty(rows, n_out))
        self.beta_ign = self.beta_use if single_beta else nn.Parameter(torch.empty(rows, n_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        super().reset_parameters()
        with torch.no_grad():
            self.W.div_(self.d_inp)

    def forward(self, a_inp: Tensor, mu_inp: Tensor) -> tuple[Tensor, ...]:
        """Return the parents' scores, means and variances, of children with scores ``[..., n_inp]`` and poses
        ``[..., n_inp, d_cov, d_inp]``. A score of minus infinity is a child that does not exist.

        They are ``a_out``, ``[..., n_out]``, ``mu_out`` and ``sig2_out``, ``[..., n_out, d_cov, d_out]``.
        """
        require_tensor(a_inp, "a_inp")
        require_tensor(mu_inp, "mu_inp")
        wanted = (*a_inp.shape, self.d_cov, self.d_inp)
        if a_inp.dim() < 1 or mu_inp.shape != wanted:
            raise ValueError(f"mu_inp must be {list(wanted)} with a_inp {shape_text(a_inp)}, got {shape_text(mu_inp)}")
        if self.n_inp != -1 and a_inp.shape[-1] != self.n_inp:
            raise ValueError(f"a_inp must be [..., {self.n_inp}], got {shape_text(a_inp)}")
        lead, count = a_inp.shape[:-1], a_inp.shape[-1]
        batch = math.prod(lead)
        scores, children = a_inp.reshape(batch, count), mu_inp.reshape(batch, count, self.d_cov, self.d_inp)
        options: dict[str, Any] = {"iterations": self.n_iters, "model": MODELS[self.p_model], "eps": self.eps}
        betas = (self.beta_use, self.beta_ign)
        found = functional.heinsen_routing(children, scores, self.W, self.B, *betas, **options)
        return tuple(x.reshape(*lead, *x.shape[1:]) for x in (found.scores, found.poses, found.variances))

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        count = 5 if self.n_inp < 0 else self.n_inp
        return [(draw(2, count), draw(2, count, self.d_cov, self.d_inp))]
