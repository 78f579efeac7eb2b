"""EncapNet (Li et al., 2018): routing approximated in one pass, by convolutions over capsules in channels.

It has no routing, but layers; the feedback-agreement unit and its Sinkhorn divergence; networks
(``fastcaps_lab.models.create("li-encapnet-v1")``). lab/docs/encapnet.md says what follows the paper, and what its
authors' code.
"""

from fastcaps_lab.encapnet.cap_conv import CapConv2d, CapFC
from fastcaps_lab.encapnet.feedback import FeedbackAgreement
from fastcaps_lab.encapnet.networks import EncapNet, EncapNetConfig
from fastcaps_lab.encapnet.sinkhorn import SinkhornDivergence

__all__ = ["CapConv2d", "CapFC", "EncapNet", "EncapNetConfig", "FeedbackAgreement", "SinkhornDivergence"]
