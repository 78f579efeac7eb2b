"""The network of Hinton, Sabour and Frosst (2018), Matrix Capsules with EM Routing, for smallNORB: Figure 1.

A 5 x 5 convolution of stride 2, primary capsules by 1 x 1 convolutions, two convolutional capsule layers of 3 x 3
(strides 2 and 1), and class capsules that see the whole grid with shared matrices and coordinate addition; 32 channels
and 32 types throughout (A = B = C = D = 32). Ours: the pair of images, 32 x 32 pixels each, comes as two channels.

By that text it has 317,194 parameters; the paper and Heinsen's Table 1 say 310K, which we could not reach. (The two
layers of 3 x 3 x 32 x 32 matrices of 4 x 4 are 294,912 of them, the primary capsules 17,952, the class layer 2,560;
with one channel, no biases and no betas it would still be 315,680.)
"""

from __future__ import annotations

from fastcaps.models.layers import Conv
from fastcaps.models.networks import Config, NetworkConfig
from fastcaps.nn.em import EMRouting
from fastcaps.nn.stack import CapsuleSpec

NETWORKS: dict[str, Config] = {
    "hinton-norb": NetworkConfig(
        (Conv(32, 5, stride=2),),
        capsules=32,
        dim=16,
        hidden=(CapsuleSpec(32, kernel_size=3, stride=2), CapsuleSpec(32, kernel_size=3)),
        classes=5,
        image_size=32,
        in_channels=2,
        layer=EMRouting,
        iterations=3,
        primary={"normalize": None},
        class_layer={"kernel_size": "all", "share": True, "options": {"coordinates": True}},
    )
}
