"""The authors' two layers and a network of them in our own words: eager, votes stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class _Plain(nn.Module):
    """Attributes, initialisation and what follows the votes ``[b, i, m, ..., d]``."""

    def prepare(self, lead: tuple[int, ...], sizes: tuple[int, int, int, int], matrix_pose: bool, dp: float) -> None:
        self.in_n_capsules, self.in_d_capsules, self.out_n_capsules, self.out_d_capsules = sizes
        self.matrix_pose, self.dropout_rate = matrix_pose, dp
        _, in_d, out_n, out_d = sizes
        side = math.isqrt(in_d)
        inner = side if matrix_pose else in_d
        self.weight_init_const = math.sqrt(out_n / (inner * math.prod(lead)))
        shape = (*lead, side, side, out_n) if matrix_pose else (*lead, in_d, out_n, out_d)
        self.w = nn.Parameter(self.weight_init_const * torch.randn(shape))
        self.nonlinear_act = nn.LayerNorm(out_d)
        self.drop = nn.Dropout(dp)
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
        sizes = (in_n_capsules, in_d_capsules, out_n_capsules, out_d_capsules)
        self.prepare((in_n_capsules,), sizes, matrix_pose, dp)

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
        self,
        in_n_capsules,
        in_d_capsules,
        out_n_capsules,
        out_d_capsules,
        kernel_size,
        stride,
        matrix_pose,
        dp,
        coordinate_add=False,
        mixed_windows=False,
    ):
        super().__init__()
        self.first_commit = mixed_windows
        self.kernel_size, self.stride, self.coordinate_add = kernel_size, stride, coordinate_add
        sizes = (in_n_capsules, in_d_capsules, out_n_capsules, out_d_capsules)
        self.prepare((kernel_size, kernel_size, in_n_capsules), sizes, matrix_pose, dp)

    def forward(self, input, num_iter, next_capsule_value=None):
        seen = input.unfold(2, self.kernel_size, self.stride).unfold(3, self.kernel_size, self.stride)  # b n h w d k l
        if self.first_commit:  # the first commit of the authors' code has d, h, w in memory, and views it as h, w, d
            b, n, h, w, d, k, l = seen.shape
            mixed = seen.permute(0, 1, 5, 6, 4, 2, 3).reshape(b, n, k, l, h, w, d)
            seen = mixed.permute(0, 1, 4, 5, 6, 2, 3)
        if self.matrix_pose:
            poses = seen.unflatten(4, (self.sqrt_d, self.sqrt_d))
            votes = torch.einsum("bnhwaxkl,klnxdm->bhwnklmad", poses, self.w).flatten(-2)
        else:
            votes = torch.einsum("bnhwakl,klnamd->bhwnklmd", seen, self.w)
        return self.settle(votes.flatten(3, 5), next_capsule_value)


class Network(nn.Module):
    """A network as a script of that code builds and runs it: concurrent routing over a ModuleList."""

    def __init__(self, conv=CapsuleCONV, fc=CapsuleFC, num_routing=2, matrix_pose=True, dp=0.0):
        super().__init__()
        self.num_routing = num_routing
        self.pre = nn.Conv2d(1, 4 * 4, 3, stride=2, padding=1)
        self.capsule_layers = nn.ModuleList(
            [
                conv(4, 4, 3, 4, kernel_size=3, stride=2, matrix_pose=matrix_pose, dp=dp, coordinate_add=False),
                fc(3 * 3 * 3, 4, 6, 4, matrix_pose=matrix_pose, dp=dp),
                fc(6, 4, 5, 4, matrix_pose=matrix_pose, dp=dp),
            ]
        )
        self.final_fc = nn.Linear(4, 1)

    def forward(self, images):
        features = self.pre(images).permute(0, 2, 3, 1)
        values = [features.reshape(*features.shape[:3], 4, 4).permute(0, 3, 1, 2, 4)]
        for layer in self.capsule_layers:
            values.append(layer.forward(values[-1], 0))
        for turn in range(self.num_routing - 1):
            news = [layer.forward(values[k], turn, values[k + 1]) for k, layer in enumerate(self.capsule_layers)]
            values = [values[0], *news]
        return self.final_fc(values[-1]).squeeze(-1)
