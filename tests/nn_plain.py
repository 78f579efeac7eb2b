"""Published routing layers in our own words: eager, votes stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def keep(module: nn.Module, given: dict[str, Any]) -> None:
    """Keep the arguments of a constructor under their names, as published layers do."""
    vars(module).update({name: value for name, value in given.items() if name not in ("self", "dp", "__class__")})


class _Plain(nn.Module):
    """Attributes, initialisation and what follows the votes ``[b, i, m, ..., d]``."""

    def prepare(self, given: dict[str, Any], *lead: int) -> None:
        keep(self, given)
        self.dropout_rate = given["dp"]
        in_d, out_n, out_d = self.in_d_capsules, self.out_n_capsules, self.out_d_capsules
        side, matrix_pose = math.isqrt(in_d), self.matrix_pose
        inner = side if matrix_pose else in_d
        self.weight_init_const = math.sqrt(out_n / (inner * math.prod(lead)))
        shape = (*lead, side, side, out_n) if matrix_pose else (*lead, in_d, out_n, out_d)
        self.w = nn.Parameter(self.weight_init_const * torch.randn(shape))
        self.nonlinear_act = nn.LayerNorm(out_d)
        self.drop = nn.Dropout(self.dropout_rate)
        self.scale = out_d**-0.5
        if matrix_pose:
            self.sqrt_d = side

    def settle(self, votes: Tensor, parents: Tensor | None) -> Tensor:
        """``votes [b, h, w, i, m, d]`` to parents ``[b, m, h, w, d]``."""
        if parents is None:
            shares = torch.softmax(torch.zeros(votes.shape[:-1], dtype=votes.dtype), -1)
        else:
            agreement = (votes * parents.permute(0, 2, 3, 1, 4)[:, :, :, None]).sum(-1)
            shares = torch.softmax(agreement * self.scale, -1)
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-10)
        sums = (shares[..., None] * votes).sum(3)  # [b, h, w, m, d]
        sums = self.drop(sums)
        if sums.shape[-1] != 1:
            sums = self.nonlinear_act(sums)
        return sums.permute(0, 3, 1, 2, 4)


class CapsuleFC(_Plain):
    def __init__(self, in_n_capsules, in_d_capsules, out_n_capsules, out_d_capsules, matrix_pose, dp):
        super().__init__()
        self.prepare(locals(), in_n_capsules)

    def forward(self, input, num_iter, next_capsule_value=None):
        if input.dim() == 5:
            input = input.reshape(input.shape[0], -1, input.shape[-1])
        if self.matrix_pose:
            poses = input.unflatten(-1, (self.sqrt_d, self.sqrt_d))
            votes = torch.einsum("bnax,nxdm->bnmad", poses, self.w).flatten(-2)
        else:
            votes = torch.einsum("bna,namd->bnmd", input, self.w)
        parents = None if next_capsule_value is None else next_capsule_value[:, :, None, None]
        return self.settle(votes[:, None, None], parents)[:, :, 0, 0]


class CapsuleCONV(_Plain):
    def __init__(
        self, in_n_capsules, in_d_capsules, out_n_capsules, out_d_capsules, kernel_size, stride, matrix_pose, dp,
        coordinate_add=False, mixed_windows=False,
    ):  # fmt: skip
        super().__init__()
        self.prepare(locals(), kernel_size, kernel_size, in_n_capsules)

    def forward(self, input, num_iter, next_capsule_value=None):
        seen = input.unfold(2, self.kernel_size, self.stride).unfold(3, self.kernel_size, self.stride)  # b n h w d k l
        if self.mixed_windows:  # the first commit of the authors' code has d, h, w in memory, and views it as h, w, d
            b, n, h, w, d, k, l = seen.shape
            mixed = seen.permute(0, 1, 5, 6, 4, 2, 3).reshape(b, n, k, l, h, w, d)
            seen = mixed.permute(0, 1, 4, 5, 6, 2, 3)
        if self.matrix_pose:
            poses = seen.unflatten(4, (self.sqrt_d, self.sqrt_d))
            votes = torch.einsum("bnhwaxkl,klnxdm->bhwnklmad", poses, self.w).flatten(-2)
        else:
            votes = torch.einsum("bnhwakl,klnamd->bhwnklmd", seen, self.w)
        return self.settle(votes.flatten(3, 5), next_capsule_value)


def agree(
    votes: Tensor, logits: Tensor, iterations: int, dim: int, eps: float = 1e-30, constant: Tensor | None = None,
    vector: int | None = -1,
) -> Tensor:  # fmt: skip
    """Dynamic routing of votes ``[b, i, j, d]`` from logits ``[b, i, j]``, whose softmax runs over ``dim``; all but the
    last sum, and the agreement, are over ``constant`` where it is given. Logits ``[1, i, j]`` get the batch's mean.
    ``vector`` is the squash's dimension of ``[b, j, d]``, None: of every number by itself."""
    constant = votes if constant is None else constant
    for iteration in range(1, iterations + 1):
        given = votes if iteration == iterations else constant
        sums = (logits.softmax(dim)[..., None] * given).sum(1)
        square = sums.square() if vector is None else sums.square().sum(vector, keepdim=True)
        parents = sums * square / (1 + square) / (square.sqrt() + eps)
        agreement = (constant * parents[:, None]).sum(-1)
        logits = logits + (agreement.mean(0, keepdim=True) if len(logits) == 1 else agreement)
    return parents


