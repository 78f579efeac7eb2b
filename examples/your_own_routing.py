# %% [markdown]
# # A gallery of routings
#
# A routing is a loop that calls four methods of its votes: `agreement`, `distance`, `sum` and `square_sum`. Everything
# else is plain PyTorch, on one value for each child and parent. Here are eleven published routings; the tests compare
# them with their formulas over stored votes. Copy one and change it: [Your own routing](../docs/routings/your-own.md)
# explains how.

# %%
import gzip
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

import fastcaps
from fastcaps import Votes
from fastcaps.functional import Capsules, squash, unit

POSE = (-2, -1)  # the two dimensions of a pose, C x E


def gates(votes, activations):
    """Return each window's activations, [B, *grid, I, 1]; without activations, 1 for children and 0 for padding."""
    return (votes.present if activations is None else votes.unfold(activations))[..., None]


def mass(r):
    """Return the sum of each parent's coefficients, sum_i r_im, in the layout of poses: [B, M, *grid, 1, 1]."""
    return r.sum(-2).movedim(-1, 1)[..., None, None]


def beside_children(values):
    """Return values of parents [B, M, *grid, 1, 1] in the layout of coefficients: [B, *grid, 1, M]."""
    return values[..., 0, 0].movedim(1, -1).unsqueeze(-2)


# %% [markdown]
# ## Cosine agreement
#
# A bias is added to the parents' sums (SegCaps, LaLonde and Bagci 2018); the agreement is a cosine (3D-UCaps, Nguyen
# et al. 2021). The distance from 0 is a vote's squared length. The bias is `[M, C, E]`, on grids `[M, 1, 1, C, E]`.


# %%
def cosine_routing(votes, bias=0.0, iterations=3):
    lengths, logits = votes.distance(0.0).clamp(min=1e-16).sqrt(), votes.zero_logits()
    for _ in range(iterations - 1):
        parents = votes.sum(logits.softmax(-1)) + bias
        logits = logits + votes.agreement(unit(parents, POSE)) / lengths
    return squash(votes.sum(logits.softmax(-1)) + bias, POSE)


# %% [markdown]
# ## Other competitions
#
# Dynamic routing (Sabour et al. 2017) with other functions from logits to coefficients. Top-k keeps the k parents that
# agree most (Shazeer et al. 2017). Sparsemax returns the nearest point of the simplex, where most coefficients are 0
# (Martins and Astudillo 2016). Sinkhorn's iteration makes the coefficients of all parents have the same sum (Cuturi
# 2013); use it on sets only, because it counts padding. The last function averages logits over the batch, as
# higgsfield, timomernick and their copies do; there the children compete.


# %%
def agreement_routing(votes, compete, iterations=3):
    parents, logits = squash(votes.sum(1 / votes.parents), POSE), 0.0
    for _ in range(iterations - 1):
        logits = logits + votes.agreement(parents)
        parents = squash(votes.sum(compete(logits)), POSE)
    return parents


def top_k(logits, k=2):
    largest = logits.topk(k, -1)
    return torch.full_like(logits, -torch.inf).scatter(-1, largest.indices, largest.values).softmax(-1)


def sparsemax(logits):
    ordered = logits.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    counts = torch.arange(1, logits.shape[-1] + 1, device=logits.device)
    support = (counts * ordered > excess).sum(-1, keepdim=True)
    return (logits - excess.gather(-1, support - 1) / support).clamp(min=0)


def sinkhorn(logits, rounds=5):
    for _ in range(rounds):
        logits = logits.log_softmax(-2).log_softmax(-1)
    return logits.exp()


def batch_averaged_routing(votes, iterations=3):
    parents, logits = squash(votes.sum(1 / votes.count), POSE), 0.0
    for _ in range(iterations - 1):
        logits = logits + votes.agreement(parents).mean(0)
        parents = squash(votes.sum(logits.softmax(-2)), POSE)
    return parents


# %% [markdown]
# ## Competition over positions
#
# In DeepCaps (Rajasegaran et al. 2019) parents of all types *at all positions* compete for a child type; a convolution
# makes its votes (`Votes.in_blocks`). In EM routing (Hinton et al. 2018) parents of all types *in all windows that hold
# a child* compete for it: `fold` sums over these windows, and `unfold` copies the sum back to each of them.


