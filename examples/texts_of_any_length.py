# %% [markdown]
# # Texts of different length in one batch
#
# Heinsen's routing takes any number of children. Texts of different length become one batch as they do for a
# transformer: the short ones are padded, and a mask says where. Here the mask is a score: minus infinity is a child
# that is not there. This example trains a small classifier on short texts, tests it on longer ones, and shows that
# padding changes nothing. It runs in a few seconds on a laptop's CPU.

# %%
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fastcaps

torch.manual_seed(0)

# %% [markdown]
# ## The texts
#
# A table of 300 words stands in for a frozen transformer (`fastcaps.data` loads real phrases, `sst5` say, with the
# embeddings of a local one). Every word belongs to one of five topics by chance. A text's class is the topic that
# half of its words come from; the other half are any words.

# %%
TOPICS, WIDTH = 5, 32
embeddings = torch.randn(300, WIDTH)
topic_of = torch.randint(TOPICS, (300,))


def texts(count, shortest, longest):
    """Embedded texts, each [its length, WIDTH], and their classes."""
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
    """One padded tensor [B, longest, WIDTH], and the mask [B, longest] of what is text."""
    lengths = torch.tensor([len(text) for text in list_of_texts])
    padded = pad_sequence(list_of_texts, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


# %% [markdown]
# ## The network
#
# Words to 16 parents, and those to the classes. `None` children: all words share their matrices, however many there
# are. A linear layer gives each word a score, as in the author's networks; the mask overrules it.


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
# Texts of 4 to 20 words in training; 20 to 100 words afterwards. Guessing is right one time in five. A long text says
# more often what it is about, so the second figure is the better one, though no text of such a length was ever
# trained on.

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
# ## Padding changes nothing
#
# The trained network reads three texts, each alone and then all in one batch. Only the order of the sums may differ:
# expect 1e-5 or less. Then the padding is filled with numbers a million times too large; the results stay the same to
# the last bit. No gradient reaches it.

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