class DenseCapsule(nn.Module):
    """Guo's class layer: dynamic routing whose coefficients are found on votes cut off from the gradient."""

    def __init__(self, in_num_caps: int, in_dim_caps: int, out_num_caps: int, out_dim_caps: int, routings: int = 3):
        super().__init__()
        keep(self, locals())
        self.weight = nn.Parameter(0.01 * torch.randn(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("jied,bid->bije", self.weight, x)
        return agree(votes, torch.zeros_like(votes[..., 0]), self.routings, 2, 1e-8, votes.detach())


class GenerativeMatrixRouting(nn.Module):
    """Heinsen's layer, Algorithm 1 step by step."""

    def __init__(
        self, n_inp, n_out, d_cov, d_inp, d_out, n_iters=3, single_beta=False, p_model="gaussian", eps=1e-5,
        return_dict=False,
    ):  # fmt: skip
        super().__init__()
        keep(self, locals())
        rows = max(1, n_inp)
        self.register_buffer("CONST_one", torch.tensor(1.0))
        self.W = nn.Parameter(torch.randn(rows, n_out, d_inp, d_out) / d_inp)
        self.B = nn.Parameter(torch.zeros(rows, n_out, d_cov, d_out))
        self.beta_use = nn.Parameter(torch.zeros(rows, n_out))
        self.beta_ign = self.beta_use if single_beta else nn.Parameter(torch.zeros(rows, n_out))

    def forward(self, a_inp, mu_inp):
        matrices = self.W.expand(a_inp.shape[-1], -1, -1, -1)
        votes = torch.einsum("ijdh,...icd->...ijch", matrices, mu_inp) + self.B
        parents = votes.shape[-3]
        data = torch.sigmoid(a_inp)[..., None]
        score = mean = variance = votes  # of the iteration before, from the second on
        for iteration in range(self.n_iters):
            if iteration == 0:
                shares = torch.full(votes.shape[:-2], 1 / parents, dtype=votes.dtype)
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
        return score, mean, variance


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
        votes = torch.einsum("bid,jide->bije", x, self.route_weights)
        start = self.route_logits[:, 0, :, 0, 0].T if hasattr(self, "route_logits") else torch.zeros_like(votes[..., 0])
        parents = agree(votes, start.expand(len(x), -1, -1), self.num_iterations, 1)
        return parents.transpose(0, 1)[:, :, None, None]


class ConvCaps(nn.Module):
    """yl-1993's layer: EM routing whose shares are divided by their sum over the parents."""

    def __init__(self, B, C, K, P, stride, iters=3, coor_add=False, w_shared=False):
        super().__init__()
        keep(self, locals())
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
        weights = self.weights[0].unflatten(0, (-1, self.B))
        weights = weights[:1, None] if self.w_shared else weights.unflatten(0, (self.K, self.K))
        weights = weights.expand(*poses.shape[3:5], *weights.shape[2:])
        votes = torch.einsum("bhwklncd,klnmde->bhwklnmce", poses, weights).flatten(-2)
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
        keep(self, locals())
        del self.weight
        self.W = nn.Parameter(0.01 * torch.randn(1, num_caps, in_caps, dim_caps, in_dim))

    weight = property(lambda self: self.W[0])


class DigitCaps(CapsuleLayer):
    """cezannec's layer: gram-ai's with other names, in three iterations."""

    def __init__(self, num_capsules=10, previous_layer_nodes=1152, in_channels=8, out_channels=16):
        super().__init__(num_capsules, previous_layer_nodes, in_channels, out_channels)
        self.previous_layer_nodes, self.in_channels = previous_layer_nodes, in_channels
        del self.route_weights
        self.W = nn.Parameter(torch.randn(num_capsules, previous_layer_nodes, in_channels, out_channels))

    route_weights = property(lambda self: self.W)


class AgreementRouting(nn.Module):
    """Bielski's routing of votes: one iteration more than ``n_iterations``, from learned logits, parents competing."""

    def __init__(self, input_caps, output_caps, n_iterations):
        super().__init__()
        self.n_iterations = n_iterations
        self.b = nn.Parameter(torch.zeros(input_caps, output_caps))

    def forward(self, u_predict: Tensor) -> Tensor:
        return agree(u_predict, self.b.expand(len(u_predict), -1, -1), self.n_iterations + 1, 2)


class CapsLayer(nn.Module):
    """Bielski's layer: makes votes, lets its routing module route them."""

    def __init__(self, input_caps, input_dim, output_caps, output_dim, routing_module):
        super().__init__()
        keep(self, locals())
        self.routing_module = routing_module
        self.weights = nn.Parameter(torch.randn(input_caps, input_dim, output_caps * output_dim))

    def forward(self, caps_output: Tensor) -> Tensor:
        votes = torch.einsum("bid,idn->bin", caps_output, self.weights)
        return self.routing_module(votes.unflatten(-1, (self.output_caps, self.output_dim)))


class _Averaged(nn.Module):
    """Class capsules whose logits are averaged over the batch; ``side`` is the softmax's dimension."""

    iterations: int = 3
    side, vector = 1, None
    units = True  # children are [b, d, i]

    def make(self, given: dict[str, Any], *sizes: int) -> None:
        keep(self, given)
        self.W = nn.Parameter(torch.randn(1, *sizes))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bid,ijed->bije", x.transpose(1, 2) if self.units else x, next(self.parameters())[0])
        logits = torch.zeros_like(votes[:1, ..., 0])
        return agree(votes, logits, self.iterations, self.side, vector=self.vector).unsqueeze(-1)


class AveragedDigits(_Averaged):
    """higgsfield's and jindongwang's ``DigitCaps``."""

    units = False

    def __init__(self, num_capsules=10, num_routes=1152, in_channels=8, out_channels=16):
        super().__init__()
        self.make(locals(), num_routes, num_capsules, out_channels, in_channels)


class AveragedUnits(_Averaged):
    """timomernick's ``CapsuleLayer``, where it routes."""

    vector = 1

    def __init__(self, in_units, in_channels, num_units, unit_size, use_routing):
        super().__init__()
        self.make(locals(), in_channels, num_units, unit_size, in_units)


class AveragedLayer(_Averaged):
    """cedrickchee's ``CapsuleLayer``, where it routes."""

    side, vector = 2, 2
    iterations = property(lambda self: self.num_routing)

    def __init__(self, in_unit, in_channel, num_unit, unit_size, use_routing, num_routing, cuda_enabled):
        super().__init__()
        self.make(locals(), in_channel, num_unit, unit_size, in_unit)
        self.weight = self._parameters.pop("W")


AveragedDigits.__name__, AveragedUnits.__name__, AveragedLayer.__name__ = "DigitCaps", "CapsuleLayer", "CapsuleLayer"


class _Slim(nn.Module):
    """Convolutional capsules of 3D-UCaps: votes of all children stored, routed by cosines."""

    holder, name, kind = "depthwise_conv3d", "conv2d", nn.Conv2d

    def prepare(self, given: dict[str, Any], **options: Any) -> None:
        self.input_dim, self.output_dim, self.num_routing = (
            given[key] for key in ("input_dim", "output_dim", "num_routing")
        )
        votes, shared = nn.Module(), given["share_weight"]
        groups = 1 if shared else self.input_dim
        votes.input_atoms, votes.output_atoms, votes.share_weight = given["input_atoms"], given["output_atoms"], shared
        channels = groups * votes.input_atoms, groups * self.output_dim * votes.output_atoms
        options = {key: given[key] for key in ("kernel_size", "stride", "padding")} | options
        convolution = self.kind(*channels, groups=groups, **options)
        nn.init.normal_(convolution.weight, std=0.1)
        votes.add_module(self.name, convolution)
        shape = (self.output_dim, votes.output_atoms, *[1] * len(convolution.kernel_size))
        self.biases = nn.Parameter(torch.full(shape, 0.1))
        self.add_module(self.holder, votes)

    def forward(self, input_tensor: Tensor) -> Tensor:
        votes = getattr(self, self.holder)
        x = input_tensor.flatten(0, 1) if votes.share_weight else input_tensor.flatten(1, 2)
        made = getattr(votes, self.name)(x)
        made = made.view(len(input_tensor), self.input_dim, self.output_dim, votes.output_atoms, *made.shape[2:])
        logits = torch.zeros_like(made[:, :, :, :1])
        for iteration in range(self.num_routing):
            sums = (made * logits.softmax(2)).sum(1) + self.biases
            if iteration + 1 < self.num_routing:
                logits = logits + torch.cosine_similarity(sums[:, None], made, 3).unsqueeze(3)
        size = torch.linalg.vector_norm(sums, dim=2, keepdim=True)
        return sums / (size + 1e-12) * size**2 / (1 + size**2)


class ConvSlimCapsule2D(_Slim):
    def __init__(
        self, kernel_size, input_dim, output_dim, input_atoms=8, output_atoms=8, stride=2, dilation=1, padding=0,
        num_routing=3, share_weight=True,
    ):  # fmt: skip
        super().__init__()
        self.prepare(locals(), dilation=dilation)


class ConvSlimCapsule3D(_Slim):
    holder, name, kind = "depthwise_conv4d", "conv3d", nn.Conv3d

    def __init__(
        self, kernel_size, input_dim, output_dim, input_atoms=8, output_atoms=8, stride=2, padding=0, dilation=1,
        num_routing=3, share_weight=True,
    ):  # fmt: skip
        super().__init__()
        self.prepare(locals(), dilation=dilation)


class DeconvSlimCapsule2D(_Slim):
    holder, name, kind = "depthwise_deconv3d", "deconv2d", nn.ConvTranspose2d

    def __init__(
        self, kernel_size, input_dim, output_dim, input_atoms=8, output_atoms=8, stride=2, padding=0, num_routing=3,
        share_weight=True,
    ):  # fmt: skip
        super().__init__()
        self.prepare(locals())


class DeconvSlimCapsule3D(DeconvSlimCapsule2D):
    holder, name, kind = "depthwise_deconv4d", "deconv3d", nn.ConvTranspose3d
