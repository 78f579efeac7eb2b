"""The calls of the Gaussian pass that every test of it runs over: those of the attention pass, and some of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from attention_cases import CASES as ATTENTION_CASES
from attention_cases import CONV, Case, random_cases
from hypothesis import strategies as st
from pass_cases import Judge, Run, Tensors
from pooling_cases import LARGE, gates
from torch import Tensor

from fastcaps import ops
from fastcaps.reference import accumulation_dtype

OUTPUTS = ("counts", "means", "variances", "evidence")
JUDGE = Judge(ops.GAUSSIAN, OUTPUTS, OUTPUTS)
GRADIENTS = JUDGE.gradients
results = JUDGE.results


@dataclass(frozen=True)
class GaussianCase(Case):
    """One call of the op.

    Without a query there are no parents yet; without an affine they have no variance, which is k-means; with a bias
    there are betas of its form.
    """

    silent: bool = False  # a third of the gates is 0
    absent: tuple[str, ...] = ()  # names of arguments that are left out besides

    def settings(self) -> tuple[float, list[int]]:
        """Return eps and window."""
        return self.eps, list(self.window)

    def tensors(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor | None]:
        """Return the nine tensors of the op; gates are not negative."""
        children, weight, mean, bias, gate = super().tensors(dtype, seed)[:5]
        generator = torch.Generator().manual_seed(seed + 3)
        wide = accumulation_dtype(dtype)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(wide)

        variance = log_weight = beta_use = beta_ignore = None
        if mean is not None:
            mean, log_weight = mean.to(wide), draw(*self.shape[:4])
            size = self.pose[0] * self.pose[2]  # as wide as a pose is long: no child is quite sure of its parent
            variance = draw(*self.shape).mul(0.5).exp() * size if self.affine else None
        if bias is not None:
            beta_use, beta_ignore = (draw(*bias.shape[:2]) for _ in range(2))
        tensors = [children, weight, mean, variance, log_weight, bias, gates(gate, self.silent), beta_use, beta_ignore]
        names = zip(ops.GAUSSIAN.tensors, tensors, strict=True)
        return [None if name in self.absent else tensor for name, tensor in names]

    def grads(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Tensor | None]:
        """Return gradients for the four outputs; none for the evidence where there is none."""
        generator = torch.Generator().manual_seed(seed)
        evidence = self.shape[:4] if self.bias is not None and "beta_use" not in self.absent else None
        shapes = (self.shape[:4], self.shape, self.shape, evidence)
        wide = accumulation_dtype(dtype)
        return [
            None if shape is None else torch.randn(shape, generator=generator, dtype=torch.float64).to(wide)
            for shape in shapes
        ]


def as_gaussian(case: Case, **changes: object) -> GaussianCase:
    """Return the call of this pass that is most like one of the attention pass."""
    given = {field.name: getattr(case, field.name) for field in fields(Case)}
    return GaussianCase(**{**given, "scale": None, **changes})


CASES = (
    *(as_gaussian(case) for case in ATTENTION_CASES if case.name != "no-eps"),
    GaussianCase("no-betas", types=7, bias="IM", gate=True, absent=("beta_use", "beta_ignore")),
    GaussianCase("no-log-weight", types=7, pose=(4, 4, 4), gate=True, absent=("log_weight",)),
    GaussianCase("log-weight-alone", types=7, bias="1M", gate=True, absent=("mean", "variance")),
    GaussianCase("k-means", types=9, parents=5, pose=(4, 4, 4), affine=False, bias="11", absent=("log_weight",)),
    GaussianCase("betas-without-bias", types=6, parents=4, bias="I1", gate=True, absent=("bias",)),
    GaussianCase("no-eps", types=9, parents=5, gate=True, eps=0.0, bias="IM"),
    GaussianCase("silent", types=11, parents=4, gate=True, silent=True, bias="IM"),
    GaussianCase("silent-grid", grid=(5, 4), types=3, window=CONV, gate=True, silent=True, bias="1M"),
    GaussianCase("pose-1x64-m64", batch=1, types=9, parents=64, pose=(1, 64, 2), groups=1, gate=True, bias="1M"),
)
BY_NAME = {case.name: case for case in CASES}
REFERENCE_CASES = tuple(case for case in CASES if case.name not in LARGE)


@st.composite
def random_gaussian_cases(draw: st.DrawFn) -> GaussianCase:
    """Draw small calls of every kind."""
    absent = draw(st.sampled_from([(), ("log_weight",), ("mean", "variance"), ("variance",), ("bias",)]))
    if draw(st.booleans()):
        absent = (*absent, "beta_use", "beta_ignore")
    return as_gaussian(
        draw(random_cases()), silent=draw(st.booleans()), absent=absent, eps=draw(st.sampled_from([1e-5, 0.3, 0.0]))
    )


def assert_honest(
    found: dict[str, Tensor], tensors: Tensors, settings: tuple, grads: Tensors, tf32: bool = False
) -> None:
    """Assert that a kernel's results err at most what the bar allows."""
    JUDGE.bar(tensors, settings, grads, tf32).hold(found)


def check_op(
    tensors: Tensors,
    settings: tuple,
    grads: Tensors,
    run: Run = ops.gaussian_pass,
    *,
    device: str = "cpu",
    tf32: bool = False,
) -> None:
    """Run an op with these arguments on a device and hold forward and every gradient to :func:`assert_honest`."""
    JUDGE.check(tensors, settings, grads, run, device=device, tf32=tf32)
