# %% [markdown]
# # A custom training loop with mixed precision and torch.compile
#
# Capsule layers are ordinary modules: they work with autocast, `torch.compile` and any training loop. This example
# trains the same network on scikit-learn's digits three times: in float32, under autocast, and compiled under autocast.
# It takes about half a minute on a laptop's CPU, mostly for compilation, and uses a GPU if there is one.

# %%
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from fastcaps import CapsNet
from fastcaps.nn import CapsuleSpec

device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device)[:, None] / 8 - 1
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:1792].to(device)
labels = torch.tensor(digits.target, device=device)
batches = list(zip(images[order].split(64), labels[order].split(64), strict=True))
train_batches, test_batches = batches[:22], batches[22:]


def network():
    return CapsNet.build(
        nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        in_channels=1,
        image_size=8,
        capsules=8,
        dim=16,
        hidden=[CapsuleSpec(8, kernel_size=3)],
        classes=10,
    )


# %% [markdown]
# ## Autocast and torch.compile
#
# **Autocast** runs convolutions, linear layers and routings in bfloat16; parameters stay float32. bfloat16 needs no
# gradient scaler. float16 does: `torch.amp.GradScaler`, as for any other layer. Autocast helps with large layers, most
# of all on a GPU. This small network is slower with it on a CPU, as the times below show: casting costs more than it
# saves.
#
# **`torch.compile`** compiles the whole network as one graph (`fullgraph=True`). A routing is one op in this graph and
# keeps its kernels; the compiler fuses the layers around it. Only those layers can become faster.


# %%
def train(title, compiled=False, autocast=False, epochs=4):
    torch.manual_seed(0)  # the same initial weights for all
    net = network().to(device)
    run = torch.compile(net, fullgraph=True) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=epochs * len(train_batches))
    losses, times = [], []
    for _ in range(epochs):
        for images, labels in train_batches:
            start = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(run(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            times.append(time.perf_counter() - start)
    net.eval()
    with torch.no_grad():
        right = [(net(images).argmax(1) == labels).float().mean() for images, labels in test_batches]
    median = sorted(times)[len(times) // 2]
    print(
        f"{title:<22} loss {losses[0]:.3f} to {losses[-1]:.3f}, {torch.stack(right).mean():.1%} of test digits right, "
        f"first step {times[0]:.2f} s, later ones {1000 * median:.1f} ms"
    )
    return losses, torch.stack(right).mean().item()


# %% [markdown]
# ## Three runs
#
# The first loss is the same in all runs, to the two or three digits of bfloat16. All three reach about the same
# accuracy. Only the first step of the compiled run takes many seconds.

# %%
plain = train("float32")
mixed = train("bfloat16", autocast=True)
both = train("bfloat16, compiled", autocast=True, compiled=True)
