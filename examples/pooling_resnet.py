# %% [markdown]
# # Routing as pooling in a ResNet
#
# A residual network ends with an average over the map. Zhao and Huang (2019) replace it by a routing: positions that
# agree with the others get more weight. It has no parameters, so you change one line and every checkpoint still loads.
# This example trains a small network in torchvision's style on scikit-learn's digits, a few seconds on one core.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn

import fastcaps

torch.set_num_threads(1)  # small maps: waiting threads would take longer than the work

# %% [markdown]
# ## The network


# %%
class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = BasicBlock(16, 16)
        self.layer2 = BasicBlock(16, 32, stride=2)
        self.layer3 = BasicBlock(32, 64)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 10)

    def maps(self, x):
        return self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))

    def forward(self, x):
        return self.fc(self.avgpool(self.maps(x)).flatten(1))


# %% [markdown]
# ## The one line
#
# With capsules of 16 channels, the 64 channels are four groups, and each group's parent pools its 4 × 4 positions. With
# sharpness 0 this is average pooling, so the line below prints `True`.

# %%
torch.manual_seed(0)
average, same, images = ResNet().eval(), ResNet().eval(), torch.rand(4, 1, 8, 8)
same.avgpool = fastcaps.RoutingPool2d(16, sharpness=0.0)  # the one line
same.load_state_dict(average.state_dict())
print("sharpness 0 equals average pooling in every bit:", torch.equal(same(images), average(images)))

# %% [markdown]
# ## Training
#
# Both networks train for three epochs from the same initial weights. Expect about 97 % of the test digits from both:
# these small images have no background that routing could ignore. For the papers' results see
# [Reproduction](../lab/docs/reproduction.md).

# %%
digits = load_digits()
pixels, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(digits.target)
train_set = torch.utils.data.TensorDataset(pixels[360:], labels[360:])
images, labels = pixels[:360], labels[:360]


def train(net, epochs=3):
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    torch.manual_seed(1)  # the same order of images
    for _ in range(epochs):
        for inputs, targets in torch.utils.data.DataLoader(train_set, 64, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


accuracy = {}
for name, pool in (("average", nn.AdaptiveAvgPool2d(1)), ("routing", fastcaps.RoutingPool2d(16, sharpness=5.0))):
    net = ResNet()
    net.avgpool = pool
    net.load_state_dict(average.state_dict())
    accuracy[name] = train(net)
    print(f"{name} pooling: {accuracy[name]:.1%} of test digits right")

# %% [markdown]
# ## The effect of routing
#
# We negate one position of every map, so that it agrees with no other position. Average pooling weights it by 1/16.
# Routing gives it less weight, so its result changes less.

# %%
with torch.no_grad():
    clean = net.maps(images)
    odd = clean.clone()
    odd[:, :, 0, 0] *= -1
    moved = {}
    for name, pool in (("average", nn.AdaptiveAvgPool2d(1)), ("routing", net.avgpool)):
        moved[name] = ((pool(odd) - pool(clean)).norm() / pool(clean).norm()).item()
        print(f"{name} pooling changes by {moved[name]:.1%} of its length")
    share = net.avgpool(odd, return_coefficients=True).coefficients[:, 0, 0, 0].mean().item()
print(f"the odd position weighs {share:.4f} instead of {1 / 16:.4f}")
