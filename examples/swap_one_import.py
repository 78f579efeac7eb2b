# %% [markdown]
# # Swap one import
#
# A dynamic routing script in the style of public repositories, before and after changing one import. Results are the
# same; it uses less time and memory. It takes a few seconds on a laptop's CPU.

# %%
import time

import torch
from torch import nn

import fastcaps

torch.manual_seed(0)

# %% [markdown]
# ## Before
#
# The class layer of such a repository (for example in `capsulelayers.py`) stores the vote of every child for every
# parent, here 1,152 × 10 votes of 16 values per image, and every iteration reads them again.


# %%
def squash(sums):
    length = sums.norm(dim=-1, keepdim=True)
    return length**2 / (1 + length**2) * sums / (length + 1e-8)


class DenseCapsule(nn.Module):
    def __init__(self, in_num_caps, in_dim_caps, out_num_caps, out_dim_caps, routings=3):
        super().__init__()
        self.in_num_caps, self.in_dim_caps = in_num_caps, in_dim_caps
        self.out_num_caps, self.out_dim_caps = out_num_caps, out_dim_caps
        self.routings = routings
        self.weight = nn.Parameter(0.01 * torch.randn(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))

    def forward(self, x):
        votes = torch.einsum("jied,bid->bjie", self.weight, x)
        still = votes.detach()  # gradients only through the last iteration
        logits = torch.zeros(votes.shape[:-1], device=x.device)
        for _ in range(self.routings - 1):
            parents = squash((logits.softmax(dim=1).unsqueeze(-1) * still).sum(dim=2))
            logits = logits + (still * parents.unsqueeze(2)).sum(dim=-1)
        return squash((logits.softmax(dim=1).unsqueeze(-1) * votes).sum(dim=2))


# The network uses the name `DenseCapsule`, wherever it is imported from.
class CapsuleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 9)
        self.primary = nn.Conv2d(32, 256, 9, stride=2)
        self.digits = DenseCapsule(in_num_caps=1152, in_dim_caps=8, out_num_caps=10, out_dim_caps=16)

    def forward(self, images):
        maps = self.primary(self.conv(images).relu())
        children = squash(maps.unflatten(1, (8, 32)).movedim(1, -1).flatten(1, 3))
        return self.digits(children).norm(dim=-1)


before = CapsuleNet()

# %% [markdown]
# ## After
#
# Change this one line. The same class then uses fastcaps, and the old checkpoint loads: names and shapes of the
# parameters are the same.

# %%
from fastcaps.compat import DenseCapsule  # noqa: F811  instead of: from capsulelayers import DenseCapsule

after = CapsuleNet()
after.load_state_dict(before.state_dict())

# %% [markdown]
# ## Equal results
#
# Both networks take the same three steps on the same images. The losses agree to about six digits, the precision of
# float32.

# %%
images, wanted = torch.rand(16, 1, 28, 28), nn.functional.one_hot(torch.arange(16) % 10, 10).float()
losses = {}
for name, net in (("before", before), ("after", after)):
    optimizer, losses[name] = torch.optim.Adam(net.parameters(), lr=1e-3), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(images), wanted)
        loss.backward()
        optimizer.step()
        losses[name].append(loss.item())
    print(f"{name:>6}: " + "  ".join(f"{loss:.7f}" for loss in losses[name]))

# %% [markdown]
# ## Less time and memory
#
# This times a training step of the class layer, with 64 images. The published layer stores 47 MB of votes and makes
# more tensors of that size; the kernels store no votes. The speed-up depends on the machine.

# %%
children = torch.randn(64, 1152, 8, requires_grad=True)
for name, layer in (("after", after.digits), ("before", before.digits)):
    times = []
    for _ in range(9):
        start = time.perf_counter()
        layer(children).sum().backward()
        times.append(time.perf_counter() - start)
    print(f"{name:>6}: {1000 * sorted(times)[4]:6.1f} ms")

# %% [markdown]
# ## Convert an existing model
#
# `fastcaps.convert` finds the layer in a model, compares both versions on random input, and replaces it. The parameters
# are shared, so the optimizer keeps working. [Papers and public implementations](../docs/relation.md) lists the known
# layers.

# %%
print(fastcaps.convert(before))
