"""A plugin for pytest -p: tests are collected as on a GPU (bench/gpu.sh rehearse); none can run."""

import torch

from fastcaps import backends

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
backends._torch_problem = lambda: ""  # the build of torch does not matter