# %%
def deepcaps_routing(votes, bias=0.0, iterations=3):
    logits = votes.zero_logits()
    for _ in range(iterations):
        every = logits.movedim(-2, 1)  # [B, I, Ho, Wo, M]
        r = every.flatten(2).softmax(-1).reshape(every.shape).movedim(1, -2)
        parents = squash(votes.sum(r) + bias, POSE)
        logits = logits + votes.agreement(parents)
    return parents


def softmax_over_windows(votes, logits):
    most = votes.unfold(votes.fold(logits.detach().amax(-1), "amax"))
    weights = (logits - most[..., None]).exp() * votes.present[..., None]
    return weights / votes.unfold(votes.fold(weights.sum(-1))).clamp(min=1)[..., None]  # at least 1 but in padding


def em_routing(votes, activations, beta_u, beta_a, iterations=3, inverse_temperature=0.01, eps=1e-6):
    gate, logits = gates(votes, activations), votes.zero_logits()
    for iteration in range(iterations):
        r = gate * softmax_over_windows(votes, logits)
        mean = votes.sum(r) / mass(r)
        variance = votes.square_sum(r, mean) / mass(r) + eps
        cost = ((beta_u + variance.log() / 2) * mass(r)).sum(POSE, keepdim=True)
        evidence = inverse_temperature * (1 - 0.95 ** (iteration + 1)) * (beta_a - cost)
        log_weight = F.logsigmoid(evidence) - variance.log().sum(POSE, keepdim=True) / 2
        logits = beside_children(log_weight) - votes.distance(mean, 1 / variance) / 2
    return Capsules(mean, evidence.sigmoid()[..., 0, 0])


# %% [markdown]
# ## Variational Bayes
#
# Ribeiro et al. (2020) with diagonal covariance: a Dirichlet distribution over the parents, a Gaussian and a Wishart
# distribution for each of them. A layer needs a method `route`, and a constructor if it has further modules.


# %%
class VariationalBayesRouting(fastcaps.nn.RoutingLayer):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.norm_poses, self.norm_activations = (nn.BatchNorm1d(self.out_capsules, affine=False) for _ in range(2))

    def route(self, votes, activations, iterations):
        gate, logits, size = gates(votes, activations), votes.zero_logits(), math.prod(votes.pose_shape)
        places = torch.arange(size, device=votes.device).view(votes.pose_shape)
        for _ in range(iterations):
            r = gate * logits.softmax(-1)
            n = mass(r)
            alpha, kappa, nu = 1 + n, 1 + n, size + 1 + n  # priors: alpha0 = kappa0 = 1, nu0 = size + 1, mean 0
            own = votes.sum(r) / n
            mean = n / kappa * own
            spread = 1 + votes.square_sum(r, own) + n / kappa * own.square()
            digammas = ((nu - places) / 2).digamma()
            log_precision = (digammas - spread.log()).sum(POSE, keepdim=True) + size * math.log(2)
            log_share = alpha.digamma() - alpha.sum(1, keepdim=True).digamma()
            logits = beside_children(log_share + (log_precision - size / kappa) / 2)
            logits = logits - votes.distance(mean, nu / spread) / 2
        entropy = size / 2 * math.log(2 * math.pi * math.e) - log_precision / 2
        active = self.norm_activations(-(log_share.exp() * entropy).flatten(2)).sigmoid()
        return Capsules(self.norm_poses(mean.flatten(2)).view_as(mean), active.view(mean.shape[:-2]))


# %% [markdown]
# ## No iterations
#
# In self-routing (Hahn, Pyeon, Kim 2019) a linear layer computes a child's coefficients from its pose; its logits are
# votes with one component. Efficient-CapsNet (Mazzia, Salvetti, Chiaberge 2021) compares a child's votes once with the
# sum of all votes, and adds a learned prior after the softmax.


# %%
class SelfRouting(fastcaps.nn.RoutingLayer):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.router = nn.Parameter(torch.zeros(self.groups, self.out_capsules, self.in_dim, 1))
        self.router_bias = nn.Parameter(torch.zeros(self.own_children, self.out_capsules, 1, 1))

    def route(self, votes, activations):
        poses = votes.children.flatten(-2).unsqueeze(-2)  # one row
        logits = Votes(poses, self.router, self.router_bias, votes.window).agreement(1.0)
        r = gates(votes, activations) * logits.softmax(-1)
        n = mass(r)
        return Capsules(votes.sum(r) / n, (n / n.sum(1, keepdim=True))[..., 0, 0])


