# %% [markdown]
# # Texts of different length in one batch
#
# Heinsen's routing accepts any number of children. As for a transformer, short texts are padded, and a mask marks the
# padding: here a score of minus infinity. This example trains a small classifier on short texts, tests it on longer
# ones, and checks that padding has no effect. It takes a few seconds on a laptop's CPU.

# %%
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fastcaps

torch.manual_seed(0)

# %% [markdown]
# ## The texts
#
# A table of 300 words replaces a frozen transformer. (`fastcaps_lab.data` loads real phrases, such as `sst5`, with the
# embeddings of a local transformer.) Every word belongs to one of five topics at random. A text's class is the topic of
# half of its words; the other half are arbitrary words.

# %%
TOPICS, WIDTH = 5, 32
embeddings = torch.randn(300, WIDTH)
topic_of = torch.randint(TOPICS, (300,))


def texts(count, shortest, longest):
    """Return embedded texts, each [length, WIDTH], and their classes."""
    classes = torch.randint(TOPICS, (count,))
    made = []
    for topic in classes:
        length = int(torch.randint(shortest, longest + 1, ()))
        own = (topic_of == topic).nonzero()[:, 0]
        words = torch.randint(300, (length,))
        words[: (length + 1) // 2] = own[torch.randint(len(own), ((length + 1) // 2,))]
        made.append(embeddings[words])
    return made, classes


def batch(list_of_texts):
    """Return a padded tensor [B, longest, WIDTH] and a mask [B, longest], True for text."""
    lengths = torch.tensor([len(text) for text in list_of_texts])
    padded = pad_sequence(list_of_texts, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


# %% [markdown]
# ## The network
#
# The network routes words to 16 parents, and these to the classes. With `None` children, all words share their
# matrices, for any number of words. As in the author's networks, a linear layer scores each word; the mask
# overrides it.


# %%
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)
        self.words = fastcaps.HeinsenRouting(None, 16, WIDTH, 8, pose="vector", bias=True)
        self.classes = fastcaps.HeinsenRouting(16, TOPICS, 8, 8, pose="vector", bias=True)

    def forward(self, embedded, mask):
        scores = self.score(embedded)[..., 0].masked_fill(~mask, -torch.inf)
        poses, scores, _ = self.words(embedded, scores)
        return self.classes(poses, scores).scores


net = Classifier()

# %% [markdown]
# ## Training on short texts, testing on long ones
#
# Training uses texts of 4 to 20 words, the test also uses 20 to 100 words. A guess is right one time in five. A long
# text has more words of its topic, so the second accuracy is higher, although training has no text of that length.

# %%
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(101):
    made, classes = texts(64, 4, 20)
    loss = nn.functional.cross_entropy(net(*batch(made)), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step:>3}: loss {loss.item():.3f}")

with torch.no_grad():
    for shortest, longest in ((4, 20), (20, 100)):
        made, classes = texts(500, shortest, longest)
        right = (net(*batch(made)).argmax(1) == classes).float().mean()
        print(f"{shortest} to {longest} words: {right:.0%} right")

# %% [markdown]
# ## Padding has no effect
#
# The trained network reads three texts, each alone and then all in one batch. Only the order of sums differs: expect
# 1e-5 or less. Then we fill the padding with values a million times too large: the results have the same bits, and the
# gradients of the padding are 0.

# %%
some = [texts(1, length, length)[0][0] for length in (4, 11, 60)]
alone = torch.cat([net(*batch([text])) for text in some])
padded, mask = batch(some)
together = net(padded, mask)
print(
    f"logits up to {together.abs().max():.1f}; alone and in a batch they differ by {(alone - together).abs().max():.1e}"
)

dirty = padded.masked_fill(~mask[..., None], 1e6).requires_grad_()
logits = net(dirty, mask)
logits.square().sum().backward()
print("other padding, same bits:", torch.equal(logits, together))
print("largest gradient of padding:", dirty.grad[~mask].abs().max().item())
