# %% [markdown]
# # A training loop of your own, with mixed precision and torch.compile
#
# Capsule layers are ordinary modules: autocast, `torch.compile` and your own loop take them as they are. This example
# trains the same network on scikit-learn's digits three times: plainly, under autocast, and compiled under autocast.
# It runs in about half a minute on a laptop's CPU, most of it compilation; a GPU is used where there is one.

# %%
import time

import torch
from torch.nn import functional as F

from fastcaps import data, models

device = "cuda" if torch.cuda.is_available() else "cpu"
splits = data.load("digits")


def batches(images, size):
    """The images and labels of a data set in batches, on the device; what is left over at the end is left out."""
    loader = torch.utils.data.DataLoader(images, size, drop_last=True)
    return [(image.to(device), label.to(device)) for image, label in loader]


train_batches, test_batches = batches(splits.train, 64), batches(splits.test, 64)

# %% [markdown]
# ## What the two lines do
#
# **Autocast** hands convolutions, linear layers and routings bfloat16. The parameters stay float32. bfloat16 needs no
# scaler; the gradients of float16 do: `torch.amp.GradScaler`, as around any other layer. It pays with large layers, on
# a GPU above all. A network this small is slower with it on a CPU, as the times below show: casting costs more than it
# saves.
#
# **`torch.compile`** takes the whole network as one graph, `fullgraph=True`: a routing is one op in it, with kernels
# of its own, and what stands around it is fused. A routing does not gain by it; the layers around it may.


# %%
def train(title, compiled=False, autocast=False, epochs=4):
    torch.manual_seed(0)  # the same start for all
    net = models.create("digits", device=device)
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
        f"{title:<22} loss {losses[0]:.3f} to {losses[-1]:.3f}, {torch.stack(right).mean():.1%} of new digits right, "
        f"first step {times[0]:.2f} s, later ones {1000 * median:.1f} ms"
    )
    return losses, torch.stack(right).mean().item()


# %% [markdown]
# ## Three runs
#
# Look at the first loss: it is the same number three times but for bfloat16's two or three digits. All three end at
# about the same share of right digits. The first step of the compiled run takes many seconds, the later ones do not.

# %%
plain = train("float32")
mixed = train("bfloat16", autocast=True)
both = train("bfloat16, compiled", autocast=True, compiled=True)
