# %% [markdown]
# # Routing to a fixed point
#
# Tsai et al. (2020, section 8) suggest iterating inverted attention until the parents no longer change, and to
# differentiate there, as deep equilibrium models do (Bai et al. 2019). With parents Q* = f(Q*, θ) the gradient is
# uᵀ ∂f/∂θ, where u = dL/dQ* + (∂f/∂Q)ᵀ u. Both equations are solved by iteration, so memory does not depend on the
# number of iterations. The iterations must converge, and that can take long: fresh class layers of the paper need 30 to
# 50 iterations, and a 3 x 3 window of 32 types still changes by 1e-2 after 100.

# %%
import warnings

import torch
from torch import nn

from fastcaps.nn import RoutingLayer


class EquilibriumRouting(RoutingLayer):
    """Inverted attention at its fixed point; ``iterations`` is the most that both loops run."""

    def __init__(self, *sizes, iterations=32, tolerance=1e-5, **options):
        super().__init__(*sizes, iterations=iterations, **options)
        self.tolerance, self.scale = tolerance, self.out_dim**-0.5
        self.norm = nn.LayerNorm(self.out_dim, device=options.get("device"), dtype=options.get("dtype"))

    def step(self, votes, gate, parents):
        """Return f(Q, θ): parents compete for each child."""
        r = (self.scale * votes.agreement(parents)).softmax(-1) * gate
        return self.norm(votes.sum(r).flatten(-2)).unflatten(-1, parents.shape[-2:])

    def at_rest(self, step, first, limit):
        """Return the fixed point of a step, and by which part of the largest value the last step moved."""
        moved = 0.0
        for _ in range(limit):
            before, first = first, step(first)
            moved = ((first - before).abs().max() / first.abs().max()).item()
            if moved <= self.tolerance:
                break
        return first, moved

    def route(self, votes, activations, iterations):
        gate = (votes.present if activations is None else votes.unfold(activations)).unsqueeze(-1)
        zero = torch.zeros(votes.parents_shape, dtype=votes.dtype, device=votes.device)
        with torch.no_grad():
            parents, moved = self.at_rest(lambda q: self.step(votes, gate, q), zero, iterations)
        if not torch.is_grad_enabled():
            return parents
        if moved > 0.03:
            warnings.warn(
                f"after {iterations} iterations the parents still change: the gradient is wrong", stacklevel=2
            )
        last = parents.requires_grad_()
        again = self.step(votes, gate, last)  # its derivative in Q, as often as the hook asks

        def solve(grad):
            return self.at_rest(
                lambda u: grad + torch.autograd.grad(again, last, u, retain_graph=True)[0], grad, iterations
            )[0]

        parents = self.step(votes, gate, last.detach())
        if parents.requires_grad:
            parents.register_hook(solve)
        return parents


# %% [markdown]
# ## It uses no more memory for more iterations

# %%
torch.manual_seed(0)
layer, children = EquilibriumRouting(20, 5, 16, 16), torch.randn(3, 20, 16)
saved = {}
for limit in (50, 200):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x, into=sizes: into.append(x.numel()) or x, lambda x: x):
        parents = layer(children, iterations=limit)
    parents.square().mean().backward()
    saved[limit] = sum(sizes)
    print(f"at most {limit} iterations: autograd keeps {saved[limit]} values")