class SelfAttentionRouting(fastcaps.nn.RoutingLayer):
    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.prior = nn.Parameter(torch.zeros(self.own_children, self.out_capsules))

    def route(self, votes):
        logits = votes.agreement(votes.sum(1.0)) / math.sqrt(self.out_dim)
        parents = votes.sum(logits.softmax(-1) + self.prior)
        return -torch.expm1(-parents.norm(dim=POSE, keepdim=True)) * unit(parents, POSE)


# %% [markdown]
# ## Slot attention
#
# In Locatello et al. (2020) slots compete for the inputs, and a GRU updates each slot from the weighted mean of the
# values. Keys and values are votes without matrices. The layer also returns the last logits: SPOT (Kakogeorgiou et al.
# 2024) trains them by `cross_entropy(logits.mT, masks)`. Like SPOT, this one learns the initial slots.


# %%
class SlotAttention(nn.Module):
    def __init__(self, slots, dim, iterations=3):
        super().__init__()
        self.start, self.iterations = nn.Parameter(torch.randn(slots, dim)), iterations
        self.norm_inputs, self.norm_slots, self.norm_mlp = (nn.LayerNorm(dim) for _ in range(3))
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, inputs):
        inputs, (many, dim) = self.norm_inputs(inputs).unsqueeze(-2), self.start.shape
        keys, values = (Votes(to(inputs), None, parents=many) for to in (self.to_k, self.to_v))
        slots = self.start.expand(len(inputs), -1, -1)
        for _ in range(self.iterations):
            logits = keys.agreement(self.to_q(self.norm_slots(slots)).unsqueeze(-2) / math.sqrt(dim))
            r = logits.softmax(-1) + 1e-8
            found = values.sum(r / r.sum(-2, keepdim=True))
            slots = self.gru(found.reshape(-1, dim), slots.reshape(-1, dim)).view_as(slots)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots, logits


# %% [markdown]
# ## Train a new routing
#
# Cosine agreement, where each child belongs to its two best parents. The lengths of the parents are the class logits.
# Two epochs of MNIST reach more than 98 % of the test digits, in two minutes on a laptop's CPU:
# `python examples/your_own_routing.py FOLDER_OF_MNIST`.


# %%
class CosineTopK(fastcaps.nn.RoutingLayer):
    def route(self, votes, iterations):
        lengths = votes.distance(0.0).clamp(min=1e-16).sqrt()
        parents = votes.sum(1 / votes.parents)
        for _ in range(iterations - 1):
            cosine = votes.agreement(unit(parents, POSE)) / lengths
            parents = votes.sum(top_k(8 * cosine))
        return parents


def train(digits, unseen, epochs=2):
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(fastcaps.PrimaryCapsules(64, 8, 16, kernel_size=3), CosineTopK(8 * 3 * 3, 10, in_dim=16, out_dim=16)),
    )
    loader = torch.utils.data.DataLoader(digits, 64, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * len(loader))
    for images, labels in (batch for _ in range(epochs) for batch in loader):
        optimizer.zero_grad()
        F.cross_entropy(net(images).norm(dim=-1), labels).backward()
        optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        batches = torch.utils.data.DataLoader(unseen, 500)
        right = [net(images).norm(dim=-1).argmax(1) == labels for images, labels in batches]
    return torch.cat(right).double().mean().item()


def mnist(folder, part):
    """Return a part of MNIST, "train" or "t10k", from its files."""

    def read(name, header):
        with gzip.open(f"{folder}/{part}-{name}-ubyte.gz") as file:
            return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)

    images = (read("images-idx3", 16).view(-1, 1, 28, 28) / 255 - 0.13) / 0.31
    return torch.utils.data.TensorDataset(images, read("labels-idx1", 8).long())


if __name__ == "__main__" and len(sys.argv) == 2:
    right = train(*(mnist(sys.argv[1], part) for part in ("train", "t10k")))
    print(f"{right:.2%} of test digits right")
