"""Published routing layers in our own words: eager, votes stored."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DenseCapsule(nn.Module):
    """Guo's class layer: dynamic routing whose coefficients are found on votes cut off from the gradient."""

    def __init__(self, in_num_caps: int, in_dim_caps: int, out_num_caps: int, out_dim_caps: int, routings: int = 3):
        super().__init__()
        self.in_num_caps, self.in_dim_caps = in_num_caps, in_dim_caps
        self.out_num_caps, self.out_dim_caps = out_num_caps, out_dim_caps
        self.routings = routings
        self.weight = nn.Parameter(0.01 * torch.randn(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))

    @staticmethod
    def squash(sums: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(sums, dim=-1, keepdim=True)
        return sums * (size**2 / (1 + size**2) / (size + 1e-8))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("jied,bid->bjie", self.weight, x)
        constant = votes.detach()
        log_prior = torch.zeros(votes.shape[:-1], dtype=votes.dtype)
        for turn in range(self.routings):
            shares = log_prior.softmax(1)
            last = turn == self.routings - 1
            parents = self.squash((shares[..., None] * (votes if last else constant)).sum(2))
            if not last:
                log_prior = log_prior + (constant * parents[:, :, None]).sum(-1)
        return parents


class GenerativeMatrixRouting(nn.Module):
    """Heinsen's layer, Algorithm 1 step by step; returns all that a turn computes."""

    def __init__(self, n_inp, n_out, d_cov, d_inp, d_out, n_iters=3, single_beta=False, p_model="gaussian", eps=1e-5):
        super().__init__()
        rows = max(1, n_inp)
        self.n_inp, self.n_out, self.d_cov, self.d_inp, self.d_out = n_inp, n_out, d_cov, d_inp, d_out
        self.n_iters, self.single_beta, self.p_model, self.eps = n_iters, single_beta, p_model, eps
        self.register_buffer("CONST_one", torch.tensor(1.0))
        self.W = nn.Parameter(torch.randn(rows, n_out, d_inp, d_out) / d_inp)
        self.B = nn.Parameter(torch.zeros(rows, n_out, d_cov, d_out))
        self.beta_use = nn.Parameter(torch.zeros(rows, n_out))
        self.beta_ign = self.beta_use if single_beta else nn.Parameter(torch.zeros(rows, n_out))

    def forward(self, a_inp: Tensor, mu_inp: Tensor) -> dict[str, Tensor]:
        matrices = self.W.expand(a_inp.shape[-1], -1, -1, -1)
        votes = torch.einsum("ijdh,...icd->...ijch", matrices, mu_inp) + self.B
        many = votes.shape[-3]
        data = torch.sigmoid(a_inp)[..., None]
        log_p = None
        score = mean = variance = votes  # of the turn before, from the second on
        for turn in range(self.n_iters):
            if turn == 0:
                shares = torch.full(votes.shape[:-2], 1 / many, dtype=votes.dtype)
            else:
                square = (votes - mean[..., None, :, :, :]) ** 2
                if self.p_model == "gaussian":
                    log_p = -(square / (2 * variance[..., None, :, :, :])).sum((-2, -1))
                    log_p = log_p - variance.sqrt().log().sum((-2, -1))[..., None, :]
                else:
                    log_p = torch.log_softmax(-square.sum((-2, -1)), -1)
                shares = torch.softmax(nn.functional.logsigmoid(score)[..., None, :] + log_p, -1)
            used = data * shares
            ignored = data - used
            score = (self.beta_use * used - self.beta_ign * ignored).sum(-2)
            normal = used / (used.sum(-2, keepdim=True) + self.eps)
            mean = (normal[..., None, None] * votes).sum(-4)
            square = (votes - mean[..., None, :, :, :]) ** 2
            variance = (normal[..., None, None] * square).sum(-4) + self.eps
        found = {"V": votes, "R": shares, "D_use": used, "D_ign": ignored}
        return {**found, "log_p": log_p, "a_out": score, "mu_out": mean, "sig2_out": variance}


class CapsuleLayer(nn.Module):
    """gram-ai's layer where it routes: the children compete, from logits of zero or learned ones."""

    def __init__(
        self, num_capsules, num_route_nodes, in_channels, out_channels, num_iterations=3, learned_logits=False
    ):
        super().__init__()
        self.num_capsules, self.num_route_nodes, self.num_iterations = num_capsules, num_route_nodes, num_iterations
        if learned_logits:
            self.route_logits = nn.Parameter(torch.zeros(num_capsules, 1, num_route_nodes, 1, 1))
        self.route_weights = nn.Parameter(torch.randn(num_capsules, num_route_nodes, in_channels, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,jide->jbie", x, self.route_weights)
        start = self.route_logits[..., 0] if hasattr(self, "route_logits") else torch.zeros_like(votes[:, :1, :, :1])
        logits = start.expand(-1, len(x), -1, -1)
        for _ in range(self.num_iterations):
            sums = (logits.softmax(2) * votes).sum(2, keepdim=True)
            square = sums.square().sum(-1, keepdim=True)
            parents = sums * square.sqrt() / (1 + square)
            logits = logits + (votes * parents).sum(-1, keepdim=True)
        return parents[:, :, :, None]


class ConvCaps(nn.Module):
    """yl-1993's layer: EM routing whose shares are divided by their sum over the parents."""

    def __init__(self, B, C, K, P, stride, iters=3, coor_add=False, w_shared=False):
        super().__init__()
        self.B, self.C, self.K, self.P, self.stride, self.iters = B, C, K, P, stride, iters
        self.coor_add, self.w_shared = coor_add, w_shared
        self.beta_u, self.beta_a = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.zeros(C))
        self.weights = nn.Parameter(torch.randn(1, K * K * B, C, P, P))

    def forward(self, x: Tensor) -> Tensor:
        size = self.P**2
        if self.w_shared:
            seen, (down, across) = x[:, None, None], x.shape[1:3]
        else:
            seen = x.unfold(1, self.K, self.stride).unfold(2, self.K, self.stride).permute(0, 1, 2, 4, 5, 3)
        poses = seen[..., : self.B * size].unflatten(-1, (self.B, self.P, self.P))
        gates = seen[..., self.B * size :].flatten(3)[..., None]
        votes = (
            torch.einsum("bhwklncd,...nmde->bhwklnmce", poses, self.weights[0].unflatten(0, (-1, self.B))[0])
            if (self.w_shared)
            else torch.einsum(
                "bhwklncd,klnmde->bhwklnmce", poses, self.weights[0].unflatten(0, (self.K, self.K, self.B))
            )
        )
        votes = votes.flatten(-2)
        if self.coor_add:
            place = torch.zeros(down, across, 1, 1, size, dtype=x.dtype)
            place[..., 0] += (torch.arange(down, dtype=x.dtype) / down).view(-1, 1, 1, 1)
            place[..., 1] += (torch.arange(across, dtype=x.dtype) / across).view(-1, 1, 1)
            votes = votes + place
        votes = votes.flatten(3, 5)  # [b, h, w, i, m, d]
        shares = torch.full(votes.shape[:-1], 1 / self.C, dtype=x.dtype)
        for _ in range(self.iters):
            weights = shares * gates
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-8)
            count = weights.sum(3, keepdim=True)
            parts = (weights / (count + 1e-8))[..., None]
            mean = (parts * votes).sum(3, keepdim=True)
            variance = (parts * (votes - mean) ** 2).sum(3, keepdim=True) + 1e-8
            cost = (self.beta_u + 0.5 * variance.log().sum(-1) / size) * count * size
            active = torch.sigmoid(1e-3 * (self.beta_a - cost))
            logit = -((votes - mean) ** 2 / (2 * variance) + 0.5 * variance.log()).sum(-1)
            shares = (logit + active.log()).softmax(-1)
        mean, active = mean[:, :, :, 0], active[:, :, :, 0]
        return active[:, 0, 0] if self.w_shared else torch.cat([mean.flatten(3), active], -1)


class RoutingCapsules(DenseCapsule):
    """Havir's layer: the same with other names, its matrices with a dimension of 1 in front."""

    def __init__(self, in_dim, in_caps, num_caps, dim_caps, num_routing, device=None):
        super().__init__(in_caps, in_dim, num_caps, dim_caps, num_routing)
        self.in_dim, self.in_caps, self.num_caps, self.dim_caps = in_dim, in_caps, num_caps, dim_caps
        self.num_routing, self.device = num_routing, device
        del self.weight
        self.W = nn.Parameter(0.01 * torch.randn(1, num_caps, in_caps, dim_caps, in_dim))

    weight = property(lambda self: self.W[0])


class DigitCaps(CapsuleLayer):
    """cezannec's layer: gram-ai's with other names, in three turns."""

    def __init__(self, num_capsules=10, previous_layer_nodes=1152, in_channels=8, out_channels=16):
        super().__init__(num_capsules, previous_layer_nodes, in_channels, out_channels)
        self.previous_layer_nodes, self.in_channels = previous_layer_nodes, in_channels
        del self.route_weights
        self.W = nn.Parameter(torch.randn(num_capsules, previous_layer_nodes, in_channels, out_channels))

    route_weights = property(lambda self: self.W)


class AgreementRouting(nn.Module):
    """Bielski's routing of votes: a turn more than ``n_iterations``, from learned logits; the parents compete."""

    def __init__(self, input_caps, output_caps, n_iterations):
        super().__init__()
        self.n_iterations = n_iterations
        self.b = nn.Parameter(torch.zeros(input_caps, output_caps))

    def forward(self, u_predict: Tensor) -> Tensor:
        logits, parents = self.b, torch.zeros_like(u_predict[:, 0])
        for _ in range(self.n_iterations + 1):
            logits = logits + (u_predict * parents[:, None]).sum(-1)
            sums = (logits.softmax(-1)[..., None] * u_predict).sum(1)
            square = sums.square().sum(-1, keepdim=True)
            parents = sums * square.sqrt() / (1 + square)
        return parents


class CapsLayer(nn.Module):
    """Bielski's layer: makes votes, lets its routing module route them."""

    def __init__(self, input_caps, input_dim, output_caps, output_dim, routing_module):
        super().__init__()
        self.input_caps, self.input_dim, self.output_caps, self.output_dim = (
            input_caps,
            input_dim,
            output_caps,
            output_dim,
        )
        self.routing_module = routing_module
        self.weights = nn.Parameter(torch.randn(input_caps, input_dim, output_caps * output_dim))

    def forward(self, caps_output: Tensor) -> Tensor:
        votes = torch.einsum("bid,idn->bin", caps_output, self.weights)
        return self.routing_module(votes.unflatten(-1, (self.output_caps, self.output_dim)))
